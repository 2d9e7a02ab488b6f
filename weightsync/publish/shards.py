"""What a process sends of a model: its slices of the tensors, as a safetensors file that is never written.

The file is a header, and behind it the tensors where they lie in memory.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from sluice.v1 import weightsync_pb2 as pb
from weightsync.format.safetensors import DTYPES, check_tensor, place, render_header

__all__ = [
    "METADATA",
    "TORCH_DTYPES",
    "FileSource",
    "LocalSlice",
    "ShardSource",
    "SliceKey",
    "entry_name",
    "local_slices",
    "tensor_bytes",
    "to_proto",
]

METADATA = {"format": "pt"}
"""What transformers expects in the header of a file of weights."""

_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float64: "F64",
}

TORCH_DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in _NAMES.items()}
"""PyTorch's data types by the names of safetensors."""

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


class FileSource:
    """Bytes of a file that lie in several places, readable at any offset, so that an interrupted push can be continued.

    The memory is read whenever bytes are asked for: it must not change before the push is over.

    Args:
        name: The shard's name.
        parts: The file's content, in order.
    """

    def __init__(self, name: str, parts: Sequence[memoryview]) -> None:
        self.name = name
        self._parts = parts
        self._starts = list(accumulate(map(len, parts[:-1]), initial=0))
        self.size = self._starts[-1] + len(parts[-1])

    def views(self, begin: int, end: int) -> list[memoryview]:
        """Return views of the file's bytes from `begin` to before `end`."""
        index = bisect_right(self._starts, begin) - 1
        views: list[memoryview] = []
        while begin < end:
            start, part = self._starts[index], self._parts[index]
            views.append(part[begin - start : end - start])
            begin += len(views[-1])
            index += 1
        return views

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes of the file from `begin` to before `end`: one copy."""
        return b"".join(self.views(begin, end))

    def spans(self, begin: int, step: int) -> Iterator[tuple[int, int]]:
        """Yield begin and end of each `step` bytes of the file, from `begin` on."""
        for start in range(begin, self.size, step):
            yield start, min(start + step, self.size)

    def digest(self) -> str:
        """Return the xxh3-128 of the file, hexadecimal; blocking, about 10 GB/s."""
        whole = xxhash.xxh3_128()
        for part in self._parts:
            whole.update(part)
        return str(whole.hexdigest())


class ShardSource(FileSource):
    """One shard of whole tensors.

    Only a tensor that is not contiguous is copied.

    Args:
        name: The shard's name.
        tensors: CPU tensors by Hugging Face name.

    Raises:
        ValueError: if a name or data type cannot travel, or a tensor is not in host memory.
    """

    def __init__(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        rows = [
            (check_tensor(key), _host_dtype(key, tensor), tuple(tensor.shape), tensor)
            for key, tensor in tensors.items()
        ]
        # Wide elements first: then each tensor begins at a multiple of its element, which readers that map the file need.
        rows.sort(key=lambda row: (-DTYPES[row[1]].size, row[0]))
        self.entries = place([row[:3] for row in rows])
        header = render_header(self.entries, METADATA)
        super().__init__(name, [memoryview(header), *(tensor_bytes(tensor).data for *_, tensor in rows)])

    def tensor_digests(self) -> dict[str, str]:
        """Return the xxh3-128 of each tensor by name, hexadecimal; blocking, about 10 GB/s."""
        return {
            entry.name: str(xxhash.xxh3_128(part).hexdigest())
            for entry, part in zip(self.entries, self._parts[1:], strict=True)
        }

    def describe(self, digests: Mapping[str, str] | None = None) -> pb.Shard:
        """Return the shard as the contract describes it, with the tensors' digests if they are given."""
        shard = pb.Shard(name=self.name, size_bytes=self.size)
        for entry in self.entries:
            shard.tensors.add(
                name=entry.name,
                dtype=entry.dtype,
                global_shape=entry.shape,
                encoding=pb.TENSOR_ENCODING_DENSE,
                digest=digests[entry.name] if digests else "",
            )
        return shard


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """Return the data type of tensor `name` as safetensors names it.

    Raises:
        ValueError: if there is no such name.
    """
    if dtype not in _NAMES:
        raise ValueError(f"{name} has data type {dtype}, which does not travel; known are {_known()}")
    return _NAMES[dtype]


def tensor_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Return the dense bytes of a tensor in host memory: a view, or a copy if it is not contiguous."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return np.asarray(flat.numpy())


def _host_dtype(name: str, tensor: torch.Tensor) -> str:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise ValueError(
            f"{name} is a {tensor.layout} tensor on {tensor.device}: move it to host memory before the push"
        )
    return dtype_name(name, tensor.dtype)


def _known() -> str:
    return ", ".join(str(dtype) for dtype in _NAMES)
