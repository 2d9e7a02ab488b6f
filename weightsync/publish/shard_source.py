"""Safetensors files that are never written: a header, then the tensors where they lie in memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from sluice.v1 import weightsync_pb2 as pb
from weightsync.format.dtypes import DTYPES
from weightsync.format.names import check_tensor
from weightsync.format.safetensors import place, render_header

__all__ = ["METADATA", "TORCH_DTYPES", "FileSource", "ShardSource", "dtype_name", "tensor_bytes"]

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
