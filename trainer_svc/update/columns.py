"""What other models say about a batch's loss tokens, as columns of its rows."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import replace
from typing import Literal

import torch

from trainer_svc.batch.rows import Sequence
from trainer_svc.engine.engine import TrainEngine

__all__ = ["LogprobColumn", "with_logprobs", "with_values"]

LogprobColumn = Literal["proximal_logprobs", "reference_logprobs", "teacher_logprobs"]


def with_logprobs(sequences: Rows[Sequence], column: LogprobColumn, engine: TrainEngine) -> list[Sequence]:
    """The rows with a model's log-probabilities; rows that bring the column keep theirs.

    Every rank calls this, also one whose rows lack nothing: the model may lie on several.

    Args:
        sequences: This rank's rows.
        column: Which column to fill.
        engine: The model; only its forward pass runs.

    Raises:
        ValueError: if a token id is outside of the model's vocabulary.
    """
    wanting = [index for index, each in enumerate(sequences) if getattr(each, column) is None]
    found = engine.forward([sequences[index] for index in wanting])
    filled = list(sequences)
    for index, logprobs in zip(wanting, found, strict=True):
        filled[index] = replace(sequences[index], **{column: logprobs})
    return filled


def with_values(sequences: Rows[Sequence], engine: TrainEngine) -> tuple[list[Sequence], list[float]]:
    """The rows with a critic's value of the state before each loss token, and its value of the state after the last token.

    Args:
        sequences: This rank's rows.
        engine: A network with a value head.

    Returns:
        The rows, and for each the value of its last state; 0 where the episode ended, as nothing follows.
    """
    read = engine.forward([_with_last_state(each) if each.truncated else each for each in sequences], values=True)
    rows = [replace(each, values=values[: len(each)]) for each, values in zip(sequences, read, strict=True)]
    after = [float(values[-1]) if each.truncated else 0.0 for each, values in zip(sequences, read, strict=True)]
    return rows, after


def _with_last_state(sequence: Sequence) -> Sequence:
    """The row with one more loss token, whose predicting state is the last one; the token itself is never forwarded."""
    return Sequence(
        input_ids=torch.cat([sequence.input_ids, sequence.input_ids[-1:]]),
        loss_mask=torch.cat([sequence.loss_mask, torch.ones(1, dtype=torch.bool)]),
        behaviour_logprobs=torch.cat([sequence.behaviour_logprobs, torch.full((1,), torch.nan)]),
        advantages=torch.cat([sequence.advantages, torch.zeros(1)]),
        temperature=sequence.temperature,
        group_id=sequence.group_id,
        trajectory_id=sequence.trajectory_id,
    )
