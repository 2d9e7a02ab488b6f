"""Checkpoints on disk: safetensors by torch.distributed.checkpoint, a Hugging Face directory, and a manifest written last.

    checkpoints/step_8/
        state/model-00001-of-00001.safetensors ...   weights, optimizer and random state
        hf/                                          what transformers and vLLM load
        manifest.json                                protobuf-JSON of CheckpointManifest

A checkpoint is built in a hidden directory and renamed when it is whole; a directory without a manifest is not one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import structlog
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from google.protobuf import json_format
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from sluice.v1.checkpoint_pb2 import CheckpointFile, CheckpointManifest
from sluice.versions import Version
from trainer_svc.checkpoint.durable import sync_directory, write_durably

__all__ = ["CheckpointDamagedError", "Checkpoints"]

MANIFEST = "manifest.json"
STATE = "state"
EXPORT = "hf"

FILE_BYTES = 2 << 30
"""About how many bytes of tensors one file gets: they are laid out in memory before they are written."""

READ_BYTES = 16 << 20
"""Bytes digested at a time."""

log = structlog.get_logger(__name__)


class CheckpointDamagedError(Exception):
    """A file of a checkpoint is not what its manifest says."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        directory: Holds one directory per checkpoint; made when the first one is written.
        keep: Complete checkpoints that stay, the newest ones.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory = directory
        self.keep = keep

    def complete(self) -> list[CheckpointManifest]:
        """Manifests of the complete checkpoints, newest version first."""
        found = map(_read_manifest, self.directory.glob(f"step_*/{MANIFEST}"))
        return sorted(filter(None, found), key=_version, reverse=True)

    def sweep(self) -> None:
        """Remove what interrupted writes left behind."""
        for path in self.directory.glob(".step_*"):
            shutil.rmtree(path)

    def find(self, name: str) -> CheckpointManifest | None:
        """The complete checkpoint of this name."""
        return next((manifest for manifest in self.complete() if manifest.checkpoint.name == name), None)

    def write(
        self, manifest: CheckpointManifest, tensors: Mapping[str, torch.Tensor], export: Callable[[Path], None]
    ) -> CheckpointManifest:
        """Write a checkpoint and remove those beyond the ones to keep.

        Args:
            manifest: All facts but the files and the size.
            tensors: The training state by name.
            export: Writes the Hugging Face directory to the path it is given.

        Returns:
            The completed manifest.

        Raises:
            OSError: if the disk is full or not writable; older checkpoints stay as they were.
        """
        target = self.directory / manifest.checkpoint.name
        building = self.directory / f".{manifest.checkpoint.name}.partial"
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        try:
            _write_tensors(tensors, building / STATE)
            export(building / EXPORT)
            complete = CheckpointManifest()
            complete.CopyFrom(manifest)
            complete.files.extend(_describe_files(building))
            complete.checkpoint.size_bytes = sum(file.size_bytes for file in complete.files)
            complete.checkpoint.create_time.GetCurrentTime()
            _write_manifest(complete, building)
            self._put_in_place(building, target)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
        self._prune()
        return complete

    def note_position(self, manifest: CheckpointManifest, journal_position: int) -> CheckpointManifest:
        """Record where the orchestrator's journal stands, unless a later position is recorded already.

        Raises:
            OSError: if the manifest cannot be replaced; the old one stays.
        """
        if journal_position <= manifest.checkpoint.journal_position:
            return manifest
        updated = CheckpointManifest()
        updated.CopyFrom(manifest)
        updated.checkpoint.journal_position = journal_position
        _write_manifest(updated, self.directory / manifest.checkpoint.name)
        return updated

    def read(self, manifest: CheckpointManifest) -> dict[str, torch.Tensor]:
        """The training state of a checkpoint.

        Raises:
            CheckpointDamagedError: if a file is missing or not as it was written.
        """
        directory = self.directory / manifest.checkpoint.name
        for file in manifest.files:
            path = directory / file.path
            if not path.is_file() or _digest(path) != file.digest:
                raise CheckpointDamagedError(
                    f"{path} is missing or not as it was written: restore another checkpoint, and look at the disk"
                )
        reader = HuggingFaceStorageReader(str(directory / STATE))
        described = reader.read_metadata().state_dict_metadata
        tensors = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in described.items()}
        dcp.load(tensors, storage_reader=reader, no_dist=True)
        return tensors

    def _put_in_place(self, building: Path, target: Path) -> None:
        """Rename; a retired checkpoint of the same name makes room."""
        retired = self.directory / f".{target.name}.retired"
        shutil.rmtree(retired, ignore_errors=True)
        if target.exists():
            target.rename(retired)
        building.rename(target)
        sync_directory(self.directory)
        shutil.rmtree(retired, ignore_errors=True)

    def _prune(self) -> None:
        for manifest in self.complete()[self.keep :]:
            path = self.directory / manifest.checkpoint.name
            (path / MANIFEST).unlink()  # first, so that a half-removed checkpoint is not taken for a whole one
            shutil.rmtree(path)
            log.info("checkpoint removed", name=path.name, keep=self.keep)


def _version(manifest: CheckpointManifest) -> Version:
    return Version.from_proto(manifest.checkpoint.policy_version)


def _read_manifest(path: Path) -> CheckpointManifest | None:
    """The manifest; None, with a warning, if it is not one: then the directory is no complete checkpoint."""
    try:
        return json_format.Parse(path.read_text(encoding="utf-8"), CheckpointManifest(), ignore_unknown_fields=True)
    except (json_format.ParseError, UnicodeDecodeError) as error:
        log.warning("not a checkpoint: its manifest cannot be read", path=str(path), error=str(error))
        return None


def _write_manifest(manifest: CheckpointManifest, directory: Path) -> None:
    text = json_format.MessageToJson(manifest, preserving_proto_field_name=True)
    write_durably(directory / MANIFEST, text.encode())


def _write_tensors(tensors: Mapping[str, torch.Tensor], directory: Path) -> None:
    directory.mkdir()
    writer = HuggingFaceStorageWriter(str(directory), fqn_to_index_mapping=_files_of(tensors))
    dcp.save(dict(tensors), storage_writer=writer, no_dist=True)


def _files_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """File number of each tensor, from 1."""
    files, filled, number = {}, 0, 1
    for name, tensor in tensors.items():
        if filled and filled + tensor.nbytes > FILE_BYTES:
            number, filled = number + 1, 0
        files[name] = number
        filled += tensor.nbytes
    return files


def _describe_files(directory: Path) -> Iterator[CheckpointFile]:
    """Every file with its digest, synced to disk."""
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        yield CheckpointFile(
            path=path.relative_to(directory).as_posix(), size_bytes=path.stat().st_size, digest=_digest(path)
        )
    for path in (directory, *(path for path in directory.rglob("*") if path.is_dir())):
        sync_directory(path)


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
