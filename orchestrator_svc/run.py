"""A run from the first look at its services to the report.

    draw task -> open group -> generate -> score -> group complete -> advantages -> batch -> SubmitBatch -> trained

`Dispatcher` does the first half, `Training` the second; checkpoints and evaluations are made beside them. `Run` starts each
as a task of its own and awaits it: whatever one of them raises ends the run.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import structlog

from orchestrator_svc.config import OrchestratorConfig
from orchestrator_svc.dispatch import Dispatcher
from orchestrator_svc.envs.calls import EnvironmentCalls
from orchestrator_svc.evaluation import Evaluations
from orchestrator_svc.journal import Journal, JournalError, LiveTrajectories, Recovery
from orchestrator_svc.notifier import Notifier
from orchestrator_svc.recorder import Recorder
from orchestrator_svc.replicas import GenerationCounts, ReplicaPool
from orchestrator_svc.scheduler import Reason, Scheduler, Stage
from orchestrator_svc.status import RunStatus, TrajectoryHistory
from orchestrator_svc.training import AppliedStep, TrainerLink, Training
from sluice.config import CommonConfig
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
        common: Settings that all services of the run share.
        config: Settings of the orchestrator.
        scheduler: Groups and batches.
        journal: What survives a crash.
        trajectories: Trajectories of live groups.
        status: What operators see.
        history: The last trajectories that were applied.
        pool: The replicas; `run` polls them.
        trainer: The trainer.
        dispatcher: Turns tasks into scored groups.
        training: Turns scored groups into applied batches.
        checkpoints: Asks for checkpoints.
        evaluations: Evaluates between steps; None if the run never does.
        recorder: Writes the files of the run.
        counts: What was generated.
        calls: Where the environment's code runs.
        changed: Wakes the loops that wait for something to change.
    """

    def __init__(
        self,
        *,
        common: CommonConfig,
        config: OrchestratorConfig,
        scheduler: Scheduler,
        journal: Journal,
        trajectories: LiveTrajectories,
        status: RunStatus,
        history: TrajectoryHistory,
        pool: ReplicaPool,
        trainer: TrainerLink,
        dispatcher: Dispatcher,
        training: Training,
        checkpoints: Checkpoints,
        evaluations: Evaluations | None,
        recorder: Recorder,
        counts: GenerationCounts,
        calls: EnvironmentCalls,
        changed: Notifier,
    ) -> None:
        self.status, self.history = status, history
        self._common, self._config, self._scheduler, self._journal = common, config, scheduler, journal
        self._trajectories, self._pool, self._trainer = trajectories, pool, trainer
        self._dispatcher, self._training, self._checkpoints = dispatcher, training, checkpoints
        self._evaluations, self._recorder, self._counts, self._calls = evaluations, recorder, counts, calls
        self._changed = changed
        self._stop_reason = ""
        self._generated_before: Counter[str] = Counter()
        self._last_step = time.monotonic()
        self._counted: Counter[str] = Counter()
        self._shares = status.shares()

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
                    self.status.enter(orchestrator_pb2.RUN_STATE_STOPPING, self._stop_reason)
                    # Leaving waits for the checkpoint and the evaluation under way; each has its own deadline.
                await self._end()
                polling.cancel()
        except asyncio.CancelledError:
            await self._report("stopped")
            raise
        except Exception as failure:
            # Not `except*`, which would wrap what is raised here in a group of its own.
            error = _first(failure)
            self.status.error = str(error)
            self.status.enter(orchestrator_pb2.RUN_STATE_FAILED, str(error))
            await self._report("failed")
            if error is failure:
                raise
            raise error from failure

    def pause(self) -> None:
        """Start no more groups."""
        self._dispatcher.pause()
        if self.status.state == orchestrator_pb2.RUN_STATE_RUNNING:
            self.status.enter(orchestrator_pb2.RUN_STATE_PAUSED, "paused by an operator")

    def resume(self) -> None:
        """Start groups again."""
        self._dispatcher.resume()
        if self.status.state == orchestrator_pb2.RUN_STATE_PAUSED:
            self.status.enter(orchestrator_pb2.RUN_STATE_RUNNING, "resumed by an operator")
        self._changed.notify()

    def stop(self, reason: str) -> None:
        """End in order: the batches that are made are still trained, then come the last checkpoint and the report."""
        if not self._stop_reason:
            self._stop_reason = reason or "stopped by an operator"
            self._scheduler.max_steps = min(self._scheduler.max_steps, self._scheduler.next_batch - 1)
            self.status.enter(orchestrator_pb2.RUN_STATE_STOPPING, self._stop_reason)
        self._changed.notify()

    async def _begin(self) -> None:
        """Take over what an earlier process left, and wait until trainer and replicas are there."""
        recovery = await self._journal.recover()
        await self._recover(recovery)
        if self._journal.resumes:
            log.info("resuming", drawn=len(recovery.drawn), ready=len(recovery.ready), batches=len(recovery.batches))
        deadline_s = self._config.deadlines.start_s
        await self._trainer.check_estimator(self._config.advantage, deadline_s)
        try:
            async with asyncio.timeout(deadline_s):
                await self._pool.choose(BASE)
        except TimeoutError as error:
            reasons = "; ".join(f"{each.target} {each.why_not()}" for each in self._pool.replicas)
            raise SluiceError.unavailable(
                "NO_REPLICA",
                f"no rollout replica within {deadline_s:g} s (peers.rollout): {reasons or 'no address resolves'}",
            ) from error

    async def _recover(self, recovery: Recovery) -> None:
        self._scheduler.recover(recovery.epochs, recovery.ready, recovery.accounting)
        self._dispatcher.recover(recovery)
        self.status.continue_from(recovery.elapsed_s)
        self._generated_before = recovery.generated
        for group in recovery.ready:
            try:
                await self._trajectories.get(group.number)
            except JournalError as error:
                log.warning("a damaged group is dropped; its task is drawn again", group=group.number, error=str(error))
                self._scheduler.drop(group.number, Reason.JOURNAL_DAMAGED)
                self._journal.drop(group.number, Reason.JOURNAL_DAMAGED, was_accepted=group.trajectories)
                self._dispatcher.requeue(group.position)

    async def _train(self, beside: asyncio.TaskGroup) -> None:
        """Dispatch and train side by side until the last batch is applied."""
        if not self._stop_reason:
            paused = self._dispatcher.paused
            self.status.enter(orchestrator_pb2.RUN_STATE_PAUSED if paused else orchestrator_pb2.RUN_STATE_RUNNING)
        helpers = [
            beside.create_task(self._dispatcher.run(), name="dispatch"),
            beside.create_task(self._report_load(), name="load"),
        ]

        async def on_step(step: AppliedStep) -> None:
            await self._report_step(step)
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
            self.status.report_load()

    async def _report_step(self, step: AppliedStep) -> None:
        """Show and record an applied batch."""
        summary, version = step.summary, step.version
        metrics = dict(summary.metrics)
        if not step.past:
            metrics |= self._since_last_step() | self._pool.update_metrics(version)
        self.history.add(step.records)
        self.status.step_finished(version, metrics)
        await self._recorder.step(version.number, metrics, step.records, self._scheduler.lineage)
        shown = {name: round(metrics[name], 4) for name in ("reward/mean", "staleness/mean") if name in metrics}
        log.info("step", version=str(version), trained=summary.trained, dropped=dict(summary.dropped), **shown)

    def _since_last_step(self) -> dict[str, float]:
        """Return rates and counts of the time since the last applied batch."""
        now, counts = time.monotonic(), self._counts.of_policy()
        more, self._counted = counts - self._counted, counts
        idle, blocked, rollout_idle = (share.take(now) for share in self._shares)
        elapsed, self._last_step = now - self._last_step, now
        return {
            "time/step_s": elapsed,
            "tokens/generated": float(more["tokens"]),
            "tokens/generated_per_s": more["tokens"] / elapsed if elapsed > 0 else 0.0,
            "requests/count": float(more["requests"]),
            "requests/spanning": float(more["spanning"]),
            "load/trainer_idle": idle,
            "load/dispatch_blocked": blocked,
            "load/rollout_idle": rollout_idle,
        }

    async def _end(self) -> None:
        if self._config.checkpoint.final and self._scheduler.applied > 0:
            await self._checkpoints.save()
        await self._journal.durable()
        await self._report("stopped" if self._stop_reason else "succeeded")
        self.status.enter(orchestrator_pb2.RUN_STATE_SUCCEEDED, self._stop_reason)

    async def _report(self, state: str) -> None:
        report = await self._recorder.report(self._facts(state))
        log.info("report", state=state, steps=report["steps"], wall_s=report["wall_s"])

    def _facts(self, state: str) -> dict[str, Any]:
        """Return what the metrics of the steps do not hold, for the report."""
        scheduler, accounting = self._scheduler, self._scheduler.accounting
        dropped = accounting.dropped
        generated = self._generated_before + self._counts.of_policy()
        if state == "succeeded":
            # Nothing will train them; a continued run would.
            left = sum(each.trajectories for each in scheduler.groups.values() if each.stage is not Stage.RUNNING)
            dropped[Reason.RUN_ENDED] += left
        return {
            "run": self._common.run,
            "state": state,
            "error": self.status.error,
            "stop_reason": self._stop_reason,
            "seed": self._common.seed,
            "model": self._common.model,
            "environment": self._config.environment,
            "steps": scheduler.applied,
            "epochs": scheduler.epoch,
            "wall_s": round(self.status.elapsed_s, 3),
            "max_staleness": self._common.max_staleness,
            "trajectories_accepted": accounting.accepted,
            "trajectories_trained": accounting.trained,
            "trajectories_dropped": {reason: count for reason, count in dropped.items() if count},
            "groups_failed": dict(accounting.failed_groups),
            "tokens_generated": generated["tokens"],
            "requests": generated["requests"],
            "requests_spanning_versions": generated["spanning"],
            "generation_retries": self._counts.retried,
            "samples_continued": self._counts.continued,
            "environment_calls_hung": self._calls.hung,
            "evaluations_failed": self._evaluations.failed if self._evaluations else 0,
            "evaluation_held_all_replicas": self._evaluations.held_all_replicas if self._evaluations else False,
        }


def _first(error: Exception) -> Exception:
    """Return the first error where several came together; the others followed from it."""
    return _first(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error
