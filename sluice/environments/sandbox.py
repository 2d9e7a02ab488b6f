r"""Runs untrusted Python code, such as a model's answer, so that it can compute and print, and do nothing else.

    ran = run_python("print(sum(range(10)))")
    assert ran.ok and ran.stdout == "45\n"

The code runs in a separate process. It has no files except the interpreter's, no network, no child processes, no signals to others and no
privileges, and its time, memory, threads and output are limited. `sandbox_child.py` confines it (Landlock, seccomp, resource limits). On
machines where bubblewrap works, that process runs inside bubblewrap.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import math
import os
import select
import selectors
import shutil
import signal
import site
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO

from sluice.environments.sandbox_child import NOT_CONFINED, READY, landlock_abi
from sluice.errors import ConfigError

_CHILD = str(Path(__file__).with_name("sandbox_child.py"))

_CHUNK_BYTES = 1 << 16

START_S = 20.0
"""Seconds for the interpreter to start. The time of the code counts from its start."""

_PROBE_S = 5.0

_PYTHON = os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)
"""The interpreter itself. In a virtual environment it is a link, and would read files that the sandbox does not have."""

_READABLE = (
    *(str(Path(os.__file__).parent), f"{sys.base_exec_prefix}/lib"),
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo"),
)
"""Paths that every program may read, if they exist."""

_VARIABLES = {
    "PATH": "/usr/bin:/bin",
    "LC_ALL": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    # Otherwise libraries start a thread for each core, which is slow and, on a large machine, more than the sandbox allows.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "POLARS_MAX_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
}

_CPU_SIGNALS = {signal.SIGXCPU, signal.SIGKILL}
"""Signals that end a process that has used up its CPU time: the first at the limit, the second one second later."""


class Stopped(StrEnum):
    """Why the code did not end by itself."""

    TIME = "TIME"
    OUTPUT = "OUTPUT"
    SIGNAL = "SIGNAL"


MOST_THREADS = 1024
"""Largest limit of threads. All threads are counted at each start of a thread, and the groups of a run share the machine's processes."""


@dataclass(frozen=True)
class Limits:
    """Limits of the code.

    Attributes:
        wall_s: Seconds of real time.
        cpu_s: Seconds of CPU time.
        memory_mib: Address space of the process, including the interpreter.
        output_kib: Size of standard output and standard error together.
        threads: Number of threads at a time, including the first; at most `MOST_THREADS`. Enforced only in the sandbox.
        packages: Whether it may import the packages that are installed beside Sluice.

    Raises:
        ConfigError: if a limit cannot be enforced.
    """

    wall_s: float = 10.0
    cpu_s: float = 5.0
    memory_mib: int = 512
    output_kib: int = 256
    threads: int = 64
    packages: bool = False

    def __post_init__(self) -> None:
        for name in ("wall_s", "cpu_s"):
            seconds = getattr(self, name)
            if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
                raise ConfigError(f"limits.{name} is {seconds!r}: give seconds, more than 0")
        for name, most in (("memory_mib", math.inf), ("output_kib", math.inf), ("threads", MOST_THREADS)):
            count = getattr(self, name)
            if not isinstance(count, int) or not 1 <= count <= most:
                wanted = "of 1 or more" if most == math.inf else f"from 1 to {most}"
                raise ConfigError(f"limits.{name} is {count!r}: give a whole number {wanted}")


