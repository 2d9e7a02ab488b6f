"""What must be written into a batch's rows while they are together, before ranks share them out."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows

import torch

from sluice.versions import Version
from trainer_svc.engine.batch import Sequence
from trainer_svc.objectives.objective import Objective
from trainer_svc.objectives.prepare import with_proximal_share
from trainer_svc.update.trainable import with_trainable_group_tokens

__all__ = ["with_whole_batch_facts"]


def with_whole_batch_facts(
    sequences: Rows[Sequence], objective: Objective, staleness: Callable[[Version], int]
) -> list[Sequence]:
    """The rows with the loss tokens of their groups and, for the log-linear form, the share that their tokens' ages give.

    Args:
        sequences: The whole batch.
        objective: What will be minimised.
        staleness: Versions between one that sampled and the one that is trained.
    """
    rows = with_trainable_group_tokens(sequences, objective)
    if objective.choices.proximal != "loglinear":
        return rows
    return with_proximal_share(rows, [_ages(each, staleness) for each in rows])


def _ages(sequence: Sequence, staleness: Callable[[Version], int]) -> torch.Tensor:
    """Staleness of each loss token, in versions; 0 where no span says who sampled it."""
    ages = torch.zeros(len(sequence), dtype=torch.int64)
    for span in sequence.versions:
        ages[span.start :] = staleness(span.version)
    return ages[sequence.loss_mask]
