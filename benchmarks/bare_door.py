"""What a captured request costs without Sluice: the same messages between three processes, with no work in them.

`door` takes a POST, and for it sends two messages on one open stream of `below` and makes one call of `engine`, which answers with two messages.
That is what a gateway, an orchestrator and a replica exchange for a request that is not streamed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

EXCHANGE, GENERATE = "/bare/exchange", "/bare/generate"

RECORD_BYTES, PROMPT_BYTES, OPENING_BYTES = 600, 500, 200
"""Approximate message sizes for a request of forty words and 64 tokens."""

_NUMBER_BYTES = 8


class Below(grpc.GenericRpcHandler):
    """Answers each message of a stream with itself, and a call with two messages.

    Args:
        latency_s: Seconds between these two messages.
    """

    def __init__(self, latency_s: float) -> None:
        self._latency_s = latency_s

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:  # noqa: ANN401
        """Return the handler of a method."""
        if handler_call_details.method == EXCHANGE:
            return grpc.stream_stream_rpc_method_handler(self._exchange)
        return grpc.unary_stream_rpc_method_handler(self._generate)

    async def _exchange(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:  # noqa: ANN401
        async for message in messages:
            yield message

    async def _generate(self, request: bytes, context: Any) -> AsyncIterator[bytes]:  # noqa: ANN401
        yield bytes(OPENING_BYTES)
        await asyncio.sleep(self._latency_s)
        yield request


async def serve_below(port: int, latency_s: float) -> None:
    """Serve `Below` until the process is ended."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Below(latency_s),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


async def serve_door(port: int, below: int, engine: int) -> None:
    """Serve the HTTP port until the process is ended."""
    exchange: Any = grpc.aio.insecure_channel(f"127.0.0.1:{below}").stream_stream(EXCHANGE)(wait_for_ready=True)
    generate: Any = grpc.aio.insecure_channel(f"127.0.0.1:{engine}").unary_stream(GENERATE)
    answers: dict[bytes, asyncio.Future[None]] = {}
    unsent: asyncio.Queue[bytes] = asyncio.Queue(maxsize=1 << 16)
    numbers = itertools.count()

    async def send() -> None:
        while True:
            await exchange.write(await unsent.get())

    async def receive() -> None:
        while isinstance(message := await exchange.read(), bytes):
            answers.pop(message[:_NUMBER_BYTES]).set_result(None)

    async def call() -> None:
        number = next(numbers).to_bytes(_NUMBER_BYTES, "big")
        answers[number] = asyncio.get_running_loop().create_future()
        unsent.put_nowait(number + bytes(RECORD_BYTES))
        await answers[number]

    async def reply(http: Request) -> JSONResponse:
        await http.json()
        await call()
        async for _ in generate(bytes(PROMPT_BYTES), wait_for_ready=True):
            pass
        await call()
        return JSONResponse({"choices": [{"message": {"role": "assistant", "content": "x" * 300}}]})

    app = Starlette(routes=[Route("/v1/chat/completions", reply, methods=["POST"])])
    config = uvicorn.Config(app, port=port, log_level="warning", access_log=False, http="httptools", loop="none")
    async with asyncio.TaskGroup() as group:
        group.create_task(send())
        group.create_task(receive())
        group.create_task(uvicorn.Server(config).serve())


def main() -> None:
    """Serve one of the processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("door", "below", "engine"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--below", type=int, default=0)
    parser.add_argument("--engine", type=int, default=0)
    parser.add_argument("--latency-s", type=float, default=0.0)
    given = parser.parse_args()
    if given.part == "door":
        serving = serve_door(given.port, given.below, given.engine)
    else:
        serving = serve_below(given.port, given.latency_s)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serving)


if __name__ == "__main__":
    main()
