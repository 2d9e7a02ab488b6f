"""One sampling for a request and its retries. It continues for a while after its clients have left.

A client with a short timeout disconnects and retries. Without this, each retry would sample from the start, and none would finish.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from sluice.clock import CLOCK, Clock
from sluice.openai.answers import Begun, Delta, Result
from sluice.rpc import SluiceError
from sluice.tasks import discard_outcome

Part: TypeAlias = Begun | Delta | Result

Parts: TypeAlias = AsyncGenerator[Part | None, None]
"""Parts of a reply, and None as a sign of life."""

BACKLOG = 64
"""Maximum number of parts of a reply that wait for a slow client."""


@contextlib.asynccontextmanager
async def deadline(seconds: float, clock: Clock) -> AsyncIterator[None]:
    """End the block after `seconds`, with the error that clients get."""
    try:
        async with clock.timeout(seconds):
            yield
    except TimeoutError:
        raise too_late(seconds) from None


def too_late(seconds: float) -> SluiceError:
    """Return the error of a request that took longer than `seconds`."""
    return SluiceError(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "REQUEST_DEADLINE",
        f"no reply within {seconds:g} s (capture.deadlines.request_s); send the same request again to wait on",
    )


@dataclass(frozen=True, slots=True)
class Joined:
    """The rest of the reply comes from another sampling of the same request.

    Attributes:
        other: The other sampling.
    """

    other: SharedSampling


class SharedSampling:
    """The parts of one reply so far. Any number of requests read them, each from the beginning.

    Args:
        source: Samples. It is read to its end, unless there is no reader for a time.
        deadline_s: Seconds that the sampling may take.
        linger_s: Returns for how many seconds from now to continue without a reader.
        clock: The time of both.
        changed: Called when `unread` may have changed.

    Attributes:
        task: Reads the source.
        ending: Whether it is being cancelled because it has no readers. Then do not read it any more.
    """

    def __init__(
        self,
        source: AsyncGenerator[Part | Joined, None],
        deadline_s: float,
        linger_s: Callable[[], float],
        clock: Clock = CLOCK,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._parts: list[Part | Joined] = []
        self._linger_s, self._clock, self._unread_changed = linger_s, clock, changed
        self._readers = 0
        self._taken = self.ending = False
        self._changed = asyncio.Event()
        self._leaving: asyncio.Handle | None = None
        self.task = asyncio.create_task(self._read(source, deadline_s), name="sample for a session")
        discard_outcome(self.task)  # its last reader may leave while it fails

    @property
    def readers(self) -> int:
        """Return the number of readers."""
        return self._readers

    @property
    def unread(self) -> bool:
        """Return whether there is no reader, and none has read it to its end."""
        return not self._readers and not self._taken

    async def read(self) -> AsyncGenerator[Part | Joined, None]:
        """Yield all parts. Raise the error that ended the sampling. A reader that asks for more after the result has read it to its end."""
        self._readers += 1
        self._stay()
        self._unread_changed()
        given = 0
        try:
            while True:
                changed = self._changed
                while given < len(self._parts):
                    given += 1
                    yield self._parts[given - 1]
                    self._taken = self._taken or isinstance(self._parts[given - 1], Result)
                if self.task.done():
                    break
                await changed.wait()
            if self.task.cancelled():
                raise SluiceError.unavailable(
                    "DRAINING", "this gateway ends; send the same request to another one", 0.5
                )
            self.task.result()
        finally:
            self._readers -= 1
            self._unread_changed()
            if not self._readers and not self.task.done():
                self._leaving = self._clock.call_later(self._linger_s(), self._end)

    async def _read(self, source: AsyncGenerator[Part | Joined, None], deadline_s: float) -> None:
        try:
            async with deadline(deadline_s, self._clock), contextlib.aclosing(source):
                async for part in source:
                    self._parts.append(part)
                    self._wake()
        finally:
            self._stay()
            # The task is not done yet: readers look again when it is.
            asyncio.get_running_loop().call_soon(self._wake)

    def _end(self) -> None:
        self.ending = True
        self.task.cancel()

    def _stay(self) -> None:
        """Cancel the end that was due because there was no reader."""
        if self._leaving is not None:
            self._leaving.cancel()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


async def paced(
    source: AsyncGenerator[Part, None], keepalive_s: float, deadline_s: float, clock: Clock = CLOCK
) -> Parts:
    """Yield the parts of a source, and None whenever no part has come for `keepalive_s`. Closing this generator closes the source.

    Args:
        source: Runs in a task of its own.
        keepalive_s: Seconds without a part after which to yield None.
        deadline_s: Seconds after which this fails.
        clock: The time of both.

    Raises:
        SluiceError: DEADLINE_EXCEEDED; whatever the source raises.
    """
    queue: asyncio.Queue[Part | Exception] = asyncio.Queue(BACKLOG)
    given = asyncio.Event()

    async def pump() -> None:
        try:
            async with contextlib.aclosing(source):
                async for part in source:
                    await queue.put(part)
                    if isinstance(part, Result):
                        await given.wait()  # asking for more tells the source that the client has the result
        except Exception as error:  # noqa: BLE001 - passed on: the reader raises it
            await queue.put(error)

    pumping = asyncio.create_task(pump())
    end = clock() + deadline_s
    try:
        while True:
            left = end - clock()
            try:
                async with clock.timeout(min(keepalive_s, max(left, 0))):
                    part = await queue.get()
            except TimeoutError:
                if left > keepalive_s:
                    yield None
                    continue
                raise too_late(deadline_s) from None
            if isinstance(part, Exception):
                raise part
            yield part
            if isinstance(part, Result):
                given.set()
                await asyncio.wait({pumping})
                return
    finally:
        pumping.cancel()
        await asyncio.wait({pumping})
