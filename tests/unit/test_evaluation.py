"""What an evaluation says: chances with intervals, which one is the best, and when the next is due."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator_svc.config import CheckpointConfig
from orchestrator_svc.run.evaluation import EvalResult, EvalSample, Standing, gain, pass_at, wilson
from orchestrator_svc.run.run import Every
from sluice.v1 import orchestrator_pb2
from sluice.versions import Version


def samples(*tasks: list[float | None]) -> list[EvalSample]:
    return [
        EvalSample(str(number), "", "", reward, greedy=False, truncated=False)
        for number, rewards in enumerate(tasks)
        for reward in rewards
    ]


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.integers(1, 7))
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_with_an_exact_one(exact: list[bool], k: int) -> None:
    found = pass_at(k, samples([float(each) for each in exact]))
    if k > len(exact):
        assert found == []
        return
    choices = list(itertools.combinations(exact, k))
    assert found == [pytest.approx(sum(map(any, choices)) / len(choices))]


def test_an_evaluation_says_pass_at_k_for_powers_of_two_with_intervals() -> None:
    metrics = EvalResult(samples([1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, None])).metrics()
    assert metrics["pass_at_1"] == pytest.approx(1 / 8)
    assert metrics["pass_at_2"] == pytest.approx(1 / 4)
    assert metrics["pass_at_4"] == 1.0, "the other task has three samples"
    assert "pass_at_8" not in metrics
    for k in (1, 2, 4):
        assert 0 <= metrics[f"pass_at_{k}_low"] <= metrics[f"pass_at_{k}"] <= metrics[f"pass_at_{k}_high"] <= 1


@given(st.integers(1, 400), st.data())
def test_the_interval_holds_the_mean_and_shrinks_with_more_tasks(tasks: int, data: st.DataObject) -> None:
    mean = data.draw(st.integers(0, tasks)) / tasks
    (low, high), (inner_low, inner_high) = wilson(mean, tasks), wilson(mean, 4 * tasks)
    assert 0 <= low <= mean + 1e-12
    assert mean - 1e-12 <= high <= 1
    assert high > low
    assert inner_high - inner_low < high - low


def test_the_interval_agrees_with_published_values() -> None:
    assert wilson(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)


@given(st.lists(st.floats(0, 1), max_size=12), st.floats(0, 0.3))
def test_the_best_is_the_first_that_nothing_later_exceeds_by_the_least_gain(values: list[float], gain: float) -> None:
    standing = Standing("reward_mean", ["a"], gain)
    better = [standing.take(Version(1, at), {"a": {"reward_mean": value}}) for at, value in enumerate(values)]
    if not values:
        assert standing.best is None
        return
    last = max(at for at, each in enumerate(better) if each)
    assert (standing.best, standing.version, standing.since) == (values[last], Version(1, last), len(values) - 1 - last)
    assert all(value <= values[last] + gain for value in values[last:])


def test_the_best_of_earlier_processes_is_known_again() -> None:
    def finished(number: int, name: str, reward: float) -> orchestrator_pb2.EvaluationFinished:
        return orchestrator_pb2.EvaluationFinished(
            policy_version=Version(1, number).to_proto(), environment=name, metrics={"reward_mean": reward}
        )

    standing = Standing("reward_mean", ["a", "b"], 0.0)
    standing.take_all(
        [
            finished(3, "a", 0.9),
            finished(5, "a", 0.2),
            finished(5, "b", 0.6),
            finished(9, "a", 0.3),
            finished(9, "b", 0.4),
        ]
    )
    assert standing.best is not None
    assert math.isclose(standing.best, 0.4)
    assert (standing.version, standing.since) == (Version(1, 5), 1)


def test_a_version_without_a_result_of_every_environment_is_not_compared() -> None:
    standing = Standing("reward_mean", ["a", "b"], 0.0)
    assert standing.take(Version(1, 1), {"a": {"reward_mean": 0.9}, "b": {"reward_mean": 0.1}})
    assert not standing.take(Version(1, 2), {"a": {"reward_mean": 0.8}, "b": {"failed_tasks": 5.0}})
    assert standing.take(Version(1, 3), {"a": {"reward_mean": 0.8}, "b": {"reward_mean": 0.4}})


@pytest.mark.parametrize(
    ("steps", "seconds", "due"),
    [(0, 0.0, []), (3, 0.0, [3, 6, 9]), (0, 2.5, [3, 6, 9]), (4, 2.5, [3, 4, 7, 8]), (0, 0.5, list(range(1, 11)))],
)
def test_by_steps_by_seconds_or_by_both(steps: int, seconds: float, due: list[int]) -> None:
    every = Every(CheckpointConfig(every_steps=steps, every_s=seconds), last=0.0)
    assert [step for step in range(1, 11) if every.at(step, float(step))] == due


def test_a_gain_is_paired_by_task() -> None:
    before = {f"{task}": task / 10 for task in range(10)}
    better = gain(before, {task: reward + 0.01 for task, reward in before.items()})
    assert (better.mean, better.low, better.high) == pytest.approx((0.01, 0.01, 0.01)), "no task differs in its gain"
    assert better.tasks == 10


def test_the_interval_of_a_gain_is_that_of_the_mean_difference() -> None:
    found = gain({"a": 0.0, "b": 0.0, "c": 1.0, "left out": 0.0}, {"a": 1.0, "b": 0.0, "c": 1.0})
    error = math.sqrt(2 / 9 / 2)  # the variance of 1, 0, 0 is 1/3; over three tasks
    assert (found.mean, found.tasks) == (pytest.approx(1 / 3), 3)
    assert (found.low, found.high) == pytest.approx((1 / 3 - 1.96 * error, 1 / 3 + 1.96 * error), abs=1e-4)


def test_one_common_task_says_nothing_of_a_gain() -> None:
    with pytest.raises(ValueError, match="1 tasks have a reward of both models"):
        gain({"a": 0.0, "b": 0.0}, {"a": 1.0})


def test_a_task_counts_by_the_mean_of_its_sampled_rewards() -> None:
    assert EvalResult(samples([1.0, 0.0, None], [0.5])).task_rewards == {"0": 0.5, "1": 0.5}
