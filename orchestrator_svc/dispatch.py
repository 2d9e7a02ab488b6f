"""From a task to a scored group: draw a task when the staleness bound and a replica allow it, run and score its episodes.

`Dispatcher` owns the running groups: each ends as accepted, ready for a batch, or dropped and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import structlog

from orchestrator_svc.config import FilterConfig, OrchestratorConfig
from orchestrator_svc.envs.base import Task
from orchestrator_svc.envs.worker import EnvironmentFailedError
from orchestrator_svc.journal.episodes import JournaledEpisodes
from orchestrator_svc.journal.ledger import Group, Ledger, Reason, Stage
from orchestrator_svc.journal.segments import JournalError
from orchestrator_svc.journal.store import Journal
from orchestrator_svc.scheduler import Scheduler
from orchestrator_svc.status import RunStatus
from orchestrator_svc.workflows import GroupRunner, Sampling
from sluice.rpc import SluiceError
from sluice.v1 import journal_pb2, orchestrator_pb2
from sluice.versions import Version, sampled_tokens, versions_of

log = structlog.get_logger(__name__)

_LOOK_AGAIN_S = 0.5
"""Seconds between two looks at the replicas: the end of a cooldown notifies nobody."""


class TaskStream:
    """The endless stream of an environment's tasks: every task once per pass, each pass in another order.

    The same seed gives the same task at the same position, so that a restart finds it again.

    Args:
        environment: Name of the environment within the run.

    Raises:
        ValueError: if there are no tasks.
    """

    def __init__(self, environment: str, tasks: Sequence[Task], seed: int) -> None:
        if not tasks:
            raise ValueError("the split has no tasks: check orchestrator.split and environment_args")
        self._environment, self._tasks, self._seed = environment, tasks, seed
        self._pass = -1
        self._order: list[int] = []

    def at(self, position: int) -> Task:
        """Return the task at a position, from 0."""
        number, place = divmod(position, len(self._tasks))
        if number != self._pass:
            self._order = list(range(len(self._tasks)))
            random.Random(f"{self._seed}/{number}").shuffle(self._order)  # noqa: S311 - an order, not a secret
            self._pass = number
        return self._tasks[self._order[place]]

    def draw(self, ledger: Ledger) -> journal_pb2.TaskDrawn:
        """Return what is drawn next: a task that has to be drawn again, else the one whose turn has come."""
        position, reason = ledger.next_positions.get(self._environment, 0), ""
        if ledger.redraws:
            position, reason = ledger.redraws[0].position, ledger.redraws[0].reason
        task_id = self.at(position).task_id
        return journal_pb2.TaskDrawn(
            environment=self._environment,
            task_id=task_id,
            draw=ledger.draws.get((self._environment, task_id), 0),
            group=ledger.next_group,
            position=position,
            redraw_reason=reason,
        )

    def task_of(self, group: Group) -> Task | None:
        """Return the task of a group; None if the environment has another one in its place now."""
        task = self.at(group.position)
        # A journal of format 1 did not keep the task's name.
        return task if group.task_id in ("", task.task_id) else None


class Dispatcher:
    """Draws tasks and runs their groups.

    Args:
        changed: Set at every change. A loop checks its condition, clears it and waits.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        scheduler: Scheduler,
        journal: Journal,
        status: RunStatus,
        tasks: TaskStream,
        *,
        runner: GroupRunner,
        changed: asyncio.Event,
    ) -> None:
        self._config, self._scheduler, self._journal, self._status = config, scheduler, journal, status
        self._runner, self._tasks, self._changed = runner, tasks, changed
        self._ledger = journal.ledger
        self._pool = runner.engine.pool
        self._sampling = Sampling(**config.sampling.model_dump())
        self.paused = False
        self._fruitless: Counter[str] = Counter()
        self._lost_since: float | None = None
        self._counted: Counter[str] = Counter()
        groups = sorted(self._ledger.groups.values(), key=lambda each: each.number)
        self._unfinished = deque(each for each in groups if each.stage is Stage.RUNNING)

    def pause(self) -> None:
        """Start no more groups; those under way end."""
        self.paused = True

    def resume(self) -> None:
        """Start groups again."""
        self.paused = False
        self._changed.set()

    def apply_limits(self, max_staleness: int) -> None:
        """Take over limits that were changed while the run lives, for groups under way as for those to come."""
        bound = replace(self._scheduler.bound, max_staleness=max_staleness, max_concurrent=self._config.max_concurrent)
        self._scheduler.change_bound(bound)
        self._scheduler.max_running = self._config.max_running
        self._changed.set()

    async def run(self) -> None:
        """Dispatch until cancelled; groups under way are then cancelled too.

        Raises:
            SluiceError: if groups fail one after the other, or no replica has been there for too long.
        """
        async with asyncio.TaskGroup() as groups:
            while True:
                while self._start_next(groups):
                    pass
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_AGAIN_S):
                        await self._changed.wait()

    def _start_next(self, groups: asyncio.TaskGroup) -> bool:
        """Start a group if one may start now: first those that an earlier process left unfinished."""
        unfinished = self._unfinished[0] if self._unfinished else None
        wanted = None if self.paused else self._wanted_version(unfinished)
        if wanted is not None and not self._pool.has_room(self._ledger.count(Stage.RUNNING) - len(self._unfinished)):
            wanted = None
        version = self._version_to_start_on(wanted)
        if version is None:
            return False
        if unfinished is None:
            group = self._draw(self._tasks.draw(self._ledger), version)
        else:
            self._unfinished.popleft()
            group = self._continue(unfinished, version)
        groups.create_task(self._run_group(group), name=group.name)
        return True

    def _draw(self, drawn: journal_pb2.TaskDrawn, version: Version) -> Group:
        """Record a draw, and return its group, which this version and newer ones may sample."""
        drawn.episodes = self._config.group_size
        drawn.policy_version.CopyFrom(version.to_proto())
        self._journal.record(journal_pb2.Fact(task_drawn=drawn))
        return self._ledger.groups[drawn.group]

    def _continue(self, group: Group, version: Version) -> Group:
        """Return an unfinished group as it goes on: where it stopped, or as its next attempt if its version is too old by now."""
        wanted = self._scheduler.wanted_version_of(group)
        if wanted is None or self._goes_on(group, wanted):
            return group
        again = journal_pb2.TaskDrawn(
            environment=group.environment,
            task_id=group.task_id,
            draw=group.draw,
            group=group.number,
            position=group.position,
            attempt=group.attempt + 1,
        )
        return self._draw(again, version)

    def _wanted_version(self, unfinished: Group | None) -> Version | None:
        """Return the oldest version that may sample the next group; None while none may start."""
        if unfinished is None:
            return self._scheduler.wanted_version()
        wanted = self._scheduler.wanted_version_of(unfinished)
        return unfinished.floor if wanted is not None and self._goes_on(unfinished, wanted) else wanted

    @staticmethod
    def _goes_on(group: Group, wanted: Version) -> bool:
        """Whether an unfinished group is continued, with the very requests that it began with."""
        return bool(group.generations) or (group.floor >= wanted and group.episodes > 0)

    def _version_to_start_on(self, wanted: Version | None) -> Version | None:
        """Return the version of a replica that may sample one more group; None while none may."""
        now = time.monotonic()
        replica = self._pool.pick(wanted) if wanted is not None else None
        waits_for_version = wanted is not None and replica is None
        self._pool.wait_for(wanted if waits_for_version else None)
        blocked = not self.paused and (self._scheduler.at_capacity or waits_for_version)
        self._status.dispatch_blocked.set(blocked, now)
        # At the bound, replicas may still be busy with earlier groups: then neither side waits for the other.
        self._status.rollout_idle.set(blocked and not self._ledger.count(Stage.RUNNING), now)
        self._check_lost(lost=waits_for_version and all(each.why_not() for each in self._pool.replicas), now=now)
        return replica.version if replica is not None else None

    def _check_lost(self, *, lost: bool, now: float) -> None:
        if not lost:
            self._lost_since = None
            return
        if self._lost_since is None:
            self._lost_since = now
        limit = self._config.deadlines.lost_s
        if now - self._lost_since > limit:
            raise self._pool.none_for(limit, "lost_s")

    async def _run_group(self, group: Group) -> None:
        """Run one group to its end: accepted, or dropped and counted."""
        task = self._tasks.task_of(group)
        if task is None:
            problem = f"the environment lists other tasks than before; {group.task_id} is no longer at its place"
            self._drop(group, Reason.TASK_CHANGED, problem)
            self._changed.set()
            return
        reason, problem = "", ""
        scored = ScoredGroup()
        try:
            async with asyncio.timeout(self._config.deadlines.episode_s) as deadline:
                episodes = JournaledEpisodes(self._journal, group)
                records = await self._runner.run(
                    task, group.name, group.episodes, self._sampling, group.floor, episode_log=episodes
                )
                scored = _sift(records, self._config.filter)
        except TimeoutError as error:
            if deadline.expired():
                reason, problem = Reason.EPISODE_DEADLINE, f"not done in {self._config.deadlines.episode_s:g} s"
            else:  # the workflow's own
                reason, problem = Reason.EPISODE_FAILED, repr(error)
        except EnvironmentFailedError as error:
            reason, problem = error.reason if error.culprit else Reason.EPISODE_FAILED, str(error)
        except SluiceError as error:
            reason, problem = Reason.EPISODE_FAILED, str(error)
        except JournalError:
            raise
        except Exception as error:  # an environment or a workflow may raise anything
            reason, problem = Reason.EPISODE_FAILED, repr(error)
            log.exception("group failed unexpectedly", group=group.name, task=group.task_id)
        if reason:
            self._drop(group, reason, problem)
        else:
            self._end(group, scored)
        self._note_counts()
        self._changed.set()

    def _end(self, group: Group, scored: ScoredGroup) -> None:
        """Record what the episodes of a group brought, and accept it unless they brought nothing to train."""
        self._status.group_scored(group.name, group.task_id, scored.rewards)
        places = self._journal.keep_trajectories(group.number, scored.records)
        ended = journal_pb2.EpisodesEnded(
            group=group.number, attempt=group.attempt, episodes=_ended_episodes(group, scored, places)
        )
        self._journal.record(journal_pb2.Fact(episodes_ended=ended))
        if not scored.records:
            reason = next(iter(scored.untrainable.values()), Reason.EPISODE_FAILED)
            self._drop(group, reason, f"{reason} of all episodes of task {group.task_id}; see the warnings above")
            return
        self._fruitless.clear()
        versions = {version for record in scored.records for version in versions_of(record.trajectory)}
        accepted = journal_pb2.GroupAccepted(
            group=group.number, policy_versions=[each.to_proto() for each in sorted(versions)]
        )
        self._journal.record(journal_pb2.Fact(group_accepted=accepted))

    def _drop(self, group: Group, reason: str, problem: str) -> None:
        """Drop a group, and give the run up when group after group brings nothing to train: it would never end."""
        log.warning("a group brings nothing to train", group=group.name, reason=reason, problem=problem)
        self._journal.record(
            journal_pb2.Fact(group_dropped=journal_pb2.GroupDropped(group=group.number, reason=reason))
        )
        if reason == Reason.FILTERED:
            setting, limit = "max_refills", self._config.max_refills
        else:
            setting, limit = "max_failed_groups", self._config.max_failed_groups
        self._fruitless[setting] += 1
        if self._fruitless[setting] >= limit:
            raise SluiceError.aborted(
                "GROUPS_FAIL",
                f"{limit} groups in a row brought nothing to train (orchestrator.{setting}), the last one because: {problem}."
                " Correct the environment, the filter or the deadline at fault, then start the run again: it continues",
            )

    def _note_counts(self) -> None:
        counts = self._runner.engine.counts.copy()
        more, self._counted = counts - self._counted, counts
        if more:
            self._journal.record(journal_pb2.Fact(counts_noted=journal_pb2.CountsNoted(generated=more)))


