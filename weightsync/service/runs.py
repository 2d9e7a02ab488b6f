"""The runs that a service keeps: their versions and uploads, commits, retention, and the disk that they share."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

import structlog
from prometheus_client import Metric

from sluice.clock import CLOCK, Clock
from sluice.rpc import SluiceError
from sluice.telemetry import gauge
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import BASE, Version
from weightsync.config import WeightSyncConfig
from weightsync.format.manifest import ManifestError, parse_run
from weightsync.format.safetensors import BadNameError
from weightsync.metrics import COMMIT_SECONDS, COMMITTED_BYTES, HELD_BYTES
from weightsync.service.chain import Form
from weightsync.service.dense import DenseForms
from weightsync.service.ledger import Ledger, RefusedError
from weightsync.service.store import RunStore, StoredForm, StoredVersion, form_of, is_loadable
from weightsync.service.upload import FAILURES, RETRY_AFTER_S, Upload, complete_manifest, translated

RELAY_PREFIX = "relay:"
"""Prefix of all relays' names, and of no other names. Reporting under such a name needs permission."""

_INCOMING_TTL_S = 600.0
"""Seconds after its last chunk until an upload that was not committed is dropped."""

_IO_THREADS = 8
"""Threads for disk work and hashing."""

_MOST_ERROR_CHARACTERS = 2000

_USELESS_UPLOADS = {"BASE_UNKNOWN", "BASE_DAMAGED", "NON_FINITE", "DIGEST"}
"""Refusals after which the pushed shards of the version can never be committed."""

P = ParamSpec("P")
T = TypeVar("T")

log = structlog.get_logger(__name__)


