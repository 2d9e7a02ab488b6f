"""The supervisor's side of the watchdog: it starts children so that none outlives a supervisor that was killed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Self

from sluice.supervise import guard
from sluice.supervise.spawn import Spawned, reader_of, writer_of

GRACE_S = 7.0
"""Seconds between SIGTERM and SIGKILL of the children of a killed supervisor, unless they need another drain."""


class Watchdog:
    """A small process that ends the children of a supervisor that was killed; see `guard.watch`."""

    def __init__(self, process: Spawned, lines: asyncio.WriteTransport) -> None:
        self._process, self._lines = process, lines

    @classmethod
    async def start(cls, grace_s: float = GRACE_S, mark: str = "") -> Self:
        """Start it in a session of its own.

        Args:
            grace_s: Seconds that the children of a killed supervisor get between SIGTERM and SIGKILL.
            mark: ``NAME=beginning``: at the end it kills every process with an environment variable that begins so.
        """
        argv = [sys.executable, "-I", "-S", guard.__file__, "watch", str(grace_s), *([mark] if mark else [])]
        its_end, our_end = os.pipe()
        try:
            lines = await writer_of(our_end)
            try:
                return cls(Spawned(argv, stdin=its_end), lines)
            except BaseException:
                lines.abort()
                raise
        finally:
            os.close(its_end)

    async def start_child(
        self,
        argv: Sequence[str],
        *,
        stdin: int | IO[bytes] = asyncio.subprocess.DEVNULL,
        stdout: int | IO[bytes],
        stderr: int | IO[bytes],
        environment: Mapping[str, str] | None = None,
    ) -> Spawned:
        """Start a program in a session of its own. It does not begin before the watchdog knows about it.

        Because of the session, Ctrl-C reaches only the supervisor, which then ends its children in order.

        Raises:
            FileNotFoundError: if there is no such program.
        """
        if shutil.which(argv[0]) is None:
            raise FileNotFoundError(errno.ENOENT, "no such program", argv[0])
        with contextlib.ExitStack() as descriptors:
            barrier, go_ahead = _pipe(descriptors)
            output = None
            if stdout == asyncio.subprocess.PIPE:
                our_end, stdout = os.pipe()
                descriptors.callback(os.close, stdout)
                output = await reader_of(our_end)
            process = Spawned(
                [sys.executable, "-I", "-S", guard.__file__, "start", str(barrier), *argv],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                environment=environment,
                pass_fds=[barrier],
                output=output,
            )
            self.note("+", process.pid)
            with contextlib.suppress(BrokenPipeError):  # killed already; its exit code says so
                os.write(go_ahead, b"+")
        return process

    def note(self, sign: str, group: int) -> None:
        """Tell the watchdog that a process group started (``+``) or ended (``-``)."""
        if not self._lines.is_closing():
            self._lines.write(f"{sign}{group}\n".encode())

    async def stop(self) -> None:
        """Make the watchdog end the remaining groups, and wait until it has exited."""
        self._lines.close()
        await self._process.wait()


def _pipe(descriptors: contextlib.ExitStack) -> tuple[int, int]:
    """Return the two ends of a pipe, which `descriptors` closes."""
    ends = os.pipe()
    for end in ends:
        descriptors.callback(os.close, end)
    return ends
