"""A run from the first look at its services to the report.

    draw task -> open group -> generate -> score -> group complete -> batch -> advantages -> SubmitBatch -> trained

`Dispatcher` does the first half, `Training` the second; checkpoints and evaluations are made beside them. `Run` starts each
as a task of its own and awaits it: whatever one of them raises ends the run.
"""

from __future__ import annotations

import asyncio

import structlog

from orchestrator_svc.config import OrchestratorConfig
from orchestrator_svc.dispatch import Dispatcher
from orchestrator_svc.evaluation import Evaluations
from orchestrator_svc.journal import Journal
from orchestrator_svc.replicas import ReplicaPool
from orchestrator_svc.reporter import RunReporter
from orchestrator_svc.scheduler import Scheduler
from orchestrator_svc.status import RunStatus
from orchestrator_svc.step_summary import AppliedStep
from orchestrator_svc.training import TrainerLink, Training
from sluice.rpc import SluiceError
from sluice.v1 import orchestrator_pb2
from sluice.versions import BASE, Version

__all__ = ["Checkpoints", "Run"]

log = structlog.get_logger(__name__)


class Checkpoints:
    """Asks the trainer for checkpoints, and tells the journal what they hold.

    Args:
        trainer: Writes them.
        journal: Forgets what two of them hold.
        status: Reports them.
        config: When they are due.
    """

    def __init__(self, trainer: TrainerLink, journal: Journal, status: RunStatus, config: OrchestratorConfig) -> None:
        self._trainer, self._journal, self._status, self._config = trainer, journal, status, config.checkpoint
        self._saving: asyncio.Task[None] | None = None

    def after_step(self, version: Version, beside: asyncio.TaskGroup) -> None:
        """Begin a checkpoint in the task group if one is due, unless the last one is still being written."""
        every = self._config.every_steps
        if every and version.number % every == 0 and (self._saving is None or self._saving.done()):
            self._saving = beside.create_task(self._save_or_log(), name="checkpoint")

    async def save(self) -> None:
        """Write a checkpoint.

        Raises:
            SluiceError: if it cannot be written.
        """
        await self._journal.durable()
        saved = await self._trainer.save_checkpoint(self._journal.position, self._config.deadline_s)
        version = Version.from_proto(saved.policy_version)
        self._journal.cover(version.number)
        self._status.checkpoint_written(saved.name, version)
        log.info("checkpoint", name=saved.name, version=str(version))

    async def _save_or_log(self) -> None:
        try:
            await self.save()
        except SluiceError as error:
            log.error("checkpoint failed; the older ones stay", error=str(error))  # noqa: TRY400 - typed, says all


