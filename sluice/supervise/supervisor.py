"""The children of a run: start them side by side, follow their output, restart one that dies, and end all of them together.

Nothing here prints: a `Listener` receives each line and each change of state.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import enum
import errno
import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Protocol, Self

from sluice.clock import CLOCK, Clock
from sluice.host_files import rotate
from sluice.supervise.fork_server import Forked, ForkServer
from sluice.supervise.log_records import LEVELS, LogLine, Records, read_line
from sluice.supervise.restart_policy import (
    EXIT_BIND,
    EXIT_SET_ASIDE,
    MOST_RESTARTS,
    SETTLED_S,
    START_S,
    GiveUp,
    after_exit,
)
from sluice.supervise.spawn import Spawned
from sluice.supervise.watchdog import Watchdog
from sluice.tasks import discard_outcome, first_ended

TAIL_LINES = 30
"""Lines of a dead child's log that are shown: a traceback and a few lines before it."""

STOP_MARGIN_S = 2.0
"""Seconds that a child gets after its drain to release its resources, before it is killed."""

_KILL_GRACE_S = 2.5
"""Seconds for a killed process to end and for its output to be read. A process that hangs in a driver is left behind."""

_OUTPUT_GRACE_S = 2.0
"""Seconds to read what a dead process left in its pipe; a daemon that inherited the pipe must not block the supervisor."""

_CHUNK_BYTES = 1 << 16
_LINE_CHARACTERS = 1 << 16
"""A longer line is split, so that a child cannot fill the supervisor's memory."""


@dataclass(frozen=True)
class LogLimit:
    """How much of a child's output stays on disk.

    Attributes:
        file_bytes: Size at which the log begins a new file.
        files: Older files to keep.
    """

    file_bytes: int = 64 << 20
    files: int = 4


@dataclass(frozen=True)
class ChildSpec:
    """A child to run.

    Attributes:
        name: Label, unique among the children, such as ``rollout-0``.
        wait_ready: Returns once the child serves; the caller sets the deadline and cancels.
        environment: Variables that are added to the supervisor's own.
        fork_server: Program that forks the child at each start, see `sluice.cli.fork_server`; empty: each start executes `argv`.
        ends_run: Whether the run succeeds when this child ends with exit code 0.
        address: Where it serves, for people.
        after: Children that must have served before this one is started for the first time.
        start_s: Seconds until it must serve.
        may_leave: Why the run continues without this child after it ended with exit code 0, as a drained replica does, for people.
            Empty: its end is a failure.
        drain_s: Most seconds that it takes to drain after SIGTERM.
        log_limit: How much of its output stays on disk.
    """

    name: str
    argv: tuple[str, ...]
    log_path: Path
    wait_ready: Callable[[], Awaitable[None]]
    environment: Mapping[str, str] = field(default_factory=dict)
    fork_server: tuple[str, ...] = ()
    ends_run: bool = False
    may_leave: str = ""
    address: str = ""
    after: tuple[str, ...] = ()
    start_s: float = START_S
    drain_s: float = 5.0
    log_limit: LogLimit = LogLimit()


class ChildState(enum.Enum):
    """The state of a child."""

    STARTING = "starting"
    SERVING = "serving"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    LEFT = "left"
    ENDED = "ended"