class Run:
    """One run's versions.

    Attributes:
        uploads: Shards that are being pushed, by version and name.
        commit_lock: Held during a commit, so that there is one at a time.
        committing: The version whose commit is in progress.
        changed: Set when a version becomes visible, and then replaced by a new event.
        watchers: WatchVersions streams of this run.
        reserved_bytes: Sizes of the files that are being made: a dense form from deltas, or whole tensors from slices.
    """

    def __init__(self, name: str, ledger: Ledger, store: RunStore) -> None:
        self.name = name
        self.ledger = ledger
        self.store = store
        self.versions: dict[Version, StoredVersion] = {}
        self.uploads: dict[tuple[Version, str], Upload] = {}
        self.commit_lock = asyncio.Lock()
        self.committing: Version | None = None
        self.changed = asyncio.Event()
        self.watchers = 0
        self.reserved_bytes = 0
        self._reports: dict[str, pb.ReportVersionRequest] = {}
        self._relays: set[str] = set()
        """Names of the replicas that reported an address as a relay."""

    def restore(self, found: list[StoredVersion]) -> None:
        """Add the versions that were found on disk."""
        for stored in found:
            self.versions[stored.version] = stored
            self.ledger.restore(stored.version, stored.describe())

    def add_version(self, stored: StoredVersion) -> None:
        """Make a version visible and wake the watchers; raise RefusedError as `Ledger.commit`."""
        self.ledger.commit(stored.version, stored.describe())
        self.versions[stored.version] = stored
        self.changed.set()
        self.changed = asyncio.Event()

    def add_dense(self, version: Version, form: StoredForm) -> None:
        """Give a visible version a dense form."""
        self.ledger.add_dense(version, form.manifest.size_bytes)
        self.versions[version] = self.versions[version].with_form(form)

    def drop_dense(self, version: Version) -> None:
        """Take the dense form of a visible version out of sight."""
        self.ledger.drop_dense(version)
        self.versions[version] = self.versions[version].without_dense()

    def find(self, version: Version | None) -> StoredVersion:
        """Return a visible version, or the newest one for None; raise SluiceError NOT_FOUND."""
        wanted = self.ledger.newest if version is None else version
        if wanted is None:
            raise SluiceError.not_found(
                "NO_VERSION", f"nothing was committed in run {self.name} yet: push a version, or watch for one"
            )
        stored = self.versions.get(wanted)
        if stored is None:
            raise SluiceError.not_found(
                "NO_SUCH_VERSION",
                f"run {self.name} has no version {wanted}; the newest is {self.ledger.newest}: watch again",
            )
        return stored

    def uploads_of(self, version: Version) -> dict[str, Upload]:
        """Return the uploads of one version by shard name."""
        return {name: upload for (owner, name), upload in self.uploads.items() if owner == version}

    @property
    def bytes_held(self) -> int:
        """Return the bytes of visible versions, of uploads (as announced), and of the files that are being made."""
        uploads = sum(upload.size for upload in self.uploads.values())
        return self.ledger.bytes_committed + uploads + self.reserved_bytes

    def report(self, request: pb.ReportVersionRequest, now: float, lease_s: float) -> None:
        """Renew a replica's lease. The report replaces the replica's previous report."""
        about = Version.from_proto(request.version)
        serving = Version.from_proto(request.serving) if request.HasField("serving") else None
        self.ledger.report(
            request.replica,
            serving=about if request.phase == pb.REPLICA_PHASE_SERVING else serving,
            staged=about if request.phase == pb.REPLICA_PHASE_STAGED else None,
            error=request.error[:_MOST_ERROR_CHARACTERS],
            now=now,
            lease_s=lease_s,
        )
        before = self._reports.get(request.replica)
        kept = pb.ReportVersionRequest(
            relay_address=request.relay_address, host=request.host, watchers=request.watchers
        )
        for report in (before, request):
            if report is not None and report.HasField("timings"):
                kept.timings.CopyFrom(report.timings)
        self._reports[request.replica] = kept
        if request.relay_address:
            self._relays.add(request.replica)
        if len(self._reports) > self.ledger.leases:  # not at each report: it reads all replicas
            live = self.ledger.replicas(now)
            self._reports = {name: report for name, report in self._reports.items() if name in live}
            self._relays &= live.keys()

    def describe_replicas(self, now: float) -> list[pb.ReplicaVersion]:
        """Return what each live replica serves, in the order of their names."""
        rows = []
        for name, lease in sorted(self.ledger.replicas(now).items()):
            row = pb.ReplicaVersion(replica=name, error=lease.error)
            row.age.FromNanoseconds(int((now - lease.reported) * 1e9))
            if lease.serving is not None:
                row.version.CopyFrom(lease.serving.to_proto())
                row.versions_behind = sum(version > lease.serving for version in self.versions)
            if (report := self._reports.get(name)) is not None:
                row.relay_address = report.relay_address
                if report.HasField("timings"):
                    row.timings.CopyFrom(report.timings)
            rows.append(row)
        return rows

    def describe_relays(self, now: float) -> list[pb.WeightSource]:
        """Return the live relays, which serve the same versions, in the order of their names."""
        found = []
        for name in sorted(self._relays):
            lease, report = self.ledger.lease(name, now), self._reports.get(name)
            if lease is not None and report is not None and report.relay_address:
                newest = None if lease.serving is None else lease.serving.to_proto()
                found.append(
                    pb.WeightSource(
                        address=report.relay_address, host=report.host, watchers=report.watchers, newest=newest
                    )
                )
        return found


class Upstream(Protocol):
    """Where the versions of a relay come from. Only `has` waits.

    Attributes:
        target: Name in messages for the service that versions are pushed to.
        continues_files: Whether it can continue files that were incomplete when the service was restarted.
    """

    target: str
    continues_files: bool

    async def has(self, resource: str) -> bool:
        """Return whether it has the run named ``runs/{run}``; raise SluiceError UNAVAILABLE if it does not answer."""

    def follow(self, runs: Runs, run: Run) -> None:
        """From now on, copy its versions into a run."""

    def report(self, run: Run, request: pb.ReportVersionRequest) -> None:
        """Forward a replica's report; raise SluiceError if it shows that relays feed each other."""

    def lease_s(self, run: Run) -> float:
        """Return the seconds that it grants its replicas."""

    def describe(self, run: Run) -> pb.MirrorState | None:
        """Return how far the run's versions have been copied from it; None unless it is an object store."""


