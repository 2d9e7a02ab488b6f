"""The manifest of a checkpoint, which is written last and names every file with its digest; and files that survive a power cut."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import structlog
import xxhash
from google.protobuf import json_format

from sluice.v1.checkpoint_pb2 import CheckpointFile, CheckpointManifest

__all__ = [
    "MANIFEST",
    "CheckpointDamagedError",
    "check_files",
    "describe_files",
    "read_manifest",
    "sync_directory",
    "write_durably",
    "write_manifest",
]

MANIFEST = "manifest.json"

READ_BYTES = 16 << 20
"""Bytes digested at a time."""

log = structlog.get_logger(__name__)


class CheckpointDamagedError(Exception):
    """A file of a checkpoint is not what its manifest says."""


def read_manifest(path: Path) -> CheckpointManifest | None:
    """Read a manifest. Return None, with a warning, if it is not one: the directory is then not a complete checkpoint."""
    try:
        return json_format.Parse(path.read_text(encoding="utf-8"), CheckpointManifest(), ignore_unknown_fields=True)
    except FileNotFoundError:
        return None  # removed a moment ago
    except (json_format.ParseError, UnicodeDecodeError) as error:
        log.warning("not a checkpoint: its manifest cannot be read", path=str(path), error=str(error))
        return None


def write_manifest(manifest: CheckpointManifest, directory: Path) -> None:
    """Write the manifest of a checkpoint; on return it is on disk."""
    text = json_format.MessageToJson(manifest, preserving_proto_field_name=True)
    write_durably(directory / MANIFEST, text.encode())


def describe_files(paths: Iterable[Path], directory: Path) -> list[CheckpointFile]:
    """Sync files to disk and take their digests.

    Args:
        paths: The files.
        directory: The checkpoint's directory, above the files.
    """
    described = []
    for path in sorted(paths):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        name = path.relative_to(directory).as_posix()
        described.append(CheckpointFile(path=name, size_bytes=path.stat().st_size, digest=_digest(path)))
    for parent in {path.parent for path in paths}:
        sync_directory(parent)
    return described


def check_files(files: Iterable[CheckpointFile], directory: Path) -> None:
    """Compare files with their digests in the manifest.

    Raises:
        CheckpointDamagedError: if one is missing or not as it was written.
    """
    for file in files:
        path = directory / file.path
        if not path.is_file() or _digest(path) != file.digest:
            raise CheckpointDamagedError(
                f"{path} is missing or not as it was written: restore another checkpoint, and look at the disk"
            )


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def write_durably(path: Path, content: bytes) -> None:
    """Write a file beside its place, sync it, and rename it.

    Raises:
        OSError: if the disk is full or not writable.
    """
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