@dataclass
class ScoredGroup:
    """The outcome of a group's episodes.

    Attributes:
        everyone: All records, in order.
        records: Those that may be trained; empty if none may.
        untrainable: Reason of each that may not, by trajectory.
    """

    everyone: list[orchestrator_pb2.TrajectoryRecord] = field(default_factory=list)
    records: list[orchestrator_pb2.TrajectoryRecord] = field(default_factory=list)
    untrainable: dict[str, str] = field(default_factory=dict)

    @property
    def rewards(self) -> list[float]:
        """Rewards of all records; NaN marks a missing one."""
        return [each.trajectory.reward if each.trajectory.HasField("reward") else math.nan for each in self.everyone]


def _sift(records: list[orchestrator_pb2.TrajectoryRecord], rules: FilterConfig) -> ScoredGroup:
    """Separate what may be trained from what may not."""
    group = ScoredGroup(records)
    for record in records:
        if not record.trajectory.HasField("reward"):
            group.untrainable[record.trajectory.trajectory_id] = Reason.MISSING_REWARD
        elif not sampled_tokens(record.trajectory):
            group.untrainable[record.trajectory.trajectory_id] = Reason.NO_TOKENS
        else:
            group.records.append(record)
    rewards = [each.trajectory.reward for each in group.records]
    if rewards and _filtered(rewards, rules):
        group.untrainable |= {each.trajectory.trajectory_id: Reason.FILTERED for each in group.records}
        group.records = []
    return group


