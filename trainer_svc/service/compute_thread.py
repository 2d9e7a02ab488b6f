"""The one thread that uses the model of a process."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import grpc

from sluice.rpc import SluiceError

Result = TypeVar("Result")


class ComputeThread:
    """Run jobs one after another in the only thread that uses the model: PyTorch blocks, and the event loop must not block.

    The thread is a daemon: a job that hangs in a kernel cannot be ended, and must not keep the process from exiting.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="compute", daemon=True)
        self._thread.start()

    async def run(self, work: Callable[[], Result], *, deadline_s: float, what: str) -> Result:
        """Run a job and wait for it.

        Args:
            work: The job. It is never cancelled half-way; if the caller is cancelled before it begins, it is skipped.
            deadline_s: Seconds to wait, including the wait for earlier jobs.
            what: Name of the job, for the error.

        Raises:
            SluiceError: DEADLINE_EXCEEDED if it takes longer. A running job continues, and later jobs wait for it.
        """
        future: Future[Result] = Future()
        self._jobs.put((future, work))
        awaited = asyncio.wrap_future(future)
        try:
            await asyncio.wait({awaited}, timeout=deadline_s)
        finally:
            if not awaited.done():
                future.cancel()
                awaited.cancel()  # a running job continues; its outcome is dropped
            elif not awaited.cancelled():
                awaited.exception()  # read it even if the caller was cancelled, so that asyncio does not complain
        if awaited.cancelled():
            raise SluiceError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "COMPUTE_DEADLINE",
                f"{what} took longer than {deadline_s:g} s: raise the deadline in trainer.deadlines, or restart the trainer if it hangs",
            )
        return awaited.result()

    async def stop(self, timeout_s: float) -> bool:
        """Stop after the jobs that are queued. Return whether the thread ended in time."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, work = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - the caller that awaits the job gets the error
                future.set_exception(error)
            else:
                future.set_result(result)
