"""Weights that are not finite, or too large to compute with: named, and neither written nor published."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_learner import batch, learner, names, state, train
from tiny_policy import ragged_batch, tiny_model

from sluice.config import Command, ConfigError
from sluice.rpc import SluiceError
from sluice.versions import Version
from trainer_svc.checkpoint.saver import EngineCheckpoints
from trainer_svc.config import TrainerConfig
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.engine.finite import UnfitWeightsError, unfit_weights
from trainer_svc.engine.loading import check_read, load_network
from trainer_svc.engine.weight_files import read_weights
from trainer_svc.offline.commands import DISTILL, DPO, REWARD_MODEL, SFT
from trainer_svc.tuner.adapters import AdapterState, load_state, save_state

CPU = torch.device("cpu")
DEMONSTRATION = {"prompt": "a", "completion": "b"}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def with_value(model: Path, directory: Path, name: str, value: float) -> Path:
    """A copy of the model in which one element of a weight has this value."""
    damaged = directory / "damaged"
    shutil.copytree(model, damaged)
    tensors = load_file(damaged / "model.safetensors")
    tensors[name].view(-1)[0] = value
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    return damaged


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, -1e20])
def test_every_tensor_with_a_value_that_cannot_be_computed_with_is_named(value: float) -> None:
    weights = {name: torch.randn(5, 7) for name in "cab"} | {
        "none": torch.zeros(0, 7),
        "later": torch.empty(2, device="meta"),
    }
    assert unfit_weights(weights.items()) == []
    weights["c"][4, 6] = weights["a"][0, 0] = value
    assert unfit_weights(weights.items()) == ["a", "c"]


def test_a_precision_counts_as_far_as_values_fit_into_it() -> None:
    many = torch.full((1 << 12,), 60_000.0)  # whose norm float16 cannot hold, unlike each value
    assert unfit_weights([("many", many), ("large", torch.tensor([70_000.0]))], torch.float16) == ["large"]
    assert unfit_weights([("half", many.half())]) == []
    assert unfit_weights([("large", torch.tensor([70_000.0]))], torch.bfloat16) == []


@pytest.mark.slow
@pytest.mark.parametrize("rate", ["1e99", "1e30"])
@pytest.mark.parametrize(
    ("command", "row"),
    [(SFT, DEMONSTRATION), (DPO, PAIR), (REWARD_MODEL, PAIR), (DISTILL, DEMONSTRATION)],
    ids=["sft", "dpo", "reward-model", "distill"],
)
def test_a_training_that_makes_such_weights_writes_no_model_and_names_them(
    model: Path, tmp_path: Path, command: Command, row: object, rate: str
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text((json.dumps(row) + "\n") * 4, encoding="utf-8")
    flags = ["--model", str(model), "--data", str(data), "--output", str(tmp_path / "out"), "--device", "cpu"]
    if command is DISTILL:
        flags += ["--teacher", str(with_value(model, tmp_path, "model.norm.weight", 3.0))]
    with pytest.raises(
        ConfigError,
        match=rf"step 1 with lr = {re.escape(f'{float(rate):g}')}: .*: [a-z_.]+\.weight.*; lower the learning rate",
    ):
        command.run([*flags, "--lr", rate, "--max-steps", "1", "--batch-size", "2"])
    assert not (tmp_path / "out").exists()


def test_a_training_whose_weights_compute_nothing_finite_ends_at_once_and_its_checkpoints_stay(
    model: Path, tmp_path: Path
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text((json.dumps(DEMONSTRATION) + "\n") * 4, encoding="utf-8")
    flags = ["--model", str(model), "--data", str(data), "--output", str(tmp_path / "out"), "--device", "cpu"]
    flags += [
        "--batch-size",
        "2",
        "--max-steps",
        "400",
        "--checkpoint-every",
        "1",
        "--lr",
        "1e20",
        "--warmup-steps",
        "400",
    ]
    with pytest.raises(ConfigError, match=r"step 1 with .* computes NaN, although each is finite; .*step_1 stays"):
        SFT.run(flags)
    assert [each.name for each in (tmp_path / "out.checkpoints").iterdir()] == ["step_1"]
    with pytest.raises(ConfigError, match=r"step 1 with .* computes NaN.* there is no checkpoint"):
        SFT.run([*flags[:4], "--output", str(tmp_path / "two"), "--device", "cpu", "--lr", "2e17", "--max-steps", "1"])
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize("precision", [None, torch.float16])
def test_an_engine_refuses_to_write_them_and_older_files_stay(
    model: Path, tmp_path: Path, precision: torch.dtype | None
) -> None:
    engine = TrainEngine(TrainerConfig(device="cpu", threads=1), model)
    checkpoints = EngineCheckpoints(engine)
    checkpoints.save(tmp_path / "one", dtype=precision)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "one").rglob("*")}
    with torch.no_grad():
        engine.network.model.model.norm.weight[0] = 70_000.0 if precision else math.nan
    with pytest.raises(UnfitWeightsError, match=r"model\.norm\.weight"):
        checkpoints.save(tmp_path / "one", dtype=precision)
    with pytest.raises(UnfitWeightsError, match=r"model\.norm\.weight"):
        engine.export_hf(tmp_path / "two", precision)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "one").rglob("*")} == before
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize("rate", [1e99, 1e30])
def test_a_batch_that_makes_them_is_not_applied_and_the_run_can_go_back(
    model: Path, tmp_path: Path, rate: float
) -> None:
    policy = learner(model, tmp_path, warmup_steps=0)
    policy.restore(1, "")
    train(policy, 1)
    policy.begin_save(0).result()
    with pytest.raises(SluiceError, match=r"batch 'b2': .*model\..*lower the learning rate") as refused:
        policy.apply(batch(policy, 2, ragged_batch(seed=2, groups=3), learning_rate=rate))
    assert (refused.value.code.name, refused.value.reason) == ("FAILED_PRECONDITION", "NON_FINITE")
    restored = policy.restore(2, "")
    assert (restored.version, [each.batch_id for each in restored.held]) == (Version(2, 1), ["b1"])
    train(policy, 2)
    assert policy.engine.unfit_weights() == []


def test_a_checkpoint_that_holds_them_is_skipped_for_the_one_before(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = learner(model, tmp_path)
    policy.restore(1, "")
    train(policy, 1)
    policy.begin_save(0).result()
    kept = state(policy)
    train(policy, 2)
    with torch.no_grad():
        policy.engine.network.model.model.norm.weight[0] = math.nan
    policy.begin_save(0).result()  # as a trainer of another release may have done
    assert names(policy) == ["step_2", "step_1"]
    assert policy.restore(2, "").origin == Version(1, 1)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in state(policy).items())


@pytest.mark.parametrize("lazy", [None, (0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_a_model_whose_files_hold_them_is_refused_with_their_names(
    model: Path, tmp_path: Path, name: str, lazy: tuple[int, int] | None
) -> None:
    damaged = with_value(model, tmp_path, name, math.nan)
    with pytest.raises(UnfitWeightsError, match=rf"not finite.*: {name};"):
        load_network(str(damaged), CPU, lazy=lazy)


def test_weights_that_are_read_later_are_looked_at_when_they_are_read(model: Path, tmp_path: Path) -> None:
    damaged = with_value(model, tmp_path, "model.layers.1.self_attn.q_proj.weight", math.nan)
    network = load_network(str(damaged), CPU, lazy=(0, 2))  # the check of packing leaves that layer out
    check_read(str(damaged), network.model)
    read_weights(network.model, network.files, CPU)
    with pytest.raises(UnfitWeightsError, match=r"model\.layers\.1\.self_attn\.q_proj\.weight"):
        check_read(str(damaged), network.model)


def test_a_model_is_refused_too_if_no_output_shows_it(model: Path, tmp_path: Path) -> None:
    damaged = with_value(model, tmp_path, "model.embed_tokens.weight", math.inf)
    with pytest.raises(UnfitWeightsError, match=r"model\.embed_tokens\.weight"):
        TrainEngine(TrainerConfig(device="cpu", threads=1), damaged)


def test_factors_of_a_training_are_neither_saved_nor_does_the_file_before_change(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    factors = {"a.lora_A": torch.ones(2, 3), "a.lora_B": torch.ones(3, 2)}
    digest = save_state(AdapterState(factors), path)
    broken = AdapterState({**factors, "a.lora_B": torch.full((3, 2), math.inf)})
    with pytest.raises(UnfitWeightsError, match=r"a\.lora_B; load a saved state"):
        save_state(broken, path)
    assert load_state(path, AdapterState(factors))[1] == digest
