"""Passes replicas' reports on to the service behind a relay: the latest of each, without anybody waiting for it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import grpc
import structlog

from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from weightsync.backoff import Backoff

__all__ = ["Forwarder"]

_DEADLINE_S = 10.0
_MOST_REPLICAS = 4096
"""Reports that may wait; beyond it the oldest goes: its replica reports again within a third of its lease."""

log = structlog.get_logger(__name__)


class Forwarder:
    """The reports of one run on their way.

    Args:
        stub: The service behind.
        clock: Seconds, monotonic.

    Attributes:
        lease_s: Seconds that the service behind granted last; infinite before its first answer.
    """

    def __init__(
        self, stub: weightsync_pb2_grpc.WeightDeliveryServiceAsyncStub, clock: Callable[[], float], own_lease_s: float
    ) -> None:
        self.lease_s = math.inf
        self._stub = stub
        self._clock = clock
        self._own_lease_s = own_lease_s
        self._waiting: dict[str, tuple[float, pb.ReportVersionRequest]] = {}
        self._news = asyncio.Event()

    def __len__(self) -> int:
        """Reports that wait."""
        return len(self._waiting)

    def put(self, request: pb.ReportVersionRequest) -> None:
        """Pass a report on soon; it replaces an older one of the same replica. Never waits and never fails."""
        self._waiting.pop(request.replica, None)
        self._waiting[request.replica] = (self._clock(), request)
        while len(self._waiting) > _MOST_REPLICAS:
            del self._waiting[next(iter(self._waiting))]
        self._news.set()

    async def run_forever(self) -> None:
        """Send until cancelled."""
        backoff = Backoff()
        while True:
            self._news.clear()
            if await self._send_all():
                backoff.succeed()
                await self._news.wait()
            else:
                await asyncio.sleep(backoff.fail())

    async def _send_all(self) -> bool:
        """Send what waits, oldest first; False if the service behind could not be reached."""
        while self._waiting:
            replica = next(iter(self._waiting))
            reported_at, request = self._waiting.pop(replica)
            if self._clock() - reported_at > min(self.lease_s, self._own_lease_s):
                continue  # its replica may be gone by now
            try:
                response = await self._stub.ReportVersion(request, timeout=_DEADLINE_S)
            except grpc.aio.AioRpcError as error:
                failure = SluiceError.from_rpc(error)
                if failure.code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
                    self._waiting = {replica: (reported_at, request), **self._waiting}
                    return False
                log.warning("report not passed on", replica=replica, reason=str(failure))
                continue
            self.lease_s = response.lease.ToTimedelta().total_seconds() or math.inf
        return True
