"""A condition that loops of one event loop wait for: `notify` wakes all of them, and each checks what it waits for."""

from __future__ import annotations

import asyncio

__all__ = ["Notifier"]


class Notifier:
    """Wakes all who wait. Check the condition, then `wait`: on one event loop nothing is missed in between."""

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
