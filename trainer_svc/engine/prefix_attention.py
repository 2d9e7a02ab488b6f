"""Causal attention on a CPU that does the work of a shared beginning once.

Samples of one prompt lie behind it in the packed row. Each token then attends in two pieces: causally inside its own part
(the prompt, or its sample), and to the whole prompt. Two softmaxes over disjoint keys join exactly: outputs are weighted
by the exponentials of their log-sum-exps. Backwards, each piece is differentiated with the joined output and log-sum-exp,
as in ring attention (arXiv 2310.01889). Only the kernel that PyTorch's `scaled_dot_product_attention` runs on a CPU gives
the log-sum-exp, so it is called by its own name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from trainer_svc.batch.attention_plan import PrefixPlan
from trainer_svc.batch.shapes import Block, PackedHeads

__all__ = ["fits", "prefix_attention"]

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - see the module's docstring
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001


def fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the kernel takes these tensors."""
    return bool(
        query.device.type == "cpu"
        and query.dtype == key.dtype == value.dtype
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
    )


def prefix_attention(
    query: PackedHeads, key: PackedHeads, value: PackedHeads, plan: PrefixPlan, *, scaling: float | None = None
) -> PackedHeads:
    """Attend as the plan says.

    Args:
        query: Shape [rows, heads, head_dim]; rows behind the packed tokens are left out.
        key: Shape [rows, key-value heads, head_dim].
        value: As `key`.
        plan: What attends to what.
        scaling: Factor on the scores; None means 1 / sqrt(head_dim).

    Returns:
        Shape [packed, heads, head_dim].
    """
    output: PackedHeads = _PrefixAttention.apply(query, key, value, plan, scaling)
    return output


class _PrefixAttention(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed here
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any,  # noqa: ANN401 - autograd's context
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: PrefixPlan,
        scaling: float | None,
    ) -> torch.Tensor:
        outputs, sums = [], []
        for block in plan.blocks:
            q, k, v = (_rows(each, block) for each in (query, key, value))
            output, lse = _flash(q, k, v, 0.0, is_causal=True, scale=scaling)
            outputs.append(output.transpose(1, 2).flatten(0, 1))
            sums.append(lse.transpose(1, 2).flatten(0, 1))
        output = torch.cat(outputs).index_select(0, plan.sources)
        lse = torch.cat(sums).index_select(0, plan.sources)
        for queries, keys in _stretches(plan):
            q, k, v = _heads(query[queries]), _heads(key[keys]), _heads(value[keys])
            crossed, crossed_lse = _flash(q, k, v, 0.0, is_causal=False, scale=scaling)
            _join(output[queries], lse[queries], crossed[0].transpose(0, 1), crossed_lse[0].transpose(0, 1))
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.plan, ctx.scaling = plan, scaling
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        query, key, value, output, lse = ctx.saved_tensors
        plan: PrefixPlan = ctx.plan
        parts: list[tuple[torch.Tensor, ...]] = []
        for block in plan.blocks:
            q, k, v, o, g = (_rows(each, block) for each in (query, key, value, output, grad))
            padding = (block < 0).unsqueeze(1)
            # A padded query has no weight on any key: its log-sum-exp is infinite, its gradient 0.
            sums = _rows(lse.unsqueeze(-1), block).squeeze(-1).masked_fill(padding, torch.inf)
            g = g.masked_fill(padding.unsqueeze(-1), 0.0)
            found = _flash_backward(g, q, k, v, o, sums, 0.0, is_causal=True, scale=ctx.scaling)
            parts.append(tuple(each.transpose(1, 2).flatten(0, 1) for each in found))
        behind = len(query) - len(output)
        grads = [
            torch.nn.functional.pad(torch.cat(each).index_select(0, plan.sources), (0, 0, 0, 0, 0, behind))
            for each in zip(*parts, strict=True)
        ]
        for queries, keys in _stretches(plan):
            q, o, g, sums = (_heads(each[queries]) for each in (query, output, grad, lse))
            k, v = _heads(key[keys]), _heads(value[keys])
            found = _flash_backward(g, q, k, v, o, sums, 0.0, is_causal=False, scale=ctx.scaling)
            for total, where, each in zip(grads, (queries, keys, keys), found, strict=True):
                total[where] += each[0].transpose(0, 1)
        return (*grads, None, None)


def _stretches(plan: PrefixPlan) -> Iterator[tuple[slice, slice]]:
    for keys, queries, end in plan.crossings:
        yield slice(queries, end), slice(keys, queries)


def _rows(tensor: torch.Tensor, block: Block) -> torch.Tensor:
    """Gather packed tokens: [packed, heads, width] to [rows, heads, columns, width]; padding repeats token 0."""
    return tensor.index_select(0, block.flatten().clamp(min=0)).unflatten(0, block.shape).transpose(1, 2)


def _heads(tensor: torch.Tensor) -> torch.Tensor:
    """A stretch of the packed row as a batch of one: [tokens, heads, ...] to [1, heads, tokens, ...]."""
    return tensor.transpose(0, 1).unsqueeze(0)


def _join(output: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> None:
    """Join softmaxes over disjoint keys, in place; shapes [tokens, heads, width] and [tokens, heads]."""
    total = torch.logaddexp(lse, other_lse)
    output.mul_(torch.exp(lse - total).unsqueeze(-1).to(output.dtype))
    output.addcmul_(other, torch.exp(other_lse - total).unsqueeze(-1).to(output.dtype))
    lse.copy_(total)
