"""Keeps one run of a relay at the newest version of the service behind it, and forwards replicas' reports to that."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable

import grpc
import structlog

from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import BASE, Version
from weightsync.backoff import Backoff
from weightsync.format.names import run_resource
from weightsync.host import host_id
from weightsync.metrics import RELAY_LAG
from weightsync.receive.pull import PullLimits, pull_call
from weightsync.receive.watch import VersionWatch
from weightsync.relay.fetch import FetchError, fetch_version
from weightsync.service.chain import is_reachable, newest_model
from weightsync.service.run import Run
from weightsync.service.runs import Runs

__all__ = ["Follower", "Forwarder"]

_PATH_DEADLINE_S = 30.0
_REPORT_DEADLINE_S = 10.0
_SHARE_OF_LEASE = 1 / 3
"""A lease is renewed after a third of it, so that one lost report does not end it."""

_MOST_REPLICAS = 4096
"""Reports that may wait; beyond it the oldest is dropped: its replica reports again within a third of its lease."""

log = structlog.get_logger(__name__)


class Follower:
    """One run: watch, pull each announced form once, commit it here, and report upstream what this relay gives out.

    Args:
        runs: All runs of this service.
        run: The run.
        channel: To the service behind.
        limits: How long pulls wait.

    Attributes:
        forwarder: Forwards the reports of this relay and of its replicas.
    """

    def __init__(self, runs: Runs, run: Run, channel: grpc.aio.Channel, limits: PullLimits) -> None:
        self._runs, self._run, self._limits = runs, run, limits
        self._stub = weightsync_pb2_grpc.WeightDeliveryServiceStub(channel)
        self._pull = pull_call(channel)
        self.forwarder = Forwarder(self._stub, runs.clock, runs.config.lease_s)
        self._announcement = asyncio.Event()
        self._news = asyncio.Event()
        self._fetching: Version | None = None
        self._error = ""
        self._watch: VersionWatch | None = None

    @property
    def connected(self) -> bool:
        """Return whether the service behind answers."""
        return self._watch is not None and self._watch.connected

    async def run_forever(self, name: str, address: str) -> None:
        """Follow until cancelled.

        Args:
            name: This relay's name as a replica.
            address: Where it gives versions out.
        """
        self._watch = VersionWatch(self._stub, run_resource(self._run.name), name, self._announcement.set)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch.run_forever())
            tasks.create_task(self.forwarder.run_forever())
            tasks.create_task(self._report_forever(name, address))
            tasks.create_task(self._follow(self._watch))

    async def _follow(self, watch: VersionWatch) -> None:
        """Fetch what is announced; after a failure, try again when the pause is over or a newer version is announced."""
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
                async with asyncio.timeout(pause_s):
                    await self._announcement.wait()

    async def _try(self, announced: pb.Manifest) -> bool:
        """Bring the run to an announced version; return whether that succeeded."""
        try:
            for manifest in await self._path(announced):
                self._fetching = Version.from_proto(manifest.version)
                if self._fetching not in self._run.versions:
                    self._measure_lag(announced)
                    self._news.set()
                    await fetch_version(self._runs, self._run, self._pull, manifest, self._limits)
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
            held = None  # a delta on this disk is damaged: nothing can build on it any more
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
        call = self._stub.GetUpdatePath(request, timeout=_PATH_DEADLINE_S)
        try:
            return [response.manifest async for response in call]
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:  # an older release, which knows dense forms alone
                return [announced]
            raise

    def _measure_lag(self, announced: pb.Manifest | None) -> None:
        newest = self._run.ledger.newest
        if announced is None:
            return
        there = Version.from_proto(announced.version)
        same_epoch = newest is not None and newest.epoch == there.epoch
        behind = there.number - newest.number if newest is not None and same_epoch else there.number
        RELAY_LAG.labels(self._run.name).set(0 if newest is not None and newest >= there else max(behind, 1))

    async def _report_forever(self, name: str, address: str) -> None:
        """Report what this relay gives out, at each change and often enough to keep its lease."""
        while True:
            self._news.clear()
            self.forwarder.put(self._report(name, address))
            lease_s = min(self.forwarder.lease_s, self._runs.config.lease_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.1, lease_s * _SHARE_OF_LEASE)):
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
        stub: The service behind.
        clock: Seconds, monotonic.
        own_lease_s: Seconds that this service grants its replicas; an older report is not forwarded.

    Attributes:
        lease_s: Seconds that the service behind granted last; infinite before its first answer.
    """

    def __init__(
        self, stub: weightsync_pb2_grpc.WeightDeliveryServiceAsyncStub, clock: Callable[[], float], own_lease_s: float
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
        while len(self._waiting) > _MOST_REPLICAS:
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
                await asyncio.sleep(backoff.fail())

    async def _send_all(self) -> bool:
        """Send what waits, oldest first; return False if the service behind could not be reached."""
        while self._waiting:
            replica = next(iter(self._waiting))
            reported_at, request = self._waiting.pop(replica)
            if self._clock() - reported_at > min(self.lease_s, self._own_lease_s):
                continue  # its replica may be gone by now
            try:
                response = await self._stub.ReportVersion(request, timeout=_REPORT_DEADLINE_S)
            except grpc.aio.AioRpcError as error:
                failure = SluiceError.from_rpc(error)
                if failure.code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
                    self._waiting = {replica: (reported_at, request), **self._waiting}
                    return False
                log.warning("report not forwarded", replica=replica, reason=str(failure))
                continue
            self.lease_s = response.lease.ToTimedelta().total_seconds() or math.inf
        return True
