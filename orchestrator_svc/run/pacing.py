"""When the next group has to start so that its batch is complete when the trainer needs it. Pure: the caller passes facts and the time.

A group that starts earlier waits, finished, for the trainer, and its tokens grow old there; one that starts later lets the trainer
wait. `Pace` measures two times of the last batches: how long the trainer takes for one, and how long it takes from the start of a
batch's groups until the trainer has it. From these follows when a group of the next batch but one, for example, has to start. Where
generation is the bottleneck that time has always passed, so that groups start as early as the staleness bound allows.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from typing import Any

from orchestrator_svc.config import PacingConfig
from sluice.v1 import journal_pb2 as pb


class Pace:
    """Measures generation and training, and says how long the next group may wait.

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
        )  # when groups started that were dropped while they ran and are not replaced yet
        self._ready: dict[int, float] = {}
        self._made: dict[int, tuple[float, float]] = {}  # seconds from start to ready, and when it was made, by batch
        self._at_trainer: set[int] = set()
        self._step_began: float | None = None
        self._applied = 0
        self._long_lead_s = self._short_step_s = 0.0

    def apply_fact(self, fact: pb.Fact, now: float) -> None:
        """Take one fact that became true at `now` seconds."""
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
        # A group in place of a dropped one counts from the start of that one. Where most groups are dropped, a batch takes as long
        # as several of them one after the other.
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
