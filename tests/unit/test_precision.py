"""Which precision a weight is stored and computed in: the same wherever it stands, and what an engine serves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_models import save_experts_model, save_model
from tiny_policy import ragged_batch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PhiConfig,
    PhiForCausalLM,
)

from rollout_svc.engines.slots.model import SlotCache, SlotModel
from trainer_svc.batch.rows import MicroBatch, Outputs, count_loss_tokens
from trainer_svc.compute_config import ComputeConfig
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.engine.rounding import store_frozen
from trainer_svc.precision import KINDS, computed, published, stored

MODELS = ("untied", "tied", "experts", "scaled logits", "two embeddings", "bias of the head", "scaled embedding")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models whose weights lie between two numbers of bfloat16."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    config = CohereConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, logit_scale=0.5)
    CohereForCausalLM(config).save_pretrained(root / "scaled logits")
    learned = GPT2Config(
        vocab_size=128, n_embd=64, n_layer=1, n_head=4, n_positions=256, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    GPT2LMHeadModel(learned).save_pretrained(root / "two embeddings")
    PhiForCausalLM(PhiConfig(**sizes, num_attention_heads=4)).save_pretrained(root / "bias of the head")
    odd = {"hidden_size": 72, "head_dim": 18, "layer_types": ["full_attention"]}  # the scale is the root of 72
    scaled = Gemma3TextConfig(**sizes | odd, num_attention_heads=4, num_key_value_heads=2)
    Gemma3ForCausalLM(scaled).save_pretrained(root / "scaled embedding")
    save_model(root / "untied", 0)
    save_model(root / "tied", 0, tied=True)
    save_experts_model(root / "experts", 0, size=64, dtype=torch.float32)
    for name in MODELS:  # norms begin at 1 or 0, which have no digits to round
        model = AutoModelForCausalLM.from_pretrained(root / name)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1 + 0.1 * torch.rand_like(weight)).add_(0.01 * torch.rand_like(weight))
        model.save_pretrained(root / name)
    return {name: root / name for name in MODELS}


def engine(model: Path, dtype: str = "bfloat16", **options: str) -> TrainEngine:
    return TrainEngine(ComputeConfig(device="cpu", dtype=dtype, token_budget=100), model, **options)


def logprobs(trainer: TrainEngine) -> torch.Tensor:
    return torch.cat(trainer.forward(ragged_batch(3))).nan_to_num()


def values(trainer: TrainEngine) -> torch.Tensor:
    return torch.cat(trainer.forward(ragged_batch(3), values=True)).nan_to_num()


@pytest.mark.parametrize("name", MODELS)
def test_a_forward_pass_sees_no_more_of_a_weight_than_is_published(models: dict[str, Path], name: str) -> None:
    trainer = engine(models[name])
    with_masters = logprobs(trainer)
    with torch.no_grad():
        for weight in trainer.network.model.parameters():
            assert not torch.equal(weight, weight.bfloat16().float())
            weight.copy_(weight.bfloat16())
    assert torch.equal(logprobs(trainer), with_masters)


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_counts_and_gets_a_gradient(models: dict[str, Path], name: str) -> None:
    trainer = engine(models[name])
    before = logprobs(trainer)
    for path, weight in trainer.network.model.named_parameters():
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.add_(0.1 * torch.randn_like(weight))
        assert not torch.equal(logprobs(trainer), before), path
        with torch.no_grad():
            weight.copy_(kept)

    def likelihood(outputs: Outputs, _: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -outputs.logprobs.sum(), {}

    trained = {path: weight.detach().clone() for path, weight in trainer.network.model.named_parameters()}
    trainer.train_batch(ragged_batch(3), likelihood, count_loss_tokens)
    for path, weight in trainer.network.model.named_parameters():
        assert weight.dtype == torch.float32
        assert not torch.equal(weight, trained[path]), path


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_not_rounded(models: dict[str, Path], name: str) -> None:
    """Log-probabilities of bfloat16 logits near 8 would lie on a grid of 1/32."""
    trainer = engine(models[name])
    with torch.no_grad():
        trainer.network.model.get_output_embeddings().weight.mul_(8)
    found = logprobs(trainer)
    assert found.dtype == torch.float32
    assert len(found[found != 0].unique()) > 0.9 * int((found != 0).sum())


def test_a_value_head_is_computed_in_float32(models: dict[str, Path]) -> None:
    trainer = engine(models["untied"], head="both")
    head = trainer.network.value_head
    assert isinstance(head, nn.Linear)
    with torch.no_grad():
        head.weight.copy_(torch.rand_like(head.weight))
    before = values(trainer)
    with torch.no_grad():
        head.weight.copy_(head.weight.bfloat16())
    assert not torch.equal(values(trainer), before)


@pytest.mark.parametrize("name", ["tied", "experts"])
def test_all_frozen_matrices_are_stored_in_the_precision_that_was_asked_for(models: dict[str, Path], name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(models[name]).requires_grad_(requires_grad=False)
    store_frozen(model, torch.bfloat16)
    for path, weight in model.named_parameters():
        assert weight.dtype == (torch.bfloat16 if weight.ndim > 1 else torch.float32), path
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert (embedding is head) == (name == "tied")


def test_logits_of_the_transformers_engine_are_not_rounded(tmp_path: Path) -> None:
    model = SlotModel(str(save_model(tmp_path / "narrow", 0, dtype=torch.bfloat16)), "cpu", "auto", None)
    cache = SlotCache(model.kv_shape, 64 * model.kv_shape.position_bytes)
    cache.reserve(1, 8, used=0)
    logits = model.prefill(cache, 0, [[5, 9, 17]], [0], [(0, 2)], adapters=[None])
    assert logits.dtype == torch.float32
    assert (logits != logits.bfloat16().float()).float().mean() > 0.9
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "narrow", dtype=torch.bfloat16)
    assert torch.allclose(logits, plain(torch.tensor([[5, 9, 17]])).logits[0, -1:].float(), atol=0.1)


def test_the_page_prints_the_table() -> None:
    lines = ["| weight | trained: stored | frozen: stored | computed | published, served |", "|---|---|---|---|---|"]
    for kind in KINDS:
        cells = (stored(kind), stored(kind, "bfloat16"), computed(kind, "bfloat16"), published(kind, "bfloat16"))
        lines.append(f"| {kind} | {' | '.join(cell or 'never' for cell in cells)} |")
    page = (Path(__file__).parents[2] / "docs/numerics.md").read_text()
    assert "\n".join(lines) in page
