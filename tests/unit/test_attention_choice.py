"""The kernel of attention is chosen by its error against exact attention; the kernels of a GPU are emulated with their roundings."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from small_models import latent_attention
from structlog.testing import capture_logs
from test_varlen_attention import documented_kernel
from thread_ranks import on_ranks
from tiny_policy import ragged_batch, tiny_model
from transformers import AutoModelForCausalLM, Gemma4TextConfig

from trainer_svc.config import TrainerConfig
from trainer_svc.engine import attention_choice
from trainer_svc.engine import network as module
from trainer_svc.engine.attention_choice import LARGEST_ERROR, choose_attention, kernel_error, of_all_ranks
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.engine.loading import choose_kernels, load_network
from trainer_svc.engine.network import HeadShape
from trainer_svc.parallel.mesh import ALONE

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

GROUPS = {1: HeadShape(8, 8, 64, 64), 4: HeadShape(16, 4, 128, 128), 8: HeadShape(16, 2, 128, 128)}
"""Heads by the number of query heads that share a key-value head."""

MLA = HeadShape(4, 4, 192, 128)
"""DeepSeek's: queries and keys of 192 columns, values of 128."""


class _Rounding(torch.autograd.Function):
    """Attention of one sequence as a kernel of a GPU computes it; shapes [heads, tokens, size], in half precision.

    `flash` rounds the weights, and the gradients of the scores, to the inputs' precision before it multiplies by them.
    """

    @staticmethod
    def forward(ctx: Any, query, key, value, mask, scale, flash):  # noqa: PLR0917 - autograd passes by position
        ctx.save_for_backward(query, key, value, mask)
        ctx.scale, ctx.flash = scale, flash
        return _Rounding._weights_and_output(ctx, query, key, value, mask)[1].to(query.dtype)

    @staticmethod
    def _weights_and_output(ctx: Any, query, key, value, mask):
        scores = (query.float() @ key.float().transpose(1, 2) * ctx.scale).masked_fill(~mask, -torch.inf)
        terms = (scores - scores.amax(-1, keepdim=True)).exp()
        sums = terms.sum(-1, keepdim=True)
        given = terms.to(query.dtype).float() if ctx.flash else terms
        return terms / sums, given @ value.float() / sums

    @staticmethod
    def backward(ctx: Any, arriving):
        query, key, value, mask = ctx.saved_tensors
        weights, output = _Rounding._weights_and_output(ctx, query, key, value, mask)
        kind, arriving = query.dtype, arriving.float()
        rounded = (lambda each: each.to(kind).float()) if ctx.flash else (lambda each: each)
        drift = (arriving * output.to(kind).float()).sum(-1, keepdim=True)
        of_scores = rounded(weights * (arriving @ value.float().transpose(1, 2) - drift))
        of_query = of_scores @ key.float() * ctx.scale
        of_key = of_scores.transpose(1, 2) @ query.float() * ctx.scale
        of_value = rounded(weights).transpose(1, 2) @ arriving
        return of_query.to(kind), of_key.to(kind), of_value.to(kind), None, None, None


