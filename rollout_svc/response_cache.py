"""Idempotent generation: a retry with the same request_id gets the response of the first request."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

import xxhash

from sluice.rpc import SluiceError
from sluice.tasks import discard_outcome
from sluice.v1 import rollout_pb2

__all__ = ["ResponseCache"]

Response = rollout_pb2.GenerateResponse


class ResponseCache:
    """Responses by request id, from the start of a request until some time after its end.

    Args:
        ttl_s: How long a response is kept, in seconds.
        most: Maximum number of responses; the oldest are removed first.
        most_bytes: Maximum size of all responses; the oldest are removed first.
        clock: Monotonic seconds.
    """

    def __init__(self, ttl_s: float, most: int, most_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s, self._most, self._most_bytes, self._clock = ttl_s, most, most_bytes, clock
        self._bytes = 0
        self._kept: OrderedDict[str, tuple[float, bytes, Response]] = OrderedDict()
        self._running: dict[str, tuple[bytes, asyncio.Task[Response], int]] = {}

    async def once(self, request_id: str, content: bytes, make: Callable[[], Awaitable[Response]]) -> Response:
        """Return the response to a request: a kept one, that of the same request in progress, or a new one.

        Sampling is cancelled when no caller waits for it any more.

        Args:
            request_id: The id that the caller chose.
            content: The serialised request; a retry must have the same.
            make: Samples and returns the response.

        Raises:
            SluiceError: ALREADY_EXISTS if the id was used for another request.
        """
        content = xxhash.xxh3_128_digest(content)
        self._forget_old()
        if request_id in self._kept:
            _, kept_content, answer = self._kept[request_id]
            _require_same(request_id, content, kept_content)
            return answer
        running = self._running.get(request_id)
        if running is None:
            task = asyncio.ensure_future(_run(make))
            discard_outcome(task)  # its last waiter may leave while it fails
            waiters = 0
        else:
            running_content, task, waiters = running
            _require_same(request_id, content, running_content)
        self._running[request_id] = (content, task, waiters + 1)
        try:
            answer = await asyncio.shield(task)
        finally:
            self._leave(request_id, task)
        if request_id not in self._kept:  # the first of several waiters keeps it
            self._kept[request_id] = (self._clock() + self._ttl_s, content, answer)
            self._bytes += answer.ByteSize()
            self._forget_old()
        return answer

    def _leave(self, request_id: str, task: asyncio.Task[Response]) -> None:
        content, _, waiters = self._running[request_id]
        if waiters > 1:
            self._running[request_id] = (content, task, waiters - 1)
            return
        del self._running[request_id]
        if not task.done():
            task.cancel()

    def _forget_old(self) -> None:
        now = self._clock()
        while self._kept:
            oldest = next(iter(self._kept))
            ends, _, answer = self._kept[oldest]
            if ends > now and len(self._kept) <= self._most and self._bytes <= self._most_bytes:
                return
            del self._kept[oldest]
            self._bytes -= answer.ByteSize()


async def _run(make: Callable[[], Awaitable[Response]]) -> Response:
    return await make()


def _require_same(request_id: str, content: bytes, before: bytes) -> None:
    if content != before:
        raise SluiceError.already_exists(
            "REQUEST_ID_REUSED", f"request_id {request_id!r} was used for a request with other fields: choose a new id"
        )
