"""Threads for functions that may hang: code of environments, chat templates of models, writes to a disk.

At its exit the interpreter waits for the threads of an executor. The threads here are daemons: a hung thread does not keep the process
from ending.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

from sluice.clock import CLOCK, Clock

T = TypeVar("T")

Calls: TypeAlias = "SimpleQueue[Callable[[], None] | None]"
"""The calls that a thread still has to make, in order; None ends the thread."""


class CallHungError(TimeoutError):
    """A call did not end by its deadline. Its thread is abandoned."""


class TooManyHungError(Exception):
    """Too many calls hang; no further one is started."""


class SerialThread:
    """Runs one function after the other in a thread of its own, until `end`; use it from one event loop.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._calls: Calls = SimpleQueue()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:  # noqa: ANN401 - those of any function
        """Call a function in the thread, after the calls that were submitted before.

        Raises:
            RuntimeError: after `end`.
        """
        if self._ended:
            raise RuntimeError("the thread was ended; it takes no further call")
        answer: Future[T] = Future()

        def call() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                result = function(*arguments)
            except BaseException as error:  # noqa: BLE001 - the caller gets it
                answer.set_exception(error)
            else:
                answer.set_result(result)

        self._calls.put(call)
        return asyncio.wrap_future(answer)

    def end(self) -> None:
        """End the thread after the calls that were submitted before. Does not wait."""
        self._ended = True
        self._calls.put(None)

    def _run(self) -> None:
        _run_all(self._calls)


class DeadlineThreads:
    """Run functions in threads of their own; use it from one event loop.

    A thread cannot be killed. If a call misses its deadline, its thread is abandoned and another thread takes its place. So hung calls
    block neither later calls nor other users of threads, such as the resolver. A thread whose call has ended is used again.

    Args:
        threads: Calls that run at the same time; further calls wait.
        deadline_s: Seconds that one call may run.
        most_hung: While this many calls hang, further calls are refused.
        clock: Measures the deadline.

    Attributes:
        hung: Calls that missed their deadline so far.
        hanging: Calls that nobody awaits any more and that have not ended yet.
    """

    def __init__(self, name: str, threads: int, deadline_s: float, most_hung: int, clock: Clock = CLOCK) -> None:
        self.hung = self.hanging = 0
        self._name = name
        self._places = asyncio.Semaphore(threads)
        self._deadline_s, self._most_hung, self._clock = deadline_s, most_hung, clock
        self._free: list[Calls] = []
        """Queues of the threads that wait for a call."""
        weakref.finalize(self, _end_all, self._free)

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:  # noqa: ANN401 - those of any function
        """Call a function in a thread and return its answer.

        Raises:
            CallHungError: if it is not done by the deadline.
            TooManyHungError: if too many calls hang.
            Exception: whatever the function raises.
        """
        async with self._places:
            if self.hanging >= self._most_hung:
                raise TooManyHungError(f"{self.hanging} calls have not ended by their deadline")
            answer = self._start(function, arguments)
            try:
                async with self._clock.timeout(self._deadline_s) as deadline:
                    return await answer
            except TimeoutError as error:
                if not deadline.expired():
                    raise
                self.hung += 1
                raise CallHungError(f"the call did not end within {self._deadline_s:g} s") from error

    def _start(self, function: Callable[..., T], arguments: tuple[Any, ...]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        call = contextvars.copy_context().run
        # The future is cancelled if the deadline passes or the caller is cancelled.
        answer.add_done_callback(lambda done: self._left(done, +1))

        def work() -> None:
            error: Exception | None = None
            result: Any = None
            try:
                result = call(function, *arguments)
            except Exception as raised:  # noqa: BLE001 - the function may raise anything; the caller gets it
                error = raised
            except BaseException as raised:  # noqa: BLE001 - SystemExit of foreign code must not end the service
                error = RuntimeError(f"the {self._name} raised {raised!r}")
            try:
                loop.call_soon_threadsafe(self._deliver, thread, answer, result, error)
            except RuntimeError:  # the loop is closed, so nobody awaits the answer
                thread.put(None)

        thread = self._free.pop() if self._free else self._new_thread()
        thread.put(work)
        return answer

    def _new_thread(self) -> Calls:
        calls: Calls = SimpleQueue()
        threading.Thread(target=_run_all, args=(calls,), name=self._name, daemon=True).start()
        return calls

    def _left(self, answer: asyncio.Future[Any], change: int) -> None:
        if answer.cancelled():
            self.hanging += change

    def _deliver(
        self,
        thread: Calls,
        answer: asyncio.Future[Any],
        result: Any,  # noqa: ANN401 - any answer
        error: Exception | None,
    ) -> None:
        self._free.append(thread)
        if answer.done():
            self._left(answer, -1)
        elif error is None:
            answer.set_result(result)
        elif isinstance(error, StopIteration):
            answer.set_exception(RuntimeError(f"the {self._name} raised StopIteration"))
        else:
            answer.set_exception(error)


def _run_all(calls: Calls) -> None:
    """Make the calls of a queue until None comes."""
    while (call := calls.get()) is not None:
        call()
        del call  # so that this thread keeps no reference to the answer


def _end_all(threads: list[Calls]) -> None:
    for each in threads:
        each.put(None)
