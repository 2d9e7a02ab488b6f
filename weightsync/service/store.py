"""The versions of one run on disk. Blocking; called in threads.

    <root>/v1.42/            dense form, a directory that `transformers` loads as it is: model.safetensors (or
                             model-00001-of-0000N + index), config.json, tokenizer..., manifest.json; or an adapter,
                             a directory that PEFT loads: adapter_model.safetensors, adapter_config.json, manifest.json
    <root>/.deltas/v1.43/    delta form: one file per shard, manifest.json
    <root>/.incoming/v1.44/  shards that are being pushed, and forms under construction
    <root>/.building/v1.43/  dense forms under construction that are made of deltas
    <root>/.model/           files that all dense directories share: config, tokenizer
    <root>/.interrupted/     only if versions come from an object store: shards that a restart interrupted

A form is built in a hidden directory, its manifest last, and then renamed to its visible name. Before a form is removed it is
renamed to a hidden name. A crash at any point therefore leaves only whole versions, and rubbish that the next start removes.
"""

from __future__ import annotations

import fcntl
import glob
import itertools
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

from sluice.chat_template import TEMPLATE_FILE
from sluice.host_files import remove_tree
from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.format.manifest import (
    MANIFEST_FILE,
    ManifestError,
    entry_name,
    from_json,
    is_whole,
    parse_version_directory,
    to_json,
    version_directory,
)
from weightsync.service.chain import Form, Forms, is_reachable
from weightsync.service.upload import ChunkSums, Upload, assemble

_PUSHED_FILE = "pushed.json"
"""Manifest as the trainer pushed it, kept if the shards were assembled into another file."""

_ADAPTER_CONFIG_FILE = "adapter_config.json"
"""PEFT's name for the file of an adapter's settings."""

_MODEL_SUFFIXES = {".json", ".txt", ".model", ".jinja"}
_NOT_OF_THE_MODEL = {"manifest.json", "trainer_state.json"}
_WEIGHT_INDEX = ".index.json"
_LARGEST_MODEL_FILE_BYTES = 256 << 20
"""Larger files are not copied: they cannot be configuration. The largest tokenizers have some 40 MB."""

_FORMS = {pb.VERSION_KIND_ANCHOR: Form.DENSE, pb.VERSION_KIND_DELTA: Form.DELTA, pb.VERSION_KIND_ADAPTER: Form.ADAPTER}

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StoredForm:
    """One form of a version: a directory, and the manifest of its files as clients get it.

    Attributes:
        pushed: Manifest as pushed; differs from `manifest` if slices were assembled.
        sums: Checksums of the shards' chunks, as far as they are known.
    """

    directory: Path
    manifest: pb.Manifest
    pushed: pb.Manifest
    sums: dict[str, ChunkSums] = field(default_factory=dict)

    @property
    def files(self) -> dict[str, Path]:
        """Return its files by shard name."""
        return {shard: self.directory / name for shard, name in _file_names(self.manifest).items()}

    def sums_of(self, shard: str) -> ChunkSums:
        """Return the checksums of a shard's chunks."""
        if shard not in self.sums:
            size = next(each.size_bytes for each in self.manifest.shards if each.name == shard)
            self.sums[shard] = ChunkSums(size)
        return self.sums[shard]


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A version on disk, in one or more forms."""

    version: Version
    forms: Mapping[Form, StoredForm]

    def with_form(self, stored: StoredForm) -> StoredVersion:
        """Return the version with a form added."""
        return replace(self, forms={**self.forms, form_of(stored.manifest): stored})

    def without_dense(self) -> StoredVersion:
        """Return the version with its other forms."""
        return replace(self, forms={form: stored for form, stored in self.forms.items() if form is not Form.DENSE})

    @property
    def announced(self) -> StoredForm:
        """Return the form that is announced: the smallest."""
        return next(self.forms[form] for form in (Form.DELTA, Form.ADAPTER, Form.DENSE) if form in self.forms)

    @property
    def manifest(self) -> pb.Manifest:
        """Return the manifest that is announced."""
        return self.announced.manifest

    @property
    def pushed(self) -> pb.Manifest:
        """Return the manifest as the trainer pushed it."""
        return self.announced.pushed

    def describe(self) -> Forms:
        """Return the version's forms as the ledger needs them."""
        manifest = self.manifest
        sizes = {form: stored.manifest.size_bytes for form, stored in self.forms.items()}
        return Forms(
            digest=manifest.digest,
            dense_bytes=sizes.get(Form.DENSE),
            delta_bytes=sizes.get(Form.DELTA),
            adapter_bytes=sizes.get(Form.ADAPTER),
            base=Version.from_proto(manifest.base) if manifest.HasField("base") else None,
            copy_bytes=0 if Form.ADAPTER in sizes else manifest.dense_bytes,
        )


