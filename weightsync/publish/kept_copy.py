"""The copy of what a process pushed last: compared with the live weights slice by slice, and renewed in place."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import time
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog
import torch
import xxhash
from numpy.typing import NDArray

from sluice.host_files import close, open_private, remove_unlocked
from sluice.v1 import weightsync_pb2 as pb
from weightsync.codec import Encoding, encode
from weightsync.format.safetensors import DTYPES, Entry, place, render_header
from weightsync.publish.shards import METADATA, TORCH_DTYPES, FileSource, LocalSlice, entry_name, tensor_bytes, to_proto

__all__ = ["HOST_DIRECTORY", "Diff", "EncodedSlice", "KeptCopy", "KeptFile", "sweep"]

HOST_DIRECTORY = Path("/dev/shm")  # noqa: S108  shared memory by its Linux name; files in it are made for their owner alone
"""Where processes of one host hand files over without a copy on a disk."""

_PREFIX = "sluice-push-"

_SPARE_COPIES = 3
"""Copies of the file that must fit into shared memory beside it: an engine on the host stages two, and one is spare."""

log = structlog.get_logger(__name__)

_STREAMS = {Encoding.DENSE_ZSTD, Encoding.DELTA}
"""Encodings whose bytes are held until they are pushed; dense ones lie in the kept copy anyway."""


@dataclass(frozen=True, slots=True)
class EncodedSlice:
    """One slice after it was renewed.

    Attributes:
        encoding: How its difference travels.
        data: The encoded stream; empty for DENSE and UNCHANGED.
        digest: xxh3-128 of its dense bytes, hexadecimal.
        changed: Values that differ from those before.
    """

    encoding: Encoding
    data: bytes
    digest: str
    changed: int


@dataclass(frozen=True, slots=True)
class Diff:
    """What renewing the copy found.

    Attributes:
        slices: One per slice, in the order of the copy's file.
        encoded_bytes: Size of the encoded slices.
        compared: Whether every slice was compared, so that a delta can be made of it.
        changed_fraction: Values that differ, of those compared; 1 if none were.
        seconds: Time that it took.
    """

    slices: tuple[EncodedSlice, ...]
    encoded_bytes: int
    compared: bool
    changed_fraction: float
    seconds: float


class KeptCopy:
    """One copy of a shard, laid out as the safetensors file in which an anchor travels.

    The memory is taken once and written in place ever after. Not thread-safe: the owner sees to it that the copy is not
    renewed while a file that reads it is being sent.

    Args:
        shard: The shard's name.
        rows: What it holds.
        directory: Directory of shared memory in which the copy may lie; None: ordinary memory.
    """

    def __init__(self, shard: str, rows: Sequence[LocalSlice], directory: Path | None = None) -> None:
        # Wide elements first, as in `ShardSource`: then each slice begins at a multiple of its element.
        self.rows = sorted(rows, key=lambda row: (-DTYPES[row.dtype].size, entry_name(row)))
        self.shard = shard
        self._entries = place([(entry_name(row), row.dtype, row.sizes) for row in self.rows])
        header = render_header(self._entries, METADATA)
        self._begin = len(header)
        self.dense_bytes = sum(entry.size for entry in self._entries)
        self._file = KeptFile(len(header) + self.dense_bytes, directory)
        self._file.bytes[: len(header)] = np.frombuffer(header, dtype=np.uint8)

    @property
    def local(self) -> pb.LocalFile | None:
        """Return the file in shared memory that the copy is, None if it lies in ordinary memory."""
        return self._file.local(self.shard)

    @property
    def address(self) -> int:
        """Return where the copy begins in memory."""
        return int(self._file.bytes.ctypes.data)

    def close(self) -> None:
        """Remove the file in shared memory, if there is one; the memory goes with the object."""
        self._file.close()

    def renew(self, tensors: Sequence[torch.Tensor], *, compare: bool, most_bytes: int) -> Diff:
        """Make the copy equal to the live tensors, which must not change in the meantime.

        This thread brings one slice after another into host memory and the published precision; a pool of as many threads
        as PyTorch has compares, hashes and copies. Beyond the copy, this takes memory for one slice per thread and one
        more, and for encoded streams of at most `most_bytes` and a slice per thread.

        Args:
            tensors: Live memory of each of `rows`.
            compare: Whether to encode the difference; otherwise the copy is overwritten unread.
            most_bytes: Size of the encoded slices beyond which comparing is given up.
        """
        started = time.perf_counter()
        threads = max(1, torch.get_num_threads())
        work = _Collected(most_bytes, compare=compare)
        order = sorted(range(len(self.rows)), key=lambda index: -self._entries[index].size)
        with ThreadPoolExecutor(threads, thread_name_prefix="diff") as pool:
            running: deque[tuple[int, Future[EncodedSlice]]] = deque()
            for index in order:
                new = _published_bytes(tensors[index], self.rows[index].dtype)
                running.append((index, pool.submit(self._renew_slice, index, new, compare=work.comparing)))
                if len(running) > threads:
                    work.add(*_finished(running), self.rows)
            while running:
                work.add(*_finished(running), self.rows)
        return work.diff(len(self.rows), time.perf_counter() - started)

    def anchor(self, diff: Diff) -> tuple[FileSource, pb.Shard]:
        """Return the copy as a dense shard: what to send, and its description."""
        shard = to_proto(self.rows, self.shard)
        for tensor, encoded in zip(shard.tensors, diff.slices, strict=True):
            tensor.encoding = pb.TENSOR_ENCODING_DENSE
            tensor.digest = encoded.digest
        source = FileSource(self.shard, [self._file.bytes.data])
        shard.size_bytes = source.size
        return source, shard

    def delta(self, diff: Diff) -> tuple[FileSource, pb.Shard]:
        """Return the difference as a shard: what to send, and its description. Dense entries are read from the copy."""
        shard = to_proto(self.rows, self.shard)
        rows: list[tuple[str, str, tuple[int, ...]]] = []
        parts: list[memoryview] = []
        order = sorted(range(len(self.rows)), key=lambda index: diff.slices[index].encoding in _STREAMS)
        for index in order:  # streams of odd sizes last, so that dense entries stay aligned
            row, encoded = self.rows[index], diff.slices[index]
            shard.tensors[index].encoding = pb.TensorEncoding.ValueType(int(encoded.encoding))
            shard.tensors[index].digest = encoded.digest
            if encoded.encoding is Encoding.DENSE:
                rows.append((entry_name(row), row.dtype, row.sizes))
                parts.append(self._bytes(index).data)
            elif encoded.encoding in _STREAMS:
                rows.append((entry_name(row), "U8", (len(encoded.data),)))
                parts.append(memoryview(encoded.data))
        header = render_header(place(rows), METADATA)
        source = FileSource(self.shard, [memoryview(header), *parts])
        shard.size_bytes = source.size
        shard.digest = source.digest()
        return source, shard

    def _renew_slice(self, index: int, new: NDArray[np.uint8], *, compare: bool) -> EncodedSlice:
        kept = self._bytes(index)
        digest = str(xxhash.xxh3_128(new.data).hexdigest())
        if not compare:
            np.copyto(kept, new)
            return EncodedSlice(Encoding.DENSE, b"", digest, self.rows[index].elements)
        found = encode(new, kept, self.rows[index].dtype)
        data = bytes(found.data) if found.encoding in _STREAMS else b""
        if found.encoding is not Encoding.UNCHANGED:
            np.copyto(kept, new)
        return EncodedSlice(found.encoding, data, digest, found.changed)

    def _bytes(self, index: int) -> NDArray[np.uint8]:
        entry: Entry = self._entries[index]
        return self._file.bytes[self._begin + entry.begin : self._begin + entry.end]


class _Collected:
    """Collects renewed slices, and decides when comparing is no longer worth it."""

    def __init__(self, most_bytes: int, *, compare: bool) -> None:
        self.comparing = compare
        self._most_bytes = most_bytes
        self._found: dict[int, EncodedSlice] = {}
        self._bytes = self._changed = self._elements = 0

    def add(self, index: int, encoded: EncodedSlice, rows: Sequence[LocalSlice]) -> None:
        self._found[index] = encoded
        if not self.comparing:
            return
        self._bytes += rows[index].size_bytes if encoded.encoding is Encoding.DENSE else len(encoded.data)
        self._changed += encoded.changed
        self._elements += rows[index].elements
        self.comparing = self._bytes <= self._most_bytes

    def diff(self, count: int, seconds: float) -> Diff:
        slices = tuple(self._found[index] for index in range(count))
        fraction = self._changed / self._elements if self._elements else float(not self.comparing)
        if self.comparing:
            return Diff(slices, self._bytes, compared=True, changed_fraction=fraction, seconds=seconds)
        streamless = tuple(EncodedSlice(each.encoding, b"", each.digest, each.changed) for each in slices)
        return Diff(streamless, self._bytes, compared=False, changed_fraction=fraction, seconds=seconds)


def _finished(running: deque[tuple[int, Future[EncodedSlice]]]) -> tuple[int, EncodedSlice]:
    index, future = running.popleft()
    return index, future.result()


def _published_bytes(tensor: torch.Tensor, dtype: str) -> NDArray[np.uint8]:
    """Return dense bytes in host memory: the tensor's own if they lie there in the published precision, else a copy."""
    return tensor_bytes(tensor.detach().to("cpu", TORCH_DTYPES[dtype]))


