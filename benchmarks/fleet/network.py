"""A simulated clock, simulated links and processes."""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_MOST_BACKGROUND = 0.95
"""Largest share of a simulated process that regular work may take. With more the process would never do anything else."""


class Process:
    """A process that does one thing after the other.

    Args:
        background: Share of its time that regular small work takes, which is not simulated message by message.
        endless: Whether its work takes no time. Then `busy_s` shows the requested load, even if it is more than the process can do.

    Attributes:
        free_at: When it has done all its work.
        busy_s: CPU seconds.
        lag_s: Longest time that something waited.
    """

    def __init__(self, background: float = 0.0, *, endless: bool = False) -> None:
        self.free_at = self.busy_s = self.lag_s = 0.0
        self.background, self._endless = background, endless

    def do(self, now: float, cost_s: float) -> float:
        """Do work of `cost_s` CPU seconds once earlier work is done; return when it is done."""
        self.busy_s += cost_s
        if self._endless:
            return now
        begun = max(now, self.free_at)
        self.lag_s = max(self.lag_s, begun - now)
        self.free_at = begun + cost_s / (1 - min(_MOST_BACKGROUND, self.background))
        return self.free_at


class Clock:
    """Events in the order of their times; those of one time in the order in which they were added.

    Attributes:
        polls: Time, replica and serial of each planned poll, in the order of their times. A heap would take most of the time of a
            simulation, and a new poll is always later than all others.
        on_poll: Takes replica and serial of a poll that is due.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self.polls: deque[tuple[float, int, int]] = deque()
        self.on_poll: Callable[[int, int], None] = lambda _replica, _serial: None
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, time: float, do: Callable[..., None], *arguments: Any) -> None:  # noqa: ANN401
        """Call `do` at a time."""
        self.events += 1
        heapq.heappush(self._queue, (max(time, self.now), self.events, do, arguments))

    def run(self, ended: Callable[[], bool]) -> None:
        """Go from event to event until `ended` returns true. Polls alone do not count as events.

        Raises:
            RuntimeError: if no events are left before that.
        """
        while not ended():
            if not self._queue:
                raise RuntimeError("nothing is left to do, and the run has not ended: a bug of the simulation")
            due = self._queue[0][0]
            while self.polls and self.polls[0][0] < due:
                self.now, replica, serial = self.polls.popleft()
                self.on_poll(replica, serial)
                due = self._queue[0][0]
            self.now, _, do, arguments = heapq.heappop(self._queue)
            do(*arguments)


class Uplink:
    """The uplink of a machine: all current transfers share it evenly, and none is faster than a single stream can be."""

    def __init__(self, clock: Clock, bytes_per_s: float, one_bytes_per_s: float = math.inf) -> None:
        self._clock, self.rate, self._one = clock, bytes_per_s, one_bytes_per_s
        self.sent = 0.0
        self.most = 0
        """Most transfers at a time."""
        self._each = self._since = 0.0  # bytes sent per transfer since the beginning; up to which time
        self._ends: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = self._planned = 0

    def send(self, size: float, done: Callable[..., None], *arguments: Any) -> None:  # noqa: ANN401
        """Send `size` bytes, then call `done`."""
        self._catch_up()
        self._serial += 1
        self.sent += size
        heapq.heappush(self._ends, (self._each + size, self._serial, done, arguments))
        self.most = max(self.most, len(self._ends))
        self._plan()

    def _speed(self) -> float:
        return min(self._one, self.rate / max(1, len(self._ends)))

    def _catch_up(self) -> None:
        if self._ends:
            self._each += (self._clock.now - self._since) * self._speed()
        self._since = self._clock.now

    def _plan(self) -> None:
        self._planned += 1
        if self._ends:
            left_s = max(0.0, self._ends[0][0] - self._each) / self._speed()
            self._clock.at(self._clock.now + left_s, self._end, self._planned)

    def _end(self, planned: int) -> None:
        if planned != self._planned:
            return  # others began since, so it ends later
        self._catch_up()
        first = self._ends[0][0]
        self._each = max(self._each, first)
        ended = []
        while self._ends and self._ends[0][0] <= self._each:
            ended.append(heapq.heappop(self._ends))
        self._plan()
        for _, _, done, arguments in ended:
            done(*arguments)


@dataclass
class Traffic:
    """Messages and bytes, by purpose."""

    messages: Counter[str] = field(default_factory=Counter)
    sizes: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, messages: float, size: float) -> None:
        """Count messages, and their total bytes."""
        self.messages[name] += messages  # type: ignore[assignment]  # a fraction, if several messages are counted at once
        self.sizes[name] += size  # type: ignore[assignment]
