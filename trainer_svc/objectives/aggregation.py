"""How token losses become one number: a factor per token, and a divisor that only counts of the whole batch enter.

| aggregation | factor of a token | divisor |
|---|---|---|
| token | 1 | loss tokens |
| sequence | 1 / loss tokens of its sequence | sequences with a loss token |
| prompt | 1 / loss tokens of its group | groups with a loss token |
| constant | 1 | sequences with a loss token x `max_tokens` |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Rows
from dataclasses import replace

import torch

from trainer_svc.batch.rows import MicroBatch, Sequence
from trainer_svc.batch.shapes import PerToken
from trainer_svc.objectives.presets import Aggregation

__all__ = ["divisor", "token_factors", "with_group_tokens"]


def with_group_tokens(sequences: Rows[Sequence]) -> list[Sequence]:
    """Return the rows with the number of loss tokens of their group, unless they have it. A row without a group is its own."""
    counts: Counter[str] = Counter()
    for sequence in sequences:
        counts[sequence.group_id] += int(sequence.loss_mask.sum())
    return [
        sequence
        if sequence.group_loss_tokens or not sequence.group_id
        else replace(sequence, group_loss_tokens=counts[sequence.group_id])
        for sequence in sequences
    ]


def token_factors(aggregation: Aggregation, batch: MicroBatch, dtype: torch.dtype) -> PerToken:
    """Return the factor of each loss token of a micro-batch, on the micro-batch's device."""
    match aggregation:
        case "token" | "constant":
            return torch.ones_like(batch.owners, dtype=dtype)
        case "sequence":
            return batch.sequence_tokens.to(dtype).reciprocal()
        case "prompt":
            return batch.group_tokens.to(dtype).reciprocal()


def divisor(aggregation: Aggregation, sequences: Rows[Sequence], max_tokens: int | None = None) -> float:
    """Return these sequences' share of the divisor of the summed loss.

    Args:
        aggregation: How token losses become one number.
        sequences: Any part of the batch; the shares of disjoint parts add up.
        max_tokens: Read by `constant`.

    Raises:
        ValueError: if `constant` lacks `max_tokens`.
    """
    counts = [int(sequence.loss_mask.sum()) for sequence in sequences]
    match aggregation:
        case "token":
            return float(sum(counts))
        case "sequence":
            return float(sum(count > 0 for count in counts))
        case "prompt":
            pairs = zip(counts, sequences, strict=True)
            return sum(count / (each.group_loss_tokens or count) for count, each in pairs if count)
        case "constant":
            if max_tokens is None:
                raise ValueError("aggregation constant divides by max_tokens: set it")
            return float(sum(count > 0 for count in counts) * max_tokens)
