"""Ascending positions as streams of bytes.

Where changes are sparse, the elements between one change and the next are counted: a byte below 255 is such a gap, a byte 255
says "255 more, and no change yet". Where changes are rare, the lowest bits of each gap, which are noise, go to a stream of
their own, packed, and the gaps count units of 4, 16 or 256 elements: fewer escapes, and a shorter alphabet for the entropy coder. Where changes are frequent, a bit per element is smaller.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weightsync.codec.bits import pack_bits, packed_size, unpack_bits
from weightsync.codec.encoding import CodecError

__all__ = ["BITMAP", "check_lengths", "choose_mode", "read_positions", "write_positions"]

ESCAPE = 255
BITMAP = 255
"""Mode: one bit per element; every smaller mode is a number of low bits."""
_LOW_BITS = (8, 4, 2)
_BITMAP_FROM = 1 / 4
"""Share of changed elements from which on a bitmap is as small as gaps, and quicker."""
_MEAN_GAP = 16
"""Gaps are cut to no less than this on average: the bits cut off are even enough to lose nothing by packing them."""


def choose_mode(changed: int, elements: int) -> int:
    """How to write `changed` positions among `elements`: BITMAP or a number of low bits."""
    if changed >= elements * _BITMAP_FROM:
        return BITMAP
    return next((bits for bits in _LOW_BITS if elements >> bits >= changed * _MEAN_GAP), 0)


def write_positions(
    positions: NDArray[np.int64], elements: int, mode: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Write positions.

    Args:
        positions: Ascending, at least one, each below `elements`.
        elements: Length of the block.
        mode: From `choose_mode`.

    Returns:
        The stream of gaps, or the bitmap; and the stream of low bits, or nothing.
    """
    nothing = np.empty(0, np.uint8)
    if mode == BITMAP:
        bits = np.zeros(elements, np.bool_)
        bits[positions] = True
        return np.packbits(bits, bitorder="little"), nothing
    gaps = np.diff(positions, prepend=-1)
    gaps -= 1
    lows = pack_bits((gaps & ((1 << mode) - 1)).astype(np.uint8), mode)
    gaps >>= mode
    escapes = gaps // ESCAPE
    gaps -= escapes * ESCAPE
    ends = np.cumsum(escapes)
    ends += np.arange(ends.size)
    stream = np.full(int(ends[-1]) + 1, ESCAPE, np.uint8)
    stream[ends] = gaps
    return stream, lows


def check_lengths(mode: int, changed: int, elements: int, gaps: int, lows: int) -> None:
    """Refuse stream lengths that no block of this size can have, before anything is allocated for them.

    Raises:
        CodecError: if so.
    """
    if mode == BITMAP:
        possible = gaps == -(-elements // 8) and lows == 0
    elif mode in (0, *_LOW_BITS):
        possible = changed <= gaps <= changed + (elements >> mode) // ESCAPE and lows == packed_size(changed, mode)
    else:
        raise CodecError(f"positions are written in mode {mode}, which this release does not know; update it")
    if not possible:
        raise CodecError("the streams of positions have impossible lengths; pull the version again")


def read_positions(
    gaps: NDArray[np.uint8], lows: NDArray[np.uint8], changed: int, elements: int, mode: int
) -> NDArray[np.int64]:
    """Undo `write_positions`; the lengths are checked.

    Returns:
        `changed` positions, ascending, each below `elements`.

    Raises:
        CodecError: if the streams say something else.
    """
    if mode == BITMAP:
        positions = np.flatnonzero(np.unpackbits(gaps, bitorder="little").view(np.bool_))
    else:
        if gaps[-1] == ESCAPE:
            raise CodecError("the stream of gaps ends within a gap; pull the version again")
        positions = np.cumsum(gaps, dtype=np.int64)[gaps != ESCAPE]
        positions <<= mode
        positions += np.arange(positions.size)
        if mode and positions.size == changed:
            positions += np.cumsum(unpack_bits(lows, changed, mode), dtype=np.int64)
    if positions.size != changed or positions[-1] >= elements:
        raise CodecError("the streams of positions do not fit the tensor; pull the version again")
    return positions
