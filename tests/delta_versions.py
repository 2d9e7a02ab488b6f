"""Deltas as a trainer pushes them, made by hand."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from weightsync_stack import RESOURCE, ShardSource, Stack

from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.codec.slices import encode
from weightsync.format.manifest import manifest_digest


class DeltaSource(ShardSource):
    """The shard of a delta: what changed, dense or encoded.

    Args:
        name: The shard's name.
        tensors: The tensors as they are.
        base: The same tensors in the version before.
        encoded: Whether changed tensors are encoded; else they travel dense.
    """

    def __init__(
        self, name: str, tensors: Mapping[str, torch.Tensor], base: Mapping[str, torch.Tensor], *, encoded: bool = False
    ) -> None:
        whole = ShardSource(name, tensors)
        self.shard = whole.describe(whole.tensor_digests())
        entries: dict[str, torch.Tensor] = {}
        for tensor in self.shard.tensors:
            new, old = _bytes(tensors[tensor.name]), _bytes(base[tensor.name])
            if encoded:
                found = encode(new, old, tensor.dtype)
                tensor.encoding = pb.TensorEncoding.ValueType(found.encoding)
                if tensor.encoding in {pb.TENSOR_ENCODING_DENSE_ZSTD, pb.TENSOR_ENCODING_DELTA}:
                    entries[tensor.name] = torch.frombuffer(bytearray(found.data), dtype=torch.uint8)
            elif np.array_equal(new, old):
                tensor.encoding = pb.TENSOR_ENCODING_UNCHANGED
            if tensor.encoding == pb.TENSOR_ENCODING_DENSE:
                entries[tensor.name] = tensors[tensor.name]
        super().__init__(name, entries)
        self.shard.size_bytes = self.size

    def describe(self, digests: Mapping[str, str] | None = None) -> pb.Shard:
        return self.shard

    def manifest(self, version: Version, base: Version) -> pb.Manifest:
        manifest = pb.Manifest(
            run=RESOURCE,
            version=version.to_proto(),
            kind=pb.VERSION_KIND_DELTA,
            base=base.to_proto(),
            shards=[self.shard],
        )
        manifest.digest = manifest_digest(manifest)
        return manifest


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


async def push_delta(
    stack: Stack,
    version: Version,
    base: Version,
    tensors: Mapping[str, torch.Tensor],
    before: Mapping[str, torch.Tensor],
    *,
    encoded: bool = False,
) -> pb.CommitVersionResponse:
    """Push and commit a delta of one shard."""
    source = DeltaSource("model", tensors, before, encoded=encoded)
    if version not in await stack.visible():
        await stack.push_shard(source, version)
    return await stack.commit(source.manifest(version, base))


async def update_path(stack: Stack, version: Version | None, held: Version | None) -> list[tuple[Version, int]]:
    """Versions and kinds on the way."""
    request = pb.GetUpdatePathRequest(
        run=RESOURCE,
        version=None if version is None else version.to_proto(),
        held=None if held is None else held.to_proto(),
    )
    return [
        (Version.from_proto(step.manifest.version), step.manifest.kind)
        async for step in stack.delivery.GetUpdatePath(request, timeout=30)
    ]
