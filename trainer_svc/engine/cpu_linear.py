"""Linear layers on a CPU by oneDNN's kernels, forward and backward, where PyTorch's own ones leave half of the CPU unused.

PyTorch computes float32 products with MKL, which uses AVX-512 on Intel's CPUs alone. On AMD's, oneDNN takes 0.45 of the time
(measured: 1,400 tokens of width 128 by 384 outputs, 231 GFLOP/s against 103). oneDNN generates code for each shape, which takes
as long as one such product, so that the number of tokens is rounded up to one of few: see `rounded`.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch.autograd.function import once_differentiable

LEAST_STEP = 16
"""Numbers of tokens are multiples of this."""

STEP_BITS = 5
"""There are 2 to the power of this many numbers of tokens from one power of two to the next: at most 3% of the rows are padding."""


def onednn_is_faster() -> bool:
    """Return whether oneDNN's float32 products take less time than PyTorch's own: it has AVX-512, and MKL does not use it."""
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    described = Path("/proc/cpuinfo")
    return described.is_file() and "AuthenticAMD" in described.read_text()


def rounded(tokens: int) -> int:
    """Return the least number of rows for which kernels are generated that is at least `tokens`."""
    step = max(LEAST_STEP, 1 << max(0, (tokens - 1).bit_length() - 1 - STEP_BITS))
    return -(-tokens // step) * step


def use_onednn(model: torch.nn.Module, *, leave_out: Collection[torch.nn.Module | None]) -> None:
    """Have the linear layers of a model use oneDNN, in place.

    `leave_out` are the layers on top: they are given the loss tokens, of which there may be any number.
    """
    for module in model.modules():
        if type(module) is torch.nn.Linear and module not in leave_out:
            module.__class__ = CpuLinear


class CpuLinear(torch.nn.Linear):  # type: ignore[misc]  # torch is not typed here
    """A linear layer with float32 weights on a CPU."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Compute the layer for states of shape [..., width]."""
        ours = states.dtype == self.weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        if not ours or not states.numel():  # oneDNN has no products of no rows
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
