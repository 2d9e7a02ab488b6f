"""Kernels that the trainer uses only on a CPU: linear layers by oneDNN, and attention that computes a shared prompt once.

PyTorch computes float32 products with MKL, which uses AVX-512 on Intel's CPUs only. On AMD's CPUs, oneDNN takes 0.45 of the time
(measured: 1,400 tokens of width 128 by 384 outputs, 231 GFLOP/s against 103). oneDNN generates code for each shape, which takes
as long as one such product. The number of tokens is therefore rounded up, so that few shapes occur: see `rounded`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from trainer_svc.batch.attention_plan import PrefixPlan
from trainer_svc.batch.shapes import Block

LEAST_STEP = 16
"""Numbers of tokens are multiples of this."""

STEP_BITS = 5
"""Between one power of two and the next, rounding uses 2 ** STEP_BITS numbers of tokens: at most 3% of the rows are padding."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - only it returns the log-sum-exp
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001


# --- linear layers ----------------------------------------------------------------------------------------------------


def onednn_is_faster() -> bool:
    """Return whether oneDNN's float32 products take less time than MKL's: the CPU has AVX-512, and MKL does not use it."""
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    described = Path("/proc/cpuinfo")
    return described.is_file() and "AuthenticAMD" in described.read_text()


def rounded(tokens: int) -> int:
    """Return the smallest number of rows, at least `tokens`, for which oneDNN generates kernels."""
    step = max(LEAST_STEP, 1 << max(0, (tokens - 1).bit_length() - 1 - STEP_BITS))
    return -(-tokens // step) * step


def use_onednn(model: torch.nn.Module, *, leave_out: Collection[torch.nn.Module | None]) -> None:
    """Have the linear layers of a model use oneDNN, in place.

    `leave_out` are the output layers: their input are the loss tokens, whose number is not rounded.
    """
    for module in model.modules():
        if type(module) is torch.nn.Linear and module not in leave_out:
            module.__class__ = CpuLinear


class CpuLinear(torch.nn.Linear):  # type: ignore[misc]  # torch is not typed here
    """A linear layer with float32 weights on a CPU."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Compute the layer for states of shape [..., width]."""
        ours = states.dtype == self.weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        if not ours or not states.numel():  # oneDNN cannot multiply zero rows
            return super().forward(states)
        return _Linear.apply(states, self.weight, self.bias)


class _Linear(torch.autograd.Function):  # type: ignore[misc]
    """Differentiable in states, weight and bias."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:  # noqa: ANN401
        ctx.save_for_backward(states, weight)
        return _product(states, weight, bias)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        states, weight = ctx.saved_tensors
        by_states, by_weight, by_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            _product(gradient, weight.t()) if by_states else None,
            _product(rows.t(), states.reshape(-1, states.shape[-1]).t()) if by_weight else None,
            rows.sum(0) if by_bias else None,
        )


def _product(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return states times the transpose of the weight, plus the bias."""
    return torch.ops.mkldnn._linear_pointwise.default(states, weight, bias, "none", [], "")  # noqa: SLF001 - its only name


# --- attention --------------------------------------------------------------------------------------------------------


def prefix_kernel_fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether `prefix_attention` takes these tensors."""
    return bool(
        query.device.type == "cpu"
        and query.dtype == key.dtype == value.dtype
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
    )


class _PrefixAttention(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed here
    """Attention that computes a prompt once for all samples that follow it in the row.

    A token attends causally inside its own part (the prompt, or a sample). A token of a sample also attends to the whole prompt.
    Two softmaxes over disjoint keys join exactly: outputs are weighted by the exponentials of their log-sum-exps. In the backward
    pass each piece is differentiated with the joined output and log-sum-exp, as in ring attention (arXiv 2310.01889).
    Tensors have shapes [packed, heads, head_dim].
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any,  # noqa: ANN401 - autograd's context
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: PrefixPlan,
        scale: float,
    ) -> torch.Tensor:
        outputs, sums = [], []
        for block in plan.blocks:
            q, k, v = (_rows(each, block) for each in (query, key, value))
            output, lse = _flash(q, k, v, 0.0, is_causal=True, scale=scale)
            outputs.append(output.transpose(1, 2).flatten(0, 1))
            sums.append(lse.transpose(1, 2).flatten(0, 1))
        output = torch.cat(outputs).index_select(0, plan.sources)
        lse = torch.cat(sums).index_select(0, plan.sources)
        for queries, keys in _stretches(plan):
            q, k, v = _heads(query[queries]), _heads(key[keys]), _heads(value[keys])
            crossed, crossed_lse = _flash(q, k, v, 0.0, is_causal=False, scale=scale)
            _join(output[queries], lse[queries], crossed[0].transpose(0, 1), crossed_lse[0].transpose(0, 1))
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.plan, ctx.scale = plan, scale
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
            found = _flash_backward(g, q, k, v, o, sums, 0.0, is_causal=True, scale=ctx.scale)
            parts.append(tuple(each.transpose(1, 2).flatten(0, 1) for each in found))
        unpacked = len(query) - len(output)
        grads = [
            torch.nn.functional.pad(torch.cat(each).index_select(0, plan.sources), (0, 0, 0, 0, 0, unpacked))
            for each in zip(*parts, strict=True)
        ]
        for queries, keys in _stretches(plan):
            q, o, g, sums = (_heads(each[queries]) for each in (query, output, grad, lse))
            k, v = _heads(key[keys]), _heads(value[keys])
            found = _flash_backward(g, q, k, v, o, sums, 0.0, is_causal=False, scale=ctx.scale)
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
    """Make a range of the packed row a batch of one: [tokens, heads, ...] to [1, heads, tokens, ...]."""
    return tensor.transpose(0, 1).unsqueeze(0)


def _join(output: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> None:
    """Join softmaxes over disjoint keys, in place; shapes [tokens, heads, width] and [tokens, heads]."""
    total = torch.logaddexp(lse, other_lse)
    output.mul_(torch.exp(lse - total).unsqueeze(-1).to(output.dtype))
    output.addcmul_(other, torch.exp(other_lse - total).unsqueeze(-1).to(output.dtype))
    lse.copy_(total)


def prefix_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: PrefixPlan, scale: float
) -> torch.Tensor:
    """Attend as described at `_PrefixAttention`; shapes [packed, heads, head_dim]."""
    output: torch.Tensor = _PrefixAttention.apply(query, key, value, plan, scale)
    return output