def form_of(manifest: pb.Manifest) -> Form:
    """Return the form that a manifest describes; raise ManifestError if it names no kind."""
    try:
        return _FORMS[manifest.kind]
    except KeyError:
        raise ManifestError("the version has no kind: set it to ANCHOR, DELTA or ADAPTER") from None


def _file_names(manifest: pb.Manifest) -> dict[str, str]:
    """Return the names of a form's files by shard name: the names that Hugging Face and PEFT use, if they have any."""
    form, names = form_of(manifest), [shard.name for shard in manifest.shards]
    if form is Form.DELTA:
        return {name: f"{name}.safetensors" for name in names}
    stem, count = ("model" if form is Form.DENSE else "adapter_model"), len(names)
    if count == 1:
        return {names[0]: f"{stem}.safetensors"}
    return {name: f"{stem}-{index + 1:05d}-of-{count:05d}.safetensors" for index, name in enumerate(names)}


def _weight_index(manifest: pb.Manifest) -> str:
    """Return the JSON text by which `transformers` finds the tensors of several files."""
    files = _file_names(manifest)
    weight_map = {tensor.name: files[shard.name] for shard in manifest.shards for tensor in shard.tensors}
    return json.dumps({"metadata": {"total_size": manifest.dense_bytes}, "weight_map": weight_map}, indent=1)


def read_form(version: Version, directory: Path, *, delta: bool) -> StoredForm:
    """Read a form's directory.

    Raises:
        ManifestError: if the form is not whole, belongs to another version, or is a delta where a dense form or an adapter is
            expected, or the reverse.
    """
    manifest = from_json((directory / MANIFEST_FILE).read_text())
    if Version.from_proto(manifest.version) != version:
        raise ManifestError(f"the manifest is that of version {Version.from_proto(manifest.version)}")
    if (form_of(manifest) is Form.DELTA) != delta:
        raise ManifestError(f"a {form_of(manifest).value} form does not belong here")
    pushed_path = directory / _PUSHED_FILE
    pushed = from_json(pushed_path.read_text()) if pushed_path.exists() else manifest
    form = StoredForm(directory, manifest, pushed)
    files = form.files
    for shard in manifest.shards:
        path = files[shard.name]
        if path.stat().st_size != shard.size_bytes:
            raise ManifestError(f"{path.name} has {path.stat().st_size} bytes, expected {shard.size_bytes}")
    return form


