"""Updates that end although their caller leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

__all__ = ["undisturbed"]

T = TypeVar("T")

log = structlog.get_logger()


async def undisturbed(work: Coroutine[Any, Any, T]) -> T:
    """Let an update end even if its caller is cancelled: half of one must not stay."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_log_failure)
        raise


def _log_failure(task: asyncio.Task[T]) -> None:
    """Take the outcome of an update that nobody waits for any more."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("an update failed after its caller left", error=str(error))
