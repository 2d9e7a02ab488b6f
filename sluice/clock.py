"""Time for parts that wait. They take a clock as an argument, so that tests decide when time passes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager


class Clock:
    """The monotonic clock of this machine, and waits on it. Call it for the time in seconds."""

    def __call__(self) -> float:
        """Return the time in seconds."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)

    def timeout(self, seconds: float | None) -> AbstractAsyncContextManager[asyncio.Timeout]:
        """Return a context whose body is cancelled after `seconds`, with TimeoutError; None: never."""
        return asyncio.timeout(seconds)

    def call_later(self, seconds: float, callback: Callable[[], object]) -> asyncio.Handle:
        """Call `callback` after `seconds`, unless the handle is cancelled before. This needs no task."""
        return asyncio.get_running_loop().call_later(seconds, callback)


CLOCK = Clock()
"""The default clock."""
