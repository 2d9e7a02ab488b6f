"""One process of the environment, seen from the orchestrator: its start, its calls, its output, its memory and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import grpc
import structlog

import sluice
from sluice.clock import Clock
from sluice.config import ConfigError
from sluice.config.secrets import is_secret_name
from sluice.environments.framing import BrokenFrameError, FrameReader, encode
from sluice.environments.output import LINES_PER_MINUTE, BoundedLines
from sluice.loading import STARTED_BY
from sluice.rpc import SluiceError
from sluice.supervise import guard
from sluice.supervise.spawn import Spawned
from sluice.supervise.watchdog import Watchdog
from sluice.tasks import run_to_end, settle

log = structlog.get_logger(__name__)

_CHILD = "sluice.environments.child"

_ELSEWHERE = f"""
import importlib.util as util, runpy, sys
spec = util.spec_from_file_location("sluice", sys.argv[1] + "/__init__.py", submodule_search_locations=[sys.argv[1]])
sys.modules["sluice"] = package = util.module_from_spec(spec)
spec.loader.exec_module(package)
runpy.run_module({_CHILD!r}, run_name="__main__")
"""
"""Program for another interpreter. It finds the package `sluice`, but not the packages installed beside it."""

_READ_BYTES = 1 << 18
_NO_SECRETS = {"PWD", "OLDPWD"}
"""Variables whose names only look like those of passwords."""

_KILL_S = 5.0
"""Seconds for the kernel to end a killed process. A process that waits for a dead disk may need longer."""

_LAST_LINES = 5
"""Number of last output lines in the error for a process that ended at its start."""

_STACKS_S = 0.2
"""Seconds for a hanging process to print its stacks."""

_LAST_LINES_S = 0.5
"""Seconds to read the output of an ended process. A process that left its group may still hold the pipe."""

_MOST_PROCESSES = 1000
"""Maximum number of processes of a tree to examine; they take about 50 ms of a thread."""

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

MARK = STARTED_BY
"""Environment variable by which a kill finds a process and all processes that it started, even in other sessions."""


class Reason(StrEnum):
    """Why a call of the environment failed."""

    RAISED = "ENVIRONMENT_RAISED"
    MESSAGES = "ENVIRONMENT_MESSAGES"
    """It returned messages that cannot be sent to a model. The same task fails in the same way each time."""
    HUNG = "ENVIRONMENT_HUNG"
    DIED = "ENVIRONMENT_DIED"
    MEMORY = "ENVIRONMENT_MEMORY"
    GIVEN_UP = "ENVIRONMENT_GIVEN_UP"
    """Its processes died so often in a row that no further process is started."""


class EnvironmentFailedError(SluiceError):
    """A call of the environment failed.

    Attributes:
        reason: One of `Reason`.
        task_id: Task that the call was about.
        culprit: Whether this call itself failed. If not, its process ended because of another call.
        suspect: Whether this call may be what ended the process: one of several calls did.
    """

    def __init__(
        self, reason: Reason, message: str, task_id: str, *, culprit: bool = True, suspect: bool = False
    ) -> None:
        super().__init__(grpc.StatusCode.ABORTED, reason, message, metadata={"task_id": task_id})
        self.task_id, self.culprit, self.suspect = task_id, culprit, suspect


@dataclass(eq=False, slots=True)
class Call:
    """A call of the environment, from its submission to its answer.

    Attributes:
        limit_s: Seconds that it may run; `setting` names that setting.
        answer: Gets the method's return value, or an `EnvironmentFailedError`; cancelled once nobody waits for it.
        since: When it was submitted, on the clock of the processes.
        worker: Process that runs it, or ran it last.
        alone: Whether nothing else may run beside it, because it may have ended a process.
        losses: Number of processes that ended while they had it.
    """

    number: int
    method: str
    task_id: str
    arguments: Mapping[str, Any]
    limit_s: float
    setting: str
    answer: asyncio.Future[Any]
    since: float
    worker: Worker | None = None
    alone: bool = False
    losses: int = 0
    timer: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"{self.method} of task {self.task_id}" if self.task_id else self.method


@dataclass(frozen=True, slots=True)
class End:
    """Why a process ended: a clause that follows "the environment's process", and the call at fault if it is known."""

    reason: Reason
    text: str
    culprit: Call | None = None


def program(python: str) -> list[str]:
    """Return the command that starts a process. The environment's name follows it, so that lists of processes show it.

    Raises:
        ConfigError: if there is no such interpreter.
    """
    if not python:
        return [sys.executable, "-P", "-m", _CHILD]
    found = shutil.which(python)
    if found is None:
        raise ConfigError(
            f"environment_processes.python is {python}, but there is no such program (relative paths start at {Path.cwd()}):"
            " make the virtual environment, or correct the path"
        )
    return [found, "-P", "-c", _ELSEWHERE, str(Path(sluice.__file__).parent)]


def import_path(python: str) -> list[str]:
    """Return the directories from which a process imports: all of ours; for another interpreter, only those outside our installation."""
    if not python:
        return sys.path
    installed = tuple(f"{Path(prefix)}{os.sep}" for prefix in {sys.prefix, sys.base_prefix, sys.exec_prefix})
    return [each for each in sys.path if not each.startswith(installed)]


class Worker(asyncio.Protocol):
    """A process of the environment and the calls that it runs.

    Args:
        number: Number of the process in the log.
        mark: Value of `MARK` for this process. No other process has a value that begins with it.
        watchdog: Ends the process if the orchestrator is killed.
        on_answer: Called with each answered call, when there is room for another call.
        clock: Time of the limits of calls.

    Attributes:
        room: Number of calls that it may run at a time.
        running: Its calls by number.
        waiting: Calls for the episodes that it holds.
        episodes: Number of episodes that it holds.
        ended: Set when it has ended, or must end because of `end`.
    """

    def __init__(
        self,
        number: int,
        mark: str,
        watchdog: Watchdog,
        on_answer: Callable[[Worker, Call, dict[str, Any]], None],
        clock: Clock,
    ) -> None:
        self.number, self.room, self.episodes = number, 0, 0
        self._mark = mark
        self.running: dict[int, Call] = {}
        self.waiting: deque[Call] = deque()
        self.ended = asyncio.Event()
        self.end: End | None = None
        self._watchdog, self._on_answer, self._clock = watchdog, on_answer, clock
        self._reader = FrameReader()
        self._environment = ""
        self._started = asyncio.Event()
        self._description: dict[str, Any] = {}
        self._transport: asyncio.Transport | None = None
        self._process: Spawned | None = None
        self._killing: asyncio.Task[str] | None = None
        self._following: list[asyncio.Task[None]] = []
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)

    async def start(self, settings: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
        """Start the process and let it construct the environment. The caller sets the deadline.

        Returns:
            Description of the environment: name, single_turn, multi_turn, poses, scores, coroutines.

        Raises:
            ConfigError: if the environment cannot be constructed.
        """
        self._environment = settings["environment"]
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = self._process = await self._watchdog.start_child(
                    [*program(settings["python"]), settings["environment"]],
                    stdin=theirs.fileno(),
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    environment={**variables, MARK: self._mark},
                )
            loop = asyncio.get_running_loop()
            self._transport, _ = await loop.create_unix_connection(lambda: self, sock=ours)
        except BaseException:
            ours.close()
            raise
        self._following = [
            asyncio.create_task(self._follow_output(process, BoundedLines(LINES_PER_MINUTE, self._clock()))),
            asyncio.create_task(self._follow_exit(process)),
        ]
        self._transport.write(encode(settings))
        await self._started.wait()
        if not self._description:
            how = await self.kill()
            raise ConfigError(
                f"the process of environment {settings['environment']} {self.end.text if self.end else how} while the environment was"
                f" imported or constructed; the last lines that it printed: {' | '.join(self._last_lines) or 'none'}"
            )
        if "refused" in self._description:
            raise ConfigError(self._description["refused"])
        return self._description

    def can_run(self, call: Call) -> bool:
        """Return whether it can run this call now."""
        if self.ended.is_set() or len(self.running) >= self.room:
            return False
        return not self.running or not (call.alone or any(each.alone for each in self.running.values()))

    def run(self, call: Call, extra_s: float) -> None:
        """Send a call. After its time limit the process is ended. With `extra_s`, the call is cancelled first, and has `extra_s` to end.

        Raises:
            NotPlainError: if its arguments cannot be sent.
        """
        if self._transport is None:
            raise RuntimeError("the process is not started")
        self._transport.write(encode({"id": call.number, "method": call.method, "arguments": call.arguments}))
        call.worker = self
        self.running[call.number] = call
        call.timer = asyncio.create_task(self._limit(self._transport, call, extra_s), name=f"limit of {call.name}")

    def end_because(self, end: End) -> None:
        """Make the process end. Only the first reason is kept."""
        if not self.ended.is_set():
            self.end = end
            self.ended.set()
            self._started.set()

    async def _limit(self, transport: asyncio.Transport, call: Call, extra_s: float) -> None:
        await self._clock.sleep(call.limit_s)
        if extra_s:
            transport.write(encode({"cancel": call.number}))
            await self._clock.sleep(extra_s)
        text = f"was killed: {call.name} did not end within {call.limit_s:g} s ({call.setting})"
        self.end_because(End(Reason.HUNG, text, call))

    def data_received(self, data: bytes) -> None:
        """Process the answers in new data."""
        try:
            messages = self._reader.feed(data)
            for message in messages:
                self._take(message)
        except (BrokenFrameError, KeyError) as error:
            self.end_because(
                End(Reason.DIED, f"was killed: it wrote to the orchestrator's connection ({error!r:.200})")
            )

    def _take(self, message: dict[str, Any]) -> None:
        if self.ended.is_set():
            return
        if not self._started.is_set():
            self._description = message
            self._started.set()
            return
        call = self.running.pop(message["id"])
        if call.timer is not None:
            call.timer.cancel()
        self._on_answer(self, call, message)

    def connection_lost(self, _error: Exception | None) -> None:
        """Note that the process closed its side of the connection, as it does when it dies."""
        self.ended.set()
        self._started.set()

    async def kill(self, grace_s: float = 0.0) -> str:
        """End the process and all processes that it started. Running calls are left without an answer.

        Even if the caller is cancelled, this runs to its end, which takes a few seconds at most.

        Args:
            grace_s: Seconds in which it may end by itself after its connection is closed.

        Returns:
            How it ended, as a clause that follows "the environment's process".
        """
        if self._killing is None:
            self._killing = asyncio.create_task(self._kill(grace_s), name=f"kill environment process {self.number}")
        return await run_to_end(self._killing)

    async def _kill(self, grace_s: float) -> str:
        self.ended.set()
        for call in self.running.values():
            if call.timer is not None:
                call.timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        process, self._process = self._process, None
        if process is None:
            return "was not started"
        escaped = await asyncio.to_thread(_outside_the_group, process.pid) if process.returncode is None else []
        if self.end is not None and self.end.reason == Reason.HUNG:
            process.send_signal(signal.SIGABRT)  # faulthandler prints the stacks of its threads, to the log
            grace_s = max(grace_s, _STACKS_S)
        with contextlib.suppress(TimeoutError):
            async with self._clock.timeout(grace_s):
                await process.wait()
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        for handle in escaped:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)
        await asyncio.to_thread(guard.kill_marked, f"{MARK}={self._mark}")
        await settle(*self._following, timeout_s=_LAST_LINES_S, clock=self._clock)
        for task in self._following:
            task.cancel()
        await settle(*self._following)
        try:
            async with self._clock.timeout(_KILL_S):
                code = await process.wait()
        except TimeoutError:
            log.error("a killed process does not end: is a disk hanging?", process=self.number, pid=process.pid)  # noqa: TRY400 - says all
            return "was killed, and has not ended yet"
        self._watchdog.note("-", process.pid)
        return _exit_text(code)

    async def _follow_exit(self, process: Spawned) -> None:
        """Note the end of the process even if another process that it started keeps the connection open."""
        await process.wait()
        self.connection_lost(None)

    async def _follow_output(self, process: Spawned, lines: BoundedLines) -> None:
        data = b"-"
        while data and process.stdout is not None:
            data = await process.stdout.read(_READ_BYTES)
            for line in lines.feed(data, self._clock()):
                self._last_lines.append(line)
                log.info("environment prints", environment=self._environment, process=self.number, text=line)

    def memory_mib(self, most: float) -> float:
        """Return the memory of the process and the processes that it started, in MiB; 0 if not Linux.

        Shared pages count once: pages that a fork has not written to, and shared memory. Pages of files do not count. For this
        the kernel visits every page. So if the sum of the resident pages, which is never less, is at most `most`, return that sum.
        May be called in a thread: it reads as many files as the processes have threads.
        """
        process = self._process
        tree = _tree(process.pid) if process is not None else []
        bound = sum(_resident_pages(pid)[0] for pid in tree) * _PAGE_BYTES / (1 << 20)
        return bound if bound <= most else sum(_proportional_bytes(pid) for pid in tree) / (1 << 20)


def _resident_pages(pid: int) -> tuple[int, int]:
    """Return the number of resident pages of a process, and how many of them belong to files or shared memory; 0 if it has ended."""
    with contextlib.suppress(OSError, ValueError):
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
        return int(resident), int(shared)
    return 0, 0


def _proportional_bytes(pid: int) -> int:
    """Return the memory of a process without pages of files. A page shared by n processes counts one n-th."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        parts = dict(line.split(":", 1) for line in lines[1:])
        return sum(int(parts[name].removesuffix("kB")) << 10 for name in ("Pss_Anon", "Pss_Shmem"))
    except (OSError, KeyError):  # it has ended or runs as another user, or Linux is older than 5.3
        resident, shared = _resident_pages(pid)
        return (resident - shared) * _PAGE_BYTES


