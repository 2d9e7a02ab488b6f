"""What an objective must know about the whole batch before the first step on it, written into the batch's rows.

Advantages that the trainer estimates, the tokens that m2po keeps, and the share of the log-linear proximal policy: pure
functions of rows, after `trainer_svc.objectives.trainable` has dropped the tokens that cannot be trained. Functions that
take `ranks` are called by every rank with its own rows, and compute over the rows of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import replace

import torch

from trainer_svc.batch.rows import Sequence
from trainer_svc.batch.shapes import PerSequenceToken, PerToken
from trainer_svc.objectives.config import ResolvedObjective
from trainer_svc.objectives.estimators import (
    discounted_sum,
    gae,
    keep_small_moments,
    process_returns,
    turns_of,
    whiten,
    whiten_by_group,
)
from trainer_svc.objectives.kl import kl_estimate
from trainer_svc.parallel.ranks import ALONE, Ranks

__all__ = [
    "check_columns",
    "loglinear_share",
    "token_rewards",
    "with_advantages",
    "with_proximal_share",
    "with_selection",
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
    return _with_column(sequences, "proximal_share", [loglinear_share(each) for each in ages])


def check_columns(sequences: Rows[Sequence], objective: ResolvedObjective) -> None:
    """Refuse rows that a later step would refuse, before ranks wait for each other.

    Raises:
        ValueError: if a row lacks its reward, or the share that the log-linear form reads.
    """
    for sequence in sequences:
        if objective.advantage == "process":
            _process_rewards(sequence)
        elif objective.runs_estimator:
            _environment_rewards(sequence)
        if objective.proximal == "loglinear" and sequence.proximal_share is None:
            raise ValueError(
                f"proximal = loglinear needs proximal_share, and sequence {sequence.trajectory_id!r} has none: derive it from "
                "the tokens' versions"
            )


def with_advantages(
    sequences: Rows[Sequence],
    objective: ResolvedObjective,
    *,
    bootstraps: Rows[float] | None = None,
    ranks: Ranks = ALONE,
) -> list[Sequence]:
    """Return the rows with the advantages (and for a critic the returns) of an estimator that the trainer runs.

    Args:
        sequences: This rank's rows with what the estimator reads: `values` for gae, `reference_logprobs` if the KL is part
            of the reward, `token_rewards` for process, `reward` for the others.
        objective: What will be minimised. If its estimator needs only rewards, the rows come back as they are.
        bootstraps: For each row the critic's value of the state after its last token. gae reads it for truncated rows. None
            takes the value of the last state that the row has.
        ranks: All ranks that have a share of the batch.

    Raises:
        ValueError: if a row lacks a column or its reward.
    """
    match objective.advantage:
        case "gae":
            return _with_gae(sequences, objective, bootstraps)
        case "reinforce_pp":
            gamma = objective.estimator_parameters["gamma"] or 0.0
            returns = [discounted_sum(token_rewards(each, objective), gamma) for each in sequences]
            return _with_column(sequences, "advantages", whiten(returns, ranks))
        case "process":
            return _with_column(sequences, "advantages", _process(sequences, objective, ranks))
        case _:
            return list(sequences)


def token_rewards(sequence: Sequence, objective: ResolvedObjective) -> PerToken:
    """Return the reward at each loss token: the environment's, or the episode's at the last token; minus the KL in the reward.

    The KL in the reward is `kl_coef` KL(o, ref) with the proximal policy o (the behaviour policy, unless o is recomputed),
    never with the policy that is being trained.

    Returns:
        float64, one per loss token.

    Raises:
        ValueError: if there is neither a reward nor rewards per token, or the reference is missing.
    """
    rewards = _environment_rewards(sequence)
    if objective.kl_coef > 0 and objective.kl_where == "reward":
        if sequence.reference_logprobs is None:
            raise ValueError(
                f"kl_where is reward but sequence {sequence.trajectory_id!r} has no reference log-probabilities: send them, "
                "name a reference model, or set kl_coef to 0"
            )
        proximal = _at_loss_tokens(sequence, _proximal(sequence, objective))
        reference = _at_loss_tokens(sequence, sequence.reference_logprobs)
        rewards = rewards - objective.kl_coef * kl_estimate(objective.kl_kind, proximal, reference)
    return rewards


def _environment_rewards(sequence: Sequence) -> PerToken:
    if sequence.token_rewards is not None:
        return _at_loss_tokens(sequence, sequence.token_rewards)
    if sequence.reward is None:
        raise ValueError(
            f"sequence {sequence.trajectory_id!r} has no reward, which is not 0: leave it out of the batch"
        )
    rewards = torch.zeros(int(sequence.loss_mask.sum()), dtype=torch.float64)
    rewards[-1:] = sequence.reward
    return rewards


def _with_gae(
    sequences: Rows[Sequence], objective: ResolvedObjective, bootstraps: Rows[float] | None
) -> list[Sequence]:
    advantages, returns = [], []
    for index, sequence in enumerate(sequences):
        if sequence.values is None:
            raise ValueError(
                f"gae needs the critic's values, and sequence {sequence.trajectory_id!r} has none: set up a critic"
            )
        values = _at_loss_tokens(sequence, sequence.values)
        last = float(values[-1]) if len(values) else 0.0
        after = last if bootstraps is None else bootstraps[index]
        advantage, target = gae(
            token_rewards(sequence, objective),
            values,
            bootstrap=after if sequence.truncated else 0.0,
            gamma=objective.estimator_parameters["gamma"] or 0.0,
            gae_lambda=objective.estimator_parameters["gae_lambda"] or 0.0,
        )
        advantages.append(advantage)
        returns.append(target)
    return _with_column(_with_column(sequences, "advantages", advantages), "returns", returns)


def _process(sequences: Rows[Sequence], objective: ResolvedObjective, ranks: Ranks) -> list[PerToken]:
    discount = objective.estimator_parameters["turn_discount"]
    credited = [
        process_returns(_process_rewards(each), turns_of(each.loss_mask), turn_discount=discount) for each in sequences
    ]
    match objective.process_scale:
        case "batch":
            return whiten(credited, ranks)
        case "group":
            names = [each.group_id or f"alone/{each.trajectory_id}" for each in sequences]
            return whiten_by_group(credited, names, ranks)
        case _:
            return credited


def _process_rewards(sequence: Sequence) -> PerToken:
    if sequence.token_rewards is None:
        raise ValueError(
            f"process needs rewards per token or turn, and sequence {sequence.trajectory_id!r} has none: send them, or "
            "choose an estimator of the episode's reward"
        )
    return _at_loss_tokens(sequence, sequence.token_rewards)


def with_selection(sequences: Rows[Sequence], objective: ResolvedObjective, ranks: Ranks = ALONE) -> list[Sequence]:
    """Return the rows with the tokens marked that m2po keeps; other objectives keep all.

    Raises:
        ValueError: if a row has no proximal log-probabilities.
    """
    tau = objective.other_parameters.get("tau")
    if tau is None:
        return list(sequences)
    behaviour = [_at_loss_tokens(each, each.behaviour_logprobs) for each in sequences]
    proximal = [_at_loss_tokens(each, _proximal(each, objective)) for each in sequences]
    masks = keep_small_moments(behaviour, proximal, tau=tau, ranks=ranks)
    rows = []
    for sequence, mask in zip(sequences, masks, strict=True):
        kept = torch.ones_like(sequence.loss_mask)
        kept[sequence.loss_mask] = mask
        rows.append(replace(sequence, kept=kept))
    return rows


def _proximal(sequence: Sequence, objective: ResolvedObjective) -> PerSequenceToken:
    if not objective.needs_proximal:
        return sequence.behaviour_logprobs
    if sequence.proximal_logprobs is None:
        raise ValueError(
            f"sequence {sequence.trajectory_id!r} has no proximal log-probabilities: compute them before the batch is prepared"
        )
    return sequence.proximal_logprobs


def _at_loss_tokens(sequence: Sequence, column: PerSequenceToken) -> PerToken:
    return column[sequence.loss_mask].double()


def _with_column(sequences: Rows[Sequence], name: str, values: Rows[PerToken]) -> list[Sequence]:
    """Return the rows with a column set at their loss tokens, 0 elsewhere, in the precision of their log-probabilities."""
    rows = []
    for sequence, each in zip(sequences, values, strict=True):
        column = torch.zeros_like(sequence.behaviour_logprobs)
        column[sequence.loss_mask] = each.to(column.dtype)
        rows.append(replace(sequence, **{name: column}))
    return rows
