"""Puts a version's shards together into one verified safetensors file. Blocking; called in one thread."""

from __future__ import annotations

import os
from pathlib import Path

from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.chunks import ChunkError, ChunkSizeError, check_chunk
from weightsync.layout import Entry, LayoutError, render_header
from weightsync.manifest import DenseTensor, ManifestError, check_manifest, entry_name, version_digest
from weightsync.scan import Scan
from weightsync.staged import StagedVersion, TensorSpec
from weightsync.verify import whole_tensors

__all__ = ["StagingError", "StagingFile"]

_PAGE = 4096
"""The data begins at a page, so that readers that map the file find aligned tensors."""


class StagingError(Exception):
    """What came in is not the version that was announced."""


class StagingFile:
    """The file of one version while it is put together.

    The data of the shards follow each other as they come; the header is written last, so that an unfinished file is none.

    Args:
        manifest: The version; an anchor of whole tensors.
        path: The file to make.

    Raises:
        StagingError: if the manifest is of another kind or contradicts itself.
        OSError: if the file cannot be made.
    """

    def __init__(self, manifest: pb.Manifest, path: Path) -> None:
        self.manifest = manifest
        self.path = path
        _check(manifest)
        self._data_begin = -(-len(_longest_header(manifest)) // _PAGE) * _PAGE
        self._scans = {shard.name: Scan(shard.size_bytes) for shard in manifest.shards}
        self._bases: dict[str, int] = {}
        self._part = path.with_suffix(".part")
        self._descriptor = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._end = self._data_begin

    def stored(self, shard: str) -> int:
        """Bytes of a shard that came in and were verified."""
        return self._scans[shard].position

    def feed(self, shard: str, chunk: pb.Chunk) -> None:
        """Take the next bytes of a shard; shards come one after the other.

        Raises:
            StagingError: if the chunk is damaged, out of order, or no part of such a shard.
            OSError: if shared memory is full.
        """
        scan = self._scans[shard]
        if chunk.offset != scan.position:
            raise StagingError(f"shard {shard}: a chunk at byte {chunk.offset} came instead of {scan.position}")
        try:
            data = check_chunk(chunk)
            scan.feed(data)
        except (ChunkError, ChunkSizeError, LayoutError) as error:
            raise StagingError(f"shard {shard}: {error}") from error
        if scan.entries is None:
            return
        if shard not in self._bases:
            self._bases[shard] = self._end
            self._end += scan.size - scan.data_begin
        skipped = max(0, scan.data_begin - chunk.offset)
        self._write(memoryview(data)[skipped:], self._bases[shard] + chunk.offset + skipped - scan.data_begin)

    def finish(self) -> StagedVersion:
        """Check that everything is there, name by name and digest by digest, and give the file its header and name.

        Raises:
            StagingError: if something is missing, differs, or is not finite.
        """
        entries: list[Entry] = []
        found: list[DenseTensor] = []
        for shard in self.manifest.shards:
            entries += self._finish_shard(shard)
            found += [
                DenseTensor(name, tensor.entry.dtype, tensor.entry.shape, tensor.digest)
                for name, tensor in self._scans[shard.name].tensors.items()
            ]
        if version_digest(found) != self.manifest.digest:
            raise StagingError(f"the tensors have digest {version_digest(found)}, announced was {self.manifest.digest}")
        entries.sort(key=lambda entry: entry.begin)
        self._write(memoryview(render_header(entries, {"format": "pt"}, self._data_begin)), 0)
        self.close()
        self._part.rename(self.path)
        return StagedVersion(
            version=Version.from_proto(self.manifest.version),
            path=self.path,
            tensors={entry.name: TensorSpec(entry.dtype, entry.shape) for entry in entries},
            digest=self.manifest.digest,
        )

    def _finish_shard(self, shard: pb.Shard) -> list[Entry]:
        scan = self._scans[shard.name]
        if not scan.complete:
            raise StagingError(f"shard {shard.name} ended at byte {scan.position} of {scan.size}")
        announced = {entry_name(tensor): tensor for tensor in shard.tensors}
        if announced.keys() != scan.tensors.keys():
            raise StagingError(f"shard {shard.name} does not hold the announced tensors")
        shift = self._bases[shard.name] - self._data_begin
        placed = []
        for name, tensor in scan.tensors.items():
            if tensor.digest != announced[name].digest:
                raise StagingError(f"tensor {name} has digest {tensor.digest}, announced was {announced[name].digest}")
            if not tensor.finite:
                raise StagingError(f"tensor {name} holds NaN or infinite values")
            entry = tensor.entry
            placed.append(Entry(name, entry.dtype, entry.shape, entry.begin + shift, entry.end + shift))
        return placed

    def _write(self, data: memoryview, position: int) -> None:
        while data:
            written = os.pwrite(self._descriptor, data, position)
            data, position = data[written:], position + written

    def close(self) -> None:
        """Give the file descriptor back."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def discard(self) -> None:
        """Remove what there is; without effect on a finished file."""
        self.close()
        self._part.unlink(missing_ok=True)


def _check(manifest: pb.Manifest) -> None:
    if manifest.kind != pb.VERSION_KIND_ANCHOR:
        raise StagingError(f"version of kind {pb.VersionKind.Name(manifest.kind)}: this receiver takes anchors only")
    try:
        check_manifest(manifest)
    except ManifestError as error:
        raise StagingError(str(error)) from error
    renamed = any(entry_name(tensor) != tensor.name for shard in manifest.shards for tensor in shard.tensors)
    if whole_tensors(manifest) is None or renamed:
        raise StagingError("the shards hold slices or renamed tensors: pull from a service that assembles them")


def _longest_header(manifest: pb.Manifest) -> bytes:
    """A header with every offset as long as the longest can be: an upper bound before the real ones are known."""
    digits = int("9" * len(str(manifest.size_bytes)))
    entries = [
        Entry(tensor.name, tensor.dtype, tuple(tensor.global_shape), digits, digits)
        for shard in manifest.shards
        for tensor in shard.tensors
    ]
    return render_header(entries, {"format": "pt"})
