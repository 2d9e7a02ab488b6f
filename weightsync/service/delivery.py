"""The side of the service that gives versions out: watch, pull, report."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import Version
from weightsync.host import host_id
from weightsync.service.runs import Run, Runs
from weightsync.service.sending import send_file, write_within
from weightsync.service.source_list import RELAY_PREFIX
from weightsync.service.stored import StoredForm
from weightsync.service.update_path import describe_step, path_to, pulled_form

__all__ = ["WeightDeliveryServicer"]

_MOST_REPLICA_CHARACTERS = 128
_MOST_ERROR_CHARACTERS = 2000


class WeightDeliveryServicer(weightsync_pb2_grpc.WeightDeliveryServiceServicer):
    """Serves `sluice.v1.WeightDeliveryService`.

    Args:
        runs: What it gives out.
        require_admin: Raises `SluiceError` where a call comes without the admin's token: engines load what a relay gives
            them, so not everybody may call itself one.
    """

    def __init__(
        self, runs: Runs, require_admin: Callable[[grpc.aio.ServicerContext[Any, Any]], None] | None = None
    ) -> None:
        self._runs = runs
        self._require_admin = require_admin
        self._watchers = 0

    async def WatchVersions(  # noqa: N802 - gRPC's name
        self,
        request: pb.WatchVersionsRequest,
        context: grpc.aio.ServicerContext[pb.WatchVersionsRequest, pb.WatchVersionsResponse],
    ) -> AsyncIterator[pb.WatchVersionsResponse]:
        """Announce the newest version, now and whenever there is a newer one.

        A watcher has no queue: whoever is slow finds the newest when it comes back.
        """
        run = await self._runs.find(request.run)
        known = Version.from_proto(request.known) if request.HasField("known") else None
        if self._watchers >= self._runs.config.max_watchers:
            raise SluiceError.resource_exhausted(
                "TOO_MANY_WATCHERS",
                f"{self._watchers} replicas watch, the most that this service takes (weightsync.max_watchers)",
                self._runs.config.heartbeat_s,
            )
        self._watchers += 1
        run.watchers += 1
        try:
            async for response in _announce(run, known, self._runs.config.heartbeat_s):
                yield response
        finally:
            self._watchers -= 1
            run.watchers -= 1

    async def ListSources(  # noqa: N802 - gRPC's name
        self,
        request: pb.ListSourcesRequest,
        context: grpc.aio.ServicerContext[pb.ListSourcesRequest, pb.ListSourcesResponse],
    ) -> pb.ListSourcesResponse:
        """Name this service and its live relays."""
        run = await self._runs.find(request.run)
        newest = run.ledger.newest
        own = pb.WeightSource(
            host=host_id(), watchers=run.watchers, newest=None if newest is None else newest.to_proto()
        )
        relays = run.relays.sources(run.ledger.replicas(self._runs.clock()))
        return pb.ListSourcesResponse(sources=[own, *relays])

    async def PullWeights(  # type: ignore[override]  # noqa: N802 - writes itself, so that each write has a deadline
        self,
        request: pb.PullWeightsRequest,
        context: grpc.aio.ServicerContext[pb.PullWeightsRequest, pb.PullWeightsResponse],
    ) -> None:
        """Send bytes of one shard."""
        run = await self._runs.find(request.run)
        version = Version.from_proto(request.version)
        base = Version.from_proto(request.base) if request.HasField("base") else None
        form = pulled_form(run, version, base)
        path, end = _find_range(form, request)
        with self._held(run, [version]):
            sums = form.sums_of(request.shard)
            await send_file(self._runs, path, sums, context, begin=request.offset, end=end)

    async def GetUpdatePath(  # type: ignore[override]  # noqa: N802 - writes itself, so that each write has a deadline
        self,
        request: pb.GetUpdatePathRequest,
        context: grpc.aio.ServicerContext[pb.GetUpdatePathRequest, pb.GetUpdatePathResponse],
    ) -> None:
        """Send the manifests that lead to a version; its forms stay until they are sent, and a little longer."""
        run = await self._runs.find(request.run)
        wanted = Version.from_proto(request.version) if request.HasField("version") else None
        held = Version.from_proto(request.held) if request.HasField("held") else None
        path = path_to(run, wanted, held)
        with self._held(run, [step.version for step in path]):
            for step in path:
                response = await self._runs.in_thread(describe_step, run, step)
                await write_within(context, response, self._runs.config.chunk_idle_s)

    @contextmanager
    def _held(self, run: Run, versions: list[Version]) -> Iterator[None]:
        """Keep versions while they are sent, and from retention until the caller comes back for their next part."""
        holder = object()
        for version in versions:
            run.ledger.hold(version, holder)
        try:
            yield
        finally:
            until = self._runs.clock() + self._runs.config.linger_s
            for version in versions:
                run.ledger.release(version, holder)
                run.ledger.linger(version, until)

    async def ReportVersion(  # noqa: N802 - gRPC's name
        self,
        request: pb.ReportVersionRequest,
        context: grpc.aio.ServicerContext[pb.ReportVersionRequest, pb.ReportVersionResponse],
    ) -> pb.ReportVersionResponse:
        """Renew a replica's lease."""
        if not 0 < len(request.replica) <= _MOST_REPLICA_CHARACTERS:
            raise SluiceError.invalid_argument("replica", f"give a name of 1 to {_MOST_REPLICA_CHARACTERS} characters")
        if request.phase == pb.REPLICA_PHASE_UNSPECIFIED:
            raise SluiceError.invalid_argument("phase", "say what became of the version")
        names_relay = bool(request.relay_address) or request.replica.startswith(RELAY_PREFIX)
        if names_relay and self._require_admin is not None:
            self._require_admin(context)
        run = await self._runs.find(request.run)
        about = Version.from_proto(request.version)
        serving = Version.from_proto(request.serving) if request.HasField("serving") else None
        lease_s = self._runs.config.lease_s
        if self._runs.upstream is not None:
            self._runs.upstream.reported(run, request)
            lease_s = min(lease_s, self._runs.upstream.lease_s(run))
        self._check_room(run, request.replica)
        run.relays.note(request)
        run.ledger.report(
            request.replica,
            serving=about if request.phase == pb.REPLICA_PHASE_SERVING else serving,
            staged=about if request.phase == pb.REPLICA_PHASE_STAGED else None,
            error=request.error[:_MOST_ERROR_CHARACTERS],
            now=self._runs.clock(),
            lease_s=lease_s,
        )
        live = run.ledger.replicas(self._runs.clock())
        run.timings = {name: timings for name, timings in run.timings.items() if name in live}
        if request.HasField("timings"):
            run.timings[request.replica] = request.timings
        response = pb.ReportVersionResponse()
        response.lease.FromNanoseconds(int(lease_s * 1e9))
        return response

    def _check_room(self, run: Run, replica: str) -> None:
        live = run.ledger.replicas(self._runs.clock())
        if replica not in live and len(live) >= self._runs.config.max_watchers:
            raise SluiceError.resource_exhausted(
                "TOO_MANY_REPLICAS",
                f"{len(live)} replicas report, the most that this service takes (weightsync.max_watchers)",
                self._runs.config.heartbeat_s,
            )


