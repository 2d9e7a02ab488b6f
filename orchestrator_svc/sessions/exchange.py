"""The server's side of SessionService.Exchange: many calls at a time on one stream.

A call of its own costs gRPC several wake-ups of both processes; here it is one message there and one back.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeAlias

import grpc
import structlog

from sluice.clock import CLOCK, Clock
from sluice.rpc import SluiceError
from sluice.rpc.access import name_request
from sluice.rpc.server import MethodMetrics, unexpected_failure
from sluice.tasks import settle
from sluice.v1 import session_pb2

STREAM_S = 300.0
"""Seconds after which a stream ends: who may call is looked at when the next one begins."""

MOST_CALLS = 16_384
"""Calls of one stream under way; further ones are read when others have ended."""

_LONGEST_CALL_S = 60.0
"""Seconds that a call may take, whatever it says."""

WRITE_S = 5.0
"""Seconds for a client to read an answer, once its stream is to end."""

_LOG_ID_CHARACTERS = 128

_SERVICE = "sluice.v1.SessionService"

Begin: TypeAlias = Callable[
    [str, session_pb2.BeginGenerationRequest, float], Awaitable[session_pb2.BeginGenerationResponse]
]
Record: TypeAlias = Callable[
    [str, session_pb2.RecordGenerationRequest], Awaitable[session_pb2.RecordGenerationResponse]
]
Write: TypeAlias = Callable[[session_pb2.ExchangeResponse], Awaitable[None]]

_METRICS = {
    kind: MethodMetrics(_SERVICE, method)
    for kind, method in (("begin", "BeginGeneration"), ("record", "RecordGeneration"))
}

log = structlog.get_logger(__name__)


async def answer_exchange(
    requests: AsyncIterator[session_pb2.ExchangeRequest],
    write: Write,
    begin: Begin,
    record: Record,
    *,
    clock: Clock = CLOCK,
) -> None:
    """Answer the calls of one stream, each when it is done, until the stream ends or is `STREAM_S` old.

    Args:
        requests: The calls.
        write: Sends an answer.
        begin: Serves BeginGeneration: principal, request, and the seconds that it may wait for the same request elsewhere.
        record: Serves RecordGeneration: principal and request.
        clock: Tells the age of the stream.
    """
    calls = set[asyncio.Task[None]]()
    places, writing = asyncio.Semaphore(MOST_CALLS), asyncio.Lock()

    async def serve(request: session_pb2.ExchangeRequest) -> None:
        name_request(request.log_id[:_LOG_ID_CHARACTERS])
        answer = await _answered(request, begin, record)
        async with writing:  # gRPC takes one message at a time
            await write(answer)

    def ended(call: asyncio.Task[None]) -> None:
        calls.discard(call)
        places.release()

    try:
        with contextlib.suppress(TimeoutError):
            async with clock.timeout(STREAM_S):
                async for request in requests:
                    await places.acquire()
                    call = asyncio.create_task(serve(request))
                    calls.add(call)
                    call.add_done_callback(ended)
        if calls:
            await asyncio.wait({*calls}, timeout=_LONGEST_CALL_S + WRITE_S)
    finally:
        # gRPC refuses to end a call while a message of it is being written.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WRITE_S), writing:
                await _cancel(calls)
        await _cancel(calls)


async def _cancel(calls: Iterable[asyncio.Task[None]]) -> None:
    cancelled = [*calls]
    for each in cancelled:
        each.cancel()
    await settle(*cancelled)


async def _answered(request: session_pb2.ExchangeRequest, begin: Begin, record: Record) -> session_pb2.ExchangeResponse:
    """Return the answer to one call, or what it failed with."""
    answer, code, began = session_pb2.ExchangeResponse(call=request.call), grpc.StatusCode.OK, time.perf_counter()
    kind = request.WhichOneof("request")
    metrics = _METRICS.get(kind or "")
    if metrics is not None:
        metrics.begin()
    try:
        timeout_s = _check(request)
        if kind == "begin":
            answer.begun.CopyFrom(await begin(request.on_behalf_of, request.begin, timeout_s / 2))
        else:
            answer.recorded.CopyFrom(await record(request.on_behalf_of, request.record))
    except SluiceError as error:
        code = error.code
        answer.error = error.to_status().SerializeToString()
    except asyncio.CancelledError:
        code = grpc.StatusCode.CANCELLED
        raise
    except Exception as error:
        log.exception("rpc failed unexpectedly", rpc=f"{_SERVICE}/Exchange", kind=kind)
        failure = unexpected_failure(error, request.log_id[:_LOG_ID_CHARACTERS])
        code = failure.code
        answer.error = failure.to_status().SerializeToString()
    finally:
        if metrics is not None:
            metrics.end(code, time.perf_counter() - began)
    return answer


def _check(request: session_pb2.ExchangeRequest) -> float:
    """Refuse a malformed call; return the seconds that it may take.

    Raises:
        SluiceError: INVALID_ARGUMENT.
    """
    if request.WhichOneof("request") is None:
        raise SluiceError.invalid_argument("request", "is not set; set `begin` or `record`")
    if not request.on_behalf_of:
        raise SluiceError.invalid_argument("on_behalf_of", "is empty; name the principal whose call it is")
    seconds = request.timeout.ToNanoseconds() / 1e9
    if seconds <= 0:
        raise SluiceError.invalid_argument("timeout", f"is {seconds:g} s; give more than 0 s")
    return min(seconds, _LONGEST_CALL_S)
