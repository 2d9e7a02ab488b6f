"""What became of every trajectory: trained once, or counted under the reason why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Accounting", "Reason"]


class Reason:
    """Why a trajectory or a group was not trained; the trainer adds its own reasons to these."""

    STALE = "STALE"
    MISSING_REWARD = "MISSING_REWARD"
    NO_TOKENS = "NO_TOKENS"
    FILTERED = "FILTERED"
    EPISODE_FAILED = "EPISODE_FAILED"
    EPISODE_DEADLINE = "EPISODE_DEADLINE"
    JOURNAL_DAMAGED = "JOURNAL_DAMAGED"
    REPORT_LOST = "REPORT_LOST"
    RUN_ENDED = "RUN_ENDED"


@dataclass
class Accounting:
    """Counts of trajectories. Those of a batch are kept apart per batch, so that a rolled-back batch can be undone.

    Attributes:
        accepted: Trajectories that were generated and scored.
        failed_groups: Groups that ended without a trajectory, by reason.
    """

    accepted: int = 0
    failed_groups: Counter[str] = field(default_factory=Counter)
    _dropped: Counter[str] = field(default_factory=Counter)
    _trained_by_batch: dict[int, int] = field(default_factory=dict)
    _dropped_by_batch: dict[int, Counter[str]] = field(default_factory=dict)

    @property
    def trained(self) -> int:
        """Trajectories that took part in an optimizer step of the present weights' history."""
        return sum(self._trained_by_batch.values())

    @property
    def dropped(self) -> Counter[str]:
        """Trajectories that were accepted and not trained, by reason."""
        return sum(self._dropped_by_batch.values(), Counter(self._dropped))

    def accept(self, trajectories: int) -> None:
        """Some were generated and scored."""
        self.accepted += trajectories

    def drop(self, reason: str, trajectories: int) -> None:
        """Some were given up before they were in a batch."""
        if trajectories:
            self._dropped[reason] += trajectories

    def apply(self, batch: int, trained: int, dropped: Mapping[str, int]) -> None:
        """A batch was applied."""
        self._trained_by_batch[batch] = trained
        self._dropped_by_batch[batch] = Counter(dropped)

    def roll_back(self, number: int) -> None:
        """The weights returned to version `number`: what later batches did is undone."""
        for batch in [each for each in self._trained_by_batch if each > number]:
            del self._trained_by_batch[batch], self._dropped_by_batch[batch]

    def applied_batches(self) -> list[int]:
        """Sequence numbers of the batches that were applied."""
        return list(self._trained_by_batch)

    def undecided(self) -> int:
        """Accepted trajectories that are neither trained nor dropped yet."""
        return self.accepted - self.trained - sum(self.dropped.values())
