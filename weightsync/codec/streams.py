"""The streams of a delta's block: changed positions and the steps of their values, in few bytes. See docs/delta-format.md.

Steps. The patterns of positive floats ascend with their values, those of negative ones descend. Flipping the lower bits of
the negative ones puts all patterns into one order, so that a small change of a value, also across zero, is a small difference
of integers. Every operation is modulo 2^bits, hence exact for any two patterns, NaN among them.

Most step codes of a block are small. They are written with 2, 4 or 8 bits, several to a byte, so that the entropy coder sees
several at once. The largest number of that many bits is an escape: the code follows in the planes, which hold such codes byte
by byte, first all lowest bytes, then all second bytes, and so on. With 0 bits every code is in the planes.

Positions. Where changes are sparse, a stream counts the elements between one change and the next: a byte below 255 is such a
gap, a byte 255 says "255 more, and no change yet". Where changes are rare, the lowest bits of each gap, which are noise, are
packed into a stream of their own, and the gaps count units of 4, 16 or 256 elements: fewer escapes, and a shorter alphabet
for the entropy coder. Where changes are frequent, one bit per element is smaller.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

Patterns = NDArray[np.uint16] | NDArray[np.uint32]
"""Bit patterns or step codes, one per element."""

WIDTHS = {"BF16": 2, "F16": 2, "F32": 4}
"""Bytes per element of the types that have a DELTA encoding."""

_SIGNED: dict[int, np.dtype[Any]] = {2: np.dtype("<i2"), 4: np.dtype("<i4")}
_UNSIGNED: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}

_WORD_BYTES = 8
_PIECE_BYTES = 1 << 20
"""Bytes that are compared at once: both sides and the mask stay in the second-level cache."""
_SINGLY_FROM = 1 / 4
"""From this fraction of differing words on, comparing all elements is faster."""

ESCAPE = 255
BITMAP = 255
"""Mode: one bit per element; every smaller mode is a number of low bits."""
_LOW_BITS = (8, 4, 2)
_BITMAP_FROM = 1 / 4
"""From this fraction of changed elements on, a bitmap is as small as gaps, and faster."""
_MEAN_GAP = 16
"""Smallest mean gap after its low bits are split off. The split bits are nearly uniform then, so packing them costs nothing."""

STEP_BITS = (0, 2, 4, 8)
_ESCAPES_AT_MOST = 1 / 4
"""Largest fraction of codes in the planes for which a width is used."""

_LEVEL = 1
"""The streams have no repetitions worth a search: this level's entropy coder comes within 2% of their entropy."""
_MAX_WINDOW_BYTES = 1 << 27
"""Bounds what a hostile frame can make the decoder allocate besides its output."""

_local = threading.local()


class CodecError(ValueError):
    """The data are not a stream of the stated encoding, or do not belong to this target."""


def patterns(octets: NDArray[np.uint8], width: int) -> Patterns:
    """Return dense bytes as bit patterns of `width` bytes, not copied."""
    return octets.view(_UNSIGNED[width])


def step_codes(new: Patterns, base: Patterns) -> Patterns:
    """Number the steps from base to new by their size: -1, 1, -2, 2, ... become 0, 1, 2, 3, ...

    Both are bit patterns of one type and length, each different from its base.
    """
    width = new.itemsize
    step = _monotone(new.view(_SIGNED[width]))
    step -= _monotone(base.view(_SIGNED[width]))
    zigzag = step << 1
    step >>= 8 * width - 1
    zigzag ^= step
    codes: Patterns = zigzag.view(_UNSIGNED[width])
    codes -= 1
    return codes


def take_steps(base: Patterns, codes: Patterns) -> Patterns:
    """Undo `step_codes`: return the new bit patterns; base and codes have one type and length."""
    width = base.itemsize
    zigzag = codes + _UNSIGNED[width].type(1)
    step = (zigzag >> 1).view(_SIGNED[width])
    step ^= -(zigzag & 1).view(_SIGNED[width])
    step += _monotone(base.view(_SIGNED[width]))
    new: Patterns = _monotone(step).view(_UNSIGNED[width])
    return new


def _monotone(signed: NDArray[np.signedinteger[Any]]) -> NDArray[np.signedinteger[Any]]:
    """Flip the bits below the sign in values whose sign bit is set. Applied twice, it returns the input."""
    bits = 8 * signed.itemsize
    flipped = signed >> (bits - 1)
    flipped &= signed.dtype.type((1 << (bits - 1)) - 1)
    flipped ^= signed
    return flipped


