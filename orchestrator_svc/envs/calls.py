"""Calls the code of an environment in threads of its own, with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import structlog

from sluice.rpc import SluiceError

__all__ = ["EnvironmentCalls"]

log = structlog.get_logger(__name__)

_Answer = TypeVar("_Answer")

_MOST_HUNG = 256
"""Threads that may hang at a time: each costs memory, and an environment that hangs so often will not recover."""


class EnvironmentCalls:
    """Runs functions of an environment in threads; use it from one event loop.

    A thread cannot be killed. One that misses its deadline is left to itself and another takes its place, so that calls that
    hang stop neither the others nor what else needs threads, such as the resolver. The threads are daemons: a hung one does
    not keep the process from ending.

    Args:
        threads: Calls that run at a time; further ones wait.
        deadline_s: Seconds that one call may run.
        most_hung: Calls that may hang at a time before further ones are refused.

    Attributes:
        hung: Calls that missed their deadline so far.
        hanging: Calls without a caller whose threads have not ended yet.
    """

    def __init__(self, threads: int, deadline_s: float, most_hung: int = _MOST_HUNG) -> None:
        self.hung = self.hanging = 0
        self._places = asyncio.Semaphore(threads)
        self._deadline_s, self._most_hung = deadline_s, most_hung

    async def run(self, function: Callable[..., _Answer], *arguments: Any) -> _Answer:  # noqa: ANN401 - those of any function
        """Call a function in a thread and return its answer.

        Raises:
            TimeoutError: if it is not done by the deadline.
            SluiceError: ABORTED if too many calls hang.
            Exception: whatever the function raises.
        """
        async with self._places:
            if self.hanging >= self._most_hung:
                raise SluiceError.aborted(
                    "ENVIRONMENT_HANGS",
                    f"{self.hanging} calls of the environment have not ended by their deadline"
                    " (orchestrator.deadlines.environment_s): repair the environment, or raise the deadline",
                )
            answer = self._start(function, arguments)
            try:
                async with asyncio.timeout(self._deadline_s) as deadline:
                    return await answer
            except TimeoutError:
                if deadline.expired():
                    self.hung += 1
                    log.warning("a call of the environment hangs", limit_s=self._deadline_s, hanging=self.hanging)
                raise

    def _start(self, function: Callable[..., _Answer], arguments: tuple[Any, ...]) -> asyncio.Future[_Answer]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_Answer] = loop.create_future()
        call = contextvars.copy_context().run
        # The caller leaves by its deadline, or because it is cancelled itself: either cancels the future.
        answer.add_done_callback(lambda done: self._left(done, +1))

        def work() -> None:
            error: Exception | None = None
            result: Any = None
            try:
                result = call(function, *arguments)
            except Exception as raised:  # noqa: BLE001 - the environment may raise anything; the caller gets it
                error = raised
            except BaseException as raised:  # noqa: BLE001 - SystemExit of an environment must not end the orchestrator
                error = RuntimeError(f"the environment raised {raised!r}")
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._deliver, answer, result, error)

        threading.Thread(target=work, name="environment", daemon=True).start()
        return answer

    def _left(self, answer: asyncio.Future[Any], change: int) -> None:
        if answer.cancelled():
            self.hanging += change

    def _deliver(self, answer: asyncio.Future[Any], result: Any, error: Exception | None) -> None:  # noqa: ANN401 - any answer
        if answer.done():
            self._left(answer, -1)
        elif error is None:
            answer.set_result(result)
        elif isinstance(error, StopIteration):
            answer.set_exception(RuntimeError("the environment raised StopIteration"))
        else:
            answer.set_exception(error)
