"""Writes that are on the disk when they return. Blocking; called in threads."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["sync_directory", "write_synced"]


def write_synced(path: Path, text: str) -> None:
    """Write a text file and bring it to the disk.

    Raises:
        OSError: if the disk does not take it.
    """
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Bring a directory's names to the disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
