"""A process's share of a model: its slices of the tensors, in the layout of a safetensors file that is never written to disk.

`KeptCopy` holds the last pushed version. It is compared with the live weights slice by slice and renewed in place; a version is
sent from it whole or as the difference. It may lie in shared memory, where the weight service of the same host finds it.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import secrets
import time
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import structlog
import torch
import xxhash
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from sluice.host_files import close, open_private, remove_unlocked
from sluice.slices import TensorSlice, assign_slices
from sluice.v1 import weightsync_pb2 as pb
from weightsync.codec.slices import Encoding, encode
from weightsync.format.manifest import box, check_manifest, entry_name
from weightsync.format.safetensors import DTYPES, Entry, check_tensor, place, render_header

HOST_DIRECTORY = Path("/dev/shm")  # noqa: S108  shared memory by its Linux name; files in it are made for their owner alone
"""Directory through which processes of one host exchange files without a copy on disk."""

_PREFIX = "sluice-push-"

_SPARE_COPIES = 3
"""Copies that must fit into shared memory beside the kept one: an engine on the host stages two, and one is spare."""

_METADATA = {"format": "pt"}
"""Metadata that transformers expects in the header of a file of weights."""

_STREAMS = {Encoding.DENSE_ZSTD, Encoding.DELTA}
"""Encodings whose bytes are kept in memory until they are pushed. Dense bytes are in the kept copy anyway."""

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

_TORCH_DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in _NAMES.items()}

log = structlog.get_logger(__name__)


def local_slices(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None
) -> list[tuple[pb.TensorSlice, torch.Tensor]]:
    """Return the slice of each tensor that this process holds, with its live memory; nothing is copied.

    If names share their memory (tied weights), only the first name appears. A rank's empty slice of a tensor is left out. The
    descriptions have no encoding and no digest yet. A slice that is not the whole tensor gets its own entry name.

    Args:
        tensors: Plain tensors or DTensors by the names of the checkpoint, on any device.
        dtype: Precision to publish floating-point tensors in; None: as they are.

    Raises:
        ValueError: if a tensor cannot travel; the message names it.
    """
    found: list[tuple[pb.TensorSlice, torch.Tensor]] = []
    seen: set[tuple[int, torch.Size, tuple[int, ...], torch.dtype]] = set()
    for name, tensor in tensors.items():
        local, offsets = _local(name, tensor)
        memory = (local.data_ptr(), local.shape, local.stride(), local.dtype)
        if local.numel() and memory in seen:
            continue
        seen.add(memory)
        if tensor.numel() and not local.numel():
            continue
        published = dtype if dtype is not None and local.is_floating_point() else local.dtype
        described = pb.TensorSlice(
            name=check_tensor(name), dtype=_dtype_name(name, published), global_shape=tensor.shape
        )
        if local.shape != tensor.shape:
            described.offsets.extend(offsets)
            described.sizes.extend(local.shape)
            described.entry = f"{name}@{'.'.join(map(str, offsets))}"
        found.append((described, local))
    return found


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


def share_out(held: Sequence[pb.Shard]) -> list[set[TensorSlice]]:
    """Decide which rank sends which of the slices that the ranks hold.

    Raises:
        ManifestError: if the slices of all ranks do not cover every tensor exactly.
    """
    described = {TensorSlice.from_proto(tensor): tensor for shard in held for tensor in shard.tensors}
    _check_cover(list(described.values()))
    return assign_slices([{TensorSlice.from_proto(each): _size(each) for each in shard.tensors} for shard in held])


def total_bytes(held: Sequence[pb.Shard]) -> int:
    """Return the dense size of the model: each slice once, however many ranks hold it."""
    sizes = {(tensor.name, box(tensor)): _size(tensor) for shard in held for tensor in shard.tensors}
    return sum(sizes.values())


def _size(tensor: pb.TensorSlice) -> int:
    return math.prod(box(tensor).sizes) * DTYPES[tensor.dtype].size


def _check_cover(tensors: Sequence[pb.TensorSlice]) -> None:
    shard = pb.Shard(name="all")
    for index, tensor in enumerate(tensors):
        shard.tensors.add().CopyFrom(tensor)
        shard.tensors[-1].entry = str(index)
    check_manifest(pb.Manifest(shards=[shard]))


class FileSource:
    """A file whose bytes lie in several places of memory. It is readable at any offset, so that an interrupted push can continue.

    The memory is read whenever bytes are asked for: it must not change before the push is over.
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


def _dtype_name(name: str, dtype: torch.dtype) -> str:
    if dtype not in _NAMES:
        known = ", ".join(map(str, _NAMES))
        raise ValueError(f"{name} has data type {dtype}, which does not travel; known are {known}")
    return _NAMES[dtype]


def tensor_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Return the dense bytes of a tensor in host memory: a view, or a copy if it is not contiguous."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return np.asarray(flat.numpy())


