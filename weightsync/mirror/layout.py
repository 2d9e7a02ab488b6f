"""Names of the objects that mirror a run, and what their manifests must satisfy. Pure: no clock, no I/O.

    {run}/manifests/{epoch}.{number}.{form}.json    one form of a version, created last; numbers have 20 digits, so that the
                                                    order of names is the order of versions
    {run}/parts/{epoch}.{number}.{form}/{digest}    a part of a shard's file, named after the xxh3-128 of its bytes
    {run}/pins/{epoch}.{number}                     keeps a version from being pruned, whatever the object contains

Only pins are ever overwritten with other bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import xxhash
from google.protobuf import json_format

from sluice.v1 import mirror_pb2
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.format.manifest import ManifestError, run_resource
from weightsync.service.chain import Form, Forms, VersionForm, Versions
from weightsync.service.store import form_of

PART_BYTES = 16 << 20
"""Bytes of a part. An interrupted transfer repeats at most one part; the number of requests is low enough that their price is
negligible."""

LARGEST_MANIFEST_BYTES = 64 << 20
"""More than any manifest that a push may commit. A larger object is not read."""

_LARGEST_PART_BYTES = 256 << 20
"""Most bytes of a part that are read into memory, whatever the manifest says."""

_NUMBER = "([0-9]{20})"
_STEP = rf"{_NUMBER}\.{_NUMBER}\.({'|'.join(form.value for form in Form)})"
_MANIFEST = re.compile(rf"{_STEP}\.json")
_PART = re.compile(rf"{_STEP}/([0-9a-f]{{32}})")
_DIGEST = re.compile(r"[0-9a-f]{32}")


def manifests_folder(run: str) -> str:
    """Return the folder of a run's manifests."""
    return f"{run}/manifests/"


def parts_folder(run: str, step: VersionForm | None = None) -> str:
    """Return the folder of the parts of one form, or of all forms of a run if `step` is None."""
    return f"{run}/parts/" if step is None else f"{run}/parts/{_stem(step)}/"


def pins_folder(run: str) -> str:
    """Return the folder of a run's pins."""
    return f"{run}/pins/"


def manifest_name(run: str, step: VersionForm) -> str:
    """Return the name of a form's manifest."""
    return f"{manifests_folder(run)}{_stem(step)}.json"


def part_name(run: str, step: VersionForm, digest: str) -> str:
    """Return the name of a part of a form's shard."""
    return f"{parts_folder(run, step)}{digest}"


def pin_name(run: str, version: Version) -> str:
    """Return the name of the object that keeps a version."""
    return f"{pins_folder(run)}{version}"


def parse_manifest_name(run: str, name: str) -> VersionForm | None:
    """Return the form whose manifest has this name; None if it is not the name of a manifest."""
    match = _MANIFEST.fullmatch(name.removeprefix(manifests_folder(run)))
    return None if match is None else VersionForm(Version(int(match[1]), int(match[2])), Form(match[3]))


def parse_part_name(run: str, name: str) -> tuple[VersionForm, str] | None:
    """Return the form and the digest of the part that has this name; None if it is not the name of a part."""
    match = _PART.fullmatch(name.removeprefix(parts_folder(run)))
    return None if match is None else (VersionForm(Version(int(match[1]), int(match[2])), Form(match[3])), match[4])


def parse_pin_name(run: str, name: str) -> Version | None:
    """Return the version that a pin keeps; None if its name does not name a version."""
    try:
        return Version.parse(name.removeprefix(pins_folder(run)))
    except ValueError:
        return None


def _stem(step: VersionForm) -> str:
    return f"{step.version.epoch:020d}.{step.version.number:020d}.{step.form.value}"


def cut(size: int, part_bytes: int) -> list[tuple[int, int]]:
    """Return where each part of a file begins and ends."""
    return [(begin, min(begin + part_bytes, size)) for begin in range(0, size, part_bytes)]


def digest_of(data: bytes | memoryview) -> str:
    """Return the xxh3-128 of bytes, hexadecimal."""
    return xxhash.xxh3_128(data).hexdigest()


def part_sizes(mirrored: mirror_pb2.MirroredForm) -> dict[str, int]:
    """Return the size of each part of a form that passed `read_manifest`, by digest."""
    sizes = {}
    for shard, parts in zip(mirrored.manifest.shards, mirrored.shards, strict=True):
        for (begin, end), digest in zip(cut(shard.size_bytes, mirrored.part_bytes), parts.parts, strict=True):
            sizes[digest] = end - begin
    return sizes


def write_manifest(mirrored: mirror_pb2.MirroredForm) -> bytes:
    """Return the content of a manifest's object."""
    return json_format.MessageToJson(mirrored, preserving_proto_field_name=True, indent=None).encode()


def read_manifest(run: str, step: VersionForm, data: bytes) -> mirror_pb2.MirroredForm:
    """Read the content of a manifest's object.

    The tensors in the manifest are checked later, at the commit, as those of a push are.

    Raises:
        ManifestError: if it is damaged, or belongs to another form or run.
    """
    mirrored = mirror_pb2.MirroredForm()
    try:
        json_format.Parse(data, mirrored, ignore_unknown_fields=True)
    except (json_format.ParseError, UnicodeDecodeError) as error:
        raise ManifestError(f"not a manifest: {error}") from error
    manifest = mirrored.manifest
    found = VersionForm(Version.from_proto(manifest.version), form_of(manifest))
    if found != step or manifest.run != run_resource(run):
        raise ManifestError(
            f"it is that of {found.form.value} {found.version} of {manifest.run}, not of {step.form.value} {step.version}"
        )
    if not 0 < mirrored.part_bytes <= _LARGEST_PART_BYTES:
        raise ManifestError(f"its parts have {mirrored.part_bytes} bytes, expected 1 to {_LARGEST_PART_BYTES}")
    if [shard.name for shard in manifest.shards] != [shard.name for shard in mirrored.shards]:
        raise ManifestError("it does not name the same shards twice")
    for shard, parts in zip(manifest.shards, mirrored.shards, strict=True):
        if len(parts.parts) != -(-shard.size_bytes // mirrored.part_bytes):
            raise ManifestError(f"shard {shard.name} of {shard.size_bytes} bytes has {len(parts.parts)} parts")
        if not all(_DIGEST.fullmatch(digest) for digest in parts.parts):
            raise ManifestError(f"a part of shard {shard.name} has a name that is no digest")
    return mirrored


def describe(manifests: Mapping[VersionForm, pb.Manifest]) -> Versions:
    """Return the forms of each version, as plans need them."""
    versions: dict[Version, Forms] = {}
    for step, manifest in sorted(manifests.items(), key=lambda item: (item[0].version, item[0].form is Form.DELTA)):
        known = versions.get(step.version)
        sizes = {} if known is None else {Form.DENSE: known.dense_bytes, Form.ADAPTER: known.adapter_bytes}
        sizes[step.form] = manifest.size_bytes
        versions[step.version] = Forms(
            digest=manifest.digest,
            dense_bytes=sizes.get(Form.DENSE),
            delta_bytes=sizes.get(Form.DELTA),
            adapter_bytes=sizes.get(Form.ADAPTER),
            base=Version.from_proto(manifest.base) if manifest.HasField("base") else None,
            copy_bytes=0 if step.form is Form.ADAPTER else manifest.dense_bytes,
        )
    return versions
