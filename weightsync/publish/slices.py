"""The part of a model that a process holds: whole tensors, and slices of DTensors in the coordinates of the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from sluice.v1 import weightsync_pb2 as pb
from weightsync.format.dtypes import DTYPES
from weightsync.format.names import check_tensor
from weightsync.publish.shard_source import dtype_name

__all__ = ["LocalSlice", "SliceKey", "local_slices", "to_proto"]

SliceKey = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Name, offsets and sizes: what tells slices of a model apart."""


@dataclass(frozen=True, slots=True)
class LocalSlice:
    """A part of a tensor that this process holds.

    Attributes:
        name: The tensor's name in the checkpoint.
        dtype: Data type to publish, as safetensors names it.
        global_shape: Shape of the whole tensor.
        offsets: Where the slice begins, per dimension.
        sizes: Its extent, per dimension.
    """

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def key(self) -> SliceKey:
        """Return what tells it apart."""
        return self.name, self.offsets, self.sizes

    @property
    def whole(self) -> bool:
        """Return whether it is the whole tensor."""
        return self.sizes == self.global_shape

    @property
    def elements(self) -> int:
        """Return the number of values."""
        return math.prod(self.sizes)

    @property
    def size_bytes(self) -> int:
        """Return the dense size in bytes."""
        return self.elements * DTYPES[self.dtype].size


def local_slices(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None
) -> list[tuple[LocalSlice, torch.Tensor]]:
    """Find what this process holds of each tensor, with the live memory that it lies in; nothing is copied.

    If names share their memory (tied weights), only the first one appears. A rank's empty slice of a tensor is left out.

    Args:
        tensors: Plain tensors or DTensors by the names of the checkpoint, on any device.
        dtype: Precision to publish floating-point tensors in; None: as they are.

    Raises:
        ValueError: if a tensor cannot travel; the message names it.
    """
    found: list[tuple[LocalSlice, torch.Tensor]] = []
    seen: set[tuple[int, torch.Size, tuple[int, ...], torch.dtype]] = set()
    for name, tensor in tensors.items():
        local, offsets = _local(name, tensor)
        place = (local.data_ptr(), local.shape, local.stride(), local.dtype)
        if local.numel() and place in seen:
            continue
        seen.add(place)
        if tensor.numel() and not local.numel():
            continue
        published = dtype if dtype is not None and local.is_floating_point() else local.dtype
        row = LocalSlice(
            check_tensor(name), dtype_name(name, published), tuple(tensor.shape), offsets, tuple(local.shape)
        )
        found.append((row, local))
    return found


def to_proto(rows: Sequence[LocalSlice], shard: str) -> pb.Shard:
    """Return the slices as the contract describes them, without encoding and digests.

    Whole tensors have no offsets and sizes. Slices of a tensor that is cut have entries of their own.
    """
    described = pb.Shard(name=shard)
    for row in rows:
        tensor = described.tensors.add(name=row.name, dtype=row.dtype, global_shape=row.global_shape)
        if not row.whole:
            tensor.offsets.extend(row.offsets)
            tensor.sizes.extend(row.sizes)
            tensor.entry = entry_name(row)
    return described


def entry_name(row: LocalSlice) -> str:
    """Return the name of the slice in its shard's file."""
    return row.name if row.whole else f"{row.name}@{'.'.join(map(str, row.offsets))}"


def _local(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise ValueError(f"{name} is a {tensor.layout} tensor on {tensor.device}: it has no dense bytes to publish")
    if not isinstance(tensor, DTensor):
        return tensor.detach(), (0,) * tensor.ndim
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"{name} is a DTensor whose parts are still to be summed: redistribute it before the push")
    local = tensor.to_local().detach()
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(shape) != tuple(local.shape):
        raise ValueError(
            f"the local part of {name} has shape {tuple(local.shape)}, its placements {tensor.placements} say {tuple(shape)}"
        )
    return local, tuple(offsets)
