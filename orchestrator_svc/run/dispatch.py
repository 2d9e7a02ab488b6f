"""From a task to a scored group: draw a task when the staleness bound and a replica allow it, run and score its episodes.

`Dispatcher` owns the running groups. Each ends accepted, and then is ready for a batch, or is dropped and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import structlog
from google.protobuf.timestamp_pb2 import Timestamp

from orchestrator_svc.config import EXTERNAL, EnvironmentConfig, OrchestratorConfig
from orchestrator_svc.journal.episodes import JournaledEpisodes, unfinished
from orchestrator_svc.journal.facts import Reason, Stage
from orchestrator_svc.journal.ledger import Group
from orchestrator_svc.journal.records import SharedRecord
from orchestrator_svc.journal.segments import JournalError
from orchestrator_svc.journal.store import GroupDamagedError, Journal
from orchestrator_svc.run.curriculum import FAULTS, SHARED, Curriculum, overlong_counter, release_fact
from orchestrator_svc.run.faults import FirstRewards, Outage
from orchestrator_svc.run.free_space import FreeSpace
from orchestrator_svc.run.recorder import Dropped, Recorder
from orchestrator_svc.run.scheduler import Pace, Scheduler
from orchestrator_svc.run.sifting import ScoredGroup, sift
from orchestrator_svc.run.status import RunStatus
from orchestrator_svc.run.workflows import GroupRunner, Sampling, loss
from orchestrator_svc.sessions.desk import Desk, NoAgentError
from sluice.advantages import ESTIMATORS
from sluice.clock import CLOCK, Clock
from sluice.environments.base import Task
from sluice.environments.worker import EnvironmentFailedError
from sluice.environments.worker import Reason as EnvironmentReason
from sluice.rpc import SluiceError
from sluice.sampling.served import OverdueError, ServedDeadline, WaitingRequests
from sluice.tasks import Turn
from sluice.v1 import journal_pb2, orchestrator_pb2
from sluice.versions import Version, versions_of

log = structlog.get_logger(__name__)

_LOOK_AGAIN_S = 0.5
"""Seconds between two checks of the replicas: nothing signals the end of a cooldown."""

_OUTAGE = "outage"
"""Name of this cause in `RunStatus.waits_for`."""

_PROBLEM_CHARACTERS = 1000
"""Most characters that are kept of the reason for a task's quarantine."""


class _GroupFailedError(Exception):
    """A group has nothing to train.

    Attributes:
        reason: Why.
        problem: The reason, for people.
        heals: Whether waiting may help.
        records: The trajectories of its episodes, if these ended.
    """

    def __init__(self, reason: str, problem: str, *, heals: bool = True, records: Sequence[SharedRecord] = ()) -> None:
        super().__init__(problem)
        self.reason, self.problem, self.heals, self.records = reason, problem, heals, records


