"""The side of the service that gives versions out: watch, find the way to a version, pull, report."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import grpc

from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import Version
from weightsync.format.chunks import ChunkSums, fill_chunk, next_cut
from weightsync.host import host_id
from weightsync.service.chain import VersionForm, damaged_on_the_way, find_path
from weightsync.service.run import RELAY_PREFIX, Run
from weightsync.service.runs import Runs
from weightsync.service.stored import StoredForm

__all__ = ["WeightDeliveryServicer"]

Q = TypeVar("Q")
R = TypeVar("R")

_MOST_REPLICA_CHARACTERS = 128


class WeightDeliveryServicer(weightsync_pb2_grpc.WeightDeliveryServiceServicer):
    """Serves `sluice.v1.WeightDeliveryService`.

    Args:
        runs: The runs of this service.
        require_admin: Raises `SluiceError` if a call comes without the admin's token. Engines load what a relay gives
            them, so only the admin may report as one.
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

        A watcher has no queue: a slow one finds the newest version when it reads again.
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

    async def GetUpdatePath(  # type: ignore[override]  # noqa: N802 - writes itself, so that each write has a deadline
        self,
        request: pb.GetUpdatePathRequest,
        context: grpc.aio.ServicerContext[pb.GetUpdatePathRequest, pb.GetUpdatePathResponse],
    ) -> None:
        """Send the manifests that lead to a version. Its forms stay until they are sent, and a little longer."""
        run = await self._runs.find(request.run)
        wanted = Version.from_proto(request.version) if request.HasField("version") else None
        held = Version.from_proto(request.held) if request.HasField("held") else None
        path = _find_path(run, wanted, held)
        with self._held(run, [step.version for step in path]):
            for step in path:
                response = await self._runs.in_thread(_describe_step, run, step)
                await self._write(context, response)

    async def PullWeights(  # type: ignore[override]  # noqa: N802 - writes itself, so that each write has a deadline
        self,
        request: pb.PullWeightsRequest,
        context: grpc.aio.ServicerContext[pb.PullWeightsRequest, pb.PullWeightsResponse],
    ) -> None:
        """Send bytes of one shard, read in a thread while the chunk before is sent."""
        run = await self._runs.find(request.run)
        form = _pulled_form(run, request)
        path, begin, end = _find_range(form, request)
        sums = form.sums_of(request.shard)
        in_thread = self._runs.in_thread
        with self._held(run, [Version.from_proto(request.version)]):
            file = await in_thread(FileIO, path)
            reading: asyncio.Future[pb.PullWeightsResponse] | None = None
            try:
                if begin < end:
                    reading = in_thread(_read_chunk, file, sums, begin, end)
                while reading is not None:
                    response = await reading
                    begin = next_cut(begin, end)
                    reading = in_thread(_read_chunk, file, sums, begin, end) if begin < end else None
                    await self._write(context, response)
            finally:
                if reading is not None:
                    reading.cancel()
                file.close()

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
        return pb.ListSourcesResponse(sources=[own, *run.describe_relays(self._runs.clock())])

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
        is_relay = bool(request.relay_address) or request.replica.startswith(RELAY_PREFIX)
        if is_relay and self._require_admin is not None:
            self._require_admin(context)
        run = await self._runs.find(request.run)
        lease_s = self._runs.config.lease_s
        if self._runs.upstream is not None:
            self._runs.upstream.report(run, request)
            lease_s = min(lease_s, self._runs.upstream.lease_s(run))
        self._check_room(run, request.replica)
        run.report(request, self._runs.clock(), lease_s)
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

    @contextmanager
    def _held(self, run: Run, versions: list[Version]) -> Iterator[None]:
        """Keep versions while they are sent, and from retention until the caller asks for their next part."""
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

    async def _write(self, context: grpc.aio.ServicerContext[Q, R], response: R) -> None:
        """Write one message of a stream.

        Raises:
            SluiceError: DEADLINE_EXCEEDED if the caller does not read.
        """
        seconds = self._runs.config.chunk_idle_s
        try:
            async with asyncio.timeout(seconds):
                await context.write(response)
        except TimeoutError as error:
            raise SluiceError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "PULL_IDLE",
                f"nobody read for {seconds:g} s (weightsync.chunk_idle_s): pull from where it broke",
            ) from error


