"""Which versions of one run are visible, in use, or may be removed: a pure state machine.

No clock, no I/O: times are seconds that the caller reads off a monotonic clock. Invariants, whatever the order of events:
the newest version is never removed, nor a version that a live replica serves or has staged, nor a version that is held (by a
pull); and every visible version can be reached from a dense form, unless its delta turned out to be damaged.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import grpc

from sluice.rpc import SluiceError
from sluice.versions import BASE, Version
from weightsync.service import chain
from weightsync.service.chain import Forms, Kept

_CODES = {"OTHER_DIGEST": grpc.StatusCode.ALREADY_EXISTS, "NO_SUCH_VERSION": grpc.StatusCode.NOT_FOUND}
"""Codes of refusals, by reason; all others are FAILED_PRECONDITION."""


class RefusedError(SluiceError):
    """The transition is not allowed."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(_CODES.get(reason, grpc.StatusCode.FAILED_PRECONDITION), reason, message)


@dataclass(frozen=True, slots=True)
class Lease:
    """The last report of a replica; times are seconds of the service's clock.

    Attributes:
        serving: Version that it serves; None if it named none.
        staged: Version that it holds staged beside that, if any.
        error: Its last failure, empty if none.
    """

    serving: Version | None
    staged: Version | None
    error: str
    reported: float
    expires: float


