"""The staged versions of one host: each is made by one process, used by all, and removed by its last user.

`StagedVersions` holds what one receiver uses. `HostCopies` makes a file, or waits for the process of this host that makes it.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog

from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import BASE, Version
from weightsync.format.manifest import box
from weightsync.format.safetensors import DTYPES
from weightsync.receive.link import UpdateTimings
from weightsync.receive.patched_file import Digests, slice_digests
from weightsync.receive.pull import PullLimits, StagingError, in_thread
from weightsync.receive.shared_area import Claim, SharedArea, SharedCopy, version_of
from weightsync.receive.version_file import DeltaBase, VersionBuilder
from weightsync.staged import StagedVersion, TensorSpec

__all__ = ["BehindError", "HostCopies", "StagedVersions"]

T = TypeVar("T")
U = TypeVar("U")

_LOOK_S = 0.01
"""Seconds between two looks whether another process is ready; a look costs some microseconds."""

_MOST_OTHERS = 1
"""Staged files that may exist beside the one that is being made: its base."""

log = structlog.get_logger(__name__)


class BehindError(Exception):
    """There is no room yet, because this receiver uses an older version than others of its host.

    Args:
        version: A version that is staged on this host or being staged. Take it first and try again; a newer one than the
            wanted replaces it.
    """

    def __init__(self, version: Version) -> None:
        super().__init__(f"version {version} is staged on this host and comes first")
        self.version = version


class HostCopies:
    """Has a file ready on this host: uses the one that another process made, or makes it.

    Args:
        area: The directory of the host's staged versions.
        threads: Where files are locked and removed.
        limits: How long to wait for others.
    """

    def __init__(self, area: SharedArea, threads: Executor, limits: PullLimits) -> None:
        self._area = area
        self._threads = threads
        self._limits = limits
        self._stuck: set[Path] = set()
        """Files that were waited for in vain, so that a receiver that is held at a version costs its host one wait."""

    async def obtain(
        self,
        path: Path,
        held: Path | None,
        needed: int,
        build: Callable[[int], Awaitable[T]],
        *,
        or_newer: bool = False,
    ) -> tuple[SharedCopy, T | None]:
        """Use a file that exists or that another process is making; otherwise make it.

        Receivers of a host go through the same versions: one that is ahead waits, one that is behind takes what is staged.
        So a host holds a base and one staged copy, however fast versions come.

        Args:
            path: The file.
            held: The file of the version that serves, None if there is none.
            needed: Bytes that it will have.
            build: Fills an open file.
            or_newer: Whether a newer version will do. If not, two receivers that each make a version which the other has
                passed wait for each other until `room_wait_s` is over.

        Returns:
            The file, and what `build` returned; None if another process made it.

        Raises:
            BehindError: if another version has to be taken first.
            StagingError: if another process does not finish, or there is no room.
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
                    f"another process did not finish {path} within {self._limits.copy_wait_s:g} s: end that process,"
                    " and the file is made here"
                )
            await asyncio.sleep(_LOOK_S)

    async def _owned(self, work: Callable[[], U], give_back: Callable[[Any], None]) -> U:
        """Take something in a thread, and give it back if the caller is cancelled meanwhile: nobody else could release its lock."""
        taken: list[U] = []

        def take() -> U:
            found = work()
            if found is not None:
                taken.append(found)
            return found

        try:
            return await in_thread(self._threads, take)
        except asyncio.CancelledError:
            for lost in taken:
                await in_thread(self._threads, partial(give_back, lost))
            raise

    async def _make(
        self, claim: Claim, held: Path | None, needed: int, build: Callable[[int], Awaitable[T]], *, or_newer: bool
    ) -> tuple[SharedCopy, T]:
        try:
            await self._wait_for_room(claim.path, held, or_newer=or_newer)
            self._area.check_room(needed)
            made = await build(claim.descriptor)
            return await self._owned(claim.publish, SharedCopy.release), made
        except OSError as error:
            if error.errno == errno.ENOSPC:  # somebody else took the memory meanwhile
                raise self._area.no_room(needed) from error
            raise
        finally:
            await in_thread(self._threads, claim.abandon)

    async def _wait_for_room(self, path: Path, held: Path | None, *, or_newer: bool) -> None:
        """Wait until a base and one staged copy are all that exists, at most `room_wait_s`: one held receiver must not stop the others."""
        deadline = time.monotonic() + self._limits.room_wait_s
        while len(others := await self._others(path, held, or_newer=or_newer)) > _MOST_OTHERS:
            if time.monotonic() > deadline:
                names = [each.name for each in others]
                log.warning("a receiver of this host stays behind; it keeps a third version in memory", others=names)
                self._stuck = others - {held}
                return
            await asyncio.sleep(_LOOK_S)

    async def _others(self, path: Path, held: Path | None, *, or_newer: bool) -> set[Path]:
        """Return the staged files besides one, except those that were waited for in vain.

        Raises:
            BehindError: if there are too many, and one of them is newer than the base of this receiver.
        """
        others = set(await in_thread(self._threads, partial(self._area.others, path))) - self._stuck
        if len(others) > _MOST_OTHERS:
            serving = BASE if held is None else version_of(held)
            between = [each for each in others if serving < version_of(each) < version_of(path)]
            if between:
                # Complete files first: the processes that make the others may wait for this receiver.
                raise BehindError(max((each.exists(), version_of(each)) for each in between)[1])
            newer = [version_of(each) for each in others if version_of(each) > version_of(path) and each.exists()]
            if or_newer and newer and max(newer) > serving:
                raise BehindError(max(newer))
        return others


