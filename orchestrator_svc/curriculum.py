"""Which task is drawn next: the mix of environments, the pools of tasks by solve rate, rate limits, quarantine.

A pure state machine: no clock, no I/O. `Curriculum.choose` only looks. The state changes by what became true (`drawn`,
`ended`, `failed`, ...), each of which is a fact of the journal, so that a restart that reads the facts has the same state.

A draw has one of three causes, in this order: a task is drawn again (its trajectories were too old, or damaged); a group that
brought no signal is replaced by another task of its environment; or the mix chooses. Only the third is charged to the mix.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator_svc.config import EnvironmentConfig, PoolsConfig
from orchestrator_svc.envs.base import Task
from sluice.v1 import journal_pb2

NEW, EASY, MEDIUM, HARD = "new", "easy", "medium", "hard"
POOLS = (NEW, EASY, MEDIUM, HARD)

NO_SIGNAL = "NO_SIGNAL"
"""Why a group was dropped whose rewards teach nothing, and why another one was drawn in its place."""

_ROUNDING = 1e-9
"""Groups by which sums of shares may be off."""


class Shares:
    """Gives places to names so that after any number of places each has its share of them, less than one place off.

    Each place gives every name its share as credit and takes 1 from the name that gets it. Of those with credit above 0
    the one gets it that would be a whole place behind first: earliest deadline first keeps each credit between -1 and 1
    (Baruah et al., "Proportionate progress", 1996). What a name that cannot take a place is owed goes to the others.
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
        """Return who gets the next place; None if none of `able` has a share."""
        due, shares = self._due(able)
        candidates = [name for name in shares if due[name] > _ROUNDING]
        return min(candidates, key=lambda name: (1 - due[name]) / shares[name], default=None)

    def give(self, name: str, able: Collection[str]) -> None:
        """Give a place to a name, chosen among `able`."""
        self.credits, _ = self._due(able)
        self.credits[name] -= 1

    def _due(self, able: Collection[str]) -> tuple[dict[str, float], dict[str, float]]:
        """Return the credits with those of the next place, and the shares of it of those who can take it.

        The others lose what they are owed, so that the sum of all is 1 and one of `able` is above 0.
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


class StartRate:
    """Bounds how many groups start per second: a bucket that fills at this rate and holds one second's worth, at least one."""

    def __init__(self, per_s: float | None) -> None:
        self.per_s = per_s
        self._held = self._most
        self._at = float("-inf")

    @property
    def _most(self) -> float:
        return max(1.0, self.per_s or 0.0)

    def wait_s(self, now: float) -> float:
        """Return the seconds until a group may start; 0 if one may now."""
        if self.per_s is None:
            return 0.0
        lacking = 1.0 - self._level(now)
        return lacking / self.per_s if lacking > _ROUNDING else 0.0

    def start(self, now: float) -> None:
        """Count a group that starts."""
        if self.per_s is not None:
            self._held, self._at = self._level(now) - 1.0, now

    def _level(self, now: float) -> float:
        return min(self._most, self._held + (now - self._at) * (self.per_s or 0.0))


