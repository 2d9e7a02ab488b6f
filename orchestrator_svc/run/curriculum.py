"""Which task is drawn next: the mix of environments, the pools of tasks by solve rate, rate limits, quarantine and how tasks leave it.

A pure state machine: no clock, no I/O. `Curriculum.choose_task` changes nothing; `Curriculum.apply_fact` takes the facts of the journal, one after the other,
and changes the state. A start reads the same facts and continues the draws where the previous process stopped.

A draw has one of three causes, in this order: a task is drawn again (its trajectories were too old, or damaged); a group that
brought no signal is replaced by another task of its environment; or the mix chooses. Only the third is charged to the mix.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import grpc

from orchestrator_svc.config import EnvironmentConfig, PoolsConfig
from orchestrator_svc.journal.facts import Reason, Redraw
from orchestrator_svc.run.live_settings import ratio_key
from orchestrator_svc.run.task_stream import Shares, TaskStream
from sluice.environments.base import Task
from sluice.rpc import SluiceError
from sluice.v1 import journal_pb2

NO_SIGNAL = "NO_SIGNAL"
"""Reason for dropping a group whose rewards teach nothing, and for drawing another one in its place."""

FAULTS = frozenset(
    {
        "EPISODE_DEADLINE",
        "REQUEST_REFUSED",
        "MISSING_REWARD",
        "REWARD_TOO_LARGE",
        "ENVIRONMENT_DIED",
        "ENVIRONMENT_HUNG",
        "ENVIRONMENT_RAISED",
        "ENVIRONMENT_MESSAGES",
        "ENVIRONMENT_MEMORY",
    }
)
"""Reasons of failures that the task may have caused: these count towards quarantine."""

SHARED = (FAULTS - {"REWARD_TOO_LARGE", "REQUEST_REFUSED", "ENVIRONMENT_MESSAGES"}) | {"EPISODE_FAILED"}
"""Reasons of failures of groups of many tasks if something that they share is down, such as a judge or the replicas."""

ENDED = frozenset({NO_SIGNAL, "OVERLONG", "NO_TOKENS"})
"""Reasons for dropping a group whose episodes ran to their end, so that their rewards count in the solve rate."""

_NOTE_AFTER = 1000
"""Record another note once so many tasks changed since the last one. Bounds the time that a note takes, and its size."""

_ROUNDING = 1e-9
"""Rounding error of a bucket's level, in groups."""


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


