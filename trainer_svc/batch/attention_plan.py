"""Which tokens of a packed row attend to which. Pure: the kernels are in `trainer_svc.engine.network`.

`AttentionPlan` describes the same attention once for each kernel: as blocks of sequences of similar length (any device), as
parts and shared beginnings (CPU), and as bounds of sequences of varying length (CUDA).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_svc.batch.shapes import Block, Bounds, Indices

SHORT = 32
"""In tokens. Parts and sequences up to this length share one block: a kernel call costs more than their padding."""

WHOLE = 64
"""In tokens. Up to this length a CPU attends to whole sequences, too: a few calls for all take less time than some for each prompt."""

WHOLE_CELLS = 4
"""Cells of whole sequences per packed token. Above this, repeating the prompts costs more than the additional calls."""

STEPS = 8
"""Number of size classes between a power of two and the next. More classes mean less padding and more kernel calls."""


class Crossing(NamedTuple):
    """A prompt and the samples that attend to it, as ranges of the packed row.

    Attributes:
        keys: First token of the prompt.
        queries: First token after the prompt, where its samples begin.
        end: First token after the samples.
    """

    keys: int
    queries: int
    end: int


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """The packed row as parts with causal attention inside, and as prompts to which whole samples attend.

    Attributes:
        blocks: Packed indices of parts of similar length, one part per row, padded with -1.
        sources: For each packed token, its place in the concatenation of the flattened blocks.
        crossings: Which samples attend to which whole prompt.
    """

    blocks: tuple[Block, ...]
    sources: Indices
    crossings: tuple[Crossing, ...]

    @classmethod
    def of(cls, segments: Sequence[NDArray[np.int64]], packed_tokens: int) -> Self | None:
        """Split sequences, given as packed indices in order, into shared beginnings and parts of their own.

        Returns:
            The plan; None if the sequences that share a beginning do not lie directly after it, one after the other.
        """
        owners = np.zeros(packed_tokens, dtype=np.int64)
        for segment in segments:
            owners[segment] += 1
        parts: dict[int, int] = {}
        crossings: dict[int, Crossing] = {}
        for segment in segments:
            shared = owners[segment] > 1
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
        rows = [np.arange(first, first + length) for first, length in parts.items()]
        blocks, sources = _blocks(rows, packed_tokens, _part_size_class, padding=-1)
        return cls(blocks, sources, tuple(each for each in crossings.values() if each.end > each.queries))


def _is_range(indices: NDArray[np.int64]) -> bool:
    return bool((np.diff(indices) == 1).all())


@dataclass(frozen=True, slots=True)
class VarlenPlan:
    """Where each sequence begins and ends among the rows of queries and of keys, for a kernel of varying lengths.

    Attributes:
        keys: Packed index of each row of keys; None if the keys are the packed rows in order.
        query_bounds: Start of each sequence's queries, then the end of the last.
        key_bounds: Start of each sequence's keys, then the end of the last.
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
    def of(cls, segments: Sequence[NDArray[np.int64]], packed_tokens: int) -> Self | None:
        """Plan the sequences given as packed indices in order.

        Returns:
            The plan; None if a sequence's own tokens do not directly follow the tokens of the sequence before it.
        """
        end = 0
        queries: list[int] = []
        keys: list[NDArray[np.int64]] = []
        for segment in segments:
            own = int((segment >= end).sum())
            if not np.array_equal(segment[len(segment) - own :], np.arange(end, end + own)):
                return None
            if own:  # a sequence whose tokens are all shared has no queries of its own
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
        """Copy the indices to a device; see `to_device`."""
        return replace(
            self,
            keys=None if self.keys is None else to_device(self.keys, device),
            query_bounds=to_device(self.query_bounds, device),
            key_bounds=to_device(self.key_bounds, device),
        )


