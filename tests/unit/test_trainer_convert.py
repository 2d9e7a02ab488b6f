"""Trajectories on the wire become training rows; whatever is wrong is named by index and field."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sluice.v1 import tokens_pb2
from sluice.versions import Version
from trainer_svc.objectives.advantages import discounted_sum
from trainer_svc.service.batches import Expectations, convert

EXPECTED = Expectations(vocabulary=100, newest=Version(1, 5), has_estimator=True)


def spans(*versions: tuple[int, Version]) -> list[tokens_pb2.VersionSpan]:
    return [tokens_pb2.VersionSpan(start=start, policy_version=version.to_proto()) for start, version in versions]


def trajectory(**changes: Any) -> tokens_pb2.Trajectory:
    """Two turns: prompt of 2, 3 sampled, observation of 1, 2 sampled."""
    values: dict[str, Any] = {
        "trajectory_id": "t",
        "group_id": "g",
        "episode_id": "e",
        "token_ids": [1, 2, 3, 4, 5, 6, 7, 8],
        "mask_runs": [2, 3, 1, 2],
        "logprobs": [-0.1, -0.2, -0.3, -0.4, -0.5],
        "version_spans": spans((0, Version(1, 4)), (4, Version(1, 5))),
        "temperature": 0.7,
        "reward": 0.5,
    }
    return tokens_pb2.Trajectory(**{**values, **changes})


def faults(*trajectories: tokens_pb2.Trajectory, expected: Expectations = EXPECTED) -> dict[str, str]:
    return convert(trajectories, expected)[1]


def test_each_value_lands_at_its_token() -> None:
    (sample,), wrong = convert([trajectory(ref_logprobs=[-1, -2, -3, -4, -5])], EXPECTED)
    sequence = sample.sequence
    assert not wrong
    assert sequence.loss_mask.tolist() == [False, False, True, True, True, False, True, True]
    np.testing.assert_allclose(
        sequence.behaviour_logprobs.numpy(), [np.nan, np.nan, -0.1, -0.2, -0.3, np.nan, -0.4, -0.5], rtol=1e-6
    )
    assert sequence.reference_logprobs is not None
    assert sequence.reference_logprobs[sequence.loss_mask].tolist() == [-1, -2, -3, -4, -5]
    assert [(span.start, span.version) for span in sequence.versions] == [(2, Version(1, 4)), (7, Version(1, 5))]
    assert (sequence.temperature, sequence.reward, sample.trained_tokens) == (pytest.approx(0.7), 0.5, 5)


@pytest.mark.parametrize(("given", "expected"), [([], [0] * 5), ([2.0], [2.0] * 5), ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5])])
def test_advantages_come_as_none_one_or_one_per_trained_token(given: list[float], expected: list[float]) -> None:
    (sample,), _ = convert([trajectory(advantages=given)], EXPECTED)
    assert sample.sequence.advantages[sample.sequence.loss_mask].tolist() == expected
    assert not sample.sequence.advantages[~sample.sequence.loss_mask].any()
    assert sample.has_advantages == bool(given)


def test_rewards_of_branches_stand_at_the_tokens_of_their_turns() -> None:
    (sample,), _ = convert([trajectory(turn_runs=[3, 2], branch_rewards=[0.5, 1.0])], EXPECTED)
    assert sample.branch_offsets is not None
    assert sample.branch_offsets.tolist() == [0, 0, 0, 0, 0, 0, 0.5, 0.5]


def test_the_rewards_from_a_turn_on_add_up_to_the_reward_of_its_branches() -> None:
    """Two branches of 1 and 0 share a first turn: reward-to-go is 0.5 in it, and each branch's own after it."""
    shared = trajectory(turn_runs=[3, 2], branch_rewards=[0.5, 1.0])
    alone = trajectory(
        trajectory_id="u", mask_runs=[6, 2], logprobs=[-0.4, -0.5], version_spans=spans((0, Version(1, 5)))
    )
    alone.turn_runs[:], alone.branch_rewards[:] = [2], [0.0]
    samples, wrong = convert([shared, alone], EXPECTED)
    assert not wrong
    to_go = [
        discounted_sum(each.sequence.token_rewards[each.sequence.loss_mask], 1.0).tolist()
        for each in samples
        if each.sequence.token_rewards is not None
    ]
    assert to_go == [[0.5, 0.5, 0.5, 1.0, 1.0], [0.0, 0.0]]


