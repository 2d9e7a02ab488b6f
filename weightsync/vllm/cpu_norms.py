"""vLLM's own kernels for the RMS norms on a CPU, which vLLM has compiled but offers to GPUs only.

On a CPU vLLM computes each norm by six calls of PyTorch. With few tokens in a step, most of the time goes to the overhead of these
calls. Loaded by the plugin.
"""

from __future__ import annotations

import contextlib

import torch
from vllm import ir
from vllm.platforms import current_platform

_VECTOR = 16
"""Elements that the kernels process at a time: the length of a row must be a multiple of it."""


def register(name: str) -> None:
    """Offer the kernels to vLLM under a name. vLLM uses them if `ir_op_priority` has that name and the arguments fit."""
    current_platform.import_kernels()
    norm = add = False  # vLLM uses its own definition if its kernels could not be loaded
    with contextlib.suppress(AttributeError):
        norm = torch.ops._C.rms_norm is not None  # noqa: SLF001 - vLLM's name for its kernels
        add = torch.ops._C.fused_add_rms_norm is not None  # noqa: SLF001 - likewise
    ir.ops.rms_norm.register_impl(name, supported=norm, supports_args=_norm_fits)(_rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(name, supported=add, supports_args=_add_fits, inplace=True)(
        _fused_add_rms_norm
    )


def _fits(rows: torch.Tensor, weight: torch.Tensor | None, variance_size: int | None) -> bool:
    """Return whether the kernels give the same numbers as PyTorch: in half precision they round less often than the trainer."""
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
    rows = x.contiguous()  # heads are slices of a wider row, but the kernel expects rows without gaps
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
