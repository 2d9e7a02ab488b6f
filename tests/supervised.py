"""What tests of the supervisor share: a witness of a run, and waits with a deadline."""

import asyncio
import time
from dataclasses import dataclass, field

import psutil

from sluice.supervise.supervisor import ChildState, LogLine, Outcome, Supervisor

DEADLINE_S = 20.0


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


async def run(specs, witness, **options) -> Outcome:
    async with asyncio.timeout(DEADLINE_S):
        return await Supervisor(specs, witness, **options).run(asyncio.Event())


async def eventually(condition) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - other processes bring it about
            await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for(condition) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "condition not met in time"
        time.sleep(0.02)
