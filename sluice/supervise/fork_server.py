"""The supervisor's side of a fork server, a process that has imported a service and forks it at each start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from sluice.clock import CLOCK, Clock
from sluice.supervise.spawn import Spawned, reader_of
from sluice.supervise.watchdog import Watchdog

_LOST = -int(signal.SIGKILL)
"""Exit code of a process that a signal ended after its fork server was killed: the signal is then unknown."""

_CODE_BYTES = 16
"""Bytes to read for an exit code, more than one needs."""


class Forked:
    """A process that was forked.

    Attributes:
        stdout: Its output. It ends once no process has it open any more.
    """

    def __init__(self, pid: int, stdout: asyncio.StreamReader, codes: asyncio.StreamReader, own_code: int) -> None:
        self.pid, self.stdout = pid, stdout
        self._codes, self._own_code = codes, own_code
        self._handle: int | None = None
        with contextlib.suppress(ProcessLookupError):  # killed already, and its fork server has seen it
            self._handle = os.pidfd_open(pid)

    async def wait(self) -> int:
        """Return its exit code, or minus the number of the signal that ended it. Call this once.

        A process survives if its fork server is killed, and writes its exit code to its pipe before it ends. If a signal ends such a
        process, this counts as SIGKILL, whichever signal it was.
        """
        line = await _line(self._codes)
        try:
            if not line and self._handle is not None:
                await _until_ended(self._handle)
            with contextlib.suppress(BlockingIOError):  # processes that it left behind hold the pipe open
                line = line or os.read(self._own_code, _CODE_BYTES)
        finally:
            os.close(self._own_code)
            if self._handle is not None:
                os.close(self._handle)
        return int(line) if line else _LOST


async def _until_ended(handle: int) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(handle, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(handle)


class ForkServer:
    """Starts `sluice.cli.fork_server` at the first fork, restarts it if it died, and kills it at the end.

    Args:
        argv: Command of the fork server. Empty: the service is always executed as a new program.
        environment: All variables of the processes.
        deadline_s: Seconds within which it must fork. Bounded, because an import may hang.
        clock: Measures that deadline.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        watchdog: Watchdog,
        deadline_s: float,
        clock: Clock = CLOCK,
    ) -> None:
        self._argv, self._environment, self._watchdog = argv, environment, watchdog
        self._deadline_s, self._clock = deadline_s, clock
        self._process: Spawned | None = None
        self._control: socket.socket | None = None
        self._replies = asyncio.StreamReader()
        self._writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> Self:
        """Return it; nothing is started yet."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill the server, which has no state."""
        await self._stop()

    async def fork(self) -> Forked | None:
        """Start the service. Its previous process must have ended. The watchdog knows about the process before it begins.

        Returns:
            The process; None if the service must be executed as a new program, because there is no fork server, or it died, hangs, or
            cannot fork safely.
        """
        if not self._argv:
            return None
        if self._process is None or self._replies.at_eof() or self._replies.exception():
            await self._start()
        output, their_output = os.pipe()
        their_barrier, go_ahead = os.pipe()
        own_code, their_code = os.pipe()
        os.set_blocking(own_code, False)
        try:
            stdout = await reader_of(output)
            with contextlib.suppress(OSError):  # it died; the end of the replies shows it
                socket.send_fds(self._socket(), [b"+"], [their_output, their_barrier, their_code])
            os.close(their_output)
            their_output = -1
            reply = b""
            with contextlib.suppress(TimeoutError):
                async with self._clock.timeout(self._deadline_s):
                    reply = await _line(self._replies)
            if not reply.isdigit():
                if reply == b"cold":
                    self._argv = ()
                await self._stop()
                return None
            self._watchdog.note("+", int(reply))
            with contextlib.suppress(BrokenPipeError):  # killed already; its exit code says so
                os.write(go_ahead, b"+")
            forked = Forked(int(reply), stdout, self._replies, own_code)
            own_code = -1
            return forked
        finally:
            for descriptor in (their_output, their_barrier, go_ahead, own_code, their_code):
                if descriptor >= 0:
                    os.close(descriptor)

    async def _start(self) -> None:
        await self._stop()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await self._watchdog.start_child(
                self._argv,
                stdin=theirs.fileno(),
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                environment=self._environment,
            )
        self._replies, self._writer = await asyncio.open_connection(sock=ours)
        self._control = ours

    def _socket(self) -> socket.socket:
        if self._control is None:
            raise RuntimeError("the fork server was not started")
        return self._control

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if self._writer is not None:
            self._writer.close()
        if process is None:
            return
        process.kill()
        await process.wait()
        self._watchdog.note("-", process.pid)


async def _line(stream: asyncio.StreamReader) -> bytes:
    """Return the next line; none if the other side is gone."""
    with contextlib.suppress(ConnectionError):
        return (await stream.readline()).strip()
    return b""
