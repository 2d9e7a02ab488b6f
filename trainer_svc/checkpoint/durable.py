"""Files that are whole on disk or not there at all."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["sync_directory", "write_durably"]


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
