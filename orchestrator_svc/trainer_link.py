"""The orchestrator's side of TrainerService: opens epochs, hands over batches, follows steps, asks for checkpoints.

Whatever fails because the trainer restarted or changed its mind ends as `EpochLostError`: the run then opens a new epoch and sends
again what the trainer's checkpoint lacks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

import grpc
import structlog

from orchestrator_svc.config import DeadlinesConfig
from sluice.advantages import check_sides
from sluice.client import TrainerClient
from sluice.rpc import SluiceError
from sluice.v1 import tokens_pb2, trainer_pb2
from sluice.versions import Version

__all__ = ["EpochLostError", "TrainerLink"]

log = structlog.get_logger(__name__)

_RETRY_S = 0.5
_TRANSIENT = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.ABORTED}
_ENDED_PHASES = {
    trainer_pb2.TRAINER_PHASE_STARTING,
    trainer_pb2.TRAINER_PHASE_READY,
    trainer_pb2.TRAINER_PHASE_FAILED,
}

_Answer = TypeVar("_Answer")


class EpochLostError(Exception):
    """The trainer no longer trains the epoch that it was given."""


class TrainerLink:
    """Talks to one trainer.

    Args:
        client: Its client.
        run: Name of the run.
        deadlines: How long to wait.
    """

    def __init__(self, client: TrainerClient, run: str, deadlines: DeadlinesConfig) -> None:
        self._client, self._run, self._deadlines = client, run, deadlines

    async def wait_until_there(self, deadline_s: float) -> trainer_pb2.GetTrainerStateResponse:
        """Wait until the trainer has loaded its model.

        Raises:
            SluiceError: the last failure, if it is not there in time.
        """

        async def ask() -> trainer_pb2.GetTrainerStateResponse:
            state = await self._client.state(self._run)
            if state.phase == trainer_pb2.TRAINER_PHASE_STARTING:
                raise SluiceError.unavailable("STARTING", "the trainer is still loading its model")
            return state

        return await self._persist(ask, deadline_s, "the trainer cannot be reached")

    async def check_estimator(self, advantage: str, deadline_s: float) -> None:
        """Wait for the trainer, and see that it estimates the advantages that this run leaves to it, and no others.

        Raises:
            SluiceError: FAILED_PRECONDITION with the remedy; otherwise as `wait_until_there`.
        """
        own = (await self.wait_until_there(deadline_s)).advantage_estimator
        try:
            check_sides(advantage, own)
        except ValueError as error:
            raise SluiceError.failed_precondition("OTHER_ESTIMATOR", str(error)) from error

    async def last_batch_in(self, epoch: int, applied: int) -> int | None:
        """Return the last batch that the trainer accepted in an epoch, if it still trains that epoch.

        Waits for a trainer that cannot be reached.

        Args:
            epoch: The epoch; 0 is none.
            applied: Batches that its weights must hold at least.

        Returns:
            Number of the batch, applied or queued; None if the trainer left the epoch or lost some of its batches.

        Raises:
            SluiceError: if the trainer cannot be reached in time.
        """
        state = await self.wait_until_there(self._deadlines.lost_s)
        present = Version.from_proto(state.policy_version)
        if epoch == 0 or present.epoch != epoch or present.number < applied or state.phase in _ENDED_PHASES:
            return None
        return max(present.number, state.next_sequence_no - 1)

    async def begin_epoch(self, epoch: int) -> trainer_pb2.BeginEpochResponse:
        """Open an epoch, waiting for a trainer that is not there yet.

        Raises:
            SluiceError: if it refuses, or cannot be reached in time.
        """

        async def ask() -> trainer_pb2.BeginEpochResponse:
            return await self._client.begin_epoch(self._run, epoch, timeout_s=self._deadlines.begin_epoch_s)

        return await self._persist(ask, self._deadlines.begin_epoch_s, f"the trainer does not begin epoch {epoch}")

    async def submit(
        self,
        header: trainer_pb2.BatchHeader,
        trajectories: Sequence[tokens_pb2.Trajectory],
        on_wait: Callable[[], None] = lambda: None,
    ) -> trainer_pb2.SubmitBatchResponse:
        """Hand over a batch, waiting while the trainer's queue is full.

        Raises:
            EpochLostError: if the trainer trains another epoch, or went away.
            SluiceError: if the batch itself is at fault.
        """
        while True:
            try:
                return await self._client.submit_batch(header, trajectories, timeout_s=self._deadlines.submit_s)
            except SluiceError as error:
                if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    on_wait()
                    await asyncio.sleep(error.retry_after_s or _RETRY_S)
                    continue
                await self._explain(error, header.target_version.epoch)
                log.warning("batch is handed over again", batch=header.batch_id, error=str(error))
            await asyncio.sleep(_RETRY_S)

    async def steps(self, epoch: int, from_number: int) -> AsyncIterator[trainer_pb2.StepReport]:
        """Reports of the epoch's batches, each once and in order, across broken connections.

        Raises:
            EpochLostError: if the trainer trains another epoch, or went away.
            SluiceError: if reports were lost.
        """
        number = from_number
        while True:
            try:
                async for answer in self._client.watch_steps(self._run, number):
                    if answer.step.policy_version.epoch != epoch:
                        raise EpochLostError(f"the trainer is in epoch {answer.step.policy_version.epoch}")
                    number = answer.step.policy_version.number + 1
                    yield answer.step
                log.info("the trainer ended the stream of steps; watching again")
            except SluiceError as error:
                await self._explain(error, epoch)
                log.warning("the stream of steps broke; watching again", error=str(error))
            await asyncio.sleep(_RETRY_S)

    async def past_steps(self, first: int, last: int) -> dict[int, trainer_pb2.StepReport]:
        """Return the reports of applied batches by number, without those that the trainer no longer keeps.

        Args:
            first: Number of the first batch.
            last: Number of the last one; the weights hold it.

        Raises:
            EpochLostError: if the trainer went away meanwhile.
        """
        found: dict[int, trainer_pb2.StepReport] = {}
        try:
            oldest = (await self._client.state(self._run)).oldest_reported_number
            if oldest > last:
                return found
            async for answer in self._client.watch_steps(self._run, max(first, oldest)):
                found[answer.step.policy_version.number] = answer.step
                if answer.step.policy_version.number >= last:
                    break
        except SluiceError as error:
            if error.code is not grpc.StatusCode.NOT_FOUND:
                raise EpochLostError(error.message) from error
        return found

    async def save_checkpoint(self, position: int, deadline_s: float) -> trainer_pb2.Checkpoint:
        """Write a checkpoint.

        Raises:
            SluiceError: if it cannot be written.
        """
        return (await self._client.save_checkpoint(self._run, position, timeout_s=deadline_s)).checkpoint

    async def newest_checkpoint(self) -> trainer_pb2.Checkpoint | None:
        """The newest complete checkpoint, if there is one."""
        state = await self._client.state(self._run)
        return state.newest_checkpoint if state.HasField("newest_checkpoint") else None

    async def _explain(self, error: SluiceError, epoch: int) -> None:
        """Find out whether a failure means that the epoch is over.

        Raises:
            EpochLostError: if so.
            SluiceError: the failure, if repeating cannot help.
        """
        state = await self.wait_until_there(self._deadlines.lost_s)
        present = Version.from_proto(state.policy_version)
        if present.epoch != epoch or state.phase in _ENDED_PHASES:
            raise EpochLostError(
                f"{error.message} ({state.last_error})" if state.last_error else error.message
            ) from error
        if error.code not in _TRANSIENT:
            raise error

    async def _persist(self, ask: Callable[[], Awaitable[_Answer]], deadline_s: float, what: str) -> _Answer:
        """Ask until there is an answer or the deadline."""
        give_up = time.monotonic() + deadline_s
        while True:
            try:
                return await ask()
            except SluiceError as error:
                if error.code not in _TRANSIENT:
                    raise
                if time.monotonic() >= give_up:
                    raise SluiceError(
                        error.code, error.reason, f"{what} within {deadline_s:g} s: {error.message}"
                    ) from error
                await asyncio.sleep(error.retry_after_s or _RETRY_S)
