"""What tests of the supervisor share: a witness of a run, a clock that hurries nobody, and waits with a limit."""

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import psutil

from sluice.clock import Clock
from sluice.supervise.log_records import LogLine
from sluice.supervise.supervisor import ChildState, Outcome, Supervisor

LIMIT_S = 240.0
"""Real seconds for a child process to start and do something; only a broken test takes them."""


class UnhurriedClock(Clock):
    """A clock on which no limit passes and no pause takes time, for runs in which only events decide."""

    def __call__(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        del seconds
        await asyncio.sleep(0)

    def timeout(self, seconds: float | None) -> AbstractAsyncContextManager[asyncio.Timeout]:
        del seconds
        return asyncio.timeout(None)


@dataclass
class Witness:
    lines: list[tuple[str, LogLine]] = field(default_factory=list)
    states: list[tuple[str, ChildState, str]] = field(default_factory=list)

    def on_line(self, child: str, line: LogLine) -> None:
        self.lines.append((child, line))

    def on_state(self, child: str, state: ChildState, detail: str) -> None:
        self.states.append((child, state, detail))

    def count(self, child: str, state: ChildState) -> int:
        return sum((name, now) == (child, state) for name, now, _ in self.states)


def supervisor(specs, witness, **options) -> Supervisor:
    """Return a supervisor that waits for events alone, unless `clock` is given."""
    return Supervisor(specs, witness, **{"clock": UnhurriedClock(), **options})


async def run(specs, witness, **options) -> Outcome:
    return await ending(supervisor(specs, witness, **options).run(asyncio.Event()))


async def ending(work):
    """Return what a task or a coroutine returns, within the limit."""
    async with asyncio.timeout(LIMIT_S):
        return await work


async def eventually(condition) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - other processes bring it about
            await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for(condition) -> None:
    """Wait as `eventually` does, where no event loop runs."""
    asyncio.run(eventually(condition))
