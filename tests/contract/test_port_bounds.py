"""What strangers may send to which port: the table in docs/security.md has every port that listens, and says what is true."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import pytest
import uvicorn
from grpc_health.v1 import health_pb2, health_pb2_grpc
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sluice import limits
from sluice.config import SecurityConfig, ServerConfig
from sluice.openai import server as openai_server
from sluice.openai.server import HttpServer
from sluice.rpc import RpcServer, metrics_server
from sluice.rpc import server as rpc_server
from sluice.rpc.metrics_server import start_metrics_server
from sluice.rpc.server import free_ports

ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0
SOON_S = 0.3
MOST = 16
"""Connections at once, in these tests."""

GET = b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\n"
WAIT = b"GET /wait HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
"""The preface of HTTP/2, and empty settings."""

GRPC = pytest.mark.parametrize("kind", ["port", "probe_port"])


def rows() -> dict[str, str]:
    """The rows of the table, by the port's setting."""
    text = (ROOT / "docs/security.md").read_text().partition("## Before anybody is known")[2].partition("\n## ")[0]
    return {match[1]: match[0] for match in re.finditer(r"^\| `(\w+)`.*$", text, re.MULTILINE)}


def test_each_port_that_listens_is_in_the_table() -> None:
    assert rows().keys() == {name for name in ServerConfig.model_fields if name.endswith("port")}
    listens = re.compile(
        r"add_(in)?secure_port\(|create_server\(|start_server\(|make_server\(|HTTPServer\(|\.listen\(|\bHttpServer\("
    )
    found = {}
    for package in ("sluice", *(each.name for each in ROOT.glob("*_svc")), "weightsync"):
        for path in (ROOT / package).rglob("*.py"):
            if "sluice/v1" not in str(path) and listens.search(path.read_text()):
                found[str(path.relative_to(ROOT))] = package
    servers = {"sluice/rpc/server.py", "sluice/rpc/metrics_server.py", "sluice/openai/server.py"}
    assert found.keys() == servers | {"gateway_svc/app.py", "rollout_svc/app.py"}, "the last two have an HTTP port"


def test_the_table_has_the_numbers_of_the_code() -> None:
    options = dict(rpc_server.SERVER_OPTIONS)
    said = {
        "port": [
            f"{limits.MAX_CONNECTIONS:,}",
            f"{options['grpc.server_handshake_timeout_ms'] // 1000} s for the handshake",
            f"{options['grpc.absolute_max_metadata_size']:,} bytes of metadata",
            f"{limits.REQUEST_S:g} s for the message",
            f"{limits.MAX_MESSAGE_BYTES:,} bytes",
            f"ended after {options['grpc.max_connection_idle_ms'] // 1000} s",
        ],
        "http_port": [
            f"{limits.MAX_CONNECTIONS:,}",
            f"{limits.HEAD_S:g} s for the head",
            f"{limits.MAX_HEAD_BYTES:,} bytes",
            f"{limits.BODY_S:g} s, {limits.MAX_MESSAGE_BYTES:,} bytes",
            f"{limits.MAX_BODIES_BYTES:,} bytes",
            f"closed after {uvicorn.Config(None).timeout_keep_alive} s",
        ],
        "metrics_port": [
            f"{limits.MAX_METRICS_CONNECTIONS}, a thread each",
            f"{limits.HEAD_S:g} s for handshake and head",
            f"{limits.MAX_HEAD_BYTES:,} bytes",
        ],
        "probe_port": [
            f"{limits.MAX_PROBE_CONNECTIONS}; one more",
            f"{options['grpc.server_handshake_timeout_ms'] // 1000} s for the handshake",
            f"{rpc_server._MOST_PROBES} health checks",
        ],
    }
    for name, figures in said.items():
        for figure in figures:
            assert figure in rows()[name], name


