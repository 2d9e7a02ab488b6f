"""What whoever follows a weight service says of one that does not answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

from structlog.testing import capture_logs
from weightsync_stack import RESOURCE, eventually, running_stack, weights

from sluice.backoff import Backoff
from sluice.config import SecurityConfig
from sluice.rpc import connect
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import Version
from weightsync.publisher import WeightPublisher
from weightsync.receive.sources import VersionWatch


class Counted(VersionWatch):
    """Counts its attempts."""

    attempts = 0

    async def _watch_once(self) -> None:
        self.attempts += 1
        await super()._watch_once()


async def test_a_service_that_never_answers_is_named_once() -> None:
    async with connect("127.0.0.1:1", SecurityConfig()) as channel:
        stub = weightsync_pb2_grpc.WeightDeliveryServiceStub(channel)
        watching = Counted(stub.WatchVersions, RESOURCE, "replica", lambda: None, backoff=Backoff(0.001, 0.004))
        with capture_logs() as logs:
            task = asyncio.create_task(watching.run_forever())
            await eventually(lambda: watching.attempts >= 10)
            task.cancel()
            await asyncio.wait({task})
    told = [each for each in logs if each["log_level"] == "warning"]
    assert [each["event"] for each in told] == ["weight service unreachable; retrying"]
    assert "UNAVAILABLE" in told[0]["reason"]


async def test_a_run_without_a_version_yet_is_no_failure(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        stub = weightsync_pb2_grpc.WeightDeliveryServiceStub(stack.channel)
        # A failure would end the test: the pause after it is longer than the wait for the version.
        watching = Counted(stub.WatchVersions, "runs/later", "replica", lambda: None, backoff=Backoff(600.0, 600.0))
        with capture_logs() as logs:
            task = asyncio.create_task(watching.run_forever())
            await eventually(lambda: watching.attempts >= 2)
            assert watching.connected
            await WeightPublisher(stack.channel, "later").update(Version(1, 1), weights(), deadline_s=30)
            await eventually(lambda: watching.newest_version == Version(1, 1))
            task.cancel()
            await asyncio.wait({task})
    told = [each["event"] for each in logs if "weight service" in each["event"]]
    assert told == ["weight service reached; waiting for the trainer's first version"]
