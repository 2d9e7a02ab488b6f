"""Order of the prompts of several tenants that wait for threads: tenants take turns by the size of their prompts, not by arrival."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Rounds(Generic[Item]):
    """A queue with a line for each tenant: deficit round robin (Shreedhar and Varghese, 1996). Pure.

    In each round a tenant's allowance grows by `quantum` bytes. When its line is empty, the rest of its allowance is lost. So if two tenants
    both wait, neither gets further ahead of the other than by a quantum and its largest item.

    Args:
        quantum: Bytes per tenant and round.
    """

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._lines: OrderedDict[str, deque[tuple[int, Item]]] = OrderedDict()
        """Lines in the order of the round. The first line is being served."""
        self._left: dict[str, int] = {}
        """Allowance of each tenant: bytes that may still be served. It grows when the tenant's turn comes."""
        self._begun = False
        """Whether the first line has got its quantum for this turn."""

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def push(self, tenant: str, size: int, item: Item) -> None:
        """Append an item to its tenant's line."""
        self._lines.setdefault(tenant, deque()).append((size, item))

    def pop(self) -> Item | None:
        """Return the next item; None if there is none."""
        while self._lines:
            tenant, line = next(iter(self._lines.items()))
            if not self._begun:
                self._begun = True
                self._left[tenant] = self._left.get(tenant, 0) + self._quantum
            size, item = line[0]
            if size <= self._left[tenant]:
                line.popleft()
                self._left[tenant] -= size
                if not line:
                    del self._lines[tenant], self._left[tenant]
                    self._begun = False
                return item
            self._lines.move_to_end(tenant)
            self._begun = False
        return None


class Turns:
    """Places for work of several tenants. Large pieces of work may take only some of the places, so that small ones never wait for large ones.

    Args:
        places: Maximum number of pieces of work at a time.
        large_places: How many of these may be large.
        large: Size in bytes above which a piece is large.
    """

    def __init__(self, places: int, large_places: int, large: int) -> None:
        self._places, self._large_places, self._large = places, large_places, large
        self._small_waiting, self._large_waiting = (
            Rounds[asyncio.Future[None]](large),
            Rounds[asyncio.Future[None]](large),
        )
        self._small_taken = self._large_taken = 0

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str, size: int) -> AsyncIterator[None]:
        """Wait for a place, and keep it while the block runs."""
        is_large = size > self._large
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        (self._large_waiting if is_large else self._small_waiting).push(tenant, size, place)
        self._give_places()
        try:
            await place
            yield
        finally:
            if not place.cancelled():  # even if the place was given just before its waiter was cancelled
                self._large_taken -= is_large
                self._small_taken -= not is_large
                self._give_places()

    def _give_places(self) -> None:
        while self._small_taken + self._large_taken < self._places:
            if self._large_taken < self._large_places and (place := self._next(self._large_waiting)) is not None:
                self._large_taken += 1
            elif (place := self._next(self._small_waiting)) is not None:
                self._small_taken += 1
            else:
                return
            place.set_result(None)

    @staticmethod
    def _next(waiting: Rounds[asyncio.Future[None]]) -> asyncio.Future[None] | None:
        """Return the next place that somebody still waits for."""
        while (place := waiting.pop()) is not None and place.cancelled():
            pass
        return place
