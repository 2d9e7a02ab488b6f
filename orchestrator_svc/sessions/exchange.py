"""The server side of SessionService.Exchange: many calls at a time on one stream.

A separate gRPC call costs several wake-ups of both processes; here it is one message there and one back. Calls and answers that are
larger than a message travel in parts. At most the bytes of one session are held at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import TypeAlias

import grpc
import structlog
from google.protobuf.message import DecodeError

from sluice.clock import CLOCK, Clock
from sluice.limits import MAX_MESSAGE_BYTES
from sluice.rpc import SluiceError
from sluice.rpc.access import name_request
from sluice.rpc.parts import PartialMessages, split
from sluice.rpc.server import MethodMetrics, unexpected_failure
from sluice.tasks import settle
from sluice.v1 import session_pb2

STREAM_S = 300.0
"""Seconds after which a stream ends, so that access is checked again when the next one begins."""

MOST_CALLS = 16_384
"""Most calls of one stream in progress; further ones are read when others have ended."""

_LONGEST_CALL_S = 60.0
"""Most seconds that a call may take, whatever it asks for."""

WRITE_S = 5.0
"""Seconds for a client to read an answer, once its stream is to end."""

_LOG_ID_CHARACTERS = 128

_WRAPPING_BYTES = 64 << 10
"""Bytes of a call in addition to its recording."""

SESSIONS = "sluice.v1.SessionService"

Begin: TypeAlias = Callable[
    [str, session_pb2.BeginGenerationRequest, float], Awaitable[session_pb2.BeginGenerationResponse]
]
Record: TypeAlias = Callable[
    [str, session_pb2.RecordGenerationRequest], Awaitable[session_pb2.RecordGenerationResponse]
]
Get: TypeAlias = Callable[[str, session_pb2.GetGenerationRequest], Awaitable[session_pb2.GetGenerationResponse]]
Write: TypeAlias = Callable[[session_pb2.ExchangeResponse], Awaitable[None]]

_METRICS = {
    kind: MethodMetrics(SESSIONS, method)
    for kind, method in (("begin", "BeginGeneration"), ("record", "RecordGeneration"), ("get", "GetGeneration"))
}

log = structlog.get_logger(__name__)


async def answer_exchange(
    requests: AsyncIterator[session_pb2.ExchangeRequest],
    write: Write,
    begin: Begin,
    record: Record,
    get: Get,
    *,
    most_bytes: int,
    clock: Clock = CLOCK,
) -> None:
    """Answer the calls of one stream, each when it is done, until the stream ends or is `STREAM_S` old.

    Args:
        requests: The calls.
        write: Sends an answer.
        begin: Serves BeginGeneration: principal, request, and the seconds that it may wait for the same request elsewhere.
        record: Serves RecordGeneration: principal and request.
        get: Serves GetGeneration: principal and request.
        most_bytes: Most bytes of calls that come in parts; they count until they are answered.
        clock: Tells the age of the stream.
    """
    calls = set[asyncio.Task[None]]()
    places, writing = asyncio.Semaphore(MOST_CALLS), asyncio.Lock()
    arriving = _Arriving(most_bytes + _WRAPPING_BYTES, most_bytes, clock)

    async def serve(request: session_pb2.ExchangeRequest | SluiceError, call: int) -> None:
        if isinstance(request, SluiceError):
            answer, takes_parts = _failed(call, request), False
        else:
            name_request(request.log_id[:_LOG_ID_CHARACTERS])
            answer, takes_parts = await _answered(request, begin, record, get), request.takes_parts
        arriving.end(call)  # before its client gets the answer and sends calls that need the room
        for message in _messages(answer, takes_parts=takes_parts):
            async with writing:  # gRPC takes one message at a time
                await write(message)

    def ended(call: asyncio.Task[None]) -> None:
        calls.discard(call)
        places.release()

    try:
        with contextlib.suppress(TimeoutError):
            async with clock.timeout(STREAM_S):
                async for message in requests:
                    request = arriving.whole(message)
                    if request is None:
                        continue
                    await places.acquire()
                    call = asyncio.create_task(serve(request, message.call))
                    calls.add(call)
                    call.add_done_callback(ended)
                    call.add_done_callback(partial(arriving.end, message.call))
        if calls:
            await asyncio.wait({*calls}, timeout=_LONGEST_CALL_S + WRITE_S)
    finally:
        arriving.close()
        # gRPC refuses to end a call while a message of it is being written.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WRITE_S), writing:
                await _cancel(calls)
        await _cancel(calls)


class _Arriving:
    """The calls of one stream that come in parts, until they are answered.

    Args:
        held_bytes: Most bytes of these calls.
        session_bytes: Most bytes of a session, for people.
        clock: Tells when an unfinished call is forgotten.
    """

    def __init__(self, held_bytes: int, session_bytes: int, clock: Clock) -> None:
        self._held_bytes, self._session_bytes, self._clock = held_bytes, session_bytes, clock
        self._parts = PartialMessages(held_bytes)
        self._timers: dict[int, asyncio.Handle] = {}

    def whole(self, message: session_pb2.ExchangeRequest) -> session_pb2.ExchangeRequest | SluiceError | None:
        """Return a call that is complete, or why it is refused; None if parts of it are missing."""
        if message.WhichOneof("request") != "part":
            return message
        call, part = message.call, message.part
        try:
            if part.total_bytes:
                self._check(message)
            content = self._parts.add(call, part)
            if content is None:
                return None
            self._stop(call)
            return _parsed(call, content)
        except SluiceError as error:
            self._stop(call)
            return error

    def end(self, call: int, _task: object = None) -> None:
        """Forget a call."""
        self._stop(call)
        self._parts.forget(call)

    def close(self) -> None:
        """Forget all calls."""
        for call in list(self._timers):
            self.end(call)

    def _check(self, message: session_pb2.ExchangeRequest) -> None:
        """Refuse a call that is too large, or has no deadline; forget it at its deadline if it is incomplete by then.

        Raises:
            SluiceError: FAILED_PRECONDITION, INVALID_ARGUMENT.
        """
        if message.part.total_bytes > self._held_bytes:
            raise SluiceError.failed_precondition(
                "SESSION_FULL",
                f"the recording has {message.part.total_bytes} bytes, more than the {self._session_bytes} that"
                " orchestrator.external.session_mb allows a session: raise it, or sample fewer or shorter replies at a time",
            )
        timeout_s = _seconds_of(message)
        self._stop(message.call)
        self._timers[message.call] = self._clock.call_later(timeout_s, partial(self.end, message.call))

    def _stop(self, call: int) -> None:
        """Stop waiting for the parts of a call."""
        if (timer := self._timers.pop(call, None)) is not None:
            timer.cancel()


def _parsed(call: int, content: bytes) -> session_pb2.ExchangeRequest:
    """Return the call that came in parts.

    Raises:
        SluiceError: INVALID_ARGUMENT.
    """
    try:
        request = session_pb2.ExchangeRequest.FromString(content)
    except DecodeError as error:
        raise SluiceError.invalid_argument("part", f"the parts are no ExchangeRequest ({error})") from error
    if request.call != call or request.WhichOneof("request") == "part":
        raise SluiceError.invalid_argument("part", f"the parts of call {call} are those of another call, or of a part")
    return request


def _messages(answer: session_pb2.ExchangeResponse, *, takes_parts: bool) -> Iterator[session_pb2.ExchangeResponse]:
    """Yield the messages to send for an answer: the answer itself, or its parts."""
    size = answer.ByteSize()
    if size <= MAX_MESSAGE_BYTES:
        yield answer
    elif takes_parts:
        for part in split(answer.SerializeToString()):
            yield session_pb2.ExchangeResponse(call=answer.call, part=part)
    else:
        yield _failed(answer.call, too_large(size, "upgrade the gateway to one that takes it in parts"))


def too_large(size: int, remedy: str) -> SluiceError:
    """Return the error of an answer that is larger than a message."""
    return SluiceError.failed_precondition(
        "MESSAGE_TOO_LARGE",
        f"message_bytes: the answer has {size} bytes, the contracts allow {MAX_MESSAGE_BYTES}: {remedy}",
    )


def _failed(call: int, error: SluiceError) -> session_pb2.ExchangeResponse:
    """Return the answer to a call that failed."""
    return session_pb2.ExchangeResponse(call=call, error=error.to_status().SerializeToString())


async def _cancel(calls: Iterable[asyncio.Task[None]]) -> None:
    cancelled = [*calls]
    for each in cancelled:
        each.cancel()
    await settle(*cancelled)


async def _answered(
    request: session_pb2.ExchangeRequest, begin: Begin, record: Record, get: Get
) -> session_pb2.ExchangeResponse:
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
        elif kind == "record":
            answer.recorded.CopyFrom(await record(request.on_behalf_of, request.record))
        else:
            answer.got.CopyFrom(await get(request.on_behalf_of, request.get))
    except SluiceError as error:
        code = error.code
        answer.error = error.to_status().SerializeToString()
    except asyncio.CancelledError:
        code = grpc.StatusCode.CANCELLED
        raise
    except Exception as error:
        log.exception("rpc failed unexpectedly", rpc=f"{SESSIONS}/Exchange", kind=kind)
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
        raise SluiceError.invalid_argument("request", "is not set; set `begin`, `record` or `get`")
    if not request.on_behalf_of:
        raise SluiceError.invalid_argument("on_behalf_of", "is empty; name the principal whose call it is")
    return _seconds_of(request)


def _seconds_of(request: session_pb2.ExchangeRequest) -> float:
    """Return the seconds that a call may take.

    Raises:
        SluiceError: INVALID_ARGUMENT.
    """
    seconds = request.timeout.ToNanoseconds() / 1e9
    if seconds <= 0:
        raise SluiceError.invalid_argument("timeout", f"is {seconds:g} s; give more than 0 s")
    return min(seconds, _LONGEST_CALL_S)
