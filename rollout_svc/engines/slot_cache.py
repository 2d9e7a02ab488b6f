"""Keys and values of all running samples: one row each, rows packed at the front, grown as needed up to a budget.

Transformers' attention layers write here through the two views, which have the one method of its caches that a decoder
layer calls.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_svc.engines.slot_shapes import Keys, PerRow, RowIndices

__all__ = ["DecodeView", "KvShape", "PrefillView", "SlotCache"]

LENGTH_STEP = 128
"""Capacity for positions grows in these steps, so that a growing batch is seldom copied."""

FIRST_ROWS = 8


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one position of one sample takes."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def position_bytes(self) -> int:
        """Bytes of the keys and values of one position in all layers."""
        return 2 * self.layers * self.heads * self.head_dim * int(self.dtype.itemsize)


class SlotCache:
    """Keys and values, ``[layers, rows, heads, positions, head_dim]`` each.

    Args:
        shape: What one position takes.
        budget_bytes: Most bytes that rows times positions may take.
    """

    def __init__(self, shape: KvShape, budget_bytes: int) -> None:
        self._shape = shape
        self._positions = budget_bytes // shape.position_bytes
        self.keys = self._zeros(0, 0)
        self.values = self._zeros(0, 0)

    def _zeros(self, rows: int, length: int) -> Tensor:
        # Zeros and not `empty`: masked positions count as 0 x what lies there, and 0 x NaN is NaN.
        shape = self._shape
        size = (shape.layers, rows, shape.heads, length, shape.head_dim)
        return torch.zeros(size, dtype=shape.dtype, device=shape.device)

    def fits(self, rows: int, length: int) -> bool:
        """Whether so many rows of so many positions stay within the budget."""
        return rows * length <= self._positions

    def usage(self, lengths: int) -> float:
        """Share of the budget that the given number of positions takes."""
        return lengths / self._positions

    def reserve(self, rows: int, length: int, used: int) -> None:
        """Make room for so many rows of so many positions.

        Args:
            rows: Rows that are needed.
            length: Positions that are needed in each.
            used: Rows at the front whose contents are kept.
        """
        have_rows, have_length = self.keys.shape[1], self.keys.shape[3]
        if rows <= have_rows and length <= have_length:
            return
        roomy = (max(have_rows, FIRST_ROWS, 1 << (rows - 1).bit_length()), _round_up(max(have_length, length)))
        size = roomy if self.fits(*roomy) else (rows, length)
        kept = min(have_length, size[1])
        for name in ("keys", "values"):
            old, new = getattr(self, name), self._zeros(*size)
            new[:, :used, :, :kept] = old[:, :used, :, :kept]
            setattr(self, name, new)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first positions of one row to another."""
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]

    def clean(self, row: int) -> None:
        """Zero a row that a NaN came into: it would live on in positions that are masked."""
        self.keys[:, row] = 0
        self.values[:, row] = 0


def _round_up(length: int) -> int:
    return -(-length // LENGTH_STEP) * LENGTH_STEP


class PrefillView:
    """Takes whole prompts; they attend to themselves alone.

    Args:
        cache: Where they go.
        first: Row of the first.
        sources: For each row from `first` on, which prompt of the batch it takes.
    """

    def __init__(self, cache: SlotCache, first: int, sources: RowIndices) -> None:
        self._cache, self._sources = cache, sources
        self._rows = slice(first, first + len(sources))
        self.layers_seen: set[int] = set()

    def update(self, keys: Keys, values: Keys, layer: int, *_args: object, **_kwargs: object) -> tuple[Keys, Keys]:
        """Keep keys and values ``[prompts, heads, positions, head_dim]`` of a layer (transformers' signature)."""
        length = keys.shape[2]
        self.layers_seen.add(layer)
        self._cache.keys[layer, self._rows, :, :length] = keys[self._sources]
        self._cache.values[layer, self._rows, :, :length] = values[self._sources]
        return keys, values


class DecodeView:
    """Takes the next position of each of the first rows.

    Args:
        cache: Where they go.
        positions: The position per row.
        width: Positions that are looked at; above the greatest of `positions`.
    """

    def __init__(self, cache: SlotCache, positions: PerRow, width: int) -> None:
        self._cache, self._positions, self._width = cache, positions, width
        self._rows = torch.arange(len(positions), device=positions.device)

    def update(self, keys: Keys, values: Keys, layer: int, *_args: object, **_kwargs: object) -> tuple[Keys, Keys]:
        """Keep keys and values ``[rows, heads, 1, head_dim]`` of a layer and give all so far (transformers' signature)."""
        rows, width = len(self._rows), self._width
        all_keys, all_values = self._cache.keys[layer], self._cache.values[layer]
        all_keys[self._rows, :, self._positions] = keys[:, :, 0]
        all_values[self._rows, :, self._positions] = values[:, :, 0]
        return all_keys[:rows, :, :width], all_values[:rows, :, :width]
