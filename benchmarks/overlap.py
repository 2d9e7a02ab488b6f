"""The workload of `sluice bench async`, and the least time that a run needs for it at a staleness bound.

`lengths` draws long-tailed lengths of answers, and `LongTail` is the environment that asks for them. `finish_times` computes the
bound from the lengths and the speed of each side alone. It simulates an engine that shares its speed among the running samples, and a
trainer that takes one batch after the other; the orchestrator's own scheduler decides what starts and what makes a batch. Publishing,
transport, scoring and records take no time, and neither side slows the other.
"""

from __future__ import annotations

import bisect
import math
import random
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

from orchestrator_svc.config import PacingConfig
from orchestrator_svc.journal.facts import Reason
from orchestrator_svc.journal.ledger import Batch, Ledger
from orchestrator_svc.run.scheduler import OnStale, Pace, Scheduler, StalenessBound
from sluice.environments.base import Message, Task
from sluice.v1 import journal_pb2
from sluice.versions import BASE, Version

QUESTION = "go on"


def lengths(count: int, *, seed: int, median: int, p99: int, longest: int) -> list[int]:
    """Draw lognormal lengths in tokens, the same for the same seed; one in a hundred is above `p99`, all are cut to `longest`."""
    rng = random.Random(f"long_tail/{seed}")  # noqa: S311 - a workload, not a secret
    sigma = math.log(p99 / median) / NormalDist().inv_cdf(0.99)
    return [min(longest, max(1, round(median * rng.lognormvariate(0, sigma)))) for _ in range(count)]


class LongTail:
    """Asks for texts of given lengths in order of dispatch, the same in each measured session."""

    name = "long_tail"

    def __init__(self, answer_tokens: Sequence[int], sessions: int) -> None:
        self._answer_tokens = list(answer_tokens) * sessions

    def tasks(self, split: str, seed: int) -> list[Task]:
        """Return the tasks, placed so that the stream, which shuffles them by the seed, gives them in the wanted order."""
        from orchestrator_svc.run.task_stream import TaskStream  # noqa: PLC0415 - brings pydantic, which the processes do not need

        del split
        count = len(self._answer_tokens)
        places = TaskStream([Task(str(number)) for number in range(count)], seed)
        tasks: dict[int, Task] = {}
        for position, tokens in enumerate(self._answer_tokens):
            tasks[int(places.at(position))] = Task(f"{position:05d}", max_tokens=tokens)
        return [tasks[place] for place in range(count)]

    def messages(self, task: Task) -> Sequence[Message]:
        """Return the same question for all."""
        del task
        return [{"role": "user", "content": QUESTION}]

    def score(self, task: Task, completion: str) -> float:
        """Return the share of lower-case letters: differs from sample to sample, so that every sample is trained."""
        del task
        return sum(character.islower() for character in completion) / max(1, len(completion))


# The bound.


EPOCH = 1
QUEUED = 2
"""Batches that the trainer holds, one of them in progress, as in a real run."""


@dataclass(frozen=True)
class EngineSpeed:
    """Measured throughput."""

    tokens_per_s: Mapping[int, float]
    """Tokens per second of the whole engine, by number of running samples."""

    def of_one(self, samples: int) -> float:
        """Return tokens per second of each of `samples` samples; the time of a step is linear between the measured points."""
        known = sorted(self.tokens_per_s)
        step_s = [count / self.tokens_per_s[count] for count in known]
        above = bisect.bisect_left(known, samples)
        if above == 0:
            return 1 / step_s[0]
        if above == len(known):
            return self.tokens_per_s[known[-1]] / samples
        share = (samples - known[above - 1]) / (known[above] - known[above - 1])
        return 1 / (step_s[above - 1] + share * (step_s[above] - step_s[above - 1]))


@dataclass(frozen=True)
class Workload:
    """The work of a run."""

    answer_tokens: Sequence[int]
    """Length of each group's samples, in order of dispatch."""
    group_size: int
    batch_groups: int
    train_s: Sequence[float]
    """Seconds of the trainer by batch."""
    window_fraction: float
    """Share of a batch by which younger groups may pass an older one."""
    without_signal: frozenset[int] = frozenset()
    """Groups that are dropped when they end and replaced by others. Numbered in order of dispatch from 0."""


@dataclass(frozen=True)
class Loop:
    """The settings of a run.

    Attributes:
        max_staleness: Bound on staleness.
        publish_s: Seconds from the end of a step until the replicas serve its version.
        pacing: When groups start; None: as early as the bound allows.
    """

    max_staleness: int
    publish_s: float = 0.0
    pacing: PacingConfig | None = None


@dataclass(frozen=True)
class Course:
    """How a simulated run went, by batch.

    Attributes:
        applied_s: Seconds from the start until it was applied.
        trainer_waited_s: Seconds for which the trainer had nothing to do before it.
        engine_idle_s: Seconds without a running sample between the end of the previous batch and its own end.
        staleness: Mean staleness of its tokens.
    """

    applied_s: list[float] = field(default_factory=list)
    trainer_waited_s: list[float] = field(default_factory=list)
    engine_idle_s: list[float] = field(default_factory=list)
    staleness: list[float] = field(default_factory=list)

    def step_s(self, first: int, end: int) -> float:
        """Return the mean seconds of the steps from `first` to before `end`, counted from 0."""
        return (self.applied_s[end - 1] - self.applied_s[first - 1]) / (end - first)

    def waiting(self, first: int, end: int) -> tuple[float, float]:
        """Return the shares of the time for which the trainer and the engine had nothing to do."""
        elapsed = self.step_s(first, end) * (end - first)
        return sum(self.trainer_waited_s[first:end]) / elapsed, sum(self.engine_idle_s[first:end]) / elapsed


