"""Reads a pushed shard from a file of the same host, if the caller may name it. Blocking; called in threads."""

from __future__ import annotations

import os
from pathlib import Path

from sluice.host_files import PeerFileError, open_peer_file
from sluice.v1 import weightsync_pb2 as pb
from weightsync.format.chunks import MAX_CHUNK_BYTES
from weightsync.service.upload import Upload

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
            self._descriptor = open_peer_file(file.path, file.device, file.inode, size, below=directory)
        except PeerFileError as error:
            raise NoLocalFileError(f"{error} (weightsync.local_dir)") from error

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
