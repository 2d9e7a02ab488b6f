"""How many samples a replica is given at a time. Pure: the caller passes reports and the time.

With too few samples an engine leaves places empty. With too many, samples wait and begin late, and if the KV cache is too small, they
are preempted and computed again. `ConcurrencyLimit` finds the number between. It grows step by step while it holds samples back and the
engine has room. While a queue stands, it shrinks by the excess in the queue; after a preemption, all but one group is excess. So the
engine always has a sample to begin next, and never has less to do than with a higher limit.

A queue that comes and goes is no reason to shrink, because the samples of a group begin together. The standing queue counts: the minimum
of its length over a while, as in CoDel (Nichols and Jacobson, 2012).
"""

from __future__ import annotations

import math
import sys
from collections import deque
from dataclasses import dataclass

from sluice.sampling.config import ConcurrencyConfig

_KV_HIGH = 0.9
"""Share of the KV cache in use from which on the limit does not grow."""

_QUEUE_SHARE = 0.5
"""Samples that may always wait for a place, as a share of the samples that the replica can generate at a time; at least two groups."""

_SHRINK = 0.75
"""Factor for the samples in flight after many preemptions."""

_SETTLE_S = 2.0
"""Seconds over which the minimum of the queue is taken, and between two reductions."""

_GROWTH = 1 / 16
"""Share of the limit by which one step raises it, at least one group. It doubles in 12 steps."""

_GROWTH_PAUSES = 4
"""Maximum number of growing steps within `_SETTLE_S`, however often the replica reports."""

_REFUSED = 0.9
"""Factor for the samples in flight after the replica refused one because its queue is full."""

_FIRST_PLACES = 2
"""Samples that a replica is given at first, per place: one generates and one waits, until reports show what the replica needs."""

_GROUPS_WAITING = 2
"""Groups that may wait for a place. When a group ends, the engine has the next at once, and a group need not fit exactly."""


_THRASHING = 0.5
"""Preemptions between two reports, per running sample, above which the engine spends most of its time on them."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What a replica reports.

    Attributes:
        running: Samples that it is generating.
        queued: Samples that wait for a place.
        kv_cache_usage: Share of the KV cache in use, 0 to 1.
        preemptions: Samples preempted since its start.
        max_running: Maximum number of samples that it generates at a time; 0 if unknown.
    """

    running: int
    queued: int
    kv_cache_usage: float
    preemptions: int
    max_running: int


class ConcurrencyLimit:
    """Maximum number of samples in flight at one replica.

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
        """Return a new limit with the same settings, for a replica whose load is not known yet."""
        return ConcurrencyLimit(self._config, self._group)

    @property
    def adapts(self) -> bool:
        """Whether samples are limited at all."""
        return self._config.adapt

    @property
    def samples(self) -> int:
        """The limit, at least one group. `most_samples` may have been lowered since the limit was last set, so it is applied again."""
        limit = min(self._limit, self._config.most_samples) if self._config.adapt else self._limit
        return max(self._group, int(limit))

    def report(self, load: EngineLoad, in_flight: int, now: float, *, held_back: bool) -> None:
        """Adapt to a report.

        Args:
            load: The report.
            in_flight: Samples of this process in progress at the replica.
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
            if not above:  # else the samples above the last, reduced limit have not ended yet
                self._shrink(_SHRINK * min(self._limit, in_flight) if thrashes else in_flight - excess, now)
        elif (held_back or above) and room and now >= self._grows_from:
            self._limit = self._bounded(self._limit + max(self._group, self._limit * _GROWTH))
            self._grows_from = now + _SETTLE_S / _GROWTH_PAUSES

    def refused(self, in_flight: int, now: float) -> None:
        """Shrink after the replica refused a request because its queue is full."""
        if self._config.adapt and now >= self._rest_until:
            self._shrink(min(self._limit, in_flight) * _REFUSED, now)

    def _shrink(self, limit: float, now: float) -> None:
        """Reduce the limit, then leave it for a while: the effect shows only when some samples have ended."""
        self._limit = self._bounded(min(limit, self._limit))
        self._rest_until = now + _SETTLE_S
        self._queues.clear()

    def _bounded(self, limit: float) -> float:
        return max(float(self._group), min(limit, self._config.most_samples))
