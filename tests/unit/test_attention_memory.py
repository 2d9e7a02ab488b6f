"""Attention never holds a matrix of tokens x tokens, whatever the architecture asks for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer_svc.batch.attention_plan import AttentionPlan
from trainer_svc.engine.network import Packing, packed_attention

TOKENS, HEADS, HEAD_DIM = 700, 4, 8


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operation made, kernels of the backward pass included."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        sizes = [each.numel() for each in tree_leaves(made) if isinstance(each, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return made


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 40, 300])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("value_dim", [4, 8, 12])
def test_no_operation_makes_a_matrix_of_tokens_by_tokens_and_results_are_exact(window, key_heads, value_dim):
    plan = replace(AttentionPlan.of([np.arange(TOKENS)], TOKENS), prefixes=None)
    generator = torch.Generator().manual_seed(0)
    shapes = [(HEADS, HEAD_DIM), (key_heads, HEAD_DIM), (key_heads, value_dim)]
    rows = [torch.randn(1, heads, TOKENS, width, generator=generator) for heads, width in shapes]
    inputs = [each.clone().requires_grad_() for each in rows]
    with LargestTensor() as largest:
        output, _ = packed_attention(torch.nn.Identity(), *inputs, None, packing=Packing(plan), sliding_window=window)
        output.square().sum().backward()
    assert largest.elements < TOKENS * TOKENS // 2

    exact = [each.double().requires_grad_() for each in rows]
    query, key, value = exact[0], *(each.repeat_interleave(HEADS // key_heads, 1) for each in exact[1:])
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)[None, :]
    seen = (distance >= 0) & (distance < (window or TOKENS))
    scores = (query @ key.transpose(2, 3) / HEAD_DIM**0.5).masked_fill(~seen, -torch.inf)
    expected = (scores.softmax(-1) @ value).transpose(1, 2)
    expected.square().sum().backward()
    assert (output - expected).abs().max() < 1e-5
    for ours, theirs in zip(inputs, exact, strict=True):
        assert (ours.grad - theirs.grad).abs().max() < 1e-4 * theirs.grad.abs().max()


def test_dropout_of_scores_is_refused():
    plan = AttentionPlan.of([np.arange(5)], 5)
    rows = [torch.randn(1, 2, 5, 8) for _ in range(3)]
    with pytest.raises(ValueError, match=r"dropout.*attention_dropout to 0"):
        packed_attention(torch.nn.Identity(), *rows, None, packing=Packing(plan), dropout=0.1)
