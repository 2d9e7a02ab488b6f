"""How old a token may be: which version a new group needs, which batch it must be in, how many groups may live.

Batch k turns version k - 1 into version k, so a token that version v sampled is k - 1 - v versions old when batch k
consumes it. With at most `max_staleness` allowed, a group's last possible batch is v + max_staleness + 1. Groups are
batched in order, so one that is dispatched while `live` others are under way falls into the
(live // batch + 1)-th batch from now. Nothing here accumulates: filters, failures and dynamic batches cannot make it drift.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sluice.versions import Version

__all__ = ["Lineage", "StalenessBound"]


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """The bound and what follows from it.

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
        """Number of the oldest version that may sample one more group.

        Args:
            applied: Batches that the trainer has applied.
            live: Groups dispatched and neither applied nor dropped.
        """
        batches_from_now = live // self.batch_groups + 1
        return max(0, applied + batches_from_now - self.max_staleness - 1)

    def last_batch(self, number: int) -> int:
        """The last batch in which tokens of version `number` may be trained."""
        return number + self.max_staleness + 1


class Lineage:
    """Which versions the present weights descend from.

    When a trainer restarts from checkpoint c, the versions above c of older epochs are retired: the weights never
    contained them. A token of such a version v is as stale as its distance from c, plus what the trainer did since.
    """

    def __init__(self) -> None:
        self._openings: list[tuple[int, int]] = []

    def open(self, epoch: int, number: int) -> None:
        """A trainer began `epoch` at version `number`.

        Raises:
            ValueError: if the epoch is not newer than the last one.
        """
        if self._openings and epoch <= self._openings[-1][0]:
            raise ValueError(f"epoch {epoch} is not newer than {self._openings[-1][0]}")
        self._openings.append((epoch, number))

    def number(self, version: Version) -> int:
        """The number that a version counts as today; below its own, even below zero, where it was retired."""
        number = version.number
        for epoch, restored in self._openings:
            if epoch > version.epoch and number > restored:
                number = 2 * restored - number
        return number

    def oldest(self, versions: Iterable[Version]) -> int:
        """The least of the numbers that some versions count as.

        Raises:
            ValueError: if there are none.
        """
        return min(self.number(version) for version in versions)