@dataclass(slots=True)
class Progress:
    """What is known of one task.

    Attributes:
        draws: Groups that were drawn of it.
        running: Those of them that have not ended.
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

    Without pools every task comes once per pass, each pass in another order; a place in this stream is a position. With
    pools the pool is chosen by the wanted shares, and of its tasks the one that was drawn least often. In both cases the
    seed and the facts decide, nothing else.

    Attributes:
        next_position: Without pools the place of the next task; with pools the number of draws so far.
        quarantined: Tasks that are not drawn any more.

    Raises:
        ValueError: if there are no tasks, or two of them have one id.
    """

    def __init__(self, tasks: Sequence[Task], pools: PoolsConfig, seed: int, *, split: str = "") -> None:
        if not tasks:
            raise ValueError(f"the split {split!r} has no tasks: check its name and the environment's args")
        self._tasks = {task.task_id: task for task in tasks}
        if len(self._tasks) < len(tasks):
            twice = next(name for name, times in Counter(task.task_id for task in tasks).items() if times > 1)
            raise ValueError(
                f"two tasks of the split {split!r} have the id {twice!r}: a task's results are kept by its id, so give each its own"
            )
        self._names = list(self._tasks)
        self._pools, self._seed = pools, seed
        self._pass = -1
        self._order: list[int] = []
        self.next_position = 0
        self.progress: dict[str, Progress] = {}
        self.quarantined: dict[str, Progress] = {}
        self.pool_shares = Shares({name: getattr(pools.shares, name) for name in POOLS})
        self._sizes = Counter({NEW: len(self._tasks)})
        self._free: dict[str, list[tuple[int, int, str]]] = {name: [] for name in POOLS}
        if pools.enabled:
            self._free[NEW] = [self._entry(name, 0) for name in self._names]
            heapq.heapify(self._free[NEW])

    @property
    def exhausted(self) -> bool:
        """Whether every task is in quarantine."""
        return len(self.quarantined) == len(self._tasks)

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._tasks

    def __getitem__(self, task_id: str) -> Task:
        return self._tasks[task_id]

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

    def choose(self) -> tuple[str, int]:
        """Return the next task and its position. At least one must not be in quarantine."""
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
            known.solve_rate = (
                solved_share if rate is None else rate + self._pools.newest_weight * (solved_share - rate)
            )
        self._leave(task_id, known, before)

    def failed(self, task_id: str) -> int:
        """Note that a group failed; return how many groups of the task failed one after the other."""
        known = self._known(task_id)
        known.failures += 1
        self._leave(task_id, known, self.pool(task_id))
        return known.failures

    def given_up(self, task_id: str) -> None:
        """Note that a group ended and says nothing about its task, such as one whose replica was lost."""
        self._leave(task_id, self._known(task_id), self.pool(task_id))

    def quarantine(self, task_id: str, failures: int, problem: str) -> None:
        """Draw a task no more."""
        known = self._known(task_id)
        if not known.problem and task_id in self._tasks:
            self._sizes[self.pool(task_id)] -= 1
        known.failures, known.problem = failures, problem or "its groups failed"
        if task_id in self._tasks:
            self.quarantined[task_id] = known

    def restore(self, noted: journal_pb2.EnvironmentProgress) -> None:
        """Take over what a note of the journal says."""
        self.next_position = noted.next_position
        self.pool_shares.credits.update(
            {name: value for name, value in noted.pool_credits.items() if name in self.pool_shares.credits}
        )
        for task_id, each in noted.tasks.items():
            known, before = self._known(task_id), self.pool(task_id)
            known.draws, known.failures = each.draws, each.failures
            known.solve_rate = each.solve_rate if each.HasField("solve_rate") else None
            self._move(task_id, known, before)

    def noted(self) -> journal_pb2.EnvironmentProgress:
        """Return what `restore` reads. A task that was only drawn says nothing and is left out."""
        tasks = {
            task_id: journal_pb2.TaskProgress(draws=each.draws, solve_rate=each.solve_rate, failures=each.failures)
            for task_id, each in self.progress.items()
            if each.failures or (self._pools.enabled and each.solve_rate is not None)
        }
        owed = self.pool_shares.credits if self._pools.enabled else {}
        return journal_pb2.EnvironmentProgress(next_position=self.next_position, tasks=tasks, pool_credits=owed)

    def _known(self, task_id: str) -> Progress:
        return self.progress.setdefault(task_id, Progress())

    def _leave(self, task_id: str, known: Progress, pool_before: str) -> None:
        known.running = max(0, known.running - 1)
        self._move(task_id, known, pool_before)

    def _move(self, task_id: str, known: Progress, pool_before: str) -> None:
        """Put a task where its solve rate says."""
        if known.problem or task_id not in self._tasks:
            return
        pool = self.pool(task_id)
        self._sizes[pool_before] -= 1
        self._sizes[pool] += 1
        if self._pools.enabled and not known.running:
            heapq.heappush(self._free[pool], self._entry(task_id, known.draws))

    def _entry(self, task_id: str, draws: int) -> tuple[int, int, str]:
        """Return the place of a task in its pool: least drawn first, then an order that the seed gives each number of draws."""
        digest = hashlib.blake2b(f"{self._seed}/{draws}/{task_id}".encode(), digest_size=8).digest()
        return draws, int.from_bytes(digest), task_id

    def _first_free(self, pool: str) -> str | None:
        """Return the next task of a pool of which no group runs."""
        free = self._free[pool]
        while free:
            draws, _, task_id = free[0]
            known = self.progress.get(task_id)
            if known is None or not (
                known.problem or known.running or known.draws != draws or self.pool(task_id) != pool
            ):
                return task_id
            heapq.heappop(free)  # it has changed since, and has another entry where it is now
        return None

    def _able_pools(self) -> list[str]:
        """Return the pools that can deliver: those with a task of which no group runs; if there is none, all with a task."""
        return [name for name in POOLS if self._first_free(name)] or [name for name in POOLS if self._sizes[name] > 0]

    def _choose_by_pool(self) -> str:
        able = self._able_pools()
        pool = self.pool_shares.choose(able) or able[0]
        free = self._first_free(pool)
        if free is not None:
            return free
        # Groups of all tasks run: there are fewer tasks than groups, so looking at each is cheap.
        here = [each for each in self._names if each not in self.quarantined and self.pool(each) == pool]
        return min(here, key=lambda each: (self.progress[each].running, *self._entry(each, self.progress[each].draws)))


