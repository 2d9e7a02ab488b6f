"""Where two arrays differ."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from weightsync.codec.integers import Patterns

__all__ = ["changed_positions", "count_changed"]

_WORD_BYTES = 8
_PIECE_BYTES = 1 << 20
"""Compared at once: both sides and the mask stay in the second-level cache."""
_SINGLY_FROM = 1 / 4
"""Share of differing words from which on it is quicker to compare all elements."""


def changed_positions(new: Patterns, base: Patterns) -> NDArray[np.int64]:
    """The positions at which elements differ, ascending.

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
    """How many elements of `size` bytes differ between two arrays of bytes."""
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
