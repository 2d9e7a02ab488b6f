# ruff: noqa: N802 - gRPC names the methods
"""Connections end at their age, with or without tokens, so that servers that are added get their share; no call fails for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest
from simulated_clock import SimulatedClock
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from structlog.testing import capture_logs
from trainer_double import start_double
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from weightsync_stack import RESOURCE, eventually

from sluice.backoff import Backoff
from sluice.client import TrainerClient
from sluice.config import SecurityConfig, ServerConfig
from sluice.openai import server as openai_server
from sluice.openai.server import HttpServer
from sluice.rpc import RpcServer, connect
from sluice.rpc.principals import add_token
from sluice.rpc.server import some_age
from sluice.v1 import rollout_pb2, rollout_pb2_grpc, weightsync_pb2, weightsync_pb2_grpc
from weightsync.receive.sources import VersionWatch

DEADLINE_S = 60.0
AGE_S = 1.0
SHORT = SecurityConfig(connection_age_s=AGE_S)


def test_the_clients_of_a_fleet_do_not_come_back_at_once() -> None:
    ages = [some_age(100.0) for _ in range(1000)]
    assert 90.0 <= min(ages) < 95.0
    assert 105.0 < max(ages) <= 110.0


@pytest.mark.slow
async def test_a_client_that_calls_on_and_on_gets_new_connections() -> None:
    server, double = await start_double(SHORT)
    async with TrainerClient(server.target) as client, asyncio.timeout(DEADLINE_S):
        while len(double.peers) < 4:
            await asyncio.gather(*(client.state("r1") for _ in range(8)))
    await server.stop(0)


@pytest.mark.slow
async def test_a_server_that_keeps_its_clients_ends_connections_only_for_what_they_show(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(add_token(tmp_path / "principals.toml", "operator", "admin"))
    shown = SHORT.model_copy(update={"principals_file": tmp_path / "principals.toml", "token_file": token})
    kept, double = await start_double(SHORT, keeps_clients=True)
    looked_at, other = await start_double(shown, keeps_clients=True)
    async with TrainerClient(kept.target) as here, TrainerClient(looked_at.target, shown) as there:
        async with asyncio.timeout(DEADLINE_S):
            while len(other.peers) < 4:
                await asyncio.gather(here.state("r1"), there.state("r1"))
    assert len(double.peers) == 1
    for server in (kept, looked_at):
        await server.stop(0)


class Balancer:
    """Gives each new connection to the next of its servers, as the address of a Kubernetes Service does."""

    def __init__(self) -> None:
        self.servers: list[int] = []
        self._connections = 0
        self._copies: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def listen(self) -> AsyncIterator[str]:
        listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        finally:
            listener.close()
            for each in self._copies:
                each.cancel()
            await asyncio.gather(*self._copies, return_exceptions=True)

    async def _serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        port = self.servers[self._connections % len(self.servers)]
        self._connections += 1
        server, to_server = await asyncio.open_connection("127.0.0.1", port)
        for reader, writer in ((client, to_server), (server, to_client)):
            self._copies.add(asyncio.create_task(self._copy(reader, writer)))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()


@pytest.mark.slow
async def test_a_server_that_is_added_gets_its_share_of_calls() -> None:
    first, second = [await start_double(SHORT) for _ in range(2)]
    balancer = Balancer()
    balancer.servers.append(int(first[0].target.rpartition(":")[2]))
    async with balancer.listen() as target, TrainerClient(target) as client, asyncio.timeout(DEADLINE_S):
        await client.state("r1")
        balancer.servers.append(int(second[0].target.rpartition(":")[2]))
        while second[1].calls < 10:
            await client.state("r1")
    for server, _ in (first, second):
        await server.stop(0)


@pytest.mark.slow
async def test_a_watch_goes_on_over_connections_that_end() -> None:
    server, double = await start_double(SHORT)
    async with TrainerClient(server.target) as client, asyncio.timeout(DEADLINE_S):
        steps = client.watch_steps("wait")
        watching = asyncio.ensure_future(anext(steps))
        await eventually(lambda: double.calls >= 4)
        assert not watching.done()
        assert len(double.peers) > 1
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    await server.stop(0)


class Replica(rollout_pb2_grpc.RolloutServiceServicer):
    """Answers, and generates as long as the test wants."""

    def __init__(self) -> None:
        self.peers: set[str] = set()
        self.release = asyncio.Event()

    async def GetModel(self, request: object, context: grpc.aio.ServicerContext) -> rollout_pb2.GetModelResponse:
        del request
        self.peers.add(context.peer())
        return rollout_pb2.GetModelResponse()

    async def GenerateStream(
        self, request: object, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[rollout_pb2.GenerateStreamResponse]:
        del request, context
        yield rollout_pb2.GenerateStreamResponse(opening=rollout_pb2.StreamOpening(request_id="first"))
        await self.release.wait()
        yield rollout_pb2.GenerateStreamResponse(opening=rollout_pb2.StreamOpening(request_id="last"))


@pytest.mark.slow
async def test_a_generation_outlives_the_connection_that_it_began_on() -> None:
    replica = Replica()
    server = RpcServer("rollout", ServerConfig(), SHORT)
    server.add(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, replica, "sluice.v1.RolloutService")
    await server.start()
    async with connect(server.target, SHORT) as channel, asyncio.timeout(DEADLINE_S):
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        stream = stub.GenerateStream(rollout_pb2.GenerateStreamRequest())
        assert (await stream.read()).opening.request_id == "first"
        while len(replica.peers) < 3:
            await stub.GetModel(rollout_pb2.GetModelRequest())
        replica.release.set()
        assert (await stream.read()).opening.request_id == "last"
        assert await stream.read() is grpc.aio.EOF
    await server.stop(0)


class Delivery(weightsync_pb2_grpc.WeightDeliveryServiceServicer):
    """Has nothing new to announce."""

    def __init__(self) -> None:
        self.watches = 0

    async def WatchVersions(
        self, request: object, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[weightsync_pb2.WatchVersionsResponse]:
        del request, context
        self.watches += 1
        yield weightsync_pb2.WatchVersionsResponse()
        await asyncio.Event().wait()


@pytest.mark.slow
async def test_a_watch_for_versions_begins_again_at_once_and_nobody_reads_of_it() -> None:
    delivery = Delivery()
    server = RpcServer("weightsync", ServerConfig(), SHORT)
    name = "sluice.v1.WeightDeliveryService"
    server.add(weightsync_pb2_grpc.add_WeightDeliveryServiceServicer_to_server, delivery, name)
    await server.start()
    async with connect(server.target, SHORT) as channel:
        stub = weightsync_pb2_grpc.WeightDeliveryServiceStub(channel)
        # A pause between attempts would end the test: it is longer than the wait.
        watch = VersionWatch(stub.WatchVersions, RESOURCE, "r", lambda: None, backoff=Backoff(600.0, 600.0))
        with capture_logs() as logs:
            watching = asyncio.create_task(watch.run_forever())
            await eventually(lambda: delivery.watches >= 3)
            assert watch.connected
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
    assert [each["event"] for each in logs if "weight service" in each["event"]] == []
    await server.stop(0)


# HTTP.


@pytest.fixture(params=[H11Protocol, HttpToolsProtocol])
def protocol(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The port has each of the two protocols of uvicorn."""
    bounded = type("Bounded", (openai_server._BoundedProtocol, request.param), {})
    monkeypatch.setattr(openai_server, "_HttpProtocol", bounded)


@pytest.mark.usefixtures("protocol")
async def test_an_old_http_connection_is_closed_after_a_response_and_never_within() -> None:
    clock, release = SimulatedClock(), asyncio.Event()

    async def stream(_: Request) -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            yield b"first "
            await release.wait()
            yield b"last"

        return StreamingResponse(parts())

    routes = [Route("/", lambda _: PlainTextResponse("here")), Route("/stream", stream)]
    server = HttpServer(Starlette(routes=routes), "127.0.0.1", 0, SHORT, clock=clock)
    url = f"http://127.0.0.1:{await server.start()}"
    async with asyncio.timeout(DEADLINE_S), httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client:
        clock.now += 10 * AGE_S
        assert (await client.get("/")).headers.get("connection") is None, "the age is that of the connection"
        clock.now += AGE_S * 0.8
        async with client.stream("GET", "/stream") as response:
            assert response.headers.get("connection") is None
            body = response.aiter_bytes()
            assert await anext(body) == b"first "
            clock.now += AGE_S
            release.set()
            assert b"".join([part async for part in body]) == b"last"
        assert (await client.get("/")).headers["connection"] == "close"
        assert (await client.get("/")).headers.get("connection") is None, "it is another one"
    await server.stop(0)
