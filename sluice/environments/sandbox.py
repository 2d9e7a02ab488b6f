r"""Runs Python code that nobody has read, such as a model's answer, so that it can compute and print, and do nothing else.

    ran = run_python("print(sum(range(10)))")
    assert ran.ok and ran.stdout == "45\n"

The code runs in a process of its own, without files but those of the interpreter, without a network, processes, signals to others or
privileges, and with limits of time, memory and output: `sandbox_child.py` has what confines it (Landlock, seccomp, resource limits). Where
bubblewrap works it is put around that.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO

from sluice.environments.sandbox_child import NOT_CONFINED, READY, landlock_abi
from sluice.errors import ConfigError

_CHILD = str(Path(__file__).with_name("sandbox_child.py"))

_CHUNK_BYTES = 1 << 16

START_S = 20.0
"""Seconds for the interpreter to start; the time of the code counts from then on."""

_PROBE_S = 5.0

_CPU_SIGNALS = {signal.SIGXCPU, signal.SIGKILL}
"""What ends a process whose time of the processor is over: at the limit, and a second later for good."""


class Stopped(StrEnum):
    """Why the code did not end by itself."""

    TIME = "TIME"
    OUTPUT = "OUTPUT"
    SIGNAL = "SIGNAL"


@dataclass(frozen=True)
class Limits:
    """What the code may use.

    Attributes:
        wall_s: Seconds.
        cpu_s: Seconds of a core.
        memory_mib: Address space of the process, interpreter included.
        output_kib: Of standard output and standard error together.
        packages: Whether it may import the packages that are installed beside Sluice.
    """

    wall_s: float = 10.0
    cpu_s: float = 5.0
    memory_mib: int = 512
    output_kib: int = 256
    packages: bool = False


@dataclass(frozen=True)
class Ran:
    """What came of the code.

    Attributes:
        exit_code: 0 if it ended in order; negative: the signal that ended it.
        stdout: What it printed.
        stderr: What it printed as errors, tracebacks included.
        stopped: Why it was stopped; None if it ended by itself.
        seconds: From the start of the code to its end.
        start_seconds: That the interpreter took to start, before that.
    """

    exit_code: int
    stdout: str
    stderr: str
    stopped: Stopped | None
    seconds: float
    start_seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it ended by itself and in order."""
        return self.exit_code == 0 and self.stopped is None


_DEFAULT = Limits()


def run_python(code: str, *, stdin: str = "", limits: Limits = _DEFAULT, confined: bool = True) -> Ran:
    """Run code, and wait for its end.

    Args:
        code: A program.
        stdin: What it reads.
        limits: What it may use.
        confined: False runs it with the limits alone, with all rights of this process: for code that you have read.

    Raises:
        ConfigError: if this machine cannot confine it.
    """
    if confined:
        check_confines()
    asked = {**asdict(limits), "code": code, "confined": confined}
    given = json.dumps(asked).encode()
    argv = [sys.executable, "-I", "-S", _CHILD]
    if confined and _bubblewrap():
        argv = [*_BUBBLEWRAP, *argv]
    variables = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(  # noqa: S603 - our own program
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=variables,
        cwd="/",
        start_new_session=True,
    )
    try:
        return _Watched(process, b"%d\n" % len(given) + given + stdin.encode(), limits).run()
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def check_confines() -> None:
    """Check that this machine can confine code.

    Raises:
        ConfigError: if it cannot.
    """
    if landlock_abi() < 1 and not _bubblewrap():
        raise ConfigError(
            "this machine cannot confine code: it needs Linux 5.13 or newer with Landlock, or bubblewrap. Use another machine, or set"
            ' sandbox = "none" if you trust the code as much as your own'
        )


_BUBBLEWRAP = (
    *("bwrap", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),  # noqa: S108 - a new, empty one
    *("--unshare-all", "--die-with-parent", "--new-session"),
)


@functools.cache
def _bubblewrap() -> bool:
    """Return whether bubblewrap is there and may make namespaces."""
    if shutil.which("bwrap") is None:
        return False
    probe = [*_BUBBLEWRAP, "true"]
    try:
        return subprocess.run(probe, capture_output=True, timeout=_PROBE_S, check=False).returncode == 0  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return False


class _Watched:
    """A process: feeds it, reads what it prints, and stops it when it has had enough of something."""

    def __init__(self, process: subprocess.Popen[bytes], given: bytes, limits: Limits) -> None:
        self._process, self._given, self._limits = process, given, limits
        self._printed: dict[int, bytearray] = {}
        self._selector = selectors.DefaultSelector()
        self._began = time.monotonic()
        self._started = self._began
        self._until, self._running = self._began + START_S, False
        self._stopped: Stopped | None = None

    def run(self) -> Ran:
        """Wait for its end.

        Raises:
            ConfigError: if the code could not be confined.
        """
        with self._selector:
            for stream in (self._process.stdout, self._process.stderr):
                self._open(stream, selectors.EVENT_READ)
            self._open(self._process.stdin, selectors.EVENT_WRITE)
            reading = set(self._printed)
            while reading and self._stopped is None:
                left = self._until - time.monotonic()
                for key, _ in self._selector.select(left) if left > 0 else ():
                    if key.fd not in self._printed:
                        self._feed(key.fd)
                    elif not self._read(key.fd):
                        reading.remove(key.fd)
                self._check()
        if self._stopped is None and not self._ends_in_time():  # it has closed its output, and goes on
            self._stopped = Stopped.TIME
        seconds = time.monotonic() - self._began
        if self._stopped is not None:
            self._process.kill()
        return self._ended(self._process.wait(START_S), seconds)

    def _ends_in_time(self) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, self._until - time.monotonic()))
        return self._process.returncode is not None

    def _open(self, stream: IO[bytes] | None, event: int) -> None:
        if stream is None:
            raise RuntimeError("the process has no pipe")
        os.set_blocking(stream.fileno(), False)
        self._selector.register(stream.fileno(), event)
        if event == selectors.EVENT_READ:
            self._printed[stream.fileno()] = bytearray()

    def _feed(self, descriptor: int) -> None:
        """Write what fits; close the pipe at the end, or if the process no longer reads."""
        try:
            self._given = self._given[os.write(descriptor, self._given[:_CHUNK_BYTES]) :]
        except BrokenPipeError:
            self._given = b""
        if not self._given and self._process.stdin is not None:
            self._selector.unregister(descriptor)
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def _read(self, descriptor: int) -> bool:
        """Read what is there; return False at the end."""
        chunk = os.read(descriptor, _CHUNK_BYTES)
        if not chunk:
            self._selector.unregister(descriptor)
        self._printed[descriptor] += chunk
        return bool(chunk)

    def _check(self) -> None:
        """Find whether the code has begun, and whether it has to be stopped."""
        _, errors = self._printed.values()
        if not self._running and (found := errors.find(READY)) >= 0:
            del errors[: found + len(READY)]
            self._running, self._began = True, time.monotonic()
            self._until = self._began + self._limits.wall_s
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
