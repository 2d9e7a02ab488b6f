"""Numbers of 2, 4 or 8 bits, several to a byte, the first in the lowest bits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["pack_bits", "packed_size", "unpack_bits"]


def packed_size(count: int, bits: int) -> int:
    """Bytes that `count` numbers of `bits` bits take."""
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
