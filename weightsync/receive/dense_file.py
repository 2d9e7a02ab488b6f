"""Puts the shards of a version's dense form together into one verified safetensors file. Blocking; called in threads."""

from __future__ import annotations

import os
import threading

from sluice.v1 import weightsync_pb2 as pb
from weightsync.format.chunks import RawChunk
from weightsync.format.manifest import ManifestError, check_manifest, entry_name, is_whole, manifest_digest
from weightsync.format.safetensors import Entry, FileLayout, LayoutError, Scan, render_header
from weightsync.receive.pull import StagingError

__all__ = ["DenseFile", "DenseShard", "write_all"]

_PAGE = 4096
"""The data begins at a page, so that readers that map the file find aligned tensors."""


class DenseFile:
    """The file of one version while its dense form comes in.

    The shards' data are placed in the order in which they come, and the header is written last, so that an unfinished file is not a
    safetensors file. Several shards may come at the same time, each in one thread at a time.

    Args:
        manifest: The version; an anchor or adapter of whole tensors.
        descriptor: An open file; it is emptied, and stays the caller's.

    Raises:
        StagingError: if the manifest is of another kind or contradicts itself.
        OSError: if the file cannot be written.
    """

    def __init__(self, manifest: pb.Manifest, descriptor: int) -> None:
        _check_dense(manifest)
        self.manifest = manifest
        self._data_begin = -(-len(_longest_header(manifest)) // _PAGE) * _PAGE
        self._descriptor = descriptor
        self._end = self._data_begin
        self._lock = threading.Lock()
        self._sinks = {shard.name: DenseShard(self, shard) for shard in manifest.shards}
        os.ftruncate(descriptor, 0)

    def sink(self, shard: str) -> DenseShard:
        """Return the sink of a shard."""
        return self._sinks[shard]

    def reserve(self, size: int) -> int:
        """Return where the next ``size`` bytes of data belong in the file."""
        with self._lock:
            begin, self._end = self._end, self._end + size
            return begin

    def write(self, data: memoryview, position: int) -> None:
        """Write bytes of the file."""
        write_all(self._descriptor, data, position)

    def finish(self) -> FileLayout:
        """Check that everything is there, name by name and digest by digest, and give the file its header.

        Raises:
            StagingError: if something is missing, differs, or is not finite.
        """
        entries: list[Entry] = []
        for shard in self.manifest.shards:
            entries += self._sinks[shard.name].finish(self._data_begin)
        if manifest_digest(self.manifest) != self.manifest.digest:
            raise StagingError(
                f"the tensors have digest {manifest_digest(self.manifest)}, announced was {self.manifest.digest}"
            )
        entries.sort(key=lambda entry: (entry.begin, entry.end))
        self.write(memoryview(render_header(entries, {"format": "pt"}, self._data_begin)), 0)
        return FileLayout(self._data_begin, {entry.name: entry for entry in entries}, self._end)


class DenseShard:
    """One shard that is coming in.

    Args:
        file: The file.
        shard: What was announced.
    """

    def __init__(self, file: DenseFile, shard: pb.Shard) -> None:
        self._file = file
        self._shard = shard
        self._scan = Scan(shard.size_bytes)
        self._begin: int | None = None

    @property
    def position(self) -> int:
        """Return the bytes of the shard that came in and were checked."""
        return self._scan.position

    def feed(self, chunk: RawChunk) -> None:
        """Take the next bytes.

        Raises:
            ChunkError, ChunkSizeError: if they were damaged on their way; nothing of them is kept.
            StagingError: if they are out of order, or no part of such a shard.
            OSError: if shared memory is full.
        """
        scan, name = self._scan, self._shard.name
        if chunk.offset != scan.position:
            raise StagingError(f"shard {name}: a chunk at byte {chunk.offset} came instead of {scan.position}")
        data = chunk.check()
        try:
            scan.feed(data)
        except LayoutError as error:
            raise StagingError(f"shard {name}: {error}") from error
        if scan.entries is None:
            return
        if self._begin is None:
            self._begin = self._file.reserve(scan.size - scan.data_begin)
        skipped = max(0, scan.data_begin - chunk.offset)
        self._file.write(data[skipped:], self._begin + chunk.offset + skipped - scan.data_begin)

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
    """Check that a manifest is of whole tensors.

    Raises:
        StagingError: if it is of another kind or contradicts itself.
    """
    if manifest.kind not in {pb.VERSION_KIND_ANCHOR, pb.VERSION_KIND_ADAPTER}:
        raise StagingError(f"version of kind {pb.VersionKind.Name(manifest.kind)} where a dense form was expected")
    try:
        check_manifest(manifest)
    except ManifestError as error:
        raise StagingError(str(error)) from error
    tensors = [tensor for shard in manifest.shards for tensor in shard.tensors]
    if not all(is_whole(tensor) and entry_name(tensor) == tensor.name for tensor in tensors):
        raise StagingError("the shards hold slices or renamed tensors: pull from a service that assembles them")


def _longest_header(manifest: pb.Manifest) -> bytes:
    """Return a header with the longest possible offsets: an upper bound before the real ones are known."""
    digits = int("9" * len(str(manifest.size_bytes)))
    entries = [
        Entry(tensor.name, tensor.dtype, tuple(tensor.global_shape), digits, digits)
        for shard in manifest.shards
        for tensor in shard.tensors
    ]
    return render_header(entries, {"format": "pt"})


def write_all(descriptor: int, data: bytes | memoryview, position: int) -> None:
    """Write every byte.

    Raises:
        OSError: if there is no room.
    """
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, position)
        rest, position = rest[written:], position + written
