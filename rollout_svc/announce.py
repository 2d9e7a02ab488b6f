"""A replica announces itself to the orchestrator, and keeps its lease while it serves."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import structlog

from sluice.backoff import Backoff
from sluice.clock import CLOCK, Clock
from sluice.config import SecurityConfig
from sluice.rpc import SluiceError, connect
from sluice.rpc.drain import Drain
from sluice.v1 import orchestrator_pb2 as pb
from sluice.v1 import orchestrator_pb2_grpc

CALL_S = 5.0
"""Deadline of one call in seconds."""

LONGEST_PAUSE_S = 10.0
"""Longest pause between two attempts to reach the orchestrator: one that was restarted finds its replicas soon."""

BEATS = 3
"""Heartbeats within one lease: two may be lost."""

LEAVE_S = 1.0
"""Most seconds that a replica waits at its end until the orchestrator knows that it leaves."""

log = structlog.get_logger()


class Announcer:
    """Registers a replica and renews its lease.

    Args:
        orchestrator: Address of the orchestrator.
        run: Name of the run.
        replica: Name of the replica.
        address: Where the orchestrator reaches it.
        clock: The time, for pauses.
    """

    def __init__(
        self, orchestrator: str, security: SecurityConfig, *, run: str, replica: str, address: str, clock: Clock = CLOCK
    ) -> None:
        self._orchestrator, self._security, self._clock = orchestrator, security, clock
        self._run, self._replica, self._address = f"runs/{run}", replica, address
        self._left = asyncio.Event()

    async def left(self) -> None:
        """Wait until the orchestrator knows that the replica leaves, at most `LEAVE_S`: it would take its end for a failure.

        Call this when the drain has begun, and end the replica after it.
        """
        with contextlib.suppress(TimeoutError):
            async with self._clock.timeout(LEAVE_S):
                await self._left.wait()

    async def run(self, drain: Drain) -> None:
        """Announce the replica until it drains, then say that it leaves."""
        try:
            await self._announce(drain)
        finally:
            self._left.set()

    async def _announce(self, drain: Drain) -> None:
        async with connect(self._orchestrator, self._security, role="replica") as channel:
            stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
            asked = registered = False
            backoff = Backoff(longest_s=LONGEST_PAUSE_S)
            while not drain.begun.is_set():
                asked = True
                try:
                    lease_s = await (self._renew(stub) if registered else self._register(stub))
                except SluiceError as error:
                    if registered and error.code is grpc.StatusCode.NOT_FOUND:  # it was restarted, or the lease ended
                        registered = False
                        continue
                    if not backoff.failures:
                        log.warning(
                            "cannot announce this replica; trying again",
                            orchestrator=self._orchestrator,
                            error=str(error),
                        )
                    pause_s = backoff.fail()
                else:
                    if not registered or backoff.failures:
                        log.info("announced", orchestrator=self._orchestrator, address=self._address, lease_s=lease_s)
                    registered, pause_s = True, lease_s / BEATS
                    backoff.succeed()
                with contextlib.suppress(TimeoutError):
                    async with self._clock.timeout(pause_s):
                        await drain.begun.wait()
            if asked:  # an answer may have been lost
                with contextlib.suppress(SluiceError):  # it notices by itself, a little later
                    await self._renew(stub, leaving=True)

    async def _register(self, stub: orchestrator_pb2_grpc.OrchestratorServiceAsyncStub) -> float:
        request = pb.RegisterReplicaRequest(run=self._run, replica=self._replica, address=self._address)
        try:
            answer = await stub.RegisterReplica(request, timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            raise SluiceError.from_rpc(error) from error
        return float(answer.lease.ToNanoseconds()) / 1e9

    async def _renew(self, stub: orchestrator_pb2_grpc.OrchestratorServiceAsyncStub, *, leaving: bool = False) -> float:
        request = pb.HeartbeatRequest(run=self._run, replica=self._replica, leaving=leaving)
        try:
            answer = await stub.Heartbeat(request, timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            raise SluiceError.from_rpc(error) from error
        return float(answer.lease.ToNanoseconds()) / 1e9
