"""The versions of one run on disk, each a directory that `transformers` loads as it is. Blocking; called in threads.

    <root>/v1.42/            model.safetensors (or model-00001-of-0000N + index), config.json, tokenizer..., manifest.json
    <root>/.incoming/v1.43/  shards on their way in, and versions under construction
    <root>/.model/           what each version's directory shares: config, tokenizer

A version is built under ``.incoming`` and renamed into sight, its manifest written last; it is renamed out of sight before
it is removed. So a crash at any point leaves whole versions and rubbish that the next start sweeps away.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.assemble import assemble
from weightsync.incoming import IncomingShard
from weightsync.manifest import MANIFEST_FILE, ManifestError, entry_name, from_json, is_whole, to_json
from weightsync.model_files import collect_model_files, link_into
from weightsync.names import parse_version_directory, version_directory
from weightsync.verify import DigestMismatchError

__all__ = ["RunStore", "StoreLockedError", "StoredVersion"]

PUSHED_FILE = "pushed.json"
"""Manifest as the trainer pushed it, kept where the shards were assembled into another file."""

log = structlog.get_logger(__name__)


class StoreLockedError(Exception):
    """Another process keeps the directory."""


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A version on disk.

    Attributes:
        version: Which one.
        directory: Where it lies.
        manifest: What its files are, as given out.
        pushed: What was pushed; differs from `manifest` where slices were assembled.
    """

    version: Version
    directory: Path
    manifest: pb.Manifest
    pushed: pb.Manifest

    def shard_path(self, name: str) -> Path | None:
        """The file of a shard, None if there is no such shard."""
        names = [shard.name for shard in self.manifest.shards]
        return self.directory / _file_name(names.index(name), len(names)) if name in names else None


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
        self._incoming = root / ".incoming"
        self._trash = root / ".trash"
        self._lock: int | None = None
        self._numbers = itertools.count()

    def recover(self) -> list[StoredVersion]:
        """Sweep away what a crash left behind, and read the versions that are whole.

        Raises:
            StoreLockedError: if another process keeps the same directory.
        """
        if not self.root.is_dir():
            return []
        self._take_lock()
        for rubbish in (self._incoming, self._trash):
            shutil.rmtree(rubbish, ignore_errors=True)
        found = []
        for directory in sorted(self.root.iterdir()):
            version = parse_version_directory(directory.name)
            if version is None:
                continue
            try:
                found.append(_read(version, directory))
            except (ManifestError, OSError) as error:
                log.warning("dropping a damaged version", directory=str(directory), error=str(error))
                self._remove_tree(directory)
        return found

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

    def commit(self, manifest: pb.Manifest, shards: Mapping[str, IncomingShard]) -> StoredVersion:
        """Build the version's directory and rename it into sight.

        Args:
            manifest: A manifest that passed `complete_manifest`, with its commit time.
            shards: Its uploaded files by name; moved.

        Raises:
            DigestMismatchError: if the assembled version has another digest than announced.
            OSError: if the disk does not take it; what was built stays under ``.incoming`` until `drop_incoming`.
        """
        version = Version.from_proto(manifest.version)
        building = self._incoming / version_directory(version) / ".building"
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        stored = self._place_weights(manifest, shards, building)
        if self._model_files is None:
            self._model_files = collect_model_files(self._model, self.root / ".model")
        link_into(self._model_files, building)
        if stored is not manifest:
            _write_synced(building / PUSHED_FILE, to_json(manifest))
        _write_synced(building / MANIFEST_FILE, to_json(stored))
        _sync_directory(building)
        final = self.root / version_directory(version)
        building.rename(final)
        _sync_directory(self.root)
        return StoredVersion(version, final, stored, manifest)

    def _place_weights(self, manifest: pb.Manifest, shards: Mapping[str, IncomingShard], building: Path) -> pb.Manifest:
        if not _is_loadable(manifest):
            stored = assemble(manifest, shards, building / _file_name(0, 1))
            if manifest.digest and manifest.digest != stored.digest:
                raise DigestMismatchError(f"the version has digest {stored.digest}, announced was {manifest.digest}")
            return stored
        count = len(manifest.shards)
        for index, shard in enumerate(manifest.shards):
            shards[shard.name].path.rename(building / _file_name(index, count))
        if count > 1:
            _write_synced(building / "model.safetensors.index.json", _index(manifest))
        return manifest

    def drop_incoming(self, version: Version) -> None:
        """Remove what came in of a version and was not committed."""
        shutil.rmtree(self._incoming / version_directory(version), ignore_errors=True)

    def remove(self, version: Version) -> None:
        """Remove a version; without effect where there is none."""
        directory = self.root / version_directory(version)
        if directory.exists():
            self._remove_tree(directory)

    def _remove_tree(self, directory: Path) -> None:
        self._trash.mkdir(exist_ok=True)
        doomed = self._trash / directory.name
        shutil.rmtree(doomed, ignore_errors=True)
        directory.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

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


def _read(version: Version, directory: Path) -> StoredVersion:
    manifest = from_json((directory / MANIFEST_FILE).read_text())
    if Version.from_proto(manifest.version) != version:
        raise ManifestError(f"the manifest is that of version {Version.from_proto(manifest.version)}")
    pushed_path = directory / PUSHED_FILE
    pushed = from_json(pushed_path.read_text()) if pushed_path.exists() else manifest
    stored = StoredVersion(version, directory, manifest, pushed)
    for index, shard in enumerate(manifest.shards):
        path = directory / _file_name(index, len(manifest.shards))
        if path.stat().st_size != shard.size_bytes:
            raise ManifestError(f"{path.name} has {path.stat().st_size} bytes, expected {shard.size_bytes}")
    return stored


def _is_loadable(manifest: pb.Manifest) -> bool:
    """Whether the shards as pushed are files of a Hugging Face checkpoint."""
    return all(
        is_whole(tensor) and entry_name(tensor) == tensor.name for shard in manifest.shards for tensor in shard.tensors
    )


def _file_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _index(manifest: pb.Manifest) -> str:
    count = len(manifest.shards)
    weight_map = {
        tensor.name: _file_name(index, count) for index, shard in enumerate(manifest.shards) for tensor in shard.tensors
    }
    return json.dumps({"metadata": {"total_size": manifest.dense_bytes}, "weight_map": weight_map}, indent=1)


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