class KeptFile:
    """Writable memory of a fixed size.

    With a directory of shared memory it is a file there, removed by `close`, with the object, or at the end of the process.
    The process holds a lock on it; `sweep` removes files without one, which killed processes left behind. If the
    directory has no room, it is ordinary memory.

    Args:
        size: Bytes, at least 1.
        directory: Directory of shared memory; None: ordinary memory.
    """

    def __init__(self, size: int, directory: Path | None = None) -> None:
        descriptor, path = -1, None
        if directory is not None:
            sweep(directory)
            descriptor, path = _new_file(size, directory)
        self._descriptor, self.path = descriptor, path
        self.close = weakref.finalize(self, _remove, os.getpid(), descriptor, path)
        self.bytes: NDArray[np.uint8] = np.frombuffer(mmap.mmap(descriptor, size), dtype=np.uint8)

    def local(self, shard: str) -> pb.LocalFile | None:
        """Return the file as the contract names it, None if there is none.

        Args:
            shard: Name of the shard that it holds.
        """
        if self.path is None:
            return None
        status = os.fstat(self._descriptor)
        return pb.LocalFile(shard=shard, path=str(self.path), device=status.st_dev, inode=status.st_ino)


def sweep(directory: Path) -> None:
    """Remove files of this user's processes that are gone."""
    for path in directory.glob(f"{_PREFIX}*"):
        remove_unlocked(path)


def _new_file(size: int, directory: Path) -> tuple[int, Path | None]:
    """Return descriptor and path of a new file; -1 and None if the directory cannot hold it."""
    descriptor = -1
    try:
        space = os.statvfs(directory)
        if space.f_bavail * space.f_frsize < (1 + _SPARE_COPIES) * size:
            log.info(
                "shared memory has no room to hand weights over; they are sent by socket", directory=str(directory)
            )
            return -1, None
        descriptor = open_private(directory.resolve(), os.O_TMPFILE | os.O_RDWR)
        os.posix_fallocate(descriptor, 0, size)  # now, rather than by a SIGBUS at a later write
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