@dataclass(frozen=True, slots=True)
class Draw:
    """A task that was chosen for a group.

    Attributes:
        position: Its place in the environment's stream; 0 if the task is drawn again.
        draw: How often it was drawn before.
        reason: Why it replaces an earlier group; empty if the mix chose.
        passed_over: Environments that had no part in the choice, because they could not deliver.
    """

    environment: str
    task_id: str
    position: int
    draw: int
    reason: str = ""
    passed_over: tuple[str, ...] = ()


@dataclass(slots=True)
class EnvironmentCounts:
    """What became of the groups of one environment.

    Attributes:
        passed_on: Groups of its share that others got because it could not deliver.
        by_pool: Groups drawn, by pool of the task.
        overlong: Trajectories that the rule for long episodes changed or left out, by rule.
    """

    groups: int = 0
    accepted: int = 0
    failed: int = 0
    refilled: int = 0
    passed_on: float = 0.0
    by_pool: Counter[str] = field(default_factory=Counter)
    overlong: Counter[str] = field(default_factory=Counter)


class _Source:
    """One environment of the mix."""

    def __init__(self, settings: EnvironmentConfig, stream: TaskStream) -> None:
        self.settings, self.stream = settings, stream
        self.rate = StartRate(settings.groups_per_s)
        self.counts = EnvironmentCounts()
        self.running = 0
        self.owed = 0

    def can_deliver(self, now: float) -> bool:
        limit = self.settings.max_running
        return not self.stream.exhausted and (limit is None or self.running < limit) and self.rate.wait_s(now) == 0


