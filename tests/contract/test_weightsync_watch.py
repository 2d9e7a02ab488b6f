"""What whoever follows a weight service says of one that does not answer."""

from __future__ import annotations

import asyncio

from structlog.testing import capture_logs
from weightsync_stack import RESOURCE, eventually

from sluice.config import SecurityConfig
from sluice.rpc import connect
from sluice.v1 import weightsync_pb2_grpc
from weightsync.backoff import Backoff
from weightsync.receive.link import VersionWatch


async def test_a_service_that_never_answers_is_named_once() -> None:
    attempts = 0

    class Counted(VersionWatch):
        async def _watch_once(self) -> None:
            nonlocal attempts
            attempts += 1
            await super()._watch_once()

    async with connect("127.0.0.1:1", SecurityConfig()) as channel:
        stub = weightsync_pb2_grpc.WeightDeliveryServiceStub(channel)
        watching = Counted(stub, RESOURCE, "replica", lambda: None, backoff=Backoff(0.001, 0.004))
        with capture_logs() as logs:
            task = asyncio.create_task(watching.run_forever())
            await eventually(lambda: attempts >= 10)
            task.cancel()
            await asyncio.wait({task})
    told = [each for each in logs if each["log_level"] == "warning"]
    assert [each["event"] for each in told] == ["weight service unreachable; retrying"]
    assert "UNAVAILABLE" in told[0]["reason"]
