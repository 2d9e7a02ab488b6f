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

GRACE_S = 7.0
"""Seconds between SIGTERM and SIGKILL of the children of a killed supervisor, unless they need another drain."""


class Watchdog:
    """A small process that ends the children of a supervisor that was killed; see `guard.watch`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, grace_s: float = GRACE_S, mark: str = "") -> Self:
        """Start it in a session of its own.

        Args:
            grace_s: Seconds that the children of a killed supervisor get between SIGTERM and SIGKILL.
            mark: Beginning of an environment variable, ``NAME=beginning``, of which it kills every process at the end.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", guard.__file__, "watch", str(grace_s), *([mark] if mark else [])),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        return cls(process)

    async def start_child(
        self,
        argv: Sequence[str],
        *,
        stdin: int | IO[bytes] = asyncio.subprocess.DEVNULL,
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
                stdin=stdin,
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
