"""The gRPC TrainerService. A batch that arrives is received, checked, reduced to the tokens that are trained, and queued."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import grpc

from sluice.advantages import ESTIMATORS, TRAINER_ESTIMATORS, UnfitRewardsError
from sluice.config.decide import check_sides
from sluice.digests import batch_digest, trajectory_digest
from sluice.limits import MAX_BATCH_BYTES, MAX_NAME, MAX_REPORT_BYTES, MAX_TRAJECTORIES, report_bytes
from sluice.rows_at_fault import ROWS, ranges, rows_of
from sluice.rpc import SluiceError
from sluice.v1 import tokens_pb2, trainer_pb2, trainer_pb2_grpc
from sluice.v1.trainer_pb2 import SubmitBatchRequest, SubmitBatchResponse
from sluice.versions import BASE, Lineage, Version
from trainer_svc.config import IN_BATCH, TrainerConfig
from trainer_svc.objectives.config import ResolvedObjective
from trainer_svc.service.admission import RefusedError, Ticket
from trainer_svc.service.batches import Batch, Expectations, applied_to, convert, judge, of_settings
from trainer_svc.service.trainer import Trainer

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

PAGE_SIZE = 100
"""Checkpoints per page if the caller does not set a size."""

MAX_REASON = 1024
"""Most characters of the reason for keeping a checkpoint."""

MAX_STREAMS = 2
"""Batches that may arrive at once: one, and its retry while the server has not noticed yet that the first stream broke."""

RETRY_AFTER_S = 0.5
"""Seconds that a client should wait before it retries: a fraction of a short step."""


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """Serve one trainer.

    Args:
        trainer: The trainer; it may still be loading.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._streams = 0
        self._entering = asyncio.Lock()

    async def BeginEpoch(  # noqa: N802 - gRPC's name
        self, request: trainer_pb2.BeginEpochRequest, context: Context
    ) -> trainer_pb2.BeginEpochResponse:
        """Open an epoch."""
        del context
        self._check_run(request.run)
        restored = await self._trainer.begin_epoch(request.epoch, request.checkpoint)
        return trainer_pb2.BeginEpochResponse(
            policy_version=restored.version.to_proto(),
            restored_version=restored.origin.to_proto(),
            last_batch_id=restored.last_batch_id,
            next_sequence_no=restored.version.number + 1,
        )

    async def SubmitBatch(  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[SubmitBatchRequest], context: Context
    ) -> SubmitBatchResponse:
        """Receive a batch (a header, then trajectories in parts), and queue it."""
        del context
        if self._streams >= MAX_STREAMS:
            raise SluiceError.resource_exhausted(
                "TOO_MANY_SUBMISSIONS",
                f"{self._streams} batches are arriving already: send one after another",
                RETRY_AFTER_S,
            )
        self._streams += 1
        deadline_s = self._trainer.config.deadlines.submit_s
        try:
            async with asyncio.timeout(deadline_s):
                return await self._submit(request_iterator)
        except TimeoutError as error:
            raise SluiceError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "SUBMIT_DEADLINE",
                f"the batch did not arrive within {deadline_s:g} s (trainer.deadlines.submit_s): send it again",
            ) from error
        finally:
            self._streams -= 1

    async def _submit(self, requests: AsyncIterator[SubmitBatchRequest]) -> SubmitBatchResponse:
        admission = self._trainer.accepting()
        header = await _first(requests)
        self._check_run(header.run)
        ticket = _ticket(header)
        with _typed_refusal():
            admission.check(ticket)  # refuse the batch before its trajectories are sent
        check_header(header, self._trainer.config)
        trajectories = await receive(header, requests)
        digests = await asyncio.to_thread(lambda: [trajectory_digest(each) for each in trajectories])
        ticket = replace(ticket, content_digest=batch_digest(digests))
        async with self._entering:
            with _typed_refusal():
                duplicate = admission.check(ticket)
                if not duplicate:
                    learner = self._trainer.learner
                    judging = partial(
                        admitted,
                        header,
                        digests,
                        trajectories,
                        config=self._trainer.config,
                        vocabulary=learner.engine.network.vocabulary,
                        lineage=learner.checkpoints.lineage,
                    )
                    batch = await asyncio.to_thread(judging)
                    rows = [each.sequence for each in batch.decisions]
                    await asyncio.to_thread(learner.shortages.check, ticket.batch_id, rows)
                    duplicate = self._trainer.admit(ticket, batch)
            return SubmitBatchResponse(batch_id=ticket.batch_id, queued_batches=admission.queued, duplicate=duplicate)

    async def GetTrainerState(  # noqa: N802 - gRPC's name
        self, request: trainer_pb2.GetTrainerStateRequest, context: Context
    ) -> trainer_pb2.GetTrainerStateResponse:
        """Report version, queue and health."""
        del context
        self._check_run(request.run)
        trainer = self._trainer
        admission = trainer.admission
        if admission is None:
            return trainer_pb2.GetTrainerStateResponse(phase=trainer.phase)
        return trainer_pb2.GetTrainerStateResponse(
            phase=trainer.phase,
            policy_version=(admission.version or trainer.learner.version).to_proto(),
            published_version=(trainer.published or BASE).to_proto(),
            queued_batches=admission.queued,
            next_sequence_no=admission.next_sequence_no,
            tokenizer_digest=trainer.learner.tokenizer_digest,
            optimizer_steps=trainer.learner.optimizer_steps,
            newest_checkpoint=trainer.learner.newest_checkpoint,
            last_error=trainer.last_error,
            advantage_estimator=_own_estimator(trainer.config),
            objectives=sorted(trainer.config.objectives),
            oldest_reported_number=0 if trainer.steps is None else trainer.steps.first_number,
        )

    async def WatchSteps(  # noqa: N802 - gRPC's name
        self, request: trainer_pb2.WatchStepsRequest, context: Context
    ) -> AsyncIterator[trainer_pb2.WatchStepsResponse]:
        """Stream the reports of the present epoch."""
        del context
        self._check_run(request.run)
        steps = self._trainer.steps
        if steps is None:
            raise SluiceError.failed_precondition("NO_EPOCH", "no epoch is open: call BeginEpoch first")
        async for report in steps.follow(request.from_number):
            yield trainer_pb2.WatchStepsResponse(step=report)

    async def SaveCheckpoint(  # noqa: N802 - gRPC's name
        self, request: trainer_pb2.SaveCheckpointRequest, context: Context
    ) -> trainer_pb2.SaveCheckpointResponse:
        """Write a checkpoint."""
        del context
        self._check_run(request.run)
        return trainer_pb2.SaveCheckpointResponse(checkpoint=await self._trainer.save(request.journal_position))

    async def KeepCheckpoint(  # noqa: N802 - gRPC's name
        self, request: trainer_pb2.KeepCheckpointRequest, context: Context
    ) -> trainer_pb2.KeepCheckpointResponse:
        """Keep one checkpoint beside the newest ones."""
        del context
        self._check_run(request.run)
        if len(request.reason) > MAX_REASON:
            raise SluiceError.invalid_argument("reason", f"has {len(request.reason)} characters, at most {MAX_REASON}")
        await asyncio.to_thread(self._trainer.learner.checkpoints.keep_always, request.checkpoint, request.reason)
        return trainer_pb2.KeepCheckpointResponse()

    async def ListCheckpoints(  # noqa: N802 - gRPC's name
        self, request: trainer_pb2.ListCheckpointsRequest, context: Context
    ) -> trainer_pb2.ListCheckpointsResponse:
        """List complete checkpoints; a page token is the name of the last one shown."""
        del context
        self._check_run(request.run)
        found = await asyncio.to_thread(self._trainer.learner.checkpoints.complete)
        names = [manifest.checkpoint.name for manifest in found]
        if request.page_token and request.page_token not in names:
            raise SluiceError.invalid_argument(
                "page_token", "names a checkpoint that is gone: list from the first page"
            )
        begin = names.index(request.page_token) + 1 if request.page_token else 0
        page = found[begin : begin + (request.page_size or PAGE_SIZE)]
        more = begin + len(page) < len(found)
        return trainer_pb2.ListCheckpointsResponse(
            checkpoints=[manifest.checkpoint for manifest in page],
            next_page_token=page[-1].checkpoint.name if more and page else "",
        )

    def _check_run(self, run: str) -> None:
        expected = f"runs/{self._trainer.common.run}"
        if run != expected:
            raise SluiceError.failed_precondition(
                "WRONG_RUN", f"this trainer belongs to {expected}, the request to {run or '(none)'}"
            )


