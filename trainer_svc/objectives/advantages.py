"""Advantages that the trainer estimates before its epochs, because they need a critic's values or rewards per token.

`sluice.advantages` has the estimators that need one reward per episode; the orchestrator runs those. The estimators here are pure
functions of loss tokens: prompts, observations and padding do not exist for them. Every rank calls the functions that take `ranks`
with its own rows; they compute over the rows of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

import torch

from sluice.advantages import STD_OFFSET
from trainer_svc.batch.rows import TrainingRow
from trainer_svc.batch.shapes import MaskOfSequence, PerSequenceToken, PerToken, Scalar
from trainer_svc.objectives.config import ResolvedObjective
from trainer_svc.objectives.presets import kl_estimate
from trainer_svc.parallel.mesh import ALONE, Ranks

BATCH = "batch"
"""Name of the single group when values are whitened over the whole batch."""


def with_advantages(
    sequences: Sequence[TrainingRow],
    objective: ResolvedObjective,
    *,
    bootstraps: Sequence[float] | None = None,
    ranks: Ranks = ALONE,
) -> list[TrainingRow]:
    """Return the rows with the advantages (and for a critic the returns) of an estimator that the trainer runs.

    Args:
        sequences: This rank's rows with the columns that the estimator reads: `values` for gae, `reference_logprobs` if the KL is
            part of the reward, `token_rewards` for process, `reward` for the others.
        objective: The objective that will be minimised; its estimator is one of `BATCH_ESTIMATORS`.
        bootstraps: For each row the critic's value of the state after its last token. gae reads it for truncated rows. None
            means the value of the last state that the row has.
        ranks: All ranks that have a share of the batch.

    Raises:
        ValueError: if a row lacks a column or its reward.
    """
    if objective.advantage == "gae":
        return _with_gae(sequences, objective, bootstraps)
    if objective.advantage == "process":
        return with_column(sequences, "advantages", _process(sequences, objective, ranks))
    gamma = objective.estimator_parameters["gamma"] or 0.0
    returns = [discounted_sum(token_rewards(each, objective), gamma) for each in sequences]
    return with_column(sequences, "advantages", whiten(returns, [BATCH] * len(returns), ranks))


def check_rewards(sequence: TrainingRow, objective: ResolvedObjective) -> None:
    """Refuse a row that lacks the reward which the trainer's estimator reads.

    Raises:
        ValueError: with the row's trajectory, and the remedy.
    """
    if objective.advantage == "process":
        _process_rewards(sequence)
    else:
        _environment_rewards(sequence)


def token_rewards(sequence: TrainingRow, objective: ResolvedObjective) -> PerToken:
    """Return the reward at each loss token: the environment's token rewards, or the episode's reward at the last token.

    If the KL is part of the reward, it is subtracted.

    That KL is `kl_coef` KL(o, ref) with the proximal policy o (the behaviour policy, unless o is recomputed), never with the policy
    that is being trained.

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
        proximal = at_loss_tokens(sequence, proximal_of(sequence, objective))
        reference = at_loss_tokens(sequence, sequence.reference_logprobs)
        rewards = rewards - objective.kl_coef * kl_estimate(objective.kl_kind, proximal, reference)
    return rewards


def _environment_rewards(sequence: TrainingRow) -> PerToken:
    if sequence.token_rewards is not None:
        return at_loss_tokens(sequence, sequence.token_rewards)
    if sequence.reward is None:
        raise ValueError(
            f"sequence {sequence.trajectory_id!r} has no reward, which is not 0: leave it out of the batch"
        )
    rewards = torch.zeros(sequence.loss_tokens, dtype=torch.float64)
    rewards[-1:] = sequence.reward
    return rewards


def _with_gae(
    sequences: Sequence[TrainingRow], objective: ResolvedObjective, bootstraps: Sequence[float] | None
) -> list[TrainingRow]:
    advantages, returns = [], []
    for index, sequence in enumerate(sequences):
        if sequence.values is None:
            raise ValueError(
                f"gae needs the critic's values, and sequence {sequence.trajectory_id!r} has none: set up a critic"
            )
        values = at_loss_tokens(sequence, sequence.values)
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
    return with_column(with_column(sequences, "advantages", advantages), "returns", returns)


