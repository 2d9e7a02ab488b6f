"""Keeps one run of a relay at the newest version of the service behind it."""

from __future__ import annotations

import asyncio
import contextlib

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
from weightsync.relay.forward import Forwarder
from weightsync.service.chain import is_reachable, newest_model
from weightsync.service.runs import Run, Runs

__all__ = ["Follower"]

_PATH_DEADLINE_S = 30.0
_SHARE_OF_LEASE = 1 / 3
"""A lease is renewed after a third of it, so that one lost report does not end it."""

log = structlog.get_logger(__name__)


class Follower:
    """One run: watches, pulls each announced form once, commits it here, and says upstream what this relay gives out.

    Args:
        runs: All runs of this service.
        run: The run.
        channel: To the service behind.
        limits: How long pulls wait.
    """

    def __init__(self, runs: Runs, run: Run, channel: grpc.aio.Channel, limits: PullLimits) -> None:
        self._stub = weightsync_pb2_grpc.WeightDeliveryServiceStub(channel)
        self._pull = pull_call(channel)
        self.forwarder = Forwarder(self._stub, runs.clock, runs.config.lease_s)
        self._runs, self._run, self._limits = runs, run, limits
        self._wake = asyncio.Event()
        self._told = asyncio.Event()
        self._staging: Version | None = None
        self._error = ""
        self._watch: VersionWatch | None = None

    @property
    def connected(self) -> bool:
        """Whether the service behind answers."""
        return self._watch is not None and self._watch.connected

    async def run_forever(self, name: str, address: str) -> None:
        """Follow until cancelled.

        Args:
            name: This relay's name as a replica.
            address: Where it gives versions out.
        """
        self._watch = VersionWatch(self._stub, run_resource(self._run.name), name, self._wake.set)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch.run_forever())
            tasks.create_task(self.forwarder.run_forever())
            tasks.create_task(self._report_forever(name, address))
            tasks.create_task(self._follow(self._watch))

    async def _follow(self, watch: VersionWatch) -> None:
        backoff = Backoff()
        while True:
            self._wake.clear()
            announced = watch.newest
            pause_s: float | None = None
            if announced is not None and Version.from_proto(announced.version) not in self._run.versions:
                if await self._try(announced):
                    backoff.succeed()
                else:
                    pause_s = backoff.fail()
            self._measure_lag(announced)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):  # until the next announcement, if nothing failed
                    await self._wake.wait()

    async def _try(self, announced: pb.Manifest) -> bool:
        """Bring the run to an announced version; False if that failed, which the next round repeats after a pause."""
        try:
            for manifest in await self._path(announced):
                self._staging = Version.from_proto(manifest.version)
                if self._staging not in self._run.versions:
                    self._measure_lag(announced)
                    self._told.set()
                    await fetch_version(self._runs, self._run, self._pull, manifest, self._limits)
                    log.info("version relayed", run=self._run.name, version=str(self._staging))
        except (FetchError, SluiceError, grpc.aio.AioRpcError, OSError) as error:
            reason = SluiceError.from_rpc(error) if isinstance(error, grpc.aio.AioRpcError) else error
            self._error = f"version {Version.from_proto(announced.version)}: {reason}"
            log.warning("version not relayed, those before are given out", run=self._run.name, reason=self._error)
            return False
        finally:
            self._staging = None
            self._told.set()
        self._error = ""
        return True

    async def _path(self, announced: pb.Manifest) -> list[pb.Manifest]:
        """The forms to take, in the order in which they build on each other."""
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
        """Say what this relay gives out: at each change, and often enough to keep the lease."""
        while True:
            self._told.clear()
            self.forwarder.put(self._report(name, address))
            lease_s = min(self.forwarder.lease_s, self._runs.config.lease_s)
            try:
                async with asyncio.timeout(max(0.1, lease_s * _SHARE_OF_LEASE)):
                    await self._told.wait()
            except TimeoutError:
                continue

    def _report(self, name: str, address: str) -> pb.ReportVersionRequest:
        newest = self._run.ledger.newest or BASE
        return pb.ReportVersionRequest(
            run=run_resource(self._run.name),
            replica=name,
            version=(self._staging or newest).to_proto(),
            phase=pb.REPLICA_PHASE_STAGED if self._staging else pb.REPLICA_PHASE_SERVING,
            error=self._error,
            serving=newest.to_proto(),
            relay_address=address,
            host=host_id(),
            watchers=self._run.watchers,
        )
