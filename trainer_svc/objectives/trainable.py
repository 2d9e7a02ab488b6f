"""Which tokens can be trained: the one place that decides it.

A token can be trained if every number that its objective reads is finite. The trainer judges the columns that a row brings
when it takes the batch (`trainable`), and the columns that a model adds after that model has run (`keep_trainable`).
`trainer_svc.service.stale_filter` judges staleness.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import replace

import torch

from sluice.versions import Version
from trainer_svc.batch.rows import Sequence
from trainer_svc.batch.shapes import MaskOfSequence, PerSequenceToken
from trainer_svc.objectives.aggregation import with_group_tokens
from trainer_svc.objectives.config import ResolvedObjective
from trainer_svc.objectives.estimators import carried_back
from trainer_svc.objectives.prepare import with_proximal_share

__all__ = ["CAUSES", "keep_trainable", "trainable", "with_batch_facts"]

CAUSES = ("behaviour_not_finite", "advantage_not_finite", "reference_not_finite", "teacher_not_finite")
"""Why a token leaves the loss. A token counts under its first cause."""


def trainable(sequence: Sequence, objective: ResolvedObjective) -> MaskOfSequence:
    """Return the loss tokens that can be trained, judged by the columns that the row has."""
    mask = sequence.loss_mask
    for values in _loss_inputs(sequence, objective).values():
        mask = mask & values.isfinite()
    return mask


def keep_trainable(sequences: Rows[Sequence], objective: ResolvedObjective) -> tuple[list[Sequence], dict[str, int]]:
    """Take the tokens that cannot be trained out of the loss and out of its divisor.

    If earlier tokens are credited with later rewards, a dropped token's reward moves to the last kept token before it.

    Returns:
        The rows with narrowed masks, and the number of dropped tokens by cause.

    Raises:
        ValueError: if a row lacks the log-probabilities of the reference or of the teacher that the objective reads.
    """
    kept: list[Sequence] = []
    dropped: Counter[str] = Counter()
    for sequence in sequences:
        _check_columns(sequence, objective)
        mask = sequence.loss_mask
        for cause, values in _loss_inputs(sequence, objective).items():
            narrowed = mask & values.isfinite()
            dropped[cause] += int(mask.sum()) - int(narrowed.sum())
            mask = narrowed
        kept.append(_narrowed(sequence, mask, objective))
    return kept, {cause: count for cause, count in dropped.items() if count}


def with_batch_facts(
    sequences: Rows[Sequence], objective: ResolvedObjective, staleness: Callable[[Version], int]
) -> list[Sequence]:
    """Return the rows with what must be known about the whole batch before ranks share it out.

    These are the number of trainable tokens of the row's group and, for `proximal = loglinear`, `proximal_share`.

    Args:
        sequences: The whole batch.
        objective: What will be minimised.
        staleness: Number of versions between the given one, which sampled, and the one that is trained.
    """
    counted = with_group_tokens([replace(each, loss_mask=trainable(each, objective)) for each in sequences])
    rows = [
        replace(each, group_loss_tokens=narrowed.group_loss_tokens)
        for each, narrowed in zip(sequences, counted, strict=True)
    ]
    if objective.proximal != "loglinear":
        return rows
    return with_proximal_share(rows, [_ages(each, staleness) for each in rows])


def _ages(sequence: Sequence, staleness: Callable[[Version], int]) -> torch.Tensor:
    """Return the staleness of each loss token, in versions; 0 before the first version span."""
    ages = torch.zeros(len(sequence), dtype=torch.int64)
    for span in sequence.versions:
        ages[span.start :] = staleness(span.version)
    return ages[sequence.loss_mask]


def _narrowed(sequence: Sequence, mask: MaskOfSequence, objective: ResolvedObjective) -> Sequence:
    if bool((mask == sequence.loss_mask).all()):
        return sequence
    rewards = sequence.token_rewards
    if rewards is not None and objective.credits_earlier_tokens:
        rewards = carried_back(rewards, sequence.loss_mask, mask)
    return replace(sequence, loss_mask=mask, token_rewards=rewards)


def _loss_inputs(sequence: Sequence, objective: ResolvedObjective) -> dict[str, PerSequenceToken]:
    """Return the columns that the objective reads and the row has, by the cause under which their gaps count."""
    inputs: dict[str, PerSequenceToken] = {}
    if objective.needs_behaviour:
        inputs = {"behaviour_not_finite": sequence.behaviour_logprobs, "advantage_not_finite": sequence.advantages}
    if objective.needs_reference and sequence.reference_logprobs is not None:
        inputs["reference_not_finite"] = sequence.reference_logprobs
    if objective.needs_teacher and sequence.teacher_logprobs is not None:
        inputs["teacher_not_finite"] = sequence.teacher_logprobs
    return inputs


def _check_columns(sequence: Sequence, objective: ResolvedObjective) -> None:
    if objective.needs_reference and sequence.reference_logprobs is None:
        raise ValueError(
            f"kl_coef is above 0 but sequence {sequence.trajectory_id!r} has no reference log-probabilities: send them, name a reference model, or set kl_coef to 0"
        )
    if objective.needs_teacher and sequence.teacher_logprobs is None:
        raise ValueError(
            f"{objective.name} follows a teacher but sequence {sequence.trajectory_id!r} has no teacher log-probabilities: send them, or name a teacher model"
        )
