"""The safetensors file of a version while it is built, from the shards of a dense form, or from a copy of its base and deltas.

Everything here blocks and is called in threads.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import defaultdict
from collections.abc import Iterable
from mmap import ACCESS_READ, MADV_DONTFORK, mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from sluice.v1 import weightsync_pb2 as pb
from weightsync.codec.slices import apply_slice, check_slice, slice_bytes
from weightsync.codec.streams import CodecError
from weightsync.format.manifest import (
    Box,
    ManifestError,
    box,
    check_manifest,
    entry_name,
    is_whole,
    manifest_digest,
    tensor_slices,
)
from weightsync.format.safetensors import (
    DTYPES,
    HEADER_LENGTH_BYTES,
    Entry,
    FileLayout,
    LayoutError,
    Scan,
    header_end,
    parse_layout,
    read_layout,
    render_header,
)
from weightsync.staged import TensorSpec

_PAGE = 4096
"""The data begins at a page, so that readers that map the file find aligned tensors."""

_COPY_BYTES = 8 << 20
"""Bytes after which a copy checks whether it should stop."""


class StagingError(Exception):
    """The bytes that came in differ from the announced version, or there is no room for them."""


def tensor_specs(manifest: pb.Manifest) -> dict[str, TensorSpec]:
    """Return type and shape of every tensor of a version."""
    return {each.name: TensorSpec(each.dtype, tuple(each.global_shape)) for each in tensor_slices(manifest)}


def dense_bytes(manifest: pb.Manifest) -> int:
    """Return the bytes of all tensors of a version, whichever form was announced."""
    known = (each for each in tensor_slices(manifest) if each.dtype in DTYPES)
    return sum(box(each).volume * DTYPES[each.dtype].size for each in known)


# --- the file of a dense form -----------------------------------------------------------------------------------------


class DenseFile:
    """The safetensors file of a version while its shards come in.

    The shards' data are placed in the order in which they come. The header is written last, so that an unfinished file is not a
    safetensors file. Several shards may come at the same time, each in one thread at a time.

    Args:
        manifest: The version, of whole tensors.
        descriptor: An open file. It is emptied here; the caller closes it.

    Attributes:
        sinks: Take the shards, by name.

    Raises:
        StagingError: if the manifest is of another kind or contradicts itself.
        OSError: if the file cannot be written.
    """

    def __init__(self, manifest: pb.Manifest, descriptor: int) -> None:
        _check_dense(manifest)
        self.manifest, self.descriptor = manifest, descriptor
        self._data_begin = -(-len(_longest_header(manifest)) // _PAGE) * _PAGE
        self._end = self._data_begin
        self._lock = threading.Lock()
        self.sinks = {shard.name: DenseShard(self, shard) for shard in manifest.shards}
        os.ftruncate(descriptor, 0)

    def reserve(self, size: int) -> int:
        """Return where the next `size` bytes of data belong in the file."""
        with self._lock:
            begin, self._end = self._end, self._end + size
            return begin

    def finish(self) -> FileLayout:
        """Check that everything is there, name by name and digest by digest, and write the header.

        Raises:
            StagingError: if something is missing, differs, or is not finite.
        """
        entries = [entry for sink in self.sinks.values() for entry in sink.finish(self._data_begin)]
        _check_digest(self.manifest)
        entries.sort(key=lambda entry: (entry.begin, entry.end))
        _write_all(self.descriptor, render_header(entries, {"format": "pt"}, self._data_begin), 0)
        return FileLayout(self._data_begin, {entry.name: entry for entry in entries}, self._end)


class DenseShard:
    """One shard of a dense form that is coming in."""

    def __init__(self, file: DenseFile, shard: pb.Shard) -> None:
        self._file = file
        self._shard = shard
        self._scan = Scan(shard.size_bytes)
        self._begin: int | None = None

    @property
    def position(self) -> int:
        """Return the bytes of the shard that came in and were checked."""
        return self._scan.position

    def feed(self, offset: int, data: memoryview) -> None:
        """Check the next bytes and write them; see `ChunkSink`."""
        scan, name = self._scan, self._shard.name
        if offset != scan.position:
            raise StagingError(f"shard {name}: a chunk at byte {offset} came instead of {scan.position}")
        try:
            scan.feed(data)
        except LayoutError as error:
            raise StagingError(f"shard {name}: {error}") from error
        if scan.entries is None:
            return
        if self._begin is None:
            self._begin = self._file.reserve(scan.size - scan.data_begin)
        skipped = max(0, scan.data_begin - offset)
        position = self._begin + offset + skipped - scan.data_begin
        _write_all(self._file.descriptor, data[skipped:], position)

    def finish(self, data_begin: int) -> list[Entry]:
        """Check the whole shard. Return its entries with their places in the file.

        Raises:
            StagingError: if something is missing, differs, or is not finite.
        """
        scan = self._scan
        if not scan.complete or self._begin is None:
            raise StagingError(f"shard {self._shard.name} ended at byte {scan.position} of {scan.size}")
        announced = {entry_name(tensor): tensor for tensor in self._shard.tensors}
        if announced.keys() != scan.tensors.keys():
            raise StagingError(f"shard {self._shard.name} does not hold the announced tensors")
        shift = self._begin - data_begin
        placed = []
        for name, tensor in scan.tensors.items():
            entry, wanted = tensor.entry, announced[name]
            if (entry.dtype, entry.shape) != (wanted.dtype, tuple(wanted.global_shape)):
                raise StagingError(f"tensor {name} is {entry.dtype} {list(entry.shape)}, announced was another type")
            if tensor.digest != wanted.digest:
                raise StagingError(f"tensor {name} has digest {tensor.digest}, announced was {wanted.digest}")
            if not tensor.finite:
                raise StagingError(f"tensor {name} holds NaN or infinite values")
            placed.append(Entry(name, entry.dtype, entry.shape, entry.begin + shift, entry.end + shift))
        return placed


def _check_dense(manifest: pb.Manifest) -> None:
    if manifest.kind not in {pb.VERSION_KIND_ANCHOR, pb.VERSION_KIND_ADAPTER}:
        raise StagingError(f"version of kind {pb.VersionKind.Name(manifest.kind)} where a dense form was expected")
    try:
        check_manifest(manifest)
    except ManifestError as error:
        raise StagingError(str(error)) from error
    if not all(is_whole(tensor) and entry_name(tensor) == tensor.name for tensor in tensor_slices(manifest)):
        raise StagingError("the shards hold slices or renamed tensors: pull from a service that assembles them")


def _check_digest(manifest: pb.Manifest) -> None:
    """Check the digest of a version whose slices were verified."""
    digest = manifest_digest(manifest)
    if digest != manifest.digest:
        raise StagingError(f"the tensors have digest {digest}, announced was {manifest.digest}")


def _longest_header(manifest: pb.Manifest) -> bytes:
    """Return a header with the longest possible offsets: an upper bound before the real ones are known."""
    digits = int("9" * len(str(manifest.size_bytes)))
    entries = [
        Entry(tensor.name, tensor.dtype, tuple(tensor.global_shape), digits, digits)
        for tensor in tensor_slices(manifest)
    ]
    return render_header(entries, {"format": "pt"})


def _write_all(descriptor: int, data: bytes | memoryview, position: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, position)
        rest, position = rest[written:], position + written


# --- a copy of the base, and deltas on it -----------------------------------------------------------------------------


def copy_file(source: Path, descriptor: int, stop: threading.Event) -> None:
    """Replace an open file's content by a copy of another file; return early when `stop` is set.

    Reading through a map and writing by calls is twice as fast on tmpfs as `os.copy_file_range` or two maps, and a full
    memory is an error instead of a signal.
    """
    os.ftruncate(descriptor, 0)
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
                    _write_all(descriptor, part, begin)


class DeltaShard:
    """A shard of a delta in memory, which its announced size bounds: a safetensors file of the encoded slices."""

    def __init__(self, shard: pb.Shard) -> None:
        self.shard = shard
        self.position = 0
        self._bytes = np.empty(shard.size_bytes, dtype=np.uint8).data

    def feed(self, offset: int, data: memoryview) -> None:
        """Keep the next bytes; see `ChunkSink`."""
        end = self.position + len(data)
        if offset != self.position or end > len(self._bytes):
            raise StagingError(f"shard {self.shard.name}: a chunk at byte {offset} came instead of {self.position}")
        self._bytes[self.position : end] = data
        self.position = end

    def finish(self) -> None:
        """Check that the whole file came in and is the announced file; raise StagingError if not."""
        name = self.shard.name
        if self.position != len(self._bytes):
            raise StagingError(f"shard {name} ended at byte {self.position} of {len(self._bytes)}")
        digest = xxhash.xxh3_128(self._bytes).hexdigest()
        if digest != self.shard.digest:
            raise StagingError(f"shard {name} has digest {digest}, announced was {self.shard.digest}")
        try:
            end = header_end(self._bytes[:HEADER_LENGTH_BYTES], len(self._bytes))
            self._layout = parse_layout(self._bytes[:end], len(self._bytes))
        except LayoutError as error:
            raise StagingError(f"shard {name}: {error}") from error
        expected = {entry_name(each) for each in self.shard.tensors if each.encoding != pb.TENSOR_ENCODING_UNCHANGED}
        if expected != self._layout.entries.keys():
            raise StagingError(f"shard {name} does not hold the announced entries")

    def data(self, tensor: pb.TensorSlice) -> memoryview:
        """Return the encoded bytes of a slice; empty if the slice did not change.

        Raises:
            StagingError: if the entry has another type or shape than its encoding requires.
        """
        if tensor.encoding == pb.TENSOR_ENCODING_UNCHANGED:
            return self._bytes[:0]
        entry = self._layout.entries[entry_name(tensor)]
        plain = tensor.encoding in {pb.TENSOR_ENCODING_UNSPECIFIED, pb.TENSOR_ENCODING_DENSE}
        wanted = (tensor.dtype, box(tensor).sizes) if plain else ("U8", (entry.size,))
        if (entry.dtype, entry.shape) != wanted:
            raise StagingError(
                f"entry {entry.name} of shard {self.shard.name} is {entry.dtype} {list(entry.shape)}, expected"
                f" {wanted[0]} {list(wanted[1])}"
            )
        begin = self._layout.data_begin
        return self._bytes[begin + entry.begin : begin + entry.end]


class PatchedFile:
    """A whole version's file while it becomes the next one.

    A chain of deltas is applied to one file. Only the digests of the last delta are compared: they cover every byte, so they
    also reveal an earlier error.

    Args:
        descriptor: The file, open to read and write, with all of its pages written before. The caller closes it.
        known: Describes the file's verified content: unchanged slices with these digests are not read again. None: unknown.

    Raises:
        StagingError: if it is not a whole safetensors file.
    """

    def __init__(self, descriptor: int, known: pb.Manifest | None) -> None:
        try:
            self._layout = read_layout(descriptor)
        except LayoutError as error:
            raise StagingError(f"the base: {error}") from error
        self._known: dict[str, dict[Box, str]] = defaultdict(dict)
        for tensor in () if known is None else tensor_slices(known):
            self._known[tensor.name][box(tensor)] = tensor.digest
        self._map = mmap(descriptor, self._layout.size)
        self._map.madvise(MADV_DONTFORK)  # a forked engine would keep a removed file in memory
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

    def apply(self, manifest: pb.Manifest, shards: Iterable[DeltaShard], *, verify: bool) -> None:
        """Apply all shards of one delta.

        Args:
            manifest: The delta.
            shards: All of its shards.
            verify: Check every slice, and the version's digest; for the last delta of a chain.

        Raises:
            StagingError: if the delta does not fit the file, cannot be decoded, differs from its digests or is not finite. The
                file is useless then.
        """
        self._check_tensors(manifest)
        for shard in shards:
            for tensor in shard.shard.tensors:
                if tensor.encoding != pb.TENSOR_ENCODING_UNCHANGED:
                    self._apply_slice(tensor, shard.data(tensor), verify=verify)
                elif verify:
                    self._verify_slice(tensor)
        if verify:
            _check_digest(manifest)

    def verify(self, manifest: pb.Manifest) -> None:
        """Check the file against any manifest of its version.

        Raises:
            StagingError: if something differs or is not finite.
        """
        self._check_tensors(manifest)
        for tensor in tensor_slices(manifest):
            self._verify_slice(tensor)
        _check_digest(manifest)

    def close(self) -> None:
        """Unmap the file; call it before the file gets its name."""
        self._bytes = np.empty(0, dtype=np.uint8)
        with contextlib.suppress(BufferError):  # a traceback still refers to the map, which is freed with the traceback
            self._map.close()

    def _check_tensors(self, manifest: pb.Manifest) -> None:
        """Check that the manifest is valid and names the same tensors as the file."""
        try:
            check_manifest(manifest)
        except ManifestError as error:
            raise StagingError(str(error)) from error
        found = {name: (entry.dtype, entry.shape) for name, entry in self._layout.entries.items()}
        announced = {each.name: (each.dtype, tuple(each.global_shape)) for each in tensor_slices(manifest)}
        if found != announced:
            different = sorted(name for name, _ in found.items() ^ announced.items())
            raise StagingError(f"the delta is of other tensors than its base: {', '.join(different[:5])}")

    def _apply_slice(self, tensor: pb.TensorSlice, data: memoryview, *, verify: bool) -> None:
        known, changed = self._known[tensor.name], box(tensor)
        for each in [each for each in known if each.overlaps(changed)]:
            del known[each]
        try:
            dense = apply_slice(self._tensor(tensor.name), tensor, data)
            if verify:
                check_slice(tensor, dense)
        except CodecError as error:
            raise StagingError(f"slice of {tensor.name}: {error}") from error

    def _verify_slice(self, tensor: pb.TensorSlice) -> None:
        if self._known[tensor.name].get(box(tensor)) == tensor.digest:
            return
        try:
            check_slice(tensor, slice_bytes(self._tensor(tensor.name), tensor))
        except CodecError as error:
            raise StagingError(str(error)) from error

    def _tensor(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the bytes of a tensor in the file."""
        entry = self._layout.entries[name]
        begin = self._layout.data_begin + entry.begin
        return self._bytes[begin : begin + entry.size]


def verify_other_form(descriptor: int, built: pb.Manifest, target: pb.Manifest) -> None:
    """Verify the announced digests too, if the file was made from another form than the announced one.

    Raises:
        StagingError: if they differ.
    """
    if built.digest == target.digest:
        return
    patched = PatchedFile(descriptor, built)
    try:
        patched.verify(target)
    finally:
        patched.close()