def admitted(
    header: trainer_pb2.BatchHeader,
    digests: Sequence[bytes],
    trajectories: Sequence[tokens_pb2.Trajectory],
    *,
    config: TrainerConfig,
    vocabulary: int,
    lineage: Lineage,
) -> Batch:
    """Convert the trajectories of a batch to training rows, and decide which are trained. Blocks.

    Raises:
        SluiceError: INVALID_ARGUMENT with the faults by field; its metadata names the trajectories at fault. FAILED_PRECONDITION if
            not the trajectories are at fault but the settings of orchestrator or trainer.
    """
    objectives = config.all_objectives
    expected = {name: _expectations(header, config, each, vocabulary) for name, each in objectives.items()}
    own = objectives.pop("")
    samples, violations = convert(trajectories, expected.pop(""), expected)
    violations = violations or _oversize(trajectories)
    if not violations:
        try:
            return judge(samples, header, lineage, own, digests, named=objectives)
        except UnfitRewardsError as error:
            violations = {
                f"trajectories[{row}].reward": str(error)
                for row, each in enumerate(trajectories)
                if each.group_id in error.groups
            }
        except ValueError as error:
            violations = {"header.advantage_estimator": str(error)}
    first = "; ".join(f"{name} {fault}" for name, fault in list(violations.items())[:3])
    if of_settings(violations, trajectories):
        raise SluiceError.failed_precondition("TRAINER_DOES_NOT_FIT", f"no batch of this run would fit: {first}")
    raise SluiceError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "BAD_TRAJECTORY",
        f"{len(violations)} faults in the batch: {first}",
        violations=violations,
        metadata={ROWS: ranges(rows_of(violations))},
    )


