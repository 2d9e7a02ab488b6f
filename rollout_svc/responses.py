"""Answers to repeated requests: keep the answer of each request id, and send it again from the beginning.

An answer is a list of messages: one message for a unary call, all messages with tokens for a stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from typing import Any, Generic, TypeVar

import xxhash
from google.protobuf.message import Message

from sluice.rpc import SluiceError
from sluice.tasks import discard_outcome

M = TypeVar("M", bound=Message)


class ResponseCache:
    """Answers by request id, from the start of a request until some time after its end.

    Args:
        ttl_s: How long an answer is kept after its end, in seconds.
        most: Maximum number of kept answers; the oldest are removed first.
        most_bytes: Maximum size of all kept answers; the oldest are removed first.
        clock: Monotonic seconds.
    """

    def __init__(self, ttl_s: float, most: int, most_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s, self._most, self._most_bytes, self._clock = ttl_s, most, most_bytes, clock
        self._bytes = 0
        self._kept: OrderedDict[tuple[str, str], tuple[float, int, Answer[Any]]] = OrderedDict()
        self._running: dict[tuple[str, str], Answer[Any]] = {}

    async def once(
        self,
        method: str,
        request_id: str,
        content: bytes,
        make: Callable[[], AsyncGenerator[M, None]],
        passing: Callable[[M], bool] = lambda _: False,
    ) -> AsyncGenerator[M, None]:
        """Yield the answer to a request: a kept answer, the answer of the same request in progress, or a new one.

        When no caller reads any more, sampling is cancelled. A reader that stalls does not delay the others.

        Args:
            method: The method. Each method has separate ids.
            request_id: The caller's id.
            content: The content by which requests are compared.
            make: Returns a new answer.
            passing: Returns whether to pass a message only to readers that are waiting now, and not to keep it.

        Raises:
            SluiceError: ALREADY_EXISTS if the id was used for another request; errors of `make`.
        """
        key, digest = (method, request_id), xxhash.xxh3_128_digest(content)
        self._forget_old()
        answer = self._kept[key][2] if key in self._kept else self._running.get(key)
        if answer is None:
            answer = self._running[key] = Answer(digest, make(), passing)
        elif answer.digest != digest:
            raise SluiceError.already_exists(
                "REQUEST_ID_REUSED",
                f"request_id {request_id!r} was used for a request with other fields: choose a new id",
            )
        answer.readers += 1
        try:
            async for message in answer.read():
                yield message
        finally:
            answer.readers -= 1
            if self._running.get(key) is answer and (answer.task.done() or not answer.readers):
                del self._running[key]
                answer.task.cancel()
                if answer.complete:
                    self._keep(key, answer)

    def _keep(self, key: tuple[str, str], answer: Answer[Any]) -> None:
        size = sum(message.ByteSize() for message in answer.messages)
        self._kept[key] = (self._clock() + self._ttl_s, size, answer)
        self._bytes += size
        self._forget_old()

    def _forget_old(self) -> None:
        now = self._clock()
        while self._kept:
            oldest = next(iter(self._kept))
            ends, size, _ = self._kept[oldest]
            if ends > now and len(self._kept) <= self._most and self._bytes <= self._most_bytes:
                return
            del self._kept[oldest]
            self._bytes -= size


class Answer(Generic[M]):
    """The messages of one request so far. Any number of readers get them, each from the beginning.

    Args:
        digest: Digest of the request.
        source: Yields the messages. It is read to its end, even if readers are slower.
        passing: See `ResponseCache.once`.

    Attributes:
        messages: The messages that are kept.
        readers: Number of calls that read it.
        task: Reads the source.
    """

    def __init__(self, digest: bytes, source: AsyncGenerator[M, None], passing: Callable[[M], bool]) -> None:
        self.digest = digest
        self.messages: list[M] = []
        self.readers = 0
        self._passing = passing
        self._sign: M | None = None
        self._changed = asyncio.Event()
        self.task = asyncio.create_task(self._record(source))
        discard_outcome(self.task)  # its last reader may leave while it fails

    @property
    def complete(self) -> bool:
        """Return whether it has ended without an error."""
        return self.task.done() and not self.task.cancelled() and self.task.exception() is None

    async def read(self) -> AsyncGenerator[M, None]:
        """Yield all messages. Raise the error that ended the sampling."""
        given, sign = 0, self._sign
        while True:
            if given < len(self.messages):
                given += 1
                yield self.messages[given - 1]
            elif self._sign is not sign:
                sign = self._sign
                if sign is not None:
                    yield sign
            elif self.task.done():
                self.task.result()
                return
            else:
                await self._changed.wait()

    async def _record(self, source: AsyncGenerator[M, None]) -> None:
        try:
            async with contextlib.aclosing(source):
                async for message in source:
                    if self._passing(message):
                        self._sign = message
                    else:
                        self.messages.append(message)
                    self._wake()
        finally:
            self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