@dataclass(frozen=True, slots=True)
class EncodedSlice:
    """One slice after it was renewed.

    Attributes:
        data: The encoded stream; empty for DENSE and UNCHANGED.
        digest: xxh3-128 of its dense bytes, hexadecimal.
        changed: Number of values that differ from the previous version.
    """

    encoding: Encoding
    data: bytes
    digest: str
    changed: int


@dataclass(frozen=True, slots=True)
class Diff:
    """The outcome of renewing the copy.

    Attributes:
        slices: The encoded slices, in the order of the copy's file.
        encoded_bytes: Size of the encoded slices.
        compared: Whether every slice was compared, so that a delta can be made.
        changed_fraction: Fraction of the compared values that differ; 1 if none were compared.
        seconds: Duration of the renewal.
    """

    slices: tuple[EncodedSlice, ...]
    encoded_bytes: int
    compared: bool
    changed_fraction: float
    seconds: float


class KeptCopy:
    """One copy of a shard, laid out as the safetensors file in which it travels dense.

    The memory, shared if a directory is given, is allocated once and then written in place. Not thread-safe: the owner
    must not renew the copy while a file that reads it is being sent.
    """

    def __init__(self, shard: str, slices: Sequence[pb.TensorSlice], directory: Path | None = None) -> None:
        # Wide elements first, so that each slice begins at a multiple of its element's size. Readers that map the file need that.
        self.slices = sorted(slices, key=lambda each: (-DTYPES[each.dtype].size, entry_name(each)))
        self.shard = shard
        self._entries = place([(entry_name(each), each.dtype, box(each).sizes) for each in self.slices])
        header = render_header(self._entries, _METADATA)
        self._begin = len(header)
        self.dense_bytes = sum(entry.size for entry in self._entries)
        self._file = KeptFile(len(header) + self.dense_bytes, directory, spare_copies=_SPARE_COPIES)
        self._file.bytes[: len(header)] = np.frombuffer(header, dtype=np.uint8)

    @property
    def local(self) -> pb.LocalFile | None:
        """Return the copy's file in shared memory; None if the copy lies in ordinary memory."""
        return self._file.local(self.shard)

    def close(self) -> None:
        """Remove the file in shared memory, if there is one. The memory is freed with this object."""
        self._file.close()

    def renew(self, held: Sequence[tuple[pb.TensorSlice, torch.Tensor]], *, compare: bool, most_bytes: int) -> Diff:
        """Make the copy equal to the live tensors, which must not change in the meantime.

        This thread brings one slice after another into host memory and the published precision; a pool of as many threads
        as PyTorch has compares, hashes and copies. Beyond the copy, this needs memory for one slice per thread plus one
        slice, and for encoded streams of at most `most_bytes` plus one slice per thread.

        Args:
            held: The slices that `local_slices` returned; they include all slices of the copy.
            compare: Whether to encode the difference; otherwise the copy is overwritten without being read.
            most_bytes: Stop comparing once the encoded slices are larger than this.
        """
        started = time.perf_counter()
        live = {entry_name(each): tensor for each, tensor in held}
        threads = max(1, torch.get_num_threads())
        found: dict[int, EncodedSlice] = {}
        comparing, encoded_bytes, changed, elements = compare, 0, 0, 0
        order = sorted(range(len(self.slices)), key=lambda index: -self._entries[index].size)
        with ThreadPoolExecutor(threads, thread_name_prefix="diff") as pool:
            running: deque[tuple[int, Future[EncodedSlice]]] = deque()

            def collect() -> None:
                nonlocal comparing, encoded_bytes, changed, elements
                index, future = running.popleft()
                each, entry = future.result(), self._entries[index]
                found[index] = each
                if comparing:
                    encoded_bytes += entry.size if each.encoding is Encoding.DENSE else len(each.data)
                    changed += each.changed
                    elements += entry.size // DTYPES[entry.dtype].size
                    comparing = encoded_bytes <= most_bytes

            for index in order:
                new = _published_bytes(live[self._entries[index].name], self.slices[index].dtype)
                running.append((index, pool.submit(self._renew_slice, index, new, compare=comparing)))
                if len(running) > threads:
                    collect()
            while running:
                collect()
        if not comparing:  # the streams are useless now
            found = {index: replace(each, data=b"") for index, each in found.items()}
        return Diff(
            slices=tuple(found[index] for index in range(len(self.slices))),
            encoded_bytes=encoded_bytes,
            compared=comparing,
            changed_fraction=changed / elements if elements else float(not comparing),
            seconds=time.perf_counter() - started,
        )

    def dense(self, diff: Diff) -> tuple[FileSource, pb.Shard]:
        """Return the copy as a dense shard: the bytes to send, and their description."""
        shard = pb.Shard(name=self.shard, tensors=self.slices)
        for tensor, encoded in zip(shard.tensors, diff.slices, strict=True):
            tensor.encoding = pb.TENSOR_ENCODING_DENSE
            tensor.digest = encoded.digest
        source = FileSource(self.shard, [self._file.bytes.data])
        shard.size_bytes = source.size
        return source, shard

    def delta(self, diff: Diff) -> tuple[FileSource, pb.Shard]:
        """Return the difference as a shard: the bytes to send, and their description. Dense entries are read from the copy."""
        shard = pb.Shard(name=self.shard, tensors=self.slices)
        rows: list[tuple[str, str, tuple[int, ...]]] = []
        parts: list[memoryview] = []
        order = sorted(range(len(self.slices)), key=lambda index: diff.slices[index].encoding in _STREAMS)
        for index in order:  # streams of odd sizes last, so that dense entries stay aligned
            entry, encoded = self._entries[index], diff.slices[index]
            shard.tensors[index].encoding = pb.TensorEncoding.ValueType(int(encoded.encoding))
            shard.tensors[index].digest = encoded.digest
            if encoded.encoding is Encoding.DENSE:
                rows.append((entry.name, entry.dtype, entry.shape))
                parts.append(self._bytes(index).data)
            elif encoded.encoding in _STREAMS:
                rows.append((entry.name, "U8", (len(encoded.data),)))
                parts.append(memoryview(encoded.data))
        header = render_header(place(rows), _METADATA)
        source = FileSource(self.shard, [memoryview(header), *parts])
        shard.size_bytes = source.size
        shard.digest = source.digest()
        return source, shard

    def _renew_slice(self, index: int, new: NDArray[np.uint8], *, compare: bool) -> EncodedSlice:
        kept = self._bytes(index)
        digest = str(xxhash.xxh3_128(new.data).hexdigest())
        if not compare:
            np.copyto(kept, new)
            return EncodedSlice(Encoding.DENSE, b"", digest, box(self.slices[index]).volume)
        found = encode(new, kept, self.slices[index].dtype)
        data = bytes(found.data) if found.encoding in _STREAMS else b""
        if found.encoding is not Encoding.UNCHANGED:
            np.copyto(kept, new)
        return EncodedSlice(found.encoding, data, digest, found.changed)

    def _bytes(self, index: int) -> NDArray[np.uint8]:
        entry: Entry = self._entries[index]
        return self._file.bytes[self._begin + entry.begin : self._begin + entry.end]


