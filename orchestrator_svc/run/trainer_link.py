"""The orchestrator's client of TrainerService: its calls wait while the trainer is away, and raise an error when its epoch is lost.

`applied_fact` and `report_of` convert the trainer's report on a batch into a fact, and back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import grpc
import structlog

from orchestrator_svc.config import DeadlinesConfig
from orchestrator_svc.journal.facts import Reason
from orchestrator_svc.journal.ledger import Batch
from orchestrator_svc.run.setting_aside import BatchRefusedError
from sluice.client import TrainerClient
from sluice.clock import CLOCK, Clock
from sluice.rpc import SluiceError
from sluice.v1 import journal_pb2, tokens_pb2, trainer_pb2
from sluice.versions import ENDLESS, Lineage, Version

log = structlog.get_logger(__name__)

_Answer = TypeVar("_Answer")

RETRY_S = 0.5
"""Seconds between two attempts if the trainer does not name a time."""

_TRANSIENT = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.ABORTED}
"""Errors that waiting can cure. `step_s` bounds how long a batch is repeated, `lost_s` how long a trainer may be away."""

_UNUSABLE = {grpc.StatusCode.DATA_LOSS, grpc.StatusCode.NOT_FOUND}
"""Errors of a trainer that cannot read a checkpoint: try an older one."""

_ENDED_PHASES = {trainer_pb2.TRAINER_PHASE_STARTING, trainer_pb2.TRAINER_PHASE_READY, trainer_pb2.TRAINER_PHASE_FAILED}


class EpochLostError(Exception):
    """The trainer no longer trains the epoch that it was given."""


class TrainerLink:
    """Calls one trainer, and waits for it while it is away.

    Attributes:
        away: Number of failed calls that wait for the trainer to answer again.
        away_s: Seconds that such calls have waited so far.
    """

    def __init__(self, client: TrainerClient, run: str, deadlines: DeadlinesConfig, clock: Clock = CLOCK) -> None:
        self.client, self.run, self._deadlines, self._clock = client, run, deadlines, clock
        self.away, self.away_s = 0, 0.0

    async def wait_until_there(self, deadline_s: float) -> trainer_pb2.GetTrainerStateResponse:
        """Wait until the trainer has loaded its model.

        Raises:
            SluiceError: the last failure, if it is not there in time.
        """

        async def ask() -> trainer_pb2.GetTrainerStateResponse:
            state = await self.client.state(self.run)
            if state.phase == trainer_pb2.TRAINER_PHASE_STARTING:
                raise SluiceError.unavailable("STARTING", "the trainer is still loading its model")
            return state

        return await self._persist(ask, deadline_s, f"the trainer at {self.client.target} cannot be reached")

    async def last_batch_in(self, epoch: int, applied: int) -> int | None:
        """Return the last batch that the trainer accepted in an epoch, if it still trains that epoch.

        Waits for a trainer that cannot be reached.

        Args:
            epoch: The epoch; 0 if the run has none yet.
            applied: Least number of batches that its weights must hold.

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

    async def begin_epoch(self, epoch: int, position: int, lineage: Lineage) -> trainer_pb2.BeginEpochResponse:
        """Open an epoch from the newest checkpoint that the journal has reached, waiting for a trainer that is not there yet.

        Do not take a checkpoint of weights that an earlier rollback took back: the batches after the rollback differ.

        Args:
            epoch: The epoch.
            position: Number of the last fact of the journal.
            lineage: The epochs so far.

        Raises:
            SluiceError: if it refuses, cannot be reached in time, or has no checkpoint that fits although it has some.
        """
        limit, what = self._deadlines.begin_epoch_s, f"the trainer does not begin epoch {epoch}"
        found = await self._persist(partial(self.client.checkpoints, self.run), limit, what)
        end = Version(lineage.newest_epoch, ENDLESS)
        checkpoints = [each for each in found if not lineage.is_retired(Version.from_proto(each.policy_version), end)]
        names = [each.name for each in checkpoints if each.journal_position <= position]
        for each in checkpoints:
            if each.journal_position > position:
                log.warning(
                    "a checkpoint is skipped: it belongs to facts that the journal does not have",
                    checkpoint=each.name,
                    its_position=each.journal_position,
                    last_fact=position,
                )
        if checkpoints and not names:
            raise SluiceError.failed_precondition(
                "CHECKPOINTS_AHEAD",
                f"all checkpoints of the trainer ({', '.join(each.name for each in checkpoints)}) belong to facts behind fact"
                f" {position}, the last one of the journal: put the run's journal back, or begin a new run (--run NAME)",
            )
        for name in names or [""]:
            ask = partial(self.client.begin_epoch, self.run, epoch, checkpoint=name, timeout_s=limit)
            try:
                return await self._persist(ask, limit, what)
            except SluiceError as error:
                if error.code not in _UNUSABLE or name == names[-1]:
                    raise
                log.warning("a checkpoint is skipped: it cannot be read", checkpoint=name, error=str(error))
        raise AssertionError("a trainer answers or refuses")

    async def save(self, position: int, deadline_s: float, *, patience_s: float) -> trainer_pb2.SaveCheckpointResponse:
        """Let the trainer write a checkpoint that belongs to a position of the journal. Wait `patience_s` seconds if it is away.

        Raises:
            SluiceError: if it cannot be written, or the trainer is not there in time.
        """
        ask = partial(self.client.save_checkpoint, self.run, position, timeout_s=deadline_s)
        return await self._persist(ask, patience_s, "the trainer writes no checkpoint")

    async def submit_batch(
        self, header: trainer_pb2.BatchHeader, trajectories: Sequence[tokens_pb2.Trajectory]
    ) -> trainer_pb2.SubmitBatchResponse:
        """Submit a batch, waiting while the trainer's queue is full.

        Raises:
            BatchRefusedError: if the content of the batch is the cause.
            EpochLostError: if the trainer trains another epoch, or went away.
            SluiceError: if there is another cause that waiting does not cure, such as settings.
        """
        waits = ""
        while True:
            try:
                return await self.client.submit_batch(header, trajectories, timeout_s=self._deadlines.submit_s)
            except SluiceError as error:
                if (refusal := BatchRefusedError.of(error)) is not None:
                    raise refusal from error
                if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    if error.reason != waits:  # log once: the call is repeated twice a second while the queue is full
                        waits = error.reason
                        log.info("a batch waits for the trainer", batch=header.batch_id, reason=str(error))
                    await self._clock.sleep(error.retry_after_s or RETRY_S)
                    continue
                await self._explain(error, header.target_version.epoch)
                log.warning("batch is submitted again", batch=header.batch_id, error=str(error))
            await self._clock.sleep(RETRY_S)

    async def steps(self, epoch: int, from_number: int) -> AsyncIterator[trainer_pb2.StepReport]:
        """Yield the reports of the epoch's batches, each once and in order, across broken connections.

        Raises:
            EpochLostError: if the trainer trains another epoch, or went away.
            SluiceError: if reports were lost.
        """
        number = from_number
        while True:
            try:
                async for answer in self.client.watch_steps(self.run, number):
                    if answer.step.policy_version.epoch != epoch:
                        raise EpochLostError(f"the trainer is in epoch {answer.step.policy_version.epoch}")
                    number = answer.step.policy_version.number + 1
                    yield answer.step
                log.info("the trainer ended the stream of steps; watching again")
            except SluiceError as error:
                await self._explain(error, epoch)
                log.warning("the stream of steps broke; watching again", error=str(error))
            await self._clock.sleep(RETRY_S)

    async def past_steps(self, first: int, last: int) -> dict[int, trainer_pb2.StepReport]:
        """Return the reports of the applied batches `first` to `last` by number, without those that the trainer no longer keeps.

        Raises:
            EpochLostError: if the trainer went away meanwhile.
        """
        found: dict[int, trainer_pb2.StepReport] = {}
        try:
            oldest = (await self.client.state(self.run)).oldest_reported_number
            if oldest > last:
                return found
            reports = self.client.watch_steps(self.run, max(first, oldest), timeout_s=self._deadlines.lost_s)
            async for answer in reports:
                found[answer.step.policy_version.number] = answer.step
                if answer.step.policy_version.number >= last:
                    break
        except SluiceError as error:
            if error.code is not grpc.StatusCode.NOT_FOUND:
                raise EpochLostError(error.message) from error
        return found

    async def _explain(self, error: SluiceError, epoch: int) -> None:
        """Find out whether a failure means that the epoch is over.

        Raises:
            EpochLostError: if so.
            SluiceError: the failure, if repeating cannot help.
        """
        since = self._clock()
        self.away += 1
        try:
            state = await self.wait_until_there(self._deadlines.lost_s)
        finally:
            self.away -= 1
            self.away_s += self._clock() - since
        present = Version.from_proto(state.policy_version)
        if present.epoch != epoch or state.phase in _ENDED_PHASES:
            raise EpochLostError(
                f"{error.message} ({state.last_error})" if state.last_error else error.message
            ) from error
        if error.code not in _TRANSIENT:
            raise error

    async def _persist(self, ask: Callable[[], Awaitable[_Answer]], deadline_s: float, what: str) -> _Answer:
        """Ask until there is an answer or the deadline."""
        give_up = self._clock() + deadline_s
        while True:
            try:
                return await ask()
            except SluiceError as error:
                if error.code not in _TRANSIENT:
                    raise
                if self._clock() >= give_up:
                    raise SluiceError(
                        error.code,
                        error.reason,
                        f"{what} within {deadline_s:g} s: {error.message}",
                        retry_after_s=error.retry_after_s,
                    ) from error
                await self._clock.sleep(error.retry_after_s or RETRY_S)


