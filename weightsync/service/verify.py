"""What a commit checks before a version may become visible: pure comparison of what was announced with what came in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Protocol

from sluice.v1 import weightsync_pb2 as pb
from weightsync.format.manifest import ManifestError, box, check_manifest, entry_name, manifest_digest
from weightsync.format.safetensors import DTYPES, ScannedTensor

__all__ = [
    "DigestMismatchError",
    "IncompleteError",
    "NonFiniteError",
    "ReceivedShard",
    "complete_manifest",
]

_ENCODED = {pb.TENSOR_ENCODING_DENSE_ZSTD, pb.TENSOR_ENCODING_DELTA}
_DIGEST = re.compile(r"[0-9a-f]{32}")

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
        """Return whether the file is whole and on disk."""
        ...

    @property
    def tensors(self) -> Mapping[str, ScannedTensor]:
        """Return its entries by name."""
        ...


def complete_manifest(
    announced: pb.Manifest, received: Mapping[str, ReceivedShard], base: pb.Manifest | None = None
) -> pb.Manifest:
    """Check the announced version against the uploaded files.

    Args:
        announced: The manifest of the commit; of dense slices, digests may be left out.
        received: The uploaded files by shard name.
        base: Manifest of the version that a delta is based on; None for other kinds.

    Returns:
        The manifest with every digest and size filled in.

    Raises:
        ManifestError: if the announcement contradicts itself, or a delta's base has other tensors.
        IncompleteError: if shards are missing or do not hold what was announced.
        DigestMismatchError: if a digest or size differs.
        NonFiniteError: if a dense value is NaN or infinite.
    """
    check_manifest(announced)
    manifest = pb.Manifest()
    manifest.CopyFrom(announced)
    missing = [shard.name for shard in manifest.shards if not _is_complete(received.get(shard.name))]
    if missing:
        raise IncompleteError(f"shards missing: {_some(missing)}; push them, then commit again")
    if base is not None:
        _check_same_model(manifest, base)
    for shard in manifest.shards:
        _complete_shard(shard, received[shard.name])
    _check_finite(received[shard.name] for shard in manifest.shards)
    manifest.size_bytes = sum(shard.size_bytes for shard in manifest.shards)
    manifest.dense_bytes = sum(
        box(tensor).volume * DTYPES[tensor.dtype].size for shard in manifest.shards for tensor in shard.tensors
    )
    manifest.digest = _same("version", manifest.digest, manifest_digest(manifest))
    return manifest


def _check_same_model(manifest: pb.Manifest, base: pb.Manifest) -> None:
    """Check that a delta has the tensors of its base, and that what it calls unchanged has the base's digest if that is known."""
    model, base_model = _model(manifest), _model(base)
    if model != base_model:
        different = sorted({name for name, _ in model.items() ^ base_model.items()})
        raise ManifestError(f"the delta and its base differ in names, types or shapes of {_some(different)}")
    digests = {(tensor.name, box(tensor)): tensor.digest for shard in base.shards for tensor in shard.tensors}
    for shard in manifest.shards:
        for tensor in shard.tensors:
            if tensor.encoding == pb.TENSOR_ENCODING_UNCHANGED:
                known = digests.get((tensor.name, box(tensor)), tensor.digest)
                tensor.digest = _same(f"unchanged {tensor.name}", tensor.digest, known)


def _model(manifest: pb.Manifest) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {
        tensor.name: (tensor.dtype, tuple(tensor.global_shape)) for shard in manifest.shards for tensor in shard.tensors
    }


def _is_complete(shard: ReceivedShard | None) -> bool:
    return shard is not None and shard.complete


def _complete_shard(shard: pb.Shard, received: ReceivedShard) -> None:
    shard.digest = _same(f"shard {shard.name}", shard.digest, received.digest)
    if shard.size_bytes and shard.size_bytes != received.size:
        raise DigestMismatchError(f"shard {shard.name} has {received.size} bytes, announced were {shard.size_bytes}")
    shard.size_bytes = received.size
    stored = [tensor for tensor in shard.tensors if tensor.encoding != pb.TENSOR_ENCODING_UNCHANGED]
    entries = {entry_name(tensor) for tensor in stored}
    if entries != received.tensors.keys():
        different = sorted(entries ^ received.tensors.keys())
        raise IncompleteError(f"shard {shard.name}: file and manifest disagree on the entries {_some(different)}")
    for tensor in stored:
        found = received.tensors[entry_name(tensor)]
        if tensor.encoding in _ENCODED:
            if found.entry.dtype != "U8" or len(found.entry.shape) != 1:
                raise ManifestError(
                    f"{tensor.name} in shard {shard.name} is encoded; its entry must be U8 of one dimension"
                )
            continue
        if (found.entry.dtype, found.entry.shape) != (tensor.dtype, box(tensor).sizes):
            raise DigestMismatchError(
                f"{tensor.name} in shard {shard.name} is {found.entry.dtype} {list(found.entry.shape)},"
                f" announced was {tensor.dtype} {list(box(tensor).sizes)}"
            )
        tensor.digest = _same(f"{tensor.name} in shard {shard.name}", tensor.digest, found.digest)
        tensor.encoding = pb.TENSOR_ENCODING_DENSE
    for tensor in shard.tensors:
        if not _DIGEST.fullmatch(tensor.digest):
            raise ManifestError(f"{tensor.name} in shard {shard.name} needs the xxh3-128 of its dense bytes")


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