class Dispatcher:
    """Draws tasks and runs their groups.

    Args:
        curriculum: Chooses the tasks; follows the facts of the journal.
        pace: Says how long the next group may wait; follows them too.
        runners: Run the groups of each environment, with one engine.
        space: Says whether the run waits for room on a disk.
        desk: Offers the groups that external agents run.
        recorder: Writes the text of trajectories that are not trained.
        changed: Set at every change. A loop checks its condition, clears it and waits.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        scheduler: Scheduler,
        journal: Journal,
        status: RunStatus,
        curriculum: Curriculum,
        *,
        pace: Pace,
        runners: Mapping[str, GroupRunner],
        space: FreeSpace,
        desk: Desk,
        recorder: Recorder,
        changed: asyncio.Event,
        clock: Clock = CLOCK,
    ) -> None:
        self._config, self._scheduler, self._journal, self._status = config, scheduler, journal, status
        self._runners, self.curriculum, self._changed = runners, curriculum, changed
        self._pace, self._paced_s, self._clock, self._recorder = pace, 0.0, clock, recorder
        self._ledger = journal.ledger
        self._engine = next(iter(runners.values())).engine
        self._pool, self._lockstep = self._engine.pool, self._engine.lockstep
        self._paused, self._space, self._desk = False, space, desk
        limits, proven = config.deadlines, self._ledger.accepted > 0
        self._outage = Outage(
            config.max_failed_groups, config.max_failed_tasks, limits.outage_s, limits.first_outage_s, proven=proven
        )
        self._first_rewards = FirstRewards(config.batch_size, config.max_reward)
        self._lost_since: float | None = None
        self._behind_since: float | None = None
        self._deadlines: dict[int, ServedDeadline] = {}
        self._waiting_requests = WaitingRequests()
        self._counted: Counter[str] = Counter()
        self._counted_at = self._ledger.batches_made
        groups = sorted(self._ledger.groups.values(), key=lambda each: each.number)
        self._unfinished = deque(each for each in groups if each.stage is Stage.RUNNING)

    def pause(self) -> None:
        """Start no more groups; running groups continue to their end."""
        self._paused = True

    @property
    def paused(self) -> bool:
        """Whether groups may not start, because somebody paused the run or a disk is short of room."""
        return self._paused or bool(self._space.short)

    @property
    def outage(self) -> str:
        """Why the run pauses by itself, because group after group fails; empty if it does not."""
        return self._status.waits_for.get(_OUTAGE, "")

    def resume(self) -> None:
        """Start groups again, as soon as the disks have room."""
        self._paused = False
        self._outage.try_now(self._clock())
        self._changed.set()

    def apply_limits(self, max_staleness: int) -> None:
        """Apply limits that were changed while the run lives, to running and to future groups."""
        bound = replace(self._scheduler.bound, max_staleness=max_staleness, max_concurrent=self._config.max_concurrent)
        self._scheduler.change_bound(bound)
        self._scheduler.max_running = self._config.max_running
        self._changed.set()

    async def run(self) -> None:
        """Dispatch until cancelled. Then running groups are cancelled, too.

        Raises:
            SluiceError: if groups fail one after the other, or there has been no replica for too long.
        """
        turn = Turn()
        try:
            async with asyncio.TaskGroup() as groups:
                while True:
                    self._put_off()
                    while self._start_next(groups):
                        await turn.give_way()
                    stands_still = self.paused or not self._outage.may_start(self._clock())
                    none_may_start = stands_still or not (self._unfinished or self._scheduler.wanted_version())
                    if self._lockstep is not None and none_may_start:
                        self._lockstep.hand_over()
                    self._changed.clear()
                    waits_s = (self.curriculum.wait_s(self._clock()), self._paced_s or None, _LOOK_AGAIN_S)
                    with contextlib.suppress(TimeoutError):
                        async with self._clock.timeout(min(each for each in waits_s if each is not None)):
                            await self._changed.wait()
        finally:
            self._note_counts({})  # the next process continues the counts from here

    def _put_off(self) -> None:
        """Give up the places of groups whose agents do not come, if other environments can be played meanwhile."""
        missing = self._desk.missing
        for number in missing.put_off(self._ledger.groups.values(), others_can=self.curriculum.others_can):
            self._desk.put_off(number)

    def _start_next(self, groups: asyncio.TaskGroup) -> bool:
        """Start a group if one may start now: first those that an earlier process left unfinished."""
        unfinished, wanted = self._unfinished[0] if self._unfinished else None, None
        if not self.paused and self._outage.may_start(self._clock()):
            scheduler = self._scheduler
            wanted = scheduler.wanted_version() if unfinished is None else scheduler.wanted_version_of(unfinished)
        if wanted is not None and not self._pool.has_room(self._ledger.count(Stage.RUNNING) - len(self._unfinished)):
            wanted = None
        self._paced_s = 0.0
        if wanted is not None and unfinished is None:
            self._paced_s = self._pace.wait_s(len(self._ledger.groups), self._clock())
        version = self._version_to_start_on(None if self._paced_s else wanted)
        if version is None:
            return False
        if unfinished is None:
            drawn = self._drawn()
            if drawn is None:
                return False
            group = self._draw(drawn, version)
        else:
            self._unfinished.popleft()
            group = self._continue(unfinished, version)
        settings = self.curriculum.environments.get(group.environment, self._config)
        # Nobody knows when agents come for an external group, so other groups do not wait for it.
        self._outage.started(group.number, self._clock(), awaited=settings.workflow != EXTERNAL)
        running = groups.create_task(self._run_group(group), name=group.name)
        if self._lockstep is not None:
            self._lockstep.begin(running)
        return True

    def _drawn(self) -> journal_pb2.TaskDrawn | None:
        """Draw the next task; None while no environment can deliver one.

        Raises:
            SluiceError: ABORTED if every task is in quarantine.
        """
        now = self._clock()
        self._drop_redraws()
        draw = self.curriculum.choose_task(now, self._ledger.redraws, self._desk.missing.away)
        if draw is None:
            if self.curriculum.exhausted:
                raise SluiceError.aborted(
                    "ALL_QUARANTINED",
                    "every task of the run is in quarantine, because its groups failed quarantine_after times one after the"
                    f" other{self._last_quarantined()}. The report lists all tasks and problems. Correct that, then start the run again with"
                    " orchestrator.release_quarantine = true: it continues and draws them again",
                )
            return None
        self.curriculum.start(draw.environment, now)
        return journal_pb2.TaskDrawn(
            environment=draw.environment,
            task_id=draw.task_id,
            draw=draw.draw,
            group=self._ledger.next_group,
            position=draw.position,
            redraw_reason=draw.reason,
            passed_over=draw.passed_over,
        )

    def _last_quarantined(self) -> str:
        """Return why the task that was put in quarantine last is there, as a clause for people."""
        *_, last = ("", ""), *self.curriculum.quarantined
        environment, task_id = last
        if not task_id:
            return ""
        return (
            f", the one of task {task_id} because of {self.curriculum.stream(environment).quarantined[task_id].problem}"
        )

    def _drop_redraws(self) -> None:
        """Drop redraws of tasks that may no longer be drawn. Their environments draw other tasks in their place."""
        redraws = self._ledger.redraws
        while redraws and (reason := self.curriculum.why_not_again(redraws[0])):
            owed = redraws[0]
            log.warning(
                "a task will not be drawn again", environment=owed.environment, task=owed.task_id, reason=reason
            )
            dropped = journal_pb2.RedrawDropped(
                environment=owed.environment,
                task_id=owed.task_id,
                position=owed.position,
                redraw_reason=owed.reason,
                reason=reason,
            )
            self._journal.record_fact(journal_pb2.Fact(redraw_dropped=dropped))

    def _draw(self, drawn: journal_pb2.TaskDrawn, version: Version) -> Group:
        """Record a draw, and return its group, which this version and newer ones may sample."""
        settings = self.curriculum.environments.get(drawn.environment, self._config)
        drawn.episodes = settings.group_size
        drawn.policy_version.CopyFrom(version.to_proto())
        self._journal.record_fact(journal_pb2.Fact(task_drawn=drawn))
        return self._ledger.groups[drawn.group]

    def _continue(self, group: Group, version: Version) -> Group:
        """Resume an unfinished group where it stopped. If its version is too old, start its next attempt."""
        if self._scheduler.goes_on(group):
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

    def _version_to_start_on(self, wanted: Version | None) -> Version | None:
        """Return the version of a replica that may sample one more group; None if no replica may."""
        now = self._clock()
        replica = self._pool.pick(wanted) if wanted is not None else None
        waits_for_version = wanted is not None and replica is None
        self._pool.wait_for(wanted if waits_for_version else None)
        blocked = not self.paused and (self._scheduler.at_capacity or waits_for_version or self._paced_s > 0)
        self._status.dispatch_blocked.set(blocked, now)
        # At the bound, replicas may still be busy with earlier groups. Then they are not idle.
        self._status.rollout_idle.set(blocked and not self._ledger.count(Stage.RUNNING), now)
        self._check_waits(self._waited_for(wanted if waits_for_version else None), now)
        return replica.version if replica is not None else None

    def _waited_for(self, wanted: Version | None) -> Version | None:
        """Return a version that a group waits for and no replica serves: the next group (`wanted`), or a running one. None: no group waits.

        The deadlines of groups do not count such a wait, so it has deadlines of its own.
        """
        if wanted is not None or self.paused:
            return wanted
        if not self._waiting_requests.count:
            return None
        groups = self._ledger.groups
        return next((groups[number].floor for number, each in self._deadlines.items() if each.nowhere), None)

    def _check_waits(self, wanted: Version | None, now: float) -> None:
        """End the run if it has waited too long for a replica with the version `wanted`: all are lost, or none takes a new version.

        Raises:
            SluiceError: UNAVAILABLE; it says what each replica lacks.
        """
        limits = self._config.deadlines
        lost = wanted is not None and all(each.why_not() for each in self._pool.replicas)
        self._lost_since = (self._lost_since or now) if lost else None
        self._behind_since = (self._behind_since or now) if wanted is not None and not lost else None
        if self._lost_since is not None and now - self._lost_since > limits.lost_s:
            raise self._pool.none_for(limits.lost_s, "orchestrator.deadlines.lost_s")
        if wanted is not None and self._behind_since is not None and now - self._behind_since > limits.update_s:
            raise self._pool.none_at(wanted, limits.update_s, "orchestrator.deadlines.update_s")

    async def _run_group(self, group: Group) -> None:
        """Run one group to its end: accepted, or dropped and counted."""
        task = self.curriculum.task(group.environment, group.task_id, group.position)
        if task is None:
            problem = f"environment {group.environment} no longer lists task {group.task_id}"
            self._drop(group, Reason.TASK_CHANGED, problem)
            self._outage.ended(group.number)
            self._changed.set()
            return
        settings = self.curriculum.environments[group.environment]
        scored = ScoredGroup()
        try:
            scored = await self._scored(group, task, settings)
        except _GroupFailedError as failed:
            found = [Dropped(each, failed.reason) for each in failed.records]
            self._recorder.write_dropped([*found, *await self._of_lost_episodes(group, failed.reason, failed.records)])
            self._drop(group, failed.reason, failed.problem, heals=failed.heals)
        except NoAgentError:
            log.info("a group is put off: no agent came for it", group=group.name, environment=group.environment)
            dropped = journal_pb2.GroupDropped(group=group.number, reason=Reason.NO_AGENT, redraw=True)
            self._journal.record_fact(journal_pb2.Fact(group_dropped=dropped))
        else:
            await self._end(group, scored)
        self._outage.ended(group.number)
        self._note({overlong_counter(group.environment, settings.overlong.policy): scored.overlong})
        self._changed.set()

    async def _scored(self, group: Group, task: Task, settings: EnvironmentConfig) -> ScoredGroup:
        """Run the episodes of a group.

        Raises:
            _GroupFailedError: if they have nothing to train.
            NoAgentError: if no agent came for them.
            JournalError: if they cannot be written.
        """
        # External agents have deadlines of their own, which begin with the first lease.
        limit_s = None if settings.workflow == EXTERNAL else self._config.deadlines.episode_s
        deadline = self._deadlines[group.number] = ServedDeadline(limit_s, self._clock, self._waiting_requests)
        try:
            async with deadline.limit():
                runner = self._runners[group.environment]
                records = await runner.run(
                    task,
                    group.name,
                    group.episodes,
                    Sampling(**settings.sampling.model_dump()),
                    group.floor,
                    episode_log=JournaledEpisodes(self._journal, group),
                    deadline=deadline,
                )
                for each in records:
                    each.trajectory.objective = settings.objective
                _note_life([each.own for each in records], group)
                most_tokens = task.max_tokens or settings.sampling.max_tokens
                scored = sift(records, settings, most_tokens, runner.should_accept, self._config.max_reward)
        except (JournalError, NoAgentError):
            raise
        except EnvironmentFailedError as error:
            heals = error.reason not in {EnvironmentReason.GIVEN_UP, EnvironmentReason.MESSAGES}
            raise _GroupFailedError(loss(error), error.message, heals=heals) from error
        except OverdueError as error:
            raise _GroupFailedError(loss(error), str(error)) from error
        except (SluiceError, TimeoutError) as error:
            reason = loss(error)
            reason = reason if reason in FAULTS else _reason_of(group.lost)
            heals = reason != Reason.REQUEST_REFUSED
            raise _GroupFailedError(reason, str(error) or repr(error), heals=heals) from error
        except Exception as error:  # an environment or a workflow may raise anything
            log.exception("group failed unexpectedly", group=group.name, task=group.task_id)
            raise _GroupFailedError(Reason.EPISODE_FAILED, repr(error)) from error
        finally:
            self._deadlines.pop(group.number, None)
        lost = 0 if settings.workflow == EXTERNAL else group.episodes - _count(scored.everyone)
        if lost > 0 and _count(scored.records) == 1 and settings.advantage in ESTIMATORS:
            problem = f"{lost} of {group.episodes} episodes were lost, and {settings.advantage} cannot compare the only one left"
            raise _GroupFailedError(_reason_of(group.lost), problem, records=scored.everyone)
        return scored

    async def _of_lost_episodes(self, group: Group, reason: str, ended: Sequence[SharedRecord]) -> list[Dropped]:
        """Return the samples of the unfinished episodes of a running group.

        Args:
            group: The group.
            reason: Reason for episodes that have none of their own.
            ended: The trajectories of the other episodes.
        """
        lost, known = group.lost, {each.trajectory.episode_id for each in ended}
        try:
            sampled = await unfinished(self._journal, group)
        except GroupDamagedError as error:
            log.warning("what failed cannot be shown", group=group.name, error=str(error))
            return []
        return [
            Dropped(record, lost.get(episode, reason))
            for episode, record in sampled.items()
            if record.trajectory.episode_id not in known
        ]

    async def _end(self, group: Group, scored: ScoredGroup) -> None:
        """Record the outcome of a group's episodes, and accept the group unless it has nothing to train."""
        rewards = {
            each.trajectory.episode_id: reward for each, reward in zip(scored.everyone, scored.rewards, strict=True)
        }
        self._status.group_scored(group.name, group.task_id, rewards)
        for problem in self._first_rewards.take_rewards(group.environment, scored.rewards):
            log.warning("the first rewards look wrong", environment=group.environment, problem=problem)
        replaced = scored.without_signal and (
            self._config.on_max_refills == "fail" or self.curriculum.refills < self._config.max_refills
        )
        if replaced:
            scored.leave_out(Reason.NO_SIGNAL)
        if group.lost and group.generations:
            self._recorder.write_dropped(await self._of_lost_episodes(group, Reason.EPISODE_FAILED, scored.everyone))
        self._recorder.write_dropped(
            [
                Dropped(each, reason)
                for each in scored.everyone
                if (reason := scored.untrainable.get(each.trajectory.trajectory_id))
            ]
        )
        kept = self._journal.keep_trajectories(group.number, await self._journal.encoded(scored.records))
        ended = journal_pb2.EpisodesEnded(
            group=group.number,
            attempt=group.attempt,
            episodes=_ended_episodes(group, scored, kept.trajectories),
            beginnings=kept.beginnings,
        )
        # Sessions of external agents record themselves how they ended.
        if self.curriculum.environments[group.environment].workflow != EXTERNAL:
            ended.episodes.extend(_missing(group, ended.episodes))
        self._journal.record_fact(journal_pb2.Fact(episodes_ended=ended))
        if replaced:
            self._succeeded()
            self._replace(group)
            return
        if not scored.records:
            reason = next(iter(scored.untrainable.values()), Reason.EPISODE_FAILED)
            settings = self.curriculum.environments[group.environment]
            self._drop(group, reason, _problem(reason, group, settings), heals=reason != Reason.OVERLONG)
            return
        self._succeeded()
        versions = {version for record in scored.records for version in versions_of(record.trajectory)}
        accepted = journal_pb2.GroupAccepted(
            group=group.number, policy_versions=[each.to_proto() for each in sorted(versions)]
        )
        self._journal.record_fact(journal_pb2.Fact(group_accepted=accepted))

    def _replace(self, group: Group) -> None:
        """Drop a group without signal. Another task of its environment takes its place at once.

        Raises:
            SluiceError: ABORTED if too many were replaced since the last batch.
        """
        dropped = journal_pb2.GroupDropped(group=group.number, reason=Reason.NO_SIGNAL)
        self._journal.record_fact(journal_pb2.Fact(group_dropped=dropped))
        if self.curriculum.refills >= self._config.max_refills and self._config.on_max_refills == "fail":
            raise SluiceError.aborted(
                "NO_SIGNAL",
                f"{self.curriculum.refills} groups since the last batch brought no signal by the settings of filter, the most that"
                f" orchestrator.max_refills allows, the last one of task {group.task_id}. Choose tasks of another difficulty, correct"
                ' the filter, or set orchestrator.on_max_refills = "train"; then start the run again: it continues',
            )

    def _drop(self, group: Group, reason: str, problem: str, *, heals: bool = True) -> None:
        """Drop a group that failed. Put its task in quarantine if its groups keep failing. Pause if groups of many tasks fail.

        Args:
            group: The group.
            reason: Why it failed.
            problem: The reason, for people.
            heals: Whether waiting may help.

        Raises:
            SluiceError: ABORTED if group after group fails for too long, because the run would never end.
        """
        log.warning(
            "a group brings nothing to train",
            group=group.name,
            environment=group.environment,
            task=group.task_id,
            reason=reason,
            problem=problem,
        )
        begins, now, outage = False, self._clock(), self._outage
        # Only groups drawn before a restart end as TASK_CHANGED. The run continues with other tasks.
        if reason != Reason.TASK_CHANGED:
            task, shared = (group.environment, group.task_id), heals and reason in SHARED
            begins = outage.failed(group.number, task, now, shared=shared, heals=heals)
        failures = None if outage.active else self.curriculum.to_quarantine(group.number, reason)
        dropped = journal_pb2.GroupDropped(group=group.number, reason=reason, outage=outage.active)
        self._journal.record_fact(journal_pb2.Fact(group_dropped=dropped))
        if failures is not None:
            self._quarantine(group, failures, f"{reason}: {problem}")
        if begins:
            self._begin_outage(f"{reason}: {problem}")
        if outage.hopeless(now, heals=heals):
            raise SluiceError.aborted(
                "GROUPS_FAIL",
                f"{outage.in_a_row} groups in a row brought nothing to train"
                + (" (orchestrator.max_failed_groups)" if outage.proven or not heals else "")
                + (f", also after a pause of {self._pause_limit}" if heals else "")
                + f", the last one because: {problem}."
                + f" Correct {'the environment, the judge or the deadline at fault' if heals else 'that'}, then start the run again:"
                " it continues",
            )

    @property
    def _pause_limit(self) -> str:
        """How long the run may pause because group after group fails, with the name of the setting."""
        first = self._outage.limit_s != self._config.deadlines.outage_s
        setting = "first_outage_s" if first else "outage_s"
        return f"{self._outage.limit_s:g} s (orchestrator.deadlines.{setting})"

    def _begin_outage(self, problem: str) -> None:
        """Pause, and reset the failures that count against the tasks of the groups that failed in a row."""
        groups, tasks = self._outage.in_a_row, list(self._outage.tasks)
        for environment, task_id in tasks:
            known = self.curriculum.stream(environment).progress.get(task_id)
            if known is not None and known.failures:
                self._journal.record_fact(release_fact(environment, task_id))
        message = (
            f"a group to succeed: {groups} failed one after the other, of {len(tasks)} tasks, the last one because of {problem}."
            " Something that they share may be down, such as a judge. One group at a time is tried, the next one at once after"
            f" `sluice resume`; the run ends in {self._pause_limit}"
        )
        self._status.waits_for[_OUTAGE] = message
        if self._status.state == orchestrator_pb2.RUN_STATE_RUNNING:
            self._status.enter(orchestrator_pb2.RUN_STATE_PAUSED, f"waits for {message}")
        log.error("paused: group after group fails", groups=groups, tasks=len(tasks), problem=problem)

    def _succeeded(self) -> None:
        """Note that a group succeeded. End the pause, if failures caused one."""
        failed = self._outage.in_a_row
        if not self._outage.succeeded():
            return
        del self._status.waits_for[_OUTAGE]
        if self._status.state == orchestrator_pb2.RUN_STATE_PAUSED and not self.paused:
            self._status.enter(orchestrator_pb2.RUN_STATE_RUNNING, "a group succeeded again")
        log.info("a group succeeded: the pause is over", failed_groups=failed)

    def _quarantine(self, group: Group, failures: int, problem: str) -> None:
        """Put the task of a group in quarantine: it is not drawn any more."""
        log.error(
            "a task is in quarantine: it is not drawn any more",
            environment=group.environment,
            task=group.task_id,
            failures=failures,
            problem=problem,
        )
        noted = journal_pb2.TaskQuarantined(
            environment=group.environment,
            task_id=group.task_id,
            failures=failures,
            problem=problem[:_PROBLEM_CHARACTERS],
        )
        self._journal.record_fact(journal_pb2.Fact(task_quarantined=noted))

    def _note(self, overlong: Mapping[str, int]) -> None:
        """Record the counts `overlong` of a group at once, other counters once per batch, and the state of the tasks if due."""
        if any(overlong.values()) or self._ledger.batches_made > self._counted_at:
            self._note_counts(overlong)
        if self.curriculum.note_is_due:
            self._journal.record_fact(journal_pb2.Fact(curriculum_noted=self.curriculum.noted()))

    def _note_counts(self, more: Mapping[str, int]) -> None:
        """Record by how much the counters of the engine and these counters grew."""
        counts = self._engine.counts.copy()
        grown, self._counted = counts - self._counted + Counter(more), counts
        self._counted_at = self._ledger.batches_made
        if grown:
            self._journal.record_fact(journal_pb2.Fact(counts_noted=journal_pb2.CountsNoted(generated=grown)))


