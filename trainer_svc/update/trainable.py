"""Which tokens can be trained at all: those whose inputs to the loss are finite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Rows
from dataclasses import replace

from trainer_svc.engine.batch import Sequence
from trainer_svc.engine.shapes import MaskOfSequence, PerSequenceToken
from trainer_svc.objectives.aggregation import with_group_tokens
from trainer_svc.objectives.objective import Objective
from trainer_svc.objectives.process_rewards import carried_back

__all__ = ["CAUSES", "keep_trainable", "with_trainable_group_tokens"]

CAUSES = ("behaviour_not_finite", "advantage_not_finite", "reference_not_finite", "teacher_not_finite")
"""Why a token leaves the loss; it counts under its first cause."""


def keep_trainable(sequences: Rows[Sequence], objective: Objective) -> tuple[list[Sequence], dict[str, int]]:
    """Take tokens out of the loss, and out of its denominators, that lack what the objective reads.

    Their rewards stay: what they earned goes to the last kept token before them, where earlier tokens are credited at all.

    Returns:
        The sequences with narrowed masks, and the number of dropped tokens by those of `CAUSES` that there were.

    Raises:
        ValueError: if a KL term is wanted and a sequence has no reference log-probabilities, or a teacher is and it has none
            of those.
    """
    kept: list[Sequence] = []
    dropped: Counter[str] = Counter()
    for sequence in sequences:
        mask = sequence.loss_mask
        _check_columns(sequence, objective)
        for cause, values in _inputs(sequence, objective).items():
            narrowed = mask & values.isfinite()
            dropped[cause] += int(mask.sum()) - int(narrowed.sum())
            mask = narrowed
        kept.append(_narrowed(sequence, mask, objective))
    return kept, {cause: count for cause, count in dropped.items() if count}


def _narrowed(sequence: Sequence, mask: MaskOfSequence, objective: Objective) -> Sequence:
    if bool((mask == sequence.loss_mask).all()):
        return sequence
    rewards = sequence.token_rewards
    if rewards is not None and objective.choices.credits_earlier_tokens:
        rewards = carried_back(rewards, sequence.loss_mask, mask)
    return replace(sequence, loss_mask=mask, token_rewards=rewards)


def with_trainable_group_tokens(sequences: Rows[Sequence], objective: Objective) -> list[Sequence]:
    """Write into each row how many of its group's loss tokens stay, as far as the columns tell that the rows bring.

    Args:
        sequences: The whole batch.
        objective: What will be minimised.
    """
    counted = with_group_tokens([replace(each, loss_mask=_trainable(each, objective)) for each in sequences])
    return [
        replace(each, group_loss_tokens=narrowed.group_loss_tokens)
        for each, narrowed in zip(sequences, counted, strict=True)
    ]


def _trainable(sequence: Sequence, objective: Objective) -> MaskOfSequence:
    mask = sequence.loss_mask
    for values in _inputs(sequence, objective).values():
        mask = mask & values.isfinite()
    return mask


def _inputs(sequence: Sequence, objective: Objective) -> dict[str, PerSequenceToken]:
    """What the objective reads of a row and the row has, by the cause under which a token lacks it."""
    inputs: dict[str, PerSequenceToken] = {}
    if objective.needs_behaviour:
        inputs = {"behaviour_not_finite": sequence.behaviour_logprobs, "advantage_not_finite": sequence.advantages}
    if objective.needs_reference and sequence.reference_logprobs is not None:
        inputs["reference_not_finite"] = sequence.reference_logprobs
    if objective.needs_teacher and sequence.teacher_logprobs is not None:
        inputs["teacher_not_finite"] = sequence.teacher_logprobs
    return inputs


def _check_columns(sequence: Sequence, objective: Objective) -> None:
    if objective.needs_reference and sequence.reference_logprobs is None:
        raise ValueError(
            f"kl_coef is above 0 but sequence {sequence.trajectory_id!r} has no reference log-probabilities: send them, name a reference model, or set kl_coef to 0"
        )
    if objective.needs_teacher and sequence.teacher_logprobs is None:
        raise ValueError(
            f"{objective.choices.name} follows a teacher but sequence {sequence.trajectory_id!r} has no teacher log-probabilities: send them, or name a teacher model"
        )
