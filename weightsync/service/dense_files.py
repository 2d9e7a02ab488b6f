"""Writes files of whole tensors: of the slices that ranks pushed, or of an older dense form and deltas. For threads.

Both need room for a second copy of the model, which the caller reserves. Memory holds no more than the slice at hand; the
kernel writes the rest out. Each tensor is hashed while it is in the cache.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.codec import CodecError, apply_slice, check_slice, slice_region
from weightsync.format.manifest import box, entry_name, is_whole, manifest_digest
from weightsync.format.safetensors import DTYPES, Entry, LayoutError, place, read_layout, render_header
from weightsync.service.stored import StoredForm
from weightsync.service.upload import Upload

__all__ = ["ASSEMBLED_SHARD", "DamagedDeltaError", "StoppedError", "apply_deltas", "assemble"]

ASSEMBLED_SHARD = "model"
"""Name of the shard that an assembled version consists of."""

Bytes = npt.NDArray[np.uint8]


class DamagedDeltaError(Exception):
    """A delta gives other bytes than announced.

    Attributes:
        version: The version that it leads to.
    """

    def __init__(self, version: Version, message: str) -> None:
        super().__init__(message)
        self.version = version


class StoppedError(Exception):
    """The work was given up because its caller asked for that."""


def assemble(pushed: pb.Manifest, uploads: Mapping[str, Upload], target: Path) -> pb.Manifest:
    """Put slices from many shards together into one safetensors file of whole tensors.

    Args:
        pushed: A manifest that passed `complete_manifest`.
        uploads: Its shards by name.
        target: The file to write; on disk when this returns.

    Returns:
        The manifest of the assembled version, digests filled in.

    Raises:
        OSError: if the disk does not take it.
    """
    shapes = {each.name: (each.dtype, tuple(each.global_shape)) for shard in pushed.shards for each in shard.tensors}
    entries = place([(name, *shapes[name]) for name in sorted(shapes)])
    header = render_header(entries, {"format": "pt"})
    shard = pb.Shard(name=ASSEMBLED_SHARD, size_bytes=len(header) + sum(entry.size for entry in entries))
    _allocate(target, shard.size_bytes)
    with target.open("r+b") as file:
        with mmap.mmap(file.fileno(), shard.size_bytes) as mapped:
            mapped[: len(header)] = header
            _copy_slices(pushed, uploads, mapped, len(header), entries)
            with memoryview(mapped) as view:
                for entry in entries:
                    with view[len(header) + entry.begin : len(header) + entry.end] as part:
                        _describe_dense(shard, entry, xxhash.xxh3_128(part).hexdigest())
                shard.digest = xxhash.xxh3_128(view).hexdigest()
            mapped.flush()
        os.fsync(file.fileno())
    manifest = _with_shards(pushed, [shard])
    manifest.dense_bytes = sum(entry.size for entry in entries)
    return manifest


def _copy_slices(
    pushed: pb.Manifest, uploads: Mapping[str, Upload], mapped: mmap.mmap, data_begin: int, entries: Sequence[Entry]
) -> None:
    targets = {entry.name: entry for entry in entries}
    for shard in pushed.shards:
        upload = uploads[shard.name]
        source = np.memmap(upload.path, dtype=np.uint8, mode="r")
        for tensor in shard.tensors:
            found, target = upload.tensors[entry_name(tensor)].entry, targets[tensor.name]
            if not found.size:
                continue
            begin = upload.data_begin + found.begin
            part = source[begin : begin + found.size].reshape(*box(tensor).sizes, DTYPES[tensor.dtype].size)
            whole = np.frombuffer(mapped, dtype=np.uint8, count=target.size, offset=data_begin + target.begin)
            slice_region(whole, tensor)[...] = part
            del whole  # the map cannot be closed while an array looks into it


def apply_deltas(
    source: StoredForm, deltas: Sequence[StoredForm], building: Path, stop: threading.Event
) -> pb.Manifest:
    """Write the files of a dense form: copy an older one and apply deltas, tensor by tensor.

    Args:
        source: The dense form to start from.
        deltas: What to apply, oldest first; at least one.
        building: An empty directory; its files are on the disk when this returns.
        stop: Ends the work early.

    Returns:
        The manifest of the dense form.

    Raises:
        DamagedDeltaError: if the bytes are not those that a delta's manifest describes, or not finite.
        StoppedError: if `stop` was set.
        OSError: if the disk does not take it.
    """
    patches = _read_patches(deltas)
    targets = {shard.name: building / source.files[shard.name].name for shard in source.manifest.shards}
    for shard in source.manifest.shards:
        _allocate(targets[shard.name], shard.size_bytes)
    shards = [_advance_file(name, source.files[name], target, patches, stop) for name, target in targets.items()]
    manifest = _with_shards(deltas[-1].manifest, shards)
    manifest.kind = pb.VERSION_KIND_ANCHOR
    manifest.ClearField("base")
    return manifest


@dataclass(frozen=True, slots=True)
class _Patch:
    """What one delta does to one slice.

    Attributes:
        version: Version that the delta leads to.
        slice: The slice.
        data: Its encoded bytes; None if it is unchanged.
    """

    version: Version
    slice: pb.TensorSlice
    data: Bytes | None


def _read_patches(deltas: Sequence[StoredForm]) -> Mapping[str, list[_Patch]]:
    """Return what the deltas do to each tensor, in order."""
    patches: defaultdict[str, list[_Patch]] = defaultdict(list)
    for delta in deltas:
        version = Version.from_proto(delta.manifest.version)
        for shard in delta.manifest.shards:
            try:
                data = dict(_mapped_entries(delta.files[shard.name]))
                for tensor in shard.tensors:
                    unchanged = tensor.encoding == pb.TENSOR_ENCODING_UNCHANGED
                    found = None if unchanged else data[entry_name(tensor)]
                    patches[tensor.name].append(_Patch(version, tensor, found))
            except (LayoutError, KeyError) as error:
                raise DamagedDeltaError(version, f"shard {shard.name} is damaged on disk: {error}") from error
    return dict(patches)


def _mapped_entries(path: Path) -> Iterator[tuple[str, Bytes]]:
    """Yield the entries of a safetensors file by name, mapped into memory."""
    with path.open("rb") as file:
        layout = read_layout(file.fileno())
    mapped = np.memmap(path, dtype=np.uint8, mode="r")
    for entry in layout.entries.values():
        yield entry.name, mapped[layout.data_begin + entry.begin : layout.data_begin + entry.end]


def _advance_file(
    name: str, source_path: Path, target_path: Path, patches: Mapping[str, list[_Patch]], stop: threading.Event
) -> pb.Shard:
    source = np.memmap(source_path, dtype=np.uint8, mode="r")
    target = np.memmap(target_path, dtype=np.uint8, mode="r+")
    with source_path.open("rb") as file:
        layout = read_layout(file.fileno())
    data_begin = layout.data_begin
    shard = pb.Shard(name=name, size_bytes=source.size)
    target[:data_begin] = source[:data_begin]
    whole = xxhash.xxh3_128(target[:data_begin].data)
    for entry in layout.entries.values():  # in the order of the file, so that its digest is computed in the same pass
        if stop.is_set():
            raise StoppedError
        position = slice(data_begin + entry.begin, data_begin + entry.end)
        tensor = target[position]
        tensor[:] = source[position]
        digest = _advance_tensor(tensor, patches[entry.name])
        whole.update(tensor.data)
        _describe_dense(shard, entry, digest)
    shard.digest = whole.hexdigest()
    target.flush()
    with target_path.open("rb") as file:
        os.fsync(file.fileno())
    return shard


def _advance_tensor(tensor: Bytes, patches: Sequence[_Patch]) -> str:
    """Apply all deltas to one tensor. Verify every slice that a delta changed, and all slices of the last delta.

    Returns:
        xxh3-128 of the tensor, hexadecimal.
    """
    newest = patches[-1].version
    for patch in patches:
        if patch.data is None and patch.version != newest:
            continue
        data = memoryview(b"") if patch.data is None else patch.data.data
        try:
            check_slice(patch.slice, apply_slice(tensor, patch.slice, data))
        except CodecError as error:
            raise DamagedDeltaError(patch.version, f"{patch.slice.name}: {error}") from error
        if is_whole(patch.slice) and patch.version == newest:
            return patch.slice.digest
    return str(xxhash.xxh3_128(tensor.data).hexdigest())


def _allocate(path: Path, size: int) -> None:
    """Make a file of a size. On a full disk this fails; a write to a map of the file would end the process."""
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)


def _describe_dense(shard: pb.Shard, entry: Entry, digest: str) -> None:
    shard.tensors.add(
        name=entry.name,
        dtype=entry.dtype,
        global_shape=entry.shape,
        encoding=pb.TENSOR_ENCODING_DENSE,
        digest=digest,
    )


def _with_shards(described: pb.Manifest, shards: Sequence[pb.Shard]) -> pb.Manifest:
    """Return the manifest with other shards, which hold whole dense tensors."""
    manifest = pb.Manifest()
    manifest.CopyFrom(described)
    manifest.ClearField("shards")
    manifest.shards.extend(shards)
    manifest.size_bytes = sum(shard.size_bytes for shard in shards)
    manifest.digest = manifest_digest(manifest)
    return manifest