class RunStore:
    """One run's directory, made when the first shard comes. If the disk fails, its methods raise OSError.

    The config and tokenizer of the base model `model` are copied into each version, unless it is empty. `chat_template` replaces
    the model's template; if it is None, the model's own template is copied. With `keeps_incoming`, shards that were incomplete
    when the service ended are kept for `interrupted`.
    """

    def __init__(
        self, root: Path, model: str, *, keeps_incoming: bool = False, chat_template: str | None = None
    ) -> None:
        self.root = root
        self._model = model
        self._chat_template = chat_template
        self._keeps_incoming = keeps_incoming
        self._model_files: list[Path] | None = None
        self._collecting = threading.Lock()
        """Held while the model's files are collected: two threads, for a commit and a dense form, may both need them first."""
        self._incoming = root / ".incoming"
        self._interrupted = root / ".interrupted"
        self._building = root / ".building"
        self._deltas = root / ".deltas"
        self._trash = root / ".trash"
        self._model_copies = root / ".model"
        self._lock: int | None = None
        self._numbers = itertools.count()

    def read_versions(self) -> list[StoredVersion]:
        """Remove what a crash left behind, and return the versions that are whole and can be reached.

        Nothing is dropped because the disk cannot be read now. Raise SluiceError DIRECTORY_IN_USE.
        """
        if not self.root.is_dir():
            return []
        self._take_lock()
        hidden = (self._incoming, self._interrupted, self._building, self._trash, self._deltas, self._model_copies)
        for ours in hidden:
            if ours.is_symlink():  # its target does not belong to this store, which must not write there or remove it
                log.warning("removing a symbolic link where a directory of the store belongs", path=str(ours))
                ours.unlink()
        if self._keeps_incoming and self._incoming.is_dir() and any(self._incoming.iterdir()):
            remove_tree(self._interrupted)
            self._incoming.rename(self._interrupted)
        elif not self._keeps_incoming:
            remove_tree(self._interrupted)
        for rubbish in (self._incoming, self._building, self._trash):
            remove_tree(rubbish)
        found: dict[Version, StoredVersion] = {}
        for parent in (self.root, self._deltas):
            for version, form in self._read_forms(parent):
                found[version] = found.get(version, StoredVersion(version, {})).with_form(form)
        forms = {version: stored.describe() for version, stored in found.items()}
        for version in [version for version in found if not is_reachable(forms, version)]:
            log.warning("dropping a version that no dense form leads to", version=str(version), root=str(self.root))
            self.remove(version)
            del found[version]
        return [found[version] for version in sorted(found)]

    def _read_forms(self, parent: Path) -> Iterator[tuple[Version, StoredForm]]:
        for directory in sorted(parent.iterdir()) if parent.is_dir() else []:
            version = parse_version_directory(directory.name)
            if version is None:
                continue
            try:
                form = read_form(version, directory, delta=parent == self._deltas)
            except (ManifestError, FileNotFoundError) as error:
                log.warning("dropping a damaged version", directory=str(directory), error=str(error))
                self._remove_tree(directory)
            else:
                yield version, form

    def begin_upload(self, version: Version, announced: pb.Shard, now: float) -> Upload:
        """Begin a shard at byte 0; raise SluiceError DIRECTORY_IN_USE."""
        self.root.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        # Each upload has its own number, because a superseded stream may still be writing to the previous file.
        unique = f"{announced.name}.{next(self._numbers)}"
        return Upload(self._incoming / version_directory(version) / unique, announced, now)

    def interrupted(self, version: Version, shard: str) -> list[Path]:
        """Return the files with the bytes of a shard that came in before a restart. The bytes have not been checked since."""
        directory = self._interrupted / version_directory(version)
        return sorted(directory.glob(f"{glob.escape(shard)}.*"))

    def drop_interrupted(self) -> None:
        """Remove the files that `interrupted` returns, of all shards."""
        remove_tree(self._interrupted)

    def commit(self, manifest: pb.Manifest, uploads: Mapping[str, Upload], started: float) -> StoredVersion:
        """Build a form's directory and rename it to its visible name. If that fails, the unfinished directory stays until `drop_incoming`.

        Args:
            manifest: A manifest that was completed, with its commit time.
            uploads: Its shards by name; their files are moved.
            started: When the commit began, by `time.perf_counter`.
        """
        version, form = Version.from_proto(manifest.version), form_of(manifest)
        building = self._incoming / version_directory(version) / ".building"
        remove_tree(building)
        building.mkdir()
        given_out = manifest
        if is_loadable(manifest):
            for shard, name in _file_names(manifest).items():
                uploads[shard].path.rename(building / name)
        else:
            stem = "model" if form is Form.DENSE else "adapter_model"
            given_out = assemble(manifest, uploads, building / f"{stem}.safetensors")
        if form is Form.ADAPTER:
            _write_synced(building / _ADAPTER_CONFIG_FILE, manifest.adapter_config)
        if given_out is not manifest:
            _write_synced(building / _PUSHED_FILE, to_json(manifest))
        given_out.commit_time_taken.FromNanoseconds(int((time.perf_counter() - started) * 1e9))
        final = self._install(given_out, building)
        sums = {name: upload.sums for name, upload in uploads.items()} if given_out is manifest else {}
        return StoredVersion(version, {form: StoredForm(final, given_out, manifest, sums)})

    def _install(self, manifest: pb.Manifest, building: Path) -> Path:
        """Complete a directory, rename it to where it belongs, and return that."""
        form = form_of(manifest)
        if form is Form.DENSE:
            if len(manifest.shards) > 1:
                _write_synced(building / "model.safetensors.index.json", _weight_index(manifest))
            with self._collecting:
                if self._model_files is None:
                    self._model_files = _collect_model_files(self._model, self._model_copies, self._chat_template)
            _link_into(self._model_files, building)
        _write_synced(building / MANIFEST_FILE, to_json(manifest))
        _sync_directory(building)
        parent = self._deltas if form is Form.DELTA else self.root
        if not parent.exists():
            parent.mkdir()
            _sync_directory(self.root)
        final = parent / version_directory(Version.from_proto(manifest.version))
        building.rename(final)
        _sync_directory(parent)
        return final

    def build_dense(self, version: Version) -> Path:
        """Make an empty directory for a dense form that is made from deltas."""
        building = self._building / version_directory(version)
        remove_tree(building)
        building.mkdir(parents=True)
        return building

    def install_dense(self, manifest: pb.Manifest, building: Path) -> StoredForm:
        """Make a dense form that was made from deltas visible by renaming it. Its files are on the disk already."""
        return StoredForm(self._install(manifest, building), manifest, manifest)

    def drop_building(self, version: Version) -> None:
        """Remove a dense form that was not finished."""
        remove_tree(self._building / version_directory(version))

    def drop_incoming(self, version: Version) -> None:
        """Remove the pushed shards of a version that was not committed."""
        remove_tree(self._incoming / version_directory(version))

    def remove(self, version: Version) -> None:
        """Remove a version, if there is one."""
        self._remove_tree(self._deltas / version_directory(version))
        self.remove_dense(version)

    def remove_dense(self, version: Version) -> None:
        """Remove the dense form of a version, or an adapter, if there is one."""
        self._remove_tree(self.root / version_directory(version))

    def _remove_tree(self, directory: Path) -> None:
        if not directory.exists():
            return
        self._trash.mkdir(exist_ok=True)
        # Each removal has its own number, because two forms of a version may be removed at the same time.
        doomed = self._trash / f"{directory.name}.{next(self._numbers)}"
        try:
            directory.rename(doomed)
        except FileNotFoundError:
            return
        if doomed.is_symlink():
            doomed.unlink()
        else:
            remove_tree(doomed)

    def _take_lock(self) -> None:
        """Lock the directory: two services in one directory would remove each other's shards."""
        if self._lock is not None:
            return
        descriptor = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise SluiceError.failed_precondition(
                "DIRECTORY_IN_USE", f"another weightsync keeps {self.root}: stop it, or give this one another directory"
            ) from error
        self._lock = descriptor

    def close(self) -> None:
        """Unlock the directory for other processes."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def try_directory(self) -> None:
        """Check that files can be made in the directory, or where it will be, by making one and removing it."""
        there = next(each for each in (self.root, *self.root.absolute().parents) if each.exists())
        with tempfile.TemporaryDirectory(prefix=".try-", dir=there):
            pass

    def free_bytes(self) -> int:
        """Return the bytes that the disk has left."""
        existing = next(path for path in (self.root, *self.root.absolute().parents) if path.exists())
        return shutil.disk_usage(existing).free


def is_loadable(manifest: pb.Manifest) -> bool:
    """Return whether the shards are stored as pushed: files of a Hugging Face checkpoint, PEFT's one file, or a delta.

    Otherwise the slices are assembled into one file of whole tensors.
    """
    if manifest.kind == pb.VERSION_KIND_DELTA:
        return True
    return (len(manifest.shards) == 1 or manifest.kind != pb.VERSION_KIND_ADAPTER) and all(
        is_whole(tensor) and entry_name(tensor) == tensor.name for shard in manifest.shards for tensor in shard.tensors
    )


def _collect_model_files(model: str, target: Path, chat_template: str | None) -> list[Path]:
    """Copy the small files that make a version's directory loadable: config, generation config, tokenizer.

    Args:
        model: Hugging Face directory, or a hub id that is in this machine's hub cache; nothing is downloaded.
        target: Directory that receives the copies; emptied before.
        chat_template: Replaces the model's chat template; None: keep the model's.

    Returns:
        The copies; empty if the model is not on this machine, so that versions hold only weights.
    """
    remove_tree(target)
    if not model:
        log.info("versions will hold weights alone, because no base model is set")
        return []
    source = _locate(model)
    if source is None:
        log.warning(
            "versions will hold weights alone, because the base model's directory was not found",
            model=model,
            remedy="set model to a directory that this host can read, or put the hub snapshot into its cache",
        )
        return []
    target.mkdir(parents=True)
    copies = {
        each.name: _copy_synced(each, target / each.name) for each in sorted(source.iterdir()) if _is_model_file(each)
    }
    if chat_template is not None:  # transformers reads this file rather than the template in tokenizer_config.json
        copies[TEMPLATE_FILE] = target / TEMPLATE_FILE
        _write_synced(copies[TEMPLATE_FILE], chat_template)
    return list(copies.values())


def _locate(model: str) -> Path | None:
    directory = Path(model).expanduser()
    if directory.is_dir():
        return directory
    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (HFValidationError, OSError):  # a name that is no hub id, or nothing in the cache
        return None


def _is_model_file(path: Path) -> bool:
    return (
        path.is_file()
        and path.suffix in _MODEL_SUFFIXES
        and path.name not in _NOT_OF_THE_MODEL
        and not path.name.endswith(_WEIGHT_INDEX)
        and path.stat().st_size <= _LARGEST_MODEL_FILE_BYTES
    )


def _link_into(copies: list[Path], directory: Path) -> None:
    """Give a version's directory hard links to the model's files; copy them where the file system has no links."""
    for copy in copies:
        try:
            os.link(copy, directory / copy.name)
        except OSError:  # some network file systems; if the disk is full, the copy says so
            _copy_synced(copy, directory / copy.name)


def _copy_synced(source: Path, target: Path) -> Path:
    shutil.copyfile(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())
    return target


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    """Flush a directory's names to the disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
