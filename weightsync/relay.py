"""A weight service that takes its versions from another one: same contract towards engines, no pushes.

In each run it watches the upstream service, pulls each announced form once with the engines' pull loop, commits it to its own
store as if it had been pushed, and forwards its replicas' reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

import grpc
import structlog

from sluice.backoff import Backoff
from sluice.clock import Clock
from sluice.host_files import host_id
from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import BASE, Version
from weightsync.format.manifest import ManifestError, check_manifest, run_resource
from weightsync.format.safetensors import LayoutError
from weightsync.metrics import RELAY_LAG, RELAYED_BYTES
from weightsync.receive.pull import ChunkSink, PullError, PullLimits, pull_shard
from weightsync.receive.sources import PATH_DEADLINE_S, REPORT_DEADLINE_S, VersionWatch, behind, pull_call, renewal_s
from weightsync.service.chain import is_reachable, newest_model
from weightsync.service.runs import RELAY_PREFIX, Run, Runs
from weightsync.service.upload import OffsetError, SupersededError, Upload, translated

_LONGEST_ADDRESS = 120
"""Longest address that fits into a replica's name."""

_QUESTION_S = 5.0
"""Seconds that the upstream service has to say whether it has a run."""

Pull: TypeAlias = Callable[[pb.Manifest, pb.Shard, ChunkSink], Awaitable[None]]
"""`pull_shard` from some service."""

MOST_REPLICAS_BEHIND = 1 << 17
"""Most reports that may wait, more than any `max_replicas` that one machine could serve. Beyond that the oldest report is
dropped, because its replica reports again within a third of its lease."""

_MOST_RESTARTS = 3
"""How often a shard is pulled again from its beginning because its bytes differ from its manifest."""

log = structlog.get_logger(__name__)


class RelayCycleError(Exception):
    """Relays feed each other, so that no version can ever reach them."""


def relay_name(address: str) -> str:
    """Return the name under which a relay reports itself."""
    return f"{RELAY_PREFIX}{address[-_LONGEST_ADDRESS:]}"


class Relay:
    """The upstream service of a relay. The relay follows it in every run that a client asks for, and forwards the replicas' reports to it.

    Args:
        channel: To that service, with the admin role, which a relay needs to report as one.
        target: Its address, for messages.
    """

    continues_files = False

    def __init__(self, channel: grpc.aio.Channel, target: str) -> None:
        self.target = target
        self._channel = channel
        self._followers: dict[str, Follower] = {}
        self._group: asyncio.TaskGroup | None = None
        self._following: list[asyncio.Task[None]] = []
        self._address = ""
        self._cycle = asyncio.Event()

    async def run_forever(self, address: str) -> None:
        """Follow until cancelled; engines reach this relay at `address`.

        Raises:
            RelayCycleError: if the chain of upstream services leads back to this relay.
        """
        self._address = address
        try:
            async with asyncio.TaskGroup() as self._group:
                for follower in self._followers.values():
                    self._begin(self._group, follower)
                await self._cycle.wait()
                for task in self._following:
                    task.cancel()
        finally:
            self._group = None
        raise RelayCycleError(
            f"{self.target} takes its versions from this relay, {address}: set weightsync.upstream of one of them"
            " to the service that the trainer pushes to"
        )

    async def has(self, resource: str) -> bool:
        """Return whether the upstream service has the run named ``runs/{run}``.

        Raises:
            SluiceError: the error of the upstream service, or UNAVAILABLE.
        """
        stub = weightsync_pb2_grpc.WeightDeliveryServiceStub(self._channel)
        try:
            await stub.ListSources(pb.ListSourcesRequest(run=resource), timeout=_QUESTION_S)
        except grpc.aio.AioRpcError as error:
            failure = SluiceError.from_rpc(error)
            if failure.code is grpc.StatusCode.NOT_FOUND:
                return False
            raise failure from error
        return True

    def follow(self, runs: Runs, run: Run) -> None:
        """From now on, copy the versions of the upstream service into a run."""
        self._followers[run.name] = Follower(runs, run, self._channel)
        if self._group is not None:
            self._begin(self._group, self._followers[run.name])

    def report(self, run: Run, request: pb.ReportVersionRequest) -> None:
        """Forward a replica's report.

        Raises:
            SluiceError: RELAY_CYCLE, if it is this relay's own report, which came back through the upstream service.
        """
        if self._address and request.replica == relay_name(self._address):
            self._cycle.set()
            raise SluiceError.failed_precondition(
                "RELAY_CYCLE", f"relay {self._address} got its own report: its upstream {self.target} leads back to it"
            )
        self._followers[run.name].forwarder.put(request)

    def lease_s(self, run: Run) -> float:
        """Return the lease in seconds that the upstream service grants; infinite before its first answer."""
        follower = self._followers.get(run.name)
        return math.inf if follower is None else follower.forwarder.lease_s

    def describe(self, run: Run) -> None:
        """Return None: the upstream is not an object store."""

    def connected(self, run: str) -> bool:
        """Return whether the upstream service answers for the run."""
        return run in self._followers and self._followers[run].connected

    def _begin(self, group: asyncio.TaskGroup, follower: Follower) -> None:
        self._following.append(group.create_task(follower.run_forever(self._address)))