async def _first(requests: AsyncIterator[SubmitBatchRequest]) -> trainer_pb2.BatchHeader:
    async for message in requests:
        if message.WhichOneof("part") == "header":
            return message.header
        break
    raise SluiceError.invalid_argument("header", "the first message of a batch carries its header")


def _ticket(header: trainer_pb2.BatchHeader) -> Ticket:
    if not 0 < len(header.batch_id) <= MAX_NAME:
        raise SluiceError.invalid_argument("header.batch_id", f"give 1 to {MAX_NAME} characters")
    return Ticket(
        batch_id=header.batch_id,
        sequence_no=header.sequence_no,
        target=Version.from_proto(header.target_version),
        tokenizer_digest=header.tokenizer_digest,
    )


def _own_estimator(config: TrainerConfig) -> str:
    """Return the estimator that the update runs; empty if advantages come with the batch or need only rewards."""
    objective = config.objective.resolved
    return objective.advantage if objective.runs_estimator else ""


def _expectations(
    header: trainer_pb2.BatchHeader, config: TrainerConfig, objective: ResolvedObjective, vocabulary: int
) -> Expectations:
    return Expectations(
        vocabulary=vocabulary,
        newest=applied_to(header),
        has_estimator=bool(header.advantage_estimator or header.estimated_groups) or not objective.advantage,
        estimates=objective.advantage if objective.runs_estimator else "",
        needs_reference=objective.needs_reference and config.reference.model == IN_BATCH,
        needs_teacher=objective.needs_teacher and config.teacher.model == IN_BATCH,
    )


