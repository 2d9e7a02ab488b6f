"""A trainer's checkpoint on disk: its manifest, and whether its files are what the manifest says."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import structlog
import xxhash
from google.protobuf import json_format

from sluice.v1.checkpoint_pb2 import CheckpointFile, CheckpointManifest
from sluice.versions import Version

MANIFEST = "manifest.json"

_READ_BYTES = 16 << 20
"""Bytes digested at a time."""

log = structlog.get_logger(__name__)


def read_manifest(path: Path) -> CheckpointManifest | None:
    """Read a manifest. Warn and return None if it cannot be read: the directory is then not a complete checkpoint."""
    try:
        return json_format.Parse(path.read_text(encoding="utf-8"), CheckpointManifest(), ignore_unknown_fields=True)
    except FileNotFoundError:
        return None  # another process removed it meanwhile
    except (json_format.ParseError, UnicodeDecodeError) as error:
        log.warning("not a checkpoint: its manifest cannot be read", path=str(path), error=str(error))
        return None


def complete_checkpoints(directory: Path) -> list[CheckpointManifest]:
    """Return the manifests of the complete checkpoints in a directory, newest version first.

    A complete checkpoint has a manifest, and every file that the manifest names, with the right size. The files' content is not read.
    """
    found = [read_manifest(path) for path in directory.glob(f"step_*/{MANIFEST}")]
    whole = [each for each in found if each and not wrong_size(each.files, directory / each.checkpoint.name)]
    return sorted(whole, key=lambda each: Version.from_proto(each.checkpoint.policy_version), reverse=True)


def wrong_size(files: Iterable[CheckpointFile], directory: Path) -> str:
    """Compare the sizes of files with a manifest. Return what is wrong with the first that differs; empty if none does."""
    for file in files:
        try:
            size = (directory / file.path).stat().st_size
        except FileNotFoundError:
            return f"{directory / file.path} is missing"
        if size != file.size_bytes:
            return f"{directory / file.path} has {size} bytes; {file.size_bytes} were written"
    return ""


def damaged(files: Iterable[CheckpointFile], directory: Path) -> str:
    """Compare files with their digests in the manifest. Return what is wrong with the first that differs; empty if none does."""
    for file in files:
        path = directory / file.path
        if not path.is_file() or file_digest(path) != file.digest:
            return f"{path} is missing or was changed after it was written: use another checkpoint, and check the disk"
    return ""


def file_digest(path: Path) -> str:
    """Return the xxh3-128 of a file, hexadecimal."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
