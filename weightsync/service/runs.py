"""The runs that a service keeps: their ledgers, stores and uploads, and the disk that they share."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

import structlog

from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.config import WeightSyncConfig
from weightsync.format.manifest import parse_run
from weightsync.format.safetensors import BadNameError
from weightsync.metrics import HELD_BYTES
from weightsync.service.dense_forms import DenseForms
from weightsync.service.errors import RETRY_AFTER_S, translated
from weightsync.service.ledger import Ledger
from weightsync.service.run import Run
from weightsync.service.store import RunStore, StoreLockedError
from weightsync.service.upload import Upload

__all__ = ["Runs", "Upstream"]

P = ParamSpec("P")
T = TypeVar("T")

log = structlog.get_logger(__name__)


class Upstream(Protocol):
    """The service behind a relay, from which its versions come. Only `has` waits.

    Attributes:
        target: Its address, for messages.
    """

    target: str

    async def has(self, resource: str) -> bool:
        """Return whether it has the run named ``runs/{run}``.

        Raises:
            SluiceError: UNAVAILABLE if it does not answer.
        """
        ...

    def follow(self, runs: Runs, run: Run) -> None:
        """Bring its versions into a run from now on."""
        ...

    def report(self, run: Run, request: pb.ReportVersionRequest) -> None:
        """Forward a replica's report.

        Raises:
            SluiceError: if the report shows that relays feed each other.
        """
        ...

    def lease_s(self, run: Run) -> float:
        """Return the seconds that it grants its replicas."""
        ...


class Runs:
    """All runs of a service.

    Args:
        config: The service's settings.
        directory_of: Returns where a run's versions lie.
        model_of: Returns the base model whose files go with a run's versions; empty: none.
        upstream: Where the versions come from if this is a relay.
        clock: Seconds, monotonic.

    Attributes:
        threads: Where blocking work is done.
        retention_due: Wakes `retain_forever`.
        dense_forms: Makes dense forms of deltas in the background.
    """

    def __init__(
        self,
        config: WeightSyncConfig,
        directory_of: Callable[[str], Path],
        model_of: Callable[[str], str],
        upstream: Upstream | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.clock = clock
        self.upstream = upstream
        self.retention_due = asyncio.Event()
        self.threads = ThreadPoolExecutor(config.io_threads, thread_name_prefix="weightsync-io")
        self.dense_forms = DenseForms(
            self.room_for, self.retention_due.set, delay_s=config.dense_delay_s, retry_s=config.heartbeat_s
        )
        self._directory_of = directory_of
        self._model_of = model_of
        self._runs: dict[str, Run] = {}
        self._opening = asyncio.Lock()
        self._room = asyncio.Lock()

    def __iter__(self) -> Iterator[Run]:
        """Iterate over the runs that were opened."""
        return iter(list(self._runs.values()))

    def in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Start blocking work in a thread; the caller awaits its result."""
        return asyncio.get_running_loop().run_in_executor(self.threads, lambda: work(*args, **kwargs))

    async def open(self, resource: str) -> Run:
        """Return the run named ``runs/{run}``; read it from disk when it is first asked for.

        Raises:
            SluiceError: INVALID_ARGUMENT, RESOURCE_EXHAUSTED (too many runs), FAILED_PRECONDITION (directory in use),
                INTERNAL (the disk).
        """
        name = _name_of(resource)
        if name in self._runs:
            return self._runs[name]
        async with self._opening:
            if name not in self._runs:
                self._runs[name] = await self._open(name)
                if self.upstream is not None:
                    self.upstream.follow(self, self._runs[name])
        return self._runs[name]

    async def find(self, resource: str) -> Run:
        """Return a run that exists, for a caller who only reads: nothing is made for a run that does not.

        So a mistyped name takes no place from the runs to come. A relay asks upstream about runs that it does not hold.

        Raises:
            SluiceError: NOT_FOUND if there is no such run, UNAVAILABLE if upstream does not answer; else as `open`.
        """
        name = _name_of(resource)
        if name in self._runs or await self.in_thread(self._directory_of(name).exists):
            return await self.open(resource)
        if self.upstream is not None and await self.upstream.has(resource):
            return await self.open(resource)
        raise SluiceError.not_found(
            "NO_SUCH_RUN", f"nothing was pushed to run {name}: check the name, or wait for its trainer's first version"
        )

    async def _open(self, name: str) -> Run:
        if len(self._runs) >= self.config.max_runs:
            raise SluiceError.resource_exhausted(
                "TOO_MANY_RUNS",
                f"this service keeps {self.config.max_runs} runs at most (weightsync.max_runs); start another one",
                RETRY_AFTER_S,
            )
        ledger = Ledger(self.config.keep, self.config.anchor_every)
        run = Run(name, ledger, RunStore(self._directory_of(name), self._model_of(name)))
        try:
            run.restore(await self.in_thread(run.store.read_versions))
        except (StoreLockedError, OSError) as error:
            run.store.close()  # its lock would keep out the next attempt
            raise translated(error) from error
        self.dense_forms.wake(run)
        log.info("run opened", run=name, directory=str(run.store.root), versions=len(run.versions))
        return run

    async def begin_upload(self, run: Run, version: Version, announced: pb.Shard) -> Upload:
        """Begin a shard at its beginning. What came in of it before is dropped; streams that still write to it fail.

        Raises:
            SluiceError: RESOURCE_EXHAUSTED (disk), FAILED_PRECONDITION (directory in use).
        """
        key = (version, announced.name)
        async with self._room:  # two uploads must not be promised the same bytes
            before = run.uploads.pop(key, None)
            if before is not None:
                await self.in_thread(before.discard)
            await self._make_room(run, announced.size_bytes)
            try:
                upload = await self.in_thread(run.store.begin_upload, version, announced, self.clock())
            except (StoreLockedError, OSError) as error:
                raise translated(error) from error
            run.uploads[key] = upload
            return upload

    async def _make_room(self, run: Run, need: int) -> None:
        """See that a file of `need` bytes fits; the versions of all runs that nobody needs give way, the oldest first.

        So a run with many versions does not keep another from its first. Every run keeps its newest version, those that
        its live replicas serve, and what these are reached through.

        Raises:
            SluiceError: RESOURCE_EXHAUSTED.
        """
        if await self._lacking(run, need) > 0:
            for each in self:
                await self._retain_versions(each)
        while (lacking := await self._lacking(run, need)) > 0:
            if (oldest := self._oldest_evictable()) is not None:
                await self.delete(*oldest)
            elif not await self.dense_forms.stop_builds():
                raise _no_room(need, lacking)

    def _oldest_evictable(self) -> tuple[Run, Version] | None:
        """Return the version to give up next, of all runs the one that was committed first; None if all are needed."""
        now = self.clock()
        found = [(each, evictable[0]) for each in self if (evictable := each.ledger.evictable(now))]
        return min(found, key=lambda each: each[0].versions[each[1]].commit_ns, default=None)

    @asynccontextmanager
    async def room_for(self, run: Run, need: int, *, evict: bool) -> AsyncIterator[None]:
        """Reserve room for a file that the service makes itself, for as long as the block lasts.

        Args:
            run: The run that the file is of.
            need: Its bytes.
            evict: Whether versions that nobody needs give way, as for a push; otherwise only those that retention would
                not keep.

        Raises:
            SluiceError: RESOURCE_EXHAUSTED.
        """
        async with self._room:
            if evict:
                await self._make_room(run, need)
            else:
                await self._retain_versions(run)
                if (lacking := await self._lacking(run, need)) > 0:
                    raise _no_room(need, lacking)
            run.reserved_bytes += need
        try:
            yield
        finally:
            run.reserved_bytes -= need

    async def _lacking(self, run: Run, need: int) -> int:
        free = await self.in_thread(run.store.free_bytes)
        promised = sum(upload.size - upload.stored for each in self for upload in each.uploads.values())
        beyond_disk = need + promised + self.config.min_free_bytes - free
        if self.config.max_bytes is None:
            return beyond_disk
        return max(beyond_disk, need + sum(each.bytes_held for each in self) - self.config.max_bytes)

    async def delete(self, run: Run, version: Version) -> None:
        """Remove a version that nobody needs; without effect where there is none.

        Raises:
            RefusedError: IN_USE.
        """
        if run.ledger.delete(version, self.clock()):
            del run.versions[version]
            await self.in_thread(run.store.remove, version)
            log.info("version removed", run=run.name, version=str(version))

    async def discard_upload(self, run: Run, upload: Upload, ticket: object) -> None:
        """Drop what came in of a shard, unless a newer stream than the one with this ticket goes on with it."""
        if await self.in_thread(upload.discard, ticket):
            run.uploads = {key: each for key, each in run.uploads.items() if each is not upload}

    async def drop_uploads(self, run: Run, version: Version) -> None:
        """Drop everything that came in of a version."""
        doomed = run.uploads_of(version)
        for name in doomed:
            del run.uploads[version, name]
        for upload in doomed.values():
            await self.in_thread(upload.discard)
        await self.in_thread(run.store.drop_incoming, version)

    async def retain(self, run: Run) -> None:
        """Apply retention, and drop uploads that nobody continues."""
        now = self.clock()
        newest = run.ledger.newest
        for version in {version for version, _ in run.uploads} - {run.committing}:
            idle = all(
                now - upload.active_at > self.config.incoming_ttl_s for upload in run.uploads_of(version).values()
            )
            if idle or (newest is not None and version <= newest):
                await self.drop_uploads(run, version)
        await self._retain_versions(run)

    async def _retain_versions(self, run: Run) -> None:
        while surplus := run.ledger.surplus(self.clock()):
            await self.delete(run, surplus[0])
        while surplus := run.ledger.surplus_dense(self.clock()):
            version = surplus[0]
            run.drop_dense(version)
            await self.in_thread(run.store.remove_dense, version)
            log.info("dense form removed", run=run.name, version=str(version))

    async def retain_forever(self) -> None:
        """Apply retention after each commit, and regularly, because leases and uploads run out without a call.

        It runs in the background, because removing a version takes the disk about as long as writing one.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.heartbeat_s):
                    await self.retention_due.wait()
            self.retention_due.clear()
            for run in self:
                HELD_BYTES.labels(run.name).set(run.bytes_held)
                try:
                    await self.retain(run)
                except OSError as error:  # the disk may recover; versions are served without retention
                    log.warning("retention failed", run=run.name, error=str(error))

    async def close(self) -> None:
        """End the work in the background, wait for the threads, and let other processes have the directories."""
        await self.dense_forms.close()
        await asyncio.to_thread(self.threads.shutdown)
        for run in self:
            for upload in run.uploads.values():
                upload.close()
            run.store.close()


def _name_of(resource: str) -> str:
    try:
        return parse_run(resource)
    except BadNameError as error:
        raise SluiceError.invalid_argument("run", str(error)) from error


def _no_room(need: int, lacking: int) -> SluiceError:
    return SluiceError.resource_exhausted(
        "DISK_FULL",
        f"{need} bytes need {lacking} bytes more than there are (weightsync.max_bytes, min_free_bytes), and every version"
        " is in use: make room",
        RETRY_AFTER_S,
    )
