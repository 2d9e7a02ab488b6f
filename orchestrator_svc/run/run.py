"""A run, from waiting for its services to the report.

    draw task -> open group -> generate -> score -> group complete -> batch -> advantages -> SubmitBatch -> trained

`Dispatcher` does the first half, `Training` the second; checkpoints and evaluations are made beside them. `Run` starts each
in a task of its own and awaits it. An error in any of them ends the run.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from orchestrator_svc.announcements import Announcements
from orchestrator_svc.config import CheckpointConfig, EvaluationConfig
from orchestrator_svc.journal.facts import Stage
from orchestrator_svc.journal.store import Journal
from orchestrator_svc.run.curriculum import RELEASE, release_fact, tasks_to_release
from orchestrator_svc.run.dispatch import Dispatcher
from orchestrator_svc.run.evaluation import Evaluations, Standing, release_left
from orchestrator_svc.run.free_space import LOOK_S, DiskWatch
from orchestrator_svc.run.live_settings import LiveSettings
from orchestrator_svc.run.metrics import AppliedStep
from orchestrator_svc.run.report import RunReporter
from orchestrator_svc.run.setting_aside import SetAsideShare
from orchestrator_svc.run.status import RunStatus
from orchestrator_svc.run.training import Training
from orchestrator_svc.sessions.desk import Desk
from sluice.clock import CLOCK, Clock
from sluice.config import FailedForGoodError, TooMuchSetAsideError
from sluice.rpc import SluiceError
from sluice.sampling.pool import ReplicaPool
from sluice.v1 import journal_pb2, orchestrator_pb2
from sluice.versions import BASE, Version

log = structlog.get_logger(__name__)

_ROOM = "room"
"""Name of a disk without room in `RunStatus.waits_for`."""


class Run:
    """One run, or the rest of a run that an earlier process began.

    Args:
        settings: Its settings. Some may be changed while it lives.
        pool: The replicas; `run` polls them.
        announcements: The replicas that announce themselves; `run` follows them, too.
        evaluations: Evaluates between steps; None if the run never does.
        desk: Holds the episodes of external agents; `run` ends those whose time is over.
        share: Says when too much is set aside.
        disks: Asks the disks for their free space; `run` checks regularly, and pauses while a disk is short of it.

    Attributes:
        gave_up: Why the run ended in order before its end: it waited too long for somebody; None if it did not.
    """

    def __init__(
        self,
        settings: LiveSettings,
        journal: Journal,
        status: RunStatus,
        pool: ReplicaPool,
        *,
        announcements: Announcements,
        dispatcher: Dispatcher,
        training: Training,
        evaluations: Evaluations | None,
        reporter: RunReporter,
        desk: Desk,
        share: SetAsideShare,
        disks: DiskWatch,
        clock: Clock = CLOCK,
    ) -> None:
        self._desk, self._share, self._clock = desk, share, clock
        self._disks, self._space = disks, disks.space
        self._give_up_at: float | None = None  # when a pause ends that began because too much was set aside
        self.gave_up: FailedForGoodError | None = None
        self._settings, self._config = settings, settings.config
        self._journal, self._status, self._pool, self._announcements = journal, status, pool, announcements
        self._dispatcher, self._training = dispatcher, training
        self._evaluations, self._reporter = evaluations, reporter
        self._saving: asyncio.Task[None] | None = None
        self._evaluating: asyncio.Task[None] | None = None
        now = self._clock()
        self._save_due = Every(self._config.checkpoint, now)
        self._kept_at_save = 0  # bytes that the journal had kept when the last checkpoint began
        self._evaluation_due = Every(self._config.evaluation, now)
        self._stop_reason = ""

    async def run(self) -> None:
        """Run to the last step.

        Raises:
            SluiceError: what ended the run early; the report says so too.
            JournalError: if the journal cannot be read or written.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                polling = tasks.create_task(self._pool.run(), name="replicas")
                announced = tasks.create_task(self._announcements.run(), name="announced replicas")
                expiring = tasks.create_task(self._desk.run(), name="external episodes")
                await self._begin()
                releasing = tasks.create_task(
                    release_left(self._journal, self._pool, self._config.deadlines.hold_s), name="holds"
                )
                await self._train_and_save()
                await self._end()
                for each in (polling, announced, expiring, releasing):
                    each.cancel()
        except asyncio.CancelledError:
            await self._last_report("stopped")
            raise
        except Exception as failure:
            # Not `except*`, which would wrap what is raised here in a group of its own.
            error = _first(failure)
            self._status.error = str(error)
            self._status.enter(orchestrator_pb2.RUN_STATE_FAILED, str(error))
            await self._last_report("failed")
            if error is failure:
                raise
            raise error from failure

    def pause(self) -> None:
        """Start no more groups."""
        self._dispatcher.pause()
        if self._status.state == orchestrator_pb2.RUN_STATE_RUNNING:
            self._status.enter(orchestrator_pb2.RUN_STATE_PAUSED, "paused by an operator")

    def leave(self) -> None:
        """Start no more groups, because this process ends. The next process continues the run from the journal."""
        self._dispatcher.pause()
        stages = {f"groups_{stage.value}": self._journal.ledger.count(stage) for stage in Stage}
        log.info("starts no more groups; the journal has what is under way", **stages)

    async def resume(self, principal: str) -> None:
        """Start groups again. Stop counting what was set aside so far, and wait again for agents that were missing.

        Args:
            principal: Name of the caller.

        Raises:
            JournalError: if this cannot be written.
        """
        if self._share.exceeded:
            self._journal.record_fact(journal_pb2.Fact(run_resumed=journal_pb2.RunResumed(principal=principal)))
            await self._journal.durable()
        self._give_up_at = None
        self._desk.missing.asked()
        self._dispatcher.resume()
        if waits_for := self._dispatcher.outage or self._space.short:
            self._status.enter(orchestrator_pb2.RUN_STATE_PAUSED, f"waits for {waits_for}")
        elif self._status.state == orchestrator_pb2.RUN_STATE_PAUSED:
            self._status.enter(orchestrator_pb2.RUN_STATE_RUNNING, "resumed by an operator")

    def _mind_share(self) -> None:
        """Pause if too much is set aside, and end the run in order if nobody resumes it in time."""
        now, limit_s = self._clock(), self._config.deadlines.set_aside_s
        if (problem := self._share.exceeded) and self._give_up_at is None and not self._stop_reason:
            self._give_up_at = now + limit_s
            self._dispatcher.pause()
            self._status.enter(
                orchestrator_pb2.RUN_STATE_PAUSED,
                f"{problem}. Correct it and start the run again, or accept it with `sluice resume`; the run ends in {limit_s:g} s"
                " (orchestrator.deadlines.set_aside_s)",
            )
            log.error("paused: too much is set aside", problem=problem, ends_in_s=limit_s)
        elif self._give_up_at is not None and now >= self._give_up_at and not self._stop_reason:
            problem = self._share.exceeded or "too much was set aside"
            self.gave_up = TooMuchSetAsideError(problem)
            self.stop(f"nobody let the paused run go on within {limit_s:g} s: {problem}")

    def _mind_agents(self) -> None:
        """End the run in order if an environment has had no agent for too long."""
        limit_s = self._config.external.absent_s
        name, absent_s = self._desk.missing.longest(self._clock())
        if not limit_s or absent_s < limit_s or self._stop_reason or self._dispatcher.paused:
            return
        problem = (
            f"no agent has had an episode of environment {name}, or asked for one, for {limit_s:g} s (orchestrator.external.absent_s):"
            " start agents that lease episodes through a gateway, then start the run again: it continues"
        )
        self.gave_up = FailedForGoodError(problem)
        self.stop(problem)

    async def _mind_room(self) -> None:
        """Check the disks, and pause while one is short of room."""
        was_short = bool(self._space.short)
        await self._disks.look()
        short, status = self._space.short, self._status
        if not short:
            status.waits_for.pop(_ROOM, None)
        else:
            status.waits_for[_ROOM] = short
        if short and not was_short:
            log.error("paused: a disk is short of room", problem=short)
            if status.state == orchestrator_pb2.RUN_STATE_RUNNING:
                status.enter(orchestrator_pb2.RUN_STATE_PAUSED, f"waits for {short}")
        elif was_short and not short:
            log.info("there is room on the disks again: the pause is over")
            if status.state == orchestrator_pb2.RUN_STATE_PAUSED and not (
                self._dispatcher.paused or self._dispatcher.outage
            ):
                status.enter(orchestrator_pb2.RUN_STATE_RUNNING, "there is room on the disks again")

    def stop(self, reason: str) -> None:
        """End in order: train the batches that are made, then write the last checkpoint and the report."""
        if not self._stop_reason:
            self._stop_reason = reason or "stopped by an operator"
            self._training.stop()
            self._status.enter(orchestrator_pb2.RUN_STATE_STOPPING, self._stop_reason)

    async def change_settings(self, values: Mapping[str, str], principal: str) -> list[orchestrator_pb2.ChangedSetting]:
        """Change settings, all or none. When the journal has the changes on disk, return the settings whose value changed.

        Batches that are made already keep the learning rate and the bound on staleness that they were made with. The key
        `quarantine.RELEASE` releases tasks.

        Args:
            values: New values by setting, as TOML.
            principal: Name of the caller.

        Raises:
            SluiceError: INVALID_ARGUMENT, as `LiveSettings.plan` and `tasks_to_release`.
            JournalError: if the change cannot be written.
        """
        settings, ledger = {key: value for key, value in values.items() if key != RELEASE}, self._journal.ledger
        tasks = tasks_to_release(self._dispatcher.curriculum, values[RELEASE]) if RELEASE in values else []
        changes = self._settings.plan(settings) if settings or RELEASE not in values else []
        for each in changes:
            fact = journal_pb2.SettingChanged(principal=principal, key=each.key, old_value=each.old, new_value=each.new)
            self._journal.record_fact(journal_pb2.Fact(setting_changed=fact))
            self._settings.apply_change(each)
            log.info("setting changed", key=each.key, old=each.old, new=each.new, principal=principal)
        changed = ledger.setting_changes[len(ledger.setting_changes) - len(changes) :]
        for environment, task_id in tasks:
            self._journal.record_fact(release_fact(environment, task_id, principal))
            log.info("a task is drawn again", environment=environment, task=task_id, principal=principal)
            changed.append(
                orchestrator_pb2.ChangedSetting(
                    key=RELEASE,
                    old_value="in quarantine",
                    new_value=f"{environment}/{task_id}",
                    from_sequence_no=ledger.next_batch,
                    principal=principal,
                )
            )
        self._dispatcher.apply_limits(self._settings.common.max_staleness)
        await self._journal.durable()
        for setting in changed:
            self._status.setting_changed(setting)
        return changed

    async def _begin(self) -> None:
        """Wait until trainer and replicas are there."""
        if self._journal.resumes:
            ledger = self._journal.ledger
            stages = {stage.value: ledger.count(stage) for stage in Stage}
            log.info("resuming", facts=ledger.last_seq, applied=ledger.applied, **stages)
        await self._training.check_trainer()
        if self._evaluations is not None:
            await self._keep_best(self._evaluations.standing)
        deadline_s = self._config.deadlines.start_s
        try:
            async with self._clock.timeout(deadline_s):
                await self._pool.choose(BASE)
        except TimeoutError as error:
            raise self._pool.none_for(deadline_s, "orchestrator.deadlines.start_s") from error

    async def _train_and_save(self) -> None:
        """Train to the last batch, and let the trainer write the last checkpoint. If it loses batches meanwhile, train them again.

        Raises:
            SluiceError: what ended the run early, or if the checkpoint cannot be written.
        """
        for lost in itertools.count(1):
            async with asyncio.TaskGroup() as beside:
                await self._train(beside)
                self._status.enter(orchestrator_pb2.RUN_STATE_STOPPING, self._stop_reason)
                # Leaving waits for the checkpoint and the evaluation under way; each has its own deadline.
            if not (self._config.checkpoint.final and self._training.applied > 0):
                return
            try:
                await self._training.save_checkpoint(self._config.deadlines.lost_s)
            except SluiceError as error:
                if error.reason != "NO_EPOCH" or lost > self._config.max_lost_epochs:
                    raise
                log.warning("the trainer restarted before the last checkpoint; it trains again what it lost", lost=lost)
            else:
                return

    async def _train(self, beside: asyncio.TaskGroup) -> None:
        """Dispatch and train side by side until the last batch is applied."""
        await self._mind_room()
        if not self._stop_reason:
            paused, short = self._dispatcher.paused, self._space.short
            state = orchestrator_pb2.RUN_STATE_PAUSED if paused else orchestrator_pb2.RUN_STATE_RUNNING
            self._status.enter(state, f"waits for {short}" if short else "")
        helpers = [
            beside.create_task(self._dispatcher.run(), name="dispatch"),
            beside.create_task(self._report_load(), name="load"),
            beside.create_task(self._look_at_disks(), name="room on disks"),
            beside.create_task(self._status.loop_lag.run(), name="loop lag"),
        ]

        async def on_step(step: AppliedStep) -> None:
            await self._reporter.show_step(step)
            if step.past:
                return
            now = self._clock()
            due = self._save_due.at(step.version.number, now) or self._much_kept()
            if due and (self._saving is None or self._saving.done()):
                self._kept_at_save = self._journal.kept_bytes
                self._saving = beside.create_task(self._save(), name="checkpoint")
            if self._evaluations is not None and self._evaluation_due.at(step.version.number, now):
                if self._evaluating is not None and not self._evaluating.done():
                    self._evaluations.failed += 1
                    log.warning("evaluation is left out: the last one is still under way", step=step.version.number)
                else:
                    evaluating = self._evaluate(self._evaluations, step.version)
                    self._evaluating = beside.create_task(evaluating, name="evaluation")

        await self._training.run(on_step, await self._reporter.recorded_steps())
        for each in helpers:
            each.cancel()
        self._status.waits_for.pop(_ROOM, None)

    def _much_kept(self) -> bool:
        """Return whether the journal has kept so much since the last checkpoint that another one is due.

        A checkpoint releases the payloads that the previous one covers. So between two checkpoints half of the journal's limit may be kept.
        """
        most = self._config.checkpoint.every_mb << 20
        return bool(most) and self._journal.kept_bytes - self._kept_at_save >= most // 2

    async def _evaluate(self, evaluations: Evaluations, version: Version) -> None:
        """Evaluate a version. Keep its checkpoint if it is the best. End the run if results no longer improve."""
        checkpoint = None
        if self._config.evaluation.keep_best:
            try:
                checkpoint = await self._training.save_checkpoint()
            except SluiceError as error:
                evaluations.failed += 1
                log.error("evaluation is left out: its checkpoint failed", error=str(error))  # noqa: TRY400 - says all
                return
            version = Version.from_proto(checkpoint.policy_version)
        await evaluations.run(version, exactly=checkpoint is not None)
        standing = evaluations.standing
        await self._keep_best(standing)
        if evaluations.plateau and self._training.applied < self._config.max_steps:
            self.stop(
                f"{standing.since} evaluations brought nothing better than {standing.metric} {standing.best:.6g} of version"
                f" {standing.version} (orchestrator.evaluation.patience)"
            )

    async def _keep_best(self, standing: Standing) -> None:
        """Let the trainer keep the checkpoint of the best evaluation. Repeat this after each evaluation, because a call may be lost."""
        if standing.best is None or not self._config.evaluation.keep_best:
            return
        name = f"step_{standing.version.number}"
        try:
            await self._training.keep_checkpoint(name, f"{standing.metric} {standing.best:.6g}, the best")
        except SluiceError as error:
            log.error("the best checkpoint is not kept", name=name, error=str(error))  # noqa: TRY400 - typed, says all

    async def _save(self) -> None:
        try:
            await self._training.save_checkpoint()
        except SluiceError as error:
            log.error("checkpoint failed; the older ones stay", error=str(error))  # noqa: TRY400 - typed, says all

    async def _report_load(self) -> None:
        while True:
            await self._clock.sleep(self._config.load_report_s)
            self._status.report_load()
            self._mind_share()
            self._mind_agents()

    async def _look_at_disks(self) -> None:
        while True:
            await self._clock.sleep(LOOK_S)
            await self._mind_room()

    async def _end(self) -> None:
        self._desk.end()
        await self._journal.durable()
        if not self._stop_reason:
            await self._training.note_left()
        await self._report("stopped" if self._stop_reason else "succeeded")
        self._status.enter(orchestrator_pb2.RUN_STATE_SUCCEEDED, self._stop_reason)

    async def _last_report(self, state: str) -> None:
        """Write the report of a run that ends early. If the disk refuses it, that must not hide why the run ended."""
        try:
            await self._report(state)
        except OSError as error:
            log.error("the report cannot be written", error=str(error))  # noqa: TRY400 - the run's own error follows

    async def _report(self, state: str) -> None:
        evaluations = self._evaluations
        await self._reporter.write_report(
            state,
            {
                "stop_reason": self._stop_reason,
                "evaluations_failed": evaluations.failed if evaluations else 0,
                "evaluation_held_all_replicas": evaluations.held_all_replicas if evaluations else False,
                "best_evaluation": _best(evaluations.standing) if evaluations else None,
            },
        )


def _best(standing: Standing) -> dict[str, object] | None:
    if standing.best is None:
        return None
    return {"metric": standing.metric, "value": standing.best, "version": str(standing.version)}


@dataclass
class Every:
    """Says when something is due that happens every N steps or seconds. Pure.

    Attributes:
        settings: Hold `every_steps` and `every_s`, which may change; 0 is never.
        last: When it was due last, in seconds.
    """

    settings: CheckpointConfig | EvaluationConfig
    last: float

    def at(self, step: int, now: float) -> bool:
        """Return whether it is due after a step, and note it."""
        steps, seconds = self.settings.every_steps, self.settings.every_s
        due = bool(steps and step % steps == 0) or bool(seconds and now - self.last >= seconds)
        if due:
            self.last = now
        return due


def _first(error: Exception) -> Exception:
    """Return the first of several errors in a group; the others followed from it."""
    return _first(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error
