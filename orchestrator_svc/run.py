"""The main job, from the first look at the services to the report.

    lease task -> open group -> generate -> score -> group complete -> advantages -> batch -> SubmitBatch -> trained

`Dispatcher` does the first half whenever the staleness bound and a replica allow it, `Training` the second; when the
trainer is lost, training begins again with a new epoch while groups under way go on.
"""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from orchestrator_svc.dispatch import Dispatcher
from orchestrator_svc.journal import JournalError
from orchestrator_svc.milestones import Milestones
from orchestrator_svc.pinned_evaluation import PinnedEvaluation
from orchestrator_svc.run_parts import RunParts
from orchestrator_svc.scheduler import Reason, Stage
from orchestrator_svc.training import Training
from sluice.rpc import SluiceError
from sluice.v1 import orchestrator_pb2
from sluice.versions import Version

__all__ = ["Run"]

log = structlog.get_logger(__name__)


class Run:
    """One run, or the rest of one that an earlier process began.

    Args:
        parts: What it is made of.
        evaluation: Evaluates between steps; None if the run never does.
    """

    def __init__(self, parts: RunParts, evaluation: PinnedEvaluation | None) -> None:
        self._parts = parts
        self._stop_reason = ""
        self._dispatcher = Dispatcher(parts)
        self._milestones = Milestones(parts, evaluation)
        self._training = Training(parts, self._dispatcher.requeue, self._milestones.after_step)

    async def run(self) -> None:
        """Run to the last step.

        Raises:
            SluiceError: what ended the run early; the report says so too.
            JournalError: if the journal cannot be read or written.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                pool = tasks.create_task(self._parts.pool.run(), name="replicas")
                try:
                    await self._begin()
                    await self._work()
                    await self._end()
                finally:
                    await self._milestones.cancel()
                pool.cancel()
        except asyncio.CancelledError:
            await self._report("stopped")
            raise
        except Exception as failure:
            # Not `except*`, which would wrap what is raised here in a group of its own.
            error = _first(failure)
            self._parts.status.error = str(error)
            self._parts.status.enter(orchestrator_pb2.RUN_STATE_FAILED, str(error))
            await self._report("failed")
            if error is failure:
                raise
            raise error from failure

    def pause(self) -> None:
        """Start no more groups."""
        self._parts.paused = True
        if self._parts.status.state == orchestrator_pb2.RUN_STATE_RUNNING:
            self._parts.status.enter(orchestrator_pb2.RUN_STATE_PAUSED, "paused by an operator")

    def resume(self) -> None:
        """Start groups again."""
        self._parts.paused = False
        if self._parts.status.state == orchestrator_pb2.RUN_STATE_PAUSED:
            self._parts.status.enter(orchestrator_pb2.RUN_STATE_RUNNING, "resumed by an operator")
        self._parts.changed.notify()

    def stop(self, reason: str) -> None:
        """End in order: the batches that are made are still trained, then come the last checkpoint and the report."""
        scheduler = self._parts.scheduler
        if not self._stop_reason:
            self._stop_reason = reason or "stopped by an operator"
            scheduler.max_steps = min(scheduler.max_steps, scheduler.next_batch - 1)
            self._parts.status.enter(orchestrator_pb2.RUN_STATE_STOPPING, self._stop_reason)
        self._parts.changed.notify()

    async def _begin(self) -> None:
        """Take up what an earlier process left, and wait until there is someone to work with."""
        parts = self._parts
        recovery = await parts.journal.recover()
        parts.scheduler.recover(recovery.epochs, recovery.ready, recovery.accounting)
        parts.elapsed_before_s, parts.generated_before = recovery.elapsed_s, recovery.generated
        self._dispatcher.recover(recovery)
        for group in recovery.ready:
            await self._check_readable(group.number)
        if parts.journal.resumes:
            log.info("resuming", drawn=len(recovery.drawn), ready=len(recovery.ready), batches=len(recovery.batches))
        await parts.trainer.check_estimator(parts.config.advantage, parts.config.deadlines.start_s)
        await self._wait_for_replica(parts.config.deadlines.start_s)

    async def _check_readable(self, number: int) -> None:
        parts = self._parts
        try:
            await parts.journal.read_group(number)
        except JournalError as error:
            log.warning("a damaged group is dropped; its task is drawn again", group=number, error=str(error))
            group = parts.scheduler.drop(number, Reason.JOURNAL_DAMAGED)
            self._dispatcher.requeue(group.position)
            parts.journal.drop(number, Reason.JOURNAL_DAMAGED, was_accepted=group.trajectories)

    async def _wait_for_replica(self, deadline_s: float) -> None:
        pool = self._parts.pool
        try:
            async with asyncio.timeout(deadline_s):
                await pool.choose(Version(0, 0))
        except TimeoutError as error:
            reasons = "; ".join(f"{each.target} {each.why_not()}" for each in pool.replicas) or "no address resolves"
            raise SluiceError.unavailable(
                "NO_REPLICA", f"no rollout replica within {deadline_s:g} s (peers.rollout): {reasons}"
            ) from error

    async def _work(self) -> None:
        """Dispatch and train side by side until the last batch is applied."""
        parts = self._parts
        if not self._stop_reason:
            running, paused = orchestrator_pb2.RUN_STATE_RUNNING, orchestrator_pb2.RUN_STATE_PAUSED
            parts.status.enter(paused if parts.paused else running)
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(self._dispatcher.run()), tasks.create_task(self._report_load())]
            await self._training.run()
            for each in beside:
                each.cancel()

    async def _report_load(self) -> None:
        while True:
            await asyncio.sleep(self._parts.config.load_report_s)
            self._parts.status.report_load()

    async def _end(self) -> None:
        parts = self._parts
        parts.status.enter(orchestrator_pb2.RUN_STATE_STOPPING, self._stop_reason)
        await self._milestones.finish()
        if parts.config.checkpoint.final and parts.scheduler.applied > 0:
            await self._milestones.save()
        await parts.journal.durable()
        await self._report("stopped" if self._stop_reason else "succeeded")
        parts.status.enter(orchestrator_pb2.RUN_STATE_SUCCEEDED, self._stop_reason)

    async def _report(self, state: str) -> None:
        report = await self._parts.recorder.report(self._facts(state))
        log.info("report", state=state, steps=report["steps"], wall_s=report["wall_s"])

    def _facts(self, state: str) -> dict[str, Any]:
        parts, scheduler = self._parts, self._parts.scheduler
        dropped = scheduler.accounting.dropped
        generated = parts.generated_before + parts.engine.counts.of_policy()
        if state == "succeeded":
            # Nothing will train them; a continued run would.
            left = sum(each.trajectories for each in scheduler.groups.values() if each.stage is not Stage.RUNNING)
            dropped[Reason.RUN_ENDED] += left
        return {
            "run": parts.common.run,
            "state": state,
            "error": parts.status.error,
            "stop_reason": self._stop_reason,
            "seed": parts.common.seed,
            "model": parts.common.model,
            "environment": parts.config.environment,
            "steps": scheduler.applied,
            "epochs": scheduler.epoch,
            "wall_s": round(parts.elapsed_s, 3),
            "max_staleness": parts.common.max_staleness,
            "trajectories_accepted": scheduler.accounting.accepted,
            "trajectories_trained": scheduler.accounting.trained,
            "trajectories_dropped": {reason: count for reason, count in dropped.items() if count},
            "groups_failed": dict(scheduler.accounting.failed_groups),
            "tokens_generated": generated["tokens"],
            "requests": generated["requests"],
            "requests_spanning_versions": generated["spanning"],
            "generation_retries": parts.engine.counts.retried,
            "samples_continued": parts.engine.counts.continued,
            "environment_calls_hung": parts.environment_calls.hung,
            "evaluations_failed": self._milestones.failed_evaluations,
            "evaluation_held_all_replicas": self._milestones.held_all_replicas,
        }


def _first(error: Exception) -> Exception:
    """The first error itself where several came together; the others followed from it."""
    return _first(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error
