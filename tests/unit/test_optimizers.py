"""Optimizers and their schedules: the steps that the settings name, and their state back to the bit."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import torch
from tiny_policy import load_state, policy_step, ragged_batch, tiny_model
from torch.profiler import ProfilerActivity, profile

from sluice.v1 import checkpoint_pb2
from trainer_svc.checkpoint import saver
from trainer_svc.checkpoint.state import read_below, training_state
from trainer_svc.compute_config import ComputeConfig, OptimizerConfig
from trainer_svc.config import TrainerConfig
from trainer_svc.engine import optimizers as module
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.engine.optimizers import OffloadedAdamW, Optimizers, ShardedMuon, schedule_factor


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("optimizers"))


def engine(model_dir: Path, **settings: object) -> TrainEngine:
    return TrainEngine(TrainerConfig(**({"lr": 1e-3, "device": "cpu", "threads": 1} | settings)), model_dir)


def rate(config: OptimizerConfig, step: int) -> float:
    return config.lr * schedule_factor(config, step)


def test_learning_rates_warm_up_and_decay_as_the_schedule_says() -> None:
    linear = OptimizerConfig(lr=1.0, warmup_steps=4, schedule="linear", max_steps=14, min_lr_ratio=0.1)
    assert [rate(linear, step) for step in (0, 3, 4, 9, 14, 99)] == pytest.approx([0.25, 1.0, 1.0, 0.55, 0.1, 0.1])
    cosine = linear.model_copy(update={"schedule": "cosine", "min_lr_ratio": 0.0})
    assert [rate(cosine, step) for step in (4, 9, 14)] == pytest.approx([1.0, 0.5, 0.0])
    constant = linear.model_copy(update={"schedule": "constant"})
    assert [rate(constant, step) for step in (0, 4, 500)] == pytest.approx([0.25, 1.0, 1.0])
    wsd = OptimizerConfig(
        lr=2.0, warmup_steps=2, schedule="wsd", decay_steps=4, max_steps=10, min_lr_ratio=0.5, optimizer="muon"
    )
    rates = [rate(wsd, step) for step in (0, 1, 2, 6, 7, 8, 10, 11)]
    assert rates == pytest.approx([1.0, 2.0, 2.0, 2.0, 1.75, 1.5, 1.0, 1.0])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"schedule": "wsd", "max_steps": 10}, "decay_steps, which is 0"),
        ({"schedule": "wsd", "max_steps": 10, "decay_steps": 8, "warmup_steps": 3}, "exceed max_steps"),
        ({"schedule": "wsd", "decay_steps": 8}, "ends at max_steps"),
        ({"optimizer": "muon", "optimizer_offload": True}, "set optimizer to adamw"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        TrainerConfig(**settings)


def test_muon_takes_the_hidden_matrices_and_adamw_the_rest(model_dir: Path) -> None:
    policy = engine(model_dir, optimizer="muon")
    names = {parameter: name for name, parameter in policy.network.model.named_parameters()}
    muon, adamw = policy.optimizer.parts
    by_muon = {names[each] for group in muon.param_groups for each in group["params"]}
    by_adamw = {names[each] for group in adamw.param_groups for each in group["params"]}
    assert by_muon | by_adamw == set(names.values())
    assert not by_muon & by_adamw
    assert all(name.endswith("_proj.weight") for name in by_muon)
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"} <= by_adamw
    assert not any(name.endswith("_proj.weight") for name in by_adamw)


def test_a_muon_step_is_torchs_own_and_that_of_the_paper() -> None:
    generator = torch.Generator().manual_seed(0)
    start, *gradients = (torch.randn(6, 10, generator=generator) for _ in range(3))
    options = {"lr": 0.1, "weight_decay": 0.5, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}
    ours, torchs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    for gradient in gradients:
        for parameter in (ours, torchs):
            parameter.grad = gradient.clone()
        if gradient is gradients[0]:
            optimizers = (ShardedMuon([ours], **options), torch.optim.Muon([torchs], **options))
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(ours, torchs, rtol=0, atol=1e-6)
        if gradient is gradients[0]:
            _assert_nearly_orthogonal((start * (1 - 0.1 * 0.5) - ours.detach()) / (0.1 * 0.2 * math.sqrt(10)), gradient)


def _assert_nearly_orthogonal(direction: torch.Tensor, gradient: torch.Tensor) -> None:
    """The gradient's singular vectors, with singular values near 1: what Newton-Schulz is there for."""
    left, _, right = torch.linalg.svd(gradient, full_matrices=False)
    seen = left.T @ direction @ right.T
    assert seen.diagonal().min() > 0.5
    assert seen.diagonal().max() < 1.5
    assert (seen - seen.diagonal().diag()).abs().max() < 0.1


