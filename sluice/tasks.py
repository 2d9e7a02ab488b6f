"""Work on an event loop: what a cancelled caller must not leave behind, and what would keep others waiting."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, TypeVar

from sluice.clock import CLOCK, Clock

T = TypeVar("T")

_TURN_S = 0.002
"""CPU seconds of one turn: as many as a few callbacks of a busy loop need."""

_SHARE = 0.25
"""Part of what the others needed that a turn may last at least: with a busy loop a computation must not wait for ever."""


class Turn:
    """Bounds how long a long computation keeps the event loop: call `give_way` between its parts, however small they are.

    Unlike in a thread the parts never run beside other callbacks, and do not compete with them for the interpreter. All times are
    CPU seconds of the thread, so that other processes on the machine do not make turns shorter.
    """

    def __init__(self) -> None:
        self._begin(_TURN_S)

    def _begin(self, seconds: float) -> None:
        self._ends = time.thread_time() + seconds
        self._look_at = time.monotonic() + seconds  # a cheaper clock, and never behind the other one

    async def give_way(self) -> None:
        """Let everything else that is due run first, if this turn has lasted long enough."""
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

    A cancelled caller waits until the work has ended and is cancelled then. What the work raises in that time is
    discarded.

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
    """Wait until all work has ended, and discard the outcome, also of what ends after the timeout.

    Args:
        work: Tasks or futures; they are not cancelled.
        timeout_s: Seconds to wait; None waits until the work has ended.
        clock: Of these seconds.

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
    """Wait until one of these has ended, for so many seconds at most. None is cancelled."""
    with contextlib.suppress(TimeoutError):
        async with clock.timeout(timeout_s):
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)


def discard_outcome(*work: asyncio.Future[Any]) -> None:
    """Take the outcome of work that nobody waits for.

    asyncio logs "exception was never retrieved" for a failed future whose outcome nobody takes.
    """
    for each in work:
        _take(each) if each.done() else each.add_done_callback(_take)


def _take(work: asyncio.Future[Any]) -> None:
    if not work.cancelled():
        work.exception()
