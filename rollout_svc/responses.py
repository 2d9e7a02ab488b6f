"""Answers to repeated requests: what was answered under a request id is kept, and given again from the beginning.

An answer is a list of messages: one for a unary call, all that have tokens for a stream.
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

        Sampling is cancelled when no caller reads any more. A reader that stalls does not hold up the others.

        Args:
            method: The method; each has ids of its own.
            request_id: The caller's id.
            content: All that makes two requests the same.
            make: Samples.
            passing: Returns whether a message is not kept, but only given to those who wait for one.

        Raises:
            SluiceError: ALREADY_EXISTS if the id was used for another request; whatever `make` raises.
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
    """The messages of one request so far, which any number of readers get from the beginning.

    Args:
        digest: Digest of the request.
        source: Samples. It is read to its end, whether the readers keep up or not.
        passing: See `ResponseCache.once`.

    Attributes:
        messages: Those that are kept.
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
        """Return whether it ended, and not with an error."""
        return self.task.done() and not self.task.cancelled() and self.task.exception() is None

    async def read(self) -> AsyncGenerator[M, None]:
        """Yield all messages. Raise what ended the sampling."""
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
