"""The tasks of one environment: their order, their progress, and which are in quarantine. Pure.

`Shares` gives places to names in turn: to pools of tasks here, to environments in `curriculum`.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator_svc.config import PoolsConfig
from sluice.environments.base import Task
from sluice.v1 import journal_pb2

NEW, EASY, MEDIUM, HARD = "new", "easy", "medium", "hard"
POOLS = (NEW, EASY, MEDIUM, HARD)

_NEWEST_WEIGHT = 0.5
"""Weight of a task's newest group in the moving mean of its solve rate."""


@dataclass(slots=True)
class Progress:
    """The progress of one task.

    Attributes:
        draws: How often the task was drawn for a group.
        running: Groups of it that have not ended.
        solve_rate: Moving mean of the share of its episodes that were solved; None before the first.
        failures: Groups of it that failed one after the other.
        problem: Why it is in quarantine; empty if it is not.
    """

    draws: int = 0
    running: int = 0
    solve_rate: float | None = None
    failures: int = 0
    problem: str = ""


class TaskStream:
    """The tasks of one environment, in the order in which they are drawn.

    Without pools every task comes once per pass, each pass in another order; a position is a place in this stream. With
    pools, the pool is chosen by the wanted shares, and from it the task that was drawn least often. Both depend only on
    the seed and the facts.

    Attributes:
        next_position: Without pools, the place of the next task; with pools, the number of draws so far.
        quarantined: Tasks that are not drawn any more.

    Raises:
        ValueError: if there are no tasks, or two tasks have the same id.
    """

    def __init__(self, tasks: Sequence[Task], seed: int, pools: PoolsConfig | None = None, *, split: str = "") -> None:
        if not tasks:
            raise ValueError(f"the split {split!r} has no tasks: check its name and the environment's args")
        self._listed = tasks
        self._tasks = {task.task_id: place for place, task in enumerate(tasks)}
        if len(self._tasks) < len(tasks):
            twice = next(name for name, times in Counter(task.task_id for task in tasks).items() if times > 1)
            raise ValueError(
                f"two tasks of the split {split!r} have the id {twice!r}: a task's results are kept by its id, so give each its own"
            )
        self._names = list(self._tasks)
        self._pools, self._seed = pools or PoolsConfig(), seed
        self._pass = -1
        self._order: list[int] = []
        self.next_position = 0
        self.progress: dict[str, Progress] = {}
        self.quarantined: dict[str, Progress] = {}
        self._unnoted: set[str] = set()
        self.pool_shares = Shares({name: getattr(self._pools.shares, name) for name in POOLS})
        self._sizes = Counter({NEW: len(self._tasks)})
        self._free: dict[str, list[tuple[int, int, str]]] = {name: [] for name in POOLS}
        if self._pools.enabled:
            self._free[NEW] = [self._entry(name, 0) for name in self._names]
            heapq.heapify(self._free[NEW])

    @property
    def unnoted(self) -> int:
        """Tasks that changed since the last note."""
        return len(self._unnoted)

    @property
    def exhausted(self) -> bool:
        """Whether every task is in quarantine."""
        return len(self.quarantined) == len(self._tasks)

    @property
    def task_ids(self) -> Sequence[str]:
        """Return the ids of all tasks, in the order of the environment."""
        return self._names

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._tasks

    def get(self, task_id: str) -> Task | None:
        """Return the task with this id; None if there is none."""
        place = self._tasks.get(task_id)
        return None if place is None else self._listed[place]

    def at(self, position: int) -> str:
        """Return the task at a position of the stream without pools, from 0."""
        number, place = divmod(position, len(self._names))
        if number != self._pass:
            self._order = list(range(len(self._names)))
            random.Random(f"{self._seed}/{number}").shuffle(self._order)  # noqa: S311 - an order, not a secret
            self._pass = number
        return self._names[self._order[place]]

    def pool(self, task_id: str) -> str:
        """Return the pool that a task is in."""
        known = self.progress.get(task_id)
        if known is None or known.solve_rate is None:
            return NEW
        if known.solve_rate >= self._pools.easy_from:
            return EASY
        return HARD if known.solve_rate <= self._pools.hard_to else MEDIUM

    def sizes(self) -> dict[str, int]:
        """Return the number of tasks in each pool, without those in quarantine."""
        return {name: self._sizes[name] for name in POOLS}

    def choose_task(self) -> tuple[str, int]:
        """Return the next task and its position. At least one task must not be in quarantine."""
        if self._pools.enabled:
            return self._choose_by_pool(), self.next_position
        position = self.next_position
        while (name := self.at(position)) in self.quarantined:
            position += 1
        return name, position

    def drawn(self, task_id: str, position: int, *, in_turn: bool) -> None:
        """Note that a group of a task starts; `in_turn` unless it is drawn again."""
        if in_turn:
            self.next_position = position + 1
            if self._pools.enabled:
                self.pool_shares.give(self.pool(task_id), self._able_pools())
        known = self._known(task_id)
        known.draws += 1
        known.running += 1

    def ended(self, task_id: str, solved_share: float | None) -> None:
        """Note that a group ended, with the share of its episodes that were solved; None if no episode has a reward."""
        known, before = self._known(task_id), self.pool(task_id)
        known.failures = 0
        if solved_share is not None:
            rate = known.solve_rate
            known.solve_rate = solved_share if rate is None else rate + _NEWEST_WEIGHT * (solved_share - rate)
        self._leave(task_id, known, before)

    def failed(self, task_id: str) -> None:
        """Note a failed group whose task may be the cause."""
        known = self._known(task_id)
        known.failures += 1
        self._leave(task_id, known, self.pool(task_id))

    def given_up(self, task_id: str) -> None:
        """Note that a group ended and says nothing about its task, such as one whose replica was lost."""
        self._leave(task_id, self._known(task_id), self.pool(task_id))

    def quarantine(self, task_id: str, failures: int, problem: str) -> None:
        """Put a task in quarantine: it is not drawn any more."""
        known = self._known(task_id)
        if not known.problem and task_id in self._tasks:
            self._sizes[self.pool(task_id)] -= 1
        known.failures, known.problem = failures, problem or "its groups failed"
        if task_id in self._tasks:
            self.quarantined[task_id] = known

    def release(self, task_id: str) -> None:
        """Take a task out of quarantine, and forget its failures."""
        known, was_out = self._known(task_id), self.quarantined.pop(task_id, None) is not None
        known.failures, known.problem = 0, ""
        if was_out:
            self._sizes[self.pool(task_id)] += 1
            self._move(task_id, known, self.pool(task_id))

    def restore(self, noted: journal_pb2.EnvironmentProgress) -> None:
        """Take over a note of the journal."""
        self.next_position = noted.next_position
        self.pool_shares.credits.update(
            {name: value for name, value in noted.pool_credits.items() if name in self.pool_shares.credits}
        )
        for task_id, each in noted.tasks.items():
            known, before = self._known(task_id), self.pool(task_id)
            noted_rate = each.solve_rate if each.HasField("solve_rate") else None
            if (known.draws, known.solve_rate, known.failures) != (each.draws, noted_rate, each.failures):
                known.draws, known.solve_rate, known.failures = each.draws, noted_rate, each.failures
                self._move(task_id, known, before)
        self._unnoted.clear()

    def noted(self) -> journal_pb2.EnvironmentProgress:
        """Return what `restore` reads: the tasks that changed since the note before. All notes together name every one."""
        changed = ((task_id, self.progress[task_id]) for task_id in self._unnoted)
        tasks = {
            task_id: journal_pb2.TaskProgress(draws=each.draws, solve_rate=each.solve_rate, failures=each.failures)
            for task_id, each in changed
        }
        owed = self.pool_shares.credits if self._pools.enabled else {}
        return journal_pb2.EnvironmentProgress(next_position=self.next_position, tasks=tasks, pool_credits=owed)

    def state(self) -> dict[str, Any]:
        """Return the state that the facts led to, for `take_over`."""
        return {
            "next_position": self.next_position,
            "progress": {
                name: (each.draws, each.running, each.solve_rate, each.failures, each.problem)
                for name, each in self.progress.items()
            },
            "quarantined": list(self.quarantined),
            "unnoted": self._unnoted,
            "credits": self.pool_shares.credits,
            "sizes": self._sizes,
            "free": self._free,
        }

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned for a stream with the same tasks and settings."""
        self.next_position, self._unnoted = state["next_position"], state["unnoted"]
        self.progress = {name: Progress(*each) for name, each in state["progress"].items()}
        self.quarantined = {name: self.progress[name] for name in state["quarantined"]}
        self.pool_shares.credits, self._sizes, self._free = state["credits"], state["sizes"], state["free"]

    def _known(self, task_id: str) -> Progress:
        """Return the progress of a task, to change it."""
        self._unnoted.add(task_id)
        return self.progress.setdefault(task_id, Progress())

    def _leave(self, task_id: str, known: Progress, pool_before: str) -> None:
        known.running = max(0, known.running - 1)
        self._move(task_id, known, pool_before)

    def _move(self, task_id: str, known: Progress, pool_before: str) -> None:
        """Put a task into the pool of its solve rate."""
        if known.problem or task_id not in self._tasks:
            return
        pool = self.pool(task_id)
        self._sizes[pool_before] -= 1
        self._sizes[pool] += 1
        if self._pools.enabled and not known.running:
            heapq.heappush(self._free[pool], self._entry(task_id, known.draws))

    def _entry(self, task_id: str, draws: int) -> tuple[int, int, str]:
        """Return the sort key of a task in its pool: least drawn first, then an order that depends on the seed and the number of draws."""
        digest = hashlib.blake2b(f"{self._seed}/{draws}/{task_id}".encode(), digest_size=8).digest()
        return draws, int.from_bytes(digest), task_id

    def _first_free(self, pool: str) -> str | None:
        """Return the next task of a pool that no running group uses."""
        free = self._free[pool]
        while free:
            draws, _, task_id = free[0]
            known = self.progress.get(task_id)
            if known is None or not (
                known.problem or known.running or known.draws != draws or self.pool(task_id) != pool
            ):
                return task_id
            heapq.heappop(free)  # outdated: the task has another entry at its present place
        return None

    def _able_pools(self) -> list[str]:
        """Return the pools with a task that no running group uses. If there is none, return all pools with a task."""
        return [name for name in POOLS if self._first_free(name)] or [name for name in POOLS if self._sizes[name] > 0]

    def _choose_by_pool(self) -> str:
        able = self._able_pools()
        pool = self.pool_shares.choose(able) or able[0]
        free = self._first_free(pool)
        if free is not None:
            return free
        # Every task has a running group, so there are fewer tasks than groups, and checking each task is cheap.
        here = [each for each in self._names if each not in self.quarantined and self.pool(each) == pool]
        return min(here, key=lambda each: (self.progress[each].running, *self._entry(each, self.progress[each].draws)))


_ROUNDING = 1e-9
"""Rounding error of sums of shares, in places."""


class Shares:
    """Gives places to names so that at any time the places of each name differ from its share by less than one.

    Each place gives every name its share as credit and takes 1 from the name that gets it. Among names with credit above 0 the place
    goes to the one that would be a whole place behind first: earliest deadline first keeps each credit between -1 and 1
    (Baruah et al., "Proportionate progress", 1996). The credit of a name that cannot take a place goes to the others.
    """

    def __init__(self, wanted: Mapping[str, float]) -> None:
        self._wanted = dict(wanted)
        self.credits = dict.fromkeys(wanted, 0.0)

    def share(self, name: str) -> float:
        """Return the wanted share of a name, 0 to 1."""
        total = sum(self._wanted.values())
        return self._wanted[name] / total if total else 0.0

    def want(self, name: str, weight: float) -> None:
        """Change the weight of a name."""
        self._wanted[name] = weight

    def choose(self, able: Collection[str]) -> str | None:
        """Return the name that gets the next place; None if no name in `able` has a share."""
        due, shares = self._due(able)
        candidates = [name for name in shares if due[name] > _ROUNDING]
        return min(candidates, key=lambda name: (1 - due[name]) / shares[name], default=None)

    def give(self, name: str, able: Collection[str]) -> None:
        """Give a place to a name, chosen among `able`."""
        self.credits, _ = self._due(able)
        self.credits[name] -= 1
        if max(map(abs, self.credits.values())) > 1 + _ROUNDING:
            # These places were given under other shares, which a start does not know when it counts them again.
            self.credits = dict.fromkeys(self.credits, 0.0)

    def _due(self, able: Collection[str]) -> tuple[dict[str, float], dict[str, float]]:
        """Return the credits, the next place's included, and the shares of this place for the names that can take it.

        The other names lose their credit, so that the sum of all credits is 1 and at least one of `able` is above 0.
        """
        weights = {name: weight for name, weight in self._wanted.items() if weight > 0 and name in able}
        total = sum(weights.values())
        shares = {name: weight / total for name, weight in weights.items()}
        lost = sum(max(0.0, credit) for name, credit in self.credits.items() if name not in shares)
        due = {
            name: credit + (1.0 + lost) * shares[name] if name in shares else min(0.0, credit)
            for name, credit in self.credits.items()
        }
        return due, shares
