"""Has a version's file ready on this host: made by one process, used by all."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from weightsync.form_pull import run_to_end
from weightsync.pull import PullLimits
from weightsync.shared_area import Claim, SharedArea, SharedCopy
from weightsync.staging import StagingError

__all__ = ["HostCopies"]

T = TypeVar("T")

_LOOK_S = 0.01
"""Time between two looks whether another process is ready; a look costs some microseconds."""

_MOST_OTHERS = 1
"""Files that may lie beside the one that is made: the base."""

log = structlog.get_logger(__name__)


class HostCopies:
    """Files of one area.

    Args:
        area: Where the host's staged versions lie.
        threads: Where files are locked and removed.
        limits: How long to wait for others.
    """

    def __init__(self, area: SharedArea, threads: Executor, limits: PullLimits) -> None:
        self._area = area
        self._threads = threads
        self._limits = limits
        self._stuck: set[Path] = set()
        """Files that were waited for in vain; a receiver that is held at a version costs its host one wait."""

    async def obtain(
        self, path: Path, needed: int, build: Callable[[int], Awaitable[T]]
    ) -> tuple[SharedCopy, T | None]:
        """Use the file that is there, or comes from another process; else make it.

        Args:
            path: The file.
            needed: Bytes that it will have.
            build: Fills an open file.

        Returns:
            The file, and what `build` returned; None if another process made it.

        Raises:
            StagingError: if another process does not come to an end, or there is no room.
            Exception: what `build` raises.
        """
        deadline = time.monotonic() + self._limits.copy_wait_s
        while True:
            copy = await run_to_end(self._threads, partial(self._area.attach, path))
            if copy is not None:
                return copy, None
            claim = await run_to_end(self._threads, partial(self._area.claim, path))
            if claim is not None:
                return await self._make(claim, needed, build)
            if time.monotonic() > deadline:
                raise StagingError(
                    f"another process did not finish {path} within {self._limits.copy_wait_s:g} s: end it, its work is"
                    " then done here"
                )
            await asyncio.sleep(_LOOK_S)

    async def _make(self, claim: Claim, needed: int, build: Callable[[int], Awaitable[T]]) -> tuple[SharedCopy, T]:
        try:
            await self._wait_for_room(claim.path)
            self._area.check_room(needed)
            made = await build(claim.descriptor)
            return claim.publish(), made
        except OSError as error:
            if error.errno == errno.ENOSPC:  # somebody else took the memory meanwhile
                raise self._area.no_room(needed) from error
            raise
        finally:
            claim.abandon()

    async def _wait_for_room(self, path: Path) -> None:
        """Until base and staged copy are all that lies there. A receiver that is held back cannot stop the others for ever."""
        deadline = time.monotonic() + self._limits.room_wait_s
        while True:
            others = await run_to_end(self._threads, partial(self._area.others, path))
            if len(set(others) - self._stuck) <= _MOST_OTHERS:
                return
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(_LOOK_S)
        names = [each.name for each in others]
        log.warning("receivers of this host are apart: more copies than a base and a staged one", others=names)
        self._stuck = set(others)