class Ending(enum.Enum):
    """How a run ended."""

    SUCCEEDED = "succeeded"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        child: The child whose end decided it; empty if a signal stopped the run.
        reason: How and why that child ended, for people.
        tail: Last lines of its log, if it failed.
        cannot_bind: Whether it failed because it cannot listen at its address.
        set_aside: Whether it ended because too much was set aside.
    """

    ending: Ending
    child: str = ""
    reason: str = ""
    tail: tuple[str, ...] = ()
    cannot_bind: bool = False
    set_aside: bool = False


class Listener(Protocol):
    """Receives what happens to the children. Called in the event loop; must not block."""

    def on_line(self, child: str, line: LogLine) -> None:
        """A child wrote a line."""

    def on_state(self, child: str, state: ChildState, detail: str) -> None:
        """A child changed its state; `detail` says why, or is empty."""


class Supervisor:
    """Starts children side by side, restarts one that dies, and ends all of them when the run ends.

    Args:
        max_restarts: Most restarts of each child within the window of `restart_policy`.
        stop_margin_s: Seconds between the end of a child's drain and SIGKILL. Children end in parallel, so the whole stop takes at
            most the longest drain and this margin.
        orphan_grace_s: Seconds between SIGTERM and SIGKILL of the children if this process is killed. None: the longest drain and
            the margin.
        clock: Time of starts, drains and restarts.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        listener: Listener,
        *,
        max_restarts: int = MOST_RESTARTS,
        stop_margin_s: float = STOP_MARGIN_S,
        orphan_grace_s: float | None = None,
        clock: Clock = CLOCK,
    ) -> None:
        self._specs, self._listener, self._max_restarts = specs, listener, max_restarts
        self._stop_margin_s, self._orphan_grace_s, self._clock = stop_margin_s, orphan_grace_s, clock
        self._children: dict[str, Child] = {}
        self._served = {spec.name: asyncio.Event() for spec in specs}

    async def run(self, stop: asyncio.Event) -> Outcome:
        """Keep all children running until the end of one decides the outcome, or until `stop` is set. Then end all of them.

        Raises:
            OSError: if a program cannot be started.
        """
        longest = max(spec.drain_s for spec in self._specs)
        grace_s = longest + self._stop_margin_s if self._orphan_grace_s is None else self._orphan_grace_s
        watchdog = await Watchdog.start(grace_s)
        stopped = asyncio.create_task(stop.wait())
        keepers = [asyncio.create_task(self._keep(spec, watchdog)) for spec in self._specs]
        decisive: list[Outcome] = []
        running = {stopped, *keepers}
        try:
            while not decisive and len(running) > 1 and not stopped.done():
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                decisive = [outcome for keeper in keepers if keeper in done and (outcome := keeper.result())]
        finally:
            for task in (stopped, *keepers):
                task.cancel()
            await asyncio.gather(stopped, *keepers, return_exceptions=True)
            await watchdog.stop()
        failed = [outcome for outcome in decisive if outcome.ending is Ending.FAILED]
        return next(iter([*failed, *decisive]), Outcome(Ending.STOPPED))

    def kill(self) -> None:
        """Kill all children; `run` then returns."""
        for child in self._children.values():
            child.kill()

    async def _keep(self, spec: ChildSpec, watchdog: Watchdog) -> Outcome | None:
        """Keep one child running until its end decides the outcome of the run. End it when cancelled.

        Returns:
            The outcome; None if the child has ended and the run continues without it.
        """
        restarts: list[float] = []
        log = ChildLog(spec.log_path, spec.log_limit)
        was_ready, fruitless = False, 0
        environment = {**os.environ, **spec.environment}
        async with ForkServer(spec.fork_server, environment, watchdog, spec.start_s, self._clock) as forks:
            for other in spec.after:
                await self._served[other].wait()  # a child that does not serve in time ends the run
            while True:
                self._listener.on_state(spec.name, ChildState.STARTING, "")
                child = await Child.start(
                    spec, log, watchdog, forks, lambda line: self._listener.on_line(spec.name, line), clock=self._clock
                )
                self._children[spec.name] = child
                ended = asyncio.create_task(child.ended())
                discard_outcome(ended)
                try:
                    ready = await self._serving(spec, ended)
                    was_ready, ready_at = was_ready or ready, self._clock()
                    if not ready and not ended.done():
                        reason = f"did not serve{spec.address and f' at {spec.address}'} within {spec.start_s:g} s (--start-deadline)"
                        return Outcome(Ending.FAILED, spec.name, reason, tuple(log.tail()))
                    code = await asyncio.shield(ended)
                finally:
                    await self._end(child, ended)
                if code == 0 and spec.ends_run:
                    return Outcome(Ending.SUCCEEDED, spec.name, describe_exit(code))
                if code == 0 and spec.may_leave and was_ready:
                    self._listener.on_state(spec.name, ChildState.LEFT, spec.may_leave)
                    return None
                now = self._clock()
                fruitless = 0 if ready and now - ready_at >= SETTLED_S else fruitless + 1
                decision = after_exit(code, now, restarts, self._max_restarts, was_ready=was_ready, fruitless=fruitless)
                died = f"ended with {describe_exit(code)}"
                if isinstance(decision, GiveUp):
                    reason = f"{died}, and {decision.reason}" if decision.reason else died
                    tail = tuple(log.tail())
                    return Outcome(
                        Ending.FAILED, spec.name, reason, tail, code == EXIT_BIND, set_aside=code == EXIT_SET_ASIDE
                    )
                restarts.append(now)
                when = f"in {decision.delay_s:g} s" if decision.delay_s else "now"
                detail = f"{died}; restart {decision.attempt} of {self._max_restarts} {when}"
                self._listener.on_state(spec.name, ChildState.RESTARTING, detail)
                await self._clock.sleep(decision.delay_s)

    async def _serving(self, spec: ChildSpec, ended: asyncio.Task[int]) -> bool:
        """Wait until the child serves; return False if it ended first, or at the deadline."""
        ready = asyncio.ensure_future(spec.wait_ready())
        try:
            await first_ended(ready, ended, timeout_s=spec.start_s, clock=self._clock)
            if not ready.done():
                return False
            ready.result()
        finally:
            ready.cancel()
            discard_outcome(ready)
        self._served[spec.name].set()
        self._listener.on_state(spec.name, ChildState.SERVING, "")
        return True

    async def _end(self, child: Child, ended: asyncio.Task[int]) -> None:
        """Let a child that still runs drain, then kill it."""
        name = child.spec.name
        if not ended.done():
            self._listener.on_state(name, ChildState.STOPPING, "")
            child.terminate()
            await first_ended(ended, timeout_s=child.spec.drain_s + self._stop_margin_s, clock=self._clock)
        if not ended.done():
            child.kill()
            await first_ended(ended, timeout_s=_KILL_GRACE_S, clock=self._clock)
        del self._children[name]
        self._listener.on_state(name, ChildState.ENDED, "")


