"""The events of a run: a bounded history that any number of watchers read at their own pace."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from sluice.v1 import orchestrator_pb2

__all__ = ["KEPT", "EventLog"]

KEPT = 10_000
"""Events kept, as the contract says."""


_NUMBERS_PER_START = 1 << 32
"""Sequence numbers of one process: more than it can emit, so that those of the next process are all greater."""


class EventLog:
    """Events by sequence number.

    The numbers of the first process begin at 1. Each later process of the run begins above all that its predecessors can
    have used, so that a watcher that reads on from the last number it saw misses no event.

    Args:
        start: Number of this process among those of the run, from 1.
    """

    def __init__(self, start: int = 1) -> None:
        self._events: deque[orchestrator_pb2.RunEvent] = deque(maxlen=KEPT)
        self._next = (start - 1) * _NUMBERS_PER_START + 1
        self._changed = asyncio.Event()
        self._ended = False
        self._watchers = 0
        self._nobody = asyncio.Event()
        self._nobody.set()

    def append(self, event: orchestrator_pb2.RunEvent) -> None:
        """Number an event, stamp it and show it to the watchers."""
        event.sequence_no = self._next
        event.time.GetCurrentTime()
        self._events.append(event)
        self._next += 1
        self._wake()

    def end(self) -> None:
        """No event will follow."""
        self._ended = True
        self._wake()

    async def follow(self, from_sequence_no: int) -> AsyncIterator[orchestrator_pb2.RunEvent]:
        """Events from a number on, or from the oldest one kept, until the run has ended."""
        number = max(1, from_sequence_no)
        self._watchers += 1
        self._nobody.clear()
        try:
            while True:
                changed = self._changed
                while number < self._next:
                    number = max(number, self._next - len(self._events))
                    yield self._events[number - (self._next - len(self._events))]
                    number += 1
                if self._ended:
                    return
                await changed.wait()
        finally:
            self._watchers -= 1
            if not self._watchers:
                self._nobody.set()

    async def all_read(self, deadline_s: float) -> bool:
        """Wait until the watchers have read the end and left; returns whether they did in time."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._nobody.wait()
        except TimeoutError:
            return False
        return True

    def _wake(self) -> None:
        """Wake all who wait, each once."""
        self._changed.set()
        self._changed = asyncio.Event()
