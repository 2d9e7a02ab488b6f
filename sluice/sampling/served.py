"""Deadlines that count only the time in which something was served, not the time in which it waited for a replica or was scored.

If an episode's requests wait in a queue or for a replica, that is no fault of its task; scoring has separate limits. `ServedTime` is the
pure state machine. `ServedDeadline` uses it to end a block of code. The deadline of a group has a `part` for each episode that runs by
itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from enum import Enum

from sluice.clock import CLOCK, Clock
from sluice.v1 import rollout_pb2


class OverdueError(TimeoutError):
    """A block was served for longer than its deadline allows.

    Args:
        limit_s: Seconds that the deadline allows.
    """

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"not done in {limit_s:g} s of work (orchestrator.deadlines.episode_s)")


class Place(Enum):
    """Where a request is."""

    NOWHERE = "nowhere"
    """No replica has it, because none is fit or none serves its version."""
    QUEUED = "queued"
    """A replica has it but does not work on it, because it is full, paused, or switching to other weights."""
    SERVED = "served"
    """A replica works on it."""
    LIMITED = "limited"
    """It is not a request, but something with a separate limit: the environment scores answers, or an episode runs by itself."""


def place_of(chunk: rollout_pb2.StreamChunk) -> Place:
    """Return where a request is, from a message of its stream."""
    return Place.SERVED if chunk.deltas or chunk.stage == rollout_pb2.REQUEST_STAGE_RUNNING else Place.QUEUED


class ServedTime:
    """Adds up the seconds in which something was served. Pure: the caller passes the time in monotonic seconds.

    Two kinds of seconds count: a replica serves one of its requests; or nothing is in progress, neither a request nor anything else with a
    separate limit, so that the environment is working.
    """

    def __init__(self, now: float) -> None:
        self._requests: Counter[Place] = Counter()
        self._since, self._seconds = now, 0.0

    @property
    def counts(self) -> bool:
        """Whether the time now passing counts."""
        return self._requests[Place.SERVED] > 0 or not self._requests.total()

    @property
    def nowhere(self) -> bool:
        """Whether one of its requests waits until there is a replica for it."""
        return self._requests[Place.NOWHERE] > 0

    def seconds(self, now: float) -> float:
        """Return the seconds that counted so far."""
        return self._seconds + (now - self._since if self.counts else 0.0)

    def move(self, before: Place | None, after: Place | None, now: float) -> None:
        """Note that a request has moved. `before` is None when it begins, `after` is None when it has ended."""
        self._seconds, self._since = self.seconds(now), now
        if before is not None:
            self._requests[before] -= 1
        if after is not None:
            self._requests[after] += 1


class WaitingRequests:
    """Number of requests that wait until there is a replica, over several deadlines. While it is 0, no deadline has to be asked."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class ServedDeadline:
    """Ends a block of code when its work was served for too long.

    Args:
        limit_s: Seconds of service that are allowed; None: no limit.
        clock: The time.
        waiting: Counts the requests that wait for a replica, together with those of other deadlines.
    """

    def __init__(self, limit_s: float | None, clock: Clock = CLOCK, waiting: WaitingRequests | None = None) -> None:
        self._limit_s, self._clock = limit_s, clock
        self._waiting = waiting or WaitingRequests()
        self._time = ServedTime(clock())
        self._expire: Callable[[], None] = lambda: None
        self._due: asyncio.Handle | None = None
        self._parts: set[ServedDeadline] = set()

    @property
    def nowhere(self) -> bool:
        """Whether a request waits until there is a replica for it."""
        return self._time.nowhere or any(each.nowhere for each in self._parts)

    @contextlib.asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Run a block that is cancelled when the limit is reached.

        Raises:
            OverdueError: if the block was cancelled by the limit.
        """
        loop, expired = asyncio.get_running_loop(), False
        try:
            async with asyncio.timeout(None) as cancelling:

                def expire() -> None:
                    nonlocal expired
                    expired = True
                    cancelling.reschedule(loop.time())

                self._expire = expire
                self._schedule()
                try:
                    yield
                finally:
                    self._expire = lambda: None
                    self._cancel()
        except TimeoutError as error:
            if self._limit_s is None or not expired:  # a timeout of the block's code
                raise
            raise OverdueError(self._limit_s) from error

    @contextlib.asynccontextmanager
    async def part(self) -> AsyncIterator[ServedDeadline]:
        """Run a block with a separate deadline of the same length. This deadline does not count the block's time.

        Raises:
            OverdueError: if the block was served for too long.
        """
        part = ServedDeadline(self._limit_s, self._clock, self._waiting)
        self._parts.add(part)
        try:
            with self._elsewhere():
                async with part.limit():
                    yield part
        finally:
            self._parts.remove(part)

    @contextlib.contextmanager
    def request(self) -> Iterator[Callable[[Place], None]]:
        """Count a request as in progress in the block, at first nowhere. The block reports each new place to the yielded function."""
        place = Place.NOWHERE

        def moved(to: Place) -> None:
            nonlocal place
            if to is not place:
                self._move(place, to)
                place = to

        self._move(None, place)
        try:
            yield moved
        finally:
            self._move(place, None)

    @contextlib.contextmanager
    def scoring(self) -> Iterator[None]:
        """Do not count the block's time, because it scores answers."""
        with self._elsewhere():
            yield

    @contextlib.contextmanager
    def _elsewhere(self) -> Iterator[None]:
        with self.request() as moved:
            moved(Place.LIMITED)
            yield

    def _move(self, before: Place | None, after: Place | None) -> None:
        counted = self._time.counts
        self._time.move(before, after, self._clock())
        self._waiting.count += (after is Place.NOWHERE) - (before is Place.NOWHERE)
        if self._time.counts != counted:
            self._schedule()

    def _schedule(self) -> None:
        self._cancel()
        if self._limit_s is not None and self._time.counts:
            left_s = self._limit_s - self._time.seconds(self._clock())
            self._due = self._clock.call_later(max(0.0, left_s), self._expire)

    def _cancel(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
