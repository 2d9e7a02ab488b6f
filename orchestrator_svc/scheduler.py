"""Groups from dispatch to training: when one more may start, which make a batch, and what became of each.

A pure state machine: no clock, no I/O. Every group ends as applied or dropped; `Accounting` counts the same of every
trajectory. `selection` picks the groups of a batch.

How old a token may be: batch k turns version k - 1 into version k, so a token that version v sampled is k - 1 - v versions
old when batch k consumes it. With at most `max_staleness` allowed, a group's last possible batch is v + max_staleness + 1.
Groups are batched in order, so one that is dispatched while `live` others are under way falls into the
(live // batch + 1)-th batch from now. Nothing here accumulates: filters, failures and dynamic batches cannot make it drift.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from orchestrator_svc.selection import Selection, window_size
from sluice.versions import Lineage, Version


class Stage(enum.Enum):
    """Where a live group stands."""

    RUNNING = "running"
    READY = "ready"
    BATCHED = "batched"


class OnStale(enum.Enum):
    """What happens to trajectories with tokens beyond the bound."""

    DROP = "drop"
    TRUNCATE = "truncate"
    REQUEUE = "requeue"


@dataclass(slots=True)
class Group:
    """A live group.

    Attributes:
        number: Order of dispatch; also its name.
        position: Place of its task in the stream of tasks.
        versions: While it runs: the version that its replica served at dispatch, a lower bound. Then: those of its tokens.
        last_batch: The last batch that may train it; kept by the scheduler.
    """

    number: int
    position: int
    versions: tuple[Version, ...]
    stage: Stage = Stage.RUNNING
    trajectories: int = 0
    last_batch: int = 0


@dataclass(frozen=True, slots=True)
class DrawnTask:
    """A task that was drawn for a group and has no trajectories yet; group number 0: it has no group yet."""

    number: int
    position: int


def group_name(number: int) -> str:
    """Return the name that a group has in messages."""
    return f"g{number}"


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that was made and is not applied yet."""

    sequence_no: int
    batch_id: str
    groups: tuple[int, ...]


class Reason:
    """Why a trajectory or a group was not trained; the trainer's reports bring further reasons."""

    STALE = "STALE"
    MISSING_REWARD = "MISSING_REWARD"
    NO_TOKENS = "NO_TOKENS"
    FILTERED = "FILTERED"
    OVERLONG = "OVERLONG"
    EPISODE_FAILED = "EPISODE_FAILED"
    EPISODE_DEADLINE = "EPISODE_DEADLINE"
    JOURNAL_DAMAGED = "JOURNAL_DAMAGED"
    REPORT_LOST = "REPORT_LOST"
    RUN_ENDED = "RUN_ENDED"


@dataclass
class Accounting:
    """What became of every trajectory: trained once, or counted under the reason why not.

    Counts of a batch are kept apart, so that those of a rolled-back batch can be taken back.

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
        """Count trajectories that were generated and scored."""
        self.accepted += trajectories

    def drop(self, reason: str, trajectories: int) -> None:
        """Count trajectories that were given up before they were in a batch."""
        if trajectories:
            self._dropped[reason] += trajectories

    def apply(self, batch: int, trained: int, dropped: Mapping[str, int]) -> None:
        """Count the trajectories of an applied batch."""
        self._trained_by_batch[batch] = trained
        self._dropped_by_batch[batch] = Counter(dropped)

    def roll_back(self, number: int) -> None:
        """Forget what batches after version `number` trained: the weights returned to it."""
        for batch in [each for each in self._trained_by_batch if each > number]:
            del self._trained_by_batch[batch], self._dropped_by_batch[batch]

    def applied_batches(self) -> list[int]:
        """Sequence numbers of the batches that were applied."""
        return list(self._trained_by_batch)


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
            live: Groups dispatched and neither applied nor dropped.
        """
        batches_from_now = live // self.batch_groups + 1
        return max(0, applied + batches_from_now - self.max_staleness - 1)

    def last_batch(self, number: int) -> int:
        """Return the last batch in which tokens of version `number` may be trained."""
        return number + self.max_staleness + 1


