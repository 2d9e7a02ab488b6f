"""Which tokens are trained, and what a token's loss needs to know of the whole batch.

A token can be trained if every number that its objective reads is finite. The trainer judges the columns that a row brings
when it takes the batch (`trainable`), and the columns that a model adds after that model has run (`keep_trainable`).
`trainer_svc.service.stale_filter` judges staleness. m2po drops further tokens by their rank in the batch (`with_selection`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import replace

import torch

from sluice.versions import Version
from trainer_svc.batch.rows import Sequence
from trainer_svc.batch.shapes import MaskOfSequence, MaskPerToken, PerSequenceToken, PerToken
from trainer_svc.objectives.advantages import at_loss_tokens, carried_back, check_rewards, proximal_of, with_column
from trainer_svc.objectives.config import ResolvedObjective
from trainer_svc.objectives.terms import log_difference
from trainer_svc.parallel.ranks import ALONE, Ranks

CAUSES = ("behaviour_not_finite", "advantage_not_finite", "reference_not_finite", "teacher_not_finite")
"""Why a token leaves the loss. A token counts under its first cause."""


def trainable(sequence: Sequence, objective: ResolvedObjective) -> MaskOfSequence:
    """Return the loss tokens that can be trained, judged by the columns that the row has."""
    mask = sequence.loss_mask
    for values in _loss_inputs(sequence, objective).values():
        mask = mask & values.isfinite()
    return mask


def check_columns(sequences: Rows[Sequence], objective: ResolvedObjective) -> None:
    """Refuse rows that a later step would refuse, before ranks wait for each other.

    Raises:
        ValueError: if a row lacks its reward, the share that the log-linear form reads, or the log-probabilities of the reference
            or of the teacher.
    """
    for sequence in sequences:
        if objective.runs_estimator:
            check_rewards(sequence, objective)
        name = f"sequence {sequence.trajectory_id!r}"
        if objective.proximal == "loglinear" and sequence.proximal_share is None:
            raise ValueError(
                f"proximal = loglinear needs proximal_share, and {name} has none: derive it from the tokens' versions"
            )
        if objective.needs_reference and sequence.reference_logprobs is None:
            raise ValueError(
                f"kl_coef is above 0 but {name} has no reference log-probabilities: send them, name a reference model, or set "
                "kl_coef to 0"
            )
        if objective.needs_teacher and sequence.teacher_logprobs is None:
            raise ValueError(
                f"{objective.name} follows a teacher but {name} has no teacher log-probabilities: send them, or name a teacher model"
            )


def keep_trainable(sequences: Rows[Sequence], objective: ResolvedObjective) -> tuple[list[Sequence], dict[str, int]]:
    """Take the tokens that cannot be trained out of the loss and out of its divisor.

    If earlier tokens are credited with later rewards, a dropped token's reward moves to the last kept token before it.

    Returns:
        The rows with narrowed masks, and the number of dropped tokens by cause.
    """
    kept: list[Sequence] = []
    dropped: Counter[str] = Counter()
    for sequence in sequences:
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


def loglinear_share(ages: torch.Tensor) -> torch.Tensor:
    """Return a in log o = log b + a (log t - log b): (age - 1) / age, and 0 for tokens of the current version.

    Args:
        ages: v - v_b per loss token: the trainer's version minus the version that sampled the token.
    """
    aged = ages.double()
    return ((aged - 1) / aged.clamp(min=1)).clamp(0, 1)


def with_proximal_share(sequences: Rows[Sequence], ages: Rows[torch.Tensor]) -> list[Sequence]:
    """Return the rows with `proximal_share`, from the age of each loss token."""
    return with_column(sequences, "proximal_share", [loglinear_share(each) for each in ages])


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


# M2PO's selection of tokens.


def with_selection(sequences: Rows[Sequence], objective: ResolvedObjective, ranks: Ranks = ALONE) -> list[Sequence]:
    """Return the rows with the tokens marked that m2po keeps.

    Raises:
        ValueError: if a row has no proximal log-probabilities.
    """
    tau = objective.other_parameters["tau"] or 0.0
    behaviour = [at_loss_tokens(each, each.behaviour_logprobs) for each in sequences]
    proximal = [at_loss_tokens(each, proximal_of(each, objective)) for each in sequences]
    masks = keep_small_moments(behaviour, proximal, tau=tau, ranks=ranks)
    rows = []
    for sequence, mask in zip(sequences, masks, strict=True):
        kept = torch.ones_like(sequence.loss_mask)
        kept[sequence.loss_mask] = mask
        rows.append(replace(sequence, kept=kept))
    return rows


def keep_small_moments(
    behaviour: Rows[PerToken], proximal: Rows[PerToken], *, tau: float, ranks: Ranks = ALONE
) -> list[MaskPerToken]:
    """Drop the tokens with the largest (log b - log o)^2 until the mean of the rest is below tau (M2PO, arXiv 2510.01161).

    The mean is over the global batch and exact: every rank sees the values of all. Tokens with exactly the first dropped value
    are dropped too, so that neither order nor ranks decide between equals.

    Args:
        behaviour: log b of the loss tokens of each of this rank's sequences.
        proximal: log o of the same tokens.
        tau: Nats squared.
        ranks: All ranks that have a share of the batch.

    Returns:
        For each sequence, whether each token is kept.
    """
    moments = [log_difference(b.double(), o.double()).square() for b, o in zip(behaviour, proximal, strict=True)]
    own = torch.cat(moments) if moments else torch.zeros(0, dtype=torch.float64)
    ordered = ranks.gather(own).sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, dtype=torch.float64)
    kept = int((means < tau).sum())
    if kept == len(ordered):
        return [torch.ones_like(each, dtype=torch.bool) for each in moments]
    first_dropped = ordered[kept]
    return [each < first_dropped for each in moments]
