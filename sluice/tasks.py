"""Work on an event loop: long computations that must give way, and work that must end even if its caller is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, TypeVar

from sluice.clock import CLOCK, Clock

T = TypeVar("T")

_TURN_S = 0.002
"""CPU seconds of one turn: about the time of a few callbacks of a busy loop."""

_SHARE = 0.25
"""A turn lasts at least this fraction of the time that the other callbacks took before it, so that a computation progresses on a busy
loop."""


class Turn:
    """Bounds how long a long computation keeps the event loop: call `give_way` between its parts, however small they are.

    Unlike in a thread, the parts never run at the same time as other callbacks or compete with them for the interpreter. All times are
    CPU seconds of the thread, so that other processes on the machine do not make turns shorter.
    """

    def __init__(self) -> None:
        self._begin(_TURN_S)

    def _begin(self, seconds: float) -> None:
        self._ends = time.thread_time() + seconds
        self._look_at = time.monotonic() + seconds  # a cheaper clock, and never behind the other one

    async def give_way(self) -> None:
        """If this turn has lasted long enough, let all other callbacks that are due run first."""
        if time.monotonic() < self._look_at:
            return
        now = time.thread_time()
        if now < self._ends:
            self._look_at = time.monotonic() + self._ends - now
            return
        await asyncio.sleep(0)
        self._begin(max(_TURN_S, _SHARE * (time.thread_time() - now)))


async def run_to_end(work: asyncio.Future[T], *, on_cancel: Callable[[], object] | None = None) -> T:
    """Return the result of work that must end before its caller does.

    If the caller is cancelled, it waits until the work has ended, and is then cancelled. An exception that the work raises meanwhile
    is discarded.

    Args:
        work: A task or a future; it is not cancelled.
        on_cancel: Called when the caller is cancelled, such as to ask a thread to stop.
    """
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        if on_cancel is not None:
            on_cancel()
        await settle(work)
        raise


async def settle(*work: asyncio.Future[Any], timeout_s: float | None = None, clock: Clock = CLOCK) -> bool:
    """Wait until all work has ended. Discard every outcome, even of work that ends after the timeout.

    Args:
        work: Tasks or futures; they are not cancelled.
        timeout_s: Seconds to wait; None waits until the work has ended.
        clock: Measures the timeout.

    Returns:
        Whether all work ended in time.
    """
    discard_outcome(*work)
    if not work:
        return True
    with contextlib.suppress(TimeoutError):
        async with clock.timeout(timeout_s):
            await asyncio.wait(work)
    return all(each.done() for each in work)


async def first_ended(*work: asyncio.Future[Any], timeout_s: float, clock: Clock = CLOCK) -> None:
    """Wait until any of the work has ended, at most for `timeout_s` seconds. Nothing is cancelled."""
    with contextlib.suppress(TimeoutError):
        async with clock.timeout(timeout_s):
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)


def discard_outcome(*work: asyncio.Future[Any]) -> None:
    """Retrieve the outcome of work that nobody awaits.

    asyncio logs "exception was never retrieved" for a failed future whose outcome nobody takes.
    """
    for each in work:
        _take(each) if each.done() else each.add_done_callback(_take)


def _take(work: asyncio.Future[Any]) -> None:
    if not work.cancelled():
        work.exception()
