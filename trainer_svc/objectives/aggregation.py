"""How token losses become one number: a factor per token, and the divisor that only whole-batch counts enter.

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

from trainer_svc.engine.batch import Sequence
from trainer_svc.engine.shapes import PerToken
from trainer_svc.objectives.presets import Aggregation

__all__ = ["divisor", "sequence_factors", "with_group_tokens"]


def with_group_tokens(sequences: Rows[Sequence]) -> list[Sequence]:
    """Write into each row how many loss tokens its group has, where nobody has counted them; a row without a group is its own."""
    counts: Counter[str] = Counter()
    for sequence in sequences:
        counts[sequence.group_id] += int(sequence.loss_mask.sum())
    return [
        sequence
        if sequence.group_loss_tokens or not sequence.group_id
        else replace(sequence, group_loss_tokens=counts[sequence.group_id])
        for sequence in sequences
    ]


def sequence_factors(aggregation: Aggregation, sequences: Rows[Sequence]) -> PerToken:
    """What every loss token of each sequence is multiplied by.

    Args:
        aggregation: How token losses become one number.
        sequences: The sequences of a micro-batch, each with at least one loss token.

    Returns:
        float64 factors, one per sequence.
    """
    match aggregation:
        case "token" | "constant":
            factors = [1.0] * len(sequences)
        case "sequence":
            factors = [1.0 / _tokens(sequence) for sequence in sequences]
        case "prompt":
            factors = [1.0 / (sequence.group_loss_tokens or _tokens(sequence)) for sequence in sequences]
    return torch.tensor(factors, dtype=torch.float64)


def divisor(aggregation: Aggregation, sequences: Rows[Sequence], max_tokens: int | None = None) -> float:
    """These sequences' share of what the summed loss is divided by.

    Args:
        aggregation: How token losses become one number.
        sequences: Any part of the batch; shares of disjoint parts add up.
        max_tokens: Divisor of `constant`.

    Raises:
        ValueError: if `constant` lacks it.
    """
    counts = [_tokens(sequence) for sequence in sequences]
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


def _tokens(sequence: Sequence) -> int:
    return int(sequence.loss_mask.sum())