def _published_bytes(tensor: torch.Tensor, dtype: str) -> NDArray[np.uint8]:
    """Return dense bytes in host memory: the tensor's own bytes if they are there in the published precision, else a copy."""
    return tensor_bytes(tensor.detach().to("cpu", _TORCH_DTYPES[dtype]))


class KeptFile:
    """Writable memory of a fixed size.

    With a directory of shared memory it is a file there, removed by `close`, with the object, or at the end of the process.
    The process holds a lock on it; `sweep` removes files without one, which killed processes left behind. If the
    directory has no room for the file and `spare_copies` more files of its size, it is ordinary memory.
    """

    def __init__(self, size: int, directory: Path | None = None, *, spare_copies: int = 0) -> None:
        descriptor, path = -1, None
        if directory is not None:
            sweep(directory)
            descriptor, path = _new_file(size, directory, (1 + spare_copies) * size)
        self._descriptor, self.path = descriptor, path
        self.close = weakref.finalize(self, _remove, os.getpid(), descriptor, path)
        self.bytes: NDArray[np.uint8] = np.frombuffer(mmap.mmap(descriptor, size), dtype=np.uint8)

    def local(self, shard: str) -> pb.LocalFile | None:
        """Return the message that names the file and the shard in it; None for ordinary memory."""
        if self.path is None:
            return None
        status = os.fstat(self._descriptor)
        return pb.LocalFile(shard=shard, path=str(self.path), device=status.st_dev, inode=status.st_ino)


def sweep(directory: Path) -> None:
    """Remove files that dead processes of this user left behind."""
    for path in directory.glob(f"{_PREFIX}*"):
        remove_unlocked(path)


def _new_file(size: int, directory: Path, room: int) -> tuple[int, Path | None]:
    """Return descriptor and path of a new file; -1 and None if the directory cannot hold it."""
    descriptor = -1
    try:
        space = os.statvfs(directory)
        if space.f_bavail * space.f_frsize < room:
            log.info(
                "shared memory has no room to hand weights over; they are sent by socket", directory=str(directory)
            )
            return -1, None
        descriptor = open_private(directory.resolve(), os.O_TMPFILE | os.O_RDWR)
        os.posix_fallocate(descriptor, 0, size)  # fail now rather than by a SIGBUS at a later write
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path = directory / f"{_PREFIX}{secrets.token_hex(8)}"
        # The file gets its name when it is locked. Only linkat(2) follows the link in /proc; Python calls it where a
        # directory descriptor is given.
        os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor, follow_symlinks=True)
    except OSError as error:
        log.info("weights cannot be handed over in shared memory; they are sent by socket", reason=str(error))
        if descriptor >= 0:
            close(descriptor)
        return -1, None
    return descriptor, path


def _remove(owner: int, descriptor: int, path: Path | None) -> None:
    if path is None or os.getpid() != owner:  # at the end of a forked child, which has closed the file
        return
    path.unlink(missing_ok=True)
    close(descriptor)
