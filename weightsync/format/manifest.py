"""Manifests: what they must satisfy, and the digest of a version. Names of runs, shards and directories.

The digest of a version is the xxh3-128 of one line per tensor, ``name dtype shape digest`` and a line feed, sorted by bytes;
the shape is written ``[2,3]``, ``[]`` for a scalar; the digest is that of the whole tensor's dense bytes. A tensor that is
cut has one line per slice, ``name dtype shape offsets sizes digest``. Which shard holds which slice does not matter.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import xxhash
from google.protobuf import json_format

from sluice.rpc import MAX_MESSAGE_BYTES
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.format.safetensors import DTYPES, BadNameError, check_tensor

MANIFEST_FILE = "manifest.json"
"""The last file to be written into a version's directory: a directory without it is no version."""

_RUN = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_SHARD = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_VERSION_DIRECTORY = re.compile(r"v(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)")
_PREFIX = "runs/"

_DIGEST_BYTES = 2 + 32
"""Bytes that a digest adds to the description of a slice without one."""

_MOST_SLICES = 4096
"""Slices that one tensor may be cut into: beyond the ranks of any trainer, and a bound on the work of checking them."""


_PLAIN = frozenset({pb.TENSOR_ENCODING_UNSPECIFIED, pb.TENSOR_ENCODING_DENSE})
_ENCODINGS = {
    False: _PLAIN,
    True: _PLAIN | {pb.TENSOR_ENCODING_DENSE_ZSTD, pb.TENSOR_ENCODING_DELTA, pb.TENSOR_ENCODING_UNCHANGED},
}
"""Encodings that a slice may have, by whether the version is a delta."""


class ManifestError(ValueError):
    """The manifest contradicts itself; the message names the tensor or shard."""


class Box(NamedTuple):
    """Where a slice lies in its tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Return the number of elements."""
        return math.prod(self.sizes)

    def overlaps(self, other: Box) -> bool:
        """Return whether some element lies in both."""
        return all(
            mine < theirs + their_size and theirs < mine + my_size
            for mine, my_size, theirs, their_size in zip(
                self.offsets, self.sizes, other.offsets, other.sizes, strict=True
            )
        )


def manifest_digest(manifest: pb.Manifest) -> str:
    """Compute the digest of a version from its manifest, in which every slice must have a digest. Return it hexadecimal."""
    lines = sorted(_digest_line(tensor) for shard in manifest.shards for tensor in shard.tensors)
    return xxhash.xxh3_128(b"".join(lines)).hexdigest()


def _digest_line(tensor: pb.TensorSlice) -> bytes:
    where = box(tensor)
    cut = [] if is_whole(tensor) else [where.offsets, where.sizes]
    numbers = " ".join(f"[{','.join(map(str, each))}]" for each in (tensor.global_shape, *cut))
    return f"{tensor.name} {tensor.dtype} {numbers} {tensor.digest}\n".encode()


def tensor_slices(manifest: pb.Manifest) -> Iterator[pb.TensorSlice]:
    """Yield the slices of all shards of a version."""
    for shard in manifest.shards:
        yield from shard.tensors


def entry_name(tensor: pb.TensorSlice) -> str:
    """Return the slice's name in its shard's file."""
    return tensor.entry or tensor.name


def box(tensor: pb.TensorSlice) -> Box:
    """Return where a slice lies. Fill in the offsets and sizes that a whole tensor leaves out."""
    rank = len(tensor.global_shape)
    offsets = tuple(tensor.offsets) or (0,) * rank
    sizes = tuple(tensor.sizes) or tuple(tensor.global_shape)
    return Box(offsets, sizes)


def is_whole(tensor: pb.TensorSlice) -> bool:
    """Return whether the slice is the whole tensor."""
    return box(tensor).sizes == tuple(tensor.global_shape)


def check_manifest(manifest: pb.Manifest) -> None:
    """Check names, types, and that the slices cover every tensor exactly; raise ManifestError."""
    if not manifest.shards:
        raise ManifestError("a version without shards")
    slices: dict[str, list[pb.TensorSlice]] = defaultdict(list)
    names: set[str] = set()
    encodings = _ENCODINGS[manifest.kind == pb.VERSION_KIND_DELTA]
    for shard in manifest.shards:
        _check_shard(shard, encodings)
        if shard.name in names:
            raise ManifestError(f"shard {shard.name} is listed twice")
        names.add(shard.name)
        for tensor in shard.tensors:
            slices[tensor.name].append(tensor)
    for name, parts in slices.items():
        _check_cover(name, parts)


def check_adapter_config(manifest: pb.Manifest) -> None:
    """Check that an adapter comes with its configuration, and nothing else does; raise ManifestError."""
    if manifest.kind != pb.VERSION_KIND_ADAPTER:
        if manifest.adapter_config:
            raise ManifestError("only an adapter has an adapter_config")
        return
    try:
        config = json.loads(manifest.adapter_config)
    except ValueError as error:
        raise ManifestError(f"adapter_config is no JSON ({error}): give PEFT's adapter_config.json") from error
    if not isinstance(config, dict):
        raise ManifestError("adapter_config is no JSON object: give PEFT's adapter_config.json")


