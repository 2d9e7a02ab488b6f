"""When groups start: the pace alone, and over simulated runs beside the same runs without it."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.overlap import Course, EngineSpeed, Loop, Workload, course, lengths
from orchestrator_svc.config import PacingConfig
from orchestrator_svc.run.scheduler import Pace
from sluice.v1 import journal_pb2 as pb
from sluice.versions import Version

BATCH = 4


class Batches:
    """Passes batches through a pace, one after the other."""

    def __init__(self, **settings: float) -> None:
        self.config = PacingConfig(**{"batches": 4, **settings})
        self.pace = Pace(self.config, BATCH)
        self.now, self.made = 0.0, 0

    def note(self, **kind: object) -> None:
        self.pace.apply_fact(pb.Fact(**kind), self.now)

    def send(self, *, generate_s: float) -> None:
        """Generate and send a batch."""
        self.made += 1
        groups = range(self.made * BATCH, (self.made + 1) * BATCH)
        for each in groups:
            self.note(task_drawn=pb.TaskDrawn(group=each))
        self.now += generate_s
        for each in groups:
            self.note(group_accepted=pb.GroupAccepted(group=each))
        self.note(batch_made=pb.BatchMade(sequence_no=self.made, groups=groups))
        self.note(batch_sent=pb.BatchSent(sequence_no=self.made))

    def train(self, *, train_s: float) -> None:
        self.now += train_s
        self.note(batch_applied=pb.BatchApplied(sequence_no=self.made))

    def through(self, count: int, *, generate_s: float, train_s: float) -> None:
        for _ in range(count):
            self.send(generate_s=generate_s)
            self.train(train_s=train_s)


def test_a_group_waits_until_its_batch_would_be_complete_just_in_time() -> None:
    batches = Batches(reserve=0.5)
    batches.through(5, generate_s=3.0, train_s=10.0)
    batches.send(generate_s=3.0)
    wait_s = batches.pace.wait_s
    assert wait_s(BATCH, batches.now) == pytest.approx(10 - 3 - 5)
    assert wait_s(2 * BATCH - 1, batches.now) == pytest.approx(10 - 3 - 5)
    assert wait_s(2 * BATCH, batches.now) == pytest.approx(20 - 3 - 5)
    assert wait_s(BATCH, batches.now + 1.5) == pytest.approx(0.5)
    assert wait_s(BATCH, batches.now + 2) == 0


def test_the_groups_of_the_next_step_never_wait() -> None:
    batches = Batches()
    batches.through(5, generate_s=1.0, train_s=10.0)
    assert [batches.pace.wait_s(live, batches.now) for live in range(BATCH)] == [0.0] * BATCH


def test_nothing_waits_before_the_times_are_known_or_where_pacing_is_off() -> None:
    young, off = Batches(), Batches(enabled=False)
    young.through(2, generate_s=1.0, train_s=10.0)
    off.through(20, generate_s=1.0, train_s=10.0)
    assert young.pace.wait_s(2 * BATCH, young.now) == off.pace.wait_s(2 * BATCH, off.now) == 0


def test_one_slow_batch_makes_groups_start_earlier_until_it_is_forgotten() -> None:
    batches = Batches()
    batches.through(4, generate_s=1.0, train_s=10.0)
    before = batches.pace.wait_s(BATCH, batches.now)
    batches.through(1, generate_s=6.0, train_s=10.0)
    assert batches.pace.wait_s(BATCH, batches.now) == pytest.approx(before - 5)
    batches.through(4, generate_s=1.0, train_s=10.0)
    assert batches.pace.wait_s(BATCH, batches.now) == pytest.approx(before)


def test_the_times_of_an_earlier_process_are_forgotten() -> None:
    batches = Batches()
    batches.through(5, generate_s=1.0, train_s=10.0)
    assert batches.pace.wait_s(BATCH, batches.now) > 0
    batches.note(process_started=pb.ProcessStarted())
    assert batches.pace.wait_s(BATCH, batches.now) == 0


def test_batches_of_groups_that_an_earlier_process_drew_are_not_measured() -> None:
    batches = Batches()
    batches.through(5, generate_s=3.0, train_s=10.0)
    drawn = list(range(100, 100 + 4 * BATCH))
    for each in drawn:
        batches.note(task_drawn=pb.TaskDrawn(group=each))
    batches.note(process_started=pb.ProcessStarted())
    while drawn:
        batches.made, groups, drawn = batches.made + 1, drawn[:BATCH], drawn[BATCH:]
        for each in groups:
            batches.note(group_accepted=pb.GroupAccepted(group=each))
        batches.note(batch_made=pb.BatchMade(sequence_no=batches.made, groups=groups))
        batches.note(batch_sent=pb.BatchSent(sequence_no=batches.made))
        batches.train(train_s=10.0)
    assert batches.pace.wait_s(BATCH, batches.now) == 0
    batches.through(4, generate_s=3.0, train_s=10.0)
    assert batches.pace.wait_s(BATCH, batches.now) == pytest.approx(10 - 3 - 2.5)


def test_a_group_in_place_of_a_dropped_one_counts_from_the_start_of_that_one() -> None:
    batches = Batches()
    batches.through(4, generate_s=1.0, train_s=10.0)
    before = batches.pace.wait_s(BATCH, batches.now)
    for each in range(100, 100 + BATCH):
        batches.note(task_drawn=pb.TaskDrawn(group=each))
    batches.now += 2
    for each in range(100, 100 + BATCH):
        batches.note(group_dropped=pb.GroupDropped(group=each))
    batches.through(1, generate_s=1.0, train_s=10.0)
    assert batches.pace.wait_s(BATCH, batches.now) == pytest.approx(before - 2)


def test_a_batch_whose_report_comes_before_the_answer_to_its_sending_is_not_at_the_trainer() -> None:
    batches = Batches()
    batches.through(5, generate_s=1.0, train_s=10.0)
    batches.note(batch_applied=pb.BatchApplied(sequence_no=6))
    batches.note(batch_sent=pb.BatchSent(sequence_no=6))
    begun = batches.now + 100  # if the trainer were at batch 6, the next step would be long overdue
    assert batches.pace.wait_s(BATCH, begun) == pytest.approx(10 - 1 - 2.5)


def test_batches_that_a_lost_trainer_held_are_forgotten() -> None:
    batches = Batches()
    batches.through(5, generate_s=1.0, train_s=10.0)
    batches.send(generate_s=1.0)
    batches.now += 100
    batches.note(epoch_begun=pb.EpochBegun(epoch=2, origin=Version(1, 5).to_proto()))
    assert batches.pace.wait_s(BATCH, batches.now) == pytest.approx(10 - 1 - 2.5)


# Whole runs.

UNSHARED = EngineSpeed({1: 1.0, 1000: 1000.0})
FIRST, END = 30, 76
"""Steps that are compared."""


def workload(
    ratio: float, *, long_tail: bool = False, noise: float = 0.15, batches: int = 80, seed: int = 0
) -> Workload:
    """Answers of 100 tokens or log-normal ones of that size; generation alone takes `ratio` times as long as a step."""
    rng = random.Random(seed)
    count = 2 * BATCH * batches
    tokens = lengths(count, seed=seed, median=70, p99=500, longest=600) if long_tail else [100] * count
    step_s = [100 / ratio * rng.lognormvariate(0, noise) for _ in range(batches)]
    return Workload(tokens, 1, BATCH, step_s, window_fraction=0.5)


def with_and_without(work: Workload, max_staleness: int, speed: EngineSpeed = UNSHARED) -> tuple[Course, Course]:
    publish_s = 0.2 * work.train_s[0]
    paced = course(work, speed, Loop(max_staleness, publish_s, PacingConfig()))
    return paced, course(work, speed, Loop(max_staleness, publish_s))


def mean_staleness(done: Course) -> float:
    return sum(done.staleness[FIRST:END]) / (END - FIRST)


@pytest.mark.parametrize(("ratio", "most"), [(0.2, 1.0), (0.5, 1.3), (0.9, 2.0)])
def test_where_generation_is_fast_tokens_are_young_and_the_trainer_still_never_waits(ratio, most) -> None:
    paced, unpaced = with_and_without(workload(ratio), 4)
    assert mean_staleness(unpaced) > 3.9
    assert mean_staleness(paced) <= most
    assert paced.waiting(FIRST, END)[0] < 0.01


@pytest.mark.parametrize("speed", [UNSHARED, EngineSpeed({1: 1.0, 8: 4.0})], ids=["wide", "full"])
@pytest.mark.parametrize("ratio", [2.0, 4.0])
def test_where_generation_is_the_bottleneck_nothing_changes(ratio, speed) -> None:
    paced, unpaced = with_and_without(workload(ratio), 2, speed)
    assert paced.step_s(FIRST, END) == pytest.approx(unpaced.step_s(FIRST, END), rel=0.001)


@pytest.mark.parametrize("dropped", [0.5, 0.75, 0.9])
def test_where_most_groups_are_dropped_the_trainer_waits_no_longer_for_those_in_their_place(dropped) -> None:
    plain, rng = workload(0.3), random.Random(1)
    tokens = [100] * (30 * BATCH * len(plain.train_s))
    without = frozenset(each for each in range(len(tokens)) if rng.random() < dropped)
    paced, unpaced = with_and_without(replace(plain, answer_tokens=tokens, without_signal=without), 4)
    assert paced.applied_s[-1] <= 1.02 * unpaced.applied_s[-1]


@settings(max_examples=20)
@given(
    ratio=st.floats(0.05, 5.0),
    max_staleness=st.integers(0, 4),
    long_tail=st.booleans(),
    noise=st.floats(0.0, 0.4),
    seed=st.integers(0, 1000),
)
def test_a_paced_run_ends_keeps_the_bound_and_loses_next_to_no_time(
    ratio, max_staleness, long_tail, noise, seed
) -> None:
    work = workload(ratio, long_tail=long_tail, noise=noise, batches=40, seed=seed)
    paced, unpaced = with_and_without(work, max_staleness)
    assert len(paced.applied_s) == 40
    assert max(paced.staleness) <= max_staleness + 1e-9
    assert all(one < other for one, other in pairwise(paced.applied_s))
    assert paced.applied_s[-1] <= 1.05 * unpaced.applied_s[-1]