def _ended_episodes(
    group: Group, scored: ScoredGroup, places: Sequence[journal_pb2.PayloadPlace]
) -> list[journal_pb2.EndedEpisode]:
    """Return what became of each episode of a group; `places` are those of the records that may be trained.

    An episode whose trajectories may not be trained for several reasons is split by them.
    """
    ended: dict[tuple[str, str], journal_pb2.EndedEpisode] = {}
    kept = {id(record): place for record, place in zip(scored.records, places, strict=True)}
    for record in scored.everyone:
        trajectory = record.trajectory
        reason = scored.untrainable.get(trajectory.trajectory_id, "")
        episode = ended.setdefault(
            (trajectory.episode_id, reason),
            journal_pb2.EndedEpisode(episode=_episode_number(group, trajectory.episode_id, len(ended)), reason=reason),
        )
        if trajectory.HasField("reward"):
            episode.reward = trajectory.reward
        if reason:
            episode.untrainable.append(trajectory.trajectory_id)
        else:
            episode.trajectories.add(trajectory_id=trajectory.trajectory_id, place=kept[id(record)])
    return list(ended.values())


def _episode_number(group: Group, episode_id: str, otherwise: int) -> int:
    """Return the number of an episode within its group, which our workflows put behind the group's name."""
    number = episode_id.removeprefix(f"{group.name}-")
    return int(number) if number.isdecimal() else otherwise


def _filtered(rewards: list[float], rules: FilterConfig) -> bool:
    mean = sum(rewards) / len(rewards)
    return (
        (rules.drop_degenerate and len(set(rewards)) == 1)
        or (rules.min_reward_mean is not None and mean < rules.min_reward_mean)
        or (rules.max_reward_mean is not None and mean > rules.max_reward_mean)
    )
