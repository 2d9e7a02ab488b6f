"""Environments whose episodes wait for agents outside that do not come. Pure: the caller passes the time in monotonic seconds.

Such a group holds a place among the live groups, and batches wait for it. Where other environments can be played, what nobody has
taken is put off (`away`), and offered again when an agent asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable

from orchestrator_svc.journal.facts import Stage
from orchestrator_svc.journal.ledger import Group


class NoAgentError(Exception):
    """A group was put off, because no agent came for it."""


class MissingAgents:
    """Looks at the groups of external environments, and says since when none of them has an agent.

    Args:
        environments: Names of the environments whose episodes agents outside run.
        notice_s: Seconds without an agent after which somebody should know.

    Attributes:
        groups: Groups on offer of each environment that has had no agent for so long.
        away: Environments whose groups are put off.
    """

    def __init__(self, environments: Collection[str], notice_s: float) -> None:
        self._environments, self._notice_s = environments, notice_s
        self._since: dict[str, float] = {}
        self.groups: dict[str, int] = {}
        self.away: set[str] = set()

    def asked(self) -> None:
        """Take note of an agent for which nothing was on offer: everything is offered again."""
        self.away.clear()
        self._since, self.groups = {}, {}

    def put_off(self, groups: Iterable[Group], *, others_can: Callable[[Collection[str]], bool]) -> list[int]:
        """Return the groups to put off, since the agents of their environments are missed and other environments can be played.

        Args:
            groups: The live groups.
            others_can: Whether an environment other than these can deliver groups.
        """
        for name in sorted(self.groups.keys() - self.away):
            if others_can({*self.away, name}):
                self.away.add(name)
        if not self.away:
            return []
        return [
            each.number
            for each in groups
            if each.stage is Stage.RUNNING and each.environment in self.away and may_be_put_off(each)
        ]

    def look(self, groups: Iterable[Group], now: float) -> list[str]:
        """Look at the live groups; return the environments that are missed from now on."""
        if not self._environments:
            return []
        running = [each for each in groups if each.stage is Stage.RUNNING and each.environment in self._environments]
        served = {each.environment for each in running if each.external is not None and each.external.leases}
        self.away -= served
        waiting = Counter(each.environment for each in running if each.environment not in served)
        # Of an environment that is away nothing is on offer.
        self._since = {name: self._since.get(name, now) for name in waiting.keys() | self.away}
        before = self.groups
        self.groups = {name: count for name, count in waiting.items() if now - self._since[name] >= self._notice_s}
        return [name for name in self.groups if name not in before and name not in self.away]

    def longest(self, now: float) -> tuple[str, float]:
        """Return the environment that has had no agent for the longest time, and the seconds; "" and 0 if none is missed."""
        name = min(self._since, key=self._since.__getitem__, default="")
        return (name, now - self._since[name]) if name else ("", 0.0)


def may_be_put_off(group: Group) -> bool:
    """Return whether an external group waits for its first agent, or all that came have left without a result."""
    return group.external is None or group.external.abandoned
