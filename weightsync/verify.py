"""What a commit checks before a version may become visible: pure comparison of what was announced with what came in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from sluice.v1 import weightsync_pb2 as pb
from weightsync.manifest import DenseTensor, box, check_manifest, entry_name, is_whole, version_digest
from weightsync.scan import ScannedTensor

__all__ = [
    "DigestMismatchError",
    "IncompleteError",
    "NonFiniteError",
    "ReceivedShard",
    "complete_manifest",
    "whole_tensors",
]

_NAMED_IN_MESSAGE = 5
"""How many tensors or shards a message names before it says how many more there are."""


class IncompleteError(Exception):
    """Shards or entries are missing."""


class NonFiniteError(Exception):
    """Some values are NaN or infinite."""


class DigestMismatchError(Exception):
    """The bytes are not those that the manifest describes."""


class ReceivedShard(Protocol):
    """What is known of an uploaded file."""

    size: int
    digest: str

    @property
    def complete(self) -> bool:
        """Whether the file is whole and on disk."""
        ...

    @property
    def tensors(self) -> Mapping[str, ScannedTensor]:
        """Its entries by name."""
        ...


def complete_manifest(announced: pb.Manifest, received: Mapping[str, ReceivedShard]) -> pb.Manifest:
    """Check the announced version against the uploaded files.

    Args:
        announced: The manifest of the commit; digests may be left out.
        received: The uploaded files by shard name.

    Returns:
        The manifest with every digest and size filled in. The version's own digest stays empty where tensors are cut
        into slices and the announcement has none: it is known once they are assembled.

    Raises:
        ManifestError: if the announcement contradicts itself.
        IncompleteError: if shards are missing or do not hold what was announced.
        DigestMismatchError: if a digest or size differs.
        NonFiniteError: if a value is NaN or infinite.
    """
    check_manifest(announced)
    manifest = pb.Manifest()
    manifest.CopyFrom(announced)
    missing = [shard.name for shard in manifest.shards if not _is_complete(received.get(shard.name))]
    if missing:
        raise IncompleteError(f"shards missing: {_some(missing)}; push them, then commit again")
    for shard in manifest.shards:
        _complete_shard(shard, received[shard.name])
    _check_finite(received[shard.name] for shard in manifest.shards)
    manifest.size_bytes = sum(shard.size_bytes for shard in manifest.shards)
    manifest.dense_bytes = sum(
        tensor.entry.size for shard in manifest.shards for tensor in received[shard.name].tensors.values()
    )
    dense = whole_tensors(manifest)
    if dense is not None:
        manifest.digest = _same("version", manifest.digest, version_digest(dense))
    return manifest


def whole_tensors(manifest: pb.Manifest) -> list[DenseTensor] | None:
    """The tensors of a version, None where some are cut into slices."""
    tensors = [tensor for shard in manifest.shards for tensor in shard.tensors]
    if not all(is_whole(tensor) for tensor in tensors):
        return None
    return [DenseTensor(each.name, each.dtype, tuple(each.global_shape), each.digest) for each in tensors]


def _is_complete(shard: ReceivedShard | None) -> bool:
    return shard is not None and shard.complete


def _complete_shard(shard: pb.Shard, received: ReceivedShard) -> None:
    shard.digest = _same(f"shard {shard.name}", shard.digest, received.digest)
    if shard.size_bytes and shard.size_bytes != received.size:
        raise DigestMismatchError(f"shard {shard.name} has {received.size} bytes, announced were {shard.size_bytes}")
    shard.size_bytes = received.size
    entries = {entry_name(tensor) for tensor in shard.tensors}
    if entries != received.tensors.keys():
        different = sorted(entries ^ received.tensors.keys())
        raise IncompleteError(f"shard {shard.name}: file and manifest disagree on the entries {_some(different)}")
    for tensor in shard.tensors:
        found = received.tensors[entry_name(tensor)]
        if (found.entry.dtype, found.entry.shape) != (tensor.dtype, box(tensor).sizes):
            raise DigestMismatchError(
                f"{tensor.name} in shard {shard.name} is {found.entry.dtype} {list(found.entry.shape)},"
                f" announced was {tensor.dtype} {list(box(tensor).sizes)}"
            )
        tensor.digest = _same(f"{tensor.name} in shard {shard.name}", tensor.digest, found.digest)
        tensor.encoding = pb.TENSOR_ENCODING_DENSE


def _check_finite(shards: Iterable[ReceivedShard]) -> None:
    broken = sorted(name for shard in shards for name, tensor in shard.tensors.items() if not tensor.finite)
    if broken:
        raise NonFiniteError(
            f"NaN or infinite values in {_some(broken)}: the version would poison the engines' caches;"
            " the trainer must skip the step that made it"
        )


def _same(what: str, announced: str, found: str) -> str:
    if announced and announced != found:
        raise DigestMismatchError(f"{what} has digest {found}, announced was {announced}; push it again")
    return found


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED_IN_MESSAGE
    return ", ".join(names[:_NAMED_IN_MESSAGE]) + (f" and {more} more" if more > 0 else "")
