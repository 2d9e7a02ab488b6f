"""The training engine on a real small model: one exact step, whatever the packing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_policy import load_state, policy_step, ragged_batch, row, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from sluice.render import tokenizer_digest
from trainer_svc.config import TrainerConfig
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.engine.finite import IncompleteWeightsError
from trainer_svc.objectives.config import ObjectiveConfig
from trainer_svc.objectives.objective import Objective

IN_BATCH = {"model": "batch"}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("engine"))


def engine(model_dir: Path, **settings) -> TrainEngine:
    defaults = {"lr": 1e-3, "device": "cpu", "grad_clip": 0.0}
    return TrainEngine(TrainerConfig(**(defaults | settings)), model_dir)


def gradient(trainer: TrainEngine, rows, objective=None) -> tuple[torch.Tensor, float]:
    """Gradient and loss of a batch in float64, taken where the optimizer would read it."""
    trainer.network.model.double()
    taken: list[torch.Tensor] = []

    def keep(optimizer: torch.optim.Optimizer, *_: object) -> None:
        taken.append(torch.cat([p.grad.flatten() for p in trainer.network.model.parameters()]))

    hook = trainer.optimizer.parts[0].register_step_pre_hook(keep)
    metrics = policy_step(trainer, rows, objective)
    hook.remove()
    return taken[0], metrics.loss


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["aipo", "grpo"])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "prompt", "constant"])
def test_loss_and_gradient_do_not_depend_on_packing_or_order(model_dir, preset, aggregation):
    rows = ragged_batch(seed=4)
    objective = ObjectiveConfig(
        preset=preset,
        aggregation=aggregation,
        kl_coef=0.05,
        entropy_coef=0.01,
        max_tokens=50 if aggregation == "constant" else None,
    )
    whole, loss = gradient(engine(model_dir, objective=objective, reference=IN_BATCH, token_budget=100_000), rows)
    for budget, fold, order in ((64, True, rows), (100, False, rows), (300, True, rows[::-1])):
        split, split_loss = gradient(
            engine(model_dir, objective=objective, reference=IN_BATCH, token_budget=budget, fold_prompts=fold), order
        )
        assert float((split - whole).norm() / whole.norm()) < 1e-6
        assert split_loss == pytest.approx(loss, rel=1e-6)


def test_leaving_out_sequences_without_advantage_changes_nothing_but_the_work(model_dir):
    rows = [replace(r, advantages=r.advantages * (i % 2)) for i, r in enumerate(ragged_batch(seed=5))]
    skipping, plain = engine(model_dir), engine(model_dir)
    forwarding = Objective.of(ObjectiveConfig(entropy_coef=1e-300))
    left_out, loss = gradient(skipping, rows)
    forwarded, plain_loss = gradient(plain, rows, forwarding)
    assert float((left_out - forwarded).norm() / forwarded.norm()) < 1e-6
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    again, full = policy_step(skipping, rows), policy_step(plain, rows, forwarding)
    assert again.forward_tokens < full.forward_tokens
    assert again.tokens == full.tokens
    assert again.loss_tokens == full.loss_tokens
    assert again.measured["zero_advantage_sequences"] == (len(rows) + 1) // 2


def test_a_batch_without_any_advantage_is_a_step_with_a_zero_gradient(model_dir):
    trainer = engine(model_dir)
    metrics = policy_step(trainer, [row([5, 6], [7, 8], advantage=0.0)])
    assert (metrics.loss, metrics.grad_norm, metrics.skipped, metrics.forward_tokens) == (0.0, 0.0, False, 0)
    assert trainer.optimizer_steps == 1


def test_repeated_steps_raise_what_is_rewarded_and_lower_what_is_punished(model_dir):
    trainer = engine(model_dir, lr=3e-3)
    good, bad = row([5, 6, 7], [20, 21, 22], advantage=1.0), row([5, 6, 7], [30, 31, 32], advantage=-1.0)
    before = [float(values[3:].sum()) for values in trainer.forward([good, bad])]
    for _ in range(10):
        behaviour = trainer.forward([good, bad])
        rows = [replace(r, behaviour_logprobs=b, group_id="g") for r, b in zip((good, bad), behaviour, strict=True)]
        metrics = policy_step(trainer, rows)
        assert metrics.measured["mismatch_kl"] == pytest.approx(0.0, abs=1e-6)
    after = [float(values[3:].sum()) for values in trainer.forward([good, bad])]
    assert after[0] > before[0] + 1.0
    assert after[1] < before[1] - 1.0


def test_a_missing_behaviour_log_probability_takes_its_token_out_of_the_loss(model_dir):
    behaviour = torch.tensor([-4.0, float("nan"), float("-inf"), -4.0])
    holed = row([5, 6], [10, 11, 12, 13], behaviour=behaviour)
    narrow = replace(holed, loss_mask=torch.tensor([False, False, True, False, False, True]))
    with_holes, loss = gradient(engine(model_dir), [holed])
    without, expected = gradient(engine(model_dir), [narrow])
    assert torch.equal(with_holes, without)
    assert loss == expected
    metrics = policy_step(engine(model_dir), [holed])
    assert metrics.measured["dropped_tokens/behaviour_not_finite"] == 2
    assert metrics.loss_tokens == 2


def test_a_step_that_is_not_finite_changes_nothing_and_is_reported(model_dir):
    trainer = engine(model_dir, lr=1e-2)
    rows = ragged_batch(seed=6)
    policy_step(trainer, rows)
    before = {name: tensor.clone() for name, tensor in trainer.state_tensors().items()}
    metrics = policy_step(trainer, [replace(r, advantages=torch.full_like(r.advantages, 1e38)) for r in rows])
    assert metrics.skipped
    assert trainer.optimizer_steps == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.state_tensors().items())
    assert not policy_step(trainer, rows).skipped


def test_a_kl_coefficient_without_reference_log_probabilities_is_refused(model_dir):
    trainer = engine(model_dir, objective=ObjectiveConfig(preset="grpo", kl_coef=0.1), reference=IN_BATCH)
    with pytest.raises(ValueError, match=r"'no-ref' has no reference"):
        policy_step(trainer, [row([5], [6], name="no-ref")])


def test_token_ids_outside_the_vocabulary_are_refused_before_anything_runs(model_dir):
    with pytest.raises(ValueError, match=r"'alien' has a token id outside"):
        policy_step(engine(model_dir), [row([5, 128], [6], name="alien")])


def test_the_gradient_is_scaled_down_to_the_clip(model_dir):
    rows = ragged_batch(seed=7)
    trainer = engine(model_dir, grad_clip=1e-3)
    clipped, _ = gradient(trainer, rows)
    assert float(clipped.norm()) == pytest.approx(1e-3, rel=1e-4)


def test_published_tensors_do_not_change_when_training_goes_on(model_dir):
    trainer = engine(model_dir, lr=1e-2)
    published = trainer.named_tensors(torch.bfloat16)
    copies = {name: tensor.clone() for name, tensor in published.items()}
    policy_step(trainer, ragged_batch(seed=8))
    assert all(torch.equal(copies[name], tensor) for name, tensor in published.items())
    assert any(not torch.equal(copies[name], tensor) for name, tensor in trainer.named_tensors(torch.bfloat16).items())
    assert {tensor.dtype for tensor in published.values()} == {torch.bfloat16}


@pytest.mark.parametrize("tie", [False, True])
def test_what_is_compared_with_the_version_before_is_no_copy(tmp_path, tie):
    trainer = engine(tiny_model(tmp_path, tie=tie))
    parameters = dict(trainer.network.model.named_parameters())
    live = trainer.live_tensors()
    assert live.keys() == trainer.named_tensors().keys()
    assert all(tensor.data_ptr() == parameters[name].data_ptr() for name, tensor in live.items())


@pytest.mark.parametrize("tie", [False, True])
def test_published_names_are_those_of_the_hugging_face_file(tmp_path, tie):
    path = tiny_model(tmp_path, tie=tie)
    published = engine(path).named_tensors()
    stored = load_file(path / "model.safetensors")
    assert published.keys() == stored.keys()
    assert ("lm_head.weight" in published) is not tie
    assert all(torch.equal(published[name], stored[name]) for name in stored)


@pytest.mark.parametrize("tie", [False, True])
def test_an_export_loads_as_it_is_and_keeps_the_tokenizer(tmp_path, tie):
    path = tiny_model(tmp_path, tie=tie)
    trainer = engine(path, lr=1e-2)
    rows = ragged_batch(seed=9)
    policy_step(trainer, rows)
    trainer.export_hf(str(tmp_path / "export"))
    assert not list(tmp_path.glob(".export*"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    assert loaded.config._attn_implementation == "sdpa"
    expected = trainer.forward(rows[:3])
    again = engine(tmp_path / "export").forward(rows[:3])
    assert all(
        torch.equal(a, b)
        for a, b in zip([e.nan_to_num() for e in expected], [a.nan_to_num() for a in again], strict=True)
    )
    old, new = (AutoTokenizer.from_pretrained(where) for where in (path, tmp_path / "export"))
    assert tokenizer_digest(old) == tokenizer_digest(new)
    with pytest.raises(FileExistsError, match="remove it"):
        trainer.export_hf(tmp_path / "export")


def test_training_goes_on_exactly_from_saved_state(model_dir):
    first, second, third = (ragged_batch(seed=seed) for seed in (10, 11, 12))
    straight = engine(model_dir, warmup_steps=3)
    for rows in (first, second):
        policy_step(straight, rows)
    tensors = {name: tensor.clone() for name, tensor in straight.state_tensors().items()}
    scalars = straight.state_scalars()
    policy_step(straight, third)
    resumed = engine(model_dir, warmup_steps=3)
    policy_step(resumed, third)
    load_state(resumed, tensors, scalars)
    policy_step(resumed, third)
    expected = straight.state_tensors()
    assert resumed.state_scalars() == straight.state_scalars()
    assert all(torch.equal(expected[name], tensor) for name, tensor in resumed.state_tensors().items())


def test_a_directory_without_the_output_layer_is_no_language_model(model_dir, tmp_path):
    TrainEngine(TrainerConfig(device="cpu"), model_dir, head="value").export_hf(tmp_path / "scores")
    with pytest.raises(
        IncompleteWeightsError, match=r"scores lacks lm_head\.weight, which transformers would fill with random weights"
    ):
        engine(tmp_path / "scores")


def test_state_of_another_model_is_refused(model_dir):
    trainer = engine(model_dir)
    tensors = dict(trainer.state_tensors())
    missing = {name: tensor for name, tensor in tensors.items() if not name.endswith("lm_head.weight")}
    with pytest.raises(ValueError, match="another model"):
        load_state(trainer, missing, {"optimizer_steps": 0})
    with pytest.raises(ValueError, match="has shape"):
        load_state(trainer, {**tensors, "model.lm_head.weight": torch.zeros(2, 2)}, {"optimizer_steps": 0})
