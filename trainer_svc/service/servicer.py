"""TrainerService on the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from sluice.rpc import SluiceError
from sluice.v1 import trainer_pb2, trainer_pb2_grpc
from sluice.versions import BASE
from trainer_svc.service.intake import Intake
from trainer_svc.service.trainer import Trainer

__all__ = ["TrainerServicer"]

PAGE_SIZE = 100
"""Checkpoints per page where the caller does not say."""


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """Answers for one trainer.

    Args:
        trainer: The trainer; it may still be loading.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._intake = Intake(trainer)

    async def BeginEpoch(  # noqa: N802 - gRPC's name
        self,
        request: trainer_pb2.BeginEpochRequest,
        context: grpc.aio.ServicerContext[trainer_pb2.BeginEpochRequest, trainer_pb2.BeginEpochResponse],
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
        self,
        request_iterator: AsyncIterator[trainer_pb2.SubmitBatchRequest],
        context: grpc.aio.ServicerContext[trainer_pb2.SubmitBatchRequest, trainer_pb2.SubmitBatchResponse],
    ) -> trainer_pb2.SubmitBatchResponse:
        """Take a batch in."""
        del context
        return await self._intake.submit(request_iterator)

    async def GetTrainerState(  # noqa: N802 - gRPC's name
        self,
        request: trainer_pb2.GetTrainerStateRequest,
        context: grpc.aio.ServicerContext[trainer_pb2.GetTrainerStateRequest, trainer_pb2.GetTrainerStateResponse],
    ) -> trainer_pb2.GetTrainerStateResponse:
        """Report version, queue and health."""
        del context
        self._check_run(request.run)
        trainer = self._trainer
        if trainer.queue is None:
            return trainer_pb2.GetTrainerStateResponse(phase=trainer.phase)
        admission = trainer.queue.admission
        objective = trainer.config.objective.resolved
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
            advantage_estimator=objective.advantage if objective.runs_estimator else "",
            oldest_reported_number=0 if trainer.steps is None else trainer.steps.first_number,
        )

    async def WatchSteps(  # noqa: N802 - gRPC's name
        self,
        request: trainer_pb2.WatchStepsRequest,
        context: grpc.aio.ServicerContext[trainer_pb2.WatchStepsRequest, trainer_pb2.WatchStepsResponse],
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
        self,
        request: trainer_pb2.SaveCheckpointRequest,
        context: grpc.aio.ServicerContext[trainer_pb2.SaveCheckpointRequest, trainer_pb2.SaveCheckpointResponse],
    ) -> trainer_pb2.SaveCheckpointResponse:
        """Write a checkpoint."""
        del context
        self._check_run(request.run)
        return trainer_pb2.SaveCheckpointResponse(checkpoint=await self._trainer.save(request.journal_position))

    async def ListCheckpoints(  # noqa: N802 - gRPC's name
        self,
        request: trainer_pb2.ListCheckpointsRequest,
        context: grpc.aio.ServicerContext[trainer_pb2.ListCheckpointsRequest, trainer_pb2.ListCheckpointsResponse],
    ) -> trainer_pb2.ListCheckpointsResponse:
        """List complete checkpoints; a page token is the name of the last one shown."""
        del context
        self._check_run(request.run)
        found = await asyncio.to_thread(self._trainer.learner.checkpoints.complete)
        names = [manifest.checkpoint.name for manifest in found]
        if request.page_token and request.page_token not in names:
            raise SluiceError.invalid_argument("page_token", "names no checkpoint that is still kept: list anew")
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
