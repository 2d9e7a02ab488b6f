"""How many samples a replica is given at a time. Pure: the caller passes reports and the time.

An engine with few samples leaves places empty. With too many they wait: they begin late, and where the KV cache is too small, samples
are preempted and computed again. `ConcurrencyLimit` finds the number between. It grows by a step at a time while the limit holds
samples back and the engine has room. Where a queue stands, it shrinks by what is too much in the queue; after a preemption that is
all but one group. So the engine always has something to begin with, and never has less to do than with a higher limit.

A queue that comes and goes is no reason to shrink: groups begin together. What counts is the queue that is never empty, its
minimum over a while, as in CoDel (Nichols and Jacobson, 2012).
"""

from __future__ import annotations

import math
import sys
from collections import deque
from dataclasses import dataclass

from sluice.sampling.config import ConcurrencyConfig

_KV_HIGH = 0.9
"""Share of the KV cache in use above which a replica is given no more samples."""

_QUEUE_SHARE = 0.5
"""Samples that may wait for a place all the time, as a share of those that the replica generates at a time; at least two groups."""

_SHRINK = 0.75
"""Part of the samples in flight that is left after a preemption."""

_SETTLE_S = 2.0
"""Seconds over which a queue must stand to count, and between two reductions."""

_GROWTH = 1 / 16
"""Part of the limit by which it grows at a time, at least one group: it doubles in 12 times."""

_GROWTH_PAUSES = 4
"""Times that it may grow within `_SETTLE_S`, however often the replica reports."""

_REFUSED = 0.9
"""Part of the samples in flight that is left when the replica refuses one because its queue is full."""

_FIRST_PLACES = 2
"""Samples that a replica is given at first, by its places: as many wait as are generated, until it is known what it needs."""

_GROUPS_WAITING = 2
"""Groups that may wait for a place: when one ends, the engine has the next at once, and a group need not fit exactly."""


_THRASHING = 0.5
"""Preemptions between two reports, by samples that are generated, from which on the engine is mostly busy with them."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What a replica reports.

    Attributes:
        running: Samples that it generates.
        queued: Samples that wait for a place.
        kv_cache_usage: Share of the KV cache in use, 0 to 1.
        preemptions: Samples preempted since its start.
        max_running: Most samples that it generates at a time; 0 if it is not known.
    """

    running: int
    queued: int
    kv_cache_usage: float
    preemptions: int
    max_running: int


class ConcurrencyLimit:
    """Most samples in flight at one replica.

    Args:
        group: Samples that are dispatched together: the limit is never below it.
    """

    def __init__(self, config: ConcurrencyConfig, group: int) -> None:
        self._config, self._group = config, group
        first = min(config.initial_samples, config.most_samples) if config.adapt else sys.maxsize
        self._limit = float(max(group, first))
        self._queues: deque[tuple[float, int]] = deque()
        self._preemptions: int | None = None
        self._rest_until = self._grows_from = -math.inf

    def anew(self) -> ConcurrencyLimit:
        """Return the limit of a replica whose load is not known yet."""
        return ConcurrencyLimit(self._config, self._group)

    @property
    def adapts(self) -> bool:
        """Whether it is a limit at all."""
        return self._config.adapt

    @property
    def samples(self) -> int:
        """The limit, at least one group; `most_samples` may have been lowered since it was set."""
        limit = min(self._limit, self._config.most_samples) if self._config.adapt else self._limit
        return max(self._group, int(limit))

    def report(self, load: EngineLoad, in_flight: int, now: float, *, held_back: bool) -> None:
        """Adapt to a report.

        Args:
            load: What the replica reports.
            in_flight: Samples that this process has under way at the replica.
            now: The time in seconds.
            held_back: Whether the limit has kept samples from being dispatched.
        """
        if not self._config.adapt:
            return
        reserve = max(_GROUPS_WAITING * self._group, int(_QUEUE_SHARE * load.max_running))
        if self._preemptions is None and load.max_running:
            self._limit = self._bounded(_FIRST_PLACES * load.max_running + reserve)
        preempted = max(0, load.preemptions - (load.preemptions if self._preemptions is None else self._preemptions))
        self._preemptions = load.preemptions
        self._queues.append((now, load.queued))
        while now - self._queues[0][0] > _SETTLE_S and len(self._queues) > 1:
            self._queues.popleft()
        if now < self._rest_until:
            return  # the last reduction has not shown its effect yet
        standing = min(queued for _, queued in self._queues)
        excess = standing - (self._group if preempted else reserve)
        room = not preempted and load.queued <= reserve // 2 and load.kv_cache_usage < _KV_HIGH
        above = in_flight > self._limit + self._group
        thrashes = preempted > _THRASHING * load.running
        stands = excess > 0 and now - self._queues[0][0] >= _SETTLE_S / 2
        if thrashes or stands:
            if not above:  # else the samples that the last reduction forbids have not ended yet
                self._shrink(_SHRINK * min(self._limit, in_flight) if thrashes else in_flight - excess, now)
        elif (held_back or above) and room and now >= self._grows_from:
            self._limit = self._bounded(self._limit + max(self._group, self._limit * _GROWTH))
            self._grows_from = now + _SETTLE_S / _GROWTH_PAUSES

    def refused(self, in_flight: int, now: float) -> None:
        """Shrink after the replica refused a request because its queue is full."""
        if self._config.adapt and now >= self._rest_until:
            self._shrink(min(self._limit, in_flight) * _REFUSED, now)

    def _shrink(self, limit: float, now: float) -> None:
        """Reduce the limit, and wait: what that brings shows only when some samples have ended."""
        self._limit = self._bounded(min(limit, self._limit))
        self._rest_until = now + _SETTLE_S
        self._queues.clear()

    def _bounded(self, limit: float) -> float:
        return max(float(self._group), min(limit, self._config.most_samples))
