"""What is said of the rewards of a run's first groups."""

from __future__ import annotations

import pytest

from orchestrator_svc.run.faults import FirstRewards


@pytest.mark.parametrize(
    ("rewards", "problems"),
    [
        ([0.0, 1.0], []),
        ([None, 1.0], []),
        ([None, None], ["all 8 rewards of the first 4 groups are missing"]),
        ([0.0, 0.0], ["all 8 rewards of the first 4 groups are 0, and most objectives learn nothing"]),
        (
            [0.5, -200.0],
            ["4 of 8 rewards of the first 4 groups are beyond orchestrator.max_reward = 100, such as -200"],
        ),
        ([200.0, 200.0], ["all 8 rewards of the first 4 groups are 200", "8 of 8 rewards"]),
    ],
)
def test_odd_rewards_are_said_once_after_the_first_batch(rewards: list[float | None], problems: list[str]) -> None:
    first = FirstRewards(4, 100.0)
    assert [first.take_rewards("mine", rewards) for _ in range(3)] == [[]] * 3
    found = first.take_rewards("mine", rewards)
    assert len(found) == len(problems)
    assert all(each.startswith(problem) for each, problem in zip(found, problems, strict=True))
    assert [first.take_rewards("mine", [None, None]) for _ in range(20)] == [[]] * 20


def test_environments_are_looked_at_apart_and_a_few_rewards_say_nothing() -> None:
    first = FirstRewards(1, 100.0)
    assert first.take_rewards("a", [0.0] * 4) == []
    assert first.take_rewards("b", [1.0] * 4) == []
    assert len(first.take_rewards("a", [0.0] * 4)) == 1
    assert first.take_rewards("b", [0.5] * 4) == []
