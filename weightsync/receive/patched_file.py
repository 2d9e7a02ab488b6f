"""Applies deltas in place to a copy of their base's file, and verifies every slice of the result. Blocking; called in threads.

A chain of deltas is applied to one copy. Only the last one's digests are compared: they cover every byte, so an earlier error
shows in them.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from mmap import ACCESS_READ, MADV_DONTFORK, mmap
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from sluice.v1 import weightsync_pb2 as pb
from weightsync.codec import CodecError, Encoding, apply
from weightsync.format.chunks import RawChunk
from weightsync.format.manifest import Box, ManifestError, box, check_manifest, entry_name, manifest_digest
from weightsync.format.safetensors import (
    DTYPES,
    HEADER_LENGTH_BYTES,
    MAX_HEADER_BYTES,
    Entry,
    LayoutError,
    all_finite,
    parse_header,
    read_layout,
)
from weightsync.receive.dense_file import write_all
from weightsync.receive.pull import StagingError

__all__ = ["DeltaShard", "Digests", "PatchedFile", "SliceKey", "copy_file", "slice_digests"]

Bytes: TypeAlias = npt.NDArray[np.uint8]

_COPY_BYTES = 8 << 20
"""Bytes after which a copy looks whether it is still wanted."""


class SliceKey(NamedTuple):
    """A box of elements of one tensor."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


Digests: TypeAlias = Mapping[SliceKey, str]
"""Verified xxh3-128 digests of the dense bytes of slices, hexadecimal."""


def slice_digests(manifest: pb.Manifest) -> Digests:
    """Return the digests of a manifest, which are those of the file once it is verified."""
    return {_key(each): each.digest for shard in manifest.shards for each in shard.tensors}


def copy_file(source: Path, descriptor: int, stop: threading.Event) -> None:
    """Copy a file into an open, empty one; other threads run meanwhile.

    Reading through a map and writing by calls is twice as fast on tmpfs as `os.copy_file_range` or two maps, and a full
    memory is an error instead of a signal.

    Args:
        source: A file that nobody changes.
        descriptor: The copy.
        stop: Ends the copy early when it is set.

    Raises:
        OSError: if it cannot be read, or there is no room.
    """
    with source.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return
        os.ftruncate(descriptor, size)
        with mmap(file.fileno(), size, access=ACCESS_READ) as mapped, memoryview(mapped) as view:
            for begin in range(0, size, _COPY_BYTES):
                if stop.is_set():
                    return
                with view[begin : begin + _COPY_BYTES] as part:
                    write_all(descriptor, part, begin)


class DeltaShard:
    """A shard of a delta in memory: an ordinary safetensors file whose entries are the encoded slices.

    Args:
        shard: What was announced; its size bounds the memory.
    """

    def __init__(self, shard: pb.Shard) -> None:
        self.shard = shard
        self.position = 0
        self._bytes = np.empty(shard.size_bytes, dtype=np.uint8).data
        self._entries: Mapping[str, Entry] = {}
        self._data_begin = 0

    def feed(self, chunk: RawChunk) -> None:
        """Take the next bytes; see `ChunkSink`."""
        end = self.position + len(chunk.data)
        if chunk.offset != self.position or end > len(self._bytes):
            raise StagingError(
                f"shard {self.shard.name}: a chunk at byte {chunk.offset} came instead of {self.position}"
            )
        self._bytes[self.position : end] = chunk.check()
        self.position = end

    def finish(self) -> None:
        """Check that the whole file came, and what it holds.

        Raises:
            StagingError: if it is another file than announced.
        """
        name = self.shard.name
        if self.position != len(self._bytes):
            raise StagingError(f"shard {name} ended at byte {self.position} of {len(self._bytes)}")
        digest = xxhash.xxh3_128(self._bytes).hexdigest()
        if digest != self.shard.digest:
            raise StagingError(f"shard {name} has digest {digest}, announced was {self.shard.digest}")
        try:
            self._read_header()
        except LayoutError as error:
            raise StagingError(f"shard {name}: {error}") from error
        expected = {entry_name(each) for each in self.shard.tensors if each.encoding != pb.TENSOR_ENCODING_UNCHANGED}
        if expected != self._entries.keys():
            raise StagingError(f"shard {name} does not hold the announced entries")

    def _read_header(self) -> None:
        length = int.from_bytes(self._bytes[:HEADER_LENGTH_BYTES], "little")
        self._data_begin = HEADER_LENGTH_BYTES + length
        if length > MAX_HEADER_BYTES or self._data_begin > len(self._bytes):
            raise LayoutError(f"a header of {length} bytes: not a safetensors file, or cut off")
        entries = parse_header(self._bytes[HEADER_LENGTH_BYTES : self._data_begin])
        size = self._data_begin + (entries[-1].end if entries else 0)
        if size != len(self._bytes):
            raise LayoutError(f"header and entries make {size} bytes, not {len(self._bytes)}")
        self._entries = {entry.name: entry for entry in entries}

    def data(self, tensor: pb.TensorSlice) -> memoryview:
        """Return the encoded bytes of a slice; empty for one that did not change.

        Raises:
            StagingError: if the entry has another type or shape than its encoding asks for.
        """
        if tensor.encoding == pb.TENSOR_ENCODING_UNCHANGED:
            return self._bytes[:0]
        entry = self._entries[entry_name(tensor)]
        plain = tensor.encoding in {pb.TENSOR_ENCODING_UNSPECIFIED, pb.TENSOR_ENCODING_DENSE}
        wanted = (tensor.dtype, box(tensor).sizes) if plain else ("U8", (entry.size,))
        if (entry.dtype, entry.shape) != wanted:
            raise StagingError(
                f"entry {entry.name} of shard {self.shard.name} is {entry.dtype} {list(entry.shape)}, expected"
                f" {wanted[0]} {list(wanted[1])}"
            )
        return self._bytes[self._data_begin + entry.begin : self._data_begin + entry.end]


