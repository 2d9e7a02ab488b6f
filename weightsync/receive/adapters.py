"""Staged LoRA adapters: directories as PEFT writes them, in shared memory, as many as the engine holds at a time.

They are small, so each replica has its own. When a replica is dead, the next one that starts removes its directory. Files are
changed in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

import structlog

from sluice.host_files import close, lock_now, open_private, owned_directory, remove_tree
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.receive.pull import PullCost, VersionBuilder, in_thread
from weightsync.receive.version_file import StagingError, tensor_specs
from weightsync.staged import HeldVersions, StagedAdapter

_PREFIX = "sluice_adapters-"
_LOCK = ".lock"

log = structlog.get_logger(__name__)


class AdapterDirectory:
    """The directory ``<stage_dir>/sluice_adapters-<run>-<pid>`` with one directory for each adapter.

    Args:
        stage_dir: Directory in shared memory.
        run: The run's name.
        builder: Fills the files.
        threads: Where files are made and removed.
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
            held: Returns what the engine holds, whose directories have to stay; None while it cannot say.

        Returns:
            The adapter, and the cost of pulling it; None if it was staged already.

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
        if not manifest.digest.isalnum():  # it becomes the name of a directory
            raise StagingError(
                f"{manifest.digest[:80]!r} is not the digest of a version: pull from a service that gives one"
            )
        name = f"v{version}-{manifest.digest}"
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
        """Give the directory its name, and keep the adapter: a directory that nobody knows would block the next attempt."""
        (part / "adapter_config.json").write_text(adapter_config)
        part.rename(staged.path)
        self._staged[staged.version] = staged

    def _make_directory(self) -> Path:
        self._parent.mkdir(parents=True, exist_ok=True)
        for directory in self._parent.glob(f"{_PREFIX}*"):
            if _is_dead(directory) and remove_tree(directory):
                log.info("removed what a dead replica had staged", path=str(directory))
        for number in range(1000):  # several receivers of one process get a number behind it
            path = self._parent / f"{_PREFIX}{self._run}-{os.getpid()}.{number}"
            try:
                path.mkdir(mode=0o700)
            except FileExistsError:
                continue
            self._lock_file = _locked_file(path)
            return path
        raise OSError(f"{self._parent} holds a thousand directories {_PREFIX}{self._run}*: remove them")


def _discard(part: Path, descriptor: int) -> None:
    os.close(descriptor)
    remove_tree(part)


def _locked_file(directory: Path) -> int:
    """Make the lock file. It gets its name after it was locked, so no process sees it unlocked while its replica lives."""
    unnamed = directory / f"{_LOCK}.new"
    descriptor = open_private(unnamed, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    unnamed.rename(directory / _LOCK)
    return descriptor


def _is_dead(path: Path) -> bool:
    """Return whether no process holds the lock. A directory without the file is being made, or is not one of ours."""
    with owned_directory(path) as directory:
        if directory is None:
            return False
        try:
            descriptor = open_private(_LOCK, os.O_RDWR, directory=directory)
        except OSError:
            return False
        try:
            return lock_now(descriptor, fcntl.LOCK_EX)
        finally:
            close(descriptor)
