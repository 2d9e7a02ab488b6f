"""What must be written into a batch's rows while they are together, before ranks share them out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import replace

import torch

from sluice.versions import Version
from trainer_svc.engine.batch import Sequence
from trainer_svc.objectives.objective import Objective
from trainer_svc.objectives.prepare import with_proximal_share

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
    counts: Counter[str] = Counter()
    for each in sequences:
        counts[each.group_id] += _usable_tokens(each, objective)
    rows = [replace(each, group_loss_tokens=counts[each.group_id]) if each.group_id else each for each in sequences]
    if objective.choices.proximal != "loglinear":
        return rows
    return with_proximal_share(rows, [_ages(each, staleness) for each in rows])


def _usable_tokens(sequence: Sequence, objective: Objective) -> int:
    """Loss tokens that stay in the divisor: those without a behaviour log-probability leave it."""
    mask = sequence.loss_mask
    return int((mask & sequence.behaviour_logprobs.isfinite()).sum() if objective.needs_behaviour else mask.sum())


def _ages(sequence: Sequence, staleness: Callable[[Version], int]) -> torch.Tensor:
    """Staleness of each loss token, in versions; 0 where no span says who sampled it."""
    ages = torch.zeros(len(sequence), dtype=torch.int64)
    for span in sequence.versions:
        ages[span.start :] = staleness(span.version)
    return ages[sequence.loss_mask]
