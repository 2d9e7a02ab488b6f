"""Makes the dense form of each run's newest version in the background, one at a time, beside commits and pulls."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import structlog

from sluice.rpc import SluiceError
from sluice.tasks import run_to_end
from weightsync.format.safetensors import LayoutError
from weightsync.metrics import DENSE_SECONDS
from weightsync.service.chain import VersionForm, next_dense
from weightsync.service.dense_files import DamagedDeltaError, StoppedError, apply_deltas
from weightsync.service.run import Run
from weightsync.service.stored import StoredForm

__all__ = ["DenseForms", "Reserve"]

_MOST_FILES = 256
"""Delta files that are mapped at once; a longer chain is taken in several passes. Far below the usual limit of 1024."""

_STOP_S = 30.0
"""Seconds to wait for a build to stop: it looks after each tensor, so a disk that takes longer does not answer."""

_NICENESS = 10
"""The thread gives way to those that serve."""

log = structlog.get_logger(__name__)


class Reserve(Protocol):
    """Reserves room on the disk for as long as a block lasts."""

    def __call__(self, run: Run, need: int, *, evict: bool) -> AbstractAsyncContextManager[None]:
        """Reserve `need` bytes; raise `SluiceError` if there are not that many."""
        ...


class DenseForms:
    """The work for all runs of a service; one thread does it.

    Args:
        reserve: Reserves room for a dense form.
        ended: Called after each attempt: versions that it held may be removed now.
        delay_s: Seconds from a commit until its dense form is begun.
        retry_s: Seconds after which a failed attempt is repeated.
    """

    def __init__(self, reserve: Reserve, ended: Callable[[], None], *, delay_s: float, retry_s: float) -> None:
        self._reserve = reserve
        self._ended = ended
        self._delay_s = delay_s
        self._retry_s = retry_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._builds: dict[str, _Build] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weightsync-dense", initializer=_give_way)

    def wake(self, run: Run) -> None:
        """See that the run's newest version gets a dense form."""
        if run.name not in self._tasks and next_dense(run.ledger.committed) is not None:
            self._tasks[run.name] = asyncio.create_task(self._follow(run))

    async def stop_builds(self) -> bool:
        """Give up what is under construction, so that its room is free; it is tried again later.

        Returns:
            Whether there was something, and it ended in time.
        """
        builds = [build for build in self._builds.values() if build.has_room]
        for build in builds:
            build.stop.set()
        try:
            async with asyncio.timeout(_STOP_S):
                for build in builds:
                    await build.ended.wait()
        except TimeoutError:
            log.warning("a dense form under construction did not end in time", deadline_s=_STOP_S)
            return False
        return bool(builds)

    async def close(self) -> None:
        """End all work."""
        for build in self._builds.values():
            build.stop.set()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.to_thread(self._thread.shutdown)

    async def _follow(self, run: Run) -> None:
        """Make dense forms until the newest version that can be reached has one."""
        try:
            await asyncio.sleep(self._delay_s)
            while (path := next_dense(run.ledger.committed)) is not None:
                settled = await self._make(run, path)
                await asyncio.sleep(self._delay_s if settled else self._retry_s)
        finally:
            del self._tasks[run.name]

    async def _make(self, run: Run, path: list[VersionForm]) -> bool:
        """Make one dense form; return whether it was made, or a damaged delta makes that impossible."""
        forms = [form for step in path if (form := run.versions[step.version].form(step.form)) is not None]
        source, deltas = forms[0], _limited(forms[1:])
        build = self._builds[run.name] = _Build(source, deltas)
        for step in path:
            run.ledger.hold(step.version, build)
        try:
            return await self._attempt(run, build, path[len(deltas)])
        finally:
            for step in path:
                run.ledger.release(step.version, build)
            del self._builds[run.name]
            build.ended.set()
            self._ended()

    async def _attempt(self, run: Run, build: _Build, target: VersionForm) -> bool:
        version, started = target.version, time.perf_counter()

        def work() -> StoredForm:
            building = run.store.build_dense(version)
            try:
                manifest = apply_deltas(build.source, build.deltas, building, build.stop)
                return run.store.publish_dense(manifest, building)
            finally:
                run.store.drop_building(version)

        try:
            async with self._reserve(run, build.source.manifest.size_bytes, evict=False):
                build.has_room = True
                working = asyncio.get_running_loop().run_in_executor(self._thread, work)
                run.add_dense(version, await run_to_end(working, on_cancel=build.stop.set))
        except DamagedDeltaError as error:
            run.ledger.mark_damaged(error.version)
            log.error(  # noqa: TRY400 - where it was found says nothing, the version does
                "a delta gives other bytes than announced, or NaN; replicas fall back to an older version",
                run=run.name,
                version=str(error.version),
                error=str(error),
                remedy="the trainer's next push is refused and comes as an anchor; or push an anchor now",
            )
            return True
        except StoppedError:
            return False
        except (OSError, SluiceError, LayoutError) as error:
            log.warning(
                "no dense form could be made; deltas are still served",
                run=run.name,
                version=str(version),
                error=str(error),
                retry_s=self._retry_s,
                remedy="make room, or raise weightsync.max_bytes to three dense copies",
            )
            return False
        seconds = time.perf_counter() - started
        DENSE_SECONDS.observe(seconds)
        log.info(
            "dense form made", run=run.name, version=str(version), deltas=len(build.deltas), seconds=round(seconds, 3)
        )
        return True


class _Build:
    """One dense form under construction: an older dense form, the deltas to apply to it, and how far it is."""

    def __init__(self, source: StoredForm, deltas: list[StoredForm]) -> None:
        self.source = source
        self.deltas = deltas
        self.has_room = False
        self.stop = threading.Event()
        self.ended = asyncio.Event()


def _limited(deltas: list[StoredForm]) -> list[StoredForm]:
    """Return as many deltas, from the first on, as may be open at once; at least one."""
    files, count = 0, 0
    for delta in deltas:
        files += len(delta.files)
        if count and files > _MOST_FILES:
            break
        count += 1
    return deltas[:count]


def _give_way() -> None:
    with contextlib.suppress(OSError):  # sandboxes forbid it; a thread that fails to start would end all work here
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
