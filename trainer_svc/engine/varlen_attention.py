"""Attention over packed rows by the flash kernel for sequences of varying length, as `torch.nn.attention.varlen` has it.

Queries are the packed rows as they lie: each sequence asks for its own tokens alone, and the first that has a common
beginning asks for that too. Keys and values are gathered where sequences share a beginning. The kernel aligns the
causal mask with the last key, so that a sequence's own tokens see all of the beginning.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from trainer_svc.batch.attention_plan import VarlenPlan
from trainer_svc.batch.shapes import PackedHeads

__all__ = ["Attention", "uses_varlen", "varlen_attention"]

Attention = Literal["auto", "sdpa", "varlen"]

PROBE_TOLERANCE = 0.05
"""Largest accepted difference from stock attention in the probe, whose values are of size 1; bfloat16 has 8 bits."""


def varlen_attention(
    query: PackedHeads,
    key: PackedHeads,
    value: PackedHeads,
    ragged: VarlenPlan,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
) -> PackedHeads:
    """Attend causally inside each packed sequence; CUDA and half precision alone.

    Args:
        query: Shape [rows, heads, head_dim]; rows behind the packed tokens are left out.
        key: Shape [rows, key-value heads, head_dim].
        value: As `key`.
        ragged: The sequences.
        scaling: Factor on the scores; None means 1 / sqrt(head_dim).
        sliding_window: Tokens that a query sees, itself included; None means all earlier ones.

    Returns:
        Shape [packed, heads, head_dim].
    """
    precision = query.device.type
    dtype = torch.get_autocast_dtype(precision) if torch.is_autocast_enabled(precision) else value.dtype
    if ragged.keys is None:
        key, value = key[: ragged.tokens], value[: ragged.tokens]
    else:
        key, value = (each.to(dtype).index_select(0, ragged.keys) for each in (key, value))
    seen = -1 if sliding_window is None or sliding_window >= ragged.longest_key else sliding_window - 1
    output: torch.Tensor = varlen_attn(
        query[: ragged.tokens].to(dtype),
        key.to(dtype),
        value.to(dtype),
        ragged.query_bounds,
        ragged.key_bounds,
        ragged.longest_query,
        ragged.longest_key,
        scale=scaling,
        window_size=(seen, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output


def uses_varlen(setting: Attention, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]) -> bool:
    """Whether attention goes through the kernel for sequences of varying length.

    Args:
        setting: What the config says; auto takes the kernel where it gives what stock attention gives.
        device: Where the network lies.
        dtype: Precision of its forward pass.
        shape: Its heads, key-value heads and head_dim.

    Raises:
        ValueError: if it is set to varlen and cannot be used.
    """
    if setting == "sdpa":
        return False
    obstacle = _obstacle(device, dtype, shape)
    if obstacle and setting == "varlen":
        raise ValueError(f"attention is varlen, but {obstacle}: set attention to auto or sdpa")
    return obstacle is None


def _obstacle(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]) -> str | None:
    if device.type != "cuda":
        return "the kernel needs CUDA"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the kernel takes half precision and the forward pass is {str(dtype).removeprefix('torch.')}"
    try:
        gap = _probe(device, dtype, shape)
    except RuntimeError as error:  # an old device, or a head size without a kernel
        return f"the kernel does not run here ({error})"
    return None if gap <= PROBE_TOLERANCE else f"its results differ from stock attention's by {gap:.2g}"


def _probe(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]) -> float:
    """Largest difference from stock attention, values and gradients, for two sequences with a common beginning."""
    heads, key_heads, head_dim = shape
    segments = [np.arange(5), np.r_[0, 1, 5, 6, 7]]
    plan = VarlenPlan.of(segments, 8)
    if plan is None:
        raise AssertionError("the probe's own sequences lie in order")
    ragged = plan.to(device)
    generator = torch.Generator(device).manual_seed(0)
    rows = [
        torch.randn(8, count, head_dim, generator=generator, device=device).to(dtype).requires_grad_()
        for count in (heads, key_heads, key_heads)
    ]
    expected = []
    for segment, own in zip(segments, (5, 3), strict=True):
        query, key, value = (each[segment].transpose(0, 1).unsqueeze(0) for each in rows)
        whole = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=heads != key_heads)
        expected.append(whole[0].transpose(0, 1)[-own:])
    with torch.autocast(device.type, enabled=False):
        found = varlen_attention(rows[0], rows[1], rows[2], ragged)
    pairs = [(found, torch.cat(expected))]
    arriving = torch.randn(found.shape, generator=generator, device=device).to(dtype)
    pairs += zip(*(torch.autograd.grad(each, rows, arriving) for each in pairs[0]), strict=True)
    return max(float((ours.float() - stock.float()).abs().max()) for ours, stock in pairs)