class Scheduler:
    """Decides on dispatch and batches.

    Args:
        window_fraction: Share of a batch by which younger groups may pass an older unfinished one.
        on_stale: What happens to groups that are too old for every batch to come.
    """

    def __init__(
        self, bound: StalenessBound, *, window_fraction: float, on_stale: OnStale, max_steps: int, max_running: int
    ) -> None:
        self.bound = bound
        self.max_steps, self.max_running = max_steps, max_running
        self.lineage = Lineage()
        self.accounting = Accounting()
        self.epoch = 0
        self.applied = 0
        self.is_open = False
        self.groups: dict[int, Group] = {}
        self.batches: dict[int, Batch] = {}
        self._stages: Counter[Stage] = Counter()
        self._on_stale = on_stale
        # Where stale tokens are cut rather than dropped, a late group is due at once.
        self._selection = Selection(
            bound.batch_groups,
            window_size(bound.batch_groups, window_fraction),
            late_is_due=on_stale is OnStale.TRUNCATE,
        )

    @property
    def next_batch(self) -> int:
        """Sequence number of the next batch to make."""
        return self.applied + len(self.batches) + 1

    def count(self, stage: Stage) -> int:
        """Live groups in a stage."""
        return self._stages[stage]

    @property
    def at_capacity(self) -> bool:
        """Whether the staleness bound (or `max_concurrent`) stops dispatch."""
        return len(self.groups) >= self.bound.capacity

    @property
    def satisfied(self) -> bool:
        """Whether the live groups are enough for all the batches still to be made."""
        unbatched = len(self.groups) - self.count(Stage.BATCHED)
        return unbatched >= (self.max_steps - self.next_batch + 1) * self.bound.batch_groups

    def wanted_version(self) -> Version | None:
        """Return the oldest version that may sample one more group; None while none may start."""
        if not self.is_open or self.at_capacity or self.satisfied or self.count(Stage.RUNNING) >= self.max_running:
            return None
        return Version(self.epoch, self.bound.oldest_usable(self.applied, len(self.groups)))

    def start(self, number: int, position: int, version: Version) -> Group:
        """Add a group that was dispatched to a replica that serves `version`.

        Raises:
            ValueError: if no group may start, the version is too old, or the number is taken.
        """
        wanted = self.wanted_version()
        if wanted is None or version < wanted or number in self.groups:
            raise ValueError(f"group {number} may not start on version {version}: wanted is {wanted}")
        group = Group(number, position, (version,))
        self._add_group(group)
        return group

    def finish(self, number: int, versions: Iterable[Version], trajectories: int) -> None:
        """Make a group ready for a batch: its trajectories were accepted."""
        group = self.groups[number]
        group.versions = tuple(sorted(set(versions))) or group.versions
        group.trajectories = trajectories
        self._move(group, Stage.READY)
        self.accounting.accept(trajectories)

    def drop(self, number: int, reason: str) -> Group:
        """Give up a group that is in no batch."""
        group = self._remove_group(number)
        if group.stage is Stage.RUNNING:
            self.accounting.failed_groups[reason] += 1
        else:
            self.accounting.drop(reason, group.trajectories)
        return group

    def drop_trajectories(self, reason: str, count: int) -> None:
        """Count trajectories that were accepted and given up at once, such as those without a reward."""
        self.accounting.accept(count)
        self.accounting.drop(reason, count)

    def drop_stale(self) -> tuple[Group, ...]:
        """Drop and return the ready groups that no batch may train any more, because they came too late for the next one."""
        if self._on_stale is OnStale.TRUNCATE:
            return ()
        return tuple(self.drop(number, Reason.STALE) for number in self._selection.late(self.next_batch))

    def make_batch(self) -> Batch | None:
        """Make the next batch if its groups are there, after `drop_stale`; return None if it has to wait."""
        number = self.next_batch
        chosen = self._selection.take(number) if number <= self.max_steps else None
        if chosen is None:
            return None
        batch = Batch(number, f"batch-{number}-epoch-{self.epoch}", chosen)
        self._add(batch)
        return batch

    def apply(self, sequence_no: int, trained: int, dropped: Mapping[str, int]) -> Batch:
        """Remove a batch that the trainer applied, and its groups.

        Args:
            sequence_no: The batch, the oldest one that was made.
            trained: Its trajectories that took part.
            dropped: Those that did not, by reason.

        Raises:
            ValueError: if another batch is due.
        """
        if sequence_no != self.applied + 1 or sequence_no not in self.batches:
            raise ValueError(f"batch {sequence_no} was applied, but {self.applied + 1} is due")
        batch = self.batches.pop(sequence_no)
        for number in batch.groups:
            self._remove_group(number)
        self.applied = sequence_no
        self.accounting.apply(sequence_no, trained, dropped)
        return batch

    def recover(self, epochs: Iterable[tuple[int, Version]], ready: Iterable[Group], accounting: Accounting) -> None:
        """Take over the epochs of earlier processes, with the versions that they began from, and the groups in no batch.

        `open_epoch` or `rejoin_epoch` follows and brings the batches.
        """
        for epoch, origin in epochs:
            self.lineage = self.lineage.begin(epoch, origin)
        for group in ready:
            self._add_group(group)
        self.accounting = accounting

    def open_epoch(self, epoch: int, origin: Version, lost: Iterable[tuple[Batch, Iterable[Group]]]) -> None:
        """Begin an epoch of the trainer from version `origin`; the batches after it, `lost`, have to be applied (again)."""
        self.lineage = self.lineage.begin(epoch, origin)
        self.accounting.roll_back(origin.number)
        self.rejoin_epoch(epoch, origin.number, lost)

    def rejoin_epoch(
        self,
        epoch: int,
        applied: int,
        lost: Iterable[tuple[Batch, Iterable[Group]]],
        held: Iterable[tuple[Batch, Iterable[Group]]] = (),
    ) -> None:
        """Continue an epoch that the trainer was given before, in which the batches up to `applied` are known to be applied.

        Of the later batches the trainer lacks `lost`, given with those of their groups that are left, and has `held`, which it
        will apply as they are.
        """
        self.epoch, self.applied, self.is_open = epoch, applied, True
        for batch in self.batches.values():
            for each in batch.groups:
                self._remove_group(each)
        self.batches.clear()
        for group in self.groups.values():
            self._date(group)
        for batch, groups in sorted(held, key=lambda pair: pair[0].sequence_no):
            for group in groups:
                group.stage = Stage.READY
                self._add_group(group)
            self._add(replace(batch, groups=tuple(group.number for group in groups)))
        for batch, groups in sorted(lost, key=lambda pair: pair[0].sequence_no):
            self._restore(batch, list(groups))

    def close_epoch(self) -> None:
        """Start nothing more: the trainer is lost, and nobody knows which versions its next epoch will retire."""
        self.is_open = False

    def _restore(self, batch: Batch, groups: list[Group]) -> None:
        """Put a batch back in its place; if it is no longer whole or fresh, make its groups ready for another one."""
        for group in groups:
            group.stage = Stage.READY
            self._add_group(group)
        whole = {group.number for group in groups} == set(batch.groups)
        fresh = all(group.last_batch >= batch.sequence_no for group in groups)
        if whole and batch.sequence_no == self.next_batch and (fresh or self._on_stale is OnStale.TRUNCATE):
            self._add(batch)

    def _add(self, batch: Batch) -> None:
        self.batches[batch.sequence_no] = batch
        for number in batch.groups:
            self._move(self.groups[number], Stage.BATCHED)

    def _add_group(self, group: Group) -> None:
        self.groups[group.number] = group
        self._stages[group.stage] += 1
        self._date(group)

    def _remove_group(self, number: int) -> Group:
        group = self.groups.pop(number)
        self._stages[group.stage] -= 1
        self._selection.discard(number)
        return group

    def _move(self, group: Group, stage: Stage) -> None:
        self._stages[group.stage] -= 1
        self._stages[stage] += 1
        group.stage = stage
        self._date(group)

    def _date(self, group: Group) -> None:
        """Note what the selection reads of a group, at each change of it."""
        group.last_batch = self.bound.last_batch(min(map(self.lineage.number, group.versions)))
        if group.stage is Stage.BATCHED:
            self._selection.discard(group.number)
        else:
            self._selection.put(group.number, ready=group.stage is Stage.READY, last_batch=group.last_batch)