async def _announce(run: Run, known: Version | None, heartbeat_s: float) -> AsyncIterator[pb.WatchVersionsResponse]:
    """Yield each newer version, and a sign of life at the start and whenever there was no news for a while."""
    quiet = True
    while True:
        changed, newest = run.changed, run.ledger.newest
        if newest is not None and (known is None or newest > known):
            known = newest
            yield pb.WatchVersionsResponse(manifest=run.versions[newest].manifest)
            quiet = False
            continue
        if quiet:
            yield pb.WatchVersionsResponse()
            quiet = False
            continue
        try:
            async with asyncio.timeout(heartbeat_s):
                await changed.wait()
        except TimeoutError:
            quiet = True


def _find_path(run: Run, wanted: Version | None, held: Version | None) -> list[VersionForm]:
    """Return what leads from what the caller holds to a version, the newest if none is wanted.

    Raises:
        SluiceError: NOT_FOUND, or DATA_LOSS if a damaged delta is in the way.
    """
    target = run.find(wanted).version
    path = find_path(run.ledger.committed, target, held)
    if path is None:
        damaged = damaged_on_the_way(run.ledger.committed, target) or "an older version"
        raise SluiceError.data_loss(
            "DELTA_DAMAGED",
            f"version {target} cannot be reached, because the delta of {damaged} gave other bytes than announced, or NaN:"
            " keep serving, the trainer's next version is an anchor; to have it now, push an anchor",
        )
    return path


def _describe_step(run: Run, step: VersionForm) -> pb.GetUpdatePathResponse:
    """Return one step with its files as this host sees them. Blocking."""
    form = run.find(step.version).form(step.form)
    if form is None:
        raise SluiceError.not_found(
            "NO_SUCH_VERSION", f"version {step.version} lost its {step.form.value} form: ask again"
        )
    response = pb.GetUpdatePathResponse(manifest=form.manifest)
    for shard, path in form.files.items():
        status = path.stat()
        response.files.add(shard=shard, path=str(path.absolute()), device=status.st_dev, inode=status.st_ino)
    return response


def _pulled_form(run: Run, request: pb.PullWeightsRequest) -> StoredForm:
    """Return the form whose shards a pull asks for.

    Raises:
        SluiceError: NOT_FOUND, or FAILED_PRECONDITION NO_DELTA.
    """
    version = Version.from_proto(request.version)
    stored = run.find(version)
    if request.HasField("base"):
        delta, base = stored.delta, Version.from_proto(request.base)
        if delta is None or Version.from_proto(delta.manifest.base) != base:
            based = "is held whole only" if delta is None else f"is based on {Version.from_proto(delta.manifest.base)}"
            raise SluiceError.failed_precondition(
                "NO_DELTA", f"version {version} {based}, there is no delta from {base}: ask GetUpdatePath for the way"
            )
        return delta
    whole = stored.dense or stored.adapter
    if whole is None:
        raise SluiceError.not_found(
            "NO_DENSE_FORM",
            f"version {version} is held as a delta only, and its dense form is still being made or was given up:"
            " ask GetUpdatePath for the way to it",
        )
    return whole


def _find_range(form: StoredForm, request: pb.PullWeightsRequest) -> tuple[Path, int, int]:
    """Return the shard's file, and the first byte of the wanted range and the one after its last."""
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
    return path, request.offset, end


def _read_chunk(file: FileIO, sums: ChunkSums, begin: int, end: int) -> pb.PullWeightsResponse:
    wanted = next_cut(begin, end) - begin
    data = os.pread(file.fileno(), wanted, begin)
    if len(data) < wanted:
        raise SluiceError.data_loss(
            "SHARD_SHORT", f"the stored file ends at byte {begin + len(data)}: push a new version"
        )
    response = pb.PullWeightsResponse()
    fill_chunk(response.chunk, begin, data, sums.of(begin, data))
    return response