def _check_shard(shard: pb.Shard, encodings: Collection[pb.TensorEncoding.ValueType]) -> None:
    try:
        check_shard(shard.name)
        for tensor in shard.tensors:
            check_tensor(tensor.name)
    except BadNameError as error:
        raise ManifestError(str(error)) from error
    entries = [entry_name(tensor) for tensor in shard.tensors]
    if len(set(entries)) != len(entries):
        raise ManifestError(f"shard {shard.name} names an entry twice")
    for tensor in shard.tensors:
        _check_slice(tensor, encodings)


def _check_slice(tensor: pb.TensorSlice, encodings: Collection[pb.TensorEncoding.ValueType]) -> None:
    if tensor.dtype not in DTYPES:
        raise ManifestError(f"tensor {tensor.name} has data type {tensor.dtype!r}; known are {', '.join(DTYPES)}")
    if tensor.encoding not in encodings:
        raise ManifestError(
            f"tensor {tensor.name} has encoding {tensor.encoding}; only the slices of a delta are encoded, as"
            " sluice.v1.TensorEncoding lists"
        )
    offsets, sizes = box(tensor)
    shape = tensor.global_shape
    if len(offsets) != len(shape) or len(sizes) != len(shape):
        raise ManifestError(f"a slice of {tensor.name} has another number of dimensions than the tensor")
    if any(offset + size > extent for offset, size, extent in zip(offsets, sizes, shape, strict=True)):
        raise ManifestError(f"a slice of {tensor.name} reaches beyond its shape {list(shape)}")


def _check_cover(name: str, slices: Sequence[pb.TensorSlice]) -> None:
    """Check that slices cover a tensor exactly: disjoint boxes inside it whose volumes add up to its own."""
    kinds = {(part.dtype, tuple(part.global_shape)) for part in slices}
    if len(kinds) > 1:
        raise ManifestError(f"slices of {name} disagree on its data type or shape")
    if len(slices) > _MOST_SLICES:
        raise ManifestError(f"{name} is cut into {len(slices)} slices; at most {_MOST_SLICES} are taken")
    boxes = sorted(box(part) for part in slices)
    active: list[Box] = []
    for each in boxes:
        # Sorted by the first dimension: a box that ended before this one begins cannot overlap a later one either.
        active = [other for other in active if not each.offsets or other.offsets[0] + other.sizes[0] > each.offsets[0]]
        if any(each.overlaps(other) for other in active):
            raise ManifestError(f"slices of {name} overlap at {list(each.offsets)}")
        active.append(each)
    volume, covered = math.prod(slices[0].global_shape), sum(each.volume for each in boxes)
    if covered != volume:
        raise ManifestError(f"slices of {name} cover {covered} of its {volume} elements")


def check_sendable(shards: Iterable[pb.Shard]) -> None:
    """Check that the manifest of these shards fits into a message, before anything is sent; raise ManifestError."""
    sizes = [(shard.ByteSize(), len(shard.tensors)) for shard in shards]
    needed = sum(size + _DIGEST_BYTES * count for size, count in sizes)
    if needed > MAX_MESSAGE_BYTES:
        slices = sum(count for _, count in sizes)
        raise ManifestError(
            f"the manifest of {slices} slices takes {needed} bytes, a message at most {MAX_MESSAGE_BYTES}:"
            " publish fused tensors, such as all experts of a layer in one, or cut them into fewer slices"
        )


def without_tensors(manifest: pb.Manifest) -> pb.Manifest:
    """Return a copy for listings, whose shards do not list their tensors."""
    short = pb.Manifest()
    short.CopyFrom(manifest)
    for shard in short.shards:
        del shard.tensors[:]
    return short


def to_json(manifest: pb.Manifest) -> str:
    """Return the manifest as protobuf-JSON."""
    return json_format.MessageToJson(manifest, preserving_proto_field_name=True, indent=1) + "\n"


def from_json(text: str) -> pb.Manifest:
    """Read protobuf-JSON; raise ManifestError if it is something else."""
    try:
        return json_format.Parse(text, pb.Manifest(), ignore_unknown_fields=True)
    except json_format.ParseError as error:
        raise ManifestError(f"not a manifest: {error}") from error


def run_resource(run: str) -> str:
    """Return the resource name of a run: ``runs/{run}``."""
    return f"{_PREFIX}{run}"


def parse_run(resource: str) -> str:
    """Return the run's name in ``runs/{run}``; raise BadNameError if it has another form."""
    run = resource.removeprefix(_PREFIX)
    if not resource.startswith(_PREFIX) or not _RUN.fullmatch(run):
        raise BadNameError(
            f"{resource!r} is not a run; expected runs/NAME, NAME of lower-case letters, digits, '.', '_', '-',"
            " beginning with a letter or digit, at most 63 characters"
        )
    return run


def check_shard(name: str) -> None:
    """Raise BadNameError if a shard's name could leave its directory or be hidden in it."""
    if not _SHARD.fullmatch(name):
        raise BadNameError(
            f"{name!r} is not a shard name; allowed are letters, digits, '.', '_', '-', not beginning with '.',"
            " at most 128 characters"
        )


def version_directory(version: Version) -> str:
    """Return the name of a version's directory: ``v{epoch}.{number}``."""
    return f"v{version}"


def parse_version_directory(name: str) -> Version | None:
    """Return the version that a directory is named after; None if its name is not a version's."""
    match = _VERSION_DIRECTORY.fullmatch(name)
    return Version(int(match[1]), int(match[2])) if match else None
