"""Staged versions in shared memory, one copy of each for all receivers of a host.

A version's file is named by its number and digest, and is never changed once it has that name. File locks (flock(2)) end with
their process, however that ends, and hold between containers that share the memory. There are three kinds:

* the process that makes a file holds an exclusive lock on ``NAME.build``;
* each process that uses a file holds a shared lock on it, taken before the file gets its name;
* a process that removes a file holds an exclusive lock on it, which nobody gets while it is used: so the last user removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
from dataclasses import dataclass
from pathlib import Path

import structlog

from sluice.host_files import close, is_at, lock_now, open_private, owned_directory, remove_unlocked, unlink_at
from sluice.versions import Version
from weightsync.receive.pull import StagingError

__all__ = ["Claim", "SharedArea", "SharedCopy", "remove_stale", "version_of"]

_PREFIX = "sluice-"
_BUILD = ".build"
_PART = ".part"
_FILE = ".safetensors"
_OTHERS_MAY_WRITE = 0o022
_DIGEST = re.compile(r"[0-9a-z]+")
_ATTEMPTS = 100
"""Most attempts to lock a file that other processes may remove at the same moment. Each attempt fails only if another one succeeds."""
_PAUSE_S = 0.01
"""Pause before the next attempt to lock a file; an exclusive lock is held for microseconds."""

log = structlog.get_logger(__name__)


@dataclass(slots=True)
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

    Its files are trusted by their names, so it must belong to this user alone: everybody may write to shared memory.

    Args:
        parent: Directory in shared memory, such as ``/dev/shm``.
        run: The run's name.
    """

    def __init__(self, parent: Path, run: str) -> None:
        self.parent = parent
        self.path = parent / f"{_PREFIX}{run}.{os.getuid()}"
        parent.mkdir(parents=True, exist_ok=True)
        remove_stale(parent)

    def file(self, version: Version, digest: str) -> Path:
        """Return the path of a staged version.

        Raises:
            StagingError: if the digest could lead out of the directory.
        """
        if not _DIGEST.fullmatch(digest):
            raise StagingError(f"{digest[:80]!r} is not the digest of a version: pull from a service that gives one")
        return self.path / f"v{version}-{digest}{_FILE}"

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
            time.sleep(_PAUSE_S)
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

    def others(self, path: Path) -> list[Path]:
        """Return the files that are staged or on the way besides one. Those of dead processes are removed."""
        _sweep(self.path)
        found = {each.with_suffix(_FILE) for suffix in (_FILE, _PART) for each in self.path.glob(f"*{suffix}")}
        return sorted(found - {path})

    def check_room(self, needed: int) -> None:
        """Check that there is memory for a file.

        Raises:
            StagingError: if there is not; the message says what to do.
        """
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

    def close(self) -> None:
        """Remove the files that no process uses."""
        _sweep(self.path)

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


def version_of(path: Path) -> Version:
    """Return the version that a staged file is named after."""
    return Version.parse(path.stem.split("-")[0].removeprefix("v"))


def remove_stale(parent: Path) -> list[Path]:
    """Remove what dead processes of this user left, of any run.

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
