"""Wait for work that a cancelled caller must not leave behind, such as a thread that writes to a file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


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


async def settle(*work: asyncio.Future[Any], timeout_s: float | None = None) -> bool:
    """Wait until all work has ended, and discard the outcome, also of what ends after the timeout.

    Args:
        work: Tasks or futures; they are not cancelled.
        timeout_s: Seconds to wait; None waits until the work has ended.

    Returns:
        Whether all work ended in time.
    """
    discard_outcome(*work)
    if not work:
        return True
    _, late = await asyncio.wait(work, timeout=timeout_s)
    return not late


def discard_outcome(*work: asyncio.Future[Any]) -> None:
    """Take the outcome of work that nobody waits for.

    asyncio logs "exception was never retrieved" for a failed future whose outcome nobody takes.
    """
    for each in work:
        _take(each) if each.done() else each.add_done_callback(_take)


def _take(work: asyncio.Future[Any]) -> None:
    if not work.cancelled():
        work.exception()
