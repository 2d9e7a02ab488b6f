"""A batch as it arrives: a header, then trajectories in parts, checked and queued."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import grpc

from sluice.advantages import ESTIMATORS, TRAINER_ESTIMATORS
from sluice.rpc import SluiceError
from sluice.v1 import tokens_pb2, trainer_pb2
from sluice.v1.trainer_pb2 import SubmitBatchRequest, SubmitBatchResponse
from sluice.versions import Version
from trainer_svc.checkpoint.batch_record import content_digest
from trainer_svc.config import IN_BATCH, TrainerConfig
from trainer_svc.service.admission import RefusedError, Ticket
from trainer_svc.service.consumption import Batch, OnStale, check_estimator
from trainer_svc.service.convert import MAX_NAME, Expectations, Sample, convert
from trainer_svc.service.queue import BatchQueue
from trainer_svc.service.trainer import Trainer

__all__ = ["Intake"]

MAX_TRAJECTORIES = 16_384
"""Most trajectories of a batch."""

MAX_REPORT_BYTES = 3 << 20
"""Most bytes that the answers about a batch may take: they travel in one message, beside the metrics."""

RESULT_BYTES = 48
"""Bytes of one answer beside the trajectory's id, generously."""

MAX_BATCH_BYTES = 1 << 30
"""Most bytes of a batch; with the queue they bound what submissions may occupy."""

MAX_STREAMS = 2
"""Batches that may arrive at once: one, and a repeat whose first attempt the server has not seen die yet."""

RETRY_AFTER_S = 0.5
"""What a client is told to wait: a fraction of a short step."""


@dataclass(slots=True)
class Arrived:
    """A batch that has come over the wire."""

    header: trainer_pb2.BatchHeader
    trajectories: list[tokens_pb2.Trajectory] = field(default_factory=list)
    size: int = 0


