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
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

from orchestrator_svc.envs.base import Message, Task
from orchestrator_svc.journal.ledger import Batch, Ledger
from orchestrator_svc.scheduler import OnStale, Scheduler, StalenessBound
from sluice.v1 import journal_pb2
from sluice.versions import BASE, Version

QUESTION = "go on"


def lengths(count: int, *, seed: int, median: int, p99: int, longest: int) -> list[int]:
    """Draw lognormal lengths in tokens, the same for the same seed; one in a hundred is above `p99`, all are cut to `longest`."""
    rng = random.Random(f"long_tail/{seed}")  # noqa: S311 - a workload, not a secret
    sigma = math.log(p99 / median) / NormalDist().inv_cdf(0.99)
    return [min(longest, max(1, round(median * rng.lognormvariate(0, sigma)))) for _ in range(count)]


class LongTail:
    """Asks for texts of given lengths, in order of dispatch, once for each session that the benchmark measures."""

    name = "long_tail"

    def __init__(self, answer_tokens: Sequence[int], sessions: int) -> None:
        self._answer_tokens = list(answer_tokens) * sessions

    def tasks(self, split: str, seed: int) -> list[Task]:
        """Return the tasks, placed so that the stream, which shuffles them by the seed, gives them in the wanted order."""
        from orchestrator_svc.task_stream import TaskStream  # noqa: PLC0415 - brings pydantic, which the processes do not need

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
    """Tokens per second of the whole engine by number of samples under way."""

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


def finish_times(work: Workload, speed: EngineSpeed, max_staleness: int) -> list[float]:
    """Return the seconds from the start at which each batch is applied."""
    return _Simulation(work, speed, max_staleness).run()


@dataclass
class _Simulation:
    work: Workload
    speed: EngineSpeed
    max_staleness: int
    now: float = 0.0
    left: dict[int, float] = field(default_factory=dict)
    """Tokens that each running group still has to sample."""
    began: dict[int, int] = field(default_factory=dict)
    """Number of the version that each running group began on."""
    queue: deque[Batch] = field(default_factory=deque)
    trained_at: float = math.inf

    def run(self) -> list[float]:
        self.scheduler = self._scheduler()
        applied: list[float] = []
        while len(applied) < len(self.work.train_s):
            self._start_what_may()
            if self._advance():
                batch = self.queue.popleft()
                self._note(batch_applied=journal_pb2.BatchApplied(sequence_no=batch.sequence_no))
                self.trained_at = math.inf
                applied.append(self.now)
        return applied

    def _scheduler(self) -> Scheduler:
        batches = len(self.work.train_s)
        self.ledger = Ledger()
        scheduler = Scheduler(
            self.ledger,
            StalenessBound(self.max_staleness, self.work.batch_groups, max_concurrent=len(self.work.answer_tokens)),
            window_fraction=self.work.window_fraction,
            on_stale=OnStale.DROP,
            max_steps=batches,
            max_running=len(self.work.answer_tokens),
        )
        self._note(epoch_begun=journal_pb2.EpochBegun(epoch=EPOCH, origin=BASE.to_proto()))
        scheduler.is_open = True
        return scheduler

    def _note(self, **kind: Any) -> None:  # noqa: ANN401 - one of the kinds of a fact
        self.ledger.apply(self.ledger.last_seq + 1, journal_pb2.Fact(**kind))

    def _start_what_may(self) -> None:
        scheduler, ledger = self.scheduler, self.ledger
        present = Version(EPOCH, ledger.applied)
        while (wanted := scheduler.wanted_version()) is not None and wanted <= present:
            number = ledger.next_group - 1
            drawn = journal_pb2.TaskDrawn(group=ledger.next_group, policy_version=present.to_proto())
            self._note(task_drawn=drawn)
            self.left[number] = self.work.answer_tokens[number]
            self.began[number] = present.number
        while len(self.queue) < QUEUED and (groups := scheduler.choose_batch()) is not None:
            made = journal_pb2.BatchMade(sequence_no=ledger.next_batch, groups=[each.number for each in groups])
            self._note(batch_made=made)
            self.queue.append(ledger.batches[made.sequence_no])
        if self.queue and self.trained_at == math.inf:
            self.trained_at = self.now + self.work.train_s[self.queue[0].sequence_no - 1]

    def _advance(self) -> bool:
        """Go to the next event; return whether it is the end of a batch rather than of a group."""
        rate = self.speed.of_one(len(self.left) * self.work.group_size) if self.left else 0.0
        generated_at = self.now + min(self.left.values()) / rate if self.left else math.inf
        until = min(generated_at, self.trained_at)
        if until == math.inf:
            raise RuntimeError("neither side has anything to do: the lengths do not fill the batches")
        if self.left:
            first = min(self.left, key=lambda number: self.left[number])
            self.left = {number: tokens - (until - self.now) * rate for number, tokens in self.left.items()}
        self.now = until
        if generated_at <= self.trained_at:
            self._finish(first)
            return False
        return True

    def _finish(self, number: int) -> None:
        del self.left[number]
        versions = [Version(EPOCH, each) for each in range(self.began.pop(number), self.ledger.applied + 1)]
        accepted = journal_pb2.GroupAccepted(group=number + 1, policy_versions=[each.to_proto() for each in versions])
        self._note(group_accepted=accepted)