def course(work: Workload, speed: EngineSpeed, loop: Loop) -> Course:
    """Simulate a run of the whole workload."""
    return _Simulation(work, speed, loop).run()


@dataclass
class _Simulation:
    work: Workload
    speed: EngineSpeed
    loop: Loop
    now: float = 0.0
    left: dict[int, float] = field(default_factory=dict)
    """Tokens that each running group still has to sample."""
    sampled: dict[int, dict[int, float]] = field(default_factory=dict)
    """Tokens of each live group by number of the version that sampled them."""
    queue: deque[Batch] = field(default_factory=deque)
    published: deque[tuple[float, int]] = field(default_factory=deque)
    """Versions being sent to the replicas: when they arrive, and their numbers."""
    served: int = 0
    trained_at: float = math.inf
    trainer_waited_s: float = 0.0
    engine_idle_s: float = 0.0

    def run(self) -> Course:
        self.scheduler = self._scheduler()
        done = Course()
        while len(done.applied_s) < len(self.work.train_s):
            due = self._start_what_may()
            if self._advance(due):
                batch = self.queue.popleft()
                done.applied_s.append(self.now)
                done.trainer_waited_s.append(self.trainer_waited_s)
                done.engine_idle_s.append(self.engine_idle_s)
                done.staleness.append(self._staleness(batch))
                self.trainer_waited_s = self.engine_idle_s = 0.0
                self._note(batch_applied=journal_pb2.BatchApplied(sequence_no=batch.sequence_no))
                self.published.append((self.now + self.loop.publish_s, batch.sequence_no))
                self.trained_at = math.inf
        return done

    def _scheduler(self) -> Scheduler:
        batches = len(self.work.train_s)
        self.ledger = Ledger()
        pacing = self.loop.pacing or PacingConfig(enabled=False)
        self.pace = Pace(pacing, self.work.batch_groups)
        scheduler = Scheduler(
            self.ledger,
            StalenessBound(
                self.loop.max_staleness, self.work.batch_groups, max_concurrent=len(self.work.answer_tokens)
            ),
            window_fraction=self.work.window_fraction,
            on_stale=OnStale.DROP,
            max_steps=batches,
            max_running=len(self.work.answer_tokens),
        )
        self._note(epoch_begun=journal_pb2.EpochBegun(epoch=EPOCH, origin=BASE.to_proto()))
        scheduler.is_open = True
        return scheduler

    def _note(self, **kind: Any) -> None:  # noqa: ANN401 - one of the kinds of a fact
        fact = journal_pb2.Fact(**kind)
        self.ledger.apply_fact(self.ledger.last_seq + 1, fact)
        self.pace.apply_fact(fact, self.now)

    def _start_what_may(self) -> float:
        """Start groups, batches and steps; return when the next group is due by the pace."""
        scheduler, ledger = self.scheduler, self.ledger
        while len(self.queue) < QUEUED and (groups := scheduler.choose_batch()) is not None:
            number = ledger.next_batch
            self._note(batch_made=journal_pb2.BatchMade(sequence_no=number, groups=[each.number for each in groups]))
            self.queue.append(ledger.batches[number])
            self._note(batch_sent=journal_pb2.BatchSent(sequence_no=number, epoch=EPOCH))
        if self.queue and self.trained_at == math.inf:
            self.trained_at = self.now + self.work.train_s[self.queue[0].sequence_no - 1]
        present = Version(EPOCH, self.served)
        while (wanted := scheduler.wanted_version()) is not None and wanted <= present:
            if wait_s := self.pace.wait_s(len(ledger.groups), self.now):
                return self.now + wait_s
            number = ledger.next_group - 1
            drawn = journal_pb2.TaskDrawn(group=ledger.next_group, policy_version=present.to_proto())
            self._note(task_drawn=drawn)
            self.left[number] = self.work.answer_tokens[number]
            self.sampled[number] = defaultdict(float)
        return math.inf

    def _advance(self, due: float) -> bool:
        """Go to the next event; return whether it is the end of a step."""
        rate = self.speed.of_one(len(self.left) * self.work.group_size) if self.left else 0.0
        generated_at = self.now + min(self.left.values()) / rate if self.left else math.inf
        arrives_at = self.published[0][0] if self.published else math.inf
        until = min(generated_at, self.trained_at, arrives_at, due)
        if until == math.inf:
            raise RuntimeError("neither side has anything to do: the lengths do not fill the batches")
        elapsed = until - self.now
        self.trainer_waited_s += elapsed if self.trained_at == math.inf else 0.0
        self.engine_idle_s += 0.0 if self.left else elapsed
        if self.left:
            first = min(self.left, key=lambda number: self.left[number])
            for number in self.left:
                self.left[number] -= elapsed * rate
                self.sampled[number][self.served] += elapsed * rate
        self.now = until
        if arrives_at <= until:
            self.served = self.published.popleft()[1]
        if generated_at <= until:
            self._finish(first)
            return False
        return self.trained_at <= until

    def _finish(self, number: int) -> None:
        del self.left[number]
        if number in self.work.without_signal:
            del self.sampled[number]
            self._note(group_dropped=journal_pb2.GroupDropped(group=number + 1, reason=Reason.NO_SIGNAL))
            return
        versions = sorted(self.sampled[number]) or [self.served]
        accepted = journal_pb2.GroupAccepted(
            group=number + 1, policy_versions=[Version(EPOCH, each).to_proto() for each in versions]
        )
        self._note(group_accepted=accepted)

    def _staleness(self, batch: Batch) -> float:
        pieces = [piece for group in batch.groups for piece in self.sampled.pop(group.number - 1).items()]
        tokens = sum(count for _, count in pieces)
        return batch.sequence_no - 1 - sum(version * count for version, count in pieces) / tokens
