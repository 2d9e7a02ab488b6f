"""Applies deltas in place to a copy of their base's file, and verifies every slice of the result. Blocking.

A chain of deltas is applied to one copy. Only the last one's digests are looked at: they cover every byte, so an error in
between shows in them.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from mmap import MADV_DONTFORK, mmap
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from sluice.v1 import weightsync_pb2 as pb
from weightsync.codec import CodecError, Encoding, apply
from weightsync.format.dtypes import DTYPES, all_finite
from weightsync.format.manifest import Box, ManifestError, box, check_manifest, manifest_digest
from weightsync.format.safetensors import LayoutError, read_layout
from weightsync.receive.delta_shard import DeltaShard
from weightsync.receive.staging import StagingError

__all__ = ["Digests", "PatchedFile", "SliceKey", "slice_digests"]

Bytes: TypeAlias = npt.NDArray[np.uint8]


class SliceKey(NamedTuple):
    """Which elements of which tensor."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


Digests: TypeAlias = Mapping[SliceKey, str]
"""xxh3-128 of the dense bytes of slices, hexadecimal, found right."""


def slice_digests(manifest: pb.Manifest) -> Digests:
    """The digests that a manifest gives, which are those of the file once it is verified."""
    return {_key(each): each.digest for shard in manifest.shards for each in shard.tensors}


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
        """Let go of the map; call it before the file gets its name."""
        self._bytes = np.empty(0, dtype=np.uint8)
        with contextlib.suppress(BufferError):  # an error under way still looks into it; the map goes with that
            self._map.close()

    def _check(self, manifest: pb.Manifest) -> None:
        """The manifest is sound, and of the same tensors as the file."""
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
        """The slice in the file, with the bytes of an element as last dimension; a view."""
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
    """The bytes of a region: a view where they lie in one piece, else a copy."""
    return np.ascontiguousarray(region).reshape(-1)


def _key(tensor: pb.TensorSlice) -> SliceKey:
    where = box(tensor)
    return SliceKey(tensor.name, where.offsets, where.sizes)
