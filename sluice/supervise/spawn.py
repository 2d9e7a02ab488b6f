"""Starts programs without forking this process, in which gRPC's threads may run.

A fork copies one thread of many. gRPC's fork handlers then find locks that other threads held, and the child dies of SIGSEGV or SIGABRT
before it executes its program. uvloop, on which the services run, forks for `asyncio.create_subprocess_exec`. `subprocess.Popen` uses
vfork on Linux: no fork handler runs, and until the child executes its program this process stands still.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import IO


class Spawned:
    """A program that was started in a session of its own; construct it on the event loop.

    Args:
        argv: The program and its arguments.
        stdin: As for `subprocess.Popen`, but no PIPE; the same for `stdout` and `stderr`. None: the stream of this process.
        environment: All its variables. None: the variables of this process.
        pass_fds: Descriptors that it inherits.
        output: Reader of the pipe whose writing end is `stdout`.

    Attributes:
        stdout: `output`. It ends once no process has the pipe's writing end open.

    Raises:
        OSError: if it cannot be started.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        stdin: int | IO[bytes] | None = None,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        output: asyncio.StreamReader | None = None,
    ) -> None:
        self.stdout = output
        self._process = subprocess.Popen(  # noqa: S603 - the words of our own callers
            argv, stdin=stdin, stdout=stdout, stderr=stderr, env=environment, pass_fds=pass_fds, start_new_session=True
        )
        self.pid = self._process.pid
        self._ended = asyncio.Event()
        waiting = (asyncio.get_running_loop(),)
        threading.Thread(target=self._wait, args=waiting, name=f"end of process {self.pid}", daemon=True).start()

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the number of the signal that ended it; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for its end; return the exit code, or minus the number of the signal that ended it."""
        await self._ended.wait()
        return self._process.wait()

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        self._process.send_signal(number)

    def terminate(self) -> None:
        """Send it SIGTERM, unless it has ended."""
        self._process.terminate()

    def kill(self) -> None:
        """Send it SIGKILL, unless it has ended."""
        self._process.kill()

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait in a thread, as the event loop of the standard library does."""
        self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(self._ended.set)


async def reader_of(descriptor: int) -> asyncio.StreamReader:
    """Return a stream that reads a pipe, and closes it at its end."""
    stream = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(stream)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(descriptor, "rb", buffering=0))
    return stream


async def writer_of(descriptor: int) -> asyncio.WriteTransport:
    """Return a transport that writes to a pipe; the caller closes it."""
    pipe = os.fdopen(descriptor, "wb", buffering=0)
    transport, _ = await asyncio.get_running_loop().connect_write_pipe(asyncio.BaseProtocol, pipe)
    return transport
