"""The thread that owns the processes of vLLM. The kernel ends them when the thread that started them ends."""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing.util  # at exit it waits for children; imported first, it does so after `OwnerThread` has ended them
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")

END_S = 1.0
"""Seconds at the exit of the interpreter for the call in progress, before the processes are killed."""


class OwnerThread:
    """Runs one function after the other in a thread that lives until `end`.

    The interpreter waits at its exit for the threads of an executor, and so for a start or a shutdown of vLLM that hangs. This
    thread is a daemon. As nothing ends the processes of a thread that hangs, they are killed at the exit.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._of_others = frozenset(multiprocessing.active_children())
        self._thread = Thread(target=self._run, name="vllm-owner", daemon=True)
        self._thread.start()
        atexit.register(self._exit)

    def submit(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:  # noqa: ANN401 - those of any function
        """Call a function in the thread, after those before it."""
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
        """End the thread, and with it its processes, after the calls before. Does not wait."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # what it answered is the caller's to keep
        atexit.unregister(self._exit)

    def _exit(self) -> None:
        self.end()
        self._thread.join(END_S)
        if self._thread.is_alive():
            for process in multiprocessing.active_children():
                if process not in self._of_others:
                    process.kill()