def test_the_moments_in_host_memory_give_the_very_steps_of_adamw() -> None:
    generator = torch.Generator().manual_seed(1)
    starts = [torch.randn(5, 7, generator=generator), torch.randn(7, generator=generator)]
    plain, offloaded = ([torch.nn.Parameter(each.clone()) for each in starts] for _ in range(2))
    options = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    groups = [[{"params": side[:1], "weight_decay": 0.3}, {"params": side[1:]}] for side in (plain, offloaded)]
    optimizers = (torch.optim.AdamW(groups[0], **options, fused=True), OffloadedAdamW(groups[1], **options))
    for _ in range(3):
        for one, other in zip(plain, offloaded, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(plain, offloaded, strict=True))
    states = [[part.state[each] for each in side] for part, side in zip(optimizers, (plain, offloaded), strict=True)]
    for one, other in zip(*states, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_offload_on_a_cpu_is_plain_adamw(model_dir: Path) -> None:
    config = ComputeConfig(optimizer_offload=True, device="cpu")
    assert [type(part) for part in TrainEngine(config, model_dir).optimizer.parts] == [torch.optim.AdamW]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_after_save_and_load_is_the_step_of_a_run_that_went_on(model_dir: Path, optimizer: str) -> None:
    settings = {"optimizer": optimizer, "schedule": "wsd", "warmup_steps": 1, "max_steps": 5, "decay_steps": 3}
    first, second, third = (ragged_batch(seed=seed, groups=2) for seed in (10, 11, 12))
    straight = engine(model_dir, **settings)
    for rows in (first, second):
        policy_step(straight, rows)
    tensors = {name: tensor.clone() for name, tensor in straight.state_tensors().items()}
    scalars = straight.state_scalars()
    resumed = engine(model_dir, **settings)
    policy_step(resumed, first)
    load_state(resumed, tensors, scalars)
    rates = {policy_step(each, third).learning_rate for each in (straight, resumed)}
    assert len(rates) == 1
    expected = straight.state_tensors()
    assert resumed.state_tensors().keys() == expected.keys()
    assert all(torch.equal(expected[name], tensor) for name, tensor in resumed.state_tensors().items())
    assert any(name.startswith("optimizer.momentum_buffer.") for name in expected) is (optimizer == "muon")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_peak_that_was_changed_is_scaled_by_the_schedule_and_saved(model_dir: Path, optimizer: str) -> None:
    settings = {"optimizer": optimizer, "schedule": "linear", "max_steps": 4}
    first, second, third = (ragged_batch(seed=seed, groups=2) for seed in (10, 11, 12))
    changed, as_set, resumed = (engine(model_dir, **settings, lr=lr) for lr in (1e-3, 1 / 3, 1e-3))
    changed.optimizer.changed_lr = 1 / 3  # no float32
    rates = [[policy_step(each, rows).learning_rate for rows in (first, second)] for each in (changed, as_set)]
    assert rates == [[1 / 3, 1 / 3 * 0.75]] * 2
    expected = as_set.state_tensors()
    assert all(torch.equal(expected[name], tensor) for name, tensor in changed.state_tensors().items())
    assert "learning_rate" not in as_set.state_scalars()
    state = training_state({"policy": changed}, 0)
    name = "policy.scalars.learning_rate"
    assert (state[name].dtype, state[name].item()) == (torch.float64, 1 / 3)
    load_state(resumed, {name: tensor.clone() for name, tensor in expected.items()}, changed.state_scalars())
    assert policy_step(resumed, third).learning_rate == 1 / 3 * 0.5


def test_state_of_another_optimizer_is_refused_and_changes_nothing(model_dir: Path) -> None:
    adamw, muon = engine(model_dir), engine(model_dir, optimizer="muon")
    for policy in (adamw, muon):
        policy_step(policy, ragged_batch(seed=3, groups=1))
    before = {name: tensor.clone() for name, tensor in muon.state_tensors().items()}
    with pytest.raises(ValueError, match="the optimizer that were saved"):
        load_state(muon, adamw.state_tensors(), {"optimizer_steps": 1})
    missing = {name: tensor for name, tensor in before.items() if not name.startswith("optimizer.step.model.norm")}
    with pytest.raises(ValueError, match="is incomplete"):
        load_state(muon, missing, {"optimizer_steps": 1})
    assert all(torch.equal(before[name], tensor) for name, tensor in muon.state_tensors().items())


def bytes_kept_by(work: Callable[[], object]) -> int:
    """Bytes that PyTorch's allocator gave out during the work and did not get back."""
    gc.collect()  # what earlier tests left must not be given back during the work
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
        gc.collect()
    events = profiled.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


def offloaded_engine(model_dir: Path) -> TrainEngine:
    """An engine on the CPU with the optimizer that is meant for a GPU."""
    trainer = engine(model_dir)
    parameters = list(trainer.network.model.parameters())
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}
    offloaded = OffloadedAdamW([{"params": parameters, "weight_decay": 0.0}], **options)
    trainer.optimizer = Optimizers(trainer.config, [offloaded])
    return trainer