class Curriculum:
    """Chooses environment and task of each group.

    Args:
        environments: Settings and tasks of each environment, in the order of the settings.

    Attributes:
        refills: Groups without signal since the last batch was made.
    """

    def __init__(self, environments: Iterable[tuple[EnvironmentConfig, Sequence[Task]]], seed: int) -> None:
        self._sources = {
            settings.name: _Source(settings, TaskStream(tasks, settings.pools, seed, split=settings.split))
            for settings, tasks in environments
        }
        self._mix = Shares({name: each.settings.ratio for name, each in self._sources.items()})
        self._again: deque[tuple[str, str, str]] = deque()
        self.refills = 0

    # Choose.

    def choose(self, now: float) -> Draw | None:
        """Return the next task, or None while no environment can deliver. Nothing changes.

        Args:
            now: Monotonic seconds.
        """
        able = [name for name, each in self._sources.items() if each.can_deliver(now)]
        for name, task_id, reason in self._again:
            if name in able:
                return Draw(name, task_id, 0, self._draws(name, task_id), reason)
        for name in able:
            if self._sources[name].owed:
                return self._draw_from(name, NO_SIGNAL)
        chosen = self._mix.choose(able)
        if chosen is None:
            return None
        return self._draw_from(chosen, "", tuple(name for name in self._sources if name not in able))

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until a rate limit lets another environment deliver; None if only an event can."""
        waits = [each.rate.wait_s(now) for each in self._sources.values() if not each.stream.exhausted]
        return min((each for each in waits if each > 0), default=None)

    def _draw_from(self, name: str, reason: str, passed_over: tuple[str, ...] = ()) -> Draw:
        task_id, position = self._sources[name].stream.choose()
        return Draw(name, task_id, position, self._draws(name, task_id), reason, passed_over)

    def _draws(self, name: str, task_id: str) -> int:
        known = self._sources[name].stream.progress.get(task_id)
        return known.draws if known else 0

    # What became true.

    def drawn(self, draw: Draw, now: float | None = None) -> None:
        """Note that the group of a draw starts.

        Args:
            draw: The draw.
            now: Monotonic seconds; None for a group of an earlier process, whose start uses up no rate.
        """
        source = self._sources.get(draw.environment)
        if source is None:  # the settings no longer have it
            return
        source.counts.groups += 1
        source.counts.by_pool[source.stream.pool(draw.task_id)] += 1
        in_turn = draw.reason in ("", NO_SIGNAL)
        if not in_turn:
            self._again_no_more(draw)
        elif draw.reason == NO_SIGNAL:
            source.owed = max(0, source.owed - 1)
        else:
            able = [name for name in self._sources if name not in draw.passed_over or name == draw.environment]
            for name in self._sources.keys() - set(able):
                owed = self._mix.share(name) + max(0.0, self._mix.credits[name])
                self._sources[name].counts.passed_on += owed
            self._mix.give(draw.environment, able)
        source.stream.drawn(draw.task_id, draw.position, in_turn=in_turn)
        source.running += 1
        if now is not None:
            source.rate.start(now)

    def ended(self, environment: str, task_id: str, rewards: Sequence[float], *, accepted: bool) -> None:
        """Note that the episodes of a group ended, with the rewards that are not missing."""
        if (source := self._leave(environment)) is None:
            return
        source.counts.accepted += accepted
        bound = source.settings.pools.solved_reward
        share = sum(each >= bound for each in rewards) / len(rewards) if rewards else None
        source.stream.ended(task_id, share)

    def refill(self, environment: str) -> None:
        """Note that a group brought no signal: another task of its environment takes its place."""
        self.refills += 1
        if (source := self._sources.get(environment)) is not None:
            source.owed += 1
            source.counts.refilled += 1

    def batch_made(self) -> None:
        """Note that a batch was made: the bound on refills begins anew."""
        self.refills = 0

    def failed(self, environment: str, task_id: str, *, fault: bool) -> int | None:
        """Note that a group failed.

        Args:
            environment: Its environment.
            task_id: Its task.
            fault: Whether its task may be at fault: its environment died, hung or raised, or the deadline passed.

        Returns:
            How many groups of the task failed one after the other, if it is to be put in quarantine now; else None.
        """
        if (source := self._leave(environment)) is None:
            return None
        source.counts.failed += 1
        if not fault:
            source.stream.given_up(task_id)
            return None
        failures = source.stream.failed(task_id)
        reached = failures >= source.settings.quarantine_after and task_id not in source.stream.quarantined
        return failures if reached else None

    def quarantine(self, environment: str, task_id: str, failures: int, problem: str) -> None:
        """Note that a task is not drawn any more."""
        if environment in self._sources:
            self._sources[environment].stream.quarantine(task_id, failures, problem)
            self._again = deque(each for each in self._again if each[:2] != (environment, task_id))

    def draw_again(self, environment: str, task_id: str, reason: str) -> None:
        """Put a task in front, for a new group; a task in quarantine, or one that no longer exists, is not drawn again."""
        source = self._sources.get(environment)
        if source is not None and task_id in source.stream and task_id not in source.stream.quarantined:
            self._again.append((environment, task_id, reason))

    def want(self, environment: str, ratio: float) -> None:
        """Change the weight of an environment in the mix.

        Raises:
            KeyError: if the run has no such environment.
        """
        if environment not in self._sources:
            raise KeyError(environment)
        self._mix.want(environment, ratio)

    def restore(self, noted: journal_pb2.CurriculumNoted) -> None:
        """Take over what a note of the journal says; an environment that the settings no longer have is left out."""
        for each in noted.environments:
            if (source := self._sources.get(each.environment)) is not None:
                source.stream.restore(each)
                self._mix.credits[each.environment] = each.credit

    def _leave(self, environment: str) -> _Source | None:
        source = self._sources.get(environment)
        if source is not None:
            source.running = max(0, source.running - 1)
        return source

    def _again_no_more(self, draw: Draw) -> None:
        for each in self._again:
            if each[:2] == (draw.environment, draw.task_id):
                self._again.remove(each)
                return

    # Look.

    @property
    def exhausted(self) -> bool:
        """Whether every task of every environment is in quarantine."""
        return all(each.stream.exhausted for each in self._sources.values())

    @property
    def environments(self) -> Mapping[str, EnvironmentConfig]:
        """Settings of each environment, by name."""
        return {name: each.settings for name, each in self._sources.items()}

    def task(self, environment: str, task_id: str) -> Task | None:
        """Return a task; None if the environment, or the task in it, no longer exists."""
        source = self._sources.get(environment)
        return source.stream[task_id] if source is not None and task_id in source.stream else None

    def stream(self, environment: str) -> TaskStream:
        """Return the tasks of an environment."""
        return self._sources[environment].stream

    def counts(self, environment: str) -> EnvironmentCounts:
        """Return what became of the groups of an environment."""
        return self._sources[environment].counts

    def share(self, environment: str) -> float:
        """Return the share of the groups that an environment is meant to have, 0 to 1."""
        return self._mix.share(environment)

    def noted(self) -> journal_pb2.CurriculumNoted:
        """Return what `restore` reads."""
        noted = journal_pb2.CurriculumNoted()
        for name, source in self._sources.items():
            each = noted.environments.add()
            each.CopyFrom(source.stream.noted())
            each.environment, each.credit = name, self._mix.credits[name]
        return noted