def test_rewards_of_branches_come_on_top_of_rewards_of_turns() -> None:
    changes: dict[str, Any] = {"turn_runs": [3, 2], "branch_rewards": [0.5, 1.0]}
    (plain,), _ = convert([trajectory(**changes)], EXPECTED)
    (turns,), _ = convert([trajectory(**changes, turn_rewards=[tokens_pb2.TurnReward(turn=0, reward=0.25)])], EXPECTED)
    (tokens,), _ = convert([trajectory(**changes, token_rewards=[0, 0, 0.25, 0, 0.25])], EXPECTED)
    for sample, expected in (
        (plain, [0, 0, -0.5, 0, 1.0]),
        (turns, [0, 0, -0.25, 0, 0.75]),
        (tokens, [0, 0, -0.25, 0, 0.75]),
    ):
        rewards = sample.sequence.token_rewards
        assert rewards is not None
        assert rewards[sample.sequence.loss_mask].tolist() == expected
    process = Expectations(vocabulary=100, newest=Version(1, 5), has_estimator=False, estimates="process")
    (own,), _ = convert([trajectory(**changes, token_rewards=[0, 0, 0.25, 0, 0.25])], process)
    assert own.sequence.token_rewards is not None
    assert own.sequence.token_rewards[own.sequence.loss_mask].tolist() == [0, 0, 0.25, 0, 0.25], "each token's own"


def test_a_missing_reward_is_not_zero() -> None:
    message = trajectory()
    message.ClearField("reward")
    (missing, zero), _ = convert([message, trajectory(trajectory_id="u", episode_id="f", reward=0.0)], EXPECTED)
    assert (missing.sequence.reward, zero.sequence.reward) == (None, 0.0)


def test_logprobs_that_nobody_knows_are_kept_as_missing() -> None:
    (sample,), wrong = convert([trajectory(logprobs=[])], EXPECTED)
    assert not wrong
    assert sample.sequence.behaviour_logprobs.isnan().all()


def test_a_truncated_episode_is_known_by_its_finish_reason() -> None:
    (sample,), _ = convert([trajectory(finish_reason=tokens_pb2.FINISH_REASON_LENGTH)], EXPECTED)
    assert sample.sequence.truncated


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"token_rewards": [1, 2, 3, 4, 5]}, [1, 2, 3, 4, 5]),
        ({"turn_rewards": [(0, 0.25), (1, 0.5)], "turn_runs": [3, 2], "reward": 0.75}, [0, 0, 0.25, 0, 0.5]),
        ({"turn_rewards": [(0, 0.25)], "turn_runs": [3, 2], "reward": 1.0}, [0, 0, 0.25, 0, 0.75]),
        ({"turn_rewards": [(0, 0.5)], "reward": 0.5}, [0, 0, 0, 0, 0.5]),
    ],
    ids=["episode", "tokens", "turns", "turns and episode", "one turn"],
)
def test_rewards_stand_where_they_were_earned(changes: dict[str, Any], expected: list[float] | None) -> None:
    changes = dict(changes)
    if "turn_rewards" in changes:
        pairs = changes["turn_rewards"]
        changes["turn_rewards"] = [tokens_pb2.TurnReward(turn=turn, reward=reward) for turn, reward in pairs]
    (sample,), wrong = convert([trajectory(**changes)], EXPECTED)
    assert not wrong
    found = sample.sequence.token_rewards
    assert (found if found is None else found[sample.sequence.loss_mask].tolist()) == expected
    assert sample.sequence.reward == changes.get("reward", 0.5)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("trajectory_id", {"trajectory_id": ""}),
        ("group_id", {"group_id": "x" * 300}),
        ("adapter", {"adapter": "lora"}),
        ("token_ids", {"token_ids": []}),
        ("token_ids", {"token_ids": [1, 2, 3, 4, 5, 6, 7, 100]}),
        ("mask_runs", {"mask_runs": [2, 3, 1, 3]}),
        ("mask_runs", {"mask_runs": [2**32 - 1, 2**32 - 1]}),
        ("mask_runs", {"mask_runs": [0, 5, 3]}),
        ("logprobs", {"logprobs": [-0.1]}),
        ("logprobs", {"logprobs": [-0.1, 0.5, -0.3, -0.4, -0.5]}),
        ("logprobs", {"logprobs": [-0.1, float("nan"), -0.3, -0.4, -0.5]}),
        ("version_spans", {"version_spans": []}),
        ("version_spans", {"version_spans": spans((1, Version(1, 4)))}),
        ("version_spans", {"version_spans": spans((0, Version(1, 4)), (5, Version(1, 5)))}),
        ("version_spans", {"version_spans": spans((0, Version(1, 4)), (3, Version(1, 5)), (3, Version(1, 5)))}),
        ("version_spans", {"version_spans": spans((0, Version(1, 6)))}),
        ("version_spans", {"version_spans": spans((0, Version(2, 1)))}),
        ("version_spans", {"version_spans": spans((0, Version(0, 1)))}),
        ("version_spans", {"version_spans": [tokens_pb2.VersionSpan(start=0)]}),
        ("temperature", {"temperature": 0.0}),
        ("temperature", {"temperature": 1e-6}),
        ("temperature", {"temperature": float("nan")}),
        ("reward", {"reward": float("nan")}),
        ("advantages", {"advantages": [1.0, 2.0]}),
        ("advantages", {"advantages": [float("inf")]}),
        ("token_rewards", {"token_rewards": [1.0]}),
        ("token_rewards", {"token_rewards": [1.0, 2.0, 3.0, 4.0, float("nan")]}),
        ("turn_runs", {"turn_runs": [3, 3]}),
        ("turn_rewards", {"turn_runs": [3, 2], "turn_rewards": [tokens_pb2.TurnReward(turn=2, reward=1.0)]}),
        ("turn_rewards", {"turn_rewards": [tokens_pb2.TurnReward(turn=0, reward=float("inf"))]}),
        ("branch_rewards", {"turn_runs": [3, 2], "branch_rewards": [1.0]}),
        ("branch_rewards", {"turn_runs": [3, 2], "branch_rewards": [1.0, float("nan")]}),
        ("reward", {"turn_runs": [3, 2], "branch_rewards": [1.0, 0.0], "reward": None}),
        ("ref_logprobs", {"ref_logprobs": [-1.0]}),
        ("teacher_logprobs", {"teacher_logprobs": [-1.0]}),
    ],
)
def test_a_malformed_trajectory_is_named_by_index_and_field(field: str, changes: dict[str, Any]) -> None:
    wrong = faults(trajectory(trajectory_id="fine", episode_id="fine"), trajectory(**changes))
    assert f"trajectories[1].{field}" in wrong
    assert not any(name.startswith("trajectories[0]") for name in wrong)


