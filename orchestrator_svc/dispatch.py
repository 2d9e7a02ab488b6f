"""Starts groups whenever the staleness bound, the operator and a replica allow it, and sees each to its end."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque

import structlog

from orchestrator_svc.episodes import ScoredGroup
from orchestrator_svc.journal import DrawnTask, Recovery
from orchestrator_svc.run_parts import RunParts, group_name
from orchestrator_svc.scheduler import Reason, Stage
from orchestrator_svc.step_summary import versions_of
from sluice.rpc import SluiceError
from sluice.v1 import orchestrator_pb2
from sluice.versions import Version

__all__ = ["Dispatcher"]

log = structlog.get_logger(__name__)

_LOOK_AGAIN_S = 0.5
"""Replicas recover from a rest without a word; look again after this time."""


class Dispatcher:
    """Draws tasks and runs their groups.

    Args:
        parts: The run.
    """

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._again: deque[DrawnTask] = deque()
        self._next_group = 1
        self._next_position = 0
        self._fruitless: Counter[str] = Counter()
        self._lost_since: float | None = None
        self._journaled: Counter[str] = Counter()

    def recover(self, recovery: Recovery) -> None:
        """Take up what an earlier process left: tasks that were drawn and not finished come first."""
        self._again.extend(recovery.drawn)
        self._next_group, self._next_position = recovery.next_group, recovery.next_position

    def requeue(self, position: int) -> None:
        """Draw a task again, as a group of its own."""
        self._again.append(DrawnTask(0, position))

    async def run(self) -> None:
        """Dispatch until cancelled; groups under way are then cancelled too.

        Raises:
            SluiceError: if groups fail one after the other, or no replica has been there for too long.
        """
        async with asyncio.TaskGroup() as groups:
            while True:
                while (version := self._permission()) is not None:
                    self._start(groups, version)
                await self._parts.changed.wait(_LOOK_AGAIN_S)

    def _permission(self) -> Version | None:
        """The version that one more group would begin on; None while none may begin."""
        parts = self._parts
        scheduler, now = parts.scheduler, time.monotonic()
        running = parts.status.state == orchestrator_pb2.RUN_STATE_RUNNING and not parts.paused
        wanted = scheduler.wanted_version() if running else None
        replica = parts.pool.pick(wanted) if wanted is not None else None
        parts.pool.wait_for(wanted if replica is None else None)
        waits_for_version = wanted is not None and replica is None
        blocked = running and (scheduler.at_capacity or waits_for_version)
        parts.status.dispatch_blocked.set(blocked, now)
        # At the bound, replicas may still be busy with what was dispatched before: then nobody waits for anybody.
        parts.status.rollout_idle.set(blocked and not scheduler.count(Stage.RUNNING), now)
        self._check_lost(lost=waits_for_version and all(each.why_not() for each in parts.pool.replicas), now=now)
        return replica.version if replica is not None else None

    def _check_lost(self, *, lost: bool, now: float) -> None:
        if not lost:
            self._lost_since = None
            return
        if self._lost_since is None:
            self._lost_since = now
        limit = self._parts.config.deadlines.lost_s
        if now - self._lost_since > limit:
            reasons = "; ".join(f"{each.name} {each.why_not()}" for each in self._parts.pool.replicas)
            raise SluiceError.unavailable(
                "NO_REPLICA",
                f"no rollout replica for {limit:g} s (orchestrator.deadlines.lost_s): {reasons or 'none found'}",
            )

    def _start(self, groups: asyncio.TaskGroup, version: Version) -> None:
        parts = self._parts
        drawn = self._draw()
        parts.scheduler.start(drawn.number, drawn.position, version)
        parts.journal.draw(drawn.number, drawn.position, self._next_position)
        groups.create_task(self._run_group(drawn, version), name=group_name(drawn.number))

    def _draw(self) -> DrawnTask:
        if self._again and self._again[0].number:
            return self._again.popleft()
        number = self._next_group
        self._next_group += 1
        if self._again:
            return DrawnTask(number, self._again.popleft().position)
        position = self._next_position
        self._next_position += 1
        return DrawnTask(number, position)

    async def _run_group(self, drawn: DrawnTask, version: Version) -> None:
        """See one group to its end: accepted, or dropped and counted."""
        parts = self._parts
        task, name = parts.tasks.at(drawn.position), group_name(drawn.number)
        episodes = parts.config.group_size
        parts.status.running_episodes += episodes
        reason, problem = "", ""
        scored = ScoredGroup()
        try:
            async with asyncio.timeout(parts.config.deadlines.episode_s):
                prefix = f"{parts.common.run}/{name}/{parts.journal.start}"
                scored = await parts.episodes.run(task, name, version, prefix)
        except TimeoutError:
            reason, problem = Reason.EPISODE_DEADLINE, f"not done in {parts.config.deadlines.episode_s:g} s"
        except SluiceError as error:
            reason, problem = Reason.EPISODE_FAILED, str(error)
        except Exception as error:  # an environment or a workflow may raise anything
            reason, problem = Reason.EPISODE_FAILED, repr(error)
            log.exception("group failed unexpectedly", group=name, task=task.task_id)
        finally:
            parts.status.running_episodes -= episodes
        if reason:
            self._fail(drawn.number, reason, problem)
        else:
            self._accept(drawn.number, task.task_id, scored)
        generated = parts.engine.counts.of_policy()
        parts.journal.generated(generated - self._journaled)
        self._journaled = generated
        parts.changed.notify()

    def _accept(self, number: int, task_id: str, scored: ScoredGroup) -> None:
        parts = self._parts
        parts.status.group_scored(group_name(number), task_id, scored.rewards)
        for reason, count in scored.dropped.items():
            parts.scheduler.drop_trajectories(reason, count)
            parts.journal.drop_trajectories(reason, count)
        if not scored.records:
            reason = next(iter(scored.dropped), Reason.EPISODE_FAILED)
            self._drop(number, reason)
            self._count_fruitless(reason, f"{reason} of all episodes of task {task_id}; see the warnings above")
            return
        self._fruitless.clear()
        versions = {version for record in scored.records for version in versions_of(record.trajectory)}
        parts.scheduler.finish(number, versions, len(scored.records))
        parts.keep_records(number, scored.records)
        parts.journal.accept(number, parts.scheduler.groups[number].versions, scored.records)

    def _fail(self, number: int, reason: str, problem: str) -> None:
        log.warning("group failed", group=group_name(number), reason=reason, problem=problem)
        self._drop(number, reason)
        self._count_fruitless(reason, problem)

    def _count_fruitless(self, reason: str, problem: str) -> None:
        """Give the run up when group after group brings nothing to train: it would go on for ever."""
        config = self._parts.config
        if reason == Reason.FILTERED:
            setting, limit = "filter.max_in_a_row", config.filter.max_in_a_row
        else:
            setting, limit = "max_failed_groups", config.max_failed_groups
        self._fruitless[setting] += 1
        if self._fruitless[setting] >= limit:
            raise SluiceError.aborted(
                "GROUPS_FAIL",
                f"{limit} groups brought nothing to train one after the other (orchestrator.{setting}), the last one: {problem}",
            )

    def _drop(self, number: int, reason: str) -> None:
        self._parts.scheduler.drop(number, reason)
        self._parts.journal.drop(number, reason, was_accepted=0)
