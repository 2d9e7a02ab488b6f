"""Advantages that need values or rewards per token, whitening, and M2PO's selection: pure functions of loss tokens.

Prompts, observations and padding do not exist here. Functions that take `ranks` compute over the tokens of all ranks; every
rank calls them with its own sequences.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from hashlib import blake2b

import torch

from sluice.advantages import STD_OFFSET
from trainer_svc.batch.shapes import MaskOfSequence, MaskPerToken, PerSequenceToken, PerToken
from trainer_svc.objectives.surrogates import log_difference
from trainer_svc.parallel.ranks import ALONE, Ranks

__all__ = [
    "carried_back",
    "discounted_sum",
    "gae",
    "keep_small_moments",
    "process_returns",
    "turns_of",
    "whiten",
    "whiten_by_group",
]


def gae(
    rewards: PerToken, values: PerToken, *, bootstrap: float, gamma: float, gae_lambda: float
) -> tuple[PerToken, PerToken]:
    """Estimate advantages over the sampled tokens of one sequence (GAE, arXiv 1506.02438).

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma gae_lambda A_{t+1}.

    Args:
        rewards: Reward at each sampled token.
        values: Value of the state before each sampled token.
        bootstrap: V_{T+1}: 0 if the episode ended, the value of the last state if its length cut it off.
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

    A scan by doubling: from the sums over windows of n values, one addition makes those over windows of 2 n. It takes
    log2(tokens) tensor operations. It divides by no power of the discount, so nothing overflows.

    Args:
        values: Any number of them.
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
    """Return what each token is credited with: its own reward, or the rewards of its turn and of later turns.

    Args:
        rewards: Reward at each loss token; a turn's reward stands at any of its tokens.
        turns: Turn of each loss token, from 0.
        turn_discount: d in R_k + d R_{k+1} + d^2 R_{k+2} + ..., for every token of turn k; None: no credit across tokens.

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
        loss_mask: The loss tokens that the rewards belong to.
        kept: The loss tokens that stay.
    """
    places = torch.arange(len(kept))
    heirs = torch.where(kept, places, -1).cummax(0).values
    lost = loss_mask & ~kept
    inherited = lost & (heirs >= 0)
    return rewards.masked_fill(lost, 0.0).index_add(0, heirs[inherited], rewards[inherited])


def whiten(values: Rows[PerToken], ranks: Ranks = ALONE) -> list[PerToken]:
    """Return (x - mean) / (std + 1e-6) over the tokens of all sequences on all ranks; std is unbiased, a lone token gives 0.

    Args:
        values: The loss tokens of each of this rank's sequences.
        ranks: All ranks that have a share of the batch.

    Returns:
        Whitened values in float64.
    """
    own = torch.cat([each.double() for each in values]) if values else torch.zeros(0, dtype=torch.float64)
    sums = ranks.total({"tokens": float(len(own)), "sum": float(own.sum())})
    tokens = sums["tokens"]
    if tokens < 2:
        return [torch.zeros_like(each, dtype=torch.float64) for each in values]
    mean = sums["sum"] / tokens
    # A second pass, since a sum of squares would lose the spread of large values that are nearly equal.
    squares = ranks.total({"squares": float((own - mean).square().sum())})["squares"]
    std = (squares / (tokens - 1)) ** 0.5
    return [(each.double() - mean) / (std + STD_OFFSET) for each in values]


def whiten_by_group(values: Rows[PerToken], groups: Rows[str], ranks: Ranks = ALONE) -> list[PerToken]:
    """Whiten over the tokens of each group, also if a group lies on several ranks.

    Args:
        values: The loss tokens of each of this rank's sequences.
        groups: The group of each sequence.
        ranks: All ranks that have a share of the batch.
    """
    keys = [_key(group) for group in groups]
    sums = _group_totals(keys, [[float(len(each)), float(each.double().sum())] for each in values], 2, ranks)
    centred = [each.double() - sums[key][1] / sums[key][0] for each, key in zip(values, keys, strict=True)]
    squares = _group_totals(keys, [[float(each.square().sum())] for each in centred], 1, ranks)
    whitened = []
    for each, key in zip(centred, keys, strict=True):
        tokens = float(sums[key][0])
        std = (float(squares[key][0]) / (tokens - 1)) ** 0.5 if tokens > 1 else 0.0
        whitened.append(each / (std + STD_OFFSET))
    return whitened


def _key(group: str) -> float:
    """Return a number for a group's name, the same on every rank and exact in float64."""
    return float(int.from_bytes(blake2b(group.encode(), digest_size=6).digest(), "big"))


def _group_totals(keys: Rows[float], rows: Rows[list[float]], width: int, ranks: Ranks) -> dict[float, torch.Tensor]:
    """Return the sums of each group's rows over all ranks."""
    own = torch.tensor([[key, *row] for key, row in zip(keys, rows, strict=True)], dtype=torch.float64)
    totals: dict[float, torch.Tensor] = {}
    for row in ranks.gather(own.reshape(-1, width + 1)):
        key = float(row[0])
        totals[key] = totals.get(key, torch.zeros(width, dtype=torch.float64)) + row[1:]
    return totals


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
