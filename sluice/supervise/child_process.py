"""One process of a child: started in a process group of its own, followed, and ended with everything that it started."""

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

from sluice.supervise import guard
from sluice.supervise.child_logs import ChildLog, LogLine

__all__ = ["Child", "ChildSpec", "Watchdog", "describe_exit"]

_WATCHDOG_GRACE_S = 5.0
"""Seconds that the children of a killed supervisor get to drain: the default of `server.drain_s`."""

_OUTPUT_GRACE_S = 2.0
"""Seconds to read what a dead process left in its pipe; a daemon that inherited the pipe must not block the supervisor."""


@dataclass(frozen=True)
class ChildSpec:
    """A child to run.

    Attributes:
        name: Label, unique among the children, such as ``rollout-0``.
        argv: Program and arguments.
        log_path: Where its output is kept.
        serves: Returns once the child serves; the caller sets the deadline and cancels.
        environment: Variables that are added to the supervisor's own.
        ends_run: Whether the run succeeds when this child ends with exit code 0. The end of any other child is a failure.
    """

    name: str
    argv: tuple[str, ...]
    log_path: Path
    serves: Callable[[], Awaitable[None]]
    environment: Mapping[str, str] = field(default_factory=dict)
    ends_run: bool = False


def describe_exit(code: int) -> str:
    """Return how a process ended, for people: ``exit code 1`` or ``signal SIGKILL``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


class Watchdog:
    """A small process that ends the children of a supervisor that was killed; see `guard.watch`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls) -> Self:
        """Start it in a session of its own."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", guard.__file__, "watch", str(_WATCHDOG_GRACE_S)),
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
        """Start a program in a session of its own. It does not begin before the watchdog knows it.

        Because of the session, Ctrl-C reaches the supervisor alone, which then ends its children in order.

        Raises:
            FileNotFoundError: if there is no such program.
        """
        if shutil.which(argv[0]) is None:
            raise FileNotFoundError(errno.ENOENT, "no such program", argv[0])
        barrier, go_ahead = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", guard.__file__, "start", str(barrier), *argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=environment,
                start_new_session=True,
                pass_fds=[barrier],
            )
            self.note("+", process.pid)
            with contextlib.suppress(BrokenPipeError):  # killed already; its exit code says so
                os.write(go_ahead, b"+")
        finally:
            os.close(barrier)
            os.close(go_ahead)
        return process

    def note(self, sign: str, group: int) -> None:
        """Tell the watchdog that a process group started (``+``) or ended (``-``)."""
        if self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(f"{sign}{group}\n".encode())

    async def stop(self) -> None:
        """Make the watchdog end the groups that are left, and wait for its own end."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._process.wait()


class Child:
    """A running child.

    Args:
        spec: What it is.
        process: Its leading process; its id is the group's.
        log: Where its output goes.
        watchdog: Ends it if the supervisor is killed.
        on_line: Called with each line of its output.
    """

    def __init__(
        self,
        spec: ChildSpec,
        process: asyncio.subprocess.Process,
        log: ChildLog,
        watchdog: Watchdog,
        on_line: Callable[[LogLine], None],
    ) -> None:
        if process.stdout is None:
            raise ValueError("a child's output must be a pipe")
        self.spec, self.pid = spec, process.pid
        self._process, self._watchdog = process, watchdog
        self._output = asyncio.create_task(log.follow(process.stdout, on_line))

    @classmethod
    async def start(
        cls, spec: ChildSpec, log: ChildLog, watchdog: Watchdog, on_line: Callable[[LogLine], None]
    ) -> Self:
        """Start it.

        Raises:
            OSError: if the program cannot be started.
        """
        process = await watchdog.start_child(
            spec.argv,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            environment={**os.environ, **spec.environment},
        )
        return cls(spec, process, log, watchdog, on_line)

    async def ended(self) -> int:
        """Wait for its end, kill the processes that it left behind, and read the rest of its output.

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
        """Ask it to drain by SIGTERM; it ends what it started itself."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill it and everything that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
