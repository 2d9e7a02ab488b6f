"""What happens every so many steps beside training: checkpoints and evaluations, each one at a time."""

from __future__ import annotations

import asyncio

import structlog

from orchestrator_svc.pinned_evaluation import PinnedEvaluation
from orchestrator_svc.run_parts import RunParts
from sluice.rpc import SluiceError
from sluice.v1 import trainer_pb2
from sluice.versions import Version

__all__ = ["Milestones"]

log = structlog.get_logger(__name__)


class Milestones:
    """Asks for checkpoints and evaluations while the run goes on.

    Args:
        parts: The run.
        evaluation: Evaluates; None if the run never does.
    """

    def __init__(self, parts: RunParts, evaluation: PinnedEvaluation | None) -> None:
        self.failed_evaluations = 0
        self.held_all_replicas = False
        self._parts, self._evaluation = parts, evaluation
        self._saving: asyncio.Task[None] | None = None
        self._evaluating: asyncio.Task[None] | None = None

    def after_step(self, version: Version) -> None:
        """A batch was applied: begin what is due, unless the last one of its kind is still under way."""
        config = self._parts.config
        if _due(version.number, config.checkpoint.every_steps) and not _busy(self._saving):
            self._saving = asyncio.create_task(self._save_or_log())
        if self._evaluation is not None and _due(version.number, config.evaluation.every_steps):
            if _busy(self._evaluating):
                self.failed_evaluations += 1
                log.warning("evaluation is left out: the last one is still under way", step=version.number)
            else:
                self._evaluating = asyncio.create_task(self._evaluate(self._evaluation, version))

    async def finish(self) -> None:
        """Wait for what is under way; each has its own deadline."""
        for task in (self._saving, self._evaluating):
            if task is not None:
                await task

    async def cancel(self) -> None:
        """End what is under way."""
        for task in (self._saving, self._evaluating):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})

    async def save(self) -> trainer_pb2.Checkpoint:
        """Write a checkpoint; the journal then needs what came before the last one no more.

        Raises:
            SluiceError: if it cannot be written.
        """
        parts = self._parts
        await parts.journal.durable()
        saved = await parts.trainer.save_checkpoint(parts.journal.position, parts.config.checkpoint.deadline_s)
        version = Version.from_proto(saved.policy_version)
        parts.journal.cover(version.number)
        parts.status.checkpoint_written(saved.name, version)
        log.info("checkpoint", name=saved.name, version=str(version))
        return saved

    async def _save_or_log(self) -> None:
        try:
            await self.save()
        except SluiceError as error:
            log.error("checkpoint failed; the older ones stay", error=str(error))  # noqa: TRY400 - typed, says all

    async def _evaluate(self, evaluation: PinnedEvaluation, version: Version) -> None:
        parts = self._parts
        try:
            evaluated, result = await evaluation.run(version)
        except (SluiceError, TimeoutError) as error:
            self.failed_evaluations += 1
            log.error("evaluation failed", step=version.number, error=str(error) or "deadline")  # noqa: TRY400 - as above
            return
        except Exception:  # the run must not end by an evaluation, whatever a workflow or an environment raises
            self.failed_evaluations += 1
            log.exception("evaluation failed unexpectedly", step=version.number)
            return
        self.held_all_replicas |= evaluation.holds_all
        metrics = result.metrics()
        parts.status.evaluation_finished(evaluated, parts.config.environment, metrics)
        named = {f"eval/{name}": value for name, value in metrics.items()}
        await parts.recorder.scalars(evaluated.number, named)
        log.info("evaluation", version=str(evaluated), **{name: round(value, 4) for name, value in metrics.items()})


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _busy(task: asyncio.Task[None] | None) -> bool:
    return task is not None and not task.done()