class Stoppable(Protocol):
    """Runs the processes of a run: a `Supervisor`, or its counterpart on a cluster."""

    async def run(self, stop: asyncio.Event) -> Outcome:
        """Run to the end, or until `stop` is set; then end everything in order."""

    def kill(self) -> None:
        """Kill all processes; `run` then returns."""


async def run_until_signal(supervisor: Stoppable, say: Callable[[str], None]) -> Outcome:
    """Run to the end, or to SIGINT, SIGTERM or SIGHUP: the first signal drains the children, a second one kills them.

    `say` is called with what the supervisor does about a signal.
    """
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            say("killing the services that still run")
            supervisor.kill()
        else:
            say("stopping the services; press Ctrl-C again to kill them")
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    return await supervisor.run(stop)


class Child:
    """One process of a child, in a process group of its own. The group's id is the process id."""

    def __init__(
        self,
        spec: ChildSpec,
        process: Spawned | Forked,
        output: asyncio.Task[None],
        watchdog: Watchdog,
        *,
        clock: Clock,
    ) -> None:
        self.spec, self.pid = spec, process.pid
        self._process, self._output, self._watchdog, self._clock = process, output, watchdog, clock

    @classmethod
    async def start(
        cls,
        spec: ChildSpec,
        log: ChildLog,
        watchdog: Watchdog,
        forks: ForkServer,
        on_line: Callable[[LogLine], None],
        *,
        clock: Clock,
    ) -> Self:
        """Start it: forked if that is possible, otherwise as a new program."""
        process: Spawned | Forked | None = await forks.fork()
        if process is None:
            process = await watchdog.start_child(
                spec.argv,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                environment={**os.environ, **spec.environment},
            )
        if process.stdout is None:
            raise RuntimeError("a child's output must be a pipe")
        return cls(spec, process, asyncio.create_task(log.follow(process.stdout, on_line)), watchdog, clock=clock)

    async def ended(self) -> int:
        """Wait for its end, kill the processes that it left behind, and read the rest of its output.

        Returns:
            The exit code, or minus the signal's number.
        """
        code = await self._process.wait()
        self.kill()
        self._watchdog.note("-", self.pid)
        await first_ended(self._output, timeout_s=_OUTPUT_GRACE_S, clock=self._clock)
        self._output.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._output
        return code

    def terminate(self) -> None:
        """Ask it to drain by SIGTERM. It ends the processes that it started itself."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill it and everything that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def describe_exit(code: int) -> str:
    """Return how a process ended, for people: ``exit code 1`` or ``signal SIGKILL``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


