"""Whether the first rewards of a run look as if its environment were at fault. The run goes on; whoever started it should look."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sluice.limits import within

_FEWEST = 8
"""Rewards that are looked at, at the least: of a few, all may be equal by chance."""


@dataclass(slots=True)
class _Seen:
    groups: int = 0
    rewards: list[float | None] = field(default_factory=list)
    is_done: bool = False


class FirstRewards:
    """Collects the rewards of the first groups of each environment, and says once what is odd about them.

    Args:
        groups: Groups of a batch: so many are looked at, and more if they have fewer than 8 rewards.
        most_reward: Largest absolute value of a reward.
    """

    def __init__(self, groups: int, most_reward: float) -> None:
        self._groups, self._most = groups, most_reward
        self._seen: dict[str, _Seen] = {}

    def take(self, environment: str, rewards: Iterable[float | None]) -> list[str]:
        """Take the rewards of a scored group, None for a missing one.

        Returns:
            What is odd, with a remedy, once the first groups of the environment are complete; else nothing.
        """
        seen = self._seen.setdefault(environment, _Seen())
        if seen.is_done:
            return []
        seen.groups += 1
        seen.rewards += rewards
        if seen.groups < self._groups or len(seen.rewards) < _FEWEST:
            return []
        seen.is_done = True
        problems = list(self._odd(seen))
        seen.rewards.clear()
        return problems

    def _odd(self, seen: _Seen) -> Iterable[str]:
        there = [each for each in seen.rewards if each is not None]
        first = f"of the first {seen.groups} groups"
        if not there:
            yield (
                f"all {len(seen.rewards)} rewards {first} are missing, so that nothing can be trained: the log says why under"
                " `scoring failed`, and `sluice env try` shows one"
            )
        elif len(there) >= _FEWEST and len(set(there)) == 1:
            yield (
                f"all {len(there)} rewards {first} are {there[0]:g}, and most objectives learn nothing from rewards without differences:"
                " see with `sluice env try` whether a right answer gets another one, or choose easier tasks"
            )
        if beyond := [each for each in there if not within(each, self._most)]:
            yield (
                f"{len(beyond)} of {len(there)} rewards {first} are beyond orchestrator.max_reward = {self._most:g}, such as"
                f" {beyond[0]:g}, and count as missing: scale them down, or raise it"
            )