def _process(sequences: Sequence[TrainingRow], objective: ResolvedObjective, ranks: Ranks) -> list[PerToken]:
    discount = objective.estimator_parameters["turn_discount"]
    credited = [
        process_returns(_process_rewards(each), turns_of(each.loss_mask), turn_discount=discount) for each in sequences
    ]
    match objective.process_scale:
        case "batch":
            return whiten(credited, [BATCH] * len(credited), ranks)
        case "group":
            names = [each.group_id or f"alone/{each.trajectory_id}" for each in sequences]
            return whiten(credited, names, ranks)
        case _:
            return credited


def _process_rewards(sequence: TrainingRow) -> PerToken:
    if sequence.token_rewards is None:
        raise ValueError(
            f"process needs rewards per token or turn, and sequence {sequence.trajectory_id!r} has none: send them, or "
            "choose an estimator of the episode's reward"
        )
    return at_loss_tokens(sequence, sequence.token_rewards)


def proximal_of(sequence: TrainingRow, objective: ResolvedObjective) -> PerSequenceToken:
    """Return log o of a row: the result of a forward pass if the objective needs one, else log b.

    Raises:
        ValueError: if the forward pass has not run.
    """
    if not objective.needs_proximal:
        return sequence.behaviour_logprobs
    if sequence.proximal_logprobs is None:
        raise ValueError(
            f"sequence {sequence.trajectory_id!r} has no proximal log-probabilities: compute them before the batch is prepared"
        )
    return sequence.proximal_logprobs


def at_loss_tokens(sequence: TrainingRow, column: PerSequenceToken) -> PerToken:
    """Return the values of a column at the loss tokens, in float64."""
    return column[sequence.loss_mask].double()


def with_column(sequences: Sequence[TrainingRow], name: str, values: Sequence[PerToken]) -> list[TrainingRow]:
    """Return the rows with a column set at their loss tokens and 0 elsewhere, in the precision of their log-probabilities."""
    rows = []
    for sequence, each in zip(sequences, values, strict=True):
        column = torch.zeros_like(sequence.behaviour_logprobs)
        column[sequence.loss_mask] = each.to(column.dtype)
        rows.append(replace(sequence, **{name: column}))
    return rows


# The estimators.


def gae(
    rewards: PerToken, values: PerToken, *, bootstrap: float, gamma: float, gae_lambda: float
) -> tuple[PerToken, PerToken]:
    """Estimate advantages over the sampled tokens of one sequence (GAE, arXiv 1506.02438).

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma gae_lambda A_{t+1}.

    Args:
        rewards: Reward at each sampled token.
        values: Value of the state before each sampled token.
        bootstrap: V_{T+1}: 0 if the episode ended, the value of the last state if a length limit cut it off.
        gamma: Discount per token.
        gae_lambda: Weight of longer returns.

    Returns:
        Advantages and returns (advantages + values), in float64.
    """
    rewards, values = rewards.double(), values.double()
    deltas = rewards + gamma * torch.cat([values[1:], values.new_tensor([bootstrap])]) - values
    advantages = discounted_sum(deltas, gamma * gae_lambda)
    return advantages, advantages + values


def discounted_sum(values: PerToken, discount: float) -> PerToken:
    """Return x_t + discount x_{t+1} + discount^2 x_{t+2} + ... at each t, in float64.

    A scan by doubling: one addition turns the sums over windows of n values into the sums over windows of 2 n. The scan takes
    log2(tokens) tensor operations. It never divides by a power of the discount, so nothing overflows.

    Args:
        values: The values x_t, any number of them.
        discount: Between 0 and 1.
    """
    sums = values.double().clone()
    window = 1
    while window < len(sums) and (factor := discount**window):
        sums[:-window] += factor * sums[window:]
        window *= 2
    return sums


def turns_of(loss_mask: MaskOfSequence) -> torch.Tensor:
    """Return the turn of each loss token. A turn is a run of loss tokens without any other token in between."""
    places = loss_mask.nonzero().flatten()
    begins = torch.ones_like(places)
    begins[1:] = (places[1:] - places[:-1] > 1).to(places.dtype)
    return begins.cumsum(0) - 1