def _bounds(lengths: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32))


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Which packed tokens form which sequence.

    Attributes:
        blocks: Packed indices of sequences of similar length, one sequence per row, padded with 0.
        sources: For each packed token, its place in the concatenation of the flattened blocks.
        longest: Tokens of the longest sequence.
        padded_tokens: Cells of all blocks of `prefixes`, if there is such a plan, else of `blocks`.
        real_tokens: Cells that are not padding. In `blocks`, a token that several sequences share counts once per sequence.
        pairs: Pairs of tokens where one attends to the other; a shared token attends once.
        prefixes: The plan for a CPU; None if the sequences do not lie as `PrefixPlan.of` requires, or are so short that attending
            to whole sequences takes less time.
        varlen: The plan for the kernel of varying lengths; None if the sequences do not lie as `VarlenPlan.of` requires.
    """

    blocks: tuple[Block, ...]
    sources: Indices
    longest: int
    padded_tokens: int
    real_tokens: int
    pairs: int
    prefixes: PrefixPlan | None
    varlen: VarlenPlan | None

    @classmethod
    def of(cls, segments: Sequence[NDArray[np.int64]], packed_tokens: int) -> Self:
        """Plan the attention of sequences given as packed indices in order; sequences with a common beginning may share indices.

        Each token of the packed row must belong to a sequence.
        """
        blocks, sources = _blocks(segments, packed_tokens, _sequence_size_class, padding=0)
        longest, cells = max(map(len, segments)), sum(block.numel() for block in blocks)
        whole = longest <= WHOLE and cells <= WHOLE_CELLS * packed_tokens
        prefixes = None if whole else PrefixPlan.of(segments, packed_tokens)
        seen = np.zeros(packed_tokens, dtype=np.int64)
        for segment in segments:
            seen[segment] = np.arange(1, len(segment) + 1)
        return cls(
            blocks,
            sources,
            longest,
            cells if prefixes is None else sum(block.numel() for block in prefixes.blocks),
            sum(map(len, segments)) if prefixes is None else packed_tokens,
            int(seen.sum()),
            prefixes,
            VarlenPlan.of(segments, packed_tokens),
        )

    def to(self, device: torch.device) -> Self:
        """Copy the indices that a device's kernels read to that device; see `to_device`. `prefixes` is not copied: only a CPU reads it."""
        return replace(
            self,
            blocks=tuple(to_device(block, device) for block in self.blocks),
            sources=to_device(self.sources, device),
            varlen=None if self.varlen is None else self.varlen.to(device),
        )


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to a device from pinned memory, so that the host does not wait. If the device is the CPU, return the tensor itself."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _blocks(
    rows: Sequence[NDArray[np.int64]], packed_tokens: int, size_class: Callable[[int], int], *, padding: int
) -> tuple[tuple[Block, ...], Indices]:
    """Stack rows of packed indices of one size class into blocks; return them and each token's place in the flattened blocks."""
    by_size: dict[int, list[NDArray[np.int64]]] = defaultdict(list)
    for row in rows:
        by_size[size_class(len(row))].append(row)
    sources = np.zeros(packed_tokens, dtype=np.int64)
    blocks: list[torch.Tensor] = []
    cells = 0
    for _, members in sorted(by_size.items()):
        block = np.full((len(members), max(map(len, members))), padding, dtype=np.int64)
        for number, row in enumerate(members):
            block[number, : len(row)] = row
            start = cells + number * block.shape[1]
            sources[row] = np.arange(start, start + len(row))
        blocks.append(torch.from_numpy(block))
        cells += block.size
    return tuple(blocks), torch.from_numpy(sources)


def _part_size_class(length: int) -> int:
    """Return the length of the longest part that may share a block with a part of this length."""
    step = max(SHORT, (1 << (length - 1).bit_length()) // (2 * STEPS)) if length > 1 else SHORT
    return -(-length // step) * step


def _sequence_size_class(length: int) -> int:
    """Return the length of the longest sequence that may share a block with one of this length: a power of two, or midway between two.

    These classes are coarser than the classes of parts: on a GPU a kernel call costs more than padding.
    """
    size = SHORT
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size
