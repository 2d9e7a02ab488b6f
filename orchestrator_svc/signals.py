"""Something happened: wakes everyone who waits, each of whom looks again at what they wait for."""

from __future__ import annotations

import asyncio

__all__ = ["Signal"]


class Signal:
    """A wake-up call without content. Check the condition, then `wait`: nothing is missed in between on one event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake all who wait now."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, at_most_s: float | None = None) -> None:
        """Return at the next `notify`, or after `at_most_s` seconds."""
        try:
            async with asyncio.timeout(at_most_s):
                await self._event.wait()
        except TimeoutError:
            return
