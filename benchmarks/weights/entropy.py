"""What a difference costs at least, if changes were independent of each other: the yardstick of the benchmark."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from weightsync.codec.streams import WIDTHS, changed_positions, patterns, step_codes

__all__ = ["entropy_bound_bytes"]


def entropy_bound_bytes(new: NDArray[np.uint8], base: NDArray[np.uint8], dtype: str) -> float:
    """Entropy of the changed positions and of their steps, in bytes.

    `n H(p)` bits for which of n elements changed, p of them, and for each change the entropy of the distribution of
    steps that the slice has (Shannon 1948). A code that knows more, such as which rows change, may be below it.

    Args:
        new: Dense little-endian bytes, one dimension, contiguous.
        base: Bytes of the same slice in the version before.
        dtype: BF16, F16 or F32.

    Raises:
        ValueError: for another type.
    """
    if dtype not in WIDTHS:
        raise ValueError(f"{dtype} has no delta encoding; the bound is defined for {', '.join(WIDTHS)}")
    left, right = patterns(new, WIDTHS[dtype]), patterns(base, WIDTHS[dtype])
    positions = changed_positions(left, right)
    counts = np.unique(step_codes(left[positions], right[positions]), return_counts=True)[1]
    where = [positions.size, left.size - positions.size]
    return (_total_bits(np.array(where)) + _total_bits(counts)) / 8


def _total_bits(counts: NDArray[np.int64]) -> float:
    """Bits that a sequence takes whose symbols occur so often."""
    total = int(counts.sum())
    present = counts[counts > 0]
    return math.fsum(present * np.log2(total / present))
