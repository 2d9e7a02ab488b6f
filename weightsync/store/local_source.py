"""Reads a pushed shard from a file of the same host, if the caller may name it. Blocking; called in threads."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from sluice.v1 import weightsync_pb2 as pb
from weightsync.format.chunks import MAX_CHUNK_BYTES
from weightsync.store.upload import Upload

__all__ = ["LocalSource", "NoLocalFileError"]


class NoLocalFileError(Exception):
    """This process does not see the file, or may not read it."""


class LocalSource:
    """A file below the configured directory, open.

    Args:
        file: The file as the pusher sees it.
        size: Bytes that it must have.
        directory: Where such files may lie; None: nowhere.

    Raises:
        NoLocalFileError: if it is not that file, or lies elsewhere.
    """

    def __init__(self, file: pb.LocalFile, size: int, directory: Path | None) -> None:
        if directory is None:
            raise NoLocalFileError("local files are switched off (weightsync.local_dir)")
        try:
            # Neither a symbolic link nor a pipe is followed or waited for.
            self._descriptor = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise NoLocalFileError(f"{file.path} cannot be opened ({error})") from error
        try:
            self._check(file, size, directory)
        except NoLocalFileError:
            self.close()
            raise

    def _check(self, file: pb.LocalFile, size: int, directory: Path) -> None:
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode) or (status.st_dev, status.st_ino) != (file.device, file.inode):
            raise NoLocalFileError(f"{file.path} is another file here")
        if status.st_size != size:
            raise NoLocalFileError(f"{file.path} has {status.st_size} bytes, not {size}")
        # Asked of the kernel, because a directory on the path may be a symbolic link.
        found = Path(f"/proc/self/fd/{self._descriptor}").readlink()
        if not found.is_relative_to(directory.resolve()):
            raise NoLocalFileError(f"{file.path} does not lie below {directory} (weightsync.local_dir)")

    def copy(self, upload: Upload, ticket: object, begin: int, end: int) -> None:
        """Give bytes `begin` to before `end` to an upload.

        Raises:
            NoLocalFileError: if the file ends before.
            SupersededError, OffsetError, LayoutError, OSError: as `Upload.append`.
        """
        while begin < end:
            data = os.pread(self._descriptor, min(MAX_CHUNK_BYTES, end - begin), begin)
            if not data:
                raise NoLocalFileError(f"the file ends at byte {begin}")
            upload.append(ticket, begin, data)
            begin += len(data)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
