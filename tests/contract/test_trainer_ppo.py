"""TrainerService with what needs more than one model: critic, reference, several steps of one batch."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
import torch
from safetensors import safe_open
from trainer_stack import RUN, Stack, batch, stack, tiny_model

from sluice.rpc import SluiceError
from sluice.v1 import tokens_pb2
from sluice.versions import Version

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def gae_batch(number: int) -> list[tokens_pb2.Trajectory]:
    """Groups with rewards and without advantages; one trajectory was cut off by its length, one lacks its reward."""
    trajectories = batch(number, version=Version(1, number - 1))
    trajectories[0].finish_reason = tokens_pb2.FINISH_REASON_LENGTH
    trajectories[-1].ClearField("reward")
    return trajectories


async def submit(running: Stack, number: int, estimator: str = "gae"):
    await running.submit(number, gae_batch(number), advantage_estimator=estimator)
    return await running.report(number)


@pytest.mark.parametrize("shared", [False, True])
async def test_a_batch_with_rewards_alone_trains_policy_and_critic(model: Path, tmp_path: Path, shared: bool) -> None:
    critic = {"shared": True} if shared else {"lr": 1e-2}
    options = {"objective": {"preset": "ppo", "value_clip": 10.0}, "critic": critic, "epochs": 2, "minibatches": 2}
    async with stack(model, tmp_path, **options) as running:
        await running.client.begin_epoch(RUN, 1)
        reports = [await submit(running, number) for number in (1, 2, 3)]
        state = await running.client.state(RUN)
        with safe_open(tmp_path / RUN / "weights" / "v1.0" / "model.safetensors", framework="pt") as file:
            published = set(file.keys())
    first, last = reports[0].metrics, reports[-1].metrics
    assert [each.reason for each in reports[0].results] == [""] * 7 + ["MISSING_REWARD"]
    assert (first["optimizer_steps"], state.optimizer_steps) == (4, 12)
    assert (state.advantage_estimator, Version.from_proto(state.policy_version)) == ("gae", Version(1, 3))
    assert {"critic/explained_variance", "critic/value_loss", "critic/value_clip_fraction", "critic/value_mean"} <= set(
        first
    )
    assert {"mismatch_kl", "mismatch_kl_last", "seconds/values", "clip_fraction_high"} <= set(first)
    assert last["critic/value_error"] < first["critic/value_error"]
    assert not any("value" in name or "score" in name for name in published)


async def test_a_restarted_trainer_has_its_critic_back(model: Path, tmp_path: Path) -> None:
    options = {"objective": {"preset": "ppo"}, "critic": {"lr": 1e-2}, "epochs": 2, "minibatches": 2}

    def weights(running: Stack) -> dict[str, torch.Tensor]:
        engines = running.trainer.learner.update.engines
        return {f"{name}.{key}": value for name, each in engines.items() for key, value in each.named_tensors().items()}

    async with stack(model, tmp_path, **options) as running:
        await running.client.begin_epoch(RUN, 1)
        await submit(running, 1)
        await running.client.save_checkpoint(RUN)
        await submit(running, 2)
        expected = weights(running)
    async with stack(model, tmp_path, **options) as running:
        await running.client.begin_epoch(RUN, 2)
        await running.submit(2, gae_batch(2), epoch=2, max_staleness=9, advantage_estimator="gae")
        await running.report(2)
        found = weights(running)
        assert running.trainer.learner.update.engines["critic"].optimizer_steps == 8
    assert found.keys() == expected.keys()
    assert any(name.startswith("critic.") for name in found)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


async def test_an_estimator_that_the_objective_does_not_run_is_refused_with_the_remedy(
    model: Path, tmp_path: Path
) -> None:
    async with stack(model, tmp_path, objective={"preset": "ppo"}, critic={"shared": True}) as running:
        await running.client.begin_epoch(RUN, 1)
        with pytest.raises(SluiceError, match=r"set orchestrator\.advantage to gae") as refusal:
            await submit(running, 1, "grpo")
        assert refusal.value.code is grpc.StatusCode.INVALID_ARGUMENT
        rows = gae_batch(1)
        rows[0].advantages.append(1.0)
        with pytest.raises(SluiceError, match="advantages are given, but this trainer computes gae"):
            await running.submit(1, rows, advantage_estimator="gae")
        assert (await submit(running, 1, "")).results[0].reason == ""


async def test_a_reference_model_makes_a_kl_that_grows(model: Path, tmp_path: Path) -> None:
    options = {"objective": {"preset": "grpo", "kl_coef": 0.1}, "reference": {"model": "base"}, "lr": 1e-2}
    async with stack(model, tmp_path, **options) as running:
        await running.client.begin_epoch(RUN, 1)
        drift = []
        for number in (1, 2):
            await running.submit(number)
            drift.append((await running.report(number)).metrics["kl"])
        with pytest.raises(SluiceError, match=r"trainer\.objective"):
            await submit(running, 3, "gae")
    assert drift[0] == pytest.approx(0.0, abs=1e-6)
    assert drift[1] > 1e-5


async def test_a_teacher_needs_no_rewards_no_advantages_and_no_log_probabilities(model: Path, tmp_path: Path) -> None:
    options = {"objective": {"preset": "distill"}, "teacher": {"model": str(model)}}
    async with stack(model, tmp_path, **options) as running:
        await running.client.begin_epoch(RUN, 1)
        rows = gae_batch(1)
        rows[0].ClearField("logprobs")
        await running.submit(1, rows, advantage_estimator="")
        report = await running.report(1)
    assert [each.reason for each in report.results] == [""] * 8
    assert report.metrics["teacher_kl"] == pytest.approx(0.0, abs=1e-6), "the student is its own teacher yet"


async def test_the_log_linear_form_reads_the_age_of_each_token(model: Path, tmp_path: Path) -> None:
    decoupled = {"preset": "grpo", "proximal": "loglinear", "correction": {"kind": "token_tis"}}
    async with stack(model, tmp_path, objective=decoupled) as running:
        await running.client.begin_epoch(RUN, 1)
        spread = []
        for number, sampled_by in ((1, 0), (2, 0), (3, 0)):
            rows = batch(number, version=Version(1, sampled_by))
            await running.submit(number, rows, max_staleness=9)
            spread.append((await running.report(number)).metrics["correction_chi_square"])
    assert spread[:2] == pytest.approx([0.0, 0.0], abs=1e-9), "o is b up to one version of age"
    assert abs(spread[2]) > 1e-3
