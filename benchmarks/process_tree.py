"""CPU seconds of a run by the part of the system that used them, read from outside: every process below `sluice rl`."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil

SERVICES = ("orchestrator", "rollout", "trainer", "weightsync")

FORK_SERVER = "sluice.cli.fork_server"
"""Module of the processes that fork services."""

_CHILDREN = {"rollout": "engine", "orchestrator": "environments", "trainer": "trainer"}
"""The part to which a service's child processes belong."""

_LOOK_S = 0.25


@dataclass
class CpuMeter:
    """Samples a process and all its descendants regularly. A process that ended keeps its last sample."""

    _seconds: dict[tuple[int, float], tuple[str, float]] = field(default_factory=dict)
    _times: list[float] = field(default_factory=list)
    _sums: list[dict[str, float]] = field(default_factory=list)

    async def follow(self, pid: int) -> None:
        """Sample until cancelled or until the process has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(pid)
            while True:
                self._look(top)
                await asyncio.sleep(_LOOK_S)

    def between(self, begin: float, end: float) -> dict[str, float]:
        """Return the CPU seconds by part between two times of the wall clock, linear between samples.

        Raises:
            ValueError: if nothing was seen.
        """
        if not self._times:
            raise ValueError("no process was seen")
        before, after = self._at(begin), self._at(end)
        return {name: after[name] - before.get(name, 0.0) for name in after}

    def _at(self, moment: float) -> Mapping[str, float]:
        place = bisect.bisect(self._times, moment)
        if place in (0, len(self._times)):
            return self._sums[min(place, len(self._sums) - 1)]
        low, high = self._times[place - 1 : place + 1]
        share = (moment - low) / (high - low)
        below, above = self._sums[place - 1 : place + 1]
        return {name: below.get(name, 0.0) + share * (above[name] - below.get(name, 0.0)) for name in above}

    def _look(self, top: psutil.Process) -> None:
        for process in [top, *top.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                times = process.cpu_times()
                key = (process.pid, process.create_time())
                self._seconds[key] = (_part(process, top), float(times.user + times.system))
        sums: dict[str, float] = defaultdict(float)
        for part, seconds in self._seconds.values():
            sums[part] += seconds
        self._times.append(time.time())
        self._sums.append(dict(sums))


def _part(process: psutil.Process, top: psutil.Process) -> str:
    """Return the part of the system that a process belongs to: a service, or what a service started.

    A service may be a fork of its fork server, and its children forks of the service: all have the same command line.
    """
    below: list[list[str]] = []  # command lines from the process up to the child of `top`
    each: psutil.Process | None = process
    while each is not None and each.pid != top.pid:
        below.append(each.cmdline())
        each = each.parent()
    lines = below[::-1] if each is not None else []
    for depth, line in enumerate(lines):
        service = next((word for word in line if word in SERVICES), None)
        if service is not None:
            own = depth + (FORK_SERVER in line)
            return service if len(lines) - 1 <= own else _CHILDREN.get(service, "rest")
    return "rest"
