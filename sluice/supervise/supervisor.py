"""Keeps the children of a run alive, within the limits on restarts, and ends all of them together."""

from __future__ import annotations

import asyncio
import enum
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sluice.supervise.child_logs import ChildLog, LogLine
from sluice.supervise.child_process import Child, ChildSpec, Watchdog, describe_exit
from sluice.supervise.restart_policy import Exit, GiveUp, RestartLimits, RestartPolicy
from sluice.tasks import discard_outcome

__all__ = ["ChildState", "Ending", "Listener", "Outcome", "Supervisor", "run_until_signal"]


_KILL_GRACE_S = 2.5
"""Seconds for a killed process to end and for its output to be read. A process that hangs in a driver is left behind."""


class ChildState(enum.Enum):
    """The state of a child."""

    STARTING = "starting"
    SERVING = "serving"
    RESTARTING = "restarting"
    STOPPING = "stopping"
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
        ending: Succeeded, stopped or failed.
        child: The child whose end decided it; empty if a signal stopped the run.
        reason: How and why that child ended, for people.
        tail: Last lines of its log, if it failed.
    """

    ending: Ending
    child: str = ""
    reason: str = ""
    tail: tuple[str, ...] = ()


class Listener(Protocol):
    """Receives what happens to the children. Called in the event loop; must not block."""

    def on_line(self, child: str, line: LogLine) -> None:
        """A child wrote a line."""

    def on_state(self, child: str, state: ChildState, detail: str) -> None:
        """A child changed its state; `detail` says why, or is empty."""


class Supervisor:
    """Starts children side by side, restarts one that dies, and ends all of them when the run ends.

    Args:
        specs: The children.
        listener: Receives lines and states.
        limits: Bounds on restarts, for each child by itself.
        start_deadline_s: Seconds that a child has until it serves.
        stop_grace_s: Seconds between SIGTERM and SIGKILL. Children end side by side, so this bounds the whole stop.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        listener: Listener,
        *,
        limits: RestartLimits | None = None,
        start_deadline_s: float = 600.0,
        stop_grace_s: float = 7.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._specs, self._listener = specs, listener
        self._limits = limits or RestartLimits()
        self._start_deadline_s, self._stop_grace_s = start_deadline_s, stop_grace_s
        self._clock = clock
        self._children: dict[str, Child] = {}

    async def run(self, stop: asyncio.Event) -> Outcome:
        """Keep all children until the end of one decides the outcome, or until `stop` is set; then end all of them.

        Raises:
            OSError: if a program cannot be started.
        """
        watchdog = await Watchdog.start()
        stopped = asyncio.create_task(stop.wait())
        keepers = [asyncio.create_task(self._keep(spec, watchdog)) for spec in self._specs]
        try:
            done, _ = await asyncio.wait({stopped, *keepers}, return_when=asyncio.FIRST_COMPLETED)
            decisive = [keeper.result() for keeper in keepers if keeper in done]
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

    async def _keep(self, spec: ChildSpec, watchdog: Watchdog) -> Outcome:
        """Keep one child until its end decides the outcome of the run; end it when cancelled."""
        policy = RestartPolicy(self._limits)
        log = ChildLog(spec.log_path)
        was_ready = False
        while True:
            self._listener.on_state(spec.name, ChildState.STARTING, "")
            child = await Child.start(spec, log, watchdog, lambda line: self._listener.on_line(spec.name, line))
            self._children[spec.name] = child
            ended = asyncio.create_task(child.ended())
            discard_outcome(ended)
            try:
                ready = await self._serving(spec, ended)
                was_ready = was_ready or ready
                if not ready and not ended.done():
                    reason = f"did not serve within {self._start_deadline_s:g} s (--start-deadline)"
                    return Outcome(Ending.FAILED, spec.name, reason, tuple(log.tail()))
                code = await asyncio.shield(ended)
            finally:
                await self._end(spec.name, child, ended)
            if code == 0 and spec.ends_run:
                return Outcome(Ending.SUCCEEDED, spec.name, describe_exit(code))
            decision = policy.on_exit(Exit(code, was_ready), self._clock())
            died = f"ended with {describe_exit(code)}"
            if isinstance(decision, GiveUp):
                reason = f"{died}, and {decision.reason}" if decision.reason else died
                return Outcome(Ending.FAILED, spec.name, reason, tuple(log.tail()))
            detail = f"{died}; restart {decision.attempt} of {self._limits.restarts} in {decision.delay_s:g} s"
            self._listener.on_state(spec.name, ChildState.RESTARTING, detail)
            await asyncio.sleep(decision.delay_s)

    async def _serving(self, spec: ChildSpec, ended: asyncio.Task[int]) -> bool:
        """Wait until the child serves; return False if it ended first, or at the deadline."""
        serves = asyncio.ensure_future(spec.serves())
        try:
            await asyncio.wait({serves, ended}, timeout=self._start_deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if not serves.done():
                return False
            serves.result()
        finally:
            serves.cancel()
            discard_outcome(serves)
        self._listener.on_state(spec.name, ChildState.SERVING, "")
        return True

    async def _end(self, name: str, child: Child, ended: asyncio.Task[int]) -> None:
        """Let a child that still runs drain, then kill it."""
        if not ended.done():
            self._listener.on_state(name, ChildState.STOPPING, "")
            child.terminate()
            await asyncio.wait({ended}, timeout=self._stop_grace_s)
        if not ended.done():
            child.kill()
            await asyncio.wait({ended}, timeout=_KILL_GRACE_S)
        del self._children[name]
        self._listener.on_state(name, ChildState.ENDED, "")


async def run_until_signal(supervisor: Supervisor, say: Callable[[str], None]) -> Outcome:
    """Run to the end, or to SIGINT, SIGTERM or SIGHUP: the first signal drains the children, a second one kills them.

    Args:
        supervisor: What to run.
        say: Called with what the supervisor does about a signal.
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
