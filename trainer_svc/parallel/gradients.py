"""The norm of a gradient that lies in pieces in several processes, and its clipping."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trainer_svc.parallel.mesh import Mesh

__all__ = ["clip", "total_norm"]

TINY = 1e-6
"""Added to the norm before dividing by it, as `torch.nn.utils.clip_grad_norm_` does."""


def total_norm(
    gradients: Iterable[torch.Tensor], mesh: Mesh, *, refused: bool = False, in_two_stages: torch.Tensor | None = None
) -> tuple[float, bool]:
    """The 2-norm of the whole gradient, every element counted once however many processes have it.

    Args:
        gradients: Plain tensors, which all processes of a pipeline stage have alike, and DTensors on any axes of the mesh.
        mesh: The processes; all of them call this.
        refused: Whether this process found something else that forbids the step.
        in_two_stages: The one among them that another stage has as well.

    Returns:
        The norm, and whether it is finite and nobody refused: the same in every process.
    """
    by_copies: dict[int, list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        copies, local = _local(gradient, mesh)
        by_copies[copies * 2 if gradient is in_two_stages else copies].append(local)
    norms = {copies: torch.nn.utils.get_total_norm(parts, foreach=True) for copies, parts in by_copies.items()}
    sums = torch.zeros(2, dtype=torch.float64)
    sums[0] = sum(float(norm.double()) ** 2 / copies for copies, norm in norms.items())
    sums[1] = float(refused)
    if mesh.everyone is not None:
        dist.all_reduce(sums, group=mesh.everyone)
    norm, refusals = math.sqrt(sums[0]) if sums[0] >= 0 else math.nan, float(sums[1])
    return norm, math.isfinite(norm) and not refusals


def _local(gradient: torch.Tensor, mesh: Mesh) -> tuple[int, torch.Tensor]:
    """How many processes have the part of a gradient that this one has, and that part."""
    copies = mesh.dims.world_size // mesh.dims.pp
    if not isinstance(gradient, DTensor):
        return copies, gradient
    for axis, placement in enumerate(gradient.placements):
        if not placement.is_replicate():
            copies //= gradient.device_mesh.size(axis)
    return copies, gradient.to_local()


def clip(gradients: Iterable[torch.Tensor], norm: float, limit: float) -> None:
    """Scale a gradient down to the limit where its norm is above it."""
    factor = limit / (norm + TINY)
    if factor < 1.0:
        parts = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
        torch._foreach_mul_(parts, factor)
