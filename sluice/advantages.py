"""Advantage estimators as pure functions of rewards and group ids.

An episode names its group; positions in the batch mean nothing. Statistics take one reward per episode, also if an episode
forked into several trajectories.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from sluice.limits import FLOAT32_MAX

Rewards: TypeAlias = NDArray[np.float64]

Offsets = TypeVar("Offsets")
"""An array or a tensor of floats."""

STD_OFFSET = 1e-6
"""Reward units. Keeps a division by the standard deviation finite for nearly equal rewards. Equal rewards give advantage 0 anyway."""

TRAINER_ESTIMATORS = ("gae", "reinforce_pp", "process")
"""Estimators that need a model or rewards per token. The trainer runs them before its epochs; `estimate` refuses them."""


class UnfitRewardsError(ValueError):
    """An estimator cannot compute advantages from the rewards of some groups.

    Attributes:
        groups: Ids of these groups. The estimator accepts the batch without them, unless other groups are at fault, too.
    """

    def __init__(self, message: str, groups: Iterable[str]) -> None:
        super().__init__(message)
        self.groups = frozenset(groups)


@dataclass(frozen=True, slots=True)
class Episode:
    """What an estimator reads about one attempt at a task.

    Attributes:
        episode_id: Unique within the batch.
        group_id: Shared by the attempts that are compared with each other.
        reward: Scalar reward. None if it is missing (which is not 0): the episode then enters no statistic.
        sampled_tokens: Tokens that the policy sampled in it; read by `opo`.
    """

    episode_id: str
    group_id: str
    reward: float | None
    sampled_tokens: int = 1


class Advantage(NamedTuple):
    """The advantage of an episode's sampled tokens.

    Attributes:
        value: Advantage of every token, unless branches of the episode have rewards of their own.
        slope: Derivative of the advantage with respect to the reward, with the statistics held constant; see `slopes`.
    """

    value: float
    slope: float = 0.0

    def at(self, offsets: Offsets) -> Offsets:
        """Return the advantages of tokens. `offsets`: the mean reward of the branches below a token, minus the episode's reward."""
        return self.value + self.slope * offsets  # type: ignore[operator,return-value]  # an array or a tensor of floats


def grpo(rewards: Rewards, lengths: Rewards) -> Rewards:
    """(R - mean) / (std + 1e-6), std unbiased (arXiv 2402.03300)."""
    return (rewards - float(rewards.mean())) / (float(rewards.std(ddof=1)) + STD_OFFSET)


def centered(rewards: Rewards, lengths: Rewards) -> Rewards:
    """R - mean (Dr. GRPO, arXiv 2503.20783)."""
    return rewards - float(rewards.mean())


def rloo(rewards: Rewards, lengths: Rewards) -> Rewards:
    """R - mean of the other rewards (arXiv 2402.14740)."""
    others = len(rewards) - 1
    return rewards - (float(rewards.sum()) - rewards) / others


def opo(rewards: Rewards, lengths: Rewards) -> Rewards:
    """R - length-weighted mean of the rewards (arXiv 2505.23585)."""
    total = float(lengths.sum())
    return rewards - float(lengths @ rewards) / total if total > 0 else np.zeros_like(rewards)


def maxrl(rewards: Rewards, lengths: Rewards) -> Rewards:
    """(R - mean) / mean, and 0 where the mean is not positive (arXiv 2602.02710).

    Raises:
        ValueError: if a reward is negative.
    """
    if (rewards < 0).any():
        raise ValueError("maxrl needs rewards of at least 0: shift them, or use another estimator")
    mean = float(rewards.mean())
    return (rewards - mean) / mean if mean > 0 else np.zeros_like(rewards)


def by_batch_std(advantages: Rewards, rewards: Rewards, lengths: Rewards) -> Rewards:
    """Advantages / (std of the batch's rewards + 1e-6), std unbiased (Lite PPO, arXiv 2508.08221)."""
    return advantages / batch_std(advantages, rewards, lengths)


def batch_std(advantages: Rewards, rewards: Rewards, lengths: Rewards) -> float:
    """Return what `by_batch_std` divides by; 1 for a single reward."""
    return float(rewards.std(ddof=1)) + STD_OFFSET if len(rewards) > 1 else 1.0


