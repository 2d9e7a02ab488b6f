"""Attention that does the work of a shared beginning once: the same numbers and gradients as whole sequences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_svc.batch.attention_plan import WHOLE, AttentionPlan, PrefixPlan
from trainer_svc.engine.network import Packing, packed_attention

HEADS, KV_HEADS, WIDTH = 4, 2, 8

groups = st.lists(
    st.tuples(st.integers(0, 40), st.lists(st.integers(1, 70), min_size=1, max_size=4)), min_size=1, max_size=5
)


def layout(sizes: list[tuple[int, list[int]]]) -> tuple[list[np.ndarray], int]:
    """Packed indices of each sequence, and the tokens of the row: each prompt with its samples behind it."""
    segments, filled = [], 0
    for prompt, samples in sizes:
        shared = np.arange(filled, filled + prompt)
        filled += prompt
        for length in samples:
            segments.append(np.concatenate([shared, np.arange(filled, filled + length)]))
            filled += length
    return segments, filled


def planned(segments: list[np.ndarray], tokens: int) -> AttentionPlan:
    """The plan that computes beginnings once, also for sequences so short that whole ones take less time."""
    prefixes = PrefixPlan.of(segments, tokens)
    assert prefixes is not None
    return replace(AttentionPlan.of(segments, tokens), prefixes=prefixes)


def attend(plan: AttentionPlan, rows: list[torch.Tensor], weights: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients of query, key and value."""
    leaves = [row.clone().requires_grad_() for row in rows]
    output, _ = packed_attention(torch.nn.Identity(), *leaves, None, packing=Packing(plan), scaling=0.3)
    (output * weights).sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves)]


@settings(max_examples=25)
@given(groups, st.integers(0, 2**31))
def test_outputs_and_gradients_are_those_of_whole_sequences(sizes, seed):
    segments, tokens = layout(sizes)
    plan = planned(segments, tokens)
    generator = torch.Generator().manual_seed(seed)
    rows = [
        torch.randn(1, heads, tokens, WIDTH, generator=generator, dtype=torch.float64)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    weights = torch.randn(1, tokens, HEADS, WIDTH, generator=generator, dtype=torch.float64)
    whole = attend(replace(plan, prefixes=None), rows, weights)
    for shared, expected in zip(attend(plan, rows, weights), whole, strict=True):
        torch.testing.assert_close(shared, expected, rtol=1e-10, atol=1e-10)


def test_a_sample_that_is_the_beginning_of_the_others_adds_no_work():
    segments = [np.arange(9), np.r_[np.arange(9), 9:14], np.r_[np.arange(9), 14:20]]
    plan = planned(segments, 20)
    rows = [torch.randn(1, heads, 20, WIDTH, dtype=torch.float64) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    weights = torch.randn(1, 20, HEADS, WIDTH, dtype=torch.float64)
    whole = attend(replace(plan, prefixes=None), rows, weights)
    for shared, expected in zip(attend(plan, rows, weights), whole, strict=True):
        torch.testing.assert_close(shared, expected, rtol=1e-10, atol=1e-10)


def test_rows_of_padding_behind_the_packed_tokens_attend_to_nothing():
    plan = planned([np.r_[0:5], np.r_[0, 1, 5, 6]], 7)
    rows = [torch.randn(1, heads, 9, WIDTH, dtype=torch.float64) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    weights = torch.randn(1, 9, HEADS, WIDTH, dtype=torch.float64)
    whole = attend(replace(plan, prefixes=None), rows, weights)
    assert not whole[0][:, 7:].any()
    for shared, expected in zip(attend(plan, rows, weights), whole, strict=True):
        torch.testing.assert_close(shared, expected, rtol=1e-10, atol=1e-10)


def test_sequences_that_share_tokens_elsewhere_are_attended_whole():
    scattered = [np.r_[0, 1, 4, 5], np.r_[0, 1, 2, 3]]
    assert PrefixPlan.of(scattered, 6) is None
    middle = [np.r_[0, 1, 2], np.r_[3, 1, 4]]
    assert PrefixPlan.of(middle, 5) is None


def test_short_sequences_are_attended_whole_unless_they_repeat_a_long_prompt():
    short, tokens = layout([(12, [8] * 8)] * 4)
    assert AttentionPlan.of(short, tokens).prefixes is None
    repeated, tokens = layout([(56, [5] * 8)] * 4)
    assert AttentionPlan.of(repeated, tokens).prefixes is not None
    long, tokens = layout([(12, [8, WHOLE])] * 4)
    assert AttentionPlan.of(long, tokens).prefixes is not None
