# ruff: noqa: N802 - gRPC names the methods
"""A servicer of a real contract, with all that the runtime's tests want to see happen inside a call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc

from sluice.config import SecurityConfig, ServerConfig
from sluice.rpc import RpcServer, SluiceError
from sluice.rpc.access import caller
from sluice.v1 import trainer_pb2, trainer_pb2_grpc

SERVICE = "sluice.v1.TrainerService"


class TrainerDouble(trainer_pb2_grpc.TrainerServiceServicer):
    """ListCheckpoints is not defined: it stands for an RPC that is not there yet."""

    def __init__(self) -> None:
        self.remaining_s: list[float] = []
        self.metadata: list[dict[str, str]] = []
        self.failures: list[Exception] = []
        self.calls = 0
        self.callers: list[str] = []
        self.peers: set[str] = set()
        self.entered = asyncio.Event()
        self.release = asyncio.Event()
        self.cancelled = asyncio.Event()

    def _note(self, context: grpc.aio.ServicerContext) -> None:
        self.calls += 1
        self.callers.append(caller().name)
        self.peers.add(context.peer())
        self.remaining_s.append(context.time_remaining())
        self.metadata.append(dict(context.invocation_metadata()))
        if self.failures:
            raise self.failures.pop(0)

    async def GetTrainerState(self, request, context):
        self._note(context)
        return trainer_pb2.GetTrainerStateResponse(last_error=request.run)

    async def BeginEpoch(self, request, context):
        self._note(context)
        if request.run == "abort":
            await context.abort(grpc.StatusCode.NOT_FOUND, "by the servicer itself")
        return trainer_pb2.BeginEpochResponse()

    async def SaveCheckpoint(self, request, context):
        self._note(context)
        self.entered.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return trainer_pb2.SaveCheckpointResponse()

    async def SubmitBatch(self, request_iterator, context):
        self._note(context)
        parts = [part async for part in request_iterator]
        return trainer_pb2.SubmitBatchResponse(queued_batches=len(parts))

    async def WatchSteps(self, request, context) -> AsyncIterator[trainer_pb2.WatchStepsResponse]:
        self._note(context)
        try:
            for number in range(request.from_number):
                yield trainer_pb2.WatchStepsResponse(step=trainer_pb2.StepReport(sequence_no=number))
            run = request.run.removeprefix("runs/")
            while run == "large":
                self.entered.set()
                yield trainer_pb2.WatchStepsResponse(step=trainer_pb2.StepReport(batch_id="x" * (3 << 20)))
            if run == "fail":
                raise SluiceError.not_found("TOO_OLD", "no longer kept")
            if run == "wait":
                self.entered.set()
                await self.release.wait()
        except (asyncio.CancelledError, GeneratorExit):  # it waits, or a message is being written
            self.cancelled.set()
            raise


async def start_double(
    security: SecurityConfig | None = None,
    call_log: Path | None = None,
    *,
    keeps_clients: bool = False,
    **server: object,
) -> tuple[RpcServer, TrainerDouble]:
    """A server on a free loopback port with the double in it."""
    double = TrainerDouble()
    rpc = RpcServer(
        "trainer",
        ServerConfig(**server),
        security or SecurityConfig(),
        features=["engine.double"],
        run="r1",
        call_log=call_log,
        keeps_clients=keeps_clients,
    )
    rpc.add(trainer_pb2_grpc.add_TrainerServiceServicer_to_server, double, SERVICE)
    await rpc.start()
    return rpc, double
