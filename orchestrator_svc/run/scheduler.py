"""When one more group may start, which version may sample it, and which groups make the next batch.

Decisions over the live groups of the ledger: no clock, no I/O. Callers pass facts and the time.

* `Scheduler` says whether a group may start, by the bound on staleness.
* `Pace` says how long it may wait, by how long generation and training take.
* `Selection` picks the groups of a batch: first in, first out within a window, unless others would come too late.

The age of a token: batch k turns version k - 1 into version k, so a token that version v sampled is k - 1 - v versions
old when batch k consumes it. With at most `max_staleness` allowed, a group's last possible batch is v + max_staleness + 1.
Groups are batched in order, so a group that is dispatched while there are `live` others falls into the
(live // batch + 1)-th batch from now. This does not add up counts, so filters, failures and dynamic batches cannot make it drift.
"""

from __future__ import annotations

import bisect
import enum
import heapq
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

from orchestrator_svc.config import PacingConfig
from orchestrator_svc.journal.facts import Stage
from orchestrator_svc.journal.ledger import Batch, Group, Ledger
from sluice.v1 import journal_pb2 as pb
from sluice.versions import Version


class OnStale(enum.Enum):
    """What happens to trajectories with tokens beyond the bound."""

    DROP = "drop"
    TRUNCATE = "truncate"
    REQUEUE = "requeue"


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """The bound on staleness, and values that follow from it.

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
    """Decides on dispatch and batches. A decision takes effect when the caller records its fact.

    Args:
        ledger: The state of the run.
        window_fraction: How many younger groups may pass an older unfinished one, as a share of a batch.
        on_stale: What happens to groups that are too old for every batch to come.

    Attributes:
        is_open: Whether a trainer trains the present epoch. While the trainer is lost no group starts: it is unknown which versions its next
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
        # If stale tokens are cut rather than dropped, a late group is due at once.
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
        """Whether the live groups are enough for all remaining batches."""
        unbatched = len(self.ledger.groups) - self.ledger.count(Stage.BATCHED)
        return unbatched >= (self.max_steps - self.ledger.next_batch + 1) * self.bound.batch_groups

    def wanted_version(self) -> Version | None:
        """Return the oldest version that may sample one more group; None while no group may start."""
        ledger = self.ledger
        if not self.is_open or self.at_capacity or self.satisfied or ledger.count(Stage.RUNNING) >= self.max_running:
            return None
        return Version(ledger.epoch, self.bound.oldest_usable(ledger.applied, len(ledger.groups)))

    def wanted_version_of(self, group: Group) -> Version | None:
        """Return the oldest version that may sample a group which an earlier process left unfinished; None while no version may.

        A group that `goes_on` wants the version that it began with.
        """
        if not self.is_open:
            return None
        return group.floor if self.goes_on(group) else self._oldest_usable_for(group)

    def goes_on(self, group: Group) -> bool:
        """Return whether an unfinished group is continued with the same requests that it began with.

        Otherwise its version has become too old meanwhile, and its next attempt begins. Its samples are used in any
        case. A journal of format 1 did not keep how many episodes were wanted.
        """
        return bool(group.sampled) or (group.floor >= self._oldest_usable_for(group) and group.episodes > 0)

    def _oldest_usable_for(self, group: Group) -> Version:
        # Never a future version: after the bound was lowered there are more groups than it allows, and the
        # trainer may need this group to make that version.
        applied, older = self.ledger.applied, self.ledger.older(group.number)
        return Version(self.ledger.epoch, min(applied, self.bound.oldest_usable(applied, older)))

    def stale_groups(self) -> list[Group]:
        """Return the ready groups that no batch may train any more. Drop them before the next choice."""
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

        Other groups that are ready by now, and may be older, wait for the batch after it.
        """
        number, live = self.ledger.next_batch, self.ledger.groups
        ready = all(live.get(each.number) is each and each.stage is Stage.READY for each in groups)
        in_time = self.on_stale is OnStale.TRUNCATE or all(self.bound.last_batch(e.oldest) >= number for e in groups)
        return number <= self.max_steps and ready and in_time

    def bound_of(self, batch: Batch) -> int:
        """Return how many versions a token of a batch may lag behind: the bound at the time when the batch was made."""
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


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live group that is in no batch yet.

    Attributes:
        group: Its number; lower ones were dispatched earlier.
        ready: Whether it is scored; otherwise its episodes are running.
        last_batch: The last batch that may train it.
        passed: Younger groups that were batched while it was running.
    """

    group: int
    ready: bool
    last_batch: int
    passed: int = 0


def window_size(batch_groups: int, fraction: float) -> int:
    """W: at most W - 1 younger groups may pass the oldest unfinished one."""
    return max(1, int(fraction * batch_groups))


