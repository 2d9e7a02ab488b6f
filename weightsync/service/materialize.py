"""Makes the dense form of a version: copies an older one and applies deltas, tensor by tensor. Blocking, for a thread.

Each tensor is copied, brought up to date and hashed while it is in the cache; memory holds no more than the slice at hand,
the rest is the kernel's to write out.
"""

from __future__ import annotations

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
from weightsync.codec import CodecError, Encoding, apply
from weightsync.format.dtypes import DTYPES, all_finite
from weightsync.format.layout import HEADER_LENGTH_BYTES, Entry, LayoutError, parse_header
from weightsync.format.manifest import box, entry_name, is_whole, manifest_digest
from weightsync.service.stored import StoredForm

__all__ = ["DamagedDeltaError", "StoppedError", "materialize"]

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
    """The work was given up because it was told to."""


@dataclass(frozen=True, slots=True)
class _Patch:
    """What one delta does to one slice.

    Attributes:
        version: Version that the delta leads to.
        slice: The slice.
        data: Its encoded bytes; None where it is unchanged.
    """

    version: Version
    slice: pb.TensorSlice
    data: Bytes | None


def materialize(source: StoredForm, deltas: Sequence[StoredForm], building: Path, stop: threading.Event) -> pb.Manifest:
    """Write the files of a dense form; on the disk when this returns.

    Args:
        source: The dense form to start from.
        deltas: What to apply, oldest first; at least one.
        building: An empty directory.
        stop: Ends the work early.

    Returns:
        The manifest of the dense form.

    Raises:
        DamagedDeltaError: if the bytes are not those that a delta's manifest describes, or not finite.
        StoppedError: if it was told to stop.
        OSError: if the disk does not take it.
    """
    patches = _patches(deltas)
    manifest = pb.Manifest()
    manifest.CopyFrom(deltas[-1].manifest)
    manifest.kind = pb.VERSION_KIND_ANCHOR
    manifest.ClearField("base")
    manifest.ClearField("shards")
    targets = {shard.name: building / source.files[shard.name].name for shard in source.manifest.shards}
    for shard in source.manifest.shards:
        _allocate(targets[shard.name], shard.size_bytes)
    for shard in source.manifest.shards:
        manifest.shards.append(_advance_file(shard.name, source.files[shard.name], targets[shard.name], patches, stop))
    manifest.size_bytes = sum(shard.size_bytes for shard in manifest.shards)
    manifest.digest = manifest_digest(manifest)
    return manifest


def _allocate(path: Path, size: int) -> None:
    """On a full disk this fails; a write to a map of the file would end the process."""
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)


def _patches(deltas: Sequence[StoredForm]) -> Mapping[str, list[_Patch]]:
    """What happens to each tensor, in order."""
    patches: defaultdict[str, list[_Patch]] = defaultdict(list)
    for delta in deltas:
        version = Version.from_proto(delta.manifest.version)
        for shard in delta.manifest.shards:
            try:
                data = dict(_entries(delta.files[shard.name]))
                for tensor in shard.tensors:
                    unchanged = tensor.encoding == pb.TENSOR_ENCODING_UNCHANGED
                    patches[tensor.name].append(
                        _Patch(version, tensor, None if unchanged else data[entry_name(tensor)])
                    )
            except (LayoutError, KeyError) as error:
                raise DamagedDeltaError(version, f"shard {shard.name} is damaged on disk: {error}") from error
    return dict(patches)


def _entries(path: Path) -> Iterator[tuple[str, Bytes]]:
    """The entries of a safetensors file by name, mapped."""
    mapped = np.memmap(path, dtype=np.uint8, mode="r")
    entries, data_begin = _layout(mapped)
    for entry in entries:
        yield entry.name, mapped[data_begin + entry.begin : data_begin + entry.end]


def _layout(mapped: Bytes) -> tuple[list[Entry], int]:
    data_begin = HEADER_LENGTH_BYTES + int.from_bytes(mapped[:HEADER_LENGTH_BYTES].tobytes(), "little")
    return parse_header(mapped[HEADER_LENGTH_BYTES:data_begin].tobytes()), data_begin


def _advance_file(
    name: str, source_path: Path, target_path: Path, patches: Mapping[str, list[_Patch]], stop: threading.Event
) -> pb.Shard:
    source = np.memmap(source_path, dtype=np.uint8, mode="r")
    target = np.memmap(target_path, dtype=np.uint8, mode="r+")
    entries, data_begin = _layout(source)
    shard = pb.Shard(name=name, size_bytes=source.size)
    target[:data_begin] = source[:data_begin]
    whole = xxhash.xxh3_128(target[:data_begin].data)
    for entry in entries:  # in the order of the file, so that its digest comes along
        if stop.is_set():
            raise StoppedError
        position = slice(data_begin + entry.begin, data_begin + entry.end)
        tensor = target[position]
        tensor[:] = source[position]
        digest = _advance_tensor(tensor, entry, patches[entry.name])
        whole.update(tensor.data)
        shard.tensors.add(
            name=entry.name,
            dtype=entry.dtype,
            global_shape=entry.shape,
            encoding=pb.TENSOR_ENCODING_DENSE,
            digest=digest,
        )
    shard.digest = whole.hexdigest()
    target.flush()
    with target_path.open("rb") as file:
        os.fsync(file.fileno())
    return shard


def _advance_tensor(tensor: Bytes, entry: Entry, patches: Sequence[_Patch]) -> str:
    """Apply all deltas to one tensor; every slice that a delta changed is verified, and all slices of the last one.

    Returns:
        xxh3-128 of the tensor, hexadecimal.
    """
    newest = patches[-1].version
    for patch in patches:
        if patch.data is None and patch.version != newest:
            continue
        try:
            found, finite = _advance_slice(tensor, entry, patch)
        except CodecError as error:
            raise DamagedDeltaError(patch.version, f"{entry.name} cannot be decoded: {error}") from error
        if found != patch.slice.digest:
            raise DamagedDeltaError(
                patch.version, f"{entry.name} has digest {found} after applying, announced was {patch.slice.digest}"
            )
        if not finite:
            raise DamagedDeltaError(patch.version, f"{entry.name} has NaN or infinite values after applying")
        if is_whole(patch.slice) and patch.version == newest:
            return found
    return str(xxhash.xxh3_128(tensor.data).hexdigest())


def _advance_slice(tensor: Bytes, entry: Entry, patch: _Patch) -> tuple[str, bool]:
    """Apply one patch; gives the digest of the slice's bytes, and whether they are finite."""
    where, dtype = box(patch.slice), DTYPES[entry.dtype]
    region = tuple(slice(offset, offset + size) for offset, size in zip(where.offsets, where.sizes, strict=True))
    part = tensor.reshape(*entry.shape, dtype.size)[region]
    flat = part.reshape(-1)  # a view where the slice is contiguous, else a copy
    if patch.data is not None:
        encoding = Encoding(patch.slice.encoding or Encoding.DENSE)
        if flat.size:
            apply(encoding, patch.data.data, flat, entry.dtype)
        if not np.shares_memory(flat, part):
            part[...] = flat.reshape(part.shape)
    return str(xxhash.xxh3_128(flat.data).hexdigest()), all_finite(flat.data, dtype)
