"""Chunks, in which files travel."""

from __future__ import annotations

import google_crc32c

from sluice.v1 import weightsync_pb2 as pb

__all__ = ["MAX_CHUNK_BYTES", "ChunkError", "check_chunk", "make_chunk"]

MAX_CHUNK_BYTES = 1 << 20
"""Largest chunk of the contract: the size at which gRPC streams are fastest."""


class ChunkError(Exception):
    """A chunk's bytes are not those that were sent."""


def make_chunk(offset: int, data: bytes) -> pb.Chunk:
    """A chunk with its checksum."""
    return pb.Chunk(offset=offset, data=data, crc32c=google_crc32c.value(data))


def check_chunk(chunk: pb.Chunk) -> bytes:
    """The chunk's bytes.

    Raises:
        ChunkError: if their checksum differs.
    """
    data = chunk.data
    if google_crc32c.value(data) != chunk.crc32c:
        raise ChunkError(f"crc32c of the chunk at byte {chunk.offset} differs: it was damaged on its way")
    return data
