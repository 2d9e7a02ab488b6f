"""Floating-point bit patterns as integers in the order of their values, where two arrays of them differ, and by how much.

The patterns of positive floats ascend with their values, those of negative ones descend. Turning over the lower bits of the
negative ones puts all patterns into one order, so that a small change of a value, also across zero, is a small difference of
integers. Every operation is modulo 2^bits, hence exact for any two patterns, NaN among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "WIDTHS",
    "Patterns",
    "changed_positions",
    "count_changed",
    "pattern_type",
    "patterns",
    "step_codes",
    "take_steps",
]

Patterns = NDArray[np.uint16] | NDArray[np.uint32]
"""Bit patterns or step codes, one per element."""

WIDTHS = {"BF16": 2, "F16": 2, "F32": 4}
"""Bytes per element of the types that have a DELTA encoding."""

_SIGNED: dict[int, np.dtype[Any]] = {2: np.dtype("<i2"), 4: np.dtype("<i4")}
_UNSIGNED: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}

_WORD_BYTES = 8
_PIECE_BYTES = 1 << 20
"""Compared at once: both sides and the mask stay in the second-level cache."""
_SINGLY_FROM = 1 / 4
"""Share of differing words from which on it is quicker to compare all elements."""


def pattern_type(width: int) -> np.dtype[Any]:
    """Return the numpy type of a bit pattern of `width` bytes."""
    return _UNSIGNED[width]


def step_codes(new: Patterns, base: Patterns) -> Patterns:
    """Number the steps from base to new by their size: -1, 1, -2, 2, ... become 0, 1, 2, 3, ...

    Args:
        new: Bit patterns, each different from its base.
        base: Bit patterns, of the same type and length.
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
    """Undo `step_codes`: the new bit patterns.

    Args:
        base: Bit patterns.
        codes: Step codes, of the same type and length.
    """
    width = base.itemsize
    zigzag = codes + _UNSIGNED[width].type(1)
    step = (zigzag >> 1).view(_SIGNED[width])
    step ^= -(zigzag & 1).view(_SIGNED[width])
    step += _monotone(base.view(_SIGNED[width]))
    new: Patterns = _monotone(step).view(_UNSIGNED[width])
    return new


def _monotone(signed: NDArray[np.signedinteger[Any]]) -> NDArray[np.signedinteger[Any]]:
    """Turn over the bits below the sign where the sign is set; its own inverse."""
    bits = 8 * signed.itemsize
    flipped = signed >> (bits - 1)
    flipped &= signed.dtype.type((1 << (bits - 1)) - 1)
    flipped ^= signed
    return flipped


def changed_positions(new: Patterns, base: Patterns) -> NDArray[np.int64]:
    """Return the positions at which elements differ, ascending.

    Compares eight bytes at a time and looks at single elements only in words that differ.

    Args:
        new: Bit patterns.
        base: Bit patterns, of the same type and length.
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


def patterns(octets: NDArray[np.uint8], width: int) -> Patterns:
    """Return dense bytes as bit patterns of `width` bytes, not copied."""
    return octets.view(pattern_type(width))
