"""The versions of one run on disk. Blocking; called in threads.

    <root>/v1.42/            dense form, a directory that `transformers` loads as it is: model.safetensors (or
                             model-00001-of-0000N + index), config.json, tokenizer..., manifest.json; or an adapter,
                             a directory that PEFT loads: adapter_model.safetensors, adapter_config.json, manifest.json
    <root>/.deltas/v1.43/    delta form: one file per shard, manifest.json
    <root>/.incoming/v1.44/  shards on their way in, and forms under construction
    <root>/.building/v1.43/  dense forms that are made of deltas, under construction
    <root>/.model/           what each dense directory shares: config, tokenizer

A form is built under ``.incoming`` and renamed into sight, its manifest written last; it is renamed out of sight before
it is removed. So a crash at any point leaves whole versions and rubbish that the next start sweeps away.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import structlog

from sluice.host_files import remove_tree
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.format.manifest import MANIFEST_FILE, ManifestError, entry_name, is_whole, to_json
from weightsync.format.names import parse_version_directory, version_directory
from weightsync.service.assemble import assemble
from weightsync.service.chain import Form, is_reachable
from weightsync.service.disk import sync_directory, write_synced
from weightsync.service.incoming import IncomingShard
from weightsync.service.model_files import collect_model_files, link_into
from weightsync.service.stored import (
    PUSHED_FILE,
    StoredForm,
    StoredVersion,
    file_names,
    form_of,
    read_form,
    weight_index,
)

__all__ = ["RunStore", "StoreLockedError", "is_loadable"]

ADAPTER_CONFIG_FILE = "adapter_config.json"
"""PEFT's name for it."""

log = structlog.get_logger(__name__)


class StoreLockedError(Exception):
    """Another process keeps the directory."""


