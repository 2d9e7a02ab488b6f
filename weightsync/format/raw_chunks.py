"""Reads the messages of a pull without the copies that protobuf makes of their bytes.

A message that is written in another order than every protobuf library writes it is left to protobuf.
Wire format: https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

from dataclasses import dataclass

import google_crc32c
import numpy as np
from google.protobuf.message import DecodeError

from sluice.v1 import weightsync_pb2 as pb
from weightsync.format.chunks import MAX_CHUNK_BYTES, ChunkError, ChunkSizeError

__all__ = ["RawChunk", "parse_pull_response"]

_CHUNK = 0x0A  # PullWeightsResponse.chunk: field 1, length-delimited
_OFFSET = 0x08  # Chunk.offset: field 1, varint
_DATA = 0x12  # Chunk.data: field 2, length-delimited
_CRC32C = 0x1D  # Chunk.crc32c: field 3, four bytes
_CRC32C_BYTES = 4
_MOST_VARINT_BYTES = 10
"""Longest number of the wire format: 64 bits, seven to a byte."""


@dataclass(frozen=True, slots=True)
class RawChunk:
    """Bytes of a shard.

    Attributes:
        offset: Where they belong in the file.
        data: The bytes; a view of the message.
        crc32c: Their checksum as it came; None where they came from memory and need none.
    """

    offset: int
    data: memoryview
    crc32c: int | None = None

    def check(self) -> memoryview:
        """The bytes, once their checksum is found right.

        Raises:
            ChunkSizeError: if there are none or too many.
            ChunkError: if their checksum differs.
        """
        if self.crc32c is None:
            return self.data
        if not 0 < len(self.data) <= MAX_CHUNK_BYTES:
            raise ChunkSizeError(f"a chunk has {len(self.data)} bytes; send 1 to {MAX_CHUNK_BYTES}")
        # An array, because the library takes no memoryview and a copy to bytes would cost as much as the sum.
        if google_crc32c.value(np.frombuffer(self.data, dtype=np.uint8)) != self.crc32c:
            raise ChunkError(f"crc32c of the chunk at byte {self.offset} differs: it was damaged on its way")
        return self.data


def parse_pull_response(message: bytes) -> RawChunk:
    """The chunk of a serialised `PullWeightsResponse`.

    Raises:
        ChunkError: if the message is none.
    """
    try:
        chunk = _parse(memoryview(message))
    except IndexError:
        chunk = None
    if chunk is not None:
        return chunk
    try:
        parsed = pb.PullWeightsResponse.FromString(message).chunk
    except DecodeError as error:
        raise ChunkError(f"a message of a pull cannot be read: {error}") from error
    return RawChunk(parsed.offset, memoryview(parsed.data), parsed.crc32c)


def _parse(message: memoryview) -> RawChunk | None:
    """None where fields come in another order, or others than these."""
    if message[0] != _CHUNK:
        return None
    length, position = _varint(message, 1)
    if position + length != len(message):
        return None
    offset = 0
    if message[position] == _OFFSET:
        offset, position = _varint(message, position + 1)
    if message[position] != _DATA:
        return None
    length, begin = _varint(message, position + 1)
    end = begin + length
    if len(message) != end + 1 + _CRC32C_BYTES or message[end] != _CRC32C:
        return None
    return RawChunk(offset, message[begin:end], int.from_bytes(message[end + 1 :], "little"))


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    """Read a number and the position behind it; raise IndexError if the number is longer than protobuf allows."""
    value = 0
    for index in range(_MOST_VARINT_BYTES):
        byte = message[position + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, position + index + 1
    raise IndexError("a varint has no end")
