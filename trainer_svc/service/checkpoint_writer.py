"""Checkpoints between two batches, on request and on schedule; training continues while one is written."""

from __future__ import annotations

import asyncio
from functools import partial

import grpc
import structlog

from sluice.rpc import SluiceError
from sluice.v1.trainer_pb2 import Checkpoint
from trainer_svc.service.learner import ComputeThread, Learner
from trainer_svc.service.rank_group import OUT_OF_STEP

log = structlog.get_logger(__name__)


class CheckpointWriter:
    """Write one checkpoint at a time; the next begins when it is done.

    The compute thread copies the state, between two batches. The files are written beside it.
    """

    def __init__(self, learner: Learner, compute: ComputeThread) -> None:
        self._learner, self._compute = learner, compute
        self._deadlines = learner.config.deadlines
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
        await self._wait(writing, self._deadlines.save_s)
        return writing.result()

    async def begin_scheduled(self) -> None:
        """Begin a scheduled checkpoint and return when the state is copied. Note a failure in `last_error`.

        Raises:
            SluiceError: if a failure leaves several ranks out of step: one is lost, or it is not known how far they are.
        """
        try:
            await self._begin(journal_position=0)
        except SluiceError as error:
            self._note(error)
            if self._learner.ranks is not None and error.reason in OUT_OF_STEP:
                raise

    async def settled(self, timeout_s: float) -> None:
        """Return when no checkpoint is being written, whatever the outcome.

        Raises:
            SluiceError: DEADLINE_EXCEEDED if it takes longer.
        """
        if self._writing is not None:
            await self._wait(self._writing, timeout_s)

    async def ended(self, grace_s: float) -> bool:
        """Wait for a checkpoint that is being written. Return whether it ended in time."""
        try:
            await self.settled(grace_s)
        except SluiceError:
            log.warning("the checkpoint in progress did not finish in time; abandoning it", grace_s=grace_s)
            return False
        return True

    async def _wait(self, writing: asyncio.Task[Checkpoint], timeout_s: float) -> None:
        """Wait for a checkpoint. If the caller is cancelled, the writing continues."""
        await asyncio.wait({writing}, timeout=timeout_s)
        if not writing.done():
            raise SluiceError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "CHECKPOINT_DEADLINE",
                f"a checkpoint is still being written after {timeout_s:g} s: is the disk below"
                f" {self._learner.checkpoints.directory} hanging? Raise trainer.deadlines.save_s if it is only slow",
            )

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
                f"the checkpoint could not be written ({error}); older ones are untouched: free space below"
                f" {self._learner.checkpoints.directory}",
                retry_after_s=60.0,
            ) from error

    def _note(self, error: BaseException | None) -> None:
        self.last_error = "" if error is None else str(error)
        if error is not None:
            log.error("checkpoint failed; training continues", error=str(error), exc_info=error)
