"""What this process holds of a tensor."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["local_part"]


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The memory that lies in this process, and where it begins in the whole tensor, per dimension."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), (0,) * tensor.ndim
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.detach().to_local(), tuple(offsets)
