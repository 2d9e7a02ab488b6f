"""Replicas that announce themselves, and the list of all replicas that gateways get.

A replica that announces itself has a lease: the run uses it until the lease ends. Each heartbeat renews the lease. The orchestrator
connects to the address that the replica names, so `AllowedAddresses` limits these addresses.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import structlog

from orchestrator_svc.config import FoundReplicasConfig
from sluice.rpc import SluiceError
from sluice.rpc.access import is_local
from sluice.rpc.channel import UNIX
from sluice.sampling.addresses import canonical, check_address, is_fixed, literal_ip, resolve_targets
from sluice.sampling.pool import ReplicaPool
from sluice.v1 import session_pb2

log = structlog.get_logger(__name__)

_LEAST_SEARCH_S = 0.05
"""Least seconds between two lookups of the announced names."""

AGAIN_S = 10.0
"""Seconds after which the list is sent again, as the contract says."""


@dataclass(frozen=True, slots=True)
class AllowedAddresses:
    """Where replicas that announce themselves may be: the orchestrator connects to what others name.

    Attributes:
        networks: Networks, such as ``10.0.0.0/8``, that such an address must lie in; empty: all networks.
    """

    networks: Sequence[str] = ()

    def check_address(self, target: str, *, from_here: bool) -> None:
        """Check an address that is not a host name.

        Args:
            target: ``IP:port`` or ``unix:PATH``.
            from_here: Whether a process of this machine announced it: only such a process may name a port or a socket of this machine.

        Raises:
            ValueError: if a replica may not be there.
        """
        if target.startswith(UNIX):
            if not from_here:
                raise ValueError(f"{target!r} is a socket of the orchestrator's machine, and you call from another one")
            return
        address = literal_ip(target.rpartition(":")[0])
        if address.is_loopback:
            if not from_here:
                raise ValueError(
                    f"{target!r} is the orchestrator's machine itself, and you call from another one: announce an address at"
                    " which the orchestrator reaches you (rollout.advertise)"
                )
            return
        # A connection to an unspecified address reaches this machine. Only link-local addresses need a zone.
        if (
            address.is_unspecified
            or address.is_link_local
            or address.is_multicast
            or getattr(address, "scope_id", None)
        ):
            raise ValueError(
                f"{target!r} is no address of a replica: it is unspecified, link-local or multicast, or has a zone"
            )
        allowed = [ipaddress.ip_network(each) for each in self.networks]
        if allowed and not any(address.version == each.version and address in each for each in allowed):
            raise ValueError(
                f"{target!r} lies in none of the networks {', '.join(self.networks)} (orchestrator.replicas.networks)"
            )


class Lease(NamedTuple):
    """The lease of a replica that announced itself.

    Attributes:
        address: The address that it gave, in its canonical form.
        expires: When it ends, in the pool's seconds.
        owner: Principal that announced it.
        from_here: Whether a process of this machine announced it.
        targets: Targets of the address: the address itself, or the addresses that its host name last resolved to.
    """

    address: str
    expires: float
    owner: str
    from_here: bool
    targets: tuple[str, ...] = ()


class Announcements:
    """The leases of replicas that announce themselves, by name. `run` looks names up and lets leases end.

    Args:
        pool: Uses these replicas.
        config: How long leases last, and how many there may be.
    """

    def __init__(self, pool: ReplicaPool, config: FoundReplicasConfig) -> None:
        self._pool, self._config = pool, config
        self._allowed_addresses = AllowedAddresses(config.networks)
        self._leases: dict[str, Lease] = {}
        self._search = asyncio.Event()

    @property
    def targets(self) -> dict[str, str]:
        """The replicas that the pool is given: names by target."""
        targets: dict[str, str] = {}
        for name, lease in self._leases.items():
            for target in lease.targets:
                targets.setdefault(target, name)
        return targets

    async def run(self) -> None:
        """Look the names of announced replicas up regularly, and end leases in time, until cancelled."""
        while True:
            self._search.clear()
            await self.look_up()
            ends = [lease.expires - self._pool.now for lease in self._leases.values()]
            with contextlib.suppress(TimeoutError):
                async with self._pool.clock.timeout(max(_LEAST_SEARCH_S, min([self._config.resolve_s, *ends]))):
                    await self._search.wait()

    async def look_up(self) -> None:
        """End expired leases, resolve the addresses of the others, and tell the pool."""
        now = self._pool.now
        self._leases = {name: lease for name, lease in self._leases.items() if lease.expires > now}
        asked = list(self._leases.items())
        for (name, lease), found in zip(
            asked, await asyncio.gather(*(resolve_targets([lease.address]) for _, lease in asked)), strict=True
        ):
            present = self._leases.get(name)
            if present is not None and present.address == lease.address:  # it may have left or moved meanwhile
                allowed = tuple(each for each in found if self._allowed(each, name, present))
                self._leases[name] = present._replace(targets=allowed if found else present.targets)
        self._pool.use(self.targets)

    def _allowed(self, target: str, name: str, lease: Lease) -> bool:
        """Return whether an announced replica may be at an address that its name stands for."""
        try:
            self._allowed_addresses.check_address(target, from_here=lease.from_here)
        except ValueError as error:
            log.warning("an announced address is left out", replica=name, reason=str(error))
            return False
        for other, held in self._leases.items():
            if target in held.targets and held.owner != lease.owner:
                reason = f"{lease.address!r} stands for {target!r}, where {held.owner!r} announced replica {other!r}"
                log.warning("an announced address is left out", replica=name, reason=reason)
                return False
        return True

    def register(self, name: str, address: str, owner: str = "", *, from_here: bool = False) -> float:
        """Use a replica that announced itself, at once; return the seconds within which it has to send a heartbeat.

        Args:
            name: Its name.
            address: Its address.
            owner: Name of the principal that announces it.
            from_here: Whether a process of this machine announces it.

        Raises:
            ValueError: if the address is malformed, or no replica may be there.
            SluiceError: ALREADY_EXISTS if another replica has the name or the address, RESOURCE_EXHAUSTED if too many
                are announced.
        """
        check_address(address)
        address = canonical(address)
        if is_fixed(address):
            self._allowed_addresses.check_address(address, from_here=from_here)
        before, expires = self._leases.get(name), self._pool.now + self._config.lease_s
        if before is not None and before.address == address:
            self._leases[name] = before._replace(expires=expires, owner=owner, from_here=from_here)
            return self._config.lease_s
        self._check_lease(name, address, owner)
        targets = (address,) if is_fixed(address) else ()
        self._leases = {other: lease for other, lease in self._leases.items() if lease.address != address}
        self._leases[name] = Lease(address, expires, owner, from_here, targets)
        self._pool.use(self.targets)
        self._search.set()  # for a name
        return self._config.lease_s

    def _check_lease(self, name: str, address: str, owner: str) -> None:
        """Refuse a lease whose name or address another replica has, or that would exceed the maximum number."""
        others = {
            other: lease for other, lease in self._leases.items() if lease.expires > self._pool.now and other != name
        }
        configured = next(
            (each for each in self._pool.replicas if each.name == name and each.announced_as is None), None
        )
        if configured is not None and is_fixed(address) and configured.target != address:
            raise SluiceError.already_exists(
                "NAME_TAKEN",
                f"the replica at {configured.target}, an address of peers.rollout, has the name {name!r}: give this one another"
                " (rollout.replica)",
            )
        taken = next(
            (
                other
                for other, lease in others.items()
                if address in (lease.address, *lease.targets) and lease.owner != owner
            ),
            None,
        )
        if taken is not None:
            raise SluiceError.already_exists(
                "ADDRESS_TAKEN",
                f"replica {taken!r} was announced at {address} by principal {others[taken].owner!r}: give this one another"
                " address (rollout.advertise), or wait until that lease has ended",
            )
        for setting, most, present, whose in (
            ("most_announced", self._config.most_announced, len(others), "all principals have"),
            (
                "most_per_principal",
                self._config.most_per_principal,
                sum(lease.owner == owner for lease in others.values()),
                f"principal {owner!r} has",
            ),
        ):
            if present >= most:
                raise SluiceError.resource_exhausted(
                    "TOO_MANY_REPLICAS",
                    f"{whose} announced {present} replicas, the most that are used (orchestrator.replicas.{setting}): stop some,"
                    " or raise it",
                    self._config.lease_s,
                )

    def heartbeat(self, name: str) -> float:
        """Renew a lease; return its seconds.

        Raises:
            KeyError: if the lease is unknown or over.
        """
        lease = self._leases[name]
        return self.register(name, lease.address, lease.owner, from_here=lease.from_here)

    def owner(self, name: str) -> str | None:
        """Return the principal that announced a replica; None if it has no lease."""
        lease = self._leases.get(name)
        return None if lease is None else lease.owner

    def leave(self, name: str) -> None:
        """Give a replica that leaves no new requests. Its requests in progress end there or continue elsewhere."""
        lease = self._leases.pop(name, None)
        for target in lease.targets if lease is not None else ():
            self._pool.retire(target, name)
        self._pool.use(self.targets)


async def watch_replicas(pool: ReplicaPool, *, from_here: bool) -> AsyncIterator[session_pb2.WatchReplicasResponse]:
    """Yield the replicas for a gateway, now and when they change: `SessionService.WatchReplicas`.

    Args:
        pool: Knows them.
        from_here: Whether the gateway is on this machine: only such a gateway reaches the ports and sockets of this machine.
    """
    while True:
        listed = _listed(pool, from_here=from_here)
        yield listed
        with contextlib.suppress(TimeoutError):
            async with pool.clock.timeout(AGAIN_S):
                while _listed(pool, from_here=from_here) == listed:
                    await pool.changed()


def _listed(pool: ReplicaPool, *, from_here: bool) -> session_pb2.WatchReplicasResponse:
    listed = session_pb2.WatchReplicasResponse()
    for each in pool.replicas:
        reason, target = each.why_out(), each.target
        if not (reason or from_here) and is_local(target if target.startswith(UNIX) else target.rpartition(":")[0]):
            reason = f"{target} is on the orchestrator's machine: let it announce another address (rollout.advertise)"
        name = each.status.replica or each.announced_as or ""
        listed.replicas.add(replica=name, address=target, usable=not reason, reason=reason)
    return listed