@dataclass(frozen=True)
class Ran:
    """The result of running the code.

    Attributes:
        exit_code: 0 if it ended normally; negative: the signal that ended it.
        stdout: Its standard output.
        stderr: Its standard error, including tracebacks.
        stopped: Why it was stopped; None if it ended by itself.
        seconds: Seconds from the start of the code to its end.
        start_seconds: Seconds that the interpreter took to start before.
    """

    exit_code: int
    stdout: str
    stderr: str
    stopped: Stopped | None
    seconds: float
    start_seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it ended by itself, without an error."""
        return self.exit_code == 0 and self.stopped is None


_DEFAULT = Limits()


def run_python(code: str, *, stdin: str = "", limits: Limits = _DEFAULT, confined: bool = True) -> Ran:
    """Run code, and wait for its end.

    Args:
        code: A program.
        stdin: Its standard input.
        limits: Its limits.
        confined: False runs it with only the limits, and with all rights of this process: for code that you trust.

    Raises:
        ConfigError: if this machine cannot confine it.
    """
    if confined and landlock_abi() < 1 and not _bubblewrap():
        raise ConfigError(
            "this machine cannot confine code: it needs Linux 5.13 or newer with Landlock, or Linux 5.5 with bubblewrap (the package"
            ' bubblewrap). Install it, use another machine, or set sandbox = "none" if you trust the code as much as your own'
        )
    packages = site.getsitepackages() if limits.packages else []
    readable = [*_READABLE, *packages]
    argv = [_PYTHON, "-I", "-S", _CHILD]
    wrapped = confined and _bubblewrap()
    if wrapped:
        argv = [*_bubblewrapped(readable), *argv]
    ours, its = socket.socketpair()
    with ours, its:
        asked = {**asdict(limits), "code": code, "confined": confined, "landlock": landlock_abi(), "link": its.fileno()}
        given = json.dumps({**asked, "readable": readable, "packages": packages}).encode()
        process = subprocess.Popen(  # noqa: S603 - our own program
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_VARIABLES,
            cwd="/",
            start_new_session=True,
            pass_fds=[its.fileno()] if confined else [],
        )
        its.close()
        threads = None
        try:
            # The first process of bubblewrap is not the one that runs the code.
            threads = _Threads(limits.threads, ours, None if wrapped else process.pid) if confined else None
            watched = _Watched(process, b"%d\n" % len(given) + given + stdin.encode(), limits, threads)
            return watched.run(_BUBBLEWRAP_SIGNALS if wrapped else math.inf)
        finally:
            process.kill()
            process.wait()
            if threads is not None:
                threads.close()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


def check_confines() -> None:
    """Check that this machine can confine code, by running an empty program.

    Raises:
        ConfigError: if it cannot.
    """
    run_python("")


def _bubblewrapped(readable: Sequence[str]) -> list[str]:
    """Return a command prefix that runs a command in separate namespaces, which contain only the readable files."""
    binds = [word for each in (*readable, _PYTHON, _CHILD) for word in ("--ro-bind-try", each, each)]
    return [shutil.which("bwrap") or "bwrap", *binds, "--unshare-all", "--die-with-parent", "--new-session"]


@functools.cache
def _bubblewrap() -> bool:
    """Return whether bubblewrap is installed and may create namespaces."""
    if shutil.which("bwrap") is None:
        return False
    probe = [*_bubblewrapped(_READABLE), _PYTHON, "-I", "-S", "-c", ""]
    try:
        return subprocess.run(probe, capture_output=True, timeout=_PROBE_S, check=False).returncode == 0  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return False


_BUBBLEWRAP_SIGNALS = 128
"""If a signal ended the program, bubblewrap exits with this plus the number of the signal, as shells do."""

_NOTIF_RECV, _NOTIF_SEND = 0xC0502100, 0xC0182101
_NOTIF, _NOTIF_RESP = struct.Struct("=QI68x"), struct.Struct("=QqiI")
"""Structures of seccomp_unotify(2). Request: id and asking thread, and fields that are not read here. Answer: id, value, error and flags."""

_CONTINUE = 1
"""Flag of an answer: let the kernel make the call."""

_MOST_REFUSALS = 1000
"""Number of threads refused to a program, after which it gets no more answers, so that it cannot keep this process busy."""


class _Threads:
    """Decides whether a program may start another thread.

    The kernel asks at each start. RLIMIT_NPROC is no alternative: it counts all processes of a user, and does not limit root.

    Args:
        most: Maximum number of threads.
        link: Socket that brings the descriptor on which the kernel asks.
        process: Id of the process that runs the program; None if unknown.
    """

    def __init__(self, most: int, link: socket.socket, process: int | None) -> None:
        self._most, self._link = most, link
        self._started, self._refused = 1, 0
        self._tasks: int | None = None
        if process is not None:
            # Open it before the process is confined: /proc may hide it afterwards (hidepid), but an open directory stays readable.
            with contextlib.suppress(OSError):
                self._tasks = os.open(f"/proc/{process}/task", os.O_RDONLY | os.O_DIRECTORY)

    def close(self) -> None:
        """Close the directory by which threads are counted."""
        if self._tasks is not None:
            os.close(self._tasks)

    def listener(self) -> int:
        """Return the descriptor on which the kernel asks, once the program has been confined."""
        _, (descriptor, *_), _, _ = socket.recv_fds(self._link, 1, 1, socket.MSG_CMSG_CLOEXEC)
        return descriptor

    def answer(self, descriptor: int) -> bool:
        """Answer one request of the kernel. Return False if no more requests should be answered."""
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not any(event & select.POLLIN for _, event in poll.poll(0)):
            return False  # the program has ended, and a read would wait for ever
        asked = bytearray(_NOTIF.size)
        try:
            fcntl.ioctl(descriptor, _NOTIF_RECV, asked)
            number, thread = _NOTIF.unpack(asked)
            allowed = self._running(thread) < self._most
            answer = (number, 0, 0, _CONTINUE) if allowed else (number, 0, -errno.EAGAIN, 0)
            fcntl.ioctl(descriptor, _NOTIF_SEND, _NOTIF_RESP.pack(*answer))
        except OSError:  # the thread that asked has ended
            return True
        self._started += allowed
        self._refused += not allowed
        return self._refused < _MOST_REFUSALS

    def _running(self, thread: int) -> int:
        """Return the number of threads of the program that `thread` belongs to; if /proc does not tell, the number that it has started."""
        try:
            return len(os.listdir(f"/proc/{thread}/task" if self._tasks is None else self._tasks))  # noqa: PTH208 - names alone
        except OSError:
            return self._started


class _Watched:
    """A process: writes its input, reads its output, and stops it when it exceeds a limit."""

    def __init__(
        self, process: subprocess.Popen[bytes], given: bytes, limits: Limits, threads: _Threads | None
    ) -> None:
        self._process, self._given, self._limits, self._threads = process, given, limits, threads
        self._printed: dict[int, bytearray] = {}
        self._reading = 2
        self._selector = selectors.DefaultSelector()
        self._began = time.monotonic()
        self._started = self._began
        self._until, self._running = self._began + START_S, False
        self._stopped: Stopped | None = None
        self._opened = contextlib.ExitStack()

    def run(self, signals_above: float) -> Ran:
        """Wait for its end.

        Args:
            signals_above: Exit codes above this one mean signals: the code is this plus the signal's number.

        Raises:
            ConfigError: if the code could not be confined.
        """
        with self._selector, self._opened:
            for stream in (self._process.stdout, self._process.stderr):
                self._printed[self._open(stream, selectors.EVENT_READ, self._read)] = bytearray()
            self._open(self._process.stdin, selectors.EVENT_WRITE, self._feed)
            while self._reading and self._stopped is None:
                left = self._until - time.monotonic()
                for key, _ in self._selector.select(left) if left > 0 else ():
                    key.data(key.fd)
                self._check()
        if self._stopped is None and not self._ends_in_time():  # it has closed its output, but is still running
            self._stopped = Stopped.TIME
        seconds = time.monotonic() - self._began
        if self._stopped is not None:
            self._process.kill()
        code = self._process.wait(START_S)
        return self._ended(int(signals_above) - code if code > signals_above else code, seconds)

    def _ends_in_time(self) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, self._until - time.monotonic()))
        return self._process.returncode is not None

    def _open(self, stream: IO[bytes] | None, event: int, do: Callable[[int], None]) -> int:
        if stream is None:
            raise RuntimeError("the process has no pipe")
        os.set_blocking(stream.fileno(), False)
        self._selector.register(stream.fileno(), event, do)
        return stream.fileno()

    def _feed(self, descriptor: int) -> None:
        """Write as much input as fits. Close the pipe at the end, or if the process no longer reads."""
        try:
            self._given = self._given[os.write(descriptor, self._given[:_CHUNK_BYTES]) :]
        except BrokenPipeError:
            self._given = b""
        if not self._given and self._process.stdin is not None:
            self._selector.unregister(descriptor)
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def _read(self, descriptor: int) -> None:
        """Read the available output."""
        chunk = os.read(descriptor, _CHUNK_BYTES)
        if not chunk:
            self._selector.unregister(descriptor)
            self._reading -= 1
        self._printed[descriptor] += chunk

    def _answer(self, descriptor: int) -> None:
        """Answer whether a thread may start. Once the descriptor is closed, the kernel refuses threads without asking."""
        if self._threads is None or not self._threads.answer(descriptor):
            self._selector.unregister(descriptor)
            self._opened.close()

    def _check(self) -> None:
        """Find whether the code has begun, and whether it has to be stopped."""
        _, errors = self._printed.values()
        if not self._running and (found := errors.find(READY)) >= 0:
            del errors[: found + len(READY)]
            self._running, self._began = True, time.monotonic()
            self._until = self._began + self._limits.wall_s
            if self._threads is not None:
                listener = self._threads.listener()
                self._opened.callback(os.close, listener)
                self._selector.register(listener, selectors.EVENT_READ, self._answer)
        if sum(map(len, self._printed.values())) > self._limits.output_kib << 10:
            self._stopped = Stopped.OUTPUT
        elif time.monotonic() >= self._until:
            self._stopped = Stopped.TIME

    def _ended(self, code: int, seconds: float) -> Ran:
        most = self._limits.output_kib << 10
        stdout, stderr = (bytes(each[:most]).decode(errors="replace") for each in self._printed.values())
        if not self._running:
            why = stderr.strip().removeprefix(NOT_CONFINED) or f"it ended with exit code {code}"
            raise ConfigError(f"the sandbox did not start: {why}")
        if self._stopped is None and code < 0:
            self._stopped = Stopped.TIME if -code in _CPU_SIGNALS else Stopped.SIGNAL
        return Ran(code, stdout, stderr, self._stopped, seconds, self._began - self._started)