class Copy(Protocol):
    """Where committed versions are copied to in the background."""

    def follow(self, runs: Runs, run: Run) -> None:
        """Copy the versions of a run from now on."""

    def describe(self, run: Run) -> pb.MirrorState:
        """Return how far the copy of a run is."""


class Runs:
    """All runs of a service.

    Args:
        config: The service's settings.
        directory_of: Returns where a run's versions lie.
        model_of: Returns the base model whose files are added to a run's versions; empty: none.
        upstream: Where the versions come from if this is a relay.
        mirror: Where the versions are copied to.
        clock: Tells how long replicas, uploads and streams have been silent, and when work in the background is due.
        chat_template: Chat template to add to a run's versions instead of the base model's; None: the base model's.

    Attributes:
        threads: Pool for blocking work.
        retention_due: Wakes `retain_forever`.
    """

    def __init__(
        self,
        config: WeightSyncConfig,
        directory_of: Callable[[str], Path],
        model_of: Callable[[str], str],
        upstream: Upstream | None = None,
        *,
        mirror: Copy | None = None,
        clock: Clock = CLOCK,
        chat_template: str | None = None,
    ) -> None:
        self.config = config
        self.clock = clock
        self.upstream = upstream
        self.mirror = mirror
        self.retention_due = asyncio.Event()
        self.threads = ThreadPoolExecutor(_IO_THREADS, thread_name_prefix="weightsync-io")
        self.dense_forms = DenseForms(
            partial(self.room_for, evict=False),
            self.retention_due.set,
            delay_s=config.dense_delay_s,
            retry_s=config.heartbeat_s,
            clock=clock,
        )
        self._commits: set[asyncio.Task[pb.CommitVersionResponse]] = set()
        self._directory_of = directory_of
        self._model_of = model_of
        self._chat_template = chat_template
        self._runs: dict[str, Run] = {}
        self._no_storage = ""
        self._opening = asyncio.Lock()
        self._room = asyncio.Lock()

    def __iter__(self) -> Iterator[Run]:
        """Iterate over the runs that were opened."""
        return iter(list(self._runs.values()))

    def in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Start blocking work in a thread; the caller awaits its result."""
        return asyncio.get_running_loop().run_in_executor(self.threads, lambda: work(*args, **kwargs))

    async def open(self, resource: str) -> Run:
        """Return the run named ``runs/{run}``; read it from disk at the first request.

        Raises:
            SluiceError: INVALID_ARGUMENT, FAILED_PRECONDITION (too many runs; directory in use),
                INTERNAL (the disk).
        """
        name = _name_of(resource)
        if name in self._runs:
            return self._runs[name]
        async with self._opening:
            if name not in self._runs:
                self._runs[name] = await self._open(name)
                for follower in (self.upstream, self.mirror):
                    if follower is not None:
                        follower.follow(self, self._runs[name])
        return self._runs[name]

    async def find(self, resource: str) -> Run:
        """Return a run that exists, for a caller that only reads. A mistyped name does not count towards `max_runs`.

        A relay asks upstream about runs that it does not hold.

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

    def describe_mirrors(self, run: Run) -> list[pb.MirrorState]:
        """Return the progress of the object stores that the service reads or writes."""
        states = [each.describe(run) for each in (self.upstream, self.mirror) if each is not None]
        return [state for state in states if state is not None]

    async def _open(self, name: str) -> Run:
        if len(self._runs) >= self.config.max_runs:
            raise SluiceError.failed_precondition(
                "TOO_MANY_RUNS",
                f"this service keeps {self.config.max_runs} runs at most (weightsync.max_runs); start another one",
            )
        ledger = Ledger(self.config.keep, self.config.anchor_every)
        continues = self.upstream is not None and self.upstream.continues_files
        store = RunStore(
            self._directory_of(name), self._model_of(name), keeps_incoming=continues, chat_template=self._chat_template
        )
        run = Run(name, ledger, store)
        try:
            run.restore(await self.in_thread(run.store.read_versions))
        except FAILURES as error:
            run.store.close()  # its lock would keep out the next attempt
            raise translated(error) from error
        self.dense_forms.wake(run)
        log.info("run opened", run=name, directory=str(run.store.root), versions=len(run.versions))
        return run

    async def begin_upload(self, run: Run, version: Version, announced: pb.Shard) -> Upload:
        """Begin a shard at byte 0. Drop the bytes of an earlier upload; a stream that still writes to that upload fails.

        Raises:
            SluiceError: RESOURCE_EXHAUSTED (disk), FAILED_PRECONDITION (directory in use).
        """
        key = (version, announced.name)
        async with self._room:  # two uploads must not reserve the same free bytes
            before = run.uploads.pop(key, None)
            if before is not None:
                await self.in_thread(before.discard)
            await self._make_room(run, announced.size_bytes)
            try:
                upload = await self.in_thread(run.store.begin_upload, version, announced, self.clock())
            except OSError as error:
                raise translated(error) from error
            run.uploads[key] = upload
            return upload

    async def commit(self, run: Run, announced: pb.Manifest) -> pb.CommitVersionResponse:
        """Make a pushed version visible. If it is visible already, compare the content and return it as a duplicate.

        The commit runs to its end even if the caller leaves, so that the version is whole or absent.

        Raises:
            SluiceError: as the contract says of CommitVersion.
        """
        task = asyncio.create_task(self._commit(run, announced))
        self._commits.add(task)
        task.add_done_callback(self._commits.discard)
        return await asyncio.shield(task)

    async def _commit(self, run: Run, announced: pb.Manifest) -> pb.CommitVersionResponse:
        version = Version.from_proto(announced.version)
        async with run.commit_lock:
            known = run.versions.get(version)
            if known is not None:
                _compare(known, announced)
                return pb.CommitVersionResponse(manifest=known.manifest, duplicate=True)
            run.committing = version
            started = time.perf_counter()
            try:
                stored = await self._verify_and_install(run, version, announced, started)
                await self.drop_uploads(run, version)
            except FAILURES as error:
                failure = translated(error)
                if failure.reason in _USELESS_UPLOADS or isinstance(error, OSError):
                    await self.drop_uploads(run, version)
                raise failure from error
            finally:
                run.committing = None
        seconds = time.perf_counter() - started
        COMMIT_SECONDS.observe(seconds)
        COMMITTED_BYTES.labels(run.name).inc(stored.manifest.size_bytes)
        log.info(
            "version committed",
            run=run.name,
            version=str(version),
            form=form_of(stored.manifest).value,
            bytes=stored.manifest.size_bytes,
            digest=stored.manifest.digest,
            seconds=round(seconds, 4),
        )
        self.retention_due.set()
        if form_of(stored.manifest) is Form.DELTA:
            self.dense_forms.wake(run)
        return pb.CommitVersionResponse(manifest=stored.manifest)

    async def _verify_and_install(
        self, run: Run, version: Version, announced: pb.Manifest, started: float
    ) -> StoredVersion:
        """Verify the pushed shards, build the version's directory, rename it to its visible name and tell the watchers."""
        uploads = run.uploads_of(version)
        base = _check_base(run, version, announced)
        base_version, holder = Version.from_proto(announced.base), object()
        if base_version in run.versions:
            run.ledger.hold(base_version, holder)
        try:
            manifest = await self.in_thread(complete_manifest, announced, uploads, base)
            manifest.commit_time.GetCurrentTime()
            assembled_bytes = 0 if is_loadable(manifest) else manifest.dense_bytes
            async with self.room_for(run, assembled_bytes, evict=True) if assembled_bytes else nullcontext():
                stored = await self.in_thread(run.store.commit, manifest, uploads, started)
                run.add_version(stored)
        except RefusedError:  # its base was found damaged in the meantime; a restart must not make it visible
            await self.in_thread(run.store.remove, version)
            raise
        finally:
            run.ledger.release(base_version, holder)
        return stored

    async def _make_room(self, run: Run, need: int) -> None:
        """Remove versions that nobody needs, the oldest of all runs first, until a file of `need` bytes fits.

        Every run keeps its newest version, the versions that its live replicas serve, and the versions that lead to these. So a
        run with many versions does not block the first version of another run.

        Raises:
            SluiceError: RESOURCE_EXHAUSTED; FAILED_PRECONDITION if it never fits.
        """
        most = self.config.max_bytes
        if most is not None and need > most:
            raise SluiceError.failed_precondition(
                "DISK_FULL", f"a file of {need} bytes never fits the {most} that weightsync.max_bytes allows: raise it"
            )
        if await self._lacking(run, need) > 0:
            for each in self:
                await self._retain_versions(each)
        while (lacking := await self._lacking(run, need)) > 0:
            if (oldest := self._oldest_evictable()) is not None:
                await self.delete(*oldest)
            elif not await self.dense_forms.stop_builds():
                raise _no_room(need, lacking)

    def _oldest_evictable(self) -> tuple[Run, Version] | None:
        """Return the version with the earliest commit among those that nobody needs; None if all are needed."""

        def commit_ns(found: tuple[Run, Version]) -> int:
            return found[0].versions[found[1]].manifest.commit_time.ToNanoseconds()

        now = self.clock()
        found = [(each, evictable[0]) for each in self if (evictable := each.ledger.evictable(now))]
        return min(found, key=commit_ns, default=None)

    @asynccontextmanager
    async def room_for(self, run: Run, need: int, *, evict: bool) -> AsyncIterator[None]:
        """Reserve `need` bytes for a file that the service makes for a run, for as long as the block lasts.

        With `evict`, versions that nobody needs are removed, as for a push; otherwise only versions that retention removes anyway.

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
        """Remove a version that nobody needs, if there is one; raise RefusedError IN_USE."""
        if run.ledger.delete(version, self.clock()):
            del run.versions[version]
            await self.in_thread(run.store.remove, version)
            log.info("version removed", run=run.name, version=str(version))

    async def discard_upload(self, run: Run, upload: Upload, ticket: object) -> None:
        """Drop the uploaded bytes of a shard, unless a newer stream than the ticket's continues the upload."""
        if await self.in_thread(upload.discard, ticket):
            run.uploads = {key: each for key, each in run.uploads.items() if each is not upload}

    async def drop_uploads(self, run: Run, version: Version) -> None:
        """Drop all uploads of a version."""
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
            idle = all(now - upload.active_at > _INCOMING_TTL_S for upload in run.uploads_of(version).values())
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

        Run it in the background: removing a version takes the disk about as long as writing one.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with self.clock.timeout(self.config.heartbeat_s):
                    await self.retention_due.wait()
            self.retention_due.clear()
            for run in self:
                HELD_BYTES.labels(run.name).set(run.bytes_held)
                try:
                    await self.retain(run)
                except OSError as error:  # the disk may recover; versions are served without retention
                    log.warning("retention failed", run=run.name, error=str(error))
            self._no_storage = await self._why_no_storage()

    async def _why_no_storage(self) -> str:
        """Return why no version could be pushed now; empty if one could."""
        for run in self:
            try:
                await self.in_thread(run.store.try_directory)
                lacking = await self._lacking(run, 0)
            except OSError as error:
                return f"storage for versions: {error.strerror or type(error).__name__}"
            if lacking > 0 and self._oldest_evictable() is None:
                return f"storage for versions: {lacking} bytes short, and every version that is kept is needed"
        return ""

    def waits_for(self) -> Iterator[str]:
        """Yield a message if the last check found no storage."""
        if self._no_storage:
            yield self._no_storage

    def scrape(self) -> Iterator[Metric]:
        """Yield the state of all runs as Prometheus metrics."""
        now, runs = self.clock(), list(self)
        newest = {run.name: run.ledger.newest or BASE for run in runs}
        epochs = {key: float(version.epoch) for key, version in newest.items()}
        yield gauge("sluice_weights_epoch", "Epoch of the newest version.", epochs, "run")
        numbers = {key: float(version.number) for key, version in newest.items()}
        yield gauge("sluice_weights_number", "Number of the newest version.", numbers, "run")
        versions = {run.name: float(len(run.versions)) for run in runs}
        yield gauge("sluice_weights_versions", "Versions that can be pulled.", versions, "run")
        uploads = {run.name: float(len(run.uploads)) for run in runs}
        yield gauge("sluice_weights_uploads", "Shards that are being pushed.", uploads, "run")
        watchers = {run.name: float(run.watchers) for run in runs}
        yield gauge("sluice_weights_watchers", "Engines and relays that watch for versions.", watchers, "run")
        behind = {
            (run.name, row.replica): float(row.versions_behind if row.HasField("version") else len(run.versions))
            for run in runs
            for row in run.describe_replicas(now)
        }
        text = "Versions held here that are newer than what a replica or a relay serves."
        yield gauge("sluice_weights_replica_lag", text, behind, "run", "replica")

    async def close(self) -> None:
        """Wait for commits, end the work in the background, and unlock the directories for other processes."""
        if self._commits:
            await asyncio.wait(self._commits)
        await self.dense_forms.close()
        await asyncio.to_thread(self.threads.shutdown)
        for run in self:
            for upload in run.uploads.values():
                upload.close()
            run.store.close()


