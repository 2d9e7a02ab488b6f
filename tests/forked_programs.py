"""`sluice` programs forked from a process that has imported PyTorch, for tests which are not about how a program starts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rank_programs import Rank, RankPrograms

END_S = 600.0
"""Real seconds for a program to end by itself; the tests that wait have limits of their own."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


class Forked:
    """A program; the calls are those of `asyncio.subprocess.Process`."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    @property
    def returncode(self) -> int | None:
        return self._rank.returncode

    async def wait(self) -> int:
        return await asyncio.to_thread(self._rank.wait, END_S)

    def kill(self) -> None:
        self._rank.kill()

    def send_signal(self, number: int) -> None:
        os.kill(self._rank.pid, number)


@asynccontextmanager
async def forked(programs: RankPrograms, module: str, *arguments: str, log: Path) -> AsyncIterator[Forked]:
    """Run ``main()`` of a module with arguments and a file for its output; kill it at the end if it is left."""
    rank = await asyncio.to_thread(programs.start, module, *arguments, environment=ENVIRONMENT, output=log)
    program = Forked(rank)
    try:
        yield program
    finally:
        program.kill()
        await program.wait()
