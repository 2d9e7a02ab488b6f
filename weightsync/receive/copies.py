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

from sluice.versions import BASE, Version
from weightsync.receive.form_pull import run_to_end
from weightsync.receive.pull import PullLimits
from weightsync.receive.shared_area import Claim, SharedArea, SharedCopy, version_of
from weightsync.receive.staging import StagingError

__all__ = ["BehindError", "HostCopies"]

T = TypeVar("T")

_LOOK_S = 0.01
"""Time between two looks whether another process is ready; a look costs some microseconds."""

_MOST_OTHERS = 1
"""Files that may lie beside the one that is made: the base."""

log = structlog.get_logger(__name__)


class BehindError(Exception):
    """There is no room yet, because this receiver uses an older version than others of its host.

    Args:
        version: One that lies there, or is on the way: take it first, then go on; one newer than the wanted takes its place.
    """

    def __init__(self, version: Version) -> None:
        super().__init__(f"version {version} is staged on this host and comes first")
        self.version = version


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
        self,
        path: Path,
        held: Path | None,
        needed: int,
        build: Callable[[int], Awaitable[T]],
        *,
        or_newer: bool = False,
    ) -> tuple[SharedCopy, T | None]:
        """Use the file that is there, or comes from another process; else make it.

        Receivers of a host go through the same versions: who is ahead waits, who is behind takes what lies there. So a base
        and one staged copy are all that there is, however fast versions come.

        Args:
            path: The file.
            held: The file of the version that serves, None if there is none.
            needed: Bytes that it will have.
            build: Fills an open file.
            or_newer: Whether a newer version will do. Without, two receivers of which each makes a version that the other
                one is past wait for each other until `room_wait_s` is over.

        Returns:
            The file, and what `build` returned; None if another process made it.

        Raises:
            BehindError: if another version has to be taken first.
            StagingError: if another process does not come to an end, or there is no room.
            Exception: what `build` raises.
        """
        deadline = time.monotonic() + self._limits.copy_wait_s
        while True:
            copy = await self._owned(partial(self._area.attach, path), SharedCopy.release)
            if copy is not None:
                return copy, None
            claim = await self._owned(partial(self._area.claim, path), Claim.abandon)
            if claim is not None:
                return await self._make(claim, held, needed, build, or_newer=or_newer)
            await self._others(path, held, or_newer=or_newer)
            if time.monotonic() > deadline:
                raise StagingError(
                    f"another process did not finish {path} within {self._limits.copy_wait_s:g} s: end it, its work is"
                    " then done here"
                )
            await asyncio.sleep(_LOOK_S)

    async def _owned(self, work: Callable[[], T | None], give_back: Callable[[T], None]) -> T | None:
        """Take something in a thread; a caller that is cancelled meanwhile does not take it with its lock to the grave."""
        taken: list[T] = []

        def take() -> T | None:
            found = work()
            if found is not None:
                taken.append(found)
            return found

        try:
            return await run_to_end(self._threads, take)
        except asyncio.CancelledError:
            for lost in taken:
                give_back(lost)
            raise

    async def _make(
        self, claim: Claim, held: Path | None, needed: int, build: Callable[[int], Awaitable[T]], *, or_newer: bool
    ) -> tuple[SharedCopy, T]:
        try:
            await self._wait_for_room(claim.path, held, or_newer=or_newer)
            self._area.check_room(needed)
            made = await build(claim.descriptor)
            return claim.publish(), made
        except OSError as error:
            if error.errno == errno.ENOSPC:  # somebody else took the memory meanwhile
                raise self._area.no_room(needed) from error
            raise
        finally:
            claim.abandon()

    async def _wait_for_room(self, path: Path, held: Path | None, *, or_newer: bool) -> None:
        """Until base and staged copy are all that lies there. A receiver that is held back cannot stop the others for ever."""
        deadline = time.monotonic() + self._limits.room_wait_s
        while len(others := await self._others(path, held, or_newer=or_newer)) > _MOST_OTHERS:
            if time.monotonic() > deadline:
                names = [each.name for each in others]
                log.warning("a receiver of this host stays behind: more than a base and a staged copy", others=names)
                self._stuck = others - {held}
                return
            await asyncio.sleep(_LOOK_S)

    async def _others(self, path: Path, held: Path | None, *, or_newer: bool) -> set[Path]:
        """What lies there besides a file, but for what was waited for in vain.

        Raises:
            BehindError: if that is too much, and newer than what is held, or whole and newer than the file if that will do.
        """
        others = set(await run_to_end(self._threads, partial(self._area.others, path))) - self._stuck
        if len(others) > _MOST_OTHERS:
            serving = BASE if held is None else version_of(held)
            between = [each for each in others if serving < version_of(each) < version_of(path)]
            if between:
                # What is whole comes first: who makes the others may wait for this receiver.
                raise BehindError(max((each.exists(), version_of(each)) for each in between)[1])
            newer = [version_of(each) for each in others if version_of(each) > version_of(path) and each.exists()]
            if or_newer and newer and max(newer) > serving:
                raise BehindError(max(newer))
        return others