def _note_life(records: Iterable[orchestrator_pb2.TrajectoryRecord], group: Group) -> None:
    """Note where trajectories come from and when their group was drawn. Set the time of their score unless their workflow did."""
    drawn, now = Timestamp(), Timestamp()
    drawn.FromMicroseconds(round(group.drawn_s * 1e6))
    now.GetCurrentTime()
    for each in records:
        each.environment = group.environment
        each.draw_time.CopyFrom(drawn)
        if not each.HasField("score_time"):
            each.score_time.CopyFrom(now)


def _problem(reason: str, group: Group, settings: EnvironmentConfig) -> str:
    """Return why no episode of a group has anything to train, for people."""
    all_of_it = f"{reason} of all {group.episodes} episodes of task {group.task_id}"
    if reason == Reason.OVERLONG:
        return (
            f"{all_of_it}: they were cut off, and orchestrator.overlong.policy = {settings.overlong.policy} trains none that was:"
            f" raise sampling.max_tokens ({settings.sampling.max_tokens}) or max_turns, or set the policy to none or penalise"
        )
    if reason == Reason.MISSING_REWARD:
        return f"{all_of_it}: see `scoring failed` above"
    return f"{all_of_it}; see the warnings above"


def _reason_of(lost: Mapping[int, str]) -> str:
    """Return why a group that lost episodes has nothing to train. Prefer a reason that its task may have caused."""
    return next((each for each in lost.values() if each in FAULTS), Reason.EPISODE_FAILED)


