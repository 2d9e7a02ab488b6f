"""The bound of `sluice bench async`: what overlap alone can give, by cases that are worked out by hand."""

from __future__ import annotations

import argparse

import pytest

from benchmarks import async_levels
from benchmarks.overlap import EngineSpeed, LongTail, Loop, Workload, course, lengths
from orchestrator_svc.run.task_stream import TaskStream

UNSHARED = EngineSpeed({1: 1.0, 64: 64.0})
"""One token per second and sample, however many there are."""


def even(generate_s: int, train_s: float, batches: int = 12) -> Workload:
    return Workload([generate_s] * 2 * batches, 1, 2, [train_s] * batches, window_fraction=0.0)


def step_s(work: Workload, max_staleness: int, speed: EngineSpeed = UNSHARED) -> float:
    """Seconds per step over six steps: batches may end in bunches of max_staleness + 1."""
    return course(work, speed, Loop(max_staleness)).step_s(4, 10)


def test_without_staleness_the_sides_take_turns() -> None:
    assert course(even(4, 3.0), UNSHARED, Loop(0)).applied_s[:3] == [7.0, 14.0, 21.0]


@pytest.mark.parametrize(
    ("generate_s", "train_s", "max_staleness", "expected"),
    [
        (4, 4.0, 1, 4.0),  # the sides overlap in full
        (2, 6.0, 1, 6.0),  # the trainer is the limit
        (2, 6.0, 2, 6.0),
        (8, 2.0, 1, 5.0),  # two batches on their way, 10 s each
        (8, 2.0, 2, 10 / 3),  # three
    ],
)
def test_staleness_hides_the_shorter_side(generate_s, train_s, max_staleness, expected) -> None:
    assert step_s(even(generate_s, train_s), max_staleness) == pytest.approx(expected)


def test_an_engine_that_is_full_gains_nothing_from_more_samples() -> None:
    full = EngineSpeed({1: 1.0, 64: 1.0})
    assert step_s(even(4, 1.0), 0, full) == pytest.approx(9.0)
    assert step_s(even(4, 1.0), 2, full) == pytest.approx(8.0)


def test_a_straggler_is_passed_where_the_window_allows() -> None:
    answer_tokens = [1] * 120
    answer_tokens[9] = 20  # the last of the first batch, whose groups may also be trained in the second and the third
    strict = Workload(answer_tokens, 1, 10, [1.0] * 12, window_fraction=0.0)
    windowed = Workload(answer_tokens, 1, 10, [1.0] * 12, window_fraction=0.3)
    assert course(strict, UNSHARED, Loop(2)).applied_s[0] == pytest.approx(21.0)
    assert course(windowed, UNSHARED, Loop(2)).applied_s[0] == pytest.approx(2.0)


def test_speed_between_measured_points_follows_the_time_of_a_step() -> None:
    speed = EngineSpeed({1: 100.0, 3: 100.0})  # a step takes 10 ms with one sample and 30 ms with three
    assert speed.of_one(2) == pytest.approx(50.0)
    assert speed.of_one(6) == pytest.approx(100 / 6)


def test_every_session_asks_for_the_same_lengths_in_the_same_order() -> None:
    wanted = lengths(30, seed=5, median=40, p99=400, longest=448)
    assert wanted == lengths(30, seed=5, median=40, p99=400, longest=448)
    assert max(wanted) <= 448
    stream = TaskStream(LongTail(wanted, sessions=3).tasks("train", 7), 7)
    assert [stream.get(stream.at(position)).max_tokens for position in range(90)] == wanted * 3


def test_the_course_says_how_long_each_side_waits() -> None:
    taking_turns = course(even(4, 2.0), UNSHARED, Loop(0))
    assert taking_turns.waiting(4, 10) == pytest.approx((4 / 6, 2 / 6))
    overlapped = course(even(2, 6.0), UNSHARED, Loop(1))
    assert overlapped.waiting(4, 10) == pytest.approx((0.0, 4 / 6))


def test_a_version_on_its_way_holds_the_groups_that_need_it() -> None:
    assert course(even(4, 3.0), UNSHARED, Loop(0, publish_s=1.0)).applied_s[:3] == [7.0, 15.0, 23.0]


def test_staleness_counts_tokens_by_the_version_that_sampled_them() -> None:
    assert course(even(4, 3.0), UNSHARED, Loop(0)).staleness == [0.0] * 12
    assert course(even(2, 6.0), UNSHARED, Loop(2)).staleness[4:10] == [2.0] * 6


def test_what_is_measured_is_compared_with_the_bound_of_its_level() -> None:
    options = argparse.Namespace(steps=6, keep=None)
    work = even(2, 6.0, batches=16)
    bounds = {str(level): course(work, UNSHARED, Loop(level)) for level in async_levels.LEVELS}
    step = {
        "time/step_s": 8.0,
        "trainer/tokens": 10.0,
        "trainer/tokens_per_s": 2.0,
        "load/trainer_idle": 0.25,
        "load/rollout_idle": 0.5,
        "staleness/mean": 1.5,
    }
    sessions = {kind: [[step] * 6] for kind in (*map(str, async_levels.LEVELS), "both_cores")}
    sessions["0"] = [[{**step, "time/step_s": 16.0}] * 6]
    found = async_levels._results(options, sessions, bounds, UNSHARED)
    assert (found["ratios"]["over_bound_0"], found["ratios"]["over_bound_1"]) == (2.0, 1.333)
    assert (found["ratios"]["speedup_1"], found["ratios"]["bound_1"]) == (2.0, 1.333)
    assert found["trainer_waits"]["1"] == 0.25
    assert found["bound_trainer_waits"] == {"0": 0.25, "1": 0, "2": 0, "4": 0}
    assert found["engine_waits"]["4"] == 0.5
    assert found["bound_engine_waits"]["1"] == pytest.approx(4 / 6, abs=1e-3)
