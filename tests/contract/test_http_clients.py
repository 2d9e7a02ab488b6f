"""HTTP clients that are slow, break off or send what is no HTTP: their connections end, and nothing of them is a defect in the log."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import structlog
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from sluice.config import SecurityConfig
from sluice.openai import requests, server
from sluice.openai.requests import Door, RequestBounds, RequestGuard
from sluice.openai.server import HttpServer
from sluice.rpc.access import Access

HEAD = b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
LIMIT_S = 120.0
ECHO = HEAD + b"Content-Length: 2\r\n\r\n{}"


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[int, list[str]]]:
    """An echo behind the checks of every HTTP port; gives its port and what became of each request."""
    outcomes: list[str] = []

    async def echo(http: Request) -> PlainTextResponse:
        try:
            answer = PlainTextResponse(await http.body())
        except Exception as error:
            outcomes.append(type(error).__name__)
            raise
        outcomes.append("echoed")
        return answer

    door, bounds = Door(Access(SecurityConfig())), RequestBounds(64)
    guard = Middleware(RequestGuard, door=door, port="http.echo", host="127.0.0.1", bounds=bounds)
    http = HttpServer(
        Starlette(routes=[Route("/echo", echo, methods=["POST"])], middleware=[guard]), "127.0.0.1", 0, SecurityConfig()
    )
    port = await http.start()
    try:
        async with asyncio.timeout(LIMIT_S):
            yield port, outcomes
    finally:
        await http.stop(0)


async def answer_to(port: int, *parts: bytes) -> bytes:
    """What a client gets until its connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
        await writer.drain()
    try:
        return await reader.read()
    except ConnectionResetError:
        return b"reset"
    finally:
        writer.close()


async def echoes(port: int) -> bool:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(ECHO)
    head = await reader.readuntil(b"\r\n\r\n")
    body = await reader.readexactly(2)
    writer.close()
    return head.startswith(b"HTTP/1.1 200") and body == b"{}"


@pytest.mark.parametrize("begun", [b"", b"\r\n\r\n", b"POST ", HEAD])
async def test_a_client_that_does_not_send_the_head_of_a_request_is_disconnected(begun, monkeypatch) -> None:
    async with serving() as (port, _):
        with monkeypatch.context() as patched:
            patched.setattr(server, "HEAD_S", 0.2)
            assert not (await answer_to(port, begun)).startswith(b"HTTP/1.1 200")
        assert await echoes(port)


@pytest.mark.slow
async def test_a_client_that_does_not_send_the_head_of_a_second_request_is_disconnected() -> None:
    async with serving() as (port, _):
        assert (await answer_to(port, ECHO + HEAD)).startswith(b"HTTP/1.1 200")
        assert await echoes(port)


@pytest.mark.parametrize(
    "begun", [HEAD + b"Content-Length: 9\r\n\r\n{", HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"]
)
async def test_a_client_that_does_not_send_the_body_gets_408(begun, monkeypatch) -> None:
    async with serving() as (port, outcomes):
        with monkeypatch.context() as patched:
            patched.setattr(requests, "BODY_S", 0.2)
            answer = await answer_to(port, begun)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"connection: close" in answer
        assert outcomes == ["HTTPException"]
        assert await echoes(port)


async def test_a_head_has_a_largest_size() -> None:
    async with serving() as (port, _):
        part = b"X-Padding: " + b"x" * 16_000 + b"\r\n"
        assert (await answer_to(port, HEAD, *[part] * 10))[:12] in {b"HTTP/1.1 431", b"reset"}
        assert await echoes(port)


async def test_a_body_that_nobody_reads_has_a_largest_size(monkeypatch) -> None:
    monkeypatch.setattr(server, "MAX_UNREAD_BYTES", 1 << 20)
    async with serving() as (port, outcomes):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD.replace(b"json", b"text") + b"Content-Length: 999999999\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 415")
        with contextlib.suppress(ConnectionError):  # which ends the loop: the time of the test is limited
            while True:
                writer.write(b"x" * 65_536)
                await writer.drain()
        writer.close()
        assert outcomes == []
        assert await echoes(port)


@pytest.mark.parametrize("rest", [b"", b"Content-Length: 9\r\n\r\n{"])
async def test_a_client_that_leaves_before_its_request_is_whole_is_no_defect(rest) -> None:
    async with serving() as (port, outcomes):
        with structlog.testing.capture_logs() as logs:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD + rest)
            await writer.drain()
            writer.transport.abort()
            assert await echoes(port)
            assert [each["event"] for each in logs if each["log_level"] in {"warning", "error"}] == []
        assert outcomes in (["echoed"], ["ClientDisconnect", "echoed"])


@pytest.mark.parametrize("chunk", [b"zz\r\n{}\r\n", b"-2\r\n{}\r\n", b"2\r\n{}}}\r\n"])
async def test_a_body_that_is_no_http_ends_its_request(chunk) -> None:
    async with serving() as (port, outcomes):
        with structlog.testing.capture_logs() as logs:
            answer = await answer_to(port, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", chunk)
            assert answer.startswith(b"HTTP/1.1 400")
            assert answer.count(b"HTTP/1.1") == 1
            assert await echoes(port)
            assert [each["event"] for each in logs if each["log_level"] in {"warning", "error"}] == []
        assert outcomes == ["ClientDisconnect", "echoed"]