def whitened_over_tokens(advantages: Rewards, rewards: Rewards, lengths: Rewards) -> Rewards:
    """(A - mean) / (std + 1e-6) over all sampled tokens of the batch, std unbiased (REINFORCE++-baseline, arXiv 2501.03262)."""
    total = float(lengths.sum())
    if total <= 1:
        return np.zeros_like(advantages)
    return (advantages - float(lengths @ advantages) / total) / token_std(advantages, rewards, lengths)


def token_std(advantages: Rewards, rewards: Rewards, lengths: Rewards) -> float:
    """Return what `whitened_over_tokens` divides by; infinity for a single token."""
    total = float(lengths.sum())
    if total <= 1:
        return math.inf
    offsets = advantages - float(lengths @ advantages) / total
    return float(np.sqrt(lengths @ np.square(offsets) / (total - 1))) + STD_OFFSET


Estimator = Callable[[Rewards, Rewards], Rewards]
BatchScale = Callable[[Rewards, Rewards, Rewards], Rewards]

ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {
        "grpo": grpo,
        "dr_grpo": centered,
        "centered": centered,
        "rloo": rloo,
        "opo": opo,
        "maxrl": maxrl,
        "lite_ppo": centered,
        "reinforce_pp_baseline": centered,
    }
)
"""Estimators of one group's advantages from its rewards and sampled lengths. They get two or more rewards, not all equal."""

BATCH_SCALES: Mapping[str, BatchScale] = MappingProxyType(
    {"lite_ppo": by_batch_std, "reinforce_pp_baseline": whitened_over_tokens}
)
"""Scalings over the whole batch, applied after the estimator. They get the batch's advantages, rewards and sampled lengths."""

_GROUP_SPREADS: Mapping[str, Callable[[Rewards], float]] = MappingProxyType(
    {
        "grpo": lambda rewards: float(rewards.std(ddof=1)) + STD_OFFSET if (rewards != rewards[0]).any() else math.inf,
        "maxrl": lambda rewards: float(rewards.mean()) if rewards.mean() > 0 else math.inf,
    }
)
_BATCH_SPREADS: Mapping[str, Callable[[Rewards, Rewards, Rewards], float]] = MappingProxyType(
    {"lite_ppo": batch_std, "reinforce_pp_baseline": token_std}
)
"""Divisors that estimators apply to a difference of rewards. Infinite where there is nothing to compare with: the slope is then 0."""


def advantages_by_episode(name: str, trajectories: Iterable[Episode], *, branched: bool) -> dict[str, Advantage]:
    """Return the advantage of every episode that has a reward. Both sides of SubmitBatch compute advantages by this function.

    Args:
        name: An estimator of `ESTIMATORS`.
        trajectories: One entry per trajectory; see `joined`.
        branched: Whether branches have rewards of their own. If not, slopes are left at 0.

    Raises:
        UnfitRewardsError: as `estimate`.
    """
    episodes = joined(trajectories)
    values = estimate(name, episodes)
    grows = slopes(name, episodes) if branched else {}
    return {episode: Advantage(value, grows.get(episode, 0.0)) for episode, value in values.items()}


def joined(trajectories: Iterable[Episode]) -> list[Episode]:
    """Return one entry per episode: an episode that forked has several trajectories, whose tokens count together."""
    found: dict[str, Episode] = {}
    for each in trajectories:
        before = found.get(each.episode_id)
        tokens = each.sampled_tokens + (before.sampled_tokens if before else 0)
        found[each.episode_id] = Episode(each.episode_id, each.group_id, each.reward, tokens)
    return list(found.values())


def estimate(name: str, episodes: Sequence[Episode]) -> Mapping[str, float]:
    """Return for every episode that has a reward the advantage of all its sampled tokens, computed within its group.

    Args:
        name: An estimator of `ESTIMATORS`.
        episodes: One entry per episode, in any order.

    Raises:
        UnfitRewardsError: if it cannot take the rewards of some groups, or their advantages exceed float32.
        ValueError: if the estimator is unknown, or an episode occurs twice.
    """
    if name in TRAINER_ESTIMATORS:
        raise ValueError(
            f"{name} needs a model or rewards per token, so the trainer computes it before its epochs: do not ask for it here"
        )
    if name not in ESTIMATORS:
        raise ValueError(f"there is no advantage estimator {name!r}; choose one of {', '.join(ESTIMATORS)}")
    groups = _by_group(episodes)
    scored = [episode for members in groups for episode in members]
    with np.errstate(over="ignore", invalid="ignore"):  # checked below
        within = [_within_group(name, members) for members in groups]
        advantages = np.concatenate(within) if within else np.zeros(0)
        if name in BATCH_SCALES and scored:
            advantages = BATCH_SCALES[name](advantages, *_columns(scored))
    _check_size(name, scored, advantages)
    alone = {members[0].episode_id for members in groups if len(members) == 1}
    return {
        episode.episode_id: 0.0 if episode.episode_id in alone else float(value)
        for episode, value in zip(scored, advantages, strict=True)
    }