class RunStore:
    """One run's directory.

    Args:
        root: The directory; made when the first shard comes.
        model: Base model, whose config and tokenizer go with each version; empty: none.
    """

    def __init__(self, root: Path, model: str) -> None:
        self.root = root
        self._model = model
        self._model_files: list[Path] | None = None
        self._collecting = threading.Lock()
        """A commit and the making of a dense form, in two threads, may both need the model's files first."""
        self._incoming = root / ".incoming"
        self._building = root / ".building"
        self._deltas = root / ".deltas"
        self._trash = root / ".trash"
        self._model_copies = root / ".model"
        self._lock: int | None = None
        self._numbers = itertools.count()

    def recover(self) -> list[StoredVersion]:
        """Sweep away what a crash left behind, and read the versions that are whole and can be reached.

        Raises:
            StoreLockedError: if another process keeps the same directory.
            OSError: if the disk cannot be read now; nothing is dropped for that.
        """
        if not self.root.is_dir():
            return []
        self._take_lock()
        for ours in (self._incoming, self._building, self._trash, self._deltas, self._model_copies):
            if ours.is_symlink():  # what it leads to is not this store's to write to or to remove
                log.warning("removing a symbolic link where a directory of the store belongs", path=str(ours))
                ours.unlink()
        for rubbish in (self._incoming, self._building, self._trash):
            remove_tree(rubbish)
        found: dict[Version, StoredVersion] = {}
        for parent in (self.root, self._deltas):
            for version, form in self._read_forms(parent):
                found[version] = found.get(version, StoredVersion(version)).with_form(form)
        forms = {version: stored.forms() for version, stored in found.items()}
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

    def open_shard(self, version: Version, name: str, size: int) -> IncomingShard:
        """Begin a shard anew.

        Raises:
            StoreLockedError: if another process keeps the same directory.
            OSError: if the disk does not take it.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        # A number of its own: a stream that was superseded may still be writing to the file before.
        unique = f"{name}.{next(self._numbers)}"
        return IncomingShard(self._incoming / version_directory(version) / unique, size)

    def commit(self, manifest: pb.Manifest, shards: Mapping[str, IncomingShard], started: float) -> StoredVersion:
        """Build a form's directory and rename it into sight.

        Args:
            manifest: A manifest that was completed, with its commit time.
            shards: Its uploaded files by name; moved.
            started: When the commit began, by `time.perf_counter`.

        Raises:
            OSError: if the disk does not take it; what was built stays under ``.incoming`` until `drop_incoming`.
        """
        version, form = Version.from_proto(manifest.version), form_of(manifest)
        building = self._incoming / version_directory(version) / ".building"
        remove_tree(building)
        building.mkdir()
        stored = self._place_weights(manifest, shards, building)
        if form is Form.ADAPTER:
            write_synced(building / ADAPTER_CONFIG_FILE, manifest.adapter_config)
        if stored is not manifest:
            write_synced(building / PUSHED_FILE, to_json(manifest))
        stored.commit_time_taken.FromNanoseconds(int((time.perf_counter() - started) * 1e9))
        final = self._publish(version, form, stored, building)
        files = {shard: final / name for shard, name in file_names(stored).items()}
        sums = {shard.name: shards[shard.name].sums for shard in stored.shards} if stored is manifest else {}
        return StoredVersion(version).with_form(StoredForm(final, stored, manifest, files, sums))

    def _publish(self, version: Version, form: Form, manifest: pb.Manifest, building: Path) -> Path:
        """Complete a directory and rename it to where it belongs."""
        if form is Form.DENSE:
            if len(manifest.shards) > 1:
                write_synced(building / "model.safetensors.index.json", weight_index(manifest))
            with self._collecting:
                if self._model_files is None:
                    self._model_files = collect_model_files(self._model, self._model_copies)
            link_into(self._model_files, building)
        write_synced(building / MANIFEST_FILE, to_json(manifest))
        sync_directory(building)
        parent = self._deltas if form is Form.DELTA else self.root
        if not parent.exists():
            parent.mkdir()
            sync_directory(self.root)
        final = parent / version_directory(version)
        building.rename(final)
        sync_directory(parent)
        return final

    def _place_weights(self, manifest: pb.Manifest, shards: Mapping[str, IncomingShard], building: Path) -> pb.Manifest:
        if not is_loadable(manifest):
            stem = "model" if form_of(manifest) is Form.DENSE else "adapter_model"
            return assemble(manifest, shards, building / f"{stem}.safetensors")
        for shard, name in file_names(manifest).items():
            shards[shard].path.rename(building / name)
        return manifest

    def build_dense(self, version: Version) -> Path:
        """An empty directory in which a dense form can be made of deltas.

        Raises:
            OSError: if the disk does not take it.
        """
        building = self._building / version_directory(version)
        remove_tree(building)
        building.mkdir(parents=True)
        return building

    def publish_dense(self, manifest: pb.Manifest, building: Path) -> StoredForm:
        """Rename a dense form that was made of deltas into sight; its files are on the disk.

        Raises:
            OSError: if the disk does not take it.
        """
        final = self._publish(Version.from_proto(manifest.version), Form.DENSE, manifest, building)
        files = {shard: final / name for shard, name in file_names(manifest).items()}
        return StoredForm(final, manifest, manifest, files)

    def drop_building(self, version: Version) -> None:
        """Remove a dense form that was not finished."""
        remove_tree(self._building / version_directory(version))

    def drop_incoming(self, version: Version) -> None:
        """Remove what came in of a version and was not committed."""
        remove_tree(self._incoming / version_directory(version))

    def remove(self, version: Version) -> None:
        """Remove a version; without effect where there is none."""
        self._remove_tree(self._deltas / version_directory(version))
        self.remove_dense(version)

    def remove_dense(self, version: Version) -> None:
        """Remove the dense form of a version, or an adapter; without effect where there is none."""
        self._remove_tree(self.root / version_directory(version))

    def _remove_tree(self, directory: Path) -> None:
        if not directory.exists():
            return
        self._trash.mkdir(exist_ok=True)
        # A number of its own: two forms of a version may go at the same time.
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
        """Two services in one directory would sweep away each other's shards."""
        if self._lock is not None:
            return
        descriptor = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise StoreLockedError(
                f"another weightsync keeps {self.root}: stop it, or give this one another directory"
            ) from error
        self._lock = descriptor

    def close(self) -> None:
        """Let another process have the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def free_bytes(self) -> int:
        """Bytes that the disk has left."""
        existing = next(path for path in (self.root, *self.root.absolute().parents) if path.exists())
        return shutil.disk_usage(existing).free


def is_loadable(manifest: pb.Manifest) -> bool:
    """Return whether the shards are stored as pushed: files of a Hugging Face checkpoint, PEFT's one file, or a delta.

    Slices of others are assembled into one file of whole tensors.
    """
    if manifest.kind == pb.VERSION_KIND_DELTA:
        return True
    return (len(manifest.shards) == 1 or manifest.kind != pb.VERSION_KIND_ADAPTER) and all(
        is_whole(tensor) and entry_name(tensor) == tensor.name for shard in manifest.shards for tensor in shard.tensors
    )