class Ledger:
    """The versions of one run.

    Args:
        keep: How many of the newest versions stay even if nobody uses them; at least 1.
        anchor_every: Versions between two dense forms from which chains start.

    Attributes:
        mirrored: Newest version that an object store has; None: none. While there is room, the deltas after it stay, so that
            the store can catch up through them.
    """

    def __init__(self, keep: int, anchor_every: int = 16) -> None:
        self.keep = keep
        self.anchor_every = anchor_every
        self.mirrored: Version | None = None
        self.committed: dict[Version, Forms] = {}
        self._holders: dict[Version, set[Hashable]] = {}
        self._lingering: dict[Version, float] = {}
        self._leases: dict[str, Lease] = {}

    @property
    def newest(self) -> Version | None:
        """Return the newest visible version."""
        return chain.newest(self.committed)

    @property
    def bytes_committed(self) -> int:
        """Return the bytes of all visible versions."""
        return sum(each.size_bytes for each in self.committed.values())

    def restore(self, version: Version, forms: Forms) -> None:
        """Add a version that was found on disk."""
        self.committed[version] = forms

    def check_push(self, version: Version) -> None:
        """Raise RefusedError if shards of the version must not be pushed. Shards of a committed version may, to be compared."""
        newest = self.newest
        if newest is None or version in self.committed or version > newest:
            return
        if version.epoch < newest.epoch:
            raise RefusedError(
                "OLDER_EPOCH",
                f"version {version} is of an older start of the trainer; the newest version is {newest}:"
                " another trainer took over, so stop this one",
            )
        raise RefusedError("OVERTAKEN", f"version {version} is older than the newest, {newest}: push a newer one")

    def check(self, version: Version, base: Version | None, *, is_adapter: bool) -> None:
        """Check that a version may become visible.

        A delta or an adapter names its base; a dense version names none. The base of an adapter may be the base model, which is
        not a version here.

        Raises:
            RefusedError: OLDER_EPOCH, OVERTAKEN, BASE_UNKNOWN or BASE_DAMAGED.
        """
        self.check_push(version)
        if base is not None and is_adapter:
            self._check_adapter(version, base)
        elif base is not None:
            self._check_delta(version, base)

    def _check_delta(self, version: Version, base: Version) -> None:
        known = self.committed.get(base)
        damaged = chain.damaged_on_the_way(self.committed, base)
        if damaged is not None:
            raise RefusedError(
                "BASE_DAMAGED",
                f"version {version} is based on {base}, and the delta of {damaged} gave other bytes than announced, or NaN:"
                " push a dense version",
            )
        if known is None or known.is_adapter or base >= version or not chain.is_reachable(self.committed, base):
            raise RefusedError(
                "BASE_UNKNOWN",
                f"version {version} is based on {base}, which this service does not hold as an older version of the"
                f" whole model (the newest version is {self.newest}): push a dense version",
            )

    def _check_adapter(self, version: Version, base: Version) -> None:
        known = self.committed.get(base)
        if base != BASE and (known is None or known.is_adapter or base >= version):
            raise RefusedError(
                "BASE_UNKNOWN",
                f"adapter {version} is for version {base}, which this service does not hold: push that as a dense version first",
            )

    def commit(self, version: Version, forms: Forms) -> bool:
        """Make a version visible; return False if it was visible already with the same content.

        Raises:
            RefusedError: as `check`, or OTHER_DIGEST if it is visible already with other content.
        """
        known = self.committed.get(version)
        if known is not None:
            if known.digest != forms.digest:
                raise RefusedError(
                    "OTHER_DIGEST",
                    f"version {version} is committed with digest {known.digest}, not {forms.digest}:"
                    " a version never changes, commit the next number or begin a new epoch",
                )
            return False
        self.check(version, forms.base, is_adapter=forms.is_adapter)
        self.committed[version] = forms
        return True

    def add_dense(self, version: Version, dense_bytes: int) -> None:
        """Note that a visible version has a dense form now."""
        self.committed[version] = replace(self.committed[version], dense_bytes=dense_bytes)

    def drop_dense(self, version: Version) -> None:
        """Note that a visible version lost its dense form. Only for versions that `surplus_dense` returned."""
        self.committed[version] = replace(self.committed[version], dense_bytes=None)

    def mark_damaged(self, version: Version) -> None:
        """Note that applying a version's delta gave other bytes than announced."""
        if version in self.committed:
            self.committed[version] = replace(self.committed[version], damaged=True)

    def retired(self) -> set[Version]:
        """Return the versions that a resumed trainer replaces; see `chain.retired`."""
        return chain.retired(self.committed)

    def report(
        self, replica: str, *, serving: Version | None, staged: Version | None, error: str, now: float, lease_s: float
    ) -> None:
        """Renew a replica's lease. The report replaces the replica's previous report."""
        self._leases[replica] = Lease(serving, staged, error, now, now + lease_s)

    def lease(self, replica: str, now: float) -> Lease | None:
        """Return the lease of a replica; None if it is over, or there was none. Unlike `replicas`, it does not read all leases."""
        lease = self._leases.get(replica)
        return lease if lease is not None and lease.expires > now else None

    def has_room(self, replica: str, most: int, now: float) -> bool:
        """Return whether a replica may report: it is live already, or fewer than `most` replicas are."""
        known = self.lease(replica, now) is not None
        return known or len(self._leases) < most or len(self.replicas(now)) < most

    @property
    def leases(self) -> int:
        """Return how many replicas are remembered: all live ones, and some whose lease is over."""
        return len(self._leases)

    def replicas(self, now: float) -> dict[str, Lease]:
        """Return the replicas that are live, by name; forget the others."""
        self._leases = {name: lease for name, lease in self._leases.items() if lease.expires > now}
        return dict(self._leases)

    def hold(self, version: Version, holder: Hashable) -> None:
        """Keep a version until `release`; raise RefusedError NO_SUCH_VERSION."""
        if version not in self.committed:
            raise RefusedError("NO_SUCH_VERSION", f"there is no version {version}; the newest is {self.newest}")
        self._holders.setdefault(version, set()).add(holder)

    def release(self, version: Version, holder: Hashable) -> None:
        """End a hold, if there is one."""
        holders = self._holders.get(version, set())
        holders.discard(holder)
        if not holders:
            self._holders.pop(version, None)

    def linger(self, version: Version, until: float) -> None:
        """Protect a version from retention for a while: a receiver that pulled one part of it soon asks for the next."""
        self._lingering[version] = max(until, self._lingering.get(version, until))

    def needed_by(self, version: Version, now: float) -> str:
        """Return who needs the version, for people to read; empty if nobody does."""
        if version == self.newest:
            return "it is the newest version"
        if version in self._holders:
            return f"{len(self._holders[version])} transfers of it are under way"
        users = [name for name, lease in self.replicas(now).items() if version in {lease.serving, lease.staged}]
        if users:
            return f"in use by {', '.join(sorted(users))}"
        if version == chain.newest_dense(self.committed):
            return "it is the newest with a dense form"
        lost = [
            each
            for each, forms in self.committed.items()
            if forms.base == version and forms.stands_on_base and chain.is_reachable(self.committed, each)
        ]
        if lost:
            return f"it is the base of {', '.join(str(each) for each in sorted(lost))}"
        return "deltas lead over it from a live replica's version" if version in self._needed(now).versions else ""

    def surplus(self, now: float) -> list[Version]:
        """Return the versions that retention removes now, in an order in which they can be removed: all that are not needed.

        Needed are the versions that `needed_by` names a user of, the newest `keep` versions that are not retired, and all versions
        through which these are reached.
        """
        # A lingering version is reached through its own dense form, or else through deltas, which `delete` refuses to remove.
        kept = self._kept(now).versions | self._needed(now).versions
        return chain.removal_order(self.committed, self.committed.keys() - kept)

    def surplus_dense(self, now: float) -> list[Version]:
        """Return the versions, oldest first, whose dense form retention removes, because deltas lead to them, too."""
        kept = self._kept(now)
        return sorted(
            version
            for version in kept.versions - kept.dense
            if self.committed[version].dense_bytes is not None and self.committed[version].delta_bytes is not None
        )

    def evictable(self, now: float) -> list[Version]:
        """Return the versions that can be removed if the disk runs full: all that nobody needs, the least useful first."""
        surplus = self.surplus(now)
        free = self.committed.keys() - self._needed(now).versions
        return surplus + [each for each in chain.removal_order(self.committed, free) if each not in surplus]

    def delete(self, version: Version, now: float) -> bool:
        """Take a version out of sight; return False if there was none. Raise RefusedError IN_USE."""
        if version not in self.committed:
            return False
        reason = self.needed_by(version, now)
        if reason:
            raise RefusedError("IN_USE", f"version {version} stays: {reason}")
        del self.committed[version]
        self._lingering.pop(version, None)
        return True

    def _served(self, now: float) -> set[Version]:
        leases = self.replicas(now).values()
        return {version for lease in leases for version in (lease.serving, lease.staged) if version is not None}

    def _needed(self, now: float) -> Kept:
        """Return the versions that must stay even if the disk is full."""
        newest = [] if self.newest is None else [self.newest]
        return chain.keep(self.committed, newest, self._holders.keys(), self._served(now), self.anchor_every)

    def _kept(self, now: float) -> Kept:
        """Return the versions that stay while there is room."""
        self._lingering = {version: until for version, until in self._lingering.items() if until > now}
        retired = self.retired()
        wanted = sorted((version for version in self.committed if version not in retired), reverse=True)[: self.keep]
        held = self._holders.keys() | self._lingering.keys()
        newest = [] if self.newest is None else [self.newest]
        served = self._served(now) | ({self.mirrored} if self.mirrored is not None else set())
        return chain.keep(self.committed, [*newest, *wanted], held, served, self.anchor_every)
