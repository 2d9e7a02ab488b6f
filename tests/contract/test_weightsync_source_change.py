"""When a source is left, and calls in progress then: their callers go on when its channel is closed, they do not vanish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest
from simulated_clock import SimulatedClock
from weightsync_stack import RESOURCE, eventually

from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from weightsync.receive.sources import ROOT, SourceLimits, Sources

DEADLINE_S = 60.0
LIMITS = SourceLimits(look_s=10.0, answer_s=60.0, fallback_s=3.0, retry_s=1.0)


class Hanging(weightsync_pb2_grpc.WeightDeliveryServiceServicer):
    """A source that begins to answer and then hangs.

    Attributes:
        looks: Questions which sources there are.
        hangs: Calls that hang.
    """

    def __init__(self, relays: list[str]) -> None:
        self.relays = relays
        self.looks = 0
        self.hangs = 0

    async def _hang(self) -> None:
        self.hangs += 1
        await asyncio.Event().wait()

    async def ListSources(  # noqa: N802 - gRPC's name
        self, request: pb.ListSourcesRequest, context: object
    ) -> pb.ListSourcesResponse:
        self.looks += 1
        relays = [pb.WeightSource(address=address, host="here") for address in self.relays]
        return pb.ListSourcesResponse(sources=[pb.WeightSource(host="here" if not relays else "there"), *relays])

    async def PullWeights(  # noqa: N802
        self, request: pb.PullWeightsRequest, context: object
    ) -> AsyncIterator[pb.PullWeightsResponse]:
        yield pb.PullWeightsResponse(chunk=pb.Chunk(data=b"1"))
        await self._hang()

    async def WatchVersions(  # noqa: N802
        self, request: pb.WatchVersionsRequest, context: object
    ) -> AsyncIterator[pb.WatchVersionsResponse]:
        yield pb.WatchVersionsResponse()
        await self._hang()

    async def ReportVersion(  # noqa: N802
        self, request: pb.ReportVersionRequest, context: object
    ) -> pb.ReportVersionResponse:
        await self._hang()
        return pb.ReportVersionResponse()


@asynccontextmanager
async def serving(source: Hanging) -> AsyncIterator[tuple[grpc.aio.Server, str]]:
    server = grpc.aio.server()
    weightsync_pb2_grpc.add_WeightDeliveryServiceServicer_to_server(source, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield server, f"127.0.0.1:{port}"
    await server.stop(None)


@dataclass
class Engine:
    """An engine's sources; the one in use is a relay."""

    sources: Sources
    root: Hanging
    relay: Hanging
    server: grpc.aio.Server
    """The relay's."""
    address: str
    """The relay's."""
    clock: SimulatedClock


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    relay, clock = Hanging([]), SimulatedClock()
    async with serving(relay) as (server, address):
        root = Hanging([address])
        async with serving(root) as (_, target), grpc.aio.insecure_channel(target) as channel:
            connect = grpc.aio.insecure_channel
            sources = Sources(channel, RESOURCE, "replica", connect, host="here", limits=LIMITS, clock=clock)
            await sources.settle()
            assert sources.current == address
            yield Engine(sources, root, relay, server, address, clock)
            await sources.close()


async def test_calls_on_a_closed_channel_end_as_failures_and_not_as_their_callers_end(engine: Engine) -> None:
    sources = engine.sources
    async with asyncio.timeout(DEADLINE_S):
        call = sources.pull(pb.PullWeightsRequest(), timeout=DEADLINE_S)
        assert isinstance(await call.read(), bytes)
        reading = asyncio.create_task(call.read())
        asking = asyncio.create_task(sources.report(pb.ReportVersionRequest()))
        await eventually(lambda: engine.relay.hangs == 2)
        sources.leave("it is slow")
        await sources.close()
        assert await reading is grpc.aio.EOF
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asking
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_watch_ends_with_the_choice_of_another_source_and_a_pull_goes_on(engine: Engine) -> None:
    sources = engine.sources
    async with asyncio.timeout(DEADLINE_S):
        watch = sources.watch(pb.WatchVersionsRequest(), timeout=DEADLINE_S)
        pull = sources.pull(pb.PullWeightsRequest(), timeout=DEADLINE_S)
        for call in (watch, pull):
            assert await call.read() is not grpc.aio.EOF
        watching, pulling = asyncio.create_task(watch.read()), asyncio.create_task(pull.read())
        await eventually(lambda: engine.relay.hangs == 2)
        sources.leave("it is slow")
        assert sources.current == ROOT
        assert sources.changed.is_set()
        assert await watching is grpc.aio.EOF
        assert not pulling.done()
        pull.cancel()
        await asyncio.wait({pulling})


async def test_a_reader_that_is_cancelled_is_cancelled(engine: Engine) -> None:
    sources = engine.sources
    call = sources.pull(pb.PullWeightsRequest(), timeout=DEADLINE_S)
    assert await call.read()
    reading = asyncio.create_task(call.read())
    await eventually(lambda: engine.relay.hangs == 1)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_a_relay_is_left_when_it_has_not_answered_for_some_time_and_no_sooner(engine: Engine) -> None:
    clock, sources = engine.clock, engine.sources

    async def looked(times: int) -> None:
        await clock.until(lambda: engine.root.looks == times and clock.waits == 1)

    looking = asyncio.create_task(sources.run_forever())
    await looked(1)
    await engine.server.stop(None)
    with pytest.raises(grpc.aio.AioRpcError):
        await sources.report(pb.ReportVersionRequest())
    await looked(2)
    tries = int(LIMITS.fallback_s / LIMITS.retry_s)
    for times in range(tries):
        assert sources.current == engine.address
        await clock.advance(LIMITS.retry_s)
        await looked(3 + times)
    assert sources.current == ROOT
    looking.cancel()
    await asyncio.wait({looking})
