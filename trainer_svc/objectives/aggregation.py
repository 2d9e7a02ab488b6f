"""How token losses become one number, as a weight per token that only global counts enter."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from trainer_svc.engine.batch import Sequence
from trainer_svc.engine.shapes import PerToken
from trainer_svc.objectives.presets import Aggregation
from trainer_svc.objectives.terms import GlobalCounts, group_key

__all__ = ["sequence_weights"]


def sequence_weights(
    aggregation: Aggregation, counts: GlobalCounts, sequences: Rows[Sequence], max_tokens: int | None = None
) -> PerToken:
    """The weight that every loss token of each sequence gets; weighted token losses then simply add up.

    `token`: mean over the tokens of the global batch. `sequence`: mean over each sequence's tokens, then over
    sequences. `prompt`: mean over the tokens of each group, then over groups. `constant`: sum over tokens divided by
    sequences x `max_tokens`.

    Args:
        aggregation: Which of them.
        counts: Counts of the global batch.
        sequences: The sequences of one micro-batch, each with at least one loss token.
        max_tokens: Divisor of `constant`.

    Returns:
        float64 weights, one per sequence.
    """
    return torch.tensor(
        [_weight(aggregation, counts, sequence, max_tokens) for sequence in sequences], dtype=torch.float64
    )


def _weight(aggregation: Aggregation, counts: GlobalCounts, sequence: Sequence, max_tokens: int | None) -> float:
    match aggregation:
        case "token":
            return 1.0 / counts.tokens
        case "sequence":
            return 1.0 / (int(sequence.loss_mask.sum()) * counts.sequences)
        case "prompt":
            return 1.0 / (counts.group_tokens[group_key(sequence)] * len(counts.group_tokens))
        case "constant":
            if max_tokens is None:
                raise ValueError("aggregation constant divides by max_tokens: set it")
            return 1.0 / (counts.sequences * max_tokens)