@dataclass(frozen=True, slots=True)
class Draw:
    """A task that was chosen for a group.

    Attributes:
        position: Its place in the environment's stream.
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
        passed_on: Groups of its share that other environments got because it could not deliver.
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

    def state(self) -> tuple[Any, ...]:
        """Return its fields, from which it can be made again."""
        return tuple(getattr(self, each.name) for each in fields(self))


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


@dataclass(slots=True)
class _RunningGroup:
    """A group between its draw and the end of its episodes; `rewards` are those that are not missing."""

    environment: str
    task_id: str
    rewards: list[float] = field(default_factory=list)


class Curriculum:
    """Chooses environment and task of each group.

    Args:
        environments: Settings and tasks of each environment, in the order of the settings.

    Attributes:
        environments: Settings of each environment, by name.
        refills: Groups without signal since the last batch was made.

    Raises:
        ValueError: if an environment has no tasks, or two tasks with one id.
    """

    def __init__(self, environments: Iterable[tuple[EnvironmentConfig, Sequence[Task]]], seed: int) -> None:
        self._sources = {
            settings.name: _Source(settings, TaskStream(tasks, seed, settings.pools, split=settings.split))
            for settings, tasks in environments
        }
        self.environments = {name: each.settings for name, each in self._sources.items()}
        self._shares = Shares({name: each.settings.ratio for name, each in self._sources.items()})
        self._running: dict[int, _RunningGroup] = {}
        self.refills = 0
        # Looked up once: a start applies a million facts.
        self._kinds: dict[str, Callable[[Any], None]] = {
            "task_drawn": self._drawn,
            "episodes_ended": self._episodes_ended,
            "group_accepted": self._accepted,
            "group_dropped": self._dropped,
            "batch_made": self._batch_made,
            "task_quarantined": self._quarantined,
            "task_released": self._released,
            "curriculum_noted": self._noted,
            "counts_noted": self._counted,
            "history_imported": self._imported,
            "setting_changed": self._setting_changed,
        }

    def _mix(self) -> Shares:
        """Return the mix with the current ratios of the settings, which may change while the run lives."""
        for name, each in self._sources.items():
            self._shares.want(name, each.settings.ratio)
        return self._shares

    # Choose.

    def choose_task(self, now: float, redraws: Iterable[Redraw] = (), away: Collection[str] = ()) -> Draw | None:
        """Return the next task, or None while no environment can deliver. Nothing changes.

        Args:
            now: Monotonic seconds.
            redraws: Tasks that have to be drawn again, in order. A task that cannot be drawn any more is passed over.
            away: Environments that are left out.
        """
        able = [name for name, each in self._sources.items() if name not in away and each.can_deliver(now)]
        for each in redraws:
            name, task_id = each.environment, each.task_id
            if name in able and not self.why_not_again(each):
                return Draw(name, task_id, each.position, self._draws(name, task_id), each.reason)
        for name in able:
            if self._sources[name].owed:
                return self._draw_from(name, NO_SIGNAL)
        chosen = self._mix().choose(able)
        if chosen is None:
            return None
        return self._draw_from(chosen, "", tuple(name for name in self._sources if name not in able))

    def why_not_again(self, redraw: Redraw) -> str:
        """Return why a task will not be drawn again; empty if it will."""
        task = self.task(redraw.environment, redraw.task_id, redraw.position)
        if task is None:
            return Reason.TASK_CHANGED
        return "" if self.drawable(redraw.environment, task.task_id) else Reason.QUARANTINED

    def start(self, environment: str, now: float) -> None:
        """Count a group that starts now against the environment's rate. A new process begins with full buckets."""
        self._sources[environment].rate.start(now)

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until a rate limit lets another environment deliver; None if only an event can."""
        waits = [each.rate.wait_s(now) for each in self._sources.values() if not each.stream.exhausted]
        return min((each for each in waits if each > 0), default=None)

    def to_quarantine(self, group: int, reason: str) -> int | None:
        """Return how many groups of its task will have failed in a row if this group fails now; None if the task may stay."""
        running = self._running.get(group)
        if running is None or reason not in FAULTS or not self.drawable(running.environment, running.task_id):
            return None
        source = self._sources[running.environment]
        known = source.stream.progress.get(running.task_id)
        failures = 1 + (known.failures if known else 0)
        return failures if failures >= source.settings.quarantine_after else None

    def _draw_from(self, name: str, reason: str, passed_over: tuple[str, ...] = ()) -> Draw:
        task_id, position = self._sources[name].stream.choose_task()
        return Draw(name, task_id, position, self._draws(name, task_id), reason, passed_over)

    def _draws(self, name: str, task_id: str) -> int:
        known = self._sources[name].stream.progress.get(task_id)
        return known.draws if known else 0

    # Facts.

    def apply_fact(self, fact: journal_pb2.Fact) -> None:
        """Take one fact. Those of an environment that the settings no longer have change nothing."""
        kind = fact.WhichOneof("kind")
        if kind is not None and kind in self._kinds:
            self._kinds[kind](getattr(fact, kind))

    def _batch_made(self, _fact: journal_pb2.BatchMade) -> None:
        self.refills = 0

    def _quarantined(self, fact: journal_pb2.TaskQuarantined) -> None:
        if fact.environment in self._sources:
            self._sources[fact.environment].stream.quarantine(fact.task_id, fact.failures, fact.problem)

    def _released(self, fact: journal_pb2.TaskReleased) -> None:
        if fact.environment in self._sources:
            self._sources[fact.environment].stream.release(fact.task_id)

    def _imported(self, fact: journal_pb2.HistoryImported) -> None:
        if fact.environment in self._sources:
            self._sources[fact.environment].stream.next_position = fact.next_position

    def _accepted(self, fact: journal_pb2.GroupAccepted) -> None:
        self._ended(fact.group, accepted=True)

    def _drawn(self, fact: journal_pb2.TaskDrawn) -> None:
        if fact.group in self._running:  # a restart runs it again
            self._running[fact.group].rewards.clear()
            return
        source = self._sources.get(fact.environment)
        if source is None:
            return
        self._running[fact.group] = _RunningGroup(fact.environment, fact.task_id)
        source.counts.groups += 1
        source.counts.by_pool[source.stream.pool(fact.task_id)] += 1
        if fact.redraw_reason == NO_SIGNAL:
            source.owed = max(0, source.owed - 1)
        elif not fact.redraw_reason:
            able = [name for name in self._sources if name not in fact.passed_over or name == fact.environment]
            for name in self._sources.keys() - set(able):
                owed = self._mix().share(name) + max(0.0, self._mix().credits[name])
                self._sources[name].counts.passed_on += owed
            self._mix().give(fact.environment, able)
        source.stream.drawn(fact.task_id, fact.position, in_turn=fact.redraw_reason in ("", NO_SIGNAL))
        source.running += 1

    def _episodes_ended(self, fact: journal_pb2.EpisodesEnded) -> None:
        if fact.group in self._running:
            rewards = [each.reward for each in fact.episodes if each.HasField("reward")]
            self._running[fact.group].rewards += rewards

    def _ended(self, number: int, *, accepted: bool) -> _Source | None:
        """Take a group whose episodes ran to their end; return its environment."""
        group = self._running.pop(number, None)
        if group is None:
            return None
        source = self._sources[group.environment]
        source.running -= 1
        source.counts.accepted += accepted
        rewards = group.rewards
        solved = sum(self.is_solved(group.environment, each) for each in rewards)
        source.stream.ended(group.task_id, solved / len(rewards) if rewards else None)
        return source

    def is_solved(self, environment: str, reward: float) -> bool:
        """Return whether an episode with this reward counts as solved: it is at least `pools.solved_reward` of its environment."""
        source = self._sources.get(environment)  # the run may have had other environments before
        return reward >= (PoolsConfig() if source is None else source.settings.pools).solved_reward

    def _dropped(self, fact: journal_pb2.GroupDropped) -> None:
        if fact.reason in ENDED:
            source = self._ended(fact.group, accepted=False)
            if source is not None and fact.reason == NO_SIGNAL:
                self.refills += 1
                source.owed += 1
                source.counts.refilled += 1
            return
        group = self._running.pop(fact.group, None)
        if group is None:  # its episodes had ended before
            return
        source = self._sources[group.environment]
        source.running -= 1
        source.counts.failed += fact.reason != Reason.NO_AGENT
        if fact.reason in FAULTS and not fact.outage:
            source.stream.failed(group.task_id)
        else:
            source.stream.given_up(group.task_id)

    def _counted(self, fact: journal_pb2.CountsNoted) -> None:
        for key, count in fact.generated.items():
            what, _, rest = key.partition("/")
            name, _, rule = rest.rpartition("/")
            if what == "overlong" and name in self._sources:
                self._sources[name].counts.overlong[rule] += count

    def _setting_changed(self, fact: journal_pb2.SettingChanged) -> None:
        for name, each in self.environments.items():
            if fact.key == ratio_key(name):  # this ratio applied to the draws that follow
                each.ratio = float(fact.new_value)

    def _noted(self, noted: journal_pb2.CurriculumNoted) -> None:
        for each in noted.environments:
            if (source := self._sources.get(each.environment)) is not None:
                source.stream.restore(each)
                self._mix().credits[each.environment] = each.credit

    # A snapshot.

    def state(self) -> dict[str, Any]:
        """Return the state that the facts led to, for `restore`. Settings and tasks are not part of it."""
        return {
            "ratios": {name: each.ratio for name, each in self.environments.items()},
            "credits": self._shares.credits,
            "running": {
                number: (each.environment, each.task_id, each.rewards) for number, each in self._running.items()
            },
            "refills": self.refills,
            "sources": {
                name: (each.counts.state(), each.running, each.owed, each.stream.state())
                for name, each in self._sources.items()
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned for a curriculum with the same settings and tasks."""
        for name, ratio in state["ratios"].items():
            self.environments[name].ratio = ratio
        self._shares.credits, self.refills = state["credits"], state["refills"]
        self._running = {number: _RunningGroup(*each) for number, each in state["running"].items()}
        for name, (counts, running, owed, stream) in state["sources"].items():
            source = self._sources[name]
            source.counts, source.running, source.owed = EnvironmentCounts(*counts), running, owed
            source.stream.take_over(stream)

    # Look.

    @property
    def exhausted(self) -> bool:
        """Whether every task of every environment is in quarantine."""
        return all(each.stream.exhausted for each in self._sources.values())

    def others_can(self, names: Collection[str]) -> bool:
        """Return whether an environment other than these has tasks to draw."""
        return any(name not in names and not each.stream.exhausted for name, each in self._sources.items())

    @property
    def quarantined(self) -> list[tuple[str, str]]:
        """Environment and id of each task in quarantine."""
        return [(name, task_id) for name, each in self._sources.items() for task_id in each.stream.quarantined]

    def task(self, environment: str, task_id: str, position: int) -> Task | None:
        """Return a task; None if the environment, or the task in it, no longer exists.

        A journal of format 1 kept no names: then the position identifies the task.
        """
        source = self._sources.get(environment)
        if source is None:
            return None
        return source.stream.get(task_id or source.stream.at(position))

    def drawable(self, environment: str, task_id: str) -> bool:
        """Return whether a task exists and is not in quarantine."""
        source = self._sources.get(environment)
        return source is not None and task_id in source.stream and task_id not in source.stream.quarantined

    def stream(self, environment: str) -> TaskStream:
        """Return the tasks of an environment."""
        return self._sources[environment].stream

    def counts(self, environment: str) -> EnvironmentCounts:
        """Return what became of the groups of an environment."""
        return self._sources[environment].counts

    def running_episodes(self) -> int:
        """Return the episodes of the groups that run."""
        return sum(each.running * each.settings.group_size for each in self._sources.values())

    def share(self, environment: str) -> float:
        """Return the share of groups that an environment should have, 0 to 1."""
        return self._mix().share(environment)

    @property
    def note_is_due(self) -> bool:
        """Whether enough tasks changed to record `noted`."""
        return sum(each.stream.unnoted for each in self._sources.values()) >= _NOTE_AFTER

    def noted(self) -> journal_pb2.CurriculumNoted:
        """Return the state of the choice of tasks, with those tasks that changed since the previous note.

        Recorded as a fact, it restores this state when the journal is read again, even under other settings.
        """
        noted = journal_pb2.CurriculumNoted()
        for name, source in self._sources.items():
            each = noted.environments.add()
            each.CopyFrom(source.stream.noted())
            each.environment, each.credit = name, self._mix().credits[name]
        return noted


