"""Processes that take turns: one updates while the others wait."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.trainer_sides.orders import UPDATE

__all__ = ["UPDATE_S", "Contestant", "Side", "contestant"]

START_S = 180.0
UPDATE_S = 300.0
"""Seconds that an update may take."""
STOP_S = 20.0
LINE_LIMIT = 1 << 20
"""Bytes. asyncio's default of 64 KiB would do for numbers, not for a warning that a library prints in one line."""


@dataclass(frozen=True, slots=True)
class Side:
    """How a side is started.

    Attributes:
        name: How it is called in the report.
        command: Words after the interpreter.
        environment: Variables on top of ours.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]


class Contestant:
    """A started side."""

    def __init__(self, side: Side, process: asyncio.subprocess.Process, log: Path) -> None:
        self.side, self._process, self._log = side, process, log

    async def update(self) -> dict[str, Any]:
        """Let it do one optimizer step; returns what it measured.

        Raises:
            RuntimeError: if it ends or takes too long; the end of its log is in the message.
        """
        if self._process.stdin is None:
            raise RuntimeError(f"{self.side.name} has no input")
        self._process.stdin.write(f"{UPDATE}\n".encode())
        await self._process.stdin.drain()
        return await self.read(UPDATE_S)

    async def read(self, deadline_s: float) -> dict[str, Any]:
        """The next answer."""
        if self._process.stdout is None:
            raise RuntimeError(f"{self.side.name} has no output")
        try:
            async with asyncio.timeout(deadline_s):
                while line := await self._process.stdout.readline():
                    if line.startswith(b"{"):  # all else is a library's greeting
                        answer: dict[str, Any] = json.loads(line)
                        return answer
        except TimeoutError:
            raise RuntimeError(f"{self.side.name} did not answer within {deadline_s:.0f} s:\n{self._tail()}") from None
        raise RuntimeError(f"{self.side.name} ended:\n{self._tail()}")

    def _tail(self, lines: int = 20) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])


@contextlib.asynccontextmanager
async def contestant(side: Side, directory: Path) -> AsyncIterator[Contestant]:
    """Start a side, wait until it has loaded, and end it with the block."""
    log = directory / f"{side.name}.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *side.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=output,
            env=os.environ | side.environment,
            limit=LINE_LIMIT,
        )
    try:
        started = Contestant(side, process, log)
        await started.read(START_S)
        yield started
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.stdin is not None:
        process.stdin.close()  # no more orders
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()