class Selection:
    """The groups to choose from, sorted as a choice reads them. So its time depends on the size of a batch, not on the waiting groups.

    Args:
        size: Groups per batch.
        window: W of `window_size`.
        late_is_due: Treat a group whose last batch is over as due now: its stale tokens are cut.
    """

    def __init__(self, size: int, window: int, *, late_is_due: bool = False) -> None:
        self._size, self._window, self._late_is_due = size, window, late_is_due
        self._candidates: dict[int, Candidate] = {}
        self._due: Counter[int] = Counter()
        # Numbers of groups, ascending.
        self._running: list[int] = []
        self._ready: list[int] = []
        self._ready_by_deadline: dict[int, list[int]] = {}
        self._running_by_deadline: Counter[int] = Counter()

    def put(self, candidate: Candidate) -> None:
        """Add a group, or update it."""
        group, ready, last_batch = candidate.group, candidate.ready, candidate.last_batch
        before = self._candidates.get(group)
        if before is not None and (before.ready, before.last_batch) == (ready, last_batch):
            self._candidates[group] = candidate
            return
        self.discard(group)
        self._candidates[group] = candidate
        self._due[last_batch] += 1
        bisect.insort(self._ready if ready else self._running, group)
        if ready:
            bisect.insort(self._ready_by_deadline.setdefault(last_batch, []), group)
        else:
            self._running_by_deadline[last_batch] += 1

    def discard(self, group: int) -> None:
        """Remove a group, if it is there."""
        candidate = self._candidates.pop(group, None)
        if candidate is None:
            return
        deadline = candidate.last_batch
        _decrease(self._due, deadline)
        _delete(self._ready if candidate.ready else self._running, group)
        if candidate.ready:
            _delete(self._ready_by_deadline[deadline], group)
            if not self._ready_by_deadline[deadline]:
                del self._ready_by_deadline[deadline]
        else:
            _decrease(self._running_by_deadline, deadline)

    def late(self, batch: int) -> list[int]:
        """Return the ready groups that neither this batch nor a later one may train."""
        return sorted(chain.from_iterable(groups for last, groups in self._ready_by_deadline.items() if last < batch))

    def choose(self, batch: int) -> list[int] | None:
        """Choose the groups of batch number `batch`, or wait.

        Returns:
            Numbers of the groups in order of dispatch; None to wait for groups under way. It waits only if the end of a running group,
            which its deadline bounds, changes the answer.
        """
        if len(self._ready) < self._size:
            return None
        first_in = self._ready[: self._size]
        if not self._overloaded(first_in, batch):
            return None if self._overtakes(first_in) else first_in
        most_urgent = sorted(islice(self._by_urgency(batch), self._size))
        too_many = self._overloaded(most_urgent, batch)
        if not too_many:
            return None if self._overtakes(most_urgent) else most_urgent
        if self._running and min(self._running_by_deadline) <= max(too_many):
            return None
        return most_urgent

    def _by_urgency(self, batch: int) -> Iterator[int]:
        """Yield the ready groups by due batch, and by age within a batch."""
        deadlines = sorted(self._ready_by_deadline)
        now = bisect.bisect(deadlines, batch) if self._late_is_due else 0
        yield from heapq.merge(*(self._ready_by_deadline[each] for each in deadlines[:now]))
        for each in deadlines[now:]:
            yield from self._ready_by_deadline[each]

    def _overloaded(self, picked: Sequence[int], batch: int) -> list[int]:
        """Return the batches by which more groups are due than fit into the batches until then, if `picked` is this batch."""
        taken = Counter(self._candidates[group].last_batch for group in picked)
        found, due = [], 0
        for last in sorted(self._due):
            more = self._due[last] - taken[last]
            due += more
            deadline = max(last, batch) if self._late_is_due else last
            # The i-th most urgent of the rest needs ceil(i / size) further batches.
            if more and deadline < batch + 1 + (due - 1) // self._size:
                found.append(deadline)
        return found

    def _overtakes(self, picked: Sequence[int]) -> bool:
        """Return whether more younger groups would pass the oldest unfinished one than the window allows."""
        if not self._running:
            return False
        oldest = self._candidates[self._running[0]]
        younger = len(picked) - bisect.bisect(picked, oldest.group)
        return younger > 0 and oldest.passed + younger > self._window - 1


