"""Packed rows as the varlen kernel takes them; the kernel itself runs in tests/gpu."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_policy import ragged_batch, tiny_model

from trainer_svc.batch.attention_plan import AttentionPlan, VarlenPlan
from trainer_svc.batch.rows import count_loss_tokens, empty_batch, pack
from trainer_svc.compute_config import ComputeConfig
from trainer_svc.engine import network as module
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.engine.loading import compile_layers
from trainer_svc.engine.network import Packing, packed_attention
from trainer_svc.parallel.context import _slice


def documented_kernel(  # noqa: PLR0917 - the kernel's own signature
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    """What `varlen_attn` says that it computes: the mask is aligned with the last query and the last key."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    outputs = []
    for number in range(len(cu_seq_q) - 1):
        own = slice(cu_seq_q[number], cu_seq_q[number + 1])
        seen = slice(cu_seq_k[number], cu_seq_k[number + 1])
        queries, keys = own.stop - own.start, seen.stop - seen.start
        assert 0 < queries <= max_q
        assert queries <= keys <= max_k
        distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)[None, :]
        mask = distance >= 0 if window_size[0] < 0 else (distance >= 0) & (distance <= window_size[0])
        parts = (each.transpose(0, 1) for each in (query[own], key[seen], value[seen]))
        outputs.append(
            torch.nn.functional.scaled_dot_product_attention(
                *parts, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
            ).transpose(0, 1)
        )
    return torch.cat(outputs)


@pytest.mark.parametrize("sizes", [(8, 8), (12, 8), (8, 12)])
@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("window", [None, 6])
def test_rows_and_bounds_say_what_the_blocks_say(monkeypatch, fold, window, sizes):
    monkeypatch.setattr(module, "varlen_attn", documented_kernel)
    generator = torch.Generator().manual_seed(0)
    for batch in pack(ragged_batch(seed=3), 200, fold=fold):
        tokens = batch.packed_tokens
        size, value_size = sizes
        shapes = ((1, 4, tokens, size), (1, 2, tokens, size), (1, 2, tokens, value_size))
        rows = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        expected, found = (
            packed_attention(
                torch.nn.Identity(), *rows, None, packing=Packing(batch.attention, varlen=varlen), sliding_window=window
            )[0]
            for varlen in (False, True)
        )
        assert found.shape == (1, tokens, 4, value_size)
        assert float((found - expected).abs().max()) < 1e-12


def test_a_pytorch_whose_function_has_no_argument_for_grouped_heads_gets_none(monkeypatch):
    """PyTorch 2.11 passes any number of key-value heads on to the kernel, which groups them."""

    def older_kernel(*tensors, scale=None, window_size=(-1, -1)):
        return documented_kernel(*tensors, scale=scale, window_size=window_size, enable_gqa=True)

    monkeypatch.setattr(module, "varlen_attn", older_kernel)
    monkeypatch.setattr(module, "NAMES_GROUPS", False)
    [batch] = pack(ragged_batch(seed=3), 100_000)
    rows = [torch.randn(1, heads, batch.packed_tokens, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    expected, found = (
        packed_attention(torch.nn.Identity(), *rows, None, packing=Packing(batch.attention, varlen=varlen))[0]
        for varlen in (False, True)
    )
    assert float((found - expected).abs().max()) < 1e-12


def test_each_packed_token_asks_once_and_a_sequence_that_adds_none_not_at_all():
    plan = VarlenPlan.of([np.arange(5), np.r_[0, 1, 5, 6], np.r_[0, 1], np.arange(7, 9)], 9)
    assert plan.query_bounds.tolist() == [0, 5, 7, 9]
    assert plan.key_bounds.tolist() == [0, 5, 9, 11]
    assert plan.keys.tolist() == [0, 1, 2, 3, 4, 0, 1, 5, 6, 7, 8]
    assert (plan.longest_query, plan.longest_key) == (5, 5)
    assert VarlenPlan.of([np.arange(3), np.arange(3, 5)], 5).keys is None
    assert VarlenPlan.of([np.arange(3, 5), np.arange(3)], 5) is None
    assert AttentionPlan.of([np.arange(3, 5), np.arange(3)], 5).varlen is None


def test_a_slice_looks_alike_to_compiled_layers_with_and_without_padding_behind_the_row():
    row = torch.arange(8).unsqueeze(0)
    inside, padded = _slice(row, 4, 4), _slice(row, 6, 4)
    assert inside.stride() == padded.stride() == (4, 1)
    assert (inside.tolist(), padded.tolist()) == ([[4, 5, 6, 7]], [[6, 7, 0, 0]])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_layers_compute_what_eager_ones_do_whatever_the_number_of_tokens(tmp_path, monkeypatch, dtype):
    # an engine of vLLM that another test started in this process has switched the compiler off
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    with torch._dynamo.config.patch(disable=False):
        compiled_layers_compute_what_eager_ones_do(tmp_path, dtype)


def compiled_layers_compute_what_eager_ones_do(tmp_path, dtype):
    config = ComputeConfig(device="cpu", lr=1e-3, gradient_checkpointing=True, dtype=dtype)
    model_dir = tiny_model(tmp_path)
    exact = 1e-5 if dtype == "float32" else 1e-2
    eager, compiled = TrainEngine(config, model_dir), TrainEngine(config, model_dir)
    # inductor compiles for a minute; its input, and graph breaks before attention, are the same
    compile_layers(compiled.network.model, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    graphs = []
    for seed in (1, 2, 3):
        rows = ragged_batch(seed=seed)
        ours, expected = (
            engine.train_batch(rows, lambda outputs, _: (-outputs.logprobs.sum(), {}), count_loss_tokens)
            for engine in (compiled, eager)
        )
        assert ours.loss == pytest.approx(expected.loss, rel=exact)
        assert ours.grad_norm == pytest.approx(expected.grad_norm, rel=exact)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    compiled.network.outputs(empty_batch()).logprobs.sum().backward()  # as a rank without rows does
    graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert 0 < graphs[0] == graphs[2] == graphs[3]  # one compilation fits all sizes
