"""Checkpoints between two batches: on request, and every so many steps. Training goes on while one is written."""

from __future__ import annotations

import asyncio
from functools import partial

import grpc
import structlog

from sluice.rpc import SluiceError
from sluice.v1.trainer_pb2 import Checkpoint
from trainer_svc.config import TrainerConfig
from trainer_svc.service.compute_thread import ComputeThread
from trainer_svc.service.crew import OUT_OF_STEP
from trainer_svc.service.learner import Learner

__all__ = ["Saving"]

log = structlog.get_logger(__name__)


class Saving:
    """Has the state copied in the compute thread, where that falls between two batches by itself, and written beside it.

    One checkpoint is written at a time; the next begins when it is done.

    Args:
        learner: The policy.
        compute: The thread in which it lives.
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
        # A caller who leaves does not stop the writing.
        await asyncio.wait({writing}, timeout=self._deadlines.save_s)
        if not writing.done():
            raise self._too_slow(self._deadlines.save_s)
        return writing.result()

    async def begin_or_log(self) -> None:
        """Begin a checkpoint on schedule, and return when the state is copied; what goes wrong is noted but ends nothing.

        Raises:
            SluiceError: if it leaves several ranks out of step: one is lost, or none knows how far the others are.
        """
        try:
            await self._begin(journal_position=0)
        except SluiceError as error:
            self._note(error)
            if self._learner.crew.several and error.reason in OUT_OF_STEP:
                raise

    async def settled(self, timeout_s: float) -> None:
        """Return when no checkpoint is being written, however that ended.

        Raises:
            SluiceError: DEADLINE_EXCEEDED if it goes on for longer.
        """
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=timeout_s)
            if not self._writing.done():
                raise self._too_slow(timeout_s)

    async def ended(self, grace_s: float) -> bool:
        """Give a checkpoint that is being written time to end; returns whether it did."""
        try:
            await self.settled(grace_s)
        except SluiceError:
            log.warning("a checkpoint was not written in time, leaving it behind", grace_s=grace_s)
            return False
        return True

    async def _begin(self, journal_position: int) -> asyncio.Task[Checkpoint]:
        """Copy the state when the checkpoint before is written; the task ends when this one is."""
        async with self._beginning:
            await self.settled(self._deadlines.save_s)
            written = await self._compute.run(
                partial(self._learner.begin_save, journal_position),
                deadline_s=self._deadlines.step_s + self._deadlines.save_s,  # a step may be in progress
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
            log.error("checkpoint failed, training goes on", error=str(error), exc_info=error)

    def _too_slow(self, waited_s: float) -> SluiceError:
        return SluiceError(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "CHECKPOINT_DEADLINE",
            f"a checkpoint is still being written after {waited_s:g} s: is the disk below {self._learner.checkpoints.directory} hanging? Raise trainer.deadlines.save_s if it is only slow",
        )
