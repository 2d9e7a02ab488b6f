"""A clock that only tests move, for parts that take a `sluice.clock.Clock`, so that the load of the machine does not matter."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator, Callable

from sluice.clock import Clock

LIMIT_S = 60.0
"""Real seconds for something that should happen at once; only a broken test takes this long."""

_ROUNDS = 20
"""Turns of the event loop in which a woken task reaches its next wait, unless it needs I/O."""


class _Callback(asyncio.Handle):
    """What `call_later` returns."""

    def __init__(self, forget: Callable[[], None]) -> None:
        super().__init__(forget, (), asyncio.get_running_loop())
        self._forget = forget

    def cancel(self) -> None:
        super().cancel()
        self._forget()


class SimulatedClock(Clock):
    """A clock that stands still until `advance`. Real I/O runs beside it: wait for its effect with `until`.

    Attributes:
        now: The time in seconds.
    """

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self._order = itertools.count()
        self._waits: list[tuple[float, int, Callable[[], None]]] = []
        self._open: set[int] = set()

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken = asyncio.get_running_loop().create_future()
        with self._wait(seconds, lambda: woken.done() or woken.set_result(None)):
            await woken

    @contextlib.asynccontextmanager
    async def timeout(self, seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(None) as limit:
            if seconds is None:
                yield limit
                return

            def end() -> None:
                if not limit.expired():
                    limit.reschedule(loop.time())

            if seconds <= 0:
                end()
            with self._wait(seconds, end):
                yield limit

    def call_later(self, seconds: float, callback: Callable[[], object]) -> asyncio.Handle:
        number = next(self._order)
        heapq.heappush(self._waits, (self.now + seconds, number, callback))
        self._open.add(number)
        return _Callback(lambda: self._open.discard(number))

    @contextlib.contextmanager
    def _wait(self, seconds: float, end: Callable[[], None]):
        number = next(self._order)
        heapq.heappush(self._waits, (self.now + seconds, number, end))
        self._open.add(number)
        try:
            yield
        finally:
            self._open.discard(number)

    @property
    def waits(self) -> int:
        """How many sleeps, timeouts and callbacks are to come."""
        return len(self._open)

    async def advance(self, seconds: float) -> None:
        """Let time pass: end each wait at its time, in order, and let those who waited come to their next wait."""
        end = self.now + seconds
        await self._settle()
        while self._waits and self._waits[0][0] <= end:
            at, number, finish = heapq.heappop(self._waits)
            if number in self._open:
                self._open.discard(number)
                self.now = max(self.now, at)
                finish()
                await self._settle()
        self.now = end

    async def until(self, condition: Callable[[], object], *, step_s: float = 0.0) -> None:
        """Wait until a condition holds. With `step_s` so much simulated time passes between two looks."""
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await asyncio.sleep(0.001)
                if step_s:
                    await self.advance(step_s)

    async def _settle(self) -> None:
        for _ in range(_ROUNDS):
            await asyncio.sleep(0)