class Follower:
    """One run: watch, pull each announced form once, commit it here, and report upstream what this relay gives out."""

    def __init__(self, runs: Runs, run: Run, channel: grpc.aio.Channel) -> None:
        self._runs, self._run = runs, run
        self._stub = weightsync_pb2_grpc.WeightDeliveryServiceStub(channel)
        self._pull = partial(pull_shard, pull_call(channel), threads=runs.threads, limits=PullLimits())
        self.forwarder = Forwarder(self._stub, runs.clock, runs.config.lease_s)
        self._announcement = asyncio.Event()
        self._news = asyncio.Event()
        self._fetching: Version | None = None
        self._error = ""
        self._watch: VersionWatch | None = None

    @property
    def connected(self) -> bool:
        """Return whether the upstream service answers."""
        return self._watch is not None and self._watch.connected

    async def run_forever(self, address: str) -> None:
        """Follow until cancelled; engines reach this relay at `address`."""
        run, name = run_resource(self._run.name), relay_name(address)
        self._watch = VersionWatch(self._stub.WatchVersions, run, name, self._announcement.set, clock=self._runs.clock)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch.run_forever())
            tasks.create_task(self.forwarder.run_forever())
            tasks.create_task(self._report_forever(name, address))
            tasks.create_task(self._follow(self._watch))

    async def _follow(self, watch: VersionWatch) -> None:
        """Fetch each announced version. After a failure, try again when the pause is over or a newer version is announced."""
        backoff = Backoff()
        while True:
            self._announcement.clear()
            announced = watch.newest
            pause_s: float | None = None
            if announced is not None and Version.from_proto(announced.version) not in self._run.versions:
                if await self._try(announced):
                    backoff.succeed()
                else:
                    pause_s = backoff.fail()
            self._measure_lag(announced)
            with contextlib.suppress(TimeoutError):
                async with self._runs.clock.timeout(pause_s):
                    await self._announcement.wait()

    async def _try(self, announced: pb.Manifest) -> bool:
        """Bring the run to an announced version; return whether that succeeded."""
        try:
            for manifest in await self._path(announced):
                self._fetching = Version.from_proto(manifest.version)
                if self._fetching not in self._run.versions:
                    self._measure_lag(announced)
                    self._news.set()
                    await fetch_version(self._runs, self._run, manifest, self._pull)
                    log.info("version relayed", run=self._run.name, version=str(self._fetching))
        except (FetchError, SluiceError, grpc.aio.AioRpcError, OSError) as error:
            reason = SluiceError.from_rpc(error) if isinstance(error, grpc.aio.AioRpcError) else error
            self._error = f"version {Version.from_proto(announced.version)}: {reason}"
            log.warning("version not relayed, the older ones are given out", run=self._run.name, reason=self._error)
            return False
        finally:
            self._fetching = None
            self._news.set()
        self._error = ""
        return True

    async def _path(self, announced: pb.Manifest) -> list[pb.Manifest]:
        """Return the forms to take, in the order in which they build on each other."""
        versions = self._run.ledger.committed
        held = newest_model(versions)
        if held is not None and not is_reachable(versions, held):
            held = None  # a delta on this disk is damaged, so no other delta can build on it
        base = Version.from_proto(announced.base)
        if announced.kind == pb.VERSION_KIND_ADAPTER:
            if base == BASE or base in versions:
                return [announced]
            return [*await self._ask_path(announced, base, held), announced]
        if announced.kind == pb.VERSION_KIND_DELTA and held == base:
            return [announced]
        return await self._ask_path(announced, Version.from_proto(announced.version), held)

    async def _ask_path(self, announced: pb.Manifest, version: Version, held: Version | None) -> list[pb.Manifest]:
        request = pb.GetUpdatePathRequest(
            run=announced.run, version=version.to_proto(), held=None if held is None else held.to_proto()
        )
        call = self._stub.GetUpdatePath(request, timeout=PATH_DEADLINE_S)
        try:
            return [response.manifest async for response in call]
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:  # an older release, which knows only dense forms
                return [announced]
            raise

    def _measure_lag(self, announced: pb.Manifest | None) -> None:
        if announced is not None:
            there = Version.from_proto(announced.version)
            lag = behind(self._run.ledger.newest, there)
            RELAY_LAG.labels(self._run.name).set(max(1, there.number) if lag == math.inf else lag)

    async def _report_forever(self, name: str, address: str) -> None:
        """Report what this relay gives out, at each change and often enough to keep its lease."""
        while True:
            self._news.clear()
            self.forwarder.put(self._report(name, address))
            lease_s = min(self.forwarder.lease_s, self._runs.config.lease_s)
            with contextlib.suppress(TimeoutError):
                async with self._runs.clock.timeout(renewal_s(lease_s)):
                    await self._news.wait()

    def _report(self, name: str, address: str) -> pb.ReportVersionRequest:
        newest = self._run.ledger.newest or BASE
        return pb.ReportVersionRequest(
            run=run_resource(self._run.name),
            replica=name,
            version=(self._fetching or newest).to_proto(),
            phase=pb.REPLICA_PHASE_STAGED if self._fetching else pb.REPLICA_PHASE_SERVING,
            error=self._error,
            serving=newest.to_proto(),
            relay_address=address,
            host=host_id(),
            watchers=self._run.watchers,
        )