class Intake:
    """Takes batches in for one trainer.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._streams = 0
        self._entering = asyncio.Lock()

    async def submit(self, requests: AsyncIterator[SubmitBatchRequest]) -> SubmitBatchResponse:
        """Take in one batch.

        Raises:
            SluiceError: as the contract says of SubmitBatch.
        """
        if self._streams >= MAX_STREAMS:
            raise SluiceError.resource_exhausted(
                "TOO_MANY_SUBMISSIONS", f"{self._streams} batches arrive already: send one after another", RETRY_AFTER_S
            )
        self._streams += 1
        deadline_s = self._trainer.config.deadlines.submit_s
        try:
            async with asyncio.timeout(deadline_s):
                return await self._submit(requests)
        except TimeoutError as error:
            raise SluiceError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "SUBMIT_DEADLINE",
                f"the batch did not arrive within {deadline_s:g} s (trainer.deadlines.submit_s): send it again",
            ) from error
        finally:
            self._streams -= 1

    async def _submit(self, requests: AsyncIterator[SubmitBatchRequest]) -> SubmitBatchResponse:
        queue = self._trainer.accepting()
        header = await _first(requests)
        self._check_run(header)
        ticket = _ticket(header)
        _decide(queue, ticket)  # refuse what cannot enter before its trajectories arrive
        _check_header(header, self._trainer.config)
        arrived = await _receive(header, requests)
        digest = await asyncio.to_thread(content_digest, arrived.trajectories)
        ticket = replace(ticket, content_digest=digest)
        async with self._entering:
            if _decide(queue, ticket):
                return _response(queue, ticket, duplicate=True)
            batch = await asyncio.to_thread(self._convert, arrived, ticket)
            return _response(queue, ticket, duplicate=_decide(queue, ticket, batch))

    def _check_run(self, header: trainer_pb2.BatchHeader) -> None:
        expected = f"runs/{self._trainer.common.run}"
        if header.run != expected:
            raise SluiceError.failed_precondition(
                "WRONG_RUN", f"this trainer belongs to {expected}, the batch to {header.run or '(none)'}"
            )

    def _convert(self, arrived: Arrived, ticket: Ticket) -> Batch:
        header = arrived.header
        estimates = _own_estimator(self._trainer.config)
        expected = _expectations(header, ticket, self._trainer.config, self._trainer.learner.vocabulary)
        samples, violations = convert(arrived.trajectories, expected)
        violations = violations or _oversize(arrived) or _estimator_faults(header, samples)
        if violations:
            first = "; ".join(f"{name} {fault}" for name, fault in list(violations.items())[:3])
            raise SluiceError(
                grpc.StatusCode.INVALID_ARGUMENT,
                "BAD_TRAJECTORY",
                f"{len(violations)} faults in the batch: {first}",
                violations=violations,
            )
        return Batch(
            batch_id=ticket.batch_id,
            sequence_no=ticket.sequence_no,
            target=ticket.target,
            max_staleness=header.max_staleness,
            on_stale=OnStale(header.on_stale),
            estimator=estimates or header.advantage_estimator,
            sampler_dtype=header.sampler_dtype,
            samples=tuple(samples),
            content_digest=ticket.content_digest,
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
    """The estimator that the update runs; empty if batches bring advantages or name one of rewards alone."""
    objective = config.objective.resolved
    return objective.advantage if objective.runs_estimator else ""


def _expectations(
    header: trainer_pb2.BatchHeader, ticket: Ticket, config: TrainerConfig, vocabulary: int
) -> Expectations:
    objective = config.objective.resolved
    return Expectations(
        vocabulary=vocabulary,
        newest=Version(ticket.target.epoch, ticket.target.number - 1),
        has_estimator=bool(header.advantage_estimator) or not objective.advantage,
        estimates=_own_estimator(config),
        needs_reference=objective.needs_reference and config.reference.model == IN_BATCH,
        needs_teacher=objective.needs_teacher and config.teacher.model == IN_BATCH,
    )


def _check_header(header: trainer_pb2.BatchHeader, config: TrainerConfig) -> None:
    if header.on_stale not in {policy.value for policy in OnStale}:
        raise SluiceError.invalid_argument("header.on_stale", "say what happens to stale trajectories")
    if not 0 < header.trajectory_count <= MAX_TRAJECTORIES:
        raise SluiceError.invalid_argument(
            "header.trajectory_count", f"is {header.trajectory_count}; give 1 to {MAX_TRAJECTORIES}"
        )
    named, own = header.advantage_estimator, _own_estimator(config)
    if named and named not in (*ESTIMATORS, *TRAINER_ESTIMATORS):
        raise SluiceError.invalid_argument(
            "header.advantage_estimator",
            f"there is no {named!r}; choose one of {', '.join((*ESTIMATORS, *TRAINER_ESTIMATORS))}",
        )
    if named and named != own and (own or named in TRAINER_ESTIMATORS):
        raise SluiceError.invalid_argument(
            "header.advantage_estimator",
            f"is {named}, but this trainer (objective {config.objective.preset}) computes {own or 'none by itself'}: "
            f"set orchestrator.advantage to {own or 'one that needs rewards alone'}, or choose another trainer.objective",
        )


def _decide(queue: BatchQueue, ticket: Ticket, batch: Batch | None = None) -> bool:
    """Check a batch, or queue it; whether it had been accepted before."""
    try:
        return queue.admission.check(ticket) if batch is None else queue.admit(ticket, batch)
    except RefusedError as refusal:
        if refusal.retry:
            raise SluiceError.resource_exhausted(refusal.reason, str(refusal), RETRY_AFTER_S) from refusal
        if refusal.exists:
            raise SluiceError.already_exists(refusal.reason, str(refusal)) from refusal
        raise SluiceError.failed_precondition(refusal.reason, str(refusal)) from refusal


async def _receive(header: trainer_pb2.BatchHeader, requests: AsyncIterator[SubmitBatchRequest]) -> Arrived:
    arrived = Arrived(header)
    async for message in requests:
        if message.WhichOneof("part") != "trajectories":
            raise SluiceError.invalid_argument("part", "every message after the first one carries trajectories")
        arrived.trajectories.extend(message.trajectories.trajectories)
        arrived.size += message.ByteSize()
        if len(arrived.trajectories) > header.trajectory_count:
            raise SluiceError.invalid_argument(
                "header.trajectory_count", f"announces {header.trajectory_count} trajectories, but more came"
            )
        if arrived.size > MAX_BATCH_BYTES:
            raise SluiceError.invalid_argument("trajectories", f"are larger than {MAX_BATCH_BYTES} bytes in all")
    if len(arrived.trajectories) < header.trajectory_count:
        raise SluiceError.data_loss(
            "BATCH_INCOMPLETE",
            f"{len(arrived.trajectories)} of {header.trajectory_count} trajectories arrived: send the batch again",
        )
    return arrived


def _oversize(arrived: Arrived) -> dict[str, str]:
    size = sum(RESULT_BYTES + len(each.trajectory_id.encode()) for each in arrived.trajectories)
    if size <= MAX_REPORT_BYTES:
        return {}
    return {
        "trajectories": f"have ids so long that the report needs {size} bytes; {MAX_REPORT_BYTES} fit: shorten them"
    }


def _estimator_faults(header: trainer_pb2.BatchHeader, samples: list[Sample]) -> dict[str, str]:
    if not header.advantage_estimator:
        return {}
    try:
        check_estimator(header.advantage_estimator, samples)
    except ValueError as error:
        return {"header.advantage_estimator": str(error)}
    return {}


def _response(queue: BatchQueue, ticket: Ticket, *, duplicate: bool) -> trainer_pb2.SubmitBatchResponse:
    return SubmitBatchResponse(batch_id=ticket.batch_id, queued_batches=queue.admission.queued, duplicate=duplicate)