class Run:
    """One run, or the rest of one that an earlier process began.

    Args:
        config: Settings of the orchestrator.
        scheduler: Groups and batches.
        journal: What survives a crash.
        status: What operators see.
        pool: The replicas; `run` polls them.
        dispatcher: Turns tasks into scored groups.
        training: Turns scored groups into applied batches.
        checkpoints: Asks for checkpoints.
        evaluations: Evaluates between steps; None if the run never does.
        reporter: Shows and records steps, and writes the report.
    """

    def __init__(
        self,
        *,
        config: OrchestratorConfig,
        scheduler: Scheduler,
        journal: Journal,
        status: RunStatus,
        pool: ReplicaPool,
        dispatcher: Dispatcher,
        training: Training,
        checkpoints: Checkpoints,
        evaluations: Evaluations | None,
        reporter: RunReporter,
    ) -> None:
        self._config, self._scheduler, self._journal = config, scheduler, journal
        self._status, self._pool = status, pool
        self._dispatcher, self._training, self._checkpoints = dispatcher, training, checkpoints
        self._evaluations, self._reporter = evaluations, reporter
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
                await self._begin()
                async with asyncio.TaskGroup() as beside:
                    await self._train(beside)
                    self._status.enter(orchestrator_pb2.RUN_STATE_STOPPING, self._stop_reason)
                    # Leaving waits for the checkpoint and the evaluation under way; each has its own deadline.
                await self._end()
                polling.cancel()
        except asyncio.CancelledError:
            await self._report("stopped")
            raise
        except Exception as failure:
            # Not `except*`, which would wrap what is raised here in a group of its own.
            error = _first(failure)
            self._status.error = str(error)
            self._status.enter(orchestrator_pb2.RUN_STATE_FAILED, str(error))
            await self._report("failed")
            if error is failure:
                raise
            raise error from failure

    def pause(self) -> None:
        """Start no more groups."""
        self._dispatcher.pause()
        if self._status.state == orchestrator_pb2.RUN_STATE_RUNNING:
            self._status.enter(orchestrator_pb2.RUN_STATE_PAUSED, "paused by an operator")

    def resume(self) -> None:
        """Start groups again."""
        self._dispatcher.resume()
        if self._status.state == orchestrator_pb2.RUN_STATE_PAUSED:
            self._status.enter(orchestrator_pb2.RUN_STATE_RUNNING, "resumed by an operator")

    def stop(self, reason: str) -> None:
        """End in order: the batches that are made are still trained, then come the last checkpoint and the report."""
        if not self._stop_reason:
            self._stop_reason = reason or "stopped by an operator"
            self._training.stop()
            self._status.enter(orchestrator_pb2.RUN_STATE_STOPPING, self._stop_reason)

    async def _begin(self) -> None:
        """Take over what an earlier process left, and wait until trainer and replicas are there."""
        recovery = await self._journal.recover()
        await self._dispatcher.recover(recovery)
        self._reporter.continue_from(recovery)
        if self._journal.resumes:
            log.info("resuming", drawn=len(recovery.drawn), ready=len(recovery.ready), batches=len(recovery.batches))
        await self._training.check_trainer()
        deadline_s = self._config.deadlines.start_s
        try:
            async with asyncio.timeout(deadline_s):
                await self._pool.choose(BASE)
        except TimeoutError as error:
            reasons = "; ".join(f"{each.target} {each.why_not()}" for each in self._pool.replicas)
            raise SluiceError.unavailable(
                "NO_REPLICA",
                f"no rollout replica within {deadline_s:g} s (peers.rollout): {reasons or 'no address resolves'}",
            ) from error

    async def _train(self, beside: asyncio.TaskGroup) -> None:
        """Dispatch and train side by side until the last batch is applied."""
        if not self._stop_reason:
            paused = self._dispatcher.paused
            self._status.enter(orchestrator_pb2.RUN_STATE_PAUSED if paused else orchestrator_pb2.RUN_STATE_RUNNING)
        helpers = [
            beside.create_task(self._dispatcher.run(), name="dispatch"),
            beside.create_task(self._report_load(), name="load"),
        ]

        async def on_step(step: AppliedStep) -> None:
            await self._reporter.step(step)
            if not step.past:
                self._checkpoints.after_step(step.version, beside)
                if self._evaluations is not None:
                    self._evaluations.after_step(step.version, beside)

        await self._training.run(on_step)
        for each in helpers:
            each.cancel()

    async def _report_load(self) -> None:
        while True:
            await asyncio.sleep(self._config.load_report_s)
            self._status.report_load()

    async def _end(self) -> None:
        if self._config.checkpoint.final and self._scheduler.applied > 0:
            await self._checkpoints.save()
        await self._journal.durable()
        await self._report("stopped" if self._stop_reason else "succeeded")
        self._status.enter(orchestrator_pb2.RUN_STATE_SUCCEEDED, self._stop_reason)

    async def _report(self, state: str) -> None:
        await self._reporter.report(state, self._stop_reason, self._evaluations)


def _first(error: Exception) -> Exception:
    """Return the first error where several came together; the others followed from it."""
    return _first(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error