class PatchedFile:
    """A whole version's file while it becomes the next one.

    Args:
        descriptor: The file, open to read and write, all of its pages written before; stays the caller's.
        known: Digests that its content is known to have: unchanged slices that have them are not read again.

    Raises:
        StagingError: if it is no whole safetensors file.
    """

    def __init__(self, descriptor: int, known: Digests) -> None:
        try:
            self._layout = read_layout(descriptor)
        except LayoutError as error:
            raise StagingError(f"the base: {error}") from error
        self._known: dict[str, dict[Box, str]] = defaultdict(dict)
        for key, digest in known.items():
            self._known[key.name][Box(key.offsets, key.sizes)] = digest
        self._map = mmap(descriptor, self._layout.size)
        self._map.madvise(MADV_DONTFORK)  # a forked engine would keep a removed file in memory
        self._bytes: Bytes = np.frombuffer(self._map, dtype=np.uint8)

    def apply(self, manifest: pb.Manifest, shards: Iterable[DeltaShard], *, verify: bool) -> None:
        """Apply one delta.

        Args:
            manifest: What it is.
            shards: All of its shards.
            verify: Check every slice, and the version's digest; for the last delta of a chain.

        Raises:
            StagingError: if it does not fit the file, cannot be decoded, differs from its digests or is not finite. The
                file is of no use then.
        """
        self._check(manifest)
        for shard in shards:
            for tensor in shard.shard.tensors:
                self._apply_slice(tensor, shard.data(tensor), verify=verify)
        if verify and manifest_digest(manifest) != manifest.digest:
            raise StagingError(f"the slices have digest {manifest_digest(manifest)}, announced was {manifest.digest}")

    def verify(self, manifest: pb.Manifest) -> None:
        """Check the file against any manifest of its version.

        Raises:
            StagingError: if something differs or is not finite.
        """
        self._check(manifest)
        for shard in manifest.shards:
            for tensor in shard.tensors:
                self._verify_slice(tensor)
        if manifest_digest(manifest) != manifest.digest:
            raise StagingError(f"the slices have digest {manifest_digest(manifest)}, announced was {manifest.digest}")

    def close(self) -> None:
        """Unmap the file; call it before the file gets its name."""
        self._bytes = np.empty(0, dtype=np.uint8)
        with contextlib.suppress(BufferError):  # a traceback still refers to it; the map ends with that
            self._map.close()

    def _check(self, manifest: pb.Manifest) -> None:
        """Check that the manifest is sound and of the same tensors as the file."""
        try:
            check_manifest(manifest)
        except ManifestError as error:
            raise StagingError(str(error)) from error
        found = {name: (entry.dtype, entry.shape) for name, entry in self._layout.entries.items()}
        announced = {
            each.name: (each.dtype, tuple(each.global_shape)) for shard in manifest.shards for each in shard.tensors
        }
        if found != announced:
            different = sorted(name for name, _ in found.items() ^ announced.items())
            raise StagingError(f"the delta is of other tensors than its base: {', '.join(different[:5])}")

    def _apply_slice(self, tensor: pb.TensorSlice, data: memoryview, *, verify: bool) -> None:
        if tensor.encoding != pb.TENSOR_ENCODING_UNCHANGED:
            self._forget(tensor)
            _decode(tensor, data, self._region(tensor))
        if verify:
            self._verify_slice(tensor)

    def _verify_slice(self, tensor: pb.TensorSlice) -> None:
        if self._known[tensor.name].get(box(tensor)) == tensor.digest:
            return
        flat = _flat(self._region(tensor))
        digest = xxhash.xxh3_128(flat.data).hexdigest()
        if digest != tensor.digest:
            raise StagingError(f"a slice of {tensor.name} has digest {digest}, announced was {tensor.digest}")
        if not all_finite(flat.data, DTYPES[tensor.dtype]):
            raise StagingError(f"tensor {tensor.name} holds NaN or infinite values")

    def _forget(self, tensor: pb.TensorSlice) -> None:
        known, changed = self._known[tensor.name], box(tensor)
        for each in [each for each in known if each.overlaps(changed)]:
            del known[each]

    def _region(self, tensor: pb.TensorSlice) -> Bytes:
        """Return a view of the slice in the file, with the bytes of an element as last dimension."""
        entry = self._layout.entries[tensor.name]
        begin = self._layout.data_begin + entry.begin
        octets = self._bytes[begin : begin + entry.size].reshape(*entry.shape, DTYPES[entry.dtype].size)
        return octets[tuple(slice(offset, offset + size) for offset, size in zip(*box(tensor), strict=True))]


def _decode(tensor: pb.TensorSlice, data: memoryview, region: Bytes) -> None:
    """Apply an encoded slice in place."""
    encoding = Encoding(tensor.encoding or pb.TENSOR_ENCODING_DENSE)
    flat = _flat(region)
    try:
        apply(encoding, data, flat, tensor.dtype)
    except CodecError as error:
        raise StagingError(f"slice of {tensor.name}: {error}") from error
    if not region.flags.c_contiguous:
        region[...] = flat.reshape(region.shape)


def _flat(region: Bytes) -> Bytes:
    """Return the bytes of a region: a view if they are contiguous, otherwise a copy."""
    return np.ascontiguousarray(region).reshape(-1)


def _key(tensor: pb.TensorSlice) -> SliceKey:
    where = box(tensor)
    return SliceKey(tensor.name, where.offsets, where.sizes)