@dataclass(frozen=True, slots=True)
class _Used:
    copy: SharedCopy
    digests: Digests


class StagedVersions:
    """The staged versions that one receiver uses.

    Args:
        stage_dir: Directory in shared memory.
        run: The run's name.
        builder: Makes files.
        threads: Where files are worked on.
        limits: How long to wait for other processes.
    """

    def __init__(
        self, stage_dir: Path, run: str, builder: VersionBuilder, threads: Executor, limits: PullLimits
    ) -> None:
        self._area = SharedArea(stage_dir, run)
        self._copies = HostCopies(self._area, threads, limits)
        self._builder = builder
        self._threads = threads
        self._used: dict[Path, _Used] = {}
        self._leaving: deque[SharedCopy] = deque()
        """Released, but possibly not removed yet."""

    async def stage(
        self, manifest: pb.Manifest, current: StagedVersion | None, *, or_newer: bool
    ) -> tuple[StagedVersion, UpdateTimings]:
        """Have a version staged, by this process or by another one of this host.

        Args:
            manifest: The version as it was announced.
            current: The version that serves, on which a delta may be based.
            or_newer: Whether a newer version will do, if one is staged on this host.

        Returns:
            The version, and the cost of pulling and staging it.

        Raises:
            BehindError: if a version between the two has to be taken first, or a newer one in its place.
            PullError, StagingError, OSError: if it could not be pulled, or there is no room.
        """
        started = time.perf_counter()
        version = Version.from_proto(manifest.version)
        path = self._area.file(version, manifest.digest)
        held = self._held(current)
        build = partial(self._builder.build, manifest, held)
        base, needed = None if held is None else held.path, _dense_bytes(manifest)
        copy, cost = await self._copies.obtain(path, base, needed, build, or_newer=or_newer)
        self._used[path] = _Used(copy, slice_digests(manifest))
        staged = StagedVersion(version, path, _tensors(manifest), manifest.digest)
        if cost is None:
            return staged, UpdateTimings(version, stage_s=time.perf_counter() - started)
        return staged, UpdateTimings.of_pull(version, cost, started)

    def release(self, staged: StagedVersion) -> None:
        """Stop using a version; its file is removed with its last user.

        That runs in a thread: freeing the memory of a large file takes a second, in which the event loop would deliver no
        tokens.
        """
        used = self._used.pop(staged.path, None)
        if used is not None:
            self._leaving.append(used.copy)
            self._threads.submit(self._release_next)

    def close(self) -> None:
        """Release everything. Blocking; call it when the threads have ended."""
        while self._leaving:
            self._release_next()
        for used in self._used.values():
            used.copy.release()
        self._used.clear()
        self._area.close()

    def _release_next(self) -> None:
        copy = self._leaving.popleft()
        try:
            copy.release()
        except OSError as error:
            log.warning("a staged version was not removed", path=str(copy.path), error=str(error))

    def _held(self, current: StagedVersion | None) -> DeltaBase | None:
        used = None if current is None else self._used.get(current.path)
        if current is None or used is None:
            return None
        return DeltaBase(current.version, current.path, used.digests)


def _dense_bytes(manifest: pb.Manifest) -> int:
    """Return the bytes of all tensors, whichever form was announced."""
    return sum(
        box(each).volume * DTYPES[each.dtype].size
        for shard in manifest.shards
        for each in shard.tensors
        if each.dtype in DTYPES
    )


def _tensors(manifest: pb.Manifest) -> dict[str, TensorSpec]:
    return {
        each.name: TensorSpec(each.dtype, tuple(each.global_shape))
        for shard in manifest.shards
        for each in shard.tensors
    }
