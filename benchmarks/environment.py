"""The processes of an environment: their start, scores a second, steps a second, and what a killed process costs.

The environments do next to nothing, so that the way to their processes and back is measured. Nothing else runs beside them.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from sluice.config import Options, whole_number
from sluice.environments.base import Task
from sluice.environments.config import EnvironmentProcessesConfig
from sluice.environments.processes import EnvironmentProcesses

GROUP = 16
"""Completions that are scored in one call."""

COMPLETION = "all work and no play " * 24
"""About 128 tokens."""

CALLERS = 64
"""Groups or episodes in progress at a time."""

STARTS = 5

TASK = Task("task", {"letter": "a"})


def run(argv: list[str]) -> Mapping[str, Any]:
    """Measure; return the figures and their ratios."""
    parser = Options(prog="sluice bench environment", description=run.__doc__)
    parser.add_argument("--processes", type=whole_number(1), default=1, help="processes of the environment")
    parser.add_argument("--seconds", type=whole_number(1), default=5, help="seconds for each of the two rates")
    options = parser.parse_args(argv)
    figures = asyncio.run(_measure(options.processes, options.seconds))
    bare_ms = median(
        _milliseconds(lambda: subprocess.run([sys.executable, "-c", ""], check=True)) for _ in range(STARTS)
    )
    return {
        "ratios": {"start_over_bare_python": round(figures["start_ms"] / bare_ms, 2)},
        **figures,
        "bare_python_ms": bare_ms,
    }


async def _measure(processes: int, seconds: int) -> dict[str, float]:
    starts, deaths = [], []
    for _ in range(STARTS):
        began = time.perf_counter()
        async with _pool("Letters", 1) as environment:
            starts.append((time.perf_counter() - began) * 1e3)
            began = time.perf_counter()
            await environment.score(TASK, ["exit"])
            await environment.score(TASK, ["a"])
            deaths.append((time.perf_counter() - began) * 1e3 / 2)  # the call is tried twice
    async with _pool("Letters", processes) as environment:
        groups, group_cpu = await _rate([lambda: environment.score(TASK, [COMPLETION] * GROUP)] * CALLERS, seconds)
    async with _pool("Count", processes) as environment, contextlib.AsyncExitStack() as stack:
        episodes = [await stack.enter_async_context(environment.episode(TASK, seed)) for seed in range(CALLERS)]
        steps, step_cpu = await _rate([partial(episode.step, COMPLETION) for episode in episodes], seconds)
    return {
        "processes": processes,
        "start_ms": round(median(starts), 1),
        "death_ms": round(median(deaths), 1),
        "episodes_per_s": round(groups * GROUP),
        "group_cpu_ms": round(group_cpu, 3),
        "steps_per_s": round(steps),
        "step_cpu_ms": round(step_cpu, 3),
    }


def _pool(name: str, processes: int) -> EnvironmentProcesses:
    reference = f"{Path(__file__).with_name('tiny_environment.py')}:{name}"
    return EnvironmentProcesses(reference, {}, EnvironmentProcessesConfig(count=processes), (60.0, "start"))


async def _rate(callers: Sequence[Callable[[], Awaitable[object]]], seconds: int) -> tuple[float, float]:
    """Let callers repeat their call in parallel.

    Returns:
        Calls a second, and milliseconds of this process's CPU for each.
    """
    calls = 0
    began, cpu = time.perf_counter(), time.process_time()

    async def repeat(call: Callable[[], Awaitable[object]]) -> None:
        nonlocal calls
        while time.perf_counter() - began < seconds:
            await call()
            calls += 1

    await asyncio.gather(*map(repeat, callers))
    return calls / (time.perf_counter() - began), (time.process_time() - cpu) * 1e3 / calls


def _milliseconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3
