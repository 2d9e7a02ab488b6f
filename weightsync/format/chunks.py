"""Chunks, in which files travel."""

from __future__ import annotations

import google_crc32c

from sluice.v1 import weightsync_pb2 as pb

__all__ = [
    "MAX_CHUNK_BYTES",
    "ChunkError",
    "ChunkSizeError",
    "ChunkSums",
    "check_chunk",
    "fill_chunk",
    "make_chunk",
    "next_cut",
]

MAX_CHUNK_BYTES = 1 << 20
"""Largest chunk of the contract: the size at which gRPC streams are fastest."""


class ChunkError(Exception):
    """A chunk's bytes are not those that were sent."""


class ChunkSizeError(ValueError):
    """A chunk is empty or larger than the contract allows."""


class ChunkSums:
    """Checksums of a file's chunks, so that each is computed once, however often the chunk travels.

    Only the chunks of the largest size are remembered, and the last one of the file: one number per MiB of the file,
    whatever ranges are asked for. Damage to the file on disk is therefore found by the receiver, not by the sender.

    Args:
        size: Bytes of the whole file.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._sums: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the number of checksums that are remembered."""
        return len(self._sums)

    def note(self, offset: int, length: int, crc32c: int) -> None:
        """Remember a checksum, if the chunk is one that `next_cut` makes of the whole file."""
        if self._is_usual(offset, length):
            self._sums[offset] = crc32c

    def of(self, offset: int, data: bytes) -> int:
        """Return the checksum of a chunk of the file."""
        known = self._sums.get(offset) if self._is_usual(offset, len(data)) else None
        if known is None:
            known = int(google_crc32c.value(data))
            self.note(offset, len(data), known)
        return known

    def _is_usual(self, offset: int, length: int) -> bool:
        return offset % MAX_CHUNK_BYTES == 0 and offset + length == next_cut(offset, self._size)


def next_cut(begin: int, end: int) -> int:
    """Where the chunk that begins at a byte ends: at the next multiple of the largest chunk."""
    return min((begin // MAX_CHUNK_BYTES + 1) * MAX_CHUNK_BYTES, end)


def fill_chunk(chunk: pb.Chunk, offset: int, data: bytes, crc32c: int | None = None) -> None:
    """Set a chunk and its checksum, computed where it is not given.

    A chunk that is part of a message is set there: handing it over would copy it.
    """
    chunk.offset = offset
    chunk.data = data
    chunk.crc32c = google_crc32c.value(data) if crc32c is None else crc32c


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