def applied_fact(batch: Batch, step: trainer_pb2.StepReport) -> journal_pb2.BatchApplied:
    """Return the outcome of each trajectory of a batch, including those that the trainer did not report."""
    results = {result.trajectory_id: result for result in step.results}
    fact = journal_pb2.BatchApplied(sequence_no=step.sequence_no, policy_version=step.policy_version)
    for trajectory_id in batch.trajectory_ids:
        result = results.get(trajectory_id)
        if result is not None and result.outcome == tokens_pb2.TRAJECTORY_OUTCOME_TRAINED:
            fact.trained.append(trajectory_id)
        else:
            reason = result.reason if result is not None else Reason.NOT_REPORTED
            fact.dropped[reason].trajectory_ids.append(trajectory_id)
    return fact


def report_of(applied: journal_pb2.BatchApplied) -> trainer_pb2.StepReport:
    """Rebuild a trainer's report from the fact of an applied batch: the outcomes, without numbers of tokens."""
    trained, dropped = tokens_pb2.TRAJECTORY_OUTCOME_TRAINED, tokens_pb2.TRAJECTORY_OUTCOME_DROPPED
    step = trainer_pb2.StepReport(sequence_no=applied.sequence_no, policy_version=applied.policy_version)
    for each in applied.trained:
        step.results.add(trajectory_id=each, outcome=trained)
    for reason, lost in applied.dropped.items():
        for each in lost.trajectory_ids:
            step.results.add(trajectory_id=each, outcome=dropped, reason=reason)
    return step
