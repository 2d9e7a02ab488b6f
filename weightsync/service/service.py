"""The side of the service that takes versions in, lists and deletes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import structlog

from sluice.rpc import SluiceError
from sluice.tasks import discard_outcome
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import Version
from weightsync.format.manifest import without_tensors
from weightsync.service.commit import commit_version
from weightsync.service.ledger import RefusedError
from weightsync.service.push import receive_shard
from weightsync.service.runs import Run, Runs, refused

__all__ = ["WeightSyncServicer"]

_DEFAULT_PAGE = 100
_LARGEST_PAGE = 1000

log = structlog.get_logger(__name__)


class WeightSyncServicer(weightsync_pb2_grpc.WeightSyncServiceServicer):
    """Serves `sluice.v1.WeightSyncService`."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._commits: set[asyncio.Task[pb.CommitVersionResponse]] = set()

    async def PushWeights(  # noqa: N802 - gRPC's name
        self,
        request_iterator: AsyncIterator[pb.PushWeightsRequest],
        context: grpc.aio.ServicerContext[pb.PushWeightsRequest, pb.PushWeightsResponse],
    ) -> pb.PushWeightsResponse:
        """Take one shard in."""
        return await receive_shard(self._runs, request_iterator)

    async def CommitVersion(  # noqa: N802 - gRPC's name
        self,
        request: pb.CommitVersionRequest,
        context: grpc.aio.ServicerContext[pb.CommitVersionRequest, pb.CommitVersionResponse],
    ) -> pb.CommitVersionResponse:
        """Make a version visible; goes on to its end although the caller leaves, so that it is whole or not there."""
        run = await self._runs.open(request.manifest.run)
        task = asyncio.create_task(commit_version(self._runs, run, request.manifest))
        self._commits.add(task)
        task.add_done_callback(self._commits.discard)
        discard_outcome(task)
        return await asyncio.shield(task)

    async def ListVersions(  # noqa: N802 - gRPC's name
        self,
        request: pb.ListVersionsRequest,
        context: grpc.aio.ServicerContext[pb.ListVersionsRequest, pb.ListVersionsResponse],
    ) -> pb.ListVersionsResponse:
        """List versions, newest first; the page token is the last version of the page before."""
        run = await self._runs.find(request.run)
        versions = sorted(run.versions, reverse=True)
        if request.page_token:
            try:
                last = Version.parse(request.page_token)
            except ValueError as error:
                raise SluiceError.invalid_argument("page_token", str(error)) from error
            versions = [version for version in versions if version < last]
        page = versions[: min(request.page_size or _DEFAULT_PAGE, _LARGEST_PAGE)]
        response = pb.ListVersionsResponse(
            versions=[without_tensors(run.versions[version].manifest) for version in page],
            next_page_token=str(page[-1]) if len(page) < len(versions) else "",
        )
        _add_replicas(response, run, self._runs.clock())
        return response

    async def GetManifest(  # noqa: N802 - gRPC's name
        self,
        request: pb.GetManifestRequest,
        context: grpc.aio.ServicerContext[pb.GetManifestRequest, pb.GetManifestResponse],
    ) -> pb.GetManifestResponse:
        """Describe a version."""
        run = await self._runs.find(request.run)
        wanted = Version.from_proto(request.version) if request.HasField("version") else run.ledger.newest
        if wanted is None:
            raise SluiceError.not_found("NO_VERSION", f"nothing was committed in run {run.name} yet: push a version")
        return pb.GetManifestResponse(manifest=run.find(wanted).manifest)

    async def DeleteVersion(  # noqa: N802 - gRPC's name
        self,
        request: pb.DeleteVersionRequest,
        context: grpc.aio.ServicerContext[pb.DeleteVersionRequest, pb.DeleteVersionResponse],
    ) -> pb.DeleteVersionResponse:
        """Delete a version that nobody needs."""
        run = await self._runs.find(request.run)
        try:
            await self._runs.delete(run, Version.from_proto(request.version))
        except RefusedError as error:
            raise refused(error) from error
        return pb.DeleteVersionResponse()

    async def close(self) -> None:
        """Let commits under way come to their end."""
        if self._commits:
            await asyncio.wait(self._commits)


def _add_replicas(response: pb.ListVersionsResponse, run: Run, now: float) -> None:
    leases = run.ledger.replicas(now)
    relays = run.relays.live(leases)
    for name, lease in sorted(leases.items()):
        row = response.replicas.add(replica=name, error=lease.error)
        row.age.FromNanoseconds(int((now - lease.reported) * 1e9))
        if lease.serving is not None:
            row.version.CopyFrom(lease.serving.to_proto())
            row.versions_behind = sum(version > lease.serving for version in run.versions)
        if name in run.timings:
            row.timings.CopyFrom(run.timings[name])
        if name in relays:
            row.relay_address = relays[name].address
