"""Log-probabilities under a model that does not learn, computed once so that it need not stay in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist

from trainer_svc.batch.rows import Sequence
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.offline.examples import Examples

__all__ = ["Column", "WithLogprobs", "ask_once"]

Column = Literal["reference_logprobs", "teacher_logprobs"]

FORWARDED_ROWS = 256
"""Examples per rank and call: enough to fill micro-batches, few enough for one call's results to be small."""


@dataclass(frozen=True, slots=True)
class WithLogprobs:
    """Examples whose rows carry what a frozen model says about their loss tokens.

    Attributes:
        examples: The examples.
        column: Where the rows carry it.
        logprobs: For each example the log-probabilities of its loss tokens, row after row, in nats.
    """

    examples: Examples
    column: Column
    logprobs: list[torch.Tensor]

    def __len__(self) -> int:
        return len(self.examples)

    def rows(self, index: int) -> list[Sequence]:
        """The training rows of one example, with the column."""
        rows = self.examples.rows(index)
        parts = self.logprobs[index].split([int(row.loss_mask.sum()) for row in rows])
        return [_with(row, self.column, part) for row, part in zip(rows, parts, strict=True)]


def _with(row: Sequence, column: Column, logprobs: torch.Tensor) -> Sequence:
    values = torch.full((len(row),), torch.nan)
    values[row.loss_mask] = logprobs
    if column == "reference_logprobs":
        return replace(row, reference_logprobs=values)
    return replace(row, teacher_logprobs=values)


def ask_once(engine: TrainEngine, examples: Examples, column: Column) -> WithLogprobs:
    """Ask a model once about all examples. Each rank forwards its share, and all get everything.

    Args:
        engine: The model; its weights do not change.
        examples: What it is asked about.
        column: Where the rows carry the answer.
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