def slopes(name: str, episodes: Sequence[Episode]) -> Mapping[str, float]:
    """Return, for each episode with a reward, the derivative of its advantage with respect to that reward, statistics held constant.

    Every estimator of `ESTIMATORS` is linear in the reward. So if the branches below a token have the mean reward r, and the episode
    has the reward R, the token has the advantage A + slope * (r - R). The slope is 0 in a group with a single reward.

    Args:
        name: An estimator of `ESTIMATORS`.
        episodes: As for `estimate`, which checks them.
    """
    groups = _by_group(episodes)
    scored = [episode for members in groups for episode in members]
    spreads = dict.fromkeys((each.group_id for each in scored), 1.0)
    if name in _GROUP_SPREADS:
        spreads = {members[0].group_id: _GROUP_SPREADS[name](_columns(members)[0]) for members in groups}
    over_batch = 1.0
    if name in _BATCH_SPREADS and scored:
        within = np.concatenate([_within_group(name, members) for members in groups])
        over_batch = _BATCH_SPREADS[name](within, *_columns(scored))
    alone = {members[0].group_id for members in groups if len(members) == 1}
    least = float(np.finfo(np.float64).tiny)  # with a smaller divisor the quotient overflows
    return {
        each.episode_id: 0.0
        if each.group_id in alone or spreads[each.group_id] * over_batch < least
        else 1.0 / (spreads[each.group_id] * over_batch)
        for each in scored
    }


def _within_group(name: str, members: Sequence[Episode]) -> Rewards:
    rewards, lengths = _columns(members)
    if (rewards == rewards[0]).all():
        # Equal rewards do not say which attempt was better, and rounding of the mean must not pretend that they do.
        return np.zeros_like(rewards)
    try:
        return ESTIMATORS[name](rewards, lengths)
    except ValueError as error:
        raise UnfitRewardsError(str(error), {members[0].group_id}) from error


def _check_size(name: str, episodes: Sequence[Episode], advantages: Rewards) -> None:
    """Check that advantages are finite in float32, the type in which they are sent.

    Raises:
        UnfitRewardsError: names the groups with such advantages. After a scaling over the batch it names the group with the largest
            reward instead, since that one may have spoiled the advantages of all groups.
    """
    fits = np.abs(advantages) <= FLOAT32_MAX  # False for NaN
    if fits.all():
        return
    at_fault = {each.group_id for each, fit in zip(episodes, fits, strict=True) if not fit}
    if name in BATCH_SCALES:
        largest = max(episodes, key=lambda each: abs(each.reward or 0.0))
        at_fault = {largest.group_id}
    raise UnfitRewardsError(
        f"{name} makes advantages beyond float32 of these rewards: bound them (orchestrator.max_reward), or scale them down",
        at_fault,
    )


def _columns(episodes: Sequence[Episode]) -> tuple[Rewards, Rewards]:
    """Return rewards and sampled lengths."""
    rewards = np.array([episode.reward for episode in episodes], dtype=np.float64)
    return rewards, np.array([episode.sampled_tokens for episode in episodes], dtype=np.float64)


def _by_group(episodes: Sequence[Episode]) -> list[list[Episode]]:
    groups: dict[str, list[Episode]] = defaultdict(list)
    seen: set[str] = set()
    for episode in episodes:
        if episode.episode_id in seen:
            raise ValueError(
                f"episode {episode.episode_id!r} occurs twice: give one reward per episode, not per trajectory"
            )
        seen.add(episode.episode_id)
        if episode.reward is None:
            continue
        if not np.isfinite(episode.reward):
            raise UnfitRewardsError(
                f"the reward of episode {episode.episode_id!r} is {episode.reward}: give a finite one, or None where it is missing",
                {episode.group_id},
            )
        groups[episode.group_id].append(episode)
    return list(groups.values())
