"""The chunks in which files travel over sockets: how a chunk is checked, written and read with as few copies as possible.

Protobuf copies a message's bytes at each access. `push_request` and `read_pull_response` therefore write
and read the wire format themselves (https://protobuf.dev/programming-guides/encoding/). A message whose fields come in
another order than protobuf libraries write them is left to protobuf.
"""

from __future__ import annotations

from collections.abc import Sequence

import google_crc32c
import numpy as np
from google.protobuf.message import DecodeError

from sluice.v1 import weightsync_pb2 as pb

MAX_CHUNK_BYTES = 1 << 20
"""Largest chunk of the contract: the size at which gRPC streams are fastest."""

_CHUNK = 0x0A  # PullWeightsResponse.chunk: field 1, length-delimited
_PUSHED_CHUNK = b"\x12"  # PushWeightsRequest.chunk: field 2, length-delimited
_OFFSET = 0x08  # Chunk.offset: field 1, varint
_DATA = 0x12  # Chunk.data: field 2, length-delimited
_CRC32C = 0x1D  # Chunk.crc32c: field 3, four bytes
_CRC32C_BYTES = 4
_MOST_VARINT_BYTES = 10
"""Longest number of the wire format: 64 bits, seven to a byte."""


class ChunkError(Exception):
    """A chunk's bytes are not those that were sent."""


class ChunkSizeError(ValueError):
    """A chunk is empty, or larger than the contract allows."""


def fill_chunk(chunk: pb.Chunk, offset: int, data: bytes, crc32c: int | None = None) -> None:
    """Set a chunk and its checksum, computed where it is not given.

    Pass the chunk inside its message: assigning a finished chunk to the message would copy it.
    """
    chunk.offset = offset
    chunk.data = data
    chunk.crc32c = google_crc32c.value(data) if crc32c is None else crc32c


def check_chunk(chunk: pb.Chunk) -> bytes:
    """Check a chunk and return its bytes.

    Protobuf copies the bytes at each access, so only this function reads them.

    Raises:
        ChunkSizeError, ChunkError: if there are no bytes or too many, or their checksum differs.
    """
    data = chunk.data
    _check(chunk.offset, data, chunk.crc32c)
    return data


def _check(offset: int, data: bytes | memoryview, crc32c: int) -> None:
    if not 0 < len(data) <= MAX_CHUNK_BYTES:
        raise ChunkSizeError(f"a chunk has {len(data)} bytes; send 1 to {MAX_CHUNK_BYTES}")
    # An array, because the library takes no memoryview and a copy to bytes would cost as much as the sum.
    if google_crc32c.value(np.frombuffer(data, dtype=np.uint8)) != crc32c:
        raise ChunkError(f"crc32c of the chunk at byte {offset} differs: it was damaged in transit")


def read_pull_response(message: bytes) -> tuple[int, memoryview]:
    """Check the chunk of a serialised `PullWeightsResponse`; return its offset and a view of its bytes.

    Raises:
        ChunkSizeError: if there are no bytes, or too many.
        ChunkError: if the message cannot be read, or the checksum differs.
    """
    try:
        parsed = _parse(memoryview(message))
    except IndexError:
        parsed = None
    if parsed is None:
        try:
            chunk = pb.PullWeightsResponse.FromString(message).chunk
        except DecodeError as error:
            raise ChunkError(f"a message of a pull cannot be read: {error}") from error
        parsed = chunk.offset, memoryview(chunk.data), chunk.crc32c
    offset, data, crc32c = parsed
    _check(offset, data, crc32c)
    return offset, data


def _parse(message: memoryview) -> tuple[int, memoryview, int] | None:
    """Return offset, data and crc32c; None if the fields come in another order, or there are other fields."""
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
    return offset, message[begin:end], int.from_bytes(message[end + 1 :], "little")


def push_request(offset: int, views: Sequence[memoryview]) -> bytes:
    """Return a serialised PushWeightsRequest with a chunk; its bytes are copied once.

    Fields in the order of their numbers, as protobuf writes them: chunk = 2 {offset = 1, data = 2, crc32c = 3}.
    """
    checksum = 0
    for view in views:
        checksum = google_crc32c.extend(checksum, np.frombuffer(view, dtype=np.uint8))
    length = sum(map(len, views))
    head = (bytes((_OFFSET,)) + _to_varint(offset) if offset else b"") + bytes((_DATA,)) + _to_varint(length)
    tail = bytes((_CRC32C,)) + checksum.to_bytes(_CRC32C_BYTES, "little") if checksum else b""
    return b"".join((_PUSHED_CHUNK, _to_varint(len(head) + length + len(tail)), head, *views, tail))


def _to_varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    """Read a number and the position behind it; raise IndexError if the number is longer than protobuf allows."""
    value = 0
    for index in range(_MOST_VARINT_BYTES):
        byte = message[position + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, position + index + 1
    raise IndexError("a varint has no end")
