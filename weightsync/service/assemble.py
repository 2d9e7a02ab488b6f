"""Puts slices from many shards together into one file of whole tensors."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from sluice.v1 import weightsync_pb2 as pb
from weightsync.format.dtypes import DTYPES
from weightsync.format.layout import Entry, place, render_header
from weightsync.format.manifest import DenseTensor, box, entry_name, version_digest
from weightsync.service.incoming import IncomingShard

__all__ = ["ASSEMBLED_SHARD", "assemble"]

ASSEMBLED_SHARD = "model"
"""Name of the shard that an assembled version consists of."""


def assemble(pushed: pb.Manifest, shards: Mapping[str, IncomingShard], target: Path) -> pb.Manifest:
    """Write one safetensors file of whole tensors.

    Args:
        pushed: A manifest that passed `complete_manifest`.
        shards: Its uploaded files by name.
        target: The file to write; on disk when this returns.

    Returns:
        The manifest of the assembled version, digests filled in.
    """
    shapes = {each.name: (each.dtype, tuple(each.global_shape)) for shard in pushed.shards for each in shard.tensors}
    entries = {each.name: each for each in place([(name, *shapes[name]) for name in sorted(shapes)])}
    header = render_header(list(entries.values()), {"format": "pt"})
    size = len(header) + sum(entry.size for entry in entries.values())
    with target.open("w+b") as file:
        os.posix_fallocate(
            file.fileno(), 0, size
        )  # on a full disk this fails; a write to the map would end the process
        with mmap.mmap(file.fileno(), size) as mapped:
            mapped[: len(header)] = header
            for shard in pushed.shards:
                _copy_slices(shard, shards[shard.name], mapped, len(header), entries)
            digests = {name: _digest(mapped, len(header), entry) for name, entry in entries.items()}
            file_digest = xxhash.xxh3_128(memoryview(mapped)).hexdigest()
            mapped.flush()
        os.fsync(file.fileno())
    return _manifest(pushed, entries, digests, pb.Shard(name=ASSEMBLED_SHARD, size_bytes=size, digest=file_digest))


def _copy_slices(
    shard: pb.Shard, received: IncomingShard, target: mmap.mmap, data_begin: int, entries: Mapping[str, Entry]
) -> None:
    source = np.memmap(received.path, dtype=np.uint8, mode="r")
    for tensor in shard.tensors:
        found = received.tensors[entry_name(tensor)].entry
        if not found.size:
            continue
        where = box(tensor)
        width = DTYPES[tensor.dtype].size
        begin = received.data_begin + found.begin
        part = source[begin : begin + found.size].reshape(*where.sizes, width)
        whole = _elements(target, data_begin, entries[tensor.name])
        region = tuple(
            slice(offset, offset + extent) for offset, extent in zip(where.offsets, where.sizes, strict=True)
        )
        whole[region] = part
        del whole  # the map cannot be closed while an array looks into it


def _elements(target: mmap.mmap, data_begin: int, entry: Entry) -> npt.NDArray[np.uint8]:
    """The tensor's bytes, as an array of its shape with the bytes of an element as last dimension."""
    flat = np.frombuffer(target, dtype=np.uint8, count=entry.size, offset=data_begin + entry.begin)
    return flat.reshape(*entry.shape, DTYPES[entry.dtype].size)


def _digest(mapped: mmap.mmap, data_begin: int, entry: Entry) -> str:
    with memoryview(mapped) as view, view[data_begin + entry.begin : data_begin + entry.end] as part:
        return str(xxhash.xxh3_128(part).hexdigest())


def _manifest(
    pushed: pb.Manifest, entries: Mapping[str, Entry], digests: Mapping[str, str], shard: pb.Shard
) -> pb.Manifest:
    for entry in entries.values():
        shard.tensors.add(
            name=entry.name,
            dtype=entry.dtype,
            global_shape=entry.shape,
            encoding=pb.TENSOR_ENCODING_DENSE,
            digest=digests[entry.name],
        )
    manifest = pb.Manifest()
    manifest.CopyFrom(pushed)
    del manifest.shards[:]
    manifest.shards.append(shard)
    manifest.size_bytes = shard.size_bytes
    manifest.dense_bytes = sum(entry.size for entry in entries.values())
    manifest.digest = version_digest(
        DenseTensor(entry.name, entry.dtype, entry.shape, digests[entry.name]) for entry in entries.values()
    )
    return manifest
