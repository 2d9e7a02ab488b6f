"""The processes that `sluice eval` starts: they end with it, also if it is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from sluice.config import ConfigError
from sluice.errors import BindError
from sluice.supervise.restart_policy import EXIT_BIND
from sluice.supervise.spawn import Spawned
from sluice.supervise.watchdog import Watchdog

T = TypeVar("T")

_STOP_S = 15.0
"""Seconds between SIGTERM and SIGKILL."""

_LOOK_S = 0.1
"""Seconds between two looks into a log."""

_TAIL_LINES = 20
"""Lines of its log that are shown when it dies."""


class Child:
    """A running process.

    Attributes:
        name: What it is, for messages.
    """

    def __init__(self, name: str, process: Spawned, log_path: Path, log_start: int) -> None:
        self.name = name
        self._process, self._log_path, self._log_start = process, log_path, log_start

    async def ended(self) -> int:
        """Wait for its end; return its exit code."""
        return await self._process.wait()

    async def died(self) -> str:
        """Wait for its end; return why, with the last lines of its log."""
        code = await self.ended()
        lines = self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join([f"the {self.name} ended with exit code {code}; its last lines:", *lines])

    async def logged(self, event: str, field: str) -> str:
        """Wait until it has logged an event with a field; return that."""
        while True:
            with self._log_path.open("rb") as log:
                log.seek(self._log_start)
                lines = log.read().splitlines(keepends=True)
            for line in lines:
                record = json.loads(line) if line.startswith(b"{") and line.endswith(b"\n") else {}
                if record.get("event") == event and field in record:
                    return str(record[field])
            await asyncio.sleep(_LOOK_S)

    async def stop(self, patience_s: float = 0.0) -> None:
        """Let it end by itself for so long; then SIGTERM, and SIGKILL for it and what it started if it does not end in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._process.wait()
        if self._process.returncode is None:
            self._process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await self._process.wait()
        with contextlib.suppress(ProcessLookupError):  # its own session, in which nothing is left if it ended in order
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()


class Children:
    """Starts processes, whose logs lie in a directory until the evaluation has ended."""

    def __init__(self, watchdog: Watchdog, directory: Path) -> None:
        self.directory = directory
        self._watchdog = watchdog

    @classmethod
    @contextlib.asynccontextmanager
    async def ending_with_this(cls) -> AsyncIterator[Children]:
        """Yield one whose processes end with the block, also if this process is killed."""
        with tempfile.TemporaryDirectory(prefix="sluice-eval-") as directory:
            watchdog = await Watchdog.start()
            try:
                yield cls(watchdog, Path(directory))
            finally:
                await watchdog.stop()

    @contextlib.asynccontextmanager
    async def started(
        self, name: str, argv: Sequence[str], environment: Mapping[str, str] | None = None, *, patience_s: float = 0.0
    ) -> AsyncIterator[Child]:
        """Start a process; end it with the block, after it had `patience_s` seconds to end by itself."""
        log_path = self.directory / f"{name.replace(' ', '-')}.log"
        with log_path.open("ab") as output:
            log_start = output.tell()
            process = await self._watchdog.start_child(argv, stdout=output, stderr=output, environment=environment)
        child = Child(name, process, log_path, log_start)
        try:
            yield child
        finally:
            await child.stop(patience_s)
            self._watchdog.note("-", process.pid)


async def ready(child: Child, waiting: asyncio.Task[T], deadline_s: float) -> T:
    """Wait until a child serves.

    Args:
        child: The process.
        waiting: Done when it does; its result is returned.
        deadline_s: Seconds to wait.

    Raises:
        BindError: if it died because it cannot listen at its address.
        ConfigError: if it died of something else, or does not serve in time.
    """
    died = asyncio.create_task(child.died())
    try:
        await asyncio.wait({died, waiting}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        if died.done():
            raise (BindError if await child.ended() == EXIT_BIND else ConfigError)(died.result())
        if not waiting.done():
            raise ConfigError(f"the {child.name} does not serve within {deadline_s:g} s (--start-s)")
        return waiting.result()
    finally:
        died.cancel()
        waiting.cancel()