class Forwarder:
    """Forwards the reports of one run: the latest of each replica, in the background.

    Args:
        stub: The upstream service.
        clock: Decides when to try again, and which reports are too old.
        own_lease_s: Seconds that this service grants its replicas; an older report is not forwarded.

    Attributes:
        lease_s: Lease in seconds that the upstream service granted last. Infinite before its first answer.
    """

    def __init__(
        self, stub: weightsync_pb2_grpc.WeightDeliveryServiceAsyncStub, clock: Clock, own_lease_s: float
    ) -> None:
        self.lease_s = math.inf
        self._stub = stub
        self._clock = clock
        self._own_lease_s = own_lease_s
        self._waiting: dict[str, tuple[float, pb.ReportVersionRequest]] = {}
        self._news = asyncio.Event()

    def __len__(self) -> int:
        """Return the number of reports that wait."""
        return len(self._waiting)

    def put(self, request: pb.ReportVersionRequest) -> None:
        """Forward a report soon; it replaces an older one of the same replica. Never waits and never fails."""
        self._waiting.pop(request.replica, None)
        self._waiting[request.replica] = (self._clock(), request)
        while len(self._waiting) > MOST_REPLICAS_BEHIND:
            del self._waiting[next(iter(self._waiting))]
        self._news.set()

    async def run_forever(self) -> None:
        """Send until cancelled."""
        backoff = Backoff()
        while True:
            self._news.clear()
            if await self._send_all():
                backoff.succeed()
                await self._news.wait()
            else:
                await self._clock.sleep(backoff.fail())

    async def _send_all(self) -> bool:
        """Send the waiting reports, oldest first; return False if the upstream service could not be reached."""
        while self._waiting:
            replica = next(iter(self._waiting))
            reported_at, request = self._waiting.pop(replica)
            if self._clock() - reported_at > min(self.lease_s, self._own_lease_s):
                continue  # its replica may be gone by now
            try:
                response = await self._stub.ReportVersion(request, timeout=REPORT_DEADLINE_S)
            except grpc.aio.AioRpcError as error:
                failure = SluiceError.from_rpc(error)
                if failure.code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
                    self._waiting = {replica: (reported_at, request), **self._waiting}
                    return False
                log.warning("report not forwarded", replica=replica, reason=str(failure))
                continue
            self.lease_s = response.lease.ToTimedelta().total_seconds() or math.inf
        return True