def kernel(  # noqa: PLR0917 - the kernel's own signature
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    flash=True,
    shift=0,
    factor=1.0,
    only_head=None,
):
    """Stand in for `varlen_attn`. Wrong ones move the mask by `shift` keys, or multiply the scale by `factor` (of one head)."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1], "it takes heads of one size"
    assert window_size == (-1, 0)
    assert enable_gqa == (query.shape[1] != key.shape[1])
    groups = query.shape[1] // key.shape[1]
    outputs = []
    for own, seen in zip(cu_seq_q.unfold(0, 2, 1).tolist(), cu_seq_k.unfold(0, 2, 1).tolist(), strict=True):
        q, k, v = (each.transpose(0, 1) for each in (query[slice(*own)], key[slice(*seen)], value[slice(*seen)]))
        k, v = (each.repeat_interleave(groups, 0) for each in (k, v))
        mask = torch.ones(q.shape[1], k.shape[1]).tril(k.shape[1] - q.shape[1] + shift).bool()
        factors = torch.full((len(q), 1, 1), factor)
        if only_head is not None:
            factors[torch.arange(len(q)) != only_head] = 1.0
        outputs.append(_Rounding.apply(q * factors.to(q.dtype), k, v, mask, scale, flash).transpose(0, 1))
    return torch.cat(outputs)


def error(monkeypatch: pytest.MonkeyPatch, shape: HeadShape, dtype=torch.bfloat16, **changes: Any) -> float:
    monkeypatch.setattr(module, "varlen_attn", partial(kernel, **changes))
    return kernel_error(shape, CPU, dtype, varlen=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*GROUPS.values(), MLA], ids=str)
def test_kernels_that_round_in_different_places_are_right(monkeypatch, shape, dtype):
    found = [error(monkeypatch, shape, dtype, flash=flash) for flash in (True, False)]
    found.append(kernel_error(shape, CPU, dtype, varlen=False))
    assert found[0] != found[1]
    assert all(0.2 < each < 0.5 * LARGEST_ERROR for each in found)


@pytest.mark.parametrize(
    "change",
    [{"shift": -1}, {"shift": 1}, {"shift": 9}, {"factor": 1.0625}, {"factor": 2.0, "only_head": 3}],
    ids=["sees-one-less", "sees-one-more", "sees-all", "scale-off", "one-head-off"],
)
@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("shape", [*GROUPS.values(), MLA], ids=str)
def test_a_kernel_that_computes_something_else_is_not(monkeypatch, shape, flash, change):
    assert not error(monkeypatch, shape, flash=flash, **change) <= 1.5 * LARGEST_ERROR


def test_a_wrong_kernel_is_not_chosen_and_the_reason_has_its_error(monkeypatch):
    shapes = list(GROUPS.values())
    errors = {True: 0.5, False: 0.7}
    monkeypatch.setattr(attention_choice, "kernel_error", lambda *_, varlen: errors[varlen])
    right = choose_attention("auto", CUDA, torch.bfloat16, shapes)
    assert right.varlen
    assert str(right).startswith("attention: varlen, because its results are right within 8 / 8 heads of 64: 0.5")
    errors[True] = 50.0
    wrong = choose_attention("auto", CUDA, torch.bfloat16, shapes)
    assert not wrong.varlen
    assert str(wrong) == (
        "attention: blocks, because the kernel's results are wrong, by 8 / 8 heads of 64: 50 (blocks: 0.7),"
        " in units of bfloat16's eps; 3 are accepted"
    )
    with pytest.raises(ValueError, match=r"attention is varlen, but the kernel's results are wrong.*set attention to"):
        choose_attention("varlen", CUDA, torch.bfloat16, shapes)


def test_every_kind_of_head_is_tried_and_one_without_a_kernel_is_named(monkeypatch):
    def tried(shape: HeadShape, *_: object, varlen: bool) -> float:
        if varlen and shape.size > 256:
            raise RuntimeError("no kernel for head_dim 512")
        return 0.5

    monkeypatch.setattr(attention_choice, "kernel_error", tried)
    global_layers = HeadShape(8, 1, 512, 512)
    assert choose_attention("auto", CUDA, torch.bfloat16, {GROUPS[1]}).varlen
    choice = choose_attention("auto", CUDA, torch.bfloat16, {GROUPS[1], global_layers})
    assert not choice.varlen
    assert "does not run with 8 / 1 heads of 512 (no kernel for head_dim 512)" in choice.because


def test_where_the_kernel_cannot_run_auto_does_without_and_varlen_is_refused():
    shapes = [GROUPS[4]]
    assert str(choose_attention("auto", CPU, torch.bfloat16, shapes)) == (
        "attention: blocks, because the kernel needs CUDA"
    )
    assert not choose_attention("sdpa", CPU, torch.bfloat16, shapes).varlen
    assert "attention is sdpa" in str(choose_attention("sdpa", CUDA, torch.bfloat16, shapes))
    with pytest.raises(ValueError, match=r"needs CUDA: set attention to auto or sdpa"):
        choose_attention("varlen", CPU, torch.bfloat16, shapes)
    with pytest.raises(ValueError, match=r"half precision and the forward pass is float32"):
        choose_attention("varlen", CUDA, torch.float32, shapes)


MODELS = {
    "latent": latent_attention(layers=3),
    "by_layer": Gemma4TextConfig(  # the last layer of six is a global one
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        num_hidden_layers=6,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=16,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        final_logit_softcapping=None,
    ),
}
HEADS = {"latent": {HeadShape(4, 4, 20, 16)}, "by_layer": {HeadShape(4, 2, 8, 8), HeadShape(4, 2, 16, 16)}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for name, config in MODELS.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
    return {name: str(root / name) for name in MODELS}


@pytest.mark.parametrize("name", MODELS)
def test_the_heads_to_try_are_those_that_the_layers_have(models, name):
    assert load_network(models[name], CPU).head_shapes == HEADS[name]
    of_ranks = [load_network(models[name], CPU, lazy=(rank, 2)).head_shapes for rank in range(2)]
    assert of_ranks[0] | of_ranks[1] == HEADS[name]


def test_ranks_that_have_checked_other_layers_try_the_same_heads(models):
    first, second = (load_network(models["by_layer"], CPU, lazy=(rank, 2)).head_shapes for rank in range(2))
    assert first != second
    assert on_ranks([first, second], of_all_ranks) == [HEADS["by_layer"]] * 2
    assert of_all_ranks(first, ALONE) == first


@pytest.mark.parametrize("name", MODELS)
def test_heads_of_other_sizes_compute_the_same_by_either_kernel_and_alone(models, name, monkeypatch):
    rows = ragged_batch(seed=1)
    engine = TrainEngine(TrainerConfig(token_budget=150, device="cpu"), models[name])
    blocks = engine.forward(rows)
    monkeypatch.setattr(module, "varlen_attn", documented_kernel)
    engine.network = replace(engine.network, varlen=True)
    plain = AutoModelForCausalLM.from_pretrained(models[name], attn_implementation="eager").eval()
    for sequence, values, others in zip(rows, blocks, engine.forward(rows), strict=True):
        mask = sequence.loss_mask
        assert (values - others)[mask].abs().max() < 1e-5
        with torch.no_grad():
            logits = plain(sequence.input_ids.unsqueeze(0)).logits[0, :-1]
        alone = torch.log_softmax(logits / sequence.temperature, -1).gather(1, sequence.input_ids[1:, None]).squeeze(1)
        assert (values[1:] - alone)[mask[1:]].abs().max() < 1e-5


def test_the_choice_is_logged_where_there_is_one(tmp_path):
    network = load_network(str(tiny_model(tmp_path)), CPU)
    with capture_logs() as lines:
        choose_kernels(network, "auto", ALONE, compiled=False)
        assert lines == []
        choose_kernels(replace(network, device=CUDA), "auto", ALONE, compiled=False)
    [line] = lines
    assert line["event"].startswith("attention: blocks, because the kernel needs half precision")
    assert line["log_level"] == "info"
    assert line["model"] == "Qwen3ForCausalLM"
