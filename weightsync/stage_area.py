"""A replica's own directory in shared memory, removed when the replica is gone, whoever notices.

Each directory holds a file that its replica keeps locked as long as it lives. A lock tells the living from the dead also
where process ids do not: after reuse, and between containers that share the memory.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

import structlog

from sluice.versions import Version

__all__ = ["StageArea", "remove_stale"]

_PREFIX = "sluice-"
_LOCK = ".lock"

log = structlog.get_logger(__name__)


class StageArea:
    """The directory ``<parent>/sluice-<run>-<replica>-<pid>``.

    Args:
        parent: Directory in shared memory, such as ``/dev/shm``.
        run: The run's name.
        replica: The replica's name.
    """

    def __init__(self, parent: Path, run: str, replica: str) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        remove_stale(parent)
        safe = "".join(letter if letter.isalnum() or letter in "._" else "_" for letter in replica)
        self.path = _fresh(parent, f"{_PREFIX}{run}-{safe}-{os.getpid()}")
        self._lock = _locked_file(self.path)

    def file(self, version: Version) -> Path:
        """Where a staged version lies."""
        return self.path / f"v{version}.safetensors"

    def close(self) -> None:
        """Remove the directory and all that is staged; without effect the second time."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def remove_stale(parent: Path) -> list[Path]:
    """Remove the directories whose replicas are dead.

    Returns:
        What was removed.
    """
    removed = []
    for directory in parent.glob(f"{_PREFIX}*"):
        if _is_dead(directory):
            shutil.rmtree(directory, ignore_errors=True)
            removed.append(directory)
            log.info("removed what a dead replica had staged", directory=str(directory))
    return removed


def _fresh(parent: Path, name: str) -> Path:
    """A directory of that name; several receivers of one process get a number behind it."""
    for number in range(1000):
        path = parent / (f"{name}.{number}" if number else name)
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return path
    raise OSError(f"{parent} holds a thousand directories {name}*: remove them")


def _locked_file(directory: Path) -> int:
    """Make the lock file; it gets its name when it is locked, so that nobody sees it unlocked while its replica lives."""
    unnamed = directory / f"{_LOCK}.new"
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    unnamed.rename(directory / _LOCK)
    return descriptor


def _is_dead(directory: Path) -> bool:
    """Whether nobody holds the lock. A directory without the file is being made, or none of ours."""
    try:
        descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