class ChildLog:
    """The log of one child across its restarts: a file of JSON lines, see `log_records`, and the last lines in memory.

    A file that is full becomes ``NAME.log.1``, the one before it ``NAME.log.2``, and so on; the oldest is removed. A disk that is full
    does not end the child: lines that cannot be written are missing in the file, and a later record says how many. If a supervisor was
    killed while it wrote a line, the incomplete line is made a record, too.

    Args:
        path: The file; its folder is made with the first line.
        limit: How large it may be, and how many older ones are kept.
    """

    def __init__(self, path: Path, limit: LogLimit) -> None:
        self.path, self._limit = path, limit
        self._records = Records(path.name.removesuffix(".log"))
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._missing = 0
        self._file: FileIO | None = None

    def tail(self) -> list[str]:
        """Return the last lines, with each line of a traceback on its own; at most `TAIL_LINES`."""
        unfolded = [line for raw in self._tail for line in read_line(raw).text.splitlines()]
        return unfolded[-TAIL_LINES:]

    async def follow(self, stream: asyncio.StreamReader, on_line: Callable[[LogLine], None]) -> None:
        """Write a process's output to the file until the process closes it, and pass on each line."""
        try:
            async for raw, cut in _lines(stream):
                try:
                    self._write(self._records.of(raw, cut=cut))
                except OSError as error:
                    self._missing += 1
                    if self._missing == 1:
                        problem = (
                            f"cannot write {self.path}: {error.strerror}; its lines are missing until there is room"
                        )
                        on_line(LogLine(LEVELS["warning"], problem, structured=True))
                self._tail.append(raw)
                on_line(read_line(raw))
        finally:
            self._close()

    def _write(self, records: Sequence[str]) -> None:
        """Write the records of a line, after a record with the number of missing lines. If there is no room, write nothing."""
        if not records:
            return
        if self._missing:
            missing = "lines are missing here, which could not be written"
            records = [self._records.note("warning", missing, lines=self._missing), *records]
        content = "".join(f"{record}\n" for record in records).encode()
        file = self._open()
        size = os.fstat(file.fileno()).st_size
        if size and size + len(content) > self._limit.file_bytes:
            self._close()
            rotate([self.path, *(self.path.with_name(f"{self.path.name}.{n + 1}") for n in range(self._limit.files))])
            file, size = self._open(), 0
        if file.write(content) < len(content):
            file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._missing = 0

    def _open(self) -> FileIO:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b", buffering=0)
            self._mend(self._file)
        return self._file

    def _mend(self, file: FileIO) -> None:
        """Replace an incomplete last line of a file by a record of its text."""
        start = size = file.seek(0, os.SEEK_END)
        torn = b""
        while start and b"\n" not in torn:
            start = max(0, start - _CHUNK_BYTES)
            torn = os.pread(file.fileno(), size - start, start)
        torn = torn[torn.rfind(b"\n") + 1 :]
        if not torn:
            return
        file.truncate(size - len(torn))
        records = self._records.of(torn.decode(errors="backslashreplace"), cut=True)
        file.write("".join(f"{record}\n" for record in records).encode())

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[tuple[str, bool]]:
    """Yield lines, each with whether its end is missing. Lines that are too long are split. Bytes that are not UTF-8 are escaped."""
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    rest = ""
    while chunk := await stream.read(_CHUNK_BYTES):
        *whole, rest = (rest + decoder.decode(chunk)).split("\n")
        for line in whole:
            yield line.removesuffix("\r"), False
        if len(rest) > _LINE_CHARACTERS:
            yield rest, True
            rest = ""
    rest += decoder.decode(b"", final=True)
    if rest:
        yield rest, True
