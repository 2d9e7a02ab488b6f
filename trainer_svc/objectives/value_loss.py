"""What the critic minimises, and the returns that it learns (PPO, arXiv 1707.06347; GAE, arXiv 1506.02438)."""

from __future__ import annotations

import torch

from trainer_svc.engine.shapes import PerToken, Scalar

__all__ = ["clipped_value_loss", "gae"]


def clipped_value_loss(
    values: PerToken, old_values: PerToken, returns: PerToken, *, value_clip: float | None
) -> tuple[PerToken, dict[str, Scalar]]:
    """0.5 max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2) per token.

    Args:
        values: V of the current critic, with its gradient.
        old_values: V when the update began.
        returns: R.
        value_clip: How far V may move in one update, in reward units; None: any way.

    Returns:
        The loss per token and `value_clipped`, the number of tokens whose clipped error was the larger one.
    """
    plain = (values - returns).square()
    if value_clip is None:
        return 0.5 * plain, {"value_clipped": torch.zeros((), dtype=torch.int64, device=values.device)}
    moved = torch.minimum(torch.maximum(values, old_values - value_clip), old_values + value_clip)
    clipped = (moved - returns).square()
    return 0.5 * torch.maximum(plain, clipped), {"value_clipped": (clipped > plain).sum()}


def gae(
    rewards: PerToken, values: PerToken, *, bootstrap: float, gamma: float, gae_lambda: float
) -> tuple[PerToken, PerToken]:
    """Generalised advantage estimation over the sampled tokens of one sequence; observations between them do not exist.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma gae_lambda A_{t+1}.

    Args:
        rewards: Reward at each sampled token.
        values: Value of the state before each sampled token.
        bootstrap: V_{T+1}: 0 where the episode ended, the value of the last state where its length cut it off.
        gamma: Discount per token.
        gae_lambda: Share of the longer returns.

    Returns:
        Advantages and returns (advantages + values), in float64.
    """
    rewards, values = rewards.double(), values.double()
    deltas = rewards + gamma * torch.cat([values[1:], values.new_tensor([bootstrap])]) - values
    advantages = discounted_sum(deltas, gamma * gae_lambda)
    return advantages, advantages + values


def discounted_sum(values: PerToken, discount: float) -> PerToken:
    """Return x_t + discount x_{t+1} + discount^2 x_{t+2} + ... at each t, in float64.

    A scan by doubling: with the sums over windows of n values, one addition gives those over windows of 2 n. It takes
    log2(tokens) tensor operations, and no power of the discount is ever divided by, so that nothing overflows.

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
