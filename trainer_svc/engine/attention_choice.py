"""Choose the kernel of attention: the flash kernel for packed rows if its results are right, otherwise blocks."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Literal, NamedTuple

import numpy as np
import torch

from trainer_svc.batch.attention_plan import AttentionPlan
from trainer_svc.batch.shapes import PackedHeads
from trainer_svc.engine.network import HeadShape, Packing, packed_attention
from trainer_svc.parallel.mesh import Ranks

Attention = Literal["auto", "sdpa", "varlen"]

LARGEST_ERROR = 3.0
"""Largest accepted `kernel_error`. Kernels that round like flash attention, or that round only their results, stay below 1 for any
number and size of heads. A scale that is off by 6% gives 6 in bfloat16 and 50 in float16; a wrong mask gives 40 or more."""

SEGMENTS = (np.arange(5), np.r_[0, 1, 5, 6, 7])
"""The two test sequences, as places in a packed row; they share their first two tokens."""

TOKENS = 8
"""Tokens of the packed row of the test."""


class Choice(NamedTuple):
    """Which kernel computes attention, and why."""

    varlen: bool
    because: str

    def __str__(self) -> str:
        """Return the line for the log."""
        return f"attention: {'varlen' if self.varlen else 'blocks'}, because {self.because}"


def of_all_ranks(shapes: Collection[HeadShape], ranks: Ranks) -> frozenset[HeadShape]:
    """Return the heads found by all ranks together, since each rank checks its own share of the layers. All ranks call this."""
    answers = ranks.exchange(json.dumps(sorted(shapes)).encode())
    return frozenset(HeadShape(*each) for answer in answers for each in json.loads(answer))


def choose_attention(
    setting: Attention, device: torch.device, dtype: torch.dtype, shapes: Collection[HeadShape]
) -> Choice:
    """Choose the kernel for layers with heads of these shapes. `auto` takes the varlen kernel if it is right for all of them.

    Args:
        setting: `trainer.attention`.
        device: Where the layers run.
        dtype: Precision of the forward pass.
        shapes: The heads of all layers, before any axis of parallelism divides them.

    Raises:
        ValueError: if the setting is varlen and the kernel cannot be used.
    """
    if setting == "sdpa":
        return Choice(varlen=False, because="the setting attention is sdpa")
    obstacle = _obstacle(device, dtype) or (None if shapes else "no layer with attention was seen")
    errors: list[str] = []
    for shape in () if obstacle else sorted(shapes):
        try:
            found = kernel_error(shape, device, dtype, varlen=True)
        except (RuntimeError, TypeError, ValueError) as error:  # an old device, or a head size without a kernel
            obstacle = f"the kernel does not run with {shape} ({error})"
            break
        errors.append(f"{shape}: {found:.2g} (blocks: {_error_of_blocks(shape, device, dtype)})")
        if not found <= LARGEST_ERROR:
            obstacle = f"the kernel's results are wrong, by {errors[-1]}"
            break
    unit = f"in units of {_name(dtype)}'s eps; {LARGEST_ERROR:g} are accepted"
    if obstacle and errors:
        obstacle = f"{obstacle}, {unit}"
    if obstacle and setting == "varlen":
        raise ValueError(f"attention is varlen, but {obstacle}: set attention to auto or sdpa")
    return Choice(not obstacle, obstacle or f"its results are right within {', '.join(errors)}, {unit}")


def _error_of_blocks(shape: HeadShape, device: torch.device, dtype: torch.dtype) -> str:
    try:
        return f"{kernel_error(shape, device, dtype, varlen=False):.2g}"
    except (RuntimeError, ValueError):
        return "do not run"


def _obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return "the kernel needs CUDA"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the kernel needs half precision and the forward pass is {_name(dtype)}"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def kernel_error(shape: HeadShape, device: torch.device, dtype: torch.dtype, *, varlen: bool) -> float:
    """Return how far `packed_attention` is from attention in float64, for two sequences with a shared beginning.

    Compare the output, and the gradients of queries, keys and values, head by head. The error of a head is the norm of the
    difference divided by the norm of the exact values, in units of the precision's eps. Return the largest error.

    Raises:
        RuntimeError: if the varlen kernel does not accept such heads on this device.
        ValueError: if no kernel for blocks accepts them.
    """
    generator = torch.Generator(device).manual_seed(0)

    def random(heads: int, size: int) -> PackedHeads:
        return torch.randn(TOKENS, heads, size, generator=generator, device=device).to(dtype)

    rows = [random(shape.queries, shape.size), random(shape.keys, shape.size), random(shape.keys, shape.value_size)]
    arriving = random(shape.queries, shape.value_size)
    packing = Packing(AttentionPlan.of(list(SEGMENTS), TOKENS).to(device), varlen=varlen)
    inputs = [each.requires_grad_() for each in rows]
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        given = (each.transpose(0, 1).unsqueeze(0) for each in inputs)
        output = packed_attention(torch.nn.Identity(), *given, None, packing=packing)[0][0]
        found = [output, *torch.autograd.grad(output, inputs, arriving)]
        wide = [each.detach().double().requires_grad_() for each in rows]
        exact_output = _exact(*wide)
        exact = [exact_output, *torch.autograd.grad(exact_output, wide, arriving.double())]
    errors = [_norms(ours.double() - theirs) / _norms(theirs) for ours, theirs in zip(found, exact, strict=True)]
    return float(torch.cat(errors).max() / torch.finfo(dtype).eps)


def _norms(rows: PackedHeads) -> torch.Tensor:
    return rows.detach().pow(2).sum((0, 2)).sqrt()


def _exact(query: PackedHeads, key: PackedHeads, value: PackedHeads) -> PackedHeads:
    """Attend causally inside each of `SEGMENTS` by the definition. Shared tokens are queries in the first segment only."""
    groups = query.shape[1] // key.shape[1]
    outputs: list[PackedHeads] = []
    for segment in SEGMENTS:
        q, k, v = (each[torch.from_numpy(segment).to(each.device)] for each in (query, key, value))
        k, v = (each.repeat_interleave(groups, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * query.shape[-1] ** -0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        own = TOKENS - len(outputs[0]) if outputs else len(segment)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v)[-own:])
    return torch.cat(outputs)
