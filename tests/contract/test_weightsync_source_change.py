"""Calls in progress when their source is left and its channel closed: their callers go on, they do not vanish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from weightsync_stack import RESOURCE

from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from weightsync.receive.sources import ROOT, Sources

DEADLINE_S = 20.0


class Hanging(weightsync_pb2_grpc.WeightDeliveryServiceServicer):
    """A source that begins to answer and then hangs."""

    def __init__(self, relays: list[str]) -> None:
        self.relays = relays

    async def ListSources(  # noqa: N802 - gRPC's name
        self, request: pb.ListSourcesRequest, context: object
    ) -> pb.ListSourcesResponse:
        relays = [pb.WeightSource(address=address, host="here") for address in self.relays]
        return pb.ListSourcesResponse(sources=[pb.WeightSource(host="here" if not relays else "there"), *relays])

    async def PullWeights(  # noqa: N802
        self, request: pb.PullWeightsRequest, context: object
    ) -> AsyncIterator[pb.PullWeightsResponse]:
        yield pb.PullWeightsResponse(chunk=pb.Chunk(data=b"1"))
        await asyncio.Event().wait()

    async def WatchVersions(  # noqa: N802
        self, request: pb.WatchVersionsRequest, context: object
    ) -> AsyncIterator[pb.WatchVersionsResponse]:
        yield pb.WatchVersionsResponse()
        await asyncio.Event().wait()

    async def ReportVersion(  # noqa: N802
        self, request: pb.ReportVersionRequest, context: object
    ) -> pb.ReportVersionResponse:
        await asyncio.Event().wait()
        return pb.ReportVersionResponse()


@asynccontextmanager
async def serving(*relays: str) -> AsyncIterator[str]:
    server = grpc.aio.server()
    weightsync_pb2_grpc.add_WeightDeliveryServiceServicer_to_server(Hanging(list(relays)), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.fixture
async def sources() -> AsyncIterator[Sources]:
    """An engine's sources; the one in use is a relay."""
    async with serving() as relay, serving(relay) as root, grpc.aio.insecure_channel(root) as channel:
        sources = Sources(channel, RESOURCE, "replica", grpc.aio.insecure_channel, host="here")
        await sources.settle()
        assert sources.current == relay
        yield sources
        await sources.close()


async def test_calls_on_a_closed_channel_end_as_failures_and_not_as_their_callers_end(sources: Sources) -> None:
    async with asyncio.timeout(DEADLINE_S):
        call = sources.pull(pb.PullWeightsRequest(), timeout=DEADLINE_S)
        assert isinstance(await call.read(), bytes)
        reading = asyncio.create_task(call.read())
        asking = asyncio.create_task(sources.report(pb.ReportVersionRequest()))
        await asyncio.sleep(0.1)
        sources.leave("it is slow")
        await sources.close()
        assert await reading is grpc.aio.EOF
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asking
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_watch_ends_with_the_choice_of_another_source_and_a_pull_goes_on(sources: Sources) -> None:
    async with asyncio.timeout(DEADLINE_S):
        watch = sources.watch(pb.WatchVersionsRequest(), timeout=DEADLINE_S)
        pull = sources.pull(pb.PullWeightsRequest(), timeout=DEADLINE_S)
        for call in (watch, pull):
            assert await call.read() is not grpc.aio.EOF
        watching, pulling = asyncio.create_task(watch.read()), asyncio.create_task(pull.read())
        await asyncio.sleep(0.1)
        sources.leave("it is slow")
        assert sources.current == ROOT
        assert sources.changed.is_set()
        assert await watching is grpc.aio.EOF
        assert not pulling.done()
        pull.cancel()
        await asyncio.wait({pulling})


async def test_a_reader_that_is_cancelled_is_cancelled(sources: Sources) -> None:
    call = sources.pull(pb.PullWeightsRequest(), timeout=DEADLINE_S)
    assert await call.read()
    reading = asyncio.create_task(call.read())
    await asyncio.sleep(0.1)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
