"""What becomes of a scored group: missing rewards, episodes that were cut off, groups without signal."""

import pytest

from orchestrator_svc.config import EpisodeConfig, OverlongConfig
from orchestrator_svc.journal.records import Beginning, SharedRecord
from orchestrator_svc.run.sifting import penalty, sift
from sluice.v1 import common_pb2, orchestrator_pb2, tokens_pb2, trainer_pb2
from sluice.versions import BASE, Lineage, Version
from trainer_svc.objectives.config import ObjectiveConfig
from trainer_svc.service.batches import Expectations, convert, judge

LIMIT = 10
CUT, STOPPED = tokens_pb2.FINISH_REASON_LENGTH, tokens_pb2.FINISH_REASON_STOP


ASKED = Beginning.of([1, 2], tokens_pb2.Conversation())
"""The prompt of all of them."""


def record(name: str, reward: float | None, tokens: int = 4, finish=STOPPED, turns=()) -> SharedRecord:
    trajectory = tokens_pb2.Trajectory(
        trajectory_id=name,
        episode_id=name,
        group_id="g1",
        token_ids=range(3, 3 + tokens),
        mask_runs=[2, tokens],
        logprobs=[-1.0] * tokens,
        version_spans=[tokens_pb2.VersionSpan(start=0, policy_version=common_pb2.PolicyVersion())],
        temperature=1.0,
        finish_reason=finish,
        reward=reward,
        turn_runs=turns,
    )
    return SharedRecord(orchestrator_pb2.TrajectoryRecord(trajectory=trajectory), ASKED)


def settings(**rules) -> EpisodeConfig:
    return EpisodeConfig(**rules)


def test_what_has_no_reward_or_no_tokens_is_not_trained() -> None:
    group = sift([record("a", 1.0), record("b", None), record("c", 0.0, tokens=0)], settings(), LIMIT)
    assert [each.trajectory.trajectory_id for each in group.records] == ["a"]
    assert group.untrainable == {"b": "MISSING_REWARD", "c": "NO_TOKENS"}
    assert group.rewards == [1.0, None, 0.0]


@pytest.mark.parametrize(
    ("longest", "cut", "lost"), [(4, False, 0.0), (6, False, 0.0), (8, False, 1.0), (10, False, 2.0), (3, True, 2.0)]
)
def test_the_penalty_grows_over_the_buffer_before_the_limit(longest, cut, lost) -> None:
    rule = OverlongConfig(policy="penalise", buffer_tokens=4, penalty=2.0)
    trajectory = record("a", 1.0, tokens=12, finish=CUT if cut else STOPPED, turns=[12 - longest, longest]).trajectory
    if longest < 6:
        trajectory.turn_runs[:] = [longest, longest]
    assert penalty(trajectory, rule, LIMIT) == lost


def test_a_buffer_beyond_the_tasks_own_limit_spares_short_episodes() -> None:
    rule = OverlongConfig(policy="penalise", buffer_tokens=500, penalty=1.0)
    trajectory = record("a", 1.0, tokens=50).trajectory
    assert penalty(trajectory, rule, 100) == 0.5, "the ramp begins at 0 tokens, not below"


def test_without_a_buffer_only_what_was_cut_off_is_penalised() -> None:
    group = sift(
        [record("a", 1.0, tokens=10), record("b", 1.0, tokens=10, finish=CUT)],
        settings(overlong={"policy": "penalise", "penalty": 0.5}, filter={"drop_degenerate": True}),
        LIMIT,
    )
    assert [each.trajectory.reward for each in group.records] == [1.0, 0.5]
    assert group.rewards == [1.0, 1.0]
    assert group.overlong == 1
    assert not group.without_signal, "the penalty is a signal"


def test_filtered_episodes_leave_the_statistics_of_their_group() -> None:
    group = sift(
        [record("a", 1.0), record("b", 1.0), record("c", 0.0, finish=CUT)],
        settings(overlong={"policy": "filter"}, filter={"drop_degenerate": True}),
        LIMIT,
    )
    assert (len(group.records), group.untrainable, group.overlong) == (2, {"c": "OVERLONG"}, 1)
    assert group.without_signal


def test_a_masked_episode_counts_in_its_groups_statistics_and_in_nothing_else() -> None:
    group = sift(
        [record("a", 1.0), record("b", 1.0), record("c", 0.0, finish=CUT)],
        settings(overlong={"policy": "mask"}, filter={"drop_degenerate": True}),
        LIMIT,
    )
    assert (len(group.records), group.untrainable, group.overlong) == (3, {}, 1)
    assert not group.without_signal, "its reward differs"
    samples, faults = convert(
        [each.whole_trajectory() for each in group.records],
        Expectations(vocabulary=100, newest=BASE, has_estimator=True),
    )
    assert faults == {}
    header = trainer_pb2.BatchHeader(advantage_estimator="centered", max_staleness=0)
    header.target_version.CopyFrom(Version(1, 1).to_proto())
    batch = judge(samples, header, Lineage().begin(1, BASE), ObjectiveConfig().resolved, [b""] * 3)
    assert [each.reason for each in batch.decisions] == ["", "", "MASKED"]
    assert [each.advantages.max().item() for each in batch.sequences] == pytest.approx([1 / 3, 1 / 3])
    assert sum(int(each.loss_mask.sum()) for each in batch.sequences) == 8


def test_a_group_in_which_every_episode_is_masked_brings_nothing() -> None:
    cut = [record("a", 1.0, finish=CUT), record("b", 1.0, finish=CUT)]
    group = sift(cut, settings(overlong={"policy": "mask"}, filter={"drop_degenerate": True}), LIMIT)
    assert (group.records, group.untrainable) == ([], dict.fromkeys("ab", "OVERLONG"))
    assert not group.without_signal


@pytest.mark.parametrize(
    ("rules", "rewards", "without"),
    [
        ({"drop_degenerate": True}, (1.0, 1.0), True),
        ({"drop_degenerate": True}, (1.0, 0.0), False),
        ({"min_reward_mean": 0.5}, (0.4, 0.4), True),
        ({"max_reward_mean": 0.5}, (0.4, 0.8), True),
        ({}, (1.0, 1.0), False),
    ],
)
def test_which_groups_teach_nothing(rules, rewards, without) -> None:
    group = sift([record(str(index), each) for index, each in enumerate(rewards)], settings(filter=rules), LIMIT)
    assert group.without_signal is without
    assert len(group.records) == len(rewards)


@pytest.mark.parametrize("accepted", [True, False])
def test_a_function_of_the_user_says_which_groups_are_trained(accepted) -> None:
    asked = []

    def should_accept(trained) -> bool:
        asked.append([(each.trajectory.trajectory_id, list(each.trajectory.token_ids)) for each in trained])
        return accepted

    group = sift([record("a", 1.0), record("b", None)], settings(), LIMIT, should_accept)
    assert group.without_signal is not accepted
    assert asked == [[("a", [1, 2, 3, 4, 5, 6])]], "whole trajectories"