async def connect(port: int, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    with contextlib.suppress(ConnectionError):
        await writer.drain()
    return reader, writer


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What the server sends until it closes the connection."""
    async with asyncio.timeout(LIMIT_S):
        try:
            return await reader.read()
        except ConnectionError:
            return b""


# gRPC, and health checks.


@asynccontextmanager
async def rpc_ports(monkeypatch: pytest.MonkeyPatch, **options: int) -> AsyncIterator[dict[str, int]]:
    """A server with both ports, with options of gRPC in place of its own."""
    given = dict(rpc_server.SERVER_OPTIONS) | {f"grpc.{name}": value for name, value in options.items()}
    monkeypatch.setattr(rpc_server, "SERVER_OPTIONS", tuple(given.items()))
    monkeypatch.setattr(rpc_server, "MAX_PROBE_CONNECTIONS", MOST)
    (probe_port,) = free_ports(1)
    server = RpcServer("gateway", ServerConfig(probe_port=probe_port, max_connections=MOST), SecurityConfig())
    port = await server.start()
    try:
        yield {"port": port, "probe_port": probe_port}
    finally:
        await server.stop(0)


async def health(port: int, *metadata: tuple[str, str]) -> int:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        request = health_pb2.HealthCheckRequest()
        checked = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=LIMIT_S, metadata=metadata)
        return int(checked.status)


@pytest.mark.slow
@GRPC
async def test_a_connection_that_never_speaks_http2_is_closed(kind, monkeypatch) -> None:
    async with rpc_ports(monkeypatch, server_handshake_timeout_ms=1000) as ports:
        for sent in (b"", HTTP2[:10]):
            reader, writer = await connect(ports[kind], sent)
            await ended(reader)
            writer.close()
        assert await health(ports[kind]) == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.slow
@GRPC
async def test_a_connection_without_calls_is_ended(kind, monkeypatch) -> None:
    async with rpc_ports(monkeypatch, max_connection_idle_ms=1000) as ports:
        reader, writer = await connect(ports[kind], HTTP2)
        await ended(reader)
        writer.close()


@GRPC
async def test_there_are_only_so_many_connections(kind, monkeypatch) -> None:
    async with rpc_ports(monkeypatch) as ports, contextlib.AsyncExitStack() as stack:
        held = []
        for _ in range(MOST):
            reader, writer = await connect(ports[kind], HTTP2)
            stack.callback(writer.close)
            await reader.readexactly(9)  # the server's settings: it has taken the connection
            held.append(writer)
        reader, writer = await connect(ports[kind], HTTP2)
        stack.callback(writer.close)
        await ended(reader)
        for each in held:
            each.close()
        while True:  # the server notices in its own time
            with contextlib.suppress(grpc.aio.AioRpcError):
                assert await health(ports[kind]) == health_pb2.HealthCheckResponse.SERVING
                break


@GRPC
async def test_metadata_has_a_largest_size(kind, monkeypatch) -> None:
    async with rpc_ports(monkeypatch) as ports:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await health(ports[kind], ("x-padding", "x" * (limits.MAX_METADATA_BYTES + 1)))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await health(ports[kind]) == health_pb2.HealthCheckResponse.SERVING


# HTTP. What it asks of heads and bodies is tested in test_http_clients.py.


@asynccontextmanager
async def http_port(release: asyncio.Event) -> AsyncIterator[int]:
    async def wait(_http: Request) -> PlainTextResponse:
        await release.wait()
        return PlainTextResponse("done")

    routes = [Route("/metrics", lambda _: PlainTextResponse("here")), Route("/wait", wait)]
    server = HttpServer(Starlette(routes=routes), "127.0.0.1", 0, SecurityConfig(), most_connections=4)
    port = await server.start()
    try:
        async with asyncio.timeout(LIMIT_S):
            yield port
    finally:
        release.set()
        await server.stop(0)


@pytest.fixture(params=[H11Protocol, HttpToolsProtocol])
def protocol(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The port has each of the two protocols of uvicorn."""
    bounded = type("Bounded", (openai_server._BoundedProtocol, request.param), {})
    monkeypatch.setattr(openai_server, "_HttpProtocol", bounded)


async def test_half_heads_make_room_for_a_request() -> None:
    async with http_port(asyncio.Event()) as port, contextlib.AsyncExitStack() as stack:
        halves = [await connect(port, GET) for _ in range(4)]
        for _, writer in halves:
            stack.callback(writer.close)
        reader, writer = await connect(port, GET + b"connection: close\r\n\r\n")
        stack.callback(writer.close)
        assert (await ended(reader)).startswith(b"HTTP/1.1 200")
        assert await ended(halves[0][0]) == b"", "the oldest has gone"
        halves[1][1].write(b"connection: close\r\n\r\n")
        assert (await ended(halves[1][0])).startswith(b"HTTP/1.1 200")


async def test_requests_that_are_served_keep_their_connections() -> None:
    await all_are_served_and_one_more_is_refused(WAIT)


@pytest.mark.usefixtures("protocol")
async def test_connections_kept_alive_make_room_for_a_request() -> None:
    async with http_port(asyncio.Event()) as port, contextlib.AsyncExitStack() as stack:
        kept = []
        for _ in range(4):
            kept.append(await connect(port, GET + b"\r\n"))
            stack.callback(kept[-1][1].close)
            assert (await kept[-1][0].readuntil(b"here")).startswith(b"HTTP/1.1 200")
        reader, writer = await connect(port, GET + b"connection: close\r\n\r\n")
        stack.callback(writer.close)
        assert (await ended(reader)).startswith(b"HTTP/1.1 200")
        assert await ended(kept[0][0]) == b"", "the oldest has gone"
        kept[1][1].write(GET + b"connection: close\r\n\r\n")
        assert (await ended(kept[1][0])).startswith(b"HTTP/1.1 200")


@pytest.mark.usefixtures("protocol")
async def test_a_request_that_was_sent_ahead_keeps_its_connection() -> None:
    await all_are_served_and_one_more_is_refused(GET + b"\r\n" + WAIT, answered=b"here")


async def all_are_served_and_one_more_is_refused(sent: bytes, answered: bytes = b"") -> None:
    """Send to as many connections as there may be what ends with a request that waits, and begin one more."""
    release = asyncio.Event()
    async with http_port(release) as port, contextlib.AsyncExitStack() as stack:
        served = [await connect(port, sent) for _ in range(4)]
        for reader, writer in served:
            stack.callback(writer.close)
            if answered:
                await reader.readuntil(answered)
        reader, writer = await connect(port, GET)
        stack.callback(writer.close)
        assert await ended(reader) == b""
        release.set()
        for each, _ in served:
            assert (await ended(each)).endswith(b"done")


async def test_what_follows_a_request_that_waits_has_a_largest_size() -> None:
    async with http_port(asyncio.Event()) as port:
        reader, writer = await connect(port, b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n")
        writer.write(GET)
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b"x-padding: " + b"x" * 16_000 + b"\r\n")
                await writer.drain()
                await asyncio.sleep(0)
        assert await ended(reader) == b""
        writer.close()


# Metrics.


@contextmanager
def metrics_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(metrics_server, "MAX_METRICS_CONNECTIONS", 4)
    server = start_metrics_server(0, "127.0.0.1", SecurityConfig())
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


async def scraped(port: int) -> bytes:
    reader, writer = await connect(port, GET + b"\r\n")
    try:
        return await ended(reader)
    finally:
        writer.close()


@pytest.mark.slow
async def test_a_head_that_takes_too_long_ends_its_connection(monkeypatch) -> None:
    monkeypatch.setattr(metrics_server, "HEAD_S", SOON_S)
    with metrics_port(monkeypatch) as port:
        for sent in (b"", GET):
            reader, writer = await connect(port, sent)
            assert await ended(reader) == b""
            writer.close()
        reader, writer = await connect(port, GET)
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():  # a byte now and then prolongs nothing
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(SOON_S / 10)
        assert await ended(reader) == b""
        writer.close()
        monkeypatch.undo()
        assert b"sluice_rpc" in await scraped(port)


async def test_a_head_without_an_end_has_a_largest_size(monkeypatch) -> None:
    with metrics_port(monkeypatch) as port:
        reader, writer = await connect(port, GET)
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                writer.write(b"x-padding: " + b"x" * 16_000 + b"\r\n")
                await writer.drain()
        assert await ended(reader) == b""
        writer.close()
        assert b"sluice_rpc" in await scraped(port)


async def test_a_thread_that_cannot_start_gives_its_place_back(monkeypatch) -> None:
    with metrics_port(monkeypatch) as port:

        def start(_thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start)
            for _ in range(4):
                assert await scraped(port) == b""
        assert b"sluice_rpc" in await scraped(port)


async def test_each_connection_has_a_thread_and_there_are_only_so_many(monkeypatch) -> None:
    with metrics_port(monkeypatch) as port:
        held = [await connect(port, GET) for _ in range(4)]
        reader, writer = await connect(port, GET + b"\r\n")
        assert await ended(reader) == b""
        writer.close()
        for _, each in held:
            each.close()
        async with asyncio.timeout(LIMIT_S):
            while b"sluice_rpc" not in await scraped(port):  # noqa: ASYNC110 - threads end in their own time
                await asyncio.sleep(SOON_S / 10)