def _count(records: Iterable[SharedRecord]) -> int:
    """Return the number of episodes: an episode that forked has several records."""
    return len({each.trajectory.episode_id for each in records})


def _ended_episodes(
    group: Group, scored: ScoredGroup, trajectories: Sequence[journal_pb2.AcceptedTrajectory]
) -> list[journal_pb2.EndedEpisode]:
    """Return what became of each episode of a group; `trajectories` belong to the records that may be trained.

    An episode whose trajectories may not be trained for several reasons is split by them.
    """
    ended: dict[tuple[str, str], journal_pb2.EndedEpisode] = {}
    numbers = _numbers(group, [each.trajectory.episode_id for each in scored.everyone])
    kept = {id(record): accepted for record, accepted in zip(scored.records, trajectories, strict=True)}
    for record, reward in zip(scored.everyone, scored.rewards, strict=True):
        trajectory = record.trajectory
        reason = scored.untrainable.get(trajectory.trajectory_id, "")
        episode = ended.setdefault(
            (trajectory.episode_id, reason),
            journal_pb2.EndedEpisode(episode=numbers[trajectory.episode_id], reason=reason),
        )
        if reward is not None:
            episode.reward = reward
        if reason:
            episode.untrainable.append(trajectory.trajectory_id)
        else:
            episode.trajectories.append(kept[id(record)])
    return list(ended.values())


def _numbers(group: Group, episode_ids: Iterable[str]) -> dict[str, int]:
    """Return the number of each episode within its group. Our workflows append it to the group's name; other episodes get free numbers."""
    names = dict.fromkeys(episode_ids)
    given = {each: each.removeprefix(f"{group.name}-") for each in names}
    numbers = {each: int(number) for each, number in given.items() if number.isdecimal()}
    taken = {*numbers.values(), *group.lost}
    free = (each for each in itertools.count() if each not in taken)
    return {each: numbers[each] if each in numbers else next(free) for each in names}


def _missing(group: Group, ended: Iterable[journal_pb2.EndedEpisode]) -> list[journal_pb2.EndedEpisode]:
    """Return the episodes that a workflow neither returned nor reported as lost."""
    known = {*group.lost, *(each.episode for each in ended)}
    missing = [each for each in range(group.episodes) if each not in known][: max(0, group.episodes - len(known))]
    return [journal_pb2.EndedEpisode(episode=each, reason=Reason.EPISODE_FAILED) for each in missing]