@pytest.mark.slow
def test_host_memory_of_offload_is_the_moments_and_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUFFER_ELEMENTS", 100)
    parameters = [torch.nn.Parameter(torch.randn(100)) for _ in range(50)]
    for each in parameters:
        each.grad = torch.randn(100)
    optimizer = OffloadedAdamW([{"params": parameters, "weight_decay": 0.0}], lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    assert 8 * 50 * 100 <= bytes_kept_by(optimizer.step) < 1.2 * 8 * 50 * 100


def test_a_checkpoint_reads_offloaded_moments_where_they_lie_before_the_next_step(model_dir, tmp_path, monkeypatch):
    trainer = offloaded_engine(model_dir)
    policy_step(trainer, ragged_batch(seed=1))
    before = {name: tensor.clone() for name, tensor in trainer.state_tensors().items()}
    write, may_write, written = saver.write_slices, Event(), {}

    def late(slices, directory, rank):
        assert may_write.wait(60)
        written.update(slices)
        return write(slices, directory, rank)

    monkeypatch.setattr(saver, "write_slices", late)
    writing = saver.Saver().begin(
        tmp_path / "step_1", checkpoint_pb2.CheckpointManifest(), training_state({"policy": trainer}, 0)
    )
    with ThreadPoolExecutor() as pool:
        stepping = pool.submit(policy_step, trainer, ragged_batch(seed=2))
        may_write.set()
        writing.result(60)
        stepping.result(60)
    live = trainer.state_tensors()
    moments = {name for name in before if name.startswith("optimizer.exp_avg")}
    places = {each.name.removeprefix("policy."): tensor.data_ptr() for each, tensor in written.items()}
    assert {name for name in moments if places[name] == live[name].data_ptr()} == moments
    assert not any(torch.equal(live[name], before[name]) for name in moments)
    stored = read_below("policy.", tmp_path / "step_1" / "state")
    assert all(torch.equal(stored[name], tensor) for name, tensor in before.items())