def _tree(pid: int) -> list[int]:
    """Return a process and the processes that it started, even in other sessions; only itself if not Linux."""
    found: list[int] = []
    left = [pid]
    while left and len(found) < _MOST_PROCESSES:
        found.append(left.pop())
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for thread in Path(f"/proc/{found[-1]}/task").iterdir():
                left += map(int, (thread / "children").read_text().split())
    return found


def _outside_the_group(leader: int) -> list[int]:
    """Return handles (pidfd) of the processes that a process started in other groups. Unlike a pid, a handle never names another process."""
    handles = []
    for pid in _tree(leader)[1:]:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if os.getpgid(pid) != leader:
                handles.append(os.pidfd_open(pid))
    return handles


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    hint = ": by the kernel, perhaps, for want of memory" if -code == signal.SIGKILL else ""
    return f"was killed by signal {-code} ({signal.Signals(-code).name}){hint}"


def passed_variables(variables: Mapping[str, str], named: Sequence[str]) -> dict[str, str]:
    """Return the variables that a process of the environment gets: all except ours and those with names of secrets.

    Args:
        variables: Variables of the orchestrator.
        named: Names of variables that it gets in any case.
    """
    return {
        name: value
        for name, value in variables.items()
        if name in _NO_SECRETS or name in named or not (name.startswith("SLUICE_") or is_secret_name(name))
    }
