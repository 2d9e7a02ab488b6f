"""Addresses of replicas: what is one, and what a name stands for."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import structlog

log = structlog.get_logger(__name__)

_DNS = "dns:///"
_UNIX = "unix:"
_LOOKUP_S = 5.0
"""Seconds that the resolver may take for one name."""


@dataclass(frozen=True, slots=True)
class AnnouncedAddresses:
    """Where replicas that announce themselves may be: the orchestrator connects to what others name.

    Attributes:
        networks: Networks, such as ``10.0.0.0/8``, that such an address must lie in; empty: all networks.
    """

    networks: Sequence[str] = ()

    def check(self, target: str, *, from_here: bool) -> None:
        """Check an address behind which no name has to be looked up.

        Args:
            target: ``IP:port`` or ``unix:PATH``.
            from_here: Whether a process of this machine announced it: only that one may name a port or a socket of this machine.

        Raises:
            ValueError: if a replica may not be there.
        """
        if target.startswith(_UNIX):
            if not from_here:
                raise ValueError(f"{target!r} is a socket of the orchestrator's machine, and you call from another one")
            return
        address = _literal(target.rpartition(":")[0])
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


def check_address(address: str) -> None:
    """Check the form of an address.

    Raises:
        ValueError: if it is neither ``host:port``, with or without ``dns:///``, nor ``unix:PATH``.
    """
    host, _, port = address.removeprefix(_DNS).rpartition(":")
    if address.startswith(_UNIX):
        valid = len(address) > len(_UNIX)
    else:
        valid = port.isdecimal() and 0 < int(port) < 1 << 16 and (_is_literal(host) or _is_name(host))
    if not valid:
        raise ValueError(f"{address!r} is no address: give host:port or unix:PATH")


def canonical(address: str) -> str:
    """Return the one spelling of an address, so that two that are spelt differently compare equal.

    Literal addresses are written as RFC 5952 has it, an IPv4 address inside IPv6 as IPv4, and names in lower case without ``dns:///``.

    Args:
        address: Has passed `check_address`.
    """
    if address.startswith(_UNIX):
        return address.replace("unix://", _UNIX, 1)
    host, _, port = address.removeprefix(_DNS).rpartition(":")
    if not _is_literal(host):
        return f"{host.lower()}:{int(port)}"
    literal = _literal(host)
    return f"[{literal}]:{int(port)}" if literal.version == 6 else f"{literal}:{int(port)}"


async def resolve_targets(addresses: Iterable[str]) -> list[str]:
    """Return the targets behind some addresses, in order, each once.

    ``unix:/path`` and literal addresses stand for themselves, in their canonical form, names (with or without ``dns:///``) for every address that
    they resolve to now. A name that does not resolve is left out: it may later. So is what cannot be an address.
    """
    found = await asyncio.gather(*map(_resolve, addresses))
    return list(dict.fromkeys(target for targets in found for target in targets))


def is_fixed(address: str) -> bool:
    """Return whether an address stands for itself, so that no name has to be looked up."""
    return address.startswith(_UNIX) or _is_literal(address.rpartition(":")[0])


async def _resolve(address: str) -> list[str]:
    try:
        check_address(address)
        address = canonical(address)
        if is_fixed(address):
            return [address]
        host, _, port = address.rpartition(":")
        async with asyncio.timeout(_LOOKUP_S):
            rows = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (ValueError, OSError, TimeoutError) as error:
        log.debug("replica address skipped", address=address, error=str(error))
        return []
    hosts = {f"[{row[4][0]}]" if row[0] is socket.AF_INET6 else row[4][0] for row in rows}
    return sorted({canonical(f"{each}:{port}") for each in hosts})


def _is_literal(host: str) -> bool:
    try:
        _literal(host)
    except ValueError:
        return False
    return True


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(host.strip("[]"))
    return getattr(address, "ipv4_mapped", None) or address


def _is_name(host: str) -> bool:
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False
