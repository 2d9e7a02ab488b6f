"""The forms of a version as they lie on disk: their files and manifests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.format.chunks import ChunkSums
from weightsync.format.manifest import MANIFEST_FILE, ManifestError, from_json
from weightsync.service.chain import Form, Forms

__all__ = [
    "PUSHED_FILE",
    "StoredForm",
    "StoredVersion",
    "file_names",
    "form_of",
    "read_form",
    "stored_form",
    "weight_index",
]

PUSHED_FILE = "pushed.json"
"""Manifest as the trainer pushed it, kept where the shards were assembled into another file."""

_FORMS = {
    pb.VERSION_KIND_ANCHOR: Form.DENSE,
    pb.VERSION_KIND_DELTA: Form.DELTA,
    pb.VERSION_KIND_ADAPTER: Form.ADAPTER,
}


@dataclass(frozen=True, slots=True)
class StoredForm:
    """One form of a version.

    Attributes:
        directory: Where it lies.
        manifest: What its files are, as given out.
        pushed: What was pushed; differs from `manifest` where slices were assembled.
        files: Its files by shard name.
        sums: Checksums of their chunks, as far as they are known.
    """

    directory: Path
    manifest: pb.Manifest
    pushed: pb.Manifest
    files: Mapping[str, Path]
    sums: dict[str, ChunkSums] = field(default_factory=dict)

    def sums_of(self, shard: str) -> ChunkSums:
        """Return the checksums of a shard's chunks."""
        if shard not in self.sums:
            size = next(each.size_bytes for each in self.manifest.shards if each.name == shard)
            self.sums[shard] = ChunkSums(size)
        return self.sums[shard]

    @property
    def form(self) -> Form:
        """Return which form it is."""
        return form_of(self.manifest)


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A version on disk, in one or more forms.

    Attributes:
        version: Which one.
        dense: Its whole tensors: a directory that `transformers` loads.
        delta: Its difference from another version.
        adapter: Its PEFT directory, if it is an adapter.
    """

    version: Version
    dense: StoredForm | None = None
    delta: StoredForm | None = None
    adapter: StoredForm | None = None

    def form(self, form: Form) -> StoredForm | None:
        """Return the named form, None if it is not there."""
        return {Form.DENSE: self.dense, Form.DELTA: self.delta, Form.ADAPTER: self.adapter}[form]

    def with_form(self, stored: StoredForm) -> StoredVersion:
        """Return the version with a form added."""
        return StoredVersion(
            self.version,
            dense=stored if stored.form is Form.DENSE else self.dense,
            delta=stored if stored.form is Form.DELTA else self.delta,
            adapter=stored if stored.form is Form.ADAPTER else self.adapter,
        )

    @property
    def announced(self) -> StoredForm:
        """Return the form that is announced: the smallest."""
        form = self.delta or self.adapter or self.dense
        if form is None:
            raise AssertionError("a version without a form is not stored")
        return form

    @property
    def commit_ns(self) -> int:
        """Return when it was committed, in nanoseconds since 1970."""
        return self.manifest.commit_time.ToNanoseconds()

    @property
    def manifest(self) -> pb.Manifest:
        """Return the manifest that is announced."""
        return self.announced.manifest

    @property
    def pushed(self) -> pb.Manifest:
        """Return what the trainer pushed."""
        return self.announced.pushed

    def forms(self) -> Forms:
        """Return what the ledger has to know."""
        manifest = self.manifest
        return Forms(
            digest=manifest.digest,
            dense_bytes=_size(self.dense),
            delta_bytes=_size(self.delta),
            adapter_bytes=_size(self.adapter),
            base=Version.from_proto(manifest.base) if manifest.HasField("base") else None,
            copy_bytes=0 if self.adapter else manifest.dense_bytes,
        )


def _size(form: StoredForm | None) -> int | None:
    return None if form is None else form.manifest.size_bytes


def form_of(manifest: pb.Manifest) -> Form:
    """Return the form that a manifest describes.

    Raises:
        ManifestError: if it names no kind.
    """
    try:
        return _FORMS[manifest.kind]
    except KeyError:
        raise ManifestError("the version has no kind: set it to ANCHOR, DELTA or ADAPTER") from None


def file_names(manifest: pb.Manifest) -> dict[str, str]:
    """Names of a form's files by shard name: those of Hugging Face and PEFT where there are such."""
    form, names = form_of(manifest), [shard.name for shard in manifest.shards]
    if form is Form.DELTA:
        return {name: f"{name}.safetensors" for name in names}
    stem, count = ("model" if form is Form.DENSE else "adapter_model"), len(names)
    if count == 1:
        return {names[0]: f"{stem}.safetensors"}
    return {name: f"{stem}-{index + 1:05d}-of-{count:05d}.safetensors" for index, name in enumerate(names)}


def weight_index(manifest: pb.Manifest) -> str:
    """Return the JSON text by which `transformers` finds the tensors of several files."""
    files = file_names(manifest)
    weight_map = {tensor.name: files[shard.name] for shard in manifest.shards for tensor in shard.tensors}
    return json.dumps({"metadata": {"total_size": manifest.dense_bytes}, "weight_map": weight_map}, indent=1)


def read_form(version: Version, directory: Path, *, delta: bool) -> StoredForm:
    """Read a form's directory.

    Raises:
        ManifestError: if it is not whole, another version's, or a delta where none is expected or the reverse.
        OSError: if it cannot be read.
    """
    manifest = from_json((directory / MANIFEST_FILE).read_text())
    if Version.from_proto(manifest.version) != version:
        raise ManifestError(f"the manifest is that of version {Version.from_proto(manifest.version)}")
    if (form_of(manifest) is Form.DELTA) != delta:
        raise ManifestError(f"a {form_of(manifest).value} form does not belong here")
    pushed_path = directory / PUSHED_FILE
    pushed = from_json(pushed_path.read_text()) if pushed_path.exists() else manifest
    form = stored_form(directory, manifest, pushed)
    for shard in manifest.shards:
        path = form.files[shard.name]
        if path.stat().st_size != shard.size_bytes:
            raise ManifestError(f"{path.name} has {path.stat().st_size} bytes, expected {shard.size_bytes}")
    return form


def stored_form(
    directory: Path, manifest: pb.Manifest, pushed: pb.Manifest, sums: Mapping[str, ChunkSums] | None = None
) -> StoredForm:
    """Describe a form that lies in a directory.

    Args:
        directory: Where it lies.
        manifest: What its files are.
        pushed: What was pushed.
        sums: Checksums of its shards' chunks, where they are known.
    """
    files = {shard: directory / name for shard, name in file_names(manifest).items()}
    return StoredForm(directory, manifest, pushed, files, dict(sums or {}))