def check_header(header: trainer_pb2.BatchHeader, config: TrainerConfig) -> None:
    """Check the header of a batch.

    Raises:
        SluiceError: INVALID_ARGUMENT.
    """
    if header.on_stale not in trainer_pb2.StalePolicy.values()[1:]:
        raise SluiceError.invalid_argument("header.on_stale", "is not set: choose what happens to stale trajectories")
    if not 0 < header.trajectory_count <= MAX_TRAJECTORIES:
        raise SluiceError.invalid_argument(
            "header.trajectory_count", f"is {header.trajectory_count}; give 1 to {MAX_TRAJECTORIES}"
        )
    if header.HasField("learning_rate") and not (math.isfinite(header.learning_rate) and header.learning_rate >= 0):
        raise SluiceError.invalid_argument(
            "header.learning_rate", f"is {header.learning_rate}; give a finite number, 0 or above, or leave it unset"
        )
    named = header.advantage_estimator
    if named and named not in (*ESTIMATORS, *TRAINER_ESTIMATORS):
        raise SluiceError.invalid_argument(
            "header.advantage_estimator",
            f"there is no {named!r}; choose one of {', '.join((*ESTIMATORS, *TRAINER_ESTIMATORS))}",
        )
    for each in header.estimated_groups:
        if named or each.advantage_estimator not in ESTIMATORS:
            raise SluiceError.invalid_argument(
                "header.estimated_groups",
                f"{each.advantage_estimator!r} must be one of {', '.join(ESTIMATORS)}, and advantage_estimator empty beside them",
            )
    own = _own_estimator(config)
    if own and header.estimated_groups:
        raise SluiceError.invalid_argument(
            "header.estimated_groups", f"are given, but this trainer computes {own} for all groups; leave them out"
        )
    if own or named in TRAINER_ESTIMATORS:
        try:
            check_sides(named or own, own)
        except ValueError as error:
            raise SluiceError.invalid_argument("header.advantage_estimator", str(error)) from error


@contextmanager
def _typed_refusal() -> Iterator[None]:
    """Turn a RefusedError of the admission into a SluiceError with its status code."""
    try:
        yield
    except RefusedError as refusal:
        if refusal.retry:
            raise SluiceError.resource_exhausted(refusal.reason, str(refusal), RETRY_AFTER_S) from refusal
        if refusal.exists:
            raise SluiceError.already_exists(refusal.reason, str(refusal)) from refusal
        raise SluiceError.failed_precondition(refusal.reason, str(refusal)) from refusal


async def receive(
    header: trainer_pb2.BatchHeader, requests: AsyncIterator[SubmitBatchRequest]
) -> list[tokens_pb2.Trajectory]:
    """Return the trajectories that follow a header. Join trajectories that came in parts.

    Raises:
        SluiceError: INVALID_ARGUMENT, or DATA_LOSS if some are missing.
    """
    trajectories: list[tokens_pb2.Trajectory] = []
    size = 0
    async for message in requests:
        if message.WhichOneof("part") != "trajectories":
            raise SluiceError.invalid_argument("part", "every message after the first one carries trajectories")
        came = list(message.trajectories.trajectories)
        if message.trajectories.continued:
            if not (came and trajectories):
                raise SluiceError.invalid_argument("continued", "is set, but there is no trajectory that goes on")
            trajectories[-1].MergeFrom(came.pop(0))
        trajectories.extend(came)
        size += message.ByteSize()
        if len(trajectories) > header.trajectory_count:
            raise SluiceError.invalid_argument(
                "header.trajectory_count", f"announces {header.trajectory_count} trajectories, but more came"
            )
        if size > MAX_BATCH_BYTES:
            raise SluiceError.invalid_argument("trajectories", f"are larger than {MAX_BATCH_BYTES} bytes in all")
    if len(trajectories) < header.trajectory_count:
        raise SluiceError.data_loss(
            "BATCH_INCOMPLETE",
            f"{len(trajectories)} of {header.trajectory_count} trajectories arrived: send the batch again",
        )
    return trajectories


def _oversize(trajectories: Sequence[tokens_pb2.Trajectory]) -> dict[str, str]:
    size = sum(report_bytes(each.trajectory_id) for each in trajectories)
    if size <= MAX_REPORT_BYTES:
        return {}
    return {
        "trajectories": f"have ids so long that the report needs {size} bytes; {MAX_REPORT_BYTES} fit: shorten them"
    }
