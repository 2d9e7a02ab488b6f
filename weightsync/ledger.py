"""Which versions of one run are visible, in use, or ready to go: a pure state machine.

No clock, no I/O: times are seconds that the caller reads off a monotonic clock. Invariants, whatever the order of events:
the newest version is never given up, nor one that a live replica serves or has staged, nor one that is held (by a pull).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from sluice.versions import Version

__all__ = ["Committed", "Lease", "Ledger", "RefusedError"]


class RefusedError(Exception):
    """The transition is not allowed.

    Attributes:
        reason: UPPER_SNAKE_CASE name for programs.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Committed:
    """A visible version: its digest and its bytes on disk."""

    digest: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Lease:
    """What a replica said last.

    Attributes:
        serving: Version that it serves; None where it said none.
        staged: Version that it holds staged beside that, if any.
        error: Its last failure, empty if none.
        reported: When it said so.
        expires: When it stops to count as live.
    """

    serving: Version | None
    staged: Version | None
    error: str
    reported: float
    expires: float


class Ledger:
    """The versions of one run.

    Args:
        keep: Newest versions that stay though nobody uses them; at least 1.
    """

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.committed: dict[Version, Committed] = {}
        self._holders: dict[Version, set[Hashable]] = {}
        self._leases: dict[str, Lease] = {}

    @property
    def newest(self) -> Version | None:
        """The newest visible version."""
        return max(self.committed, default=None)

    @property
    def bytes_committed(self) -> int:
        """Bytes of all visible versions."""
        return sum(each.size_bytes for each in self.committed.values())

    def restore(self, version: Version, digest: str, size_bytes: int) -> None:
        """Take up a version that was found on disk."""
        self.committed[version] = Committed(digest, size_bytes)

    def check_push(self, version: Version) -> None:
        """Whether a shard of the version may come in; one of a committed version may, to be compared.

        Raises:
            RefusedError: OLDER_EPOCH or OVERTAKEN.
        """
        newest = self.newest
        if newest is None or version in self.committed or version > newest:
            return
        if version.epoch < newest.epoch:
            raise RefusedError(
                "OLDER_EPOCH",
                f"version {version} is of an older start of the trainer; the newest version is {newest}:"
                " another trainer took over, stop this one",
            )
        raise RefusedError("OVERTAKEN", f"version {version} is older than the newest, {newest}: push a newer one")

    def commit(self, version: Version, digest: str, size_bytes: int) -> bool:
        """Make a version visible.

        Returns:
            False if it was visible already with the same content.

        Raises:
            RefusedError: OLDER_EPOCH, OVERTAKEN, or OTHER_DIGEST where it is visible with other content.
        """
        known = self.committed.get(version)
        if known is not None:
            if known.digest != digest:
                raise RefusedError(
                    "OTHER_DIGEST",
                    f"version {version} is committed with digest {known.digest}, not {digest}:"
                    " a version never changes, commit the next number or begin a new epoch",
                )
            return False
        self.check_push(version)
        self.committed[version] = Committed(digest, size_bytes)
        return True

    def retired(self) -> set[Version]:
        """Versions beyond the point at which the newest epoch went on: what came after it did not happen."""
        newest = self.newest
        if newest is None:
            return set()
        resumed_at = min(version.number for version in self.committed if version.epoch == newest.epoch)
        return {version for version in self.committed if version.epoch < newest.epoch and version.number > resumed_at}

    def report(
        self,
        replica: str,
        *,
        serving: Version | None,
        staged: Version | None,
        error: str,
        now: float,
        lease_s: float,
    ) -> None:
        """Renew a replica's lease; what it reports replaces what it said before."""
        self._leases[replica] = Lease(serving, staged, error, now, now + lease_s)

    def replicas(self, now: float) -> dict[str, Lease]:
        """The replicas that are live, by name; the others are forgotten."""
        self._leases = {name: lease for name, lease in self._leases.items() if lease.expires > now}
        return dict(self._leases)

    def hold(self, version: Version, holder: Hashable) -> None:
        """Keep a version until `release`.

        Raises:
            RefusedError: NO_SUCH_VERSION.
        """
        if version not in self.committed:
            raise RefusedError("NO_SUCH_VERSION", f"there is no version {version}; the newest is {self.newest}")
        self._holders.setdefault(version, set()).add(holder)

    def release(self, version: Version, holder: Hashable) -> None:
        """End a hold; without effect where there is none."""
        holders = self._holders.get(version, set())
        holders.discard(holder)
        if not holders:
            self._holders.pop(version, None)

    def needed_by(self, version: Version, now: float) -> str:
        """Who needs the version, for people to read; empty if nobody does."""
        if version == self.newest:
            return "it is the newest version"
        if version in self._holders:
            return f"{len(self._holders[version])} transfers of it are under way"
        users = [name for name, lease in self.replicas(now).items() if version in {lease.serving, lease.staged}]
        return f"in use by {', '.join(sorted(users))}" if users else ""

    def surplus(self, now: float) -> list[Version]:
        """What retention gives up now, oldest first: all that nobody needs but the newest `keep` that are not retired."""
        retired = self.retired()
        kept = sorted((version for version in self.committed if version not in retired), reverse=True)[: self.keep]
        return [version for version in self._free(now) if version not in kept]

    def evictable(self, now: float) -> list[Version]:
        """What can be given up when the disk runs full: all that nobody needs, the least useful first."""
        surplus = self.surplus(now)
        return surplus + [version for version in self._free(now) if version not in surplus]

    def delete(self, version: Version, now: float) -> bool:
        """Take a version out of sight.

        Returns:
            False if there was none.

        Raises:
            RefusedError: IN_USE.
        """
        if version not in self.committed:
            return False
        reason = self.needed_by(version, now)
        if reason:
            raise RefusedError("IN_USE", f"version {version} stays: {reason}")
        del self.committed[version]
        return True

    def _free(self, now: float) -> list[Version]:
        return [version for version in sorted(self.committed) if not self.needed_by(version, now)]