def test_a_trajectory_without_trained_tokens_is_not_malformed() -> None:
    (sample,), wrong = convert([trajectory(mask_runs=[8], logprobs=[], version_spans=[])], EXPECTED)
    assert not wrong
    assert sample.trained_tokens == 0


def test_names_are_unique_and_an_episode_has_one_group_and_reward() -> None:
    assert "trajectories[1].trajectory_id" in faults(trajectory(), trajectory())
    branches = (trajectory(), trajectory(trajectory_id="u"))
    assert not faults(*branches)
    assert "trajectories[1].episode_id" in faults(trajectory(), trajectory(trajectory_id="u", reward=0.1))
    assert "trajectories[1].episode_id" in faults(trajectory(), trajectory(trajectory_id="u", group_id="h"))


def test_what_the_objective_reads_must_be_there() -> None:
    strict = Expectations(vocabulary=100, newest=Version(1, 5), has_estimator=False, needs_reference=True)
    assert set(faults(trajectory(), expected=strict)) == {"trajectories[0].advantages", "trajectories[0].ref_logprobs"}
    assert not faults(trajectory(advantages=[1.0], ref_logprobs=[-1.0] * 5), expected=strict)


def test_a_trainer_that_estimates_takes_no_advantages() -> None:
    own = Expectations(vocabulary=100, newest=Version(1, 5), has_estimator=False, estimates="process")
    rewarded = trajectory(turn_rewards=[tokens_pb2.TurnReward(turn=0, reward=0.5)])
    assert not faults(rewarded, expected=own)
    assert set(faults(trajectory(advantages=[1.0]), expected=own)) == {
        "trajectories[0].advantages",
        "trajectories[0].turn_rewards",
    }


def test_a_teacher_that_is_not_loaded_must_have_spoken() -> None:
    distilled = Expectations(vocabulary=100, newest=Version(1, 5), has_estimator=True, needs_teacher=True)
    assert set(faults(trajectory(), expected=distilled)) == {"trajectories[0].teacher_logprobs"}
    assert not faults(trajectory(teacher_logprobs=[-1.0] * 5), expected=distilled)
