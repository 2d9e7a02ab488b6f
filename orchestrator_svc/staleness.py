"""How old a token may be: which version a new group needs, by which batch it must be trained, how many groups may be live.

Batch k turns version k - 1 into version k, so a token that version v sampled is k - 1 - v versions old when batch k
consumes it. With at most `max_staleness` allowed, a group's last possible batch is v + max_staleness + 1. Groups are
batched in order, so one that is dispatched while `live` others are under way falls into the
(live // batch + 1)-th batch from now. Nothing here accumulates: filters, failures and dynamic batches cannot make it drift.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sluice.versions import BASE, Version

__all__ = ["Lineage", "StalenessBound"]


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """The bound on staleness, and what follows from it.

    Attributes:
        max_staleness: Most versions that a trained token may lag behind the weights that consume it.
        batch_groups: Groups per batch.
        max_concurrent: Most live groups, whatever the staleness allows.
    """

    max_staleness: int
    batch_groups: int
    max_concurrent: int

    @property
    def capacity(self) -> int:
        """Most groups between dispatch and the end of their training."""
        return min(self.max_concurrent, (self.max_staleness + 1) * self.batch_groups)

    def oldest_usable(self, applied: int, live: int) -> int:
        """Return the number of the oldest version that may sample one more group.

        Args:
            applied: Batches that the trainer has applied.
            live: Groups dispatched and neither applied nor dropped.
        """
        batches_from_now = live // self.batch_groups + 1
        return max(0, applied + batches_from_now - self.max_staleness - 1)

    def last_batch(self, number: int) -> int:
        """Return the last batch in which tokens of version `number` may be trained."""
        return number + self.max_staleness + 1


class Lineage:
    """The version that each epoch began from: versions form a tree, and the present weights end one of its paths.

    When a trainer restarts from checkpoint c, the versions above c of older epochs are retired. A token of such a
    version v is as stale as its distance from c, plus what the trainer did since.
    """

    def __init__(self) -> None:
        self._origins: dict[int, Version] = {}

    def open(self, epoch: int, origin: Version) -> None:
        """Add an epoch that a trainer began from weights of version `origin`.

        Raises:
            ValueError: if the epoch is not newer than all others, or the origin not older.
        """
        if epoch <= max(self._origins, default=0) or origin.epoch >= epoch:
            raise ValueError(f"epoch {epoch} cannot follow {max(self._origins, default=0)} from version {origin}")
        self._origins[epoch] = origin

    def number(self, version: Version) -> int:
        """Return the number that a version counts as today: `now - number` is the staleness of its tokens at version `now`.

        Below its own, even below zero, where it was retired.
        """
        newest = max(self._origins, default=0)
        present = self._path(self._origins[newest]) | {newest: version.number} if newest else {0: version.number}
        path = self._path(version)
        # The newest version that both build upon; in the present epoch it is the version itself.
        fork = next((min(number, present[epoch]) for epoch, number in path.items() if epoch in present), 0)
        return 2 * fork - version.number

    def oldest(self, versions: Iterable[Version]) -> int:
        """Return the least of the numbers that some versions count as.

        Raises:
            ValueError: if there are none.
        """
        return min(self.number(version) for version in versions)

    def _path(self, version: Version) -> dict[int, int]:
        """For each epoch on the way back to the base model, the number at which the way leaves it; newest first."""
        path = {}
        while version.epoch > 0:
            path[version.epoch] = version.number
            # An epoch that is not known counts as begun from the base model: never younger than it is.
            version = self._origins.get(version.epoch, BASE)
        path[0] = version.number
        return path
