"""Reports on their way through a relay: the latest of each replica, bounded, none when it says nothing any more."""

from __future__ import annotations

import asyncio
from typing import cast

import grpc
from simulated_clock import SimulatedClock

from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from weightsync import relay
from weightsync.relay import Forwarder

LEASE_S = 60.0


class Upstream:
    """The service behind, as far as reports go."""

    def __init__(self) -> None:
        self.here = asyncio.Event()
        self.received: list[tuple[str, int]] = []

    async def ReportVersion(  # noqa: N802 - gRPC's name
        self,
        request: pb.ReportVersionRequest,
        timeout: float,  # noqa: ASYNC109 - gRPC's name
    ) -> pb.ReportVersionResponse:
        assert timeout > 0
        if not self.here.is_set():
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())
        self.received.append((request.replica, request.version.number))
        response = pb.ReportVersionResponse()
        response.lease.FromSeconds(20)
        return response


def forwarder(upstream: Upstream, clock: SimulatedClock) -> Forwarder:
    stub = cast("weightsync_pb2_grpc.WeightDeliveryServiceAsyncStub", upstream)
    return Forwarder(stub, clock, LEASE_S)


def report(replica: str, number: int) -> pb.ReportVersionRequest:
    request = pb.ReportVersionRequest(replica=replica)
    request.version.number = number
    return request


async def test_only_the_latest_report_of_a_replica_goes_out() -> None:
    upstream, clock = Upstream(), SimulatedClock()
    reports = forwarder(upstream, clock)
    for number in (1, 2, 3):
        reports.put(report("a", number))
        reports.put(report("b", number))
    upstream.here.set()
    task = asyncio.create_task(reports.run_forever())
    await clock.until(lambda: len(upstream.received) == 2)
    assert upstream.received == [("a", 3), ("b", 3)]
    assert reports.lease_s == 20
    reports.put(report("a", 4))
    await clock.until(lambda: ("a", 4) in upstream.received)
    task.cancel()


async def test_reports_wait_while_upstream_is_away_and_old_ones_are_dropped() -> None:
    upstream, clock = Upstream(), SimulatedClock()
    reports = forwarder(upstream, clock)
    reports.put(report("gone", 1))
    task = asyncio.create_task(reports.run_forever())
    await clock.advance(LEASE_S + 1)
    reports.put(report("live", 2))
    upstream.here.set()
    await clock.advance(LEASE_S)
    assert len(reports) == 0
    assert upstream.received == [("live", 2)]
    task.cancel()


async def test_what_waits_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(relay, "MOST_REPLICAS_BEHIND", 4096)
    reports = forwarder(Upstream(), SimulatedClock())
    for number in range(5000):
        reports.put(report(f"replica-{number}", number))
    assert len(reports) == 4096
