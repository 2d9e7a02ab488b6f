"""Memory that holds a whole safetensors file and, where it can, is a file that another process of the host may read."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import weakref
from pathlib import Path

import numpy as np
import structlog
from numpy.typing import NDArray

from sluice.host_files import close, open_private, remove_unlocked
from sluice.v1 import weightsync_pb2 as pb

__all__ = ["HOST_DIRECTORY", "KeptFile", "sweep"]

HOST_DIRECTORY = Path("/dev/shm")  # noqa: S108  shared memory by its Linux name; files in it are made for their owner alone
"""Where processes of one host hand files over without a copy on a disk."""

_PREFIX = "sluice-push-"

_SPARE_COPIES = 3
"""Copies of the file that must fit into shared memory beside it: an engine on the host stages two, and one is spare."""

log = structlog.get_logger(__name__)


class KeptFile:
    """Writable memory of a fixed size.

    With a directory of shared memory it is a file there, removed by `close`, with the object, or at the end of the process.
    The process holds a lock on it; `sweep` removes files without one, which killed processes left behind. If the
    directory has no room, it is ordinary memory.

    Args:
        size: Bytes, at least 1.
        directory: Directory of shared memory; None: ordinary memory.
    """

    def __init__(self, size: int, directory: Path | None = None) -> None:
        descriptor, path = -1, None
        if directory is not None:
            sweep(directory)
            descriptor, path = _new_file(size, directory)
        self._descriptor, self.path = descriptor, path
        self.close = weakref.finalize(self, _remove, os.getpid(), descriptor, path)
        self.bytes: NDArray[np.uint8] = np.frombuffer(mmap.mmap(descriptor, size), dtype=np.uint8)

    def local(self, shard: str) -> pb.LocalFile | None:
        """Return the file as the contract names it, None if there is none.

        Args:
            shard: Name of the shard that it holds.
        """
        if self.path is None:
            return None
        status = os.fstat(self._descriptor)
        return pb.LocalFile(shard=shard, path=str(self.path), device=status.st_dev, inode=status.st_ino)


def sweep(directory: Path) -> None:
    """Remove files of this user's processes that are gone."""
    for path in directory.glob(f"{_PREFIX}*"):
        remove_unlocked(path)


def _new_file(size: int, directory: Path) -> tuple[int, Path | None]:
    """Return descriptor and path of a new file; -1 and None if the directory cannot hold it."""
    descriptor = -1
    try:
        space = os.statvfs(directory)
        if space.f_bavail * space.f_frsize < (1 + _SPARE_COPIES) * size:
            log.info(
                "shared memory has no room to hand weights over; they are sent by socket", directory=str(directory)
            )
            return -1, None
        descriptor = open_private(directory.resolve(), os.O_TMPFILE | os.O_RDWR)
        os.posix_fallocate(descriptor, 0, size)  # now, rather than by a SIGBUS at a later write
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path = directory / f"{_PREFIX}{secrets.token_hex(8)}"
        # The file gets its name when it is locked. Only linkat(2) follows the link in /proc; Python calls it where a
        # directory descriptor is given.
        os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor, follow_symlinks=True)
    except OSError as error:
        log.info("weights cannot be handed over in shared memory; they are sent by socket", reason=str(error))
        if descriptor >= 0:
            close(descriptor)
        return -1, None
    return descriptor, path


def _remove(owner: int, descriptor: int, path: Path | None) -> None:
    if path is None or os.getpid() != owner:  # at the end of a forked child, which has closed the file
        return
    path.unlink(missing_ok=True)
    close(descriptor)
