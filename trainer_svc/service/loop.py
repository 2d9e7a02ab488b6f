"""The main loop of an epoch: batches in, versions and checkpoints out."""

from __future__ import annotations

import asyncio
from functools import partial
from time import perf_counter

import grpc
import structlog

from sluice.rpc import SluiceError
from sluice.v1 import trainer_pb2
from sluice.v1.trainer_pb2 import Checkpoint, StepReport
from sluice.versions import Version
from trainer_svc.config import TrainerConfig
from trainer_svc.service.admission import BatchQueue
from trainer_svc.service.compute_thread import ComputeThread
from trainer_svc.service.learner import Applied, Learner
from trainer_svc.service.publication import Publication
from trainer_svc.service.rank_group import OUT_OF_STEP
from trainer_svc.service.stale_filter import Batch
from trainer_svc.service.step_reports import StepLog, Waits, step_report

__all__ = ["CheckpointWriter", "TrainingLoop"]

log = structlog.get_logger(__name__)


class TrainingLoop:
    """One epoch of training.

    Take the next batch, filter it by staleness, estimate missing advantages, make its optimizer steps, report what became of
    each trajectory, publish the new version in the background, and save a checkpoint if one is due. The next batch may be
    trained while a version is pushed; its weights are encoded when that push has ended.

    Args:
        learner: The policy.
        compute: The compute thread.
        queue: Accepted batches.
        publication: Publishes versions.
        steps: The log of reports.
        checkpoints: Writes checkpoints.
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
        checkpoints: CheckpointWriter,
        config: TrainerConfig,
    ) -> None:
        self.phase: trainer_pb2.TrainerPhase.ValueType = trainer_pb2.TRAINER_PHASE_WAITING
        self._learner, self._compute, self._queue = learner, compute, queue
        self._publication, self._steps, self._checkpoints = publication, steps, checkpoints
        self._config = config
        self._skipping_in_a_row = 0

    async def run(self) -> None:
        """Train until cancelled.

        Raises:
            SluiceError: what ended the epoch: a version could not be published, a step took too long, or too many batches
                in a row had a step that was not finite.
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
        """Train on one batch. Return the seconds that its version waited for the push of the one before."""
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
            await self._checkpoints.begin_scheduled()

    async def _publish(self) -> float:
        """Encode the new version when the one before is pushed, and offer it. Return the seconds of waiting."""
        start = perf_counter()
        self.phase = trainer_pb2.TRAINER_PHASE_PUBLISHING
        await self._publication.idle()
        waited_s = perf_counter() - start
        deadlines = self._config.deadlines
        offer = await self._compute.run(
            partial(self._learner.encode, self._publication.publisher, deadlines.push_s),
            deadline_s=deadlines.step_s,
            what="comparing the weights with the version before",
        )
        self._publication.offer(offer)
        return waited_s


def _first(group: ExceptionGroup[Exception]) -> Exception:
    """Return the first error; the others followed from it."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, ExceptionGroup) else error


class CheckpointWriter:
    """Write checkpoints between two batches, on request and on schedule. Training continues while one is written.

    The state is copied in the compute thread, which falls between two batches by itself. One checkpoint is written at a
    time; the next begins when it is done.

    Args:
        learner: The policy.
        compute: The compute thread.
        config: The trainer's settings.
    """

    def __init__(self, learner: Learner, compute: ComputeThread, config: TrainerConfig) -> None:
        self._learner, self._compute = learner, compute
        self._deadlines = config.deadlines
        self._beginning = asyncio.Lock()
        self._writing: asyncio.Task[Checkpoint] | None = None
        self.last_error = ""
        """Why the last checkpoint was not written; empty if it was."""

    @property
    def active(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._writing is not None and not self._writing.done()

    async def save(self, journal_position: int) -> Checkpoint:
        """Write a checkpoint of the present version, and return when it is on disk.

        Raises:
            SluiceError: RESOURCE_EXHAUSTED if the disk is full, DEADLINE_EXCEEDED if it takes too long.
        """
        writing = await self._begin(journal_position)
        # A caller that is cancelled does not stop the writing.
        await asyncio.wait({writing}, timeout=self._deadlines.save_s)
        if not writing.done():
            raise self._too_slow(self._deadlines.save_s)
        return writing.result()

    async def begin_scheduled(self) -> None:
        """Begin a scheduled checkpoint and return when the state is copied. A failure is noted in `last_error`.

        Raises:
            SluiceError: if a failure leaves several ranks out of step: one is lost, or it is not known how far they are.
        """
        try:
            await self._begin(journal_position=0)
        except SluiceError as error:
            self._note(error)
            if self._learner.ranks.several and error.reason in OUT_OF_STEP:
                raise

    async def settled(self, timeout_s: float) -> None:
        """Return when no checkpoint is being written, whatever the outcome.

        Raises:
            SluiceError: DEADLINE_EXCEEDED if it takes longer.
        """
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=timeout_s)
            if not self._writing.done():
                raise self._too_slow(timeout_s)

    async def ended(self, grace_s: float) -> bool:
        """Wait for a checkpoint that is being written. Return whether it ended in time."""
        try:
            await self.settled(grace_s)
        except SluiceError:
            log.warning("a checkpoint was not written in time, leaving it behind", grace_s=grace_s)
            return False
        return True

    async def _begin(self, journal_position: int) -> asyncio.Task[Checkpoint]:
        """Copy the state after the checkpoint before is written. The returned task ends when this one is written."""
        async with self._beginning:
            await self.settled(self._deadlines.save_s)
            written = await self._compute.run(
                partial(self._learner.begin_save, journal_position),
                deadline_s=self._deadlines.step_s + self._deadlines.save_s,  # a step may be running
                what="copying the state for a checkpoint",
            )
            self._writing = asyncio.create_task(self._finish(asyncio.wrap_future(written)))
            self._writing.add_done_callback(lambda task: None if task.cancelled() else self._note(task.exception()))
            return self._writing

    async def _finish(self, written: asyncio.Future[Checkpoint]) -> Checkpoint:
        try:
            return await written
        except (ValueError, RuntimeError) as error:
            raise SluiceError.unavailable(
                "CHECKPOINT_NOT_WRITTEN",
                f"the ranks could not write a checkpoint together ({error}); older ones are untouched",
                retry_after_s=60.0,
            ) from error
        except OSError as error:
            raise SluiceError.resource_exhausted(
                "CHECKPOINT_NOT_WRITTEN",
                f"the checkpoint could not be written ({error}); older ones are untouched: free space below {self._learner.checkpoints.directory}",
                retry_after_s=60.0,
            ) from error

    def _note(self, error: BaseException | None) -> None:
        self.last_error = "" if error is None else str(error)
        if error is not None:
            log.error("checkpoint failed; training continues", error=str(error), exc_info=error)

    def _too_slow(self, waited_s: float) -> SluiceError:
        return SluiceError(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "CHECKPOINT_DEADLINE",
            f"a checkpoint is still being written after {waited_s:g} s: is the disk below {self._learner.checkpoints.directory} hanging? Raise trainer.deadlines.save_s if it is only slow",
        )