def process_returns(rewards: PerToken, turns: torch.Tensor, *, turn_discount: float | None) -> PerToken:
    """Return the credit of each token: its own reward, or the rewards of its turn and of later turns.

    Args:
        rewards: Reward at each loss token; a turn's reward may be at any of its tokens.
        turns: Turn of each loss token, from 0.
        turn_discount: d in R_k + d R_{k+1} + d^2 R_{k+2} + ..., the credit of every token of turn k. None: a token's credit is its
            own reward.

    Returns:
        float64, one per loss token.
    """
    rewards = rewards.double()
    if turn_discount is None:
        return rewards
    per_turn = torch.zeros(int(turns.max()) + 1 if len(turns) else 0, dtype=torch.float64).index_add(0, turns, rewards)
    return discounted_sum(per_turn, turn_discount)[turns]


def carried_back(rewards: PerSequenceToken, loss_mask: MaskOfSequence, kept: MaskOfSequence) -> PerSequenceToken:
    """Move the rewards of tokens that leave the loss to the last kept token before them.

    Rewards before the first kept token are dropped: no trained token could have earned them.

    Args:
        rewards: Reward at each loss token; other places are not read.
        loss_mask: The loss tokens to which the rewards belong.
        kept: The loss tokens that stay in the loss.
    """
    places = torch.arange(len(kept))
    heirs = torch.where(kept, places, -1).cummax(0).values
    lost = loss_mask & ~kept
    inherited = lost & (heirs >= 0)
    return rewards.masked_fill(lost, 0.0).index_add(0, heirs[inherited], rewards[inherited])


def whiten(values: Sequence[PerToken], groups: Sequence[str], ranks: Ranks = ALONE) -> list[PerToken]:
    """Return (x - mean) / (std + 1e-6) over the tokens of each group; std is unbiased, and a single token gives 0.

    Args:
        values: The values at the loss tokens of each of this rank's sequences.
        groups: The group of each sequence; other sequences of the group may lie on other ranks.
        ranks: All ranks that have a share of the batch.

    Returns:
        Whitened values in float64.
    """
    keys = [_key(group) for group in groups]
    sums = _group_totals(keys, [[float(len(each)), float(each.double().sum())] for each in values], 2, ranks)
    centred = [each.double() - sums[key][1] / sums[key][0] for each, key in zip(values, keys, strict=True)]
    # A second pass over the data: a plain sum of squares would lose the spread of large, nearly equal values.
    squares = _group_totals(keys, [[float(each.square().sum())] for each in centred], 1, ranks)
    whitened = []
    for each, key in zip(centred, keys, strict=True):
        tokens = float(sums[key][0])
        std = (float(squares[key][0]) / (tokens - 1)) ** 0.5 if tokens > 1 else 0.0
        whitened.append(each / (std + STD_OFFSET))
    return whitened


def _key(group: str) -> float:
    """Return a number for a group's name. It is the same on every rank and exact in float64."""
    return float(int.from_bytes(blake2b(group.encode(), digest_size=6).digest(), "big"))


def _group_totals(
    keys: Sequence[float], rows: Sequence[list[float]], width: int, ranks: Ranks
) -> dict[float, torch.Tensor]:
    """Return the sums of each group's rows over all ranks."""
    own = torch.tensor([[key, *row] for key, row in zip(keys, rows, strict=True)], dtype=torch.float64)
    totals: dict[float, torch.Tensor] = {}
    for row in ranks.gather(own.reshape(-1, width + 1)):
        key = float(row[0])
        totals[key] = totals.get(key, torch.zeros(width, dtype=torch.float64)) + row[1:]
    return totals


# The critic's loss.


def clipped_value_loss(
    values: PerToken, old_values: PerToken, returns: PerToken, *, value_clip: float | None
) -> tuple[PerToken, dict[str, Scalar]]:
    """0.5 max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2) per token: the loss of PPO's critic (arXiv 1707.06347).

    Args:
        values: V of the current critic, with its gradient.
        old_values: V when the update began.
        returns: R.
        value_clip: How far V may move in one update, in reward units; None: without limit.

    Returns:
        The loss per token, and `value_clipped`: the number of tokens whose clipped error is the larger one of the two.
    """
    plain = (values - returns).square()
    if value_clip is None:
        return 0.5 * plain, {"value_clipped": torch.zeros((), dtype=torch.int64, device=values.device)}
    moved = torch.minimum(torch.maximum(values, old_values - value_clip), old_values + value_clip)
    clipped = (moved - returns).square()
    return 0.5 * torch.maximum(plain, clipped), {"value_clipped": (clipped > plain).sum()}
