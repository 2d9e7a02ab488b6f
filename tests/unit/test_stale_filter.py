"""Which tokens of a batch are trained: never one beyond the staleness bound, and every trajectory has an answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice.advantages import BATCH_SCALES, ESTIMATORS, TRAINER_ESTIMATORS, Episode, estimate
from sluice.v1 import tokens_pb2, trainer_pb2
from sluice.versions import BASE, Lineage, Version, VersionSpan
from trainer_svc.batch.rows import TrainingRow
from trainer_svc.objectives.config import ObjectiveConfig
from trainer_svc.service.batches import Batch, Sample, judge

LINEAGE = Lineage().begin(1, BASE)
NOW = Version(1, 5)
PROMPT = 2
DROP, TRUNCATE, REQUEUE = (
    trainer_pb2.STALE_POLICY_DROP,
    trainer_pb2.STALE_POLICY_TRUNCATE,
    trainer_pb2.STALE_POLICY_REQUEUE,
)


def sample(
    name: str,
    *,
    group: str = "g",
    versions: list[tuple[int, int]] | None = None,
    tokens: int = 4,
    reward: float | None = 1.0,
    advantage: float | None = None,
    logprob: float = -1.0,
    epoch: int = 1,
    episode: str = "",
) -> Sample:
    mask = torch.zeros(PROMPT + tokens, dtype=torch.bool)
    mask[PROMPT:] = True
    spans = tuple(VersionSpan(start, Version(epoch, number)) for start, number in versions or [(0, NOW.number)])
    sequence = TrainingRow(
        input_ids=torch.arange(PROMPT + tokens),
        loss_mask=mask,
        behaviour_logprobs=torch.where(mask, logprob, torch.nan),
        advantages=torch.where(mask, advantage or 0.0, 0.0),
        reward=reward,
        group_id=group,
        episode_id=episode or name,
        trajectory_id=name,
    )
    return Sample(sequence, spans if tokens else (), tokens, advantage is not None)


def consumed(
    *samples: Sample,
    max_staleness: int = 1,
    on_stale: trainer_pb2.StalePolicy.ValueType = DROP,
    estimator: str = "grpo",
    lineage: Lineage = LINEAGE,
    now: Version = NOW,
    reads_behaviour: bool = True,
    together: dict[str, list[str]] | None = None,
) -> Batch:
    header = trainer_pb2.BatchHeader(
        batch_id="b",
        sequence_no=now.number + 1,
        target_version=Version(now.epoch, now.number + 1).to_proto(),
        max_staleness=max_staleness,
        on_stale=on_stale,
        advantage_estimator="" if together else estimator,
        estimated_groups=[{"advantage_estimator": name, "group_ids": ids} for name, ids in (together or {}).items()],
    )
    own = {"advantage": estimator} if estimator in TRAINER_ESTIMATORS else {}
    objective = ObjectiveConfig(preset="grpo" if reads_behaviour else "distill", **own).resolved
    return judge(samples, header, lineage, objective, [b""] * len(samples))


def results(
    filtered: Batch, *, steps: int = 1, lost: int = 0, critic_only: bool = False
) -> list[trainer_pb2.TrajectoryResult]:
    """Return the results if each row was part of `steps` applied steps and lost `lost` tokens before them."""
    rows = [[int(each.loss_mask.sum()) - lost, steps] for each in filtered.sequences]
    return filtered.results(np.array(rows, dtype=np.int64).reshape(-1, 2), critic_only=critic_only)


def outcomes(filtered: Batch) -> dict[str, str]:
    return {
        result.trajectory_id: result.reason
        or tokens_pb2.TrajectoryOutcome.Name(result.outcome).removeprefix("TRAJECTORY_OUTCOME_")
        for result in results(filtered)
    }


def advantages(filtered: Batch) -> dict[str, float]:
    """The advantage of each trained sequence; it must be the same for all its trained tokens."""
    found = {}
    for sequence in filtered.sequences:
        values = set(sequence.advantages[sequence.loss_mask].tolist())
        assert len(values) == 1
        found[sequence.trajectory_id] = values.pop()
    return found


def test_max_staleness_zero_trains_only_what_these_very_weights_sampled() -> None:
    result = consumed(sample("now"), sample("older", versions=[(0, 4)]), max_staleness=0)
    assert outcomes(result) == {"now": "TRAINED", "older": "STALE"}


@pytest.mark.parametrize("on_stale", [DROP, REQUEUE])
def test_one_token_beyond_the_bound_drops_the_trajectory(on_stale: trainer_pb2.StalePolicy.ValueType) -> None:
    result = consumed(sample("mixed", versions=[(0, 3), (1, 5)]), sample("fresh", versions=[(0, 4)]), on_stale=on_stale)
    assert outcomes(result) == {"mixed": "STALE", "fresh": "TRAINED"}
    assert results(result)[0].max_staleness == 2
    assert result.metrics["dropped_trajectories/stale"] == 1
    assert result.metrics["dropped_tokens/stale"] == 4


def test_truncate_takes_only_the_stale_tokens_out() -> None:
    result = consumed(sample("mixed", versions=[(0, 3), (3, 5)]), sample("all", versions=[(0, 1)]), on_stale=TRUNCATE)
    assert outcomes(result) == {"mixed": "TRAINED", "all": "STALE"}
    assert result.sequences[0].loss_mask.tolist() == [False] * 5 + [True]
    assert results(result)[0].trained_tokens == 1
    assert result.metrics["dropped_tokens/stale"] == 3 + 4


def test_group_statistics_are_those_of_the_survivors() -> None:
    members = [sample("a", reward=0.0), sample("b", reward=1.0), sample("stale", reward=5.0, versions=[(0, 0)])]
    other = [sample("c", group="h", reward=1.0, advantage=7.0), sample("d", group="h", reward=2.0, advantage=-7.0)]
    values = advantages(consumed(*members, *other, estimator="centered"))
    assert values == {"a": -0.5, "b": 0.5, "c": 7.0, "d": -7.0}, "a group that lost none keeps what it was given"


def test_given_advantages_of_a_group_that_lost_a_member_are_estimated_again() -> None:
    members = [sample("a", reward=0.0, advantage=-3.0), sample("b", reward=1.0, advantage=-2.0)]
    values = advantages(
        consumed(*members, sample("stale", reward=9.0, advantage=5.0, versions=[(0, 0)]), estimator="centered")
    )
    assert values == {"a": -0.5, "b": 0.5}


REWARDS = {"a": 0.0, "b": 1.0, "c": 3.0}


def episodes_of(group: str, rewards: dict[str, float]) -> list[Episode]:
    return [Episode(f"{group}-{name}", group, reward, 4) for name, reward in rewards.items()]


def test_tokens_below_branches_with_rewards_are_estimated_again_by_these() -> None:
    # Episode f forked: 2 tokens belong to both branches (rewards 2 and 0), 2 tokens only to the branch with 2. The episode's reward is the mean, 1.
    forked = sample("f0", reward=1.0, advantage=9.0, episode="f")
    offsets = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    late = sample("late", reward=4.0, advantage=9.0, versions=[(0, NOW.number - 2)])
    batch = consumed(
        replace(forked, branch_offsets=offsets), sample("b", reward=3.0, advantage=9.0), late, estimator="centered"
    )
    found = {each.trajectory_id: each.advantages[each.loss_mask].tolist() for each in batch.sequences}
    assert found == {"f0": [-1.0, -1.0, 0.0, 0.0], "b": [1.0] * 4}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_each_environment_is_estimated_again_by_its_own_estimator(estimator: str) -> None:
    """Of two environments one loses an episode; its survivors get what its estimator says of them alone."""
    survivors = {"a": 0.0, "b": 1.0}
    shrunk = [sample(f"g-{name}", group="g", reward=each, advantage=9.0) for name, each in survivors.items()]
    late = sample("g-c", group="g", reward=3.0, advantage=9.0, versions=[(0, 0)])
    whole = [sample(f"w-{name}", group="w", reward=each, advantage=8.0) for name, each in REWARDS.items()]
    other = [sample(f"o-{name}", group="o", reward=100.0 * each, advantage=7.0) for name, each in REWARDS.items()]
    own, others = ["g", "w"], "rloo" if estimator != "rloo" else "grpo"
    values = advantages(consumed(*shrunk, late, *whole, *other, together={estimator: own, others: ["o"]}))
    right = estimate(estimator, [*episodes_of("g", survivors), *episodes_of("w", REWARDS)])
    assert {name: values[name] for name in ("g-a", "g-b")} == pytest.approx({k: right[k] for k in ("g-a", "g-b")})
    kept = {f"w-{name}": right[f"w-{name}"] if estimator in BATCH_SCALES else 8.0 for name in REWARDS}
    assert {name: values[name] for name in kept} == pytest.approx(kept), "one scale holds for all that it covers"
    assert {values[f"o-{name}"] for name in REWARDS} == {7.0}, "the other environment lost nothing"


def test_a_batch_that_leaves_a_group_without_an_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves out group 'h'"):
        consumed(sample("a"), sample("b", group="h"), together={"grpo": ["g"]})


@pytest.mark.parametrize("together", [{"grpo": ["g"], "rloo": ["h", "g"]}, {"grpo": ["g", "h", "g"]}])
def test_a_batch_that_names_a_group_in_two_places_is_refused(together: dict[str, list[str]]) -> None:
    with pytest.raises(ValueError, match="names group 'g' twice: name it in one entry"):
        consumed(sample("a"), sample("b", group="h"), together=together)


def test_without_an_estimator_survivors_keep_what_they_were_given() -> None:
    values = advantages(consumed(sample("a", advantage=3.0), sample("stale", versions=[(0, 0)]), estimator=""))
    assert values == {"a": 3.0}


def test_a_missing_reward_takes_part_in_no_statistic_and_is_answered() -> None:
    result = consumed(sample("a", reward=0.0), sample("b", reward=1.0), sample("m", reward=None), estimator="centered")
    assert advantages(result) == {"a": -0.5, "b": 0.5}
    assert outcomes(result)["m"] == "MISSING_REWARD"
    assert result.metrics["missing_rewards"] == 1


def test_a_missing_reward_with_given_advantages_is_trained() -> None:
    assert outcomes(consumed(sample("m", reward=None, advantage=1.0))) == {"m": "TRAINED"}


@pytest.mark.parametrize("estimator", ["gae", "reinforce_pp", "process"])
def test_what_the_update_estimates_waits_for_it_and_still_needs_a_reward(estimator: str) -> None:
    result = consumed(sample("a", reward=0.0), sample("lone", group="h"), sample("m", reward=None), estimator=estimator)
    assert advantages(result) == {"a": 0.0, "lone": 0.0}
    assert outcomes(result)["m"] == "MISSING_REWARD"


def test_branches_of_an_episode_count_once() -> None:
    branches = [sample("a1", episode="a", reward=0.0), sample("a2", episode="a", reward=0.0)]
    values = advantages(consumed(*branches, sample("b", reward=3.0), estimator="centered"))
    assert values == {"a1": -1.5, "a2": -1.5, "b": 1.5}


def test_nothing_to_train_is_told_apart_from_stale() -> None:
    result = consumed(sample("empty", tokens=0), sample("missing", logprob=float("nan")))
    assert outcomes(result) == {"empty": "MASKED", "missing": "NO_TRAINED_TOKENS"}
    assert result.sequences == ()


def test_an_objective_that_does_not_read_who_sampled_trains_tokens_without_log_probabilities() -> None:
    missing = sample("missing", logprob=float("nan"), versions=[(0, 3), (1, 5)])
    result = consumed(missing, on_stale=TRUNCATE, estimator="", reads_behaviour=False)
    assert outcomes(result) == {"missing": "TRAINED"}
    assert results(result)[0].trained_tokens == int(result.sequences[0].loss_mask.sum()) == 3


def test_tokens_of_a_retired_version_are_told_apart() -> None:
    lineage = LINEAGE.begin(2, Version(1, 3))
    result = consumed(
        sample("retired", versions=[(0, 5)]), sample("kept", versions=[(0, 3)]), lineage=lineage, now=Version(2, 4)
    )
    assert outcomes(result) == {"retired": "RETIRED_EPOCH", "kept": "TRAINED"}
    assert results(result)[0].max_staleness == (5 - 3) + (4 - 3)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"steps": 0}, "NON_FINITE_STEP"),
        ({"critic_only": True}, "CRITIC_WARMUP"),
        ({"steps": 0, "critic_only": True}, "NON_FINITE_STEP"),
        ({"lost": 4}, "NO_TRAINED_TOKENS"),
    ],
)
def test_a_row_that_changed_no_weight_of_the_policy_was_not_trained(how: dict[str, Any], reason: str) -> None:
    result = consumed(sample("a"), sample("stale", versions=[(0, 0)]))
    assert [(each.reason, each.trained_tokens) for each in results(result, **how)] == [(reason, 0), ("STALE", 0)]


def test_each_row_has_an_answer_of_its_own() -> None:
    result = consumed(sample("a", tokens=3), sample("stale", versions=[(0, 0)]), sample("b", tokens=5))
    told = result.results(np.array([[3, 2], [4, 0]], dtype=np.int64))
    assert [(each.trajectory_id, each.reason, each.trained_tokens) for each in told] == [
        ("a", "", 3),
        ("stale", "STALE", 0),
        ("b", "NON_FINITE_STEP", 0),
    ]


def test_the_oldest_token_of_a_batch_is_one_that_enters_the_loss() -> None:
    result = consumed(sample("a", versions=[(0, 4), (1, 5)]), sample("b", versions=[(0, 2)]))
    assert [each.ages.tolist() for each in result.decisions] == [[1, 0, 0, 0], []]
    assert result.oldest == 1
    assert consumed(sample("b", versions=[(0, 2)])).oldest == 0


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(0, 2)), min_size=1, max_size=8),
    st.integers(0, 5),
    st.sampled_from([DROP, TRUNCATE, REQUEUE]),
)
def test_no_token_beyond_the_bound_is_ever_trained(
    rows: list[tuple[list[int], int]], bound: int, on_stale: trainer_pb2.StalePolicy.ValueType
) -> None:
    samples = [
        sample(
            f"t{index}", group=f"g{group}", versions=list(enumerate(numbers)), tokens=len(numbers), reward=float(index)
        )
        for index, (numbers, group) in enumerate(rows)
    ]
    result = consumed(*samples, max_staleness=bound, on_stale=on_stale)
    ages = np.concatenate([decision.ages for decision in result.decisions])
    assert (ages <= bound).all()
    assert len(ages) == sum(int(sequence.loss_mask.sum()) for sequence in result.sequences)
    assert len(result.decisions) == len(samples), "every trajectory has an answer"
    for decision in result.decisions:
        assert (decision.sequence is None) == bool(decision.reason)


def test_rewards_that_the_estimator_cannot_take_are_refused_only_where_it_has_to_run() -> None:
    negative = [sample("a", reward=-1.0, advantage=1.0), sample("b", reward=0.0, advantage=-1.0)]
    assert advantages(consumed(*negative, estimator="maxrl")) == {"a": 1.0, "b": -1.0}
    with pytest.raises(ValueError, match="maxrl needs rewards of at least 0"):
        consumed(*negative, sample("stale", versions=[(0, 0)]), estimator="maxrl")