def _compare(known: StoredVersion, announced: pb.Manifest) -> None:
    """Check that a repeated commit names the same content: compare the version's digest, or without one, the shards' digests."""
    if announced.digest:
        same = announced.digest in {known.manifest.digest, known.pushed.digest}
    else:
        digests = {shard.name: shard.digest for shard in known.pushed.shards}
        same = {shard.name: shard.digest or digests.get(shard.name) for shard in announced.shards} == digests
    if not same:
        raise SluiceError.already_exists(
            "OTHER_DIGEST",
            f"version {known.version} is committed with digest {known.manifest.digest}: a version never changes,"
            " commit the next number or begin a new epoch",
        )


def _check_base(run: Run, version: Version, announced: pb.Manifest) -> pb.Manifest | None:
    """Check that a version may be committed. If it is a delta, return the manifest of its base.

    Raises:
        RefusedError, ManifestError: if the ledger refuses it, or the kind and the base do not go together.
    """
    form = form_of(announced)
    if announced.HasField("base") == (form is Form.DENSE):
        raise ManifestError("a dense version stands alone, a delta or an adapter names its base: set base accordingly")
    base = Version.from_proto(announced.base) if announced.HasField("base") else None
    run.ledger.check(version, base, is_adapter=form is Form.ADAPTER)
    return run.versions[base].manifest if base is not None and form is Form.DELTA else None


def _name_of(resource: str) -> str:
    try:
        return parse_run(resource)
    except BadNameError as error:
        raise SluiceError.invalid_argument("run", str(error)) from error


def _no_room(need: int, lacking: int) -> SluiceError:
    return SluiceError.resource_exhausted(
        "DISK_FULL",
        f"a file of {need} bytes lacks {lacking} bytes of room (weightsync.max_bytes, weightsync.min_free_bytes), and every"
        " version is in use: free disk space, raise max_bytes, or lower keep",
        RETRY_AFTER_S,
    )
