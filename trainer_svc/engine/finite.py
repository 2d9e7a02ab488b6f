"""Find weights that cannot be used. The check runs before a version is written or published, and after a model is read."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch.distributed.tensor import DTensor

NAMED = 3
"""Most weights that a message names."""


class UnfitWeightsError(ValueError):
    """Weights are not finite, or too large to compute with, so they are neither written nor published."""


class IncompleteWeightsError(ValueError):
    """A model's files lack weights that its architecture has."""


@torch.no_grad()  # type: ignore[untyped-decorator]
def unfit_weights(named: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None) -> list[str]:
    """Return the names of weights that are not finite, too large to compute with, or too large to be stored in `dtype`.

    A tensor is too large if its 2-norm does not fit float32 (1.8e19 for one element): norm layers square what such weights
    compute, and the model returns NaN. One fused reduction per device reads each weight once, and the host waits once per device.

    Args:
        named: Weights by name. For a DTensor only this process's slice is checked; tensors on the "meta" device are skipped.
        dtype: Precision in which they will be stored; None: their own.
    """
    by_kind: dict[tuple[torch.device, torch.dtype], list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for name, tensor in named:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.numel() and local.is_floating_point() and not local.is_meta:
            by_kind[local.device, local.dtype].append((name, local.detach()))
    found: list[str] = []
    for parts in by_kind.values():
        norms = torch.stack(torch._foreach_norm([part for _, part in parts], 2, dtype=torch.float32)).tolist()  # noqa: SLF001 - as torch.nn.utils.get_total_norm
        found += [name for (name, part), norm in zip(parts, norms, strict=True) if not _fits(part, norm, dtype)]
    return sorted(found)


def _fits(part: torch.Tensor, norm: float, dtype: torch.dtype | None) -> bool:
    """Return whether a tensor of this norm can be stored. No element exceeds the norm, so few tensors have to be read again."""
    largest = math.inf if dtype is None else torch.finfo(dtype).max
    return math.isfinite(norm) and (norm <= largest or float(part.abs().max()) <= largest)


def some_of(names: Sequence[str]) -> str:
    """Return the first few names and the number of all, for a message."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def describe_unfit(names: Sequence[str], dtype: torch.dtype | None = None) -> str:
    """Return a message: training made these weights unfit, and what to do.

    Args:
        names: The weights.
        dtype: Precision in which they were to be stored; None: their own.
    """
    stored, wider = "", ""
    if dtype == torch.float16:
        stored, wider = " in float16", ", store the weights in bfloat16 or float32"
    return (
        f"training made weights that are not finite{stored}, or too large to compute with: {some_of(names)}; lower the learning"
        f" rate (lr), limit the gradient (grad_clip){wider}, and train again from the weights before"
    )
