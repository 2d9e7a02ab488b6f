"""The DELTA encoding of one slice: a header, then blocks that stand for themselves.

Byte by byte in docs/delta-format.md.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weightsync.codec.encoding import CodecError
from weightsync.codec.integers import Patterns, changed_positions, step_codes, take_steps
from weightsync.codec.streams import (
    STEP_BITS,
    check_lengths,
    choose_bits,
    choose_mode,
    pack,
    packed_size,
    read_codes,
    read_positions,
    unpack,
    write_codes,
    write_positions,
)

__all__ = ["BLOCK_LOG2", "BLOCK_LOG2_SPARSE", "apply_delta", "encode_block", "encode_delta"]

BLOCK_LOG2 = 20
"""Elements of a block, as a power of two: the arrays of one whose elements all change are a few MiB each."""
BLOCK_LOG2_SPARSE = 22
"""The same where few change: the block's tables are then still a small part of its streams."""
_BLOCK_LOG2_LIMITS = range(8, 25)

_MAGIC = b"SLD1"
_HEADER = struct.Struct("<4sBBHQ")
"""Magic, bytes per element, log2 of the block's elements, zero, elements."""
_CHANGED = struct.Struct("<I")
_MODES = struct.Struct("<BBH")
"""Mode of the positions, bits per packed step, zero."""
_LENGTHS = struct.Struct("<II")
"""Bytes of a stream, bytes as it is stored."""


def encode_delta(new: Patterns, base: Patterns, block_log2: int = BLOCK_LOG2) -> tuple[bytes, int]:
    """Encode what differs.

    Args:
        new: Bit patterns.
        base: Bit patterns, of the same type and length.
        block_log2: Elements of a block, as a power of two.

    Returns:
        The stream, and the number of elements that differ.
    """
    parts: list[bytes | memoryview] = [_HEADER.pack(_MAGIC, new.itemsize, block_log2, 0, new.size)]
    total = 0
    for start in range(0, new.size, 1 << block_log2):
        block, changed = encode_block(new[start : start + (1 << block_log2)], base[start : start + (1 << block_log2)])
        parts += block
        total += changed
    return b"".join(parts), total


def encode_block(new: Patterns, base: Patterns) -> tuple[list[bytes | memoryview], int]:
    """Encode one block: its bytes in parts, and the number of elements that differ."""
    positions = changed_positions(new, base)
    if not positions.size:
        return [_CHANGED.pack(0)], 0
    codes = step_codes(new[positions], base[positions])
    mode, bits = choose_mode(positions.size, new.size), choose_bits(codes)
    gaps, lows = write_positions(positions, new.size, mode)
    packed, planes = write_codes(codes, bits)
    streams = [gaps, lows, packed, *planes]
    stored = [pack(stream.data) for stream in streams]
    lengths = (_LENGTHS.pack(len(stream), len(each)) for stream, each in zip(streams, stored, strict=True))
    return [_CHANGED.pack(positions.size), _MODES.pack(mode, bits, 0), *lengths, *stored], positions.size


def apply_delta(data: memoryview, target: Patterns) -> None:
    """Apply a stream in place.

    Args:
        data: The stream.
        target: Bit patterns of the base; writable.

    Raises:
        CodecError: if the data are no stream for this target. Blocks before the damaged one are applied by then.
    """
    block = _read_header(data, target)
    reader = _Reader(data, _HEADER.size)
    for start in range(0, target.size, block):
        _apply_block(reader, target[start : start + block])
    if reader.offset != len(data):
        raise CodecError("bytes follow the last block of a delta; pull the version again")


def _read_header(data: memoryview, target: Patterns) -> int:
    if len(data) < _HEADER.size:
        raise CodecError("a delta is shorter than its header; pull the version again")
    magic, width, block_log2, zero, elements = _HEADER.unpack_from(data)
    if magic != _MAGIC or zero or block_log2 not in _BLOCK_LOG2_LIMITS:
        raise CodecError("a delta has a header that this release does not know; update it, or pull the version again")
    if (width, elements) != (target.itemsize, target.size):
        raise CodecError(
            f"a delta of {elements} elements of {width} bytes cannot be applied to {target.size} elements of"
            f" {target.itemsize} bytes; pull the dense form"
        )
    return 1 << int(block_log2)


@dataclass(slots=True)
class _Reader:
    """Goes through the bytes, never beyond their end."""

    data: memoryview
    offset: int

    def take(self, size: int) -> memoryview:
        end = self.offset + size
        if end > len(self.data):
            raise CodecError("a delta ends within a block; pull the version again")
        taken = self.data[self.offset : end]
        self.offset = end
        return taken


def _apply_block(reader: _Reader, target: Patterns) -> None:
    (changed,) = _CHANGED.unpack(reader.take(_CHANGED.size))
    if not changed:
        return
    mode, bits, zero = _MODES.unpack(reader.take(_MODES.size))
    width = target.itemsize
    lengths = [_LENGTHS.unpack(reader.take(_LENGTHS.size)) for _ in range(3 + width)]
    if changed > target.size or bits not in STEP_BITS or zero:
        raise CodecError("a block of a delta has an impossible header; pull the version again")
    _check_streams(lengths, changed, target.size, mode, bits)
    gaps, lows, packed, *planes = (_unpacked(reader, size, stored) for size, stored in lengths)
    positions = read_positions(gaps, lows, changed, target.size, mode)
    codes = read_codes(packed, planes, changed, bits)
    target[positions] = take_steps(target[positions], codes)


def _check_streams(lengths: list[tuple[int, int]], changed: int, elements: int, mode: int, bits: int) -> None:
    gaps, lows, packed, *planes = (size for size, _ in lengths)
    check_lengths(mode, changed, elements, gaps, lows)
    if packed != packed_size(changed, bits) or planes[0] > changed or len(set(planes)) != 1:
        raise CodecError("the streams of steps have impossible lengths; pull the version again")
    if any(stored > size for size, stored in lengths):
        raise CodecError("a stream is stored in more bytes than it has; pull the version again")


def _unpacked(reader: _Reader, size: int, stored: int) -> NDArray[np.uint8]:
    return np.frombuffer(unpack(reader.take(stored), size), np.uint8)
