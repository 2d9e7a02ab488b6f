"""The runs that a service keeps: their ledgers, stores and uploads, and the disk that they share."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

import grpc
import structlog

from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.config import WeightSyncConfig
from weightsync.format.names import BadNameError, parse_run
from weightsync.metrics import HELD_BYTES
from weightsync.service.dense_forms import DenseForms
from weightsync.service.ledger import Ledger, RefusedError
from weightsync.service.run import Run
from weightsync.service.store import RunStore, StoreLockedError
from weightsync.service.upload import Upload

__all__ = ["Run", "Runs", "Upstream", "disk_error", "refused"]

P = ParamSpec("P")
T = TypeVar("T")

_RETRY_AFTER_S = 5.0
"""What a trainer is told to wait when the disk is full: about the time in which a lease or a pull ends."""

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

log = structlog.get_logger(__name__)


def refused(error: RefusedError) -> SluiceError:
    """The ledger's refusal as the contract words it."""
    code = {
        "OTHER_DIGEST": grpc.StatusCode.ALREADY_EXISTS,
        "NO_SUCH_VERSION": grpc.StatusCode.NOT_FOUND,
    }.get(error.reason, grpc.StatusCode.FAILED_PRECONDITION)
    return SluiceError(code, error.reason, str(error))


def disk_error(error: OSError) -> SluiceError:
    """A failed write as the contract words it."""
    if error.errno in _DISK_FULL:
        return SluiceError.resource_exhausted(
            "DISK_FULL", f"the disk is full ({error}); the versions so far stay: make room", _RETRY_AFTER_S
        )
    return SluiceError(
        grpc.StatusCode.INTERNAL, "DISK_ERROR", f"the disk failed ({error}); the versions so far stay: see its log"
    )


class Upstream(Protocol):
    """What a relay does beside keeping runs."""

    async def has(self, resource: str) -> bool:
        """Return whether the service behind has the run named ``runs/{run}``.

        Raises:
            SluiceError: UNAVAILABLE if it does not answer.
        """

    def opened(self, run: Run) -> None:
        """Follow a run that was asked for, for the first time; never waits."""

    def reported(self, run: Run, request: pb.ReportVersionRequest) -> None:
        """Pass a replica's report on; never waits. Raises `SluiceError` if the report shows that relays feed each other."""

    def lease_s(self, run: Run) -> float:
        """Seconds that the service behind grants its replicas."""


class Runs:
    """All runs of a service.

    Args:
        config: The service's settings.
        directory_of: Where a run's versions lie.
        model_of: The base model whose files go with a run's versions; empty: none.
        clock: Seconds, monotonic.

    Attributes:
        threads: Where blocking work is done.
        retention_due: Wakes `retain_forever`.
        dense_forms: Makes dense forms of deltas in the background.
        upstream: Where the versions come from if this is a relay.
    """

    def __init__(
        self,
        config: WeightSyncConfig,
        directory_of: Callable[[str], Path],
        model_of: Callable[[str], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.clock = clock
        self._directory_of = directory_of
        self._model_of = model_of
        self._runs: dict[str, Run] = {}
        self.upstream: Upstream | None = None
        self._opening = asyncio.Lock()
        self._room = asyncio.Lock()
        self.retention_due = asyncio.Event()
        self.threads = ThreadPoolExecutor(config.io_threads, thread_name_prefix="weightsync-io")
        self.dense_forms = DenseForms(self, config.dense_delay_s, config.heartbeat_s)

    def __iter__(self) -> Iterator[Run]:
        """The runs that were opened."""
        return iter(list(self._runs.values()))

    def in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Start blocking work; the disk bounds it, its result is awaited by the caller."""
        return asyncio.get_running_loop().run_in_executor(self.threads, lambda: work(*args, **kwargs))

    async def open(self, resource: str) -> Run:
        """The run named ``runs/{run}``, read from disk when it is first asked for.

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
                    self.upstream.opened(self._runs[name])
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

    def _new(self, name: str) -> Run:
        ledger = Ledger(self.config.keep, self.config.anchor_every)
        return Run(name, ledger, RunStore(self._directory_of(name), self._model_of(name)))

    async def _open(self, name: str) -> Run:
        if len(self._runs) >= self.config.max_runs:
            raise SluiceError.resource_exhausted(
                "TOO_MANY_RUNS",
                f"this service keeps {self.config.max_runs} runs at most (weightsync.max_runs); start another one",
                _RETRY_AFTER_S,
            )
        run = self._new(name)
        try:
            run.restore(await self.in_thread(run.store.recover))
        except StoreLockedError as error:
            raise SluiceError.failed_precondition("DIRECTORY_IN_USE", str(error)) from error
        except OSError as error:
            run.store.close()  # its lock would keep out the next attempt
            raise disk_error(error) from error
        self.dense_forms.wake(run)
        log.info("run opened", run=name, directory=str(run.store.root), versions=len(run.versions))
        return run

    async def begin_upload(self, run: Run, version: Version, announced: pb.Shard) -> Upload:
        """Begin a shard anew; what came in of it before is dropped, and streams that still write to it fail.

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
                shard = await self.in_thread(run.store.open_shard, version, announced.name, announced.size_bytes)
            except StoreLockedError as error:
                raise SluiceError.failed_precondition("DIRECTORY_IN_USE", str(error)) from error
            except OSError as error:
                raise disk_error(error) from error
            run.uploads[key] = Upload(shard, announced, self.clock())
            return run.uploads[key]

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
        promised = sum(upload.shard.size - upload.shard.stored for each in self for upload in each.uploads.values())
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
        """Forget all that came in of a version."""
        doomed = run.uploads_of(version)
        for name in doomed:
            del run.uploads[version, name]
        await self.in_thread(_discard, list(doomed.values()))
        await self.in_thread(run.store.drop_incoming, version)

    async def retain(self, run: Run) -> None:
        """Apply retention, and forget uploads that nobody goes on with."""
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
            run.ledger.drop_dense(version)
            run.versions[version] = replace(run.versions[version], dense=None)
            await self.in_thread(run.store.remove_dense, version)
            log.info("dense form removed", run=run.name, version=str(version))

    async def retain_forever(self) -> None:
        """Apply retention after each commit, and now and then, because leases and uploads run out without a call.

        Nobody waits for it: to remove a version takes the disk about as long as to write one.
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
                except OSError as error:  # the disk may recover; serving goes on without
                    log.warning("retention failed", run=run.name, error=str(error))

    async def close(self) -> None:
        """End the work in the background, wait for that in threads and let other processes have the directories."""
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
        _RETRY_AFTER_S,
    )


def _discard(uploads: list[Upload]) -> None:
    for upload in uploads:
        upload.discard()
