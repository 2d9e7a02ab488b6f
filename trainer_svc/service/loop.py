"""The main loop of an epoch: batches in, versions out."""

from __future__ import annotations

import asyncio
from functools import partial
from time import perf_counter

import structlog

from sluice.rpc import SluiceError
from sluice.v1 import trainer_pb2
from sluice.v1.trainer_pb2 import StepReport
from sluice.versions import Version
from trainer_svc.config import TrainerConfig
from trainer_svc.service.compute_thread import ComputeThread
from trainer_svc.service.consumption import Batch
from trainer_svc.service.learner import Applied, Learner
from trainer_svc.service.publication import Publication
from trainer_svc.service.queue import BatchQueue
from trainer_svc.service.reports import StepLog
from trainer_svc.service.saving import Saving
from trainer_svc.service.step_report import Waits, step_report

__all__ = ["TrainingLoop"]

log = structlog.get_logger(__name__)


class TrainingLoop:
    """One epoch of training.

    Takes the next batch, drops or cuts what is too old, gives the survivors their advantages, makes one optimizer step,
    reports what became of each trajectory, and publishes the new version in the background. The next step may run while
    a version is pushed, but its weights are encoded, and the step after it begins, when that push has ended.

    Args:
        learner: The policy.
        compute: The thread in which it lives.
        queue: Accepted batches.
        publication: Where versions go.
        steps: Where reports go.
        saving: Writes checkpoints.
        config: The trainer's settings.
    """

    def __init__(
        self,
        *,
        learner: Learner,
        compute: ComputeThread,
        queue: BatchQueue,
        publication: Publication,
        steps: StepLog,
        saving: Saving,
        config: TrainerConfig,
    ) -> None:
        self.phase: trainer_pb2.TrainerPhase.ValueType = trainer_pb2.TRAINER_PHASE_WAITING
        self._learner, self._compute, self._queue = learner, compute, queue
        self._publication, self._steps, self._saving = publication, steps, saving
        self._config = config
        self._skipping_in_a_row = 0

    async def run(self) -> None:
        """Train until cancelled.

        Raises:
            SluiceError: what ended the epoch: a version that could not be published, a step that took too long, or too many
                steps in a row that were not finite.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._publication.run())
                tasks.create_task(self._train())
        except ExceptionGroup as group:
            raise _first(group) from group

    async def _train(self) -> None:
        push_wait_s = 0.0
        while True:
            waiting = perf_counter()
            self.phase = trainer_pb2.TRAINER_PHASE_WAITING
            batch = await self._queue.next()
            push_wait_s = await self._step(batch, Waits(batch_s=perf_counter() - waiting, push_s=push_wait_s))

    async def _step(self, batch: Batch, waits: Waits) -> float:
        """One batch; returns the seconds that its version waited for the one before to leave."""
        self.phase = trainer_pb2.TRAINER_PHASE_TRAINING
        applied = await self._compute.run(
            partial(self._learner.apply, batch), deadline_s=self._config.deadlines.step_s, what="a training step"
        )
        version = self._queue.finish()
        self._report(step_report(batch, version, applied, waits, self._publication.last_push))
        self._check_finite(applied)
        waited_s = await self._publish()
        await self._save_if_due(version)
        return waited_s

    def _report(self, report: StepReport) -> None:
        self._steps.append(report)
        metrics = report.metrics
        log.info(
            "step",
            version=f"{report.policy_version.epoch}.{report.policy_version.number}",
            seconds=round(report.duration.ToMilliseconds() / 1000, 3),
            skipped=report.skipped,
            **{name: round(metrics[name], 4) for name in ("loss", "reward_mean", "staleness_max") if name in metrics},
        )

    def _check_finite(self, applied: Applied) -> None:
        self._skipping_in_a_row = self._skipping_in_a_row + 1 if applied.skipped_steps else 0
        if self._skipping_in_a_row >= self._config.max_skipped_steps:
            raise SluiceError.failed_precondition(
                "NON_FINITE_STEPS",
                f"{self._skipping_in_a_row} batches in a row had an optimizer step whose loss or gradient is not finite"
                " (trainer.max_skipped_steps): lower trainer.lr (trainer.critic.lr if the critic's steps were skipped), look"
                " at rewards and log-probabilities, go back to a checkpoint",
            )
        if applied.skipped_steps:
            log.warning(
                "optimizer steps skipped: loss or gradient not finite",
                skipped_steps=applied.skipped_steps,
                batches_in_a_row=self._skipping_in_a_row,
            )

    async def _save_if_due(self, version: Version) -> None:
        every = self._config.checkpoint.every_steps
        if every and version.number % every == 0:
            self.phase = trainer_pb2.TRAINER_PHASE_SAVING
            await self._saving.begin_or_log()

    async def _publish(self) -> float:
        """Encode the new version once the one before is out, and offer it; returns the seconds of waiting."""
        start = perf_counter()
        self.phase = trainer_pb2.TRAINER_PHASE_PUBLISHING
        await self._publication.idle()
        waited_s = perf_counter() - start
        deadlines = self._config.deadlines
        update = await self._compute.run(
            partial(self._learner.encode, self._publication.publisher, deadlines.push_s),
            deadline_s=deadlines.step_s,
            what="comparing the weights with the version before",
        )
        self._publication.offer(update)
        return waited_s


def _first(group: ExceptionGroup[Exception]) -> Exception:
    """The first error itself; the others followed from it."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, ExceptionGroup) else error
