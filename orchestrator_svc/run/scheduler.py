"""When one more group may start, which version may sample it, and which groups make the next batch.

Decisions over the live groups of the ledger: no clock, no I/O, and no state of the run. `selection` picks the groups.

How old a token may be: batch k turns version k - 1 into version k, so a token that version v sampled is k - 1 - v versions
old when batch k consumes it. With at most `max_staleness` allowed, a group's last possible batch is v + max_staleness + 1.
Groups are batched in order, so one that is dispatched while `live` others are under way falls into the
(live // batch + 1)-th batch from now. Nothing here accumulates: filters, failures and dynamic batches cannot make it drift.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestrator_svc.journal.ledger import Batch, Group, Ledger, Stage
from orchestrator_svc.run.selection import Candidate, Selection, window_size
from sluice.versions import Version


class OnStale(enum.Enum):
    """What happens to trajectories with tokens beyond the bound."""

    DROP = "drop"
    TRUNCATE = "truncate"
    REQUEUE = "requeue"


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """The bound on staleness, and what follows from it.

    Attributes:
        max_staleness: Most versions that a trained token may lag behind the weights that consume it.
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
            live: Groups dispatched before it and neither applied nor dropped.
        """
        batches_from_now = live // self.batch_groups + 1
        return max(0, applied + batches_from_now - self.max_staleness - 1)

    def last_batch(self, number: int) -> int:
        """Return the last batch in which tokens of version `number` may be trained."""
        return number + self.max_staleness + 1


class Scheduler:
    """Decides on dispatch and batches; what it decides becomes true by a fact that the caller records.

    Args:
        ledger: The state of the run.
        window_fraction: Share of a batch by which younger groups may pass an older unfinished one.
        on_stale: What happens to groups that are too old for every batch to come.

    Attributes:
        is_open: Whether a trainer trains the present epoch. While it is lost nothing starts: nobody knows which versions its next
            epoch will retire.
    """

    def __init__(
        self,
        ledger: Ledger,
        bound: StalenessBound,
        *,
        window_fraction: float,
        on_stale: OnStale,
        max_steps: int,
        max_running: int,
    ) -> None:
        self.ledger, self.bound, self.on_stale = ledger, bound, on_stale
        self.max_steps, self.max_running = max_steps, max_running
        self.is_open = False
        # Where stale tokens are cut rather than dropped, a late group is due at once.
        self._selection = Selection(
            bound.batch_groups,
            window_size(bound.batch_groups, window_fraction),
            late_is_due=on_stale is OnStale.TRUNCATE,
        )
        ledger.changed.update(ledger.groups)

    def change_bound(self, bound: StalenessBound) -> None:
        """Apply another bound to all live groups; the size of a batch stays."""
        self.bound = bound
        self.ledger.changed.update(self.ledger.groups)

    @property
    def at_capacity(self) -> bool:
        """Whether the staleness bound (or `max_concurrent`) stops dispatch."""
        return len(self.ledger.groups) >= self.bound.capacity

    @property
    def satisfied(self) -> bool:
        """Whether the live groups are enough for all the batches still to be made."""
        unbatched = len(self.ledger.groups) - self.ledger.count(Stage.BATCHED)
        return unbatched >= (self.max_steps - self.ledger.next_batch + 1) * self.bound.batch_groups

    def wanted_version(self) -> Version | None:
        """Return the oldest version that may sample one more group; None while none may start."""
        ledger = self.ledger
        if not self.is_open or self.at_capacity or self.satisfied or ledger.count(Stage.RUNNING) >= self.max_running:
            return None
        return Version(ledger.epoch, self.bound.oldest_usable(ledger.applied, len(ledger.groups)))

    def wanted_version_of(self, group: Group) -> Version | None:
        """Return the oldest version that may sample a group which an earlier process left unfinished; None while none may.

        A group that `goes_on` wants the version that it began with.
        """
        if not self.is_open:
            return None
        return group.floor if self.goes_on(group) else self._oldest_usable_for(group)

    def goes_on(self, group: Group) -> bool:
        """Return whether an unfinished group is continued with the very requests that it began with.

        Otherwise its version has become too old meanwhile, and it begins again as its next attempt. What was sampled of it is
        used in any case. A journal of format 1 did not keep how many episodes were wanted.
        """
        return bool(group.sampled) or (group.floor >= self._oldest_usable_for(group) and group.episodes > 0)

    def _oldest_usable_for(self, group: Group) -> Version:
        # Never a version to come: a bound that was lowered leaves more groups than it allows, and the batch that would bring
        # that version may wait for this very group.
        applied, older = self.ledger.applied, self.ledger.older(group.number)
        return Version(self.ledger.epoch, min(applied, self.bound.oldest_usable(applied, older)))

    def stale_groups(self) -> list[Group]:
        """Return the ready groups that no batch may train any more: they have to be dropped before the next choice."""
        if self.on_stale is OnStale.TRUNCATE:
            return []
        self._look()
        return [self.ledger.groups[number] for number in self._selection.late(self.ledger.next_batch)]

    def choose_batch(self) -> list[Group] | None:
        """Return the groups of the next batch in order of dispatch; None if it has to wait, or is beyond the last step."""
        self._look()
        number = self.ledger.next_batch
        chosen = self._selection.choose(number) if number <= self.max_steps else None
        return None if chosen is None else [self.ledger.groups[each] for each in chosen]

    def may_batch(self, groups: Sequence[Group]) -> bool:
        """Return whether groups that `choose_batch` returned a while ago may still be the next batch.

        Others that are ready by now, and may be older, wait for the batch after it.
        """
        number, live = self.ledger.next_batch, self.ledger.groups
        ready = all(live.get(each.number) is each and each.stage is Stage.READY for each in groups)
        in_time = self.on_stale is OnStale.TRUNCATE or all(self.bound.last_batch(e.oldest) >= number for e in groups)
        return number <= self.max_steps and ready and in_time

    def bound_of(self, batch: Batch) -> int:
        """Return the most versions that a token of a batch may lag behind: the bound that held when the batch was made."""
        return self.bound.max_staleness if batch.max_staleness is None else batch.max_staleness

    def is_fresh(self, batch: Batch) -> bool:
        """Return whether a batch that was made before may still be trained as it is."""
        if self.on_stale is OnStale.TRUNCATE:
            return True
        bound = replace(self.bound, max_staleness=self.bound_of(batch))
        return all(bound.last_batch(group.oldest) >= batch.sequence_no for group in batch.groups)

    def _look(self) -> None:
        """Note in the selection what changed since the last decision."""
        changed, groups = self.ledger.changed, self.ledger.groups
        while changed:
            number = changed.pop()
            group = groups.get(number)
            if group is None or group.stage is Stage.BATCHED:
                self._selection.discard(number)
            else:
                last = self.bound.last_batch(group.oldest)
                self._selection.put(Candidate(number, group.stage is Stage.READY, last, group.passed))
