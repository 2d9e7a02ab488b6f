"""Reads shards from files of this host in place of a transfer."""

from __future__ import annotations

import os
from pathlib import Path

from sluice.host_files import PeerFileError, open_peer_file
from sluice.v1 import weightsync_pb2 as pb
from weightsync.format.chunks import RawChunk
from weightsync.receive.pull import ChunkSink, PullError

__all__ = ["is_local", "read_local"]

_BLOCK_BYTES = 1 << 20
"""Read at a time; stays in the processor's cache while it is hashed and written."""


def is_local(file: pb.LocalFile) -> bool:
    """Whether the path leads to that very file: on another host, or in another container, it does not."""
    try:
        status = Path(file.path).stat()
    except (OSError, ValueError):
        return False
    return bool(file.path) and (status.st_dev, status.st_ino) == (file.device, file.inode)


def read_local(file: pb.LocalFile, size: int, sink: ChunkSink, end: int) -> None:
    """Fill a sink from a file. Blocking. What is wrong with the bytes shows in their digests.

    By reads and not through a map: a file that is cut off meanwhile is an error then, not a signal.

    Args:
        file: The file.
        size: Bytes that it must have.
        sink: Takes them, from the first that it wants on.
        end: Byte after the last one wanted.

    Raises:
        PullError: if it cannot be read, or is another file.
        StagingError: if it holds something else than was announced.
        OSError: if there is no room for it.
    """
    try:
        descriptor = open_peer_file(file.path, file.device, file.inode, size)
    except PeerFileError as error:
        raise PullError(str(error)) from error
    try:
        block = memoryview(bytearray(min(_BLOCK_BYTES, size)))
        while sink.position < end:
            part = block[: min(len(block), end - sink.position)]
            count = _read(file.path, descriptor, part, sink.position)
            sink.feed(RawChunk(sink.position, block[:count]))
    finally:
        os.close(descriptor)


def _read(path: str, descriptor: int, block: memoryview, position: int) -> int:
    try:
        count = os.preadv(descriptor, [block], position)
    except OSError as error:
        raise PullError(f"{path} cannot be read: {error}") from error
    if not count:
        raise PullError(f"{path} ends at byte {position}")
    return count
