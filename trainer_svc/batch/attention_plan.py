"""Which tokens of a packed row attend to which: plans that attention kernels carry out. No kernel here.

`AttentionPlan` holds one plan for each kernel: blocks of sequences of similar length, parts with shared beginnings (CPU),
and bounds of sequences (CUDA, varying lengths).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_svc.batch.shapes import Block, Bounds, Indices

__all__ = ["AttentionPlan", "PrefixPlan", "Ragged"]

SHORT = 32
"""Tokens. Parts, or whole sequences, up to this length share one block: a kernel call costs more than their padding."""

STEPS = 8
"""Block lengths between a power of two and the next: more pad less and call more kernels."""


class Crossing(NamedTuple):
    """Samples that attend to their prompt, as ranges of the packed row.

    Attributes:
        keys: First token of the prompt.
        queries: First token behind it, where its samples begin.
        end: First token behind the samples.
    """

    keys: int
    queries: int
    end: int


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """The packed row as parts that are causal in themselves, and prompts that samples attend to.

    Attributes:
        blocks: Packed indices of parts of similar length, one part a row, -1 behind its end.
        sources: For each packed token, its place in the concatenation of the flattened blocks.
        crossings: Which samples attend to which prompt.
    """

    blocks: tuple[Block, ...]
    sources: Indices
    crossings: tuple[Crossing, ...]

    @classmethod
    def of(cls, segments: Rows[NDArray[np.int64]], packed_tokens: int) -> Self | None:
        """Split sequences, given as packed indices in order, into their parts.

        Returns:
            The plan; None if sequences that share tokens do not lie behind each other and behind these.
        """
        shares = np.zeros(packed_tokens, dtype=np.int64)
        for segment in segments:
            shares[segment] += 1
        parts: dict[int, int] = {}
        crossings: dict[int, Crossing] = {}
        for segment in segments:
            shared = shares[segment] > 1
            prefix = len(segment) if shared.all() else int(np.argmin(shared))
            own = segment[prefix:]
            if not _is_range(segment[:prefix]) or not _is_range(own) or shared[prefix:].any():
                return None
            if len(own):
                parts[int(own[0])] = len(own)
            if prefix:
                first = int(segment[0])
                parts[first] = prefix
                start, end = crossings.get(first, (0, first + prefix, first + prefix))[1:]
                if start != first + prefix or (len(own) and own[0] != end):
                    return None
                crossings[first] = Crossing(first, start, end + len(own))
        blocks, sources = _blocks(parts, packed_tokens)
        return cls(blocks, sources, tuple(each for each in crossings.values() if each.end > each.queries))

    @property
    def padded_tokens(self) -> int:
        """Block cells in all."""
        return sum(block.numel() for block in self.blocks)


def _is_range(indices: NDArray[np.int64]) -> bool:
    return bool((np.diff(indices) == 1).all())


def _blocks(parts: dict[int, int], packed_tokens: int) -> tuple[tuple[Block, ...], Indices]:
    by_size: dict[int, list[int]] = defaultdict(list)
    for first, length in parts.items():
        by_size[_part_size_class(length)].append(first)
    sources = np.zeros(packed_tokens, dtype=np.int64)
    blocks: list[torch.Tensor] = []
    cells = 0
    for _, firsts in sorted(by_size.items()):
        block = np.full((len(firsts), max(parts[first] for first in firsts)), -1, dtype=np.int64)
        for row, first in enumerate(firsts):
            length, start = parts[first], cells + row * block.shape[1]
            block[row, :length] = np.arange(first, first + length)
            sources[first : first + length] = np.arange(start, start + length)
        blocks.append(torch.from_numpy(block))
        cells += block.size
    return tuple(blocks), torch.from_numpy(sources)


def _part_size_class(length: int) -> int:
    """Upper bound of the block a part of this length goes to."""
    step = max(SHORT, (1 << (length - 1).bit_length()) // (2 * STEPS)) if length > 1 else SHORT
    return -(-length // step) * step


@dataclass(frozen=True, slots=True)
class Ragged:
    """Where sequences begin and end among the rows of queries and of keys.

    Attributes:
        keys: Packed index of each row of keys; None where they are the packed rows in order.
        query_bounds: Begin of each sequence's queries, and the end of all.
        key_bounds: Begin of each sequence's keys, and the end of all.
        tokens: Packed tokens.
        longest_query: Most queries of a sequence.
        longest_key: Most keys of a sequence.
    """

    keys: Indices | None
    query_bounds: Bounds
    key_bounds: Bounds
    tokens: int
    longest_query: int
    longest_key: int

    @classmethod
    def of(cls, segments: Rows[NDArray[np.int64]], packed_tokens: int) -> Self | None:
        """Plan the sequences given as packed indices in order.

        Args:
            segments: As of `AttentionPlan.of`.
            packed_tokens: Tokens in the packed row.

        Returns:
            The plan; None if the tokens that a sequence does not share with earlier ones do not follow theirs in the row.
        """
        end = 0
        queries: list[int] = []
        keys: list[NDArray[np.int64]] = []
        for segment in segments:
            own = int((segment >= end).sum())
            if not np.array_equal(segment[len(segment) - own :], np.arange(end, end + own)):
                return None
            if own:  # one that adds no token asks for nothing
                queries.append(own)
                keys.append(segment)
                end += own
        if end != packed_tokens:
            return None
        gathered = np.concatenate(keys)
        in_order = len(gathered) == packed_tokens
        lengths = [len(each) for each in keys]
        return cls(
            keys=None if in_order else torch.from_numpy(gathered),
            query_bounds=_bounds(queries),
            key_bounds=_bounds(lengths),
            tokens=packed_tokens,
            longest_query=max(queries),
            longest_key=max(lengths),
        )

    def to(self, device: torch.device) -> Self:
        """Copy the indices from pinned memory to a device, which the host does not wait for; a no-op on the CPU."""
        if device.type == "cpu":
            return self
        keys = None if self.keys is None else self.keys.pin_memory().to(device, non_blocking=True)
        return replace(
            self,
            keys=keys,
            query_bounds=self.query_bounds.pin_memory().to(device, non_blocking=True),
            key_bounds=self.key_bounds.pin_memory().to(device, non_blocking=True),
        )


def _bounds(lengths: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32))


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Which packed tokens form which sequence.

    Attributes:
        blocks: Packed indices of the sequences of similar length, one sequence a row, padded behind its end with 0.
        sources: For each packed token, its place in the concatenation of the flattened blocks.
        longest: Tokens of the longest sequence.
        padded_tokens: Block cells in all, of `prefixes` where there are some.
        real_tokens: Block cells that are not padding; in `blocks` a token shared by several sequences counts in each.
        pairs: Tokens that attend to tokens, each packed token once with all before it in its sequence and itself.
        prefixes: The same as parts and shared beginnings, for a CPU; None where the sequences do not lie so.
        ragged: The same for the kernel that takes rows of varying length; None likewise.
    """

    blocks: tuple[Block, ...]
    sources: Indices
    longest: int
    padded_tokens: int
    real_tokens: int
    pairs: int
    prefixes: PrefixPlan | None
    ragged: Ragged | None

    @classmethod
    def of(cls, segments: Rows[NDArray[np.int64]], packed_tokens: int) -> Self:
        """Plan the attention of sequences given as packed indices in order.

        Args:
            segments: Packed indices of each sequence; indices may be shared between sequences with a common beginning.
            packed_tokens: Tokens in the packed row; each must belong to a sequence.
        """
        by_size: dict[int, list[NDArray[np.int64]]] = defaultdict(list)
        for segment in segments:
            by_size[_sequence_size_class(len(segment))].append(segment)
        sources = np.zeros(packed_tokens, dtype=np.int64)
        blocks: list[torch.Tensor] = []
        cells = 0
        for _, rows in sorted(by_size.items()):
            block = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
            for number, row in enumerate(rows):
                block[number, : len(row)] = row
                start = cells + number * block.shape[1]
                sources[row] = np.arange(start, start + len(row))
            blocks.append(torch.from_numpy(block))
            cells += block.size
        prefixes = PrefixPlan.of(segments, packed_tokens)
        seen = np.zeros(packed_tokens, dtype=np.int64)
        for segment in segments:
            seen[segment] = np.arange(1, len(segment) + 1)
        return cls(
            tuple(blocks),
            torch.from_numpy(sources),
            max(map(len, segments)),
            cells if prefixes is None else prefixes.padded_tokens,
            sum(map(len, segments)) if prefixes is None else packed_tokens,
            int(seen.sum()),
            prefixes,
            Ragged.of(segments, packed_tokens),
        )

    def to(self, device: torch.device) -> Self:
        """Copy the indices from pinned memory to a device, which the host does not wait for; a no-op on the CPU."""
        if device.type == "cpu":
            return self
        blocks = tuple(block.pin_memory().to(device, non_blocking=True) for block in self.blocks)
        sources = self.sources.pin_memory().to(device, non_blocking=True)
        ragged = None if self.ragged is None else self.ragged.to(device)
        return replace(self, blocks=blocks, sources=sources, ragged=ragged)


def _sequence_size_class(length: int) -> int:
    """Upper bound of the block a sequence of this length goes to: powers of two and the middles between them.

    Coarser than the classes of `PrefixPlan`, since these blocks are a GPU's as well, where a call weighs more than padding.
    """
    size = SHORT
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size