async def _announce(run: Run, known: Version | None, heartbeat_s: float) -> AsyncIterator[pb.WatchVersionsResponse]:
    fresh = True
    while True:
        changed, newest = run.changed, run.ledger.newest
        if newest is not None and (known is None or newest > known):
            known = newest
            yield pb.WatchVersionsResponse(manifest=run.versions[newest].manifest)
            fresh = False
            continue
        if fresh:  # tells the watcher at once that it is heard
            yield pb.WatchVersionsResponse()
            fresh = False
            continue
        try:
            async with asyncio.timeout(heartbeat_s):
                await changed.wait()
        except TimeoutError:
            fresh = True


def _find_range(form: StoredForm, request: pb.PullWeightsRequest) -> tuple[Path, int]:
    """The shard's file and the end of the range that is wanted."""
    path = form.files.get(request.shard)
    if path is None:
        raise SluiceError.not_found(
            "NO_SUCH_SHARD",
            f"version {Version.from_proto(request.version)} has no shard {request.shard!r}; it has"
            f" {', '.join(list(form.files)[:5])}",
        )
    size = next(shard.size_bytes for shard in form.manifest.shards if shard.name == request.shard)
    end = request.offset + request.length if request.length else size
    if request.offset > size or end > size:
        raise SluiceError.invalid_argument("offset", f"the range ends beyond the shard's {size} bytes")
    return path, end
