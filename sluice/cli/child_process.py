"""One life of a child: started in a process group of its own, followed, ended with all that it started."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self

from sluice.cli import gate, watchdog
from sluice.cli.child_logs import ChildLog, LogLine

__all__ = ["Child", "ChildSpec", "Watchdog", "describe_exit"]

_WATCHDOG_GRACE_S = 5.0
"""What the children of a killed supervisor get to drain: the default of `server.drain_s`."""

_OUTPUT_GRACE_S = 2.0
"""Seconds to read what a dead process left in its pipe; a daemon that inherited the pipe must not hold us up."""


@dataclass(frozen=True)
class ChildSpec:
    """What to run.

    Attributes:
        name: Label, unique among the children, such as ``rollout-0``.
        argv: Program and arguments.
        log_path: Where its output is kept.
        serves: Returns once the child serves; the caller sets the deadline and cancels.
        environment: Variables over the supervisor's own.
        ends_run: Its clean end is the end of the run; any other child's end is a failure.
    """

    name: str
    argv: tuple[str, ...]
    log_path: Path
    serves: Callable[[], Awaitable[None]]
    environment: Mapping[str, str] = field(default_factory=dict)
    ends_run: bool = False


def describe_exit(code: int) -> str:
    """How a process ended, for people: ``exit code 1`` or ``signal SIGKILL``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


class Watchdog:
    """A small process that outlives a killed supervisor just long enough to end its children."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls) -> Self:
        """Start it, in a session of its own."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", watchdog.__file__, str(_WATCHDOG_GRACE_S)),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        return cls(process)

    async def start_child(
        self,
        argv: Sequence[str],
        *,
        stdout: int | IO[bytes],
        stderr: int | IO[bytes],
        environment: Mapping[str, str] | None = None,
    ) -> asyncio.subprocess.Process:
        """Start a program in a session of its own that does not begin before it is noted.

        A Ctrl-C reaches the supervisor alone, which ends its children in order.

        Raises:
            FileNotFoundError: if there is no such program.
        """
        if shutil.which(argv[0]) is None:
            raise FileNotFoundError(errno.ENOENT, "no such program", argv[0])
        gate_end, our_end = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", gate.__file__, str(gate_end), *argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=environment,
                start_new_session=True,
                pass_fds=[gate_end],
            )
            self.note("+", process.pid)
            with contextlib.suppress(BrokenPipeError):  # killed already: its exit code tells
                os.write(our_end, b"+")
        finally:
            os.close(gate_end)
            os.close(our_end)
        return process

    def note(self, sign: str, group: int) -> None:
        """Tell it of a process group that began (``+``) or ended (``-``)."""
        if self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(f"{sign}{group}\n".encode())

    async def stop(self) -> None:
        """Let it end whatever is left, and end."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._process.wait()


class Child:
    """A running child.

    Args:
        spec: What it is.
        process: Its leading process; its id is the group's.
        log: Where its output goes.
        watchdog_: Who ends it if we cannot.
        on_line: Called with each line of its output.
    """

    def __init__(
        self,
        spec: ChildSpec,
        process: asyncio.subprocess.Process,
        log: ChildLog,
        watchdog_: Watchdog,
        on_line: Callable[[LogLine], None],
    ) -> None:
        if process.stdout is None:
            raise ValueError("a child's output must be a pipe")
        self.spec, self.pid = spec, process.pid
        self._process, self._watchdog = process, watchdog_
        self._output = asyncio.create_task(log.follow(process.stdout, on_line))

    @classmethod
    async def start(
        cls, spec: ChildSpec, log: ChildLog, watchdog_: Watchdog, on_line: Callable[[LogLine], None]
    ) -> Self:
        """Start it.

        Raises:
            OSError: if the program cannot be started.
        """
        process = await watchdog_.start_child(
            spec.argv,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            environment={**os.environ, **spec.environment},
        )
        return cls(spec, process, log, watchdog_, on_line)

    async def ended(self) -> int:
        """Wait for its end, end what it left behind, and read its last words.

        Returns:
            The exit code, or minus the signal's number.
        """
        code = await self._process.wait()
        self.kill()
        self._watchdog.note("-", self.pid)
        await asyncio.wait({self._output}, timeout=_OUTPUT_GRACE_S)
        self._output.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._output
        return code

    def terminate(self) -> None:
        """Ask it to drain; what it started is its own to end."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End it and all that it started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
