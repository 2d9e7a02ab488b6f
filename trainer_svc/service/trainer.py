"""The life of a trainer: load, begin an epoch, train, begin another."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from functools import partial

import grpc
import structlog

from sluice.config import CommonConfig
from sluice.rpc import SluiceError
from sluice.tasks import discard_outcome
from sluice.v1 import trainer_pb2
from sluice.versions import Version
from trainer_svc.config import TrainerConfig
from trainer_svc.service.admission import BatchQueue
from trainer_svc.service.compute_thread import ComputeThread
from trainer_svc.service.learner import Learner, Restored
from trainer_svc.service.loop import CheckpointWriter, TrainingLoop
from trainer_svc.service.publication import PolicyPublisher, Publication
from trainer_svc.service.rank_group import OUT_OF_STEP
from trainer_svc.service.step_reports import StepLog, held_report

__all__ = ["Trainer"]

log = structlog.get_logger(__name__)


class Trainer:
    """One policy and the epoch that trains it. Runs on one event loop; what blocks runs in the compute thread.

    Args:
        common: The run's settings.
        config: The trainer's settings.
        publisher: Pushes versions to weight sync.
        learner: The policy; by default one that this process trains alone.
        compute: The compute thread; by default a new one.
    """

    def __init__(
        self,
        common: CommonConfig,
        config: TrainerConfig,
        publisher: PolicyPublisher,
        learner: Learner | None = None,
        compute: ComputeThread | None = None,
    ) -> None:
        self.common, self.config = common, config
        self.learner = learner or Learner(common, config)
        self.queue: BatchQueue | None = None
        self.steps: StepLog | None = None
        self._publisher = publisher
        self._compute = compute or ComputeThread()
        self.checkpoints = CheckpointWriter(self.learner, self._compute, config)
        self._publication = Publication(publisher, config.deadlines.push_s)
        self._loop: TrainingLoop | None = None
        self._training: asyncio.Task[None] | None = None
        self._opening: tuple[int, asyncio.Task[Restored]] | None = None
        self._failure: SluiceError | None = None

    async def load(self) -> None:
        """Load the base model.

        Raises:
            SluiceError: DEADLINE_EXCEEDED if it takes too long.
        """
        await self._compute.run(self.learner.load, deadline_s=self.config.deadlines.load_s, what="loading the model")
        self.queue = BatchQueue(self.config.queue_batches, self.learner.tokenizer_digest)
        log.info("model loaded", model=self.common.model, tokenizer_digest=self.learner.tokenizer_digest)

    @property
    def phase(self) -> trainer_pb2.TrainerPhase.ValueType:
        """What the trainer is doing."""
        if self.queue is None:
            return trainer_pb2.TRAINER_PHASE_STARTING
        if self._failure is not None:
            return trainer_pb2.TRAINER_PHASE_FAILED
        if self._loop is None:
            return trainer_pb2.TRAINER_PHASE_READY
        idle = self._loop.phase == trainer_pb2.TRAINER_PHASE_WAITING
        return trainer_pb2.TRAINER_PHASE_SAVING if idle and self.checkpoints.active else self._loop.phase

    @property
    def last_error(self) -> str:
        """Why the epoch ended, or why the last checkpoint was not written; empty if neither happened."""
        return str(self._failure) if self._failure is not None else self.checkpoints.last_error

    @property
    def published(self) -> Version | None:
        """Newest version that weight sync has committed in this epoch."""
        return self._publication.published

    def accepting(self) -> BatchQueue:
        """The queue of batches.

        Raises:
            SluiceError: UNAVAILABLE while the model loads, FAILED_PRECONDITION after a failure.
        """
        if self.queue is None:
            raise SluiceError.unavailable("STARTING", "the trainer is loading its model: retry", retry_after_s=1.0)
        if self._failure is not None:
            raise _failed(self._failure)
        return self.queue

    async def begin_epoch(self, epoch: int, checkpoint: str) -> Restored:
        """Restore a checkpoint, publish it as the epoch's first version, and accept batches.

        Args:
            epoch: Newer than every epoch of the run, or the present one, which answers again.
            checkpoint: Name of the checkpoint; empty for the newest one, or the base model.

        Raises:
            SluiceError: as the contract says of BeginEpoch.
        """
        if self.queue is None:
            raise SluiceError.unavailable("STARTING", "the trainer is loading its model: retry", retry_after_s=1.0)
        if self.learner.ranks.broken is not None:
            raise self.learner.ranks.broken
        present, opening = self._opening or (0, None)
        if opening is None or epoch != present or (opening.done() and not _succeeded(opening)):
            if opening is not None and not opening.done():
                raise SluiceError.aborted("EPOCH_OPENING", f"epoch {present} is being opened: wait for it, then retry")
            self._check_newer(epoch, present)
            opening = asyncio.create_task(self._open(epoch, checkpoint))
            discard_outcome(opening)
            self._opening = (epoch, opening)
        # A caller that is cancelled does not stop the opening; asking again for the same epoch waits for it.
        restored = await asyncio.shield(opening)
        if self._failure is not None and epoch == self.learner.version.epoch:
            raise _failed(self._failure)
        return restored

    def _check_newer(self, epoch: int, present: int) -> None:
        newest = self.learner.lineage.newest_epoch
        if epoch <= newest and epoch != present:
            raise SluiceError.failed_precondition(
                "OLD_EPOCH",
                f"epoch {epoch} is not newer than epoch {newest} of run {self.common.run}: begin a greater one, or use a new run name",
            )
        if epoch < 1:
            raise SluiceError.invalid_argument("epoch", "epochs count from 1; 0 is the base model")

    async def _open(self, epoch: int, checkpoint: str) -> Restored:
        await self._close()
        deadlines = self.config.deadlines
        await self.checkpoints.settled(deadlines.save_s)  # it may be the checkpoint to restore
        # A step of the epoch before may still be running.
        restored = await self._compute.run(
            partial(self.learner.restore, epoch, checkpoint),
            deadline_s=deadlines.step_s + deadlines.load_s,
            what="restoring the checkpoint",
        )
        update = await self._compute.run(
            partial(self.learner.encode, self._publisher, deadlines.push_s),
            deadline_s=deadlines.push_s + deadlines.load_s,
            what="copying the weights",
        )
        self._publication = Publication(self._publisher, deadlines.push_s)
        try:
            await self._publication.publish(update)
        except SluiceError as error:
            self._check_ranks(error)
            if error.code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
                raise SluiceError.unavailable("WEIGHTSYNC_UNAVAILABLE", error.message, retry_after_s=1.0) from error
            raise
        self._start(restored)
        return restored

    def _start(self, restored: Restored) -> None:
        queue = self.accepting()
        self.steps = StepLog(restored.version.number, [held_report(each) for each in restored.held])
        queue.admission.open(restored.version, restored.known)
        self._loop = TrainingLoop(
            learner=self.learner,
            compute=self._compute,
            queue=queue,
            publication=self._publication,
            steps=self.steps,
            checkpoints=self.checkpoints,
            config=self.config,
        )
        # An empty context: the epoch outlives the request that began it, whose id must not appear in its logs and calls.
        self._training = asyncio.create_task(self._loop.run(), context=contextvars.Context())
        self._training.add_done_callback(self._ended)
        log.info("epoch began", version=str(restored.version), origin=str(restored.origin))

    def _ended(self, training: asyncio.Task[None]) -> None:
        """Report a failure to everyone who watches steps, asks for the state or submits a batch."""
        if training.cancelled() or training is not self._training:
            return
        error = training.exception()
        if error is None:
            return
        if isinstance(error, SluiceError):
            self._failure = error
        else:
            reason = f"{type(error).__name__}: {error}"
            self._failure = SluiceError(grpc.StatusCode.INTERNAL, "STEP_FAILED", f"a training step failed: {reason}")
        with contextlib.suppress(SluiceError):
            self._check_ranks(self._failure)
        self.learner.abandon()
        log.error("training failed", error=str(self._failure), exc_info=error)
        if self.queue is not None:
            self.queue.admission.close()
        if self.steps is not None:
            self.steps.end(_failed(self._failure))

    def _check_ranks(self, error: SluiceError) -> None:
        """Give up the ranks after an error that leaves some of them in the middle of a command that others have left.

        Raises:
            SluiceError: UNAVAILABLE, if several ranks have to start again.
        """
        ranks = self.learner.ranks
        if ranks.several and error.reason in OUT_OF_STEP:
            raise ranks.give_up(error) from error

    async def _close(self) -> None:
        """End the present epoch. The orchestrator sends its queued batches again in the next one."""
        self.learner.abandon()
        training, self._training, self._loop = self._training, None, None
        if training is not None:
            training.cancel()
            await asyncio.wait({training})
        if self.queue is not None:
            self.queue.admission.close()
        if self.steps is not None:
            self.steps.end(SluiceError.aborted("EPOCH_CHANGED", "another epoch begins: watch again when it has begun"))
        self._failure = None

    async def save(self, journal_position: int) -> trainer_pb2.Checkpoint:
        """Write a checkpoint between two batches.

        Raises:
            SluiceError: FAILED_PRECONDITION without an epoch, UNAVAILABLE if the ranks are out of step, otherwise as `CheckpointWriter.save`.
        """
        if self.accepting().admission.version is None:
            raise SluiceError.failed_precondition("NO_EPOCH", "no epoch is open: call BeginEpoch first")
        try:
            return await self.checkpoints.save(journal_position)
        except SluiceError as error:
            self._check_ranks(error)
            raise

    async def stop(self, grace_s: float) -> bool:
        """End the epoch: abandon a step; give other work of the compute thread and a checkpoint `grace_s` seconds to end.

        Returns:
            Whether the threads ended. If not, the interpreter must not be finalised while they run.
        """
        if self._opening is not None and not self._opening[1].done():
            self._opening[1].cancel()
            await asyncio.wait({self._opening[1]})
        await self._close()
        saved, computed = await asyncio.gather(self.checkpoints.ended(grace_s), self._compute.stop(grace_s))
        return saved and computed


def _succeeded(task: asyncio.Task[Restored]) -> bool:
    return not task.cancelled() and task.exception() is None


def _failed(cause: SluiceError) -> SluiceError:
    return SluiceError.failed_precondition("TRAINER_FAILED", f"training stopped: {cause.message}; begin a newer epoch")
