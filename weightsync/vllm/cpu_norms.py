"""vLLM's own kernels for the RMS norms on a CPU, which vLLM has compiled but offers to GPUs only.

vLLM computes them on a CPU by six calls of PyTorch each; with few tokens in a step, these calls are the cost. Loaded by the plugin.
"""

from __future__ import annotations

import contextlib

import torch
from vllm import ir
from vllm.platforms import current_platform

_VECTOR = 16
"""Elements that the kernels take at a time: rows have to be a multiple of them."""


def register(name: str) -> None:
    """Offer the kernels to vLLM under a name. It takes them where `ir_op_priority` has that name and the arguments fit."""
    current_platform.import_kernels()
    norm = add = False  # vLLM takes its own definition if its kernels could not be loaded
    with contextlib.suppress(AttributeError):
        norm = torch.ops._C.rms_norm is not None  # noqa: SLF001 - vLLM's name for its kernels
        add = torch.ops._C.fused_add_rms_norm is not None  # noqa: SLF001 - likewise
    ir.ops.rms_norm.register_impl(name, supported=norm, supports_args=_norm_fits)(_rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(name, supported=add, supports_args=_add_fits, inplace=True)(
        _fused_add_rms_norm
    )


def _fits(rows: torch.Tensor, weight: torch.Tensor | None, variance_size: int | None) -> bool:
    """Return whether the numbers are those of PyTorch: in half precision the kernels round less often than the trainer does."""
    return (
        rows.dtype == torch.float32
        and weight is not None
        and weight.dtype == torch.float32
        and variance_size is None
        and rows.shape[-1] % _VECTOR == 0
    )


def _norm_fits(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    del epsilon
    return _fits(x, weight, variance_size)


def _add_fits(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    del epsilon
    return (
        _fits(x, weight, variance_size)
        and x_residual.dtype == x.dtype
        and x.is_contiguous()
        and x_residual.is_contiguous()
    )


def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    del variance_size
    rows = x.contiguous()  # heads are slices of a wider row; the kernel reads on without gaps
    output = torch.empty_like(rows)
    torch.ops._C.rms_norm(output, rows, weight, epsilon)  # noqa: SLF001 - vLLM's name for its kernels
    return output


def _fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    del variance_size
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)  # noqa: SLF001 - vLLM's name for its kernels
    return x, x_residual