def changed_positions(new: Patterns, base: Patterns) -> NDArray[np.int64]:
    """Return the positions at which elements of two arrays of one type and length differ, ascending.

    Compares eight bytes at a time and looks at single elements only in words that differ.
    """
    per_word = _WORD_BYTES // new.itemsize
    whole = new.size // per_word * per_word
    found = [
        _in_words(new[:whole].view(np.uint64)[piece], base[:whole].view(np.uint64)[piece], new.dtype, piece.start)
        for piece in _pieces(whole // per_word, _WORD_BYTES)
    ]
    found.append(np.flatnonzero(new[whole:] != base[whole:]) + whole)
    return np.concatenate(found)


def count_changed(new: NDArray[np.uint8], base: NDArray[np.uint8], size: int) -> int:
    """Return how many elements of `size` bytes differ between two arrays of bytes."""
    pattern = np.dtype(f"<u{size}")
    left, right = new.view(pattern), base.view(pattern)
    return sum(int(np.count_nonzero(left[piece] != right[piece])) for piece in _pieces(left.size, size))


def _pieces(count: int, size: int) -> Iterator[slice]:
    step = _PIECE_BYTES // size
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _in_words(
    new: NDArray[np.uint64], base: NDArray[np.uint64], element: np.dtype[np.generic], first_word: int
) -> NDArray[np.int64]:
    words = np.flatnonzero(new != base)
    per_word = _WORD_BYTES // element.itemsize
    if words.size > new.size * _SINGLY_FROM:
        return np.flatnonzero(new.view(element) != base.view(element)) + first_word * per_word
    within = np.flatnonzero(new[words].view(element) != base[words].view(element))
    shift = per_word.bit_length() - 1
    positions: NDArray[np.int64] = words[within >> shift]
    positions += first_word
    positions <<= shift
    within &= per_word - 1
    positions += within
    return positions


def choose_mode(changed: int, elements: int) -> int:
    """Return how to write `changed` positions among `elements`: BITMAP or a number of low bits."""
    if changed >= elements * _BITMAP_FROM:
        return BITMAP
    return next((bits for bits in _LOW_BITS if elements >> bits >= changed * _MEAN_GAP), 0)


def write_positions(
    positions: NDArray[np.int64], elements: int, mode: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Write positions: ascending, at least one, each below `elements`, the length of the block.

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
    """Raise CodecError for stream lengths that no block of this size can have, before anything is allocated for them."""
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
    """Undo `write_positions`; the lengths are checked already. Raise CodecError if the streams do not hold such positions.

    Returns:
        `changed` positions, ascending, each below `elements`.
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


def choose_bits(codes: Patterns) -> int:
    """Return the smallest width that needs few escapes; 0 writes every code in full."""
    for bits in STEP_BITS[1:]:
        if np.count_nonzero(codes >= _escape(bits)) <= codes.size * _ESCAPES_AT_MOST:
            return bits
    return 0


def write_codes(codes: Patterns, bits: int) -> tuple[NDArray[np.uint8], list[NDArray[np.uint8]]]:
    """Write step codes in `choose_bits` bits: return the packed stream, and as many planes as an element has bytes."""
    if bits == 0:
        return np.empty(0, np.uint8), _planes(codes)
    small = np.minimum(codes, codes.dtype.type(_escape(bits))).astype(np.uint8)
    return pack_bits(small, bits), _planes(codes[codes >= _escape(bits)])


def read_codes(packed: NDArray[np.uint8], planes: list[NDArray[np.uint8]], count: int, bits: int) -> Patterns:
    """Undo `write_codes`: `count` codes from `packed_size(count, bits)` bytes, and as many planes as an element has bytes.

    Raises:
        CodecError: if the planes do not hold as many codes as the packed stream has escapes.
    """
    wide = np.stack(planes, axis=1).reshape(-1).view(_UNSIGNED[len(planes)])
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


def compress(data: bytes | memoryview) -> bytes:
    """Return one zstd frame that states its content size."""
    compressor = getattr(_local, "compressor", None)
    if compressor is None:
        compressor = _local.compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False)
    frame: bytes = compressor.compress(data)
    return frame


def decompress(frame: memoryview, size: int) -> bytes:
    """Undo `compress`. Expect exactly one frame of `size` bytes of content, and allocate no more than that.

    Raises:
        CodecError: if the data are anything else.
    """
    try:
        if zstandard.frame_content_size(frame) != size:
            raise CodecError(f"a zstd frame does not contain the {size} bytes announced; pull the version again")
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        data: bytes = decompressor.decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"a zstd frame is damaged ({error}); pull the version again") from error
    if len(data) != size:
        raise CodecError(f"a zstd frame contains {len(data)} bytes, announced were {size}; pull the version again")
    return data


def pack(stream: bytes | memoryview) -> bytes | memoryview:
    """Return the stream as one zstd frame, or unchanged if the frame would not be smaller."""
    frame = compress(stream) if len(stream) else b""
    return frame if len(frame) < len(stream) else stream


def unpack(stored: memoryview, size: int) -> bytes | memoryview:
    """Undo `pack`: return a stream of `size` bytes; raise CodecError if the stored bytes are not such a stream."""
    if len(stored) == size:
        return stored
    return decompress(stored, size)


def packed_size(count: int, bits: int) -> int:
    """Return the bytes that `count` numbers of `bits` bits take."""
    return -(-count * bits // 8)


def pack_bits(numbers: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pack numbers below `2^bits`; unused bits of the last byte are 0."""
    if bits in {0, 8}:
        return numbers[: numbers.size if bits else 0]
    per_byte = 8 // bits
    padded = np.zeros(packed_size(numbers.size, bits) * per_byte, np.uint8)
    padded[: numbers.size] = numbers
    packed = padded[::per_byte].copy()
    for place in range(1, per_byte):
        packed |= padded[place::per_byte] << np.uint8(bits * place)
    return packed


def unpack_bits(packed: NDArray[np.uint8], count: int, bits: int) -> NDArray[np.uint8]:
    """Undo `pack_bits`: the first `count` numbers of `packed_size(count, bits)` bytes; zeros for 0 bits."""
    if bits == 8:
        return packed
    if bits == 0:
        return np.zeros(count, np.uint8)
    per_byte = 8 // bits
    unpacked = np.empty((packed.size, per_byte), np.uint8)
    for place in range(per_byte):
        np.right_shift(packed, np.uint8(bits * place), out=unpacked[:, place])
    unpacked &= np.uint8((1 << bits) - 1)
    return unpacked.reshape(-1)[:count]
