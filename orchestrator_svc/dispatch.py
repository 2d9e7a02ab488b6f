"""From a task to a scored group: draw a task when the staleness bound and a replica allow it, run and score its episodes.

`Dispatcher` owns the running groups: each ends as accepted, ready for a batch, or dropped and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import structlog

from orchestrator_svc.config import FilterConfig, OrchestratorConfig
from orchestrator_svc.envs.base import Task
from orchestrator_svc.journal import Journal
from orchestrator_svc.recovery import GroupDamagedError, Recovery
from orchestrator_svc.scheduler import Accounting, DrawnTask, Group, Reason, Scheduler, Stage, group_name
from orchestrator_svc.status import RunStatus
from orchestrator_svc.workflows import GroupRunner, Sampling
from sluice.rpc import SluiceError
from sluice.v1 import orchestrator_pb2
from sluice.versions import Version, sampled_tokens, versions_of

log = structlog.get_logger(__name__)

_LOOK_AGAIN_S = 0.5
"""Seconds between two looks at the replicas: the end of a cooldown notifies nobody."""


class TaskStream:
    """The endless stream of tasks: every task once per pass, each pass in another order.

    The same seed gives the same task at the same position, so that a restart finds it again. Tasks to draw again come first.

    Raises:
        ValueError: if there are no tasks.
    """

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        if not tasks:
            raise ValueError("the split has no tasks: check orchestrator.split and environment_args")
        self.next_position = 0
        self._tasks, self._seed = tasks, seed
        self._next_group = 1
        self._again: deque[DrawnTask] = deque()
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

    def draw(self) -> DrawnTask:
        """Return the position of the next task and the number of its group."""
        again = self._again.popleft() if self._again else None
        if again is not None and again.number:
            return again
        number = self._next_group
        self._next_group += 1
        if again is not None:
            return DrawnTask(number, again.position)
        self.next_position += 1
        return DrawnTask(number, self.next_position - 1)

    def draw_again(self, position: int) -> None:
        """Put the task at a position in front, for a new group."""
        self._again.append(DrawnTask(0, position))

    def continue_from(self, recovery: Recovery) -> None:
        """Continue where an earlier process stopped; tasks that it drew and did not finish come first."""
        self._again.extend(recovery.drawn)
        self._next_group, self.next_position = recovery.next_group, recovery.next_position


async def readable_groups(
    groups: Iterable[Group], journal: Journal, accounting: Accounting, tasks: TaskStream
) -> list[Group]:
    """Return the groups whose trajectories the journal can read; count the others and draw their tasks again.

    Raises:
        JournalError: if the journal as a whole cannot be read now; no group is dropped for that.
    """
    kept = []
    for group in groups:
        try:
            await journal.trajectories(group.number)
        except GroupDamagedError as error:
            log.warning("a damaged group is dropped; its task is drawn again", group=group.number, error=str(error))
            accounting.drop(Reason.JOURNAL_DAMAGED, group.trajectories)
            journal.drop(group.number, Reason.JOURNAL_DAMAGED, was_accepted=group.trajectories)
            tasks.draw_again(group.position)
        else:
            kept.append(group)
    return kept


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
        self._pool = runner.engine.pool
        self._sampling = Sampling(**config.sampling.model_dump())
        self.paused = False
        self._fruitless: Counter[str] = Counter()
        self._lost_since: float | None = None
        self._journaled: Counter[str] = Counter()

    async def recover(self, recovery: Recovery) -> None:
        """Take over what an earlier process left."""
        self._tasks.continue_from(recovery)
        ready = await readable_groups(recovery.ready, self._journal, recovery.accounting, self._tasks)
        self._scheduler.recover(recovery.epochs, ready, recovery.accounting)

    def pause(self) -> None:
        """Start no more groups; those under way end."""
        self.paused = True

    def resume(self) -> None:
        """Start groups again."""
        self.paused = False
        self._changed.set()

    async def run(self) -> None:
        """Dispatch until cancelled; groups under way are then cancelled too.

        Raises:
            SluiceError: if groups fail one after the other, or no replica has been there for too long.
        """
        async with asyncio.TaskGroup() as groups:
            while True:
                while (version := self._version_to_start_on()) is not None:
                    self._start(groups, version)
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_AGAIN_S):
                        await self._changed.wait()

    def _version_to_start_on(self) -> Version | None:
        """Return the version that one more group would start on; None while none may start."""
        now = time.monotonic()
        wanted = None if self.paused else self._scheduler.wanted_version()
        replica = self._pool.pick(wanted) if wanted is not None else None
        waits_for_version = wanted is not None and replica is None
        self._pool.wait_for(wanted if waits_for_version else None)
        blocked = not self.paused and (self._scheduler.at_capacity or waits_for_version)
        self._status.dispatch_blocked.set(blocked, now)
        # At the bound, replicas may still be busy with earlier groups: then neither side waits for the other.
        self._status.rollout_idle.set(blocked and not self._scheduler.count(Stage.RUNNING), now)
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

    def _start(self, groups: asyncio.TaskGroup, version: Version) -> None:
        drawn = self._tasks.draw()
        self._scheduler.start(drawn.number, drawn.position, version)
        self._journal.draw(drawn.number, drawn.position, self._tasks.next_position)
        groups.create_task(self._run_group(drawn, version), name=group_name(drawn.number))

    async def _run_group(self, drawn: DrawnTask, version: Version) -> None:
        """Run one group to its end: accepted, or dropped and counted."""
        task, name = self._tasks.at(drawn.position), group_name(drawn.number)
        reason, problem = "", ""
        scored = ScoredGroup()
        try:
            async with asyncio.timeout(self._config.deadlines.episode_s) as deadline:
                records = await self._runner.run(task, name, self._config.group_size, self._sampling, version)
                scored = _sift(records, self._config.filter)
        except TimeoutError as error:
            if deadline.expired():
                reason, problem = Reason.EPISODE_DEADLINE, f"not done in {self._config.deadlines.episode_s:g} s"
            else:  # one of the environment's calls
                reason, problem = Reason.EPISODE_FAILED, str(error)
        except SluiceError as error:
            reason, problem = Reason.EPISODE_FAILED, str(error)
        except Exception as error:  # an environment or a workflow may raise anything
            reason, problem = Reason.EPISODE_FAILED, repr(error)
            log.exception("group failed unexpectedly", group=name, task=task.task_id)
        if reason:
            log.warning("group failed", group=name, reason=reason, problem=problem)
            self._drop(drawn.number, reason, problem)
        else:
            self._accept(drawn.number, task.task_id, scored)
        self._journal_counts()
        self._changed.set()

    def _accept(self, number: int, task_id: str, scored: ScoredGroup) -> None:
        self._status.group_scored(group_name(number), task_id, scored.rewards)
        for reason, count in scored.dropped.items():
            self._scheduler.drop_trajectories(reason, count)
            self._journal.drop_trajectories(reason, count)
        if not scored.records:
            reason = next(iter(scored.dropped), Reason.EPISODE_FAILED)
            self._drop(number, reason, f"{reason} of all episodes of task {task_id}; see the warnings above")
            return
        self._fruitless.clear()
        versions = {version for record in scored.records for version in versions_of(record.trajectory)}
        self._scheduler.finish(number, versions, len(scored.records))
        self._journal.accept(number, self._scheduler.groups[number].versions, scored.records)

    def _drop(self, number: int, reason: str, problem: str) -> None:
        """Drop a group, and give the run up when group after group brings nothing to train: it would never end."""
        self._scheduler.drop(number, reason)
        self._journal.drop(number, reason, was_accepted=0)
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

    def _journal_counts(self) -> None:
        generated = self._runner.engine.counts.copy()
        self._journal.generated(generated - self._journaled)
        self._journaled = generated


@dataclass
class ScoredGroup:
    """The outcome of a group's episodes.

    Attributes:
        records: Trajectories that may be trained; empty if none may.
        rewards: Rewards of all episodes; NaN marks a missing one.
        dropped: Trajectories that may not be trained, by reason.
    """

    records: list[orchestrator_pb2.TrajectoryRecord] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)


def _sift(records: list[orchestrator_pb2.TrajectoryRecord], rules: FilterConfig) -> ScoredGroup:
    """Separate what may be trained from what may not."""
    group = ScoredGroup(
        rewards=[each.trajectory.reward if each.trajectory.HasField("reward") else float("nan") for each in records]
    )
    for record in records:
        if not record.trajectory.HasField("reward"):
            group.dropped[Reason.MISSING_REWARD] += 1
        elif not sampled_tokens(record.trajectory):
            group.dropped[Reason.NO_TOKENS] += 1
        else:
            group.records.append(record)
    rewards = [each.trajectory.reward for each in group.records]
    if rewards and _filtered(rewards, rules):
        group.dropped[Reason.FILTERED] += len(group.records)
        group.records = []
    return group


def _filtered(rewards: list[float], rules: FilterConfig) -> bool:
    mean = sum(rewards) / len(rewards)
    return (
        (rules.drop_degenerate and len(set(rewards)) == 1)
        or (rules.min_reward_mean is not None and mean < rules.min_reward_mean)
        or (rules.max_reward_mean is not None and mean > rules.max_reward_mean)
    )
