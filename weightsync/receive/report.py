"""Tells the weight service what the replica serves: at each change, and often enough to keep the lease."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc
import structlog

from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import Version
from weightsync.receive.apply import Applier
from weightsync.receive.update import UpdateTimings

__all__ = ["Reporter"]

_DEADLINE_S = 10.0
_SHARE_OF_LEASE = 1 / 3
"""A lease is renewed after a third of it, so that one lost report does not end it."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Report:
    phase: pb.ReplicaPhase.ValueType
    version: Version
    error: str = ""
    timings: UpdateTimings | None = None


class Reporter:
    """Reports for one replica. Only the last report matters: one that was not sent yet gives way to the next.

    Args:
        stub: The service.
        run: ``runs/{run}``.
        replica: Who reports.
        applier: Knows what serves.
    """

    def __init__(
        self,
        stub: weightsync_pb2_grpc.WeightDeliveryServiceAsyncStub,
        run: str,
        replica: str,
        applier: Applier,
    ) -> None:
        self._stub = stub
        self._run = run
        self._replica = replica
        self._applier = applier
        self._last = _Report(pb.REPLICA_PHASE_SERVING, applier.serving)
        self._news = asyncio.Event()
        self._renew_s = 10.0

    def tell(
        self,
        phase: pb.ReplicaPhase.ValueType,
        version: Version,
        error: str = "",
        timings: UpdateTimings | None = None,
    ) -> None:
        """Report soon; never waits and never fails."""
        self._last = _Report(phase, version, error, timings)
        self._news.set()

    async def run_forever(self) -> None:
        """Send reports until cancelled; one that cannot be sent is sent again at the next renewal."""
        while True:
            self._news.clear()
            try:
                await self._send(self._last)
            except grpc.aio.AioRpcError as error:
                log.debug("report not sent", code=error.code().name)
            try:
                async with asyncio.timeout(self._renew_s):
                    await self._news.wait()
            except TimeoutError:
                continue

    async def _send(self, report: _Report) -> None:
        request = pb.ReportVersionRequest(
            run=self._run,
            replica=self._replica,
            version=report.version.to_proto(),
            phase=report.phase,
            error=report.error,
            serving=self._applier.serving.to_proto(),
        )
        if report.timings is not None:
            request.timings.CopyFrom(report.timings.to_proto())
            request.stage_time.FromNanoseconds(int((report.timings.pull_s + report.timings.stage_s) * 1e9))
            request.pause_time.CopyFrom(request.timings.pause)
        response = await self._stub.ReportVersion(request, timeout=_DEADLINE_S)
        self._renew_s = max(0.1, response.lease.ToTimedelta().total_seconds() * _SHARE_OF_LEASE)
