"""What offline training draws its batches from: examples of one or two rows, shuffled, a part of them held out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

import numpy as np

from trainer_svc.batch.rows import Sequence
from trainer_svc.offline.rows import DataError
from trainer_svc.parallel.ranks import ALONE, Ranks

__all__ = ["Data", "Examples", "Part", "batches", "every_row", "hold_out"]


class Examples(Protocol):
    """Data to train on, by index."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def rows(self, index: int) -> list[Sequence]:
        """The training rows of one example: one for a demonstration, two of one group for a pair."""
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
        """The training rows of one example."""
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
    """Take a random share out of the examples: what to train on, and what was taken out, None for a share of 0.

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
    """Endless batches; every pass is a fresh permutation, and a batch may span two passes.

    Args:
        examples: Where they come from.
        size: Examples per batch, over all ranks.
        seed: Seed of the permutations, the same on every rank.
        ranks: Each gets every `ranks.size`-th example of a batch.
        first: Number of the first batch, counted from 0; those before it are drawn, but their rows are not made.
    """
    for drawn in islice(_drawn(len(examples), size, seed), first, None):
        yield _rows(examples, drawn[ranks.index :: ranks.size])


def _drawn(examples: int, size: int, seed: int) -> Iterator[list[int]]:
    """The indices of each batch."""
    generator = np.random.default_rng(seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < size:
            waiting.extend(generator.permutation(examples).tolist())
        yield waiting[:size]
        del waiting[:size]


def every_row(examples: Examples, ranks: Ranks = ALONE) -> list[Sequence]:
    """This rank's share of all examples, in order."""
    return _rows(examples, list(range(ranks.index, len(examples), ranks.size)))


def _rows(examples: Examples, chosen: list[int]) -> list[Sequence]:
    """Their rows; groups are numbered, since one example may stand in a batch twice."""
    return [
        replace(row, group_id=str(place)) if row.group_id else row
        for place, index in enumerate(chosen)
        for row in examples.rows(index)
    ]