def overlong_counter(environment: str, rule: str) -> str:
    """Return the name under which the journal counts trajectories that a rule for long episodes changed or left out."""
    return f"overlong/{environment}/{rule}"


RELEASE = "quarantine.release"
"""Key of `sluice set` that is not a setting: its value is a task, or `ALL`."""

ALL = "all"
"""Value of `RELEASE` for all tasks in quarantine."""

_MOST_NAMED = 10
"""Most tasks in quarantine that a refusal names."""


def tasks_to_release(curriculum: Curriculum, text: str) -> list[tuple[str, str]]:
    """Return environment and id of the tasks in quarantine that a value of `RELEASE` means.

    Args:
        curriculum: Knows which tasks are in quarantine.
        text: `ALL`, TASK, or ENVIRONMENT/TASK, as a TOML string or without quotes.

    Raises:
        SluiceError: INVALID_ARGUMENT if no such task is in quarantine.
    """
    there, wanted = curriculum.quarantined, _plain(text)
    if wanted == ALL:
        return there
    found = [(name, task_id) for name, task_id in there if wanted in (task_id, f"{name}/{task_id}")]
    if not found:
        first = ", ".join(f"{name}/{task_id}" for name, task_id in there[:_MOST_NAMED]) or "none"
        problem = f"no task {wanted[:100]!r} is in quarantine; {len(there)} are: {first}. Give one of them, or {ALL}"
        raise SluiceError(
            grpc.StatusCode.INVALID_ARGUMENT,
            "BAD_SETTING",
            f"nothing was changed: {RELEASE}: {problem}",
            violations={f"values[{RELEASE}]": problem},
        )
    return found


def release_fact(environment: str, task_id: str, principal: str = "") -> journal_pb2.Fact:
    """Return the fact that a task may be drawn again."""
    fact = journal_pb2.TaskReleased(environment=environment, task_id=task_id, principal=principal)
    return journal_pb2.Fact(task_released=fact)


def _plain(text: str) -> str:
    """Return the value if `text` is a TOML string, else `text` itself."""
    try:
        value = tomllib.loads(f"value = {text}\n").get("value")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return value if isinstance(value, str) else text