def _decrease(counts: Counter[int], key: int) -> None:
    """Decrease a count. Delete the key at 0, so that iteration stays short."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def _delete(numbers: list[int], number: int) -> None:
    del numbers[bisect.bisect_left(numbers, number)]


class Pace:
    """Measures generation and training, and says how long the next group may wait.

    If a group starts too early, it is finished before the trainer needs it, and its tokens grow old. If it starts too late, the trainer waits.
    `Pace` measures two times of the last batches: how long the trainer takes for a batch, and how long it takes from the start of a batch's
    groups until the trainer has the batch. These times say when a group of a later batch has to start. If generation is the bottleneck,
    that time has always passed: groups start as early as the staleness bound allows.

    Args:
        batch_groups: Groups per batch.

    Attributes:
        lead_s: Seconds from the start of a batch's groups until the trainer has it, by batch.
        step_s: Seconds that the trainer took, by batch.
    """

    def __init__(self, config: PacingConfig, batch_groups: int) -> None:
        self._config, self._batch_groups = config, batch_groups
        self.lead_s: deque[float] = deque(maxlen=config.batches)
        self.step_s: deque[float] = deque(maxlen=config.batches)
        self._kinds: dict[str, Callable[[Any, float], None]] = {
            "process_started": self._process_started,
            "task_drawn": self._task_drawn,
            "group_accepted": self._group_accepted,
            "group_dropped": self._group_dropped,
            "batch_made": self._batch_made,
            "batch_sent": self._batch_sent,
            "batch_applied": self._batch_applied,
            "epoch_begun": self._epoch_begun,
        }
        self._forget()

    def _forget(self) -> None:
        self.lead_s.clear()
        self.step_s.clear()
        self._started: dict[int, float] = {}
        self._vacated: deque[float] = (
            deque()
        )  # start times of groups that were dropped while they ran and are not replaced yet
        self._ready: dict[int, float] = {}
        self._made: dict[int, tuple[float, float]] = {}  # seconds from start to ready, and when it was made, by batch
        self._at_trainer: set[int] = set()
        self._step_began: float | None = None
        self._applied = 0
        self._long_lead_s = self._short_step_s = 0.0

    def apply_fact(self, fact: pb.Fact, now: float) -> None:
        """Take one fact, recorded at `now` seconds."""
        kind = fact.WhichOneof("kind")
        if kind in self._kinds:
            self._kinds[kind](getattr(fact, kind), now)

    def wait_s(self, live: int, now: float) -> float:
        """Return the seconds until one more group has to start; 0 if it has to start now.

        Args:
            live: Groups dispatched before it and neither applied nor dropped.
            now: The time in seconds.
        """
        ahead = live // self._batch_groups
        measured = min(len(self.lead_s), len(self.step_s))
        if not self._config.enabled or ahead == 0 or measured < self._config.batches:
            return 0.0
        step_s = self._short_step_s
        # The trainer has begun a step, or begins one as soon as a batch is complete. `ahead` steps end before this group's begins.
        step_ends = max(now, (now if self._step_began is None else self._step_began) + step_s)
        needed = step_ends + (ahead - 1) * step_s
        return max(0.0, needed - self._long_lead_s - self._config.reserve * step_s - now)

    # The facts.

    def _process_started(self, _fact: pb.ProcessStarted, _now: float) -> None:
        """Forget what an earlier process recorded: the times of its facts are not known."""
        self._forget()

    def _task_drawn(self, fact: pb.TaskDrawn, now: float) -> None:
        # A group that replaces a dropped one counts from the start of the dropped one. If most groups are dropped, a batch takes as long
        # as several groups one after the other.
        self._started[fact.group] = self._vacated.popleft() if self._vacated else now

    def _group_accepted(self, fact: pb.GroupAccepted, now: float) -> None:
        self._ready[fact.group] = now

    def _group_dropped(self, fact: pb.GroupDropped, _now: float) -> None:
        started = self._started.pop(fact.group, None)
        was_ready = self._ready.pop(fact.group, None) is not None
        if started is not None and not was_ready:
            self._vacated.append(started)

    def _batch_made(self, fact: pb.BatchMade, now: float) -> None:
        started = [self._started.pop(each) for each in fact.groups if each in self._started]
        ready = [self._ready.pop(each) for each in fact.groups if each in self._ready]
        if (
            len(started) == len(ready) == len(fact.groups)
        ):  # else an earlier process drew some, or they were in a batch before
            # The median: a single group may have started late, after others that were dropped.
            self._made[fact.sequence_no] = (max(ready) - statistics.median_low(started), now)

    def _batch_sent(self, fact: pb.BatchSent, now: float) -> None:
        generated_s, made = self._made.pop(fact.sequence_no, (None, now))
        if generated_s is not None:
            self.lead_s.append(generated_s + now - made)
            self._long_lead_s = max(self.lead_s)
        if fact.sequence_no <= self._applied:
            return  # the report came before the answer
        self._at_trainer.add(fact.sequence_no)
        if self._step_began is None:
            self._step_began = now

    def _batch_applied(self, fact: pb.BatchApplied, now: float) -> None:
        self._applied = fact.sequence_no
        if fact.sequence_no not in self._at_trainer:
            return
        self._at_trainer.remove(fact.sequence_no)
        if self._step_began is not None:
            self.step_s.append(now - self._step_began)
            self._short_step_s = sorted(self.step_s)[len(self.step_s) // 4]
        self._step_began = now if self._at_trainer else None

    def _epoch_begun(self, fact: pb.EpochBegun, _now: float) -> None:
        self._applied = fact.origin.number
        self._made.clear()
        self._vacated.clear()
        self._at_trainer.clear()
        self._step_began = None