class FetchError(Exception):
    """The version could not be fetched."""


async def fetch_version(runs: Runs, run: Run, manifest: pb.Manifest, pull: Pull) -> None:
    """Pull every shard of a form as it is stored, then commit the form. Bytes that are here already are not pulled again.

    Raises:
        FetchError: if the other service refuses the form, cannot be reached in several attempts, or sends bytes that differ
            from the manifest.
        SluiceError: as the contract says of CommitVersion, and for a full disk.
    """
    try:
        await runs.in_thread(check_manifest, manifest)  # before the names of its shards are used as file names
    except ManifestError as error:
        raise FetchError(f"the manifest of {Version.from_proto(manifest.version)}: {error}") from error
    for shard in manifest.shards:
        await _fetch_shard(runs, run, manifest, shard, pull)
    await runs.commit(run, manifest)


async def _fetch_shard(runs: Runs, run: Run, manifest: pb.Manifest, shard: pb.Shard, pull: Pull) -> None:
    """Pull one shard. Start again from byte 0 if the file is not the announced one."""
    version = Version.from_proto(manifest.version)
    backoff = Backoff()
    while True:
        upload = run.uploads.get((version, shard.name))
        if upload is None or upload.announced.digest != shard.digest:  # retention may have dropped it
            upload = await runs.begin_upload(run, version, shard)
        if upload.complete:
            return
        ticket, _ = await runs.in_thread(upload.take_over)
        try:
            await pull(manifest, shard, _UploadSink(runs, run, upload, ticket))
            await runs.in_thread(upload.finish, ticket)
            if shard.digest in {"", upload.digest}:
                return
            reason = f"the file has digest {upload.digest}, announced was {shard.digest}"
        except PullError as error:
            raise FetchError(str(error)) from error
        except (LayoutError, OffsetError, SupersededError) as error:
            reason = str(error)
        except OSError as error:
            await runs.discard_upload(run, upload, ticket)
            raise translated(error) from error
        await runs.discard_upload(run, upload, ticket)
        pause_s = backoff.fail()
        if backoff.failures > _MOST_RESTARTS:
            raise FetchError(f"shard {shard.name} came {backoff.failures} times, and never as announced: {reason}")
        log.warning("shard is pulled again", shard=shard.name, reason=reason)
        await asyncio.sleep(pause_s)


class _UploadSink:
    """Puts pulled chunks into an upload."""

    def __init__(self, runs: Runs, run: Run, upload: Upload, ticket: object) -> None:
        self._runs, self._upload, self._ticket = runs, upload, ticket
        self._pulled = RELAYED_BYTES.labels(run.name)

    @property
    def position(self) -> int:
        """Return the next byte that is wanted."""
        return self._upload.stored

    def feed(self, offset: int, data: memoryview) -> None:
        """Store the next bytes.

        Raises:
            SupersededError, OffsetError, LayoutError, OSError: as `Upload.append`.
        """
        self._upload.append(self._ticket, offset, data)
        self._upload.active_at = self._runs.clock()
        self._pulled.inc(len(data))
