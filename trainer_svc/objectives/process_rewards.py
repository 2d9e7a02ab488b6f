"""Advantages from rewards that the environment gives per token or per turn."""

from __future__ import annotations

import torch

from trainer_svc.engine.shapes import MaskOfSequence, PerSequenceToken, PerToken
from trainer_svc.objectives.value_loss import discounted_sum

__all__ = ["carried_back", "process_returns", "turns_of"]


def carried_back(rewards: PerSequenceToken, loss_mask: MaskOfSequence, kept: MaskOfSequence) -> PerSequenceToken:
    """The rewards where some loss tokens leave the loss: theirs go to the last kept token before them.

    Rewards before the first kept token are left out: nothing that is trained could have earned them.

    Args:
        rewards: Reward at each loss token; what stands elsewhere is not read.
        loss_mask: The loss tokens that the rewards belong to.
        kept: Those of them that stay.
    """
    places = torch.arange(len(kept))
    heirs = torch.where(kept, places, -1).cummax(0).values
    lost = loss_mask & ~kept
    carried = rewards.masked_fill(lost, 0.0)
    inherited = lost & (heirs >= 0)
    return carried.index_add(0, heirs[inherited], rewards[inherited])


def turns_of(loss_mask: MaskOfSequence) -> torch.Tensor:
    """The turn of each loss token: a turn is a stretch of loss tokens without anything in between."""
    places = loss_mask.nonzero().flatten()
    begins = torch.ones_like(places)
    begins[1:] = (places[1:] - places[:-1] > 1).to(places.dtype)
    return begins.cumsum(0) - 1


def process_returns(rewards: PerToken, turns: torch.Tensor, *, turn_discount: float | None) -> PerToken:
    """What each token is credited with: its own reward, or what its turn and the later ones earned.

    Args:
        rewards: Reward at each loss token; a turn's reward stands at any of its tokens.
        turns: Turn of each loss token, from 0.
        turn_discount: d of R_k + d R_{k+1} + d^2 R_{k+2} + ..., for every token of turn k; None: no credit across tokens.

    Returns:
        float64, one per loss token.
    """
    rewards = rewards.double()
    if turn_discount is None:
        return rewards
    per_turn = torch.zeros(int(turns.max()) + 1 if len(turns) else 0, dtype=torch.float64).index_add(0, turns, rewards)
    return discounted_sum(per_turn, turn_discount)[turns]
