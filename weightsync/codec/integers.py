"""Floating-point bit patterns as integers in the order of their values, and steps between them.

The patterns of positive floats ascend with their values, those of negative ones descend. Turning over the lower bits of the
negative ones puts all patterns into one order, so that a small change of a value, across zero too, is a small difference of
integers. Every operation is modulo 2^bits, hence exact for any two patterns, NaN among them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["WIDTHS", "Patterns", "pattern_type", "step_codes", "take_steps"]

Patterns = NDArray[np.uint16] | NDArray[np.uint32]
"""Bit patterns or step codes, one per element."""

WIDTHS = {"BF16": 2, "F16": 2, "F32": 4}
"""Bytes per element of the types that have a DELTA encoding."""

_SIGNED: dict[int, np.dtype[Any]] = {2: np.dtype("<i2"), 4: np.dtype("<i4")}
_UNSIGNED: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


def pattern_type(width: int) -> np.dtype[Any]:
    """The numpy type of a bit pattern of `width` bytes."""
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
