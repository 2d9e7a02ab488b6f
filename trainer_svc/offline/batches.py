"""Batches of offline training: examples of one or two rows, shuffled, a part held out, with a frozen model's log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal, Protocol

import numpy as np
import torch
import torch.distributed as dist

from trainer_svc.batch.rows import Sequence
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.offline.rows import DataError
from trainer_svc.parallel.ranks import ALONE, Ranks

__all__ = [
    "Column",
    "Data",
    "Examples",
    "Part",
    "WithLogprobs",
    "batches",
    "every_row",
    "hold_out",
    "precompute_logprobs",
]


class Examples(Protocol):
    """Examples to train on, by index."""

    def __len__(self) -> int:
        """Return their number."""
        ...

    def rows(self, index: int) -> list[Sequence]:
        """Return the training rows of one example: one for a demonstration, two of one group for a pair."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """Some of the examples.

    Attributes:
        whole: All of them.
        chosen: Indices of those that are in.
    """

    whole: Examples
    chosen: list[int]

    def __len__(self) -> int:
        return len(self.chosen)

    def rows(self, index: int) -> list[Sequence]:
        """Return the training rows of one example."""
        return self.whole.rows(self.chosen[index])


@dataclass(frozen=True, slots=True)
class Data:
    """Examples of one run.

    Attributes:
        train: What to train on.
        held_out: What to evaluate on; None: nothing.
        dropped_long: Examples left out as too long.
    """

    train: Examples
    held_out: Examples | None
    dropped_long: int


def hold_out(examples: Examples, share: float, seed: int) -> tuple[Examples, Examples | None]:
    """Split off a random share. Return the examples to train on and those held out; None for a share of 0.

    Raises:
        DataError: if nothing would be left on one side.
    """
    if not share:
        return examples, None
    count = round(share * len(examples))
    if not 0 < count < len(examples):
        raise DataError(
            f"eval_share {share:g} of {len(examples)} examples holds out {count}: give more examples, another share, or eval_data"
        )
    order = np.random.default_rng([seed, 1]).permutation(len(examples)).tolist()
    return Part(examples, sorted(order[count:])), Part(examples, sorted(order[:count]))


def batches(
    examples: Examples, size: int, seed: int, ranks: Ranks = ALONE, *, first: int = 0
) -> Iterator[list[Sequence]]:
    """Yield batches without end. Every pass is a fresh permutation; a batch may span two passes.

    Args:
        examples: Where they come from.
        size: Examples per batch, over all ranks.
        seed: Seed of the permutations, the same on every rank.
        ranks: Each gets every `ranks.size`-th example of a batch.
        first: Number of the first batch, from 0. Batches before it are drawn, so that the order stays the same, but not made.
    """
    for drawn in islice(_drawn(len(examples), size, seed), first, None):
        yield _rows(examples, drawn[ranks.index :: ranks.size])


def _drawn(examples: int, size: int, seed: int) -> Iterator[list[int]]:
    """Yield the indices of each batch."""
    generator = np.random.default_rng(seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < size:
            waiting.extend(generator.permutation(examples).tolist())
        yield waiting[:size]
        del waiting[:size]


def every_row(examples: Examples, ranks: Ranks = ALONE) -> list[Sequence]:
    """Return this rank's share of all examples, in order."""
    return _rows(examples, list(range(ranks.index, len(examples), ranks.size)))


def _rows(examples: Examples, chosen: list[int]) -> list[Sequence]:
    """Return their rows, with groups numbered anew: one example may be in a batch twice."""
    return [
        replace(row, group_id=str(place)) if row.group_id else row
        for place, index in enumerate(chosen)
        for row in examples.rows(index)
    ]


Column = Literal["reference_logprobs", "teacher_logprobs"]

FORWARDED_ROWS = 256
"""Examples per rank and call: enough to fill micro-batches, few enough for one call's results to be small."""


@dataclass(frozen=True, slots=True)
class WithLogprobs:
    """Examples with a frozen model's log-probabilities of their loss tokens.

    Attributes:
        examples: The examples.
        column: The column of the rows that gets them.
        logprobs: For each example the log-probabilities of its loss tokens, row after row, in nats.
    """

    examples: Examples
    column: Column
    logprobs: list[torch.Tensor]

    def __len__(self) -> int:
        return len(self.examples)

    def rows(self, index: int) -> list[Sequence]:
        """Return the training rows of one example, with the column."""
        rows = self.examples.rows(index)
        parts = self.logprobs[index].split([int(row.loss_mask.sum()) for row in rows])
        return [_with(row, self.column, part) for row, part in zip(rows, parts, strict=True)]


def _with(row: Sequence, column: Column, logprobs: torch.Tensor) -> Sequence:
    values = torch.full((len(row),), torch.nan)
    values[row.loss_mask] = logprobs
    if column == "reference_logprobs":
        return replace(row, reference_logprobs=values)
    return replace(row, teacher_logprobs=values)


def precompute_logprobs(engine: TrainEngine, examples: Examples, column: Column) -> WithLogprobs:
    """Compute a model's log-probabilities of all examples once. Each rank forwards its share; all ranks get everything.

    Args:
        engine: The model; its weights do not change.
        examples: The examples.
        column: The column of the rows that gets the log-probabilities.
    """
    counts = [sum(int(row.loss_mask.sum()) for row in examples.rows(index)) for index in range(len(examples))]
    flat = torch.zeros(sum(counts))
    logprobs = list(flat.split(counts))
    ranks = engine.ranks
    block = FORWARDED_ROWS * ranks.size
    for start in range(0, len(examples), block):
        mine = range(start, min(start + block, len(examples)))[ranks.index :: ranks.size]
        rows = [examples.rows(index) for index in mine]
        answers = iter(engine.forward([row for pair in rows for row in pair]))
        for index, parts in zip(mine, rows, strict=True):
            logprobs[index].copy_(torch.cat([next(answers)[row.loss_mask] for row in parts]))
    if ranks.group is not None:
        dist.all_reduce(flat, group=ranks.group)  # each place is filled by one rank and 0 on the others
    return WithLogprobs(examples, column, logprobs)
