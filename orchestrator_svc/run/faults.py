"""Signs that an environment, a judge or the replicas fail, rather than a task. Pure: the caller passes the time in monotonic seconds.

`Outage`: if groups of many different tasks fail one after the other, these tasks are not the cause. The run pauses, and tries one group
at a time, after pauses that grow, until a group succeeds. `FirstRewards`: the first rewards of an environment look wrong. The run
continues, with a warning.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sluice.limits import within

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
"""Seconds before a group is tried, doubled after each one that fails: a judge that restarts is noticed within a minute."""


class Outage:
    """Follows the ends of groups, and says whether the next one may start.

    Args:
        most_groups: How many groups may fail one after the other. More end the run, once it has paused for `give_up_s`.
        most_tasks: The run pauses when the groups of so many different tasks failed in a row for reasons that they may share.
        give_up_s: Seconds from the beginning of a pause after which the run may end.
        first_s: Used instead of `give_up_s` as long as no group of the run ever succeeded: what fails may never have worked.
        proven: Whether a group of the run succeeded before.

    Attributes:
        active: Whether the run pauses.
        in_a_row: Groups that failed one after the other.
        proven: Whether a group of the run ever succeeded.
        tasks: Environment and id of those of their tasks whose groups failed for a shared reason, in order.
    """

    def __init__(
        self, most_groups: int, most_tasks: int, give_up_s: float, first_s: float, *, proven: bool = False
    ) -> None:
        self._most_groups, self._most_tasks = most_groups, most_tasks
        self._give_up_s, self._first_s, self.proven = give_up_s, min(first_s, give_up_s), proven
        self._begin_anew()

    @property
    def limit_s(self) -> float:
        """Seconds from the beginning of a pause after which the run may end."""
        return self._give_up_s if self.proven else self._first_s

    def _begin_anew(self) -> None:
        self.active = False
        self.in_a_row = 0
        self.tasks: dict[tuple[str, str], None] = {}
        self._began = self._next = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._tried: int | None = None  # the group that is tried, until it has ended

    def may_start(self, now: float) -> bool:
        """Return whether a group may start. During a pause only one runs at a time."""
        return not self.active or (self._tried is None and now >= self._next)

    def started(self, group: int, now: float, *, awaited: bool) -> None:
        """Note that a group starts. The next one waits for its end if it is `awaited`, else only for the end of the pause."""
        if self.active and awaited:
            self._tried = group
        elif self.active:
            self._wait_longer(now)

    def ended(self, group: int) -> None:
        """Note that a group has ended, successful or not."""
        if self._tried == group:
            self._tried = None

    def failed(self, group: int, task: tuple[str, str], now: float, *, shared: bool, heals: bool) -> bool:
        """Note that a group failed; return whether the run pauses from now on.

        Args:
            group: Its number.
            task: Its environment and task.
            now: The time.
            shared: Whether something that groups share may be the cause.
            heals: Whether waiting may help.
        """
        self.in_a_row += 1
        if shared:
            self.tasks[task] = None
        if self.active:
            if self._tried == group:
                self._wait_longer(now)
            return False
        if not heals or (len(self.tasks) < self._most_tasks and self.in_a_row < self._most_groups):
            return False
        self.active, self._began = True, now
        self._next = now + self._pause_s
        return True

    def succeeded(self) -> bool:
        """Note that a group succeeded; return whether that ends a pause."""
        was_active, self.proven = self.active, True
        self._begin_anew()
        return was_active

    def try_now(self, now: float) -> None:
        """Try the next group at once, because an operator says that the fault is repaired."""
        self._next, self._pause_s = now, FIRST_PAUSE_S

    def hopeless(self, now: float, *, heals: bool) -> bool:
        """Return whether the run should end: too many groups failed, and it has waited long enough, or waiting does not help."""
        waited = self.active and now - self._began >= self.limit_s
        return (waited and not self.proven) or (self.in_a_row >= self._most_groups and (waited or not heals))

    def _wait_longer(self, now: float) -> None:
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
        self._next = now + self._pause_s


_FEWEST = 8
"""Least number of rewards to check: a few may be equal by chance."""


@dataclass(slots=True)
class _Seen:
    groups: int = 0
    rewards: list[float | None] = field(default_factory=list)
    is_done: bool = False


class FirstRewards:
    """Collects the rewards of the first groups of each environment, and reports once what is odd about them.

    Args:
        groups: How many first groups to check: those of a batch. More are checked until there are 8 rewards.
        most_reward: Largest absolute value of a reward.
    """

    def __init__(self, groups: int, most_reward: float) -> None:
        self._groups, self._most = groups, most_reward
        self._seen: dict[str, _Seen] = {}

    def take_rewards(self, environment: str, rewards: Iterable[float | None]) -> list[str]:
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
