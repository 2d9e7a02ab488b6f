"""Open files with locks (flock(2)) that end with their process, and do not pass to the children that it forks."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

__all__ = ["close", "is_at", "lock_now", "open_private"]

_open: set[int] = set()
"""Descriptors that a forked child closes: an engine's process would keep removed files in memory."""


def lock_now(descriptor: int, kind: int) -> bool:
    """Lock without waiting; False if others hold it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in {errno.EWOULDBLOCK, errno.EACCES}:
            raise
        return False
    return True


def is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file still has this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def open_private(path: Path, flags: int) -> int:
    """Open a file that nobody else reads; what is made is this user's alone. Close it with `close`.

    Raises:
        OSError: as `os.open`.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    _open.add(descriptor)
    return descriptor


def close(descriptor: int) -> None:
    """Close what `open_private` opened, and give its lock back."""
    _open.discard(descriptor)
    os.close(descriptor)


def _close_in_child() -> None:
    for descriptor in _open:
        os.close(descriptor)
    _open.clear()


os.register_at_fork(after_in_child=_close_in_child)
