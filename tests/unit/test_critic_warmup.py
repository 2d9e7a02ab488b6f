"""The critic's warm-up: it learns alone, whole batch after whole batch, before the policy makes its first step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_learner import assert_same, batch, learner
from tiny_policy import ragged_batch, tiny_model

from sluice.v1 import tokens_pb2
from sluice.versions import Version
from trainer_svc.batch.rows import TrainingRow
from trainer_svc.config import TrainerConfig
from trainer_svc.service.learner import Applied, Learner
from trainer_svc.update.critic import Critic
from trainer_svc.update.policy import PolicyUpdate

SETTINGS = {
    "objective": {"preset": "ppo", "value_clip": 10.0},
    "critic": {"lr": 1e-3, "freeze_policy_steps": 6},
    "lr": 1e-3,
    "epochs": 2,
    "minibatches": 2,
    "device": "cpu",
}
"""Four steps a batch: the second begins within the warm-up, the third behind it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("warmup"))


@pytest.fixture
def update(model: Path) -> PolicyUpdate:
    config = TrainerConfig(**SETTINGS)
    return PolicyUpdate.load(config, model, seed=1)


def rewarded(seed: int, scale: float = 1.0) -> list[TrainingRow]:
    rows = ragged_batch(seed=seed, groups=3)
    return [replace(each, reward=scale * (i % 3), truncated=i % 4 == 0) for i, each in enumerate(rows)]


@pytest.mark.slow
def test_the_critic_learns_alone_and_then_beside_the_policy(update: PolicyUpdate) -> None:
    rows = rewarded(5)
    logprobs = update.engine.forward(rows)
    rows = [replace(row, behaviour_logprobs=values) for row, values in zip(rows, logprobs, strict=True)]
    fresh = {name: tensor.clone() for name, tensor in update.engine.state_tensors().items()}

    reports = []
    for _ in range(2):
        reports.append(update.apply(rows).metrics.as_flat())
        assert_same(update.engine.state_tensors(), fresh)
    assert (update.engine.optimizer_steps, update.critic.engine.optimizer_steps) == (0, 8)
    reports.append(update.apply(rows).metrics.as_flat())
    weights = update.engine.network.model.state_dict()
    changed = [name for name, tensor in weights.items() if not torch.equal(tensor, fresh[f"model.{name}"])]
    assert len(changed) == len(weights)
    assert (update.engine.optimizer_steps, update.critic.engine.optimizer_steps) == (4, 12)

    assert [each["critic/warmup"] for each in reports] == [1, 1, 0]
    assert [each["optimizer_steps"] for each in reports] == [0, 0, 4]
    assert [each["learning_rate"] for each in reports] == [0, 0, 1e-3]
    assert [each["skipped_steps"] for each in reports] == [0, 0, 0]
    assert reports[1]["critic/value_error"] < reports[0]["critic/value_error"]
    for each in reports:
        assert each["mismatch_kl"] == pytest.approx(0.0, abs=1e-6), "the policy that sampled"
        assert each["loss_tokens"] == sum(int(row.loss_mask.sum()) for row in rows)


def test_without_a_warm_up_nothing_is_said_about_one(model: Path) -> None:
    config = TrainerConfig(**SETTINGS | {"critic": {"lr": 1e-3}})
    update = PolicyUpdate.load(config, model)
    measured = update.apply(rewarded(5)).metrics.measured
    assert measured["optimizer_steps"] == 4
    assert "critic/warmup" not in measured


def test_a_batch_from_which_the_critic_learned_nothing_counts_as_skipped(update: PolicyUpdate) -> None:
    updated = update.apply(rewarded(5, scale=1e30))
    report = updated.metrics
    assert report.skipped
    assert (updated.skipped_steps, updated.rows[:, 1].tolist()) == (4, [0] * len(updated.rows))
    assert (report.measured["critic/warmup"], report.measured["critic/skipped_steps"]) == (1, 4)
    assert update.critic.engine.optimizer_steps == 0


def test_a_critic_on_the_policys_network_has_no_warm_up(model: Path) -> None:
    shared = {"objective": {"preset": "ppo"}, "critic": {"shared": True}, "device": "cpu"}
    with pytest.raises(ValueError, match="set freeze_policy_steps to 0, or shared to false"):
        TrainerConfig(**shared | {"critic": {"shared": True, "freeze_policy_steps": 6}})
    config = TrainerConfig(**shared)
    update = PolicyUpdate.load(config, model)
    with pytest.raises(ValueError, match="set freeze_policy_steps to 0"):
        PolicyUpdate(update.engine, update.objective, critic=Critic(update.engine, freeze_policy_steps=6))


@pytest.mark.slow
def test_a_run_resumed_within_the_warm_up_is_the_uninterrupted_one(model: Path, tmp_path: Path) -> None:
    uninterrupted = learner(model, tmp_path / "one", **SETTINGS)
    uninterrupted.restore(1, "")
    fresh = everything(uninterrupted)["policy"]
    applied = [train(uninterrupted, number) for number in (1, 2, 3)]
    assert [each.metrics.measured["critic/warmup"] for each in applied] == [1, 1, 0]
    told = [{(result.outcome, result.reason) for result in each.record.results} for each in applied]
    warmup = (tokens_pb2.TRAJECTORY_OUTCOME_DROPPED, "CRITIC_WARMUP")
    trained = (tokens_pb2.TRAJECTORY_OUTCOME_TRAINED, "")
    assert told == [{warmup}, {warmup}, {trained}], "only the third batch changed the policy"

    first = learner(model, tmp_path / "two", **SETTINGS)
    first.restore(1, "")
    train(first, 1)
    first.begin_save(journal_position=17).result()
    train(first, 2)
    assert_same(everything(first)["policy"], fresh)

    second = learner(model, tmp_path / "two", **SETTINGS)
    restored = second.restore(2, "")
    assert (restored.version, restored.last_batch_id) == (Version(2, 1), "b1")
    for number in (2, 3):
        train(second, number)
    for name, state in everything(uninterrupted).items():
        assert_same(everything(second)[name], state)
    assert second.engine.optimizer_steps == uninterrupted.engine.optimizer_steps == 4
    assert second.version.number == uninterrupted.version.number == 3


def train(policy: Learner, number: int) -> Applied:
    """Apply the batch of this number, with rewards and without advantages."""
    return policy.apply(batch(policy, number, rewarded(number), has_advantages=False, advantage_estimator="gae"))


def everything(policy: Learner) -> dict[str, dict[str, torch.Tensor]]:
    """Weights and moments of policy and critic."""
    return {
        name: {key: tensor.clone() for key, tensor in engine.state_tensors().items()}
        for name, engine in policy.update.engines.items()
    }
