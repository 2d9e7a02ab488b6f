"""Chunks, in which files travel."""

from __future__ import annotations

import google_crc32c

from sluice.v1 import weightsync_pb2 as pb

__all__ = ["MAX_CHUNK_BYTES", "ChunkError", "ChunkSizeError", "check_chunk", "fill_chunk", "make_chunk"]

MAX_CHUNK_BYTES = 1 << 20
"""Largest chunk of the contract: the size at which gRPC streams are fastest."""


class ChunkError(Exception):
    """A chunk's bytes are not those that were sent."""


class ChunkSizeError(ValueError):
    """A chunk is empty or larger than the contract allows."""


def fill_chunk(chunk: pb.Chunk, offset: int, data: bytes) -> None:
    """Set a chunk and its checksum. A chunk that is part of a message is set there: handing it over would copy it."""
    chunk.offset = offset
    chunk.data = data
    chunk.crc32c = google_crc32c.value(data)


def make_chunk(offset: int, data: bytes) -> pb.Chunk:
    """A chunk with its checksum."""
    chunk = pb.Chunk()
    fill_chunk(chunk, offset, data)
    return chunk


def check_chunk(chunk: pb.Chunk) -> bytes:
    """The chunk's bytes; protobuf copies them each time that they are looked at, so this is the only place that does.

    Raises:
        ChunkSizeError: if there are none or too many.
        ChunkError: if their checksum differs.
    """
    data = chunk.data
    if not 0 < len(data) <= MAX_CHUNK_BYTES:
        raise ChunkSizeError(f"a chunk has {len(data)} bytes; send 1 to {MAX_CHUNK_BYTES}")
    if google_crc32c.value(data) != chunk.crc32c:
        raise ChunkError(f"crc32c of the chunk at byte {chunk.offset} differs: it was damaged on its way")
    return data
