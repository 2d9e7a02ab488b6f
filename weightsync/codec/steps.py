"""Step codes as streams of bytes.

Most codes of a block are small. They are written with 2, 4 or 8 bits, several to a byte, so that the entropy coder sees
several at once; the largest number of that many bits says that the code follows in the planes, which hold such codes byte by
byte: all lowest bytes, all second bytes, and so on. With 0 bits every code is in the planes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weightsync.codec.bits import pack_bits, unpack_bits
from weightsync.codec.encoding import CodecError
from weightsync.codec.integers import Patterns, pattern_type

__all__ = ["STEP_BITS", "choose_bits", "read_codes", "write_codes"]

STEP_BITS = (0, 2, 4, 8)
_ESCAPES_AT_MOST = 1 / 4
"""Share of codes in the planes up to which a width is taken."""


def choose_bits(codes: Patterns) -> int:
    """The smallest width with few escapes, 0 if there is none."""
    for bits in STEP_BITS[1:]:
        if np.count_nonzero(codes >= _escape(bits)) <= codes.size * _ESCAPES_AT_MOST:
            return bits
    return 0


def write_codes(codes: Patterns, bits: int) -> tuple[NDArray[np.uint8], list[NDArray[np.uint8]]]:
    """Write step codes.

    Args:
        codes: Step codes.
        bits: From `choose_bits`.

    Returns:
        The packed stream and the planes, as many as an element has bytes.
    """
    if bits == 0:
        return np.empty(0, np.uint8), _planes(codes)
    small = np.minimum(codes, codes.dtype.type(_escape(bits))).astype(np.uint8)
    return pack_bits(small, bits), _planes(codes[codes >= _escape(bits)])


def read_codes(packed: NDArray[np.uint8], planes: list[NDArray[np.uint8]], count: int, bits: int) -> Patterns:
    """Undo `write_codes`.

    Args:
        packed: `packed_size(count, bits)` bytes.
        planes: As many as an element has bytes, of one length.
        count: Number of codes.
        bits: From the header.

    Raises:
        CodecError: if the planes do not hold as many codes as the packed stream has escapes.
    """
    wide = np.stack(planes, axis=1).reshape(-1).view(pattern_type(len(planes)))
    if bits == 0:
        codes, escapes = wide, count
    else:
        codes = unpack_bits(packed, count, bits).astype(wide.dtype)
        escaped = np.flatnonzero(codes == _escape(bits))
        escapes = escaped.size
        if escapes == wide.size:
            codes[escaped] = wide
    if escapes != wide.size:
        raise CodecError(f"{wide.size} steps are written in full, {escapes} were announced; pull the version again")
    return codes


def _escape(bits: int) -> int:
    return (1 << bits) - 1


def _planes(codes: Patterns) -> list[NDArray[np.uint8]]:
    width = codes.itemsize
    octets = codes.view(np.uint8).reshape(-1, width)
    return [np.ascontiguousarray(octets[:, plane]) for plane in range(width)]
