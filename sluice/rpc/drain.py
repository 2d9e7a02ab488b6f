"""Drain of a service: it takes no new work, and work in progress gets a limited time to end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from sluice.clock import CLOCK, Clock


class Drain:
    """Whether a service drains, and the time that is left for work in progress. Further calls of `begin` can only shorten that time.

    Args:
        clock: Measures that time.

    Attributes:
        begun: Set once the drain has begun.
    """

    def __init__(self, clock: Clock = CLOCK) -> None:
        self.begun = asyncio.Event()
        self._clock = clock
        self._end = float("inf")
        self._shorter = asyncio.Event()

    def begin(self, grace_s: float) -> None:
        """Drain within `grace_s` seconds."""
        self._end = min(self._end, self._clock() + grace_s)
        self.begun.set()
        self._shorter.set()

    @property
    def left_s(self) -> float:
        """Return the seconds that are left for work in progress; infinite before `begin`."""
        return max(0.0, self._end - self._clock())

    async def until(self, idle: asyncio.Event) -> None:
        """Wait until an event is set or the time is over."""
        while self.left_s and not idle.is_set():
            self._shorter.clear()
            waits = [asyncio.ensure_future(each.wait()) for each in (idle, self._shorter)]
            try:
                with contextlib.suppress(TimeoutError):
                    async with self._clock.timeout(self.left_s if self.begun.is_set() else None):
                        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    async def within(self, work: asyncio.Future[Any]) -> bool:
        """Wait until some work has ended or the time is over. Return whether it has ended; it is not cancelled."""
        ended = asyncio.Event()
        work.add_done_callback(lambda _: ended.set())
        if not work.done():
            await self.until(ended)
        return work.done()


def describe_left(left: Mapping[str, int]) -> str:
    """Return what is left of a drain, for people: ``2 episodes, 1 Step``."""
    return ", ".join(f"{count} {kind}" for kind, count in sorted(left.items())) or "nothing"
