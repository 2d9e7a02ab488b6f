"""Calls under way when their source is left and its channel closed: their callers go on, they do not vanish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from weightsync.receive.sources import SwitchingChannel

DEADLINE_S = 20.0


async def stream(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> AsyncIterator[bytes]:
    yield request
    await asyncio.Event().wait()


async def silent(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
    await asyncio.Event().wait()
    return request


@pytest.fixture
async def source() -> AsyncIterator[str]:
    """Address of a source that begins to answer and then hangs."""
    server = grpc.aio.server()
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Stream": grpc.unary_stream_rpc_method_handler(stream),
        "Ask": grpc.unary_unary_rpc_method_handler(silent),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("hanging.Service", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def test_calls_on_a_closed_channel_end_as_failures_and_not_as_their_callers_end(source: str) -> None:
    async with grpc.aio.insecure_channel(source) as root, asyncio.timeout(DEADLINE_S):
        relay = grpc.aio.insecure_channel(source)
        channel = SwitchingChannel(root, lambda channel, code: None)
        channel.switch(relay)
        call = channel.unary_stream("/hanging.Service/Stream")(b"1", timeout=DEADLINE_S)
        assert await call.read() == b"1"
        reading = asyncio.create_task(call.read())
        asking = asyncio.create_task(channel.unary_unary("/hanging.Service/Ask")(b"1", timeout=DEADLINE_S))
        await asyncio.sleep(0.1)
        channel.switch(root)
        await relay.close()
        assert await reading is grpc.aio.EOF
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asking
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_reader_that_is_cancelled_is_cancelled(source: str) -> None:
    async with grpc.aio.insecure_channel(source) as root, asyncio.timeout(DEADLINE_S):
        call = SwitchingChannel(root, lambda channel, code: None).unary_stream("/hanging.Service/Stream")(b"1")
        assert await call.read() == b"1"
        reading = asyncio.create_task(call.read())
        await asyncio.sleep(0.1)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
