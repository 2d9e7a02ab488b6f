"""Staged versions in shared memory: one copy of each for all receivers of a host, made by one process, removed by its last user.

A version's file is named by its number and digest, and is never changed once it has that name. File locks (flock(2)) end with
their process, however that ends, and hold between containers that share the memory. There are three kinds:

* the process that makes a file holds an exclusive lock on ``NAME.build``;
* each process that uses a file holds a shared lock on it, taken before the file gets its name;
* a process that removes a file holds an exclusive lock on it. Nobody gets that lock while the file is used, so the last user
  removes the file.

`SharedArea` does this, and blocks. `StagedFiles` waits for it: for other processes, and for room. LoRA adapters are small, so
each replica has its own (`StagedAdapters`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog

from sluice.clock import CLOCK, Clock
from sluice.host_files import (
    close,
    is_at,
    lock_now,
    open_private,
    owned_directory,
    remove_tree,
    remove_unlocked,
    unlink_at,
)
from sluice.tasks import settle
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import BASE, Version
from weightsync.receive.pull import PullCost, PullLimits, VersionBuilder, in_thread
from weightsync.receive.version_file import StagingError, tensor_specs
from weightsync.staged import HeldVersions, StagedAdapter

T = TypeVar("T")

_PREFIX = "sluice-"
_BUILD = ".build"
_PART = ".part"
_FILE = ".safetensors"
_ADAPTERS = "sluice_adapters-"
_ADAPTERS_LOCK = ".lock"
_OTHERS_MAY_WRITE = 0o022
_DIGEST = re.compile(r"[0-9a-z]+")
_ATTEMPTS = 100
"""Most attempts to lock a file that other processes may remove at the same moment. Each attempt fails only if another one succeeds."""
_PAUSE_S = 0.01
"""Pause before the next attempt to lock a file; an exclusive lock is held for microseconds."""

_LOOK_S = 0.01
"""Seconds between two checks whether another process is ready; a check takes some microseconds."""

_MOST_OTHERS = 1
"""Staged files that may exist beside the file that is being made: its base."""

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class SharedCopy:
    """A staged file that this process uses.

    Attributes:
        path: The file; complete, verified, and never changed.
        descriptor: Open on it, with the shared lock.
    """

    path: Path
    descriptor: int

    def release(self) -> None:
        """Stop using it; the last user removes the file. Calling it again has no effect."""
        if self.descriptor < 0:
            return
        if lock_now(self.descriptor, fcntl.LOCK_EX) and is_at(self.descriptor, self.path):
            self.path.unlink(missing_ok=True)
        close(self.descriptor)
        self.descriptor = -1


@dataclass(slots=True)
class Claim:
    """The right to make one file.

    Attributes:
        path: The name that the file gets.
        descriptor: The unfinished file, open to read and write.
    """

    path: Path
    descriptor: int
    _lock: int

    def publish(self) -> SharedCopy:
        """Give the file its name."""
        _beside(self.path, _PART).rename(self.path)
        copy = SharedCopy(self.path, self.descriptor)
        self.descriptor = -1
        self._unlock()
        return copy

    def abandon(self) -> None:
        """Remove the unfinished file, so that another process can begin. No effect after `publish`."""
        if self.descriptor >= 0:
            _beside(self.path, _PART).unlink(missing_ok=True)
            close(self.descriptor)
            self.descriptor = -1
            self._unlock()

    def _unlock(self) -> None:
        _beside(self.path, _BUILD).unlink(missing_ok=True)
        close(self._lock)


class SharedArea:
    """The directory ``<parent>/sluice-<run>.<user id>`` with the versions that receivers of the run stage on this host.

    The parent is a directory in shared memory, such as ``/dev/shm``, to which everybody may write. The files are trusted by
    their names, so the directory must belong to this user alone.

    Args:
        parent: The directory in shared memory.
        run: The run's name.
        pause: Blocks the thread for the given seconds between two attempts to lock a file.
    """

    def __init__(self, parent: Path, run: str, pause: Callable[[float], object] = time.sleep) -> None:
        self.parent = parent
        self.path = parent / f"{_PREFIX}{run}.{os.getuid()}"
        self._pause = pause

    def file(self, version: Version, digest: str) -> Path:
        """Return the path of a staged version.

        Raises:
            StagingError: if the digest could lead out of the directory.
        """
        return self.path / f"{_stem(version, digest)}{_FILE}"

    def attach(self, path: Path) -> SharedCopy | None:
        """Use a file that exists. Return None if it does not.

        Raises:
            StagingError: if the directory does not belong to this user alone.
        """
        self._check_owner()
        for _ in range(_ATTEMPTS):
            try:
                descriptor = open_private(path, os.O_RDONLY)
            except FileNotFoundError:
                return None
            if lock_now(descriptor, fcntl.LOCK_SH) and is_at(descriptor, path):
                return SharedCopy(path, descriptor)
            close(descriptor)  # a process is removing it, or checks whether it is used
            self._pause(_PAUSE_S)
        raise StagingError(f"{path} cannot be locked: remove it, and end the process that holds it exclusively")

    def claim(self, path: Path) -> Claim | None:
        """Begin to make a file. Return None while another process makes it, or if it exists by now.

        Raises:
            StagingError: if the directory does not belong to this user alone.
            OSError: if no file can be made.
        """
        lock = self._build_lock(path)
        if lock is None:
            return None
        if path.exists():
            _beside(path, _BUILD).unlink(missing_ok=True)
            close(lock)
            return None
        part = _beside(path, _PART)
        try:
            part.unlink(missing_ok=True)  # left by a process that died
            descriptor = open_private(part, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except OSError:
            close(lock)  # else nobody could make the file while this process lives
            raise
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        return Claim(path, descriptor, lock)

    def others(self, path: Path) -> list[tuple[Path, bool]]:
        """Return the other files that are staged or being made, and whether each is whole. Remove the files of dead processes."""
        _sweep(self.path)
        found = {each.with_suffix(_FILE) for suffix in (_FILE, _PART) for each in self.path.glob(f"*{suffix}")}
        return [(each, each.exists()) for each in sorted(found - {path})]

    def check_room(self, needed: int) -> None:
        """Raise StagingError if there is no memory for a file."""
        if needed > self.free_bytes:
            raise self.no_room(needed)

    @property
    def free_bytes(self) -> int:
        """Return the memory that is left."""
        status = os.statvfs(self.parent)
        return status.f_bavail * status.f_frsize

    def no_room(self, needed: int) -> StagingError:
        """Return the error for too little memory."""
        return StagingError(
            f"{self.parent} has {self.free_bytes} bytes free, a staged version needs {needed}: enlarge the shared memory"
            " (docker: --shm-size, compose: shm_size, Kubernetes: sizeLimit of the memory volume) to twice the weights"
            " and more, or set rollout.stage_dir to a larger directory"
        )

    def _check_owner(self) -> None:
        try:
            status = self.path.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & _OTHERS_MAY_WRITE:
            raise StagingError(
                f"{self.path} belongs to another user, or others may write to it: remove it, or set rollout.stage_dir to a"
                " directory of your own"
            )

    def _build_lock(self, path: Path) -> int | None:
        lock_path = _beside(path, _BUILD)
        for _ in range(_ATTEMPTS):
            self.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700, exist_ok=True)
            self._check_owner()
            try:
                descriptor = open_private(lock_path, os.O_RDWR | os.O_CREAT)
            except FileNotFoundError:  # the directory was empty and just removed
                continue
            if not lock_now(descriptor, fcntl.LOCK_EX):
                close(descriptor)
                return None
            if is_at(descriptor, lock_path):
                return descriptor
            close(descriptor)
        raise StagingError(f"{lock_path} cannot be locked: remove it, and end the process that removes it all the time")


def _stem(version: Version, digest: str) -> str:
    """Return the name of a staged version. Two versions with the same number, for example of two trainers, differ in their digests."""
    if not _DIGEST.fullmatch(digest):
        raise StagingError(f"{digest[:80]!r} is not the digest of a version: pull from a service that gives one")
    return f"v{version}-{digest}"


def version_of(path: Path) -> Version:
    """Return the version that a staged file is named after."""
    return Version.parse(path.stem.split("-")[0].removeprefix("v"))


def remove_stale(parent: Path) -> list[Path]:
    """Remove the files that dead processes of this user left, for any run.

    Returns:
        The staged versions that were removed.
    """
    return [path for directory in parent.glob(f"{_PREFIX}*") for path in _sweep(directory)]


def _sweep(directory: Path) -> list[Path]:
    """Remove the files that no living process makes or uses, and the directory if it is empty then."""
    with owned_directory(directory) as opened:
        if opened is None:
            return []
        names = os.listdir(opened)  # noqa: PTH208 - by descriptor
        stems = {
            name.removesuffix(suffix) for name in names for suffix in (_BUILD, _PART, _FILE) if name.endswith(suffix)
        }
        removed = [directory / f"{stem}{_FILE}" for stem in sorted(stems) if _sweep_one(opened, stem)]
    for path in removed:
        log.info("removed a version that a dead replica had staged", path=str(path))
    if stems or not names:
        with contextlib.suppress(OSError):  # a process uses it
            directory.rmdir()
    return removed


def _sweep_one(directory: int, stem: str) -> bool:
    """Remove one version unless a process makes or uses it. Return whether there was one to remove."""
    lock_name = f"{stem}{_BUILD}"
    try:
        lock = open_private(lock_name, os.O_RDWR | os.O_CREAT, directory=directory)
    except OSError:  # the directory was removed in the meantime
        return False
    try:
        if not lock_now(lock, fcntl.LOCK_EX) or not is_at(lock, lock_name, directory=directory):
            return False
        unlink_at(directory, f"{stem}{_PART}")
        removed = remove_unlocked(f"{stem}{_FILE}", directory=directory)
        unlink_at(directory, lock_name)
    finally:
        close(lock)
    return removed


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name.removesuffix(_FILE) + suffix)


# --- waiting for other processes --------------------------------------------------------------------------------------


class BehindError(Exception):
    """There is no room yet, because this receiver uses an older version than others of its host.

    `version` is staged on this host or being staged. Take it first and try again. If it is newer than the wanted version, use
    it instead.
    """

    def __init__(self, version: Version) -> None:
        super().__init__(f"version {version} is staged on this host and comes first")
        self.version = version


class StagedFiles:
    """The files of staged versions that one receiver uses. They are locked and removed in threads."""

    def __init__(self, area: SharedArea, threads: Executor, limits: PullLimits, clock: Clock = CLOCK) -> None:
        self._area, self._threads, self._limits, self._clock = area, threads, limits, clock
        self._used: list[SharedCopy] = []
        """In use, or released and possibly not removed yet."""
        self._leaving: list[Future[None]] = []
        self._stuck: set[Path] = set()
        """Files whose removal was waited for in vain. They are not waited for again, so a receiver held at a version costs one wait."""

    async def obtain(
        self, path: Path, held: Path | None, needed: int, fill: Callable[[int], Awaitable[T]], *, or_newer: bool = False
    ) -> tuple[SharedCopy, T | None]:
        """Use a file that exists or that another process makes; otherwise make it. It is used until `release`.

        Receivers of a host take the same versions: a receiver that is ahead waits, and one that is behind takes the staged
        version. So a host holds a base and one staged copy, however fast versions come.

        Args:
            path: The file.
            held: The file of the version that serves; None if no version is staged here.
            needed: Size in bytes that the file will have.
            fill: Fills the empty file, which is open to read and write. The file gets its name if this succeeds.
            or_newer: Whether to accept a newer version. If not, two receivers may wait for each other until `room_wait_s` is
                over: when each makes a version that the other one has already passed.

        Returns:
            The file, and the result of `fill`, which is None if the file was not made here.

        Raises:
            BehindError: if another version has to be taken first.
            StagingError: if another process does not finish, or there is no room.
            Exception: what `fill` raises.
        """
        await settle(*map(asyncio.wrap_future, self._leaving))  # else it could find a file that we are about to remove
        found = await self._find_or_claim(path, held, or_newer=or_newer)
        if isinstance(found, SharedCopy):
            self._used.append(found)
            return found, None
        try:
            await self._wait_for_room(path, held, or_newer=or_newer)
            await in_thread(self._threads, partial(self._area.check_room, needed))
            filled = await fill(found.descriptor)
            copy = await self._owned(found.publish, SharedCopy.release)
            self._used.append(copy)
        except OSError as error:
            if error.errno == errno.ENOSPC:  # another process took the memory meanwhile
                raise self._area.no_room(needed) from error
            raise
        finally:
            await in_thread(self._threads, found.abandon)
        return copy, filled

    def release(self, copy: SharedCopy) -> None:
        """Stop using a file in a thread; its last user removes it.

        Freeing the memory of a large file takes a second, during which the event loop would deliver no tokens.
        """
        self._leaving = [each for each in self._leaving if not each.done()]
        self._leaving.append(self._threads.submit(self._release, copy))

    def close(self) -> None:
        """Release everything. Blocking; call it when the threads have ended."""
        for copy in list(self._used):
            self._release(copy)
        _sweep(self._area.path)

    def _release(self, copy: SharedCopy) -> None:
        self._used.remove(copy)
        try:
            copy.release()
        except OSError as error:
            log.warning("a staged version was not removed", path=str(copy.path), error=str(error))

    async def _find_or_claim(self, path: Path, held: Path | None, *, or_newer: bool) -> SharedCopy | Claim:
        deadline = self._clock() + self._limits.copy_wait_s
        while True:
            copy = await self._owned(partial(self._area.attach, path), SharedCopy.release)
            if copy is not None:
                return copy
            claim = await self._owned(partial(self._area.claim, path), Claim.abandon)
            if claim is not None:
                return claim
            await self._others(path, held, or_newer=or_newer)
            if self._clock() > deadline:
                raise StagingError(
                    f"another process did not finish {path} within {self._limits.copy_wait_s:g} s: end that process,"
                    " and the file is made here"
                )
            await self._clock.sleep(_LOOK_S)

    async def _owned(self, work: Callable[[], T], give_back: Callable[[Any], None]) -> T:
        """Take a lock in a thread. Release it if the caller is cancelled meanwhile, because nobody else could."""
        taken: list[T] = []

        def take() -> T:
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

    async def _wait_for_room(self, path: Path, held: Path | None, *, or_newer: bool) -> None:
        """Wait until only a base and one staged copy exist. Give up after `room_wait_s`, so that one held receiver does not stop the others."""
        deadline = self._clock() + self._limits.room_wait_s
        while len(others := await self._others(path, held, or_newer=or_newer)) > _MOST_OTHERS:
            if self._clock() > deadline:
                names = [each.name for each in others]
                log.warning("a receiver of this host stays behind; it keeps a third version in memory", others=names)
                self._stuck = others - {held}
                return
            await self._clock.sleep(_LOOK_S)

    async def _others(self, path: Path, held: Path | None, *, or_newer: bool) -> set[Path]:
        """Return the staged files other than `path`, without those that waiting did not free.

        Raises:
            BehindError: if there are too many, and one of them is newer than the base of this receiver.
        """
        found = await in_thread(self._threads, partial(self._area.others, path))
        others = {each for each, _ in found} - self._stuck
        if len(others) > _MOST_OTHERS:
            serving = BASE if held is None else version_of(held)
            staged = [(whole, version_of(each)) for each, whole in found if each in others]
            between = [(whole, version) for whole, version in staged if serving < version < version_of(path)]
            if between:
                raise BehindError(
                    max(between)[1]
                )  # complete files first: processes that make the others may wait for this receiver
            newer = [version for whole, version in staged if version > version_of(path) and whole]
            if or_newer and newer and max(newer) > serving:
                raise BehindError(max(newer))
        return others


# --- adapters ---------------------------------------------------------------------------------------------------------


class StagedAdapters:
    """The LoRA adapters of one replica: a directory as PEFT writes it for each that the engine holds.

    They lie in ``<stage_dir>/sluice_adapters-<run>-<pid>.<number>``. When a replica is dead, the next one that starts removes
    its directory. Files are changed in threads.
    """

    def __init__(self, stage_dir: Path, run: str, builder: VersionBuilder, threads: Executor) -> None:
        self._parent, self._run, self._builder, self._threads = stage_dir, run, builder, threads
        self._staged: dict[Version, StagedAdapter] = {}
        self._path: Path | None = None
        self._lock_file = -1
        self._lock = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def staged(
        self, manifest: pb.Manifest, held: Callable[[], HeldVersions | None]
    ) -> AsyncIterator[tuple[StagedAdapter, PullCost | None]]:
        """Stage an adapter for the block; at its end, remove the adapters that the engine no longer holds.

        Args:
            manifest: Of kind ADAPTER.
            held: Returns what the engine holds; None while it cannot say, and then all directories stay.

        Returns:
            The adapter, and the cost of pulling it, which is None if it was staged already.

        Raises:
            PullError, StagingError, OSError: if it could not be staged.
        """
        async with self._lock:
            try:
                yield await self._stage(manifest)
            finally:
                in_use = held()
                for version in set() if in_use is None else self._staged.keys() - in_use.adapters:
                    await in_thread(self._threads, partial(remove_tree, self._staged.pop(version).path))

    def close(self) -> None:
        """Remove everything. Blocking. Calling it again has no effect."""
        if self._path is not None:
            remove_tree(self._path)
            close(self._lock_file)
            self._path = None

    async def _stage(self, manifest: pb.Manifest) -> tuple[StagedAdapter, PullCost | None]:
        version, base = Version.from_proto(manifest.version), Version.from_proto(manifest.base)
        known = self._staged.get(version)
        if known is not None and known.digest == manifest.digest:
            return known, None
        name = _stem(version, manifest.digest)
        unfinished: list[tuple[Path, int]] = []  # filled in the thread, so that a cancelled caller discards it too
        try:
            await in_thread(self._threads, lambda: unfinished.append(self._begin(name)))
            part, descriptor = unfinished[0]
            cost = await self._builder.build(manifest, None, descriptor)
            staged = StagedAdapter(version, base, part.with_name(name), tensor_specs(manifest), manifest.digest)
            await in_thread(self._threads, partial(self._finish, part, staged, manifest.adapter_config))
        finally:
            for part, descriptor in unfinished:
                await in_thread(self._threads, partial(_discard, part, descriptor))
        return staged, cost

    def _begin(self, name: str) -> tuple[Path, int]:
        """Make a directory for an unfinished adapter. Return it, and its open weights file."""
        self._path = self._path or self._make_directory()
        part = self._path / f"{name}.part"
        remove_tree(part)
        part.mkdir(mode=0o700)
        return part, os.open(part / "adapter_model.safetensors", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _finish(self, part: Path, staged: StagedAdapter, adapter_config: str) -> None:
        """Give the directory its name, and record the adapter: an unrecorded directory would block the next attempt."""
        (part / "adapter_config.json").write_text(adapter_config)
        part.rename(staged.path)
        self._staged[staged.version] = staged

    def _make_directory(self) -> Path:
        self._parent.mkdir(parents=True, exist_ok=True)
        for directory in self._parent.glob(f"{_ADAPTERS}*"):
            if _is_dead(directory) and remove_tree(directory):
                log.info("removed what a dead replica had staged", path=str(directory))
        for number in range(1000):  # several receivers of one process get a number behind it
            path = self._parent / f"{_ADAPTERS}{self._run}-{os.getpid()}.{number}"
            try:
                path.mkdir(mode=0o700)
            except FileExistsError:
                continue
            self._lock_file = _locked_file(path)
            return path
        raise OSError(f"{self._parent} holds a thousand directories {_ADAPTERS}{self._run}*: remove them")


def _discard(part: Path, descriptor: int) -> None:
    os.close(descriptor)
    remove_tree(part)


def _locked_file(directory: Path) -> int:
    """Make the lock file. It gets its name after it was locked, so no process sees it unlocked while its replica lives."""
    unnamed = directory / f"{_ADAPTERS_LOCK}.new"
    descriptor = open_private(unnamed, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    unnamed.rename(directory / _ADAPTERS_LOCK)
    return descriptor


def _is_dead(path: Path) -> bool:
    """Return whether no process holds the lock. A directory without a lock file is being made, or is not an adapter directory."""
    with owned_directory(path) as directory:
        if directory is None:
            return False
        try:
            descriptor = open_private(_ADAPTERS_LOCK, os.O_RDWR, directory=directory)
        except OSError:
            return False
        try:
            return lock_now(descriptor, fcntl.LOCK_EX)
        finally:
            close(descriptor)
