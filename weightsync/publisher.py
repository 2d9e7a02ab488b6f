"""The trainer's half: pushes a version and commits it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import grpc
import structlog
import torch

from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import Version
from weightsync.chunks import MAX_CHUNK_BYTES, fill_chunk
from weightsync.manifest import DenseTensor, version_digest
from weightsync.names import run_resource
from weightsync.shard_source import ShardSource

__all__ = ["PushReport", "WeightPublisher"]

SHARD = "model"
"""Name of the only shard of a version that one process pushes."""

_REPEATABLE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.CANCELLED,
}
"""How a broken connection or a damaged transfer shows; a repeat is harmless, because every step is idempotent."""

_REPEATABLE_REASONS = {"SHARDS_MISSING", "PUSH_IDLE", "SHARD_OFFSET"}
"""Refusals that a repeat answers: the service was restarted between push and commit, or this process stood still."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PushReport:
    """What publishing a version cost.

    Attributes:
        bytes_sent: Bytes of the shard that went over the wire; 0 if the service had the version.
        push_s: Seconds until the service held every byte on disk.
        commit_s: Seconds that the commit took.
        digest: The version's digest.
        duplicate: Whether the version was committed before.
    """

    bytes_sent: int
    push_s: float
    commit_s: float
    digest: str
    duplicate: bool


class WeightPublisher:
    """Publishes versions of one run.

    Args:
        channel: To the weight service, with the admin role.
        run: The run's name.
        chunk_bytes: Bytes per chunk, at most 1 MiB.
    """

    def __init__(self, channel: grpc.aio.Channel, run: str, *, chunk_bytes: int = MAX_CHUNK_BYTES) -> None:
        if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(f"chunk_bytes is {chunk_bytes}; the contract allows 1 to {MAX_CHUNK_BYTES}")
        self._stub = weightsync_pb2_grpc.WeightSyncServiceStub(channel)
        self._run = run_resource(run)
        self._chunk_bytes = chunk_bytes

    async def push(
        self,
        version: Version,
        tensors: Mapping[str, torch.Tensor],
        *,
        deadline_s: float,
        labels: Mapping[str, str] | None = None,
    ) -> PushReport:
        """Publish a version: visible as a whole when this returns, not at all if it raises before the commit.

        Idempotent: the same version with the same content is found and nothing is sent. A failure on the way is repeated
        once, from the last byte that the service holds.

        Args:
            version: Which one.
            tensors: CPU tensors by Hugging Face name, in the data type to publish; unchanged until this returns.
            deadline_s: Seconds for everything.
            labels: Free facts for the manifest.

        Raises:
            SluiceError: as the contract says of PushWeights and CommitVersion; DEADLINE_EXCEEDED leaves the version before
                serving.
            ValueError: if a tensor cannot travel.
        """
        source = ShardSource(SHARD, tensors)
        publication = _Publication(
            stub=self._stub,
            run=self._run,
            version=version,
            source=source,
            chunk_bytes=self._chunk_bytes,
            deadline=time.monotonic() + deadline_s,
        )
        digests = asyncio.create_task(asyncio.to_thread(source.tensor_digests))  # beside the transfer
        try:
            return await _repeated_once(publication, digests, labels or {})
        finally:
            await asyncio.wait({digests})  # it reads the caller's memory


async def _repeated_once(
    publication: _Publication, digests: asyncio.Task[dict[str, str]], labels: Mapping[str, str]
) -> PushReport:
    try:
        return await publication.run(digests, labels, resume=False)
    except SluiceError as error:
        if error.code not in _REPEATABLE and error.reason not in _REPEATABLE_REASONS:
            raise
        log.warning("push broke, going on", version=str(publication.version), error=str(error))
    return await publication.run(digests, labels, resume=True)


class _Publication:
    """One version on its way out."""

    def __init__(
        self,
        *,
        stub: weightsync_pb2_grpc.WeightSyncServiceAsyncStub,
        run: str,
        version: Version,
        source: ShardSource,
        chunk_bytes: int,
        deadline: float,
    ) -> None:
        self.version = version
        self._stub = stub
        self._run = run
        self._source = source
        self._chunk_bytes = chunk_bytes
        self._deadline = deadline
        self._sent = 0

    async def run(
        self, digests: asyncio.Task[dict[str, str]], labels: Mapping[str, str], *, resume: bool
    ) -> PushReport:
        """Send what the service lacks, then commit."""
        try:
            started = time.perf_counter()
            if not await self._is_committed():
                await self._send(resume=resume)
            pushed = time.perf_counter()
            shard = self._source.describe(await asyncio.shield(digests))
            manifest = self._manifest(shard, labels)
            request = pb.CommitVersionRequest(manifest=manifest)
            response = await self._stub.CommitVersion(request, timeout=self._remaining())
        except grpc.aio.AioRpcError as error:
            raise SluiceError.from_rpc(error) from error
        return PushReport(
            bytes_sent=self._sent,
            push_s=pushed - started,
            commit_s=time.perf_counter() - pushed,
            digest=response.manifest.digest,
            duplicate=response.duplicate,
        )

    async def _is_committed(self) -> bool:
        request = pb.GetManifestRequest(run=self._run, version=self.version.to_proto())
        try:
            await self._stub.GetManifest(request, timeout=self._remaining(), wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return False
            raise
        return True

    async def _send(self, *, resume: bool) -> None:
        offset = 0
        if resume:
            offset = await self._ask_offset()
        if offset < self._source.size:
            await self._stub.PushWeights(self._requests(offset), timeout=self._remaining())

    async def _ask_offset(self) -> int:
        """Where to go on: announces to go on at the end, which the service corrects unless it has everything."""
        try:
            await self._stub.PushWeights(self._requests(self._source.size), timeout=self._remaining())
        except grpc.aio.AioRpcError as error:
            failure = SluiceError.from_rpc(error)
            if failure.reason != "SHARD_OFFSET":
                raise
            return int(failure.metadata["stored_bytes"])
        return self._source.size

    async def _requests(self, offset: int) -> AsyncIterator[pb.PushWeightsRequest]:
        header = pb.PushHeader(
            run=self._run, version=self.version.to_proto(), shard=self._source.describe(), resume_offset=offset
        )
        yield pb.PushWeightsRequest(header=header)
        spans = self._source.spans(offset, self._chunk_bytes)
        span = next(spans, None)
        preparing = _prepare(self._source, span)
        try:
            while preparing is not None:  # the next chunk is prepared while this one goes out
                request = await preparing
                size = 0 if span is None else span[1] - span[0]
                span = next(spans, None)
                preparing = _prepare(self._source, span)
                yield request
                self._sent += size
        finally:
            if preparing is not None:
                preparing.cancel()

    def _manifest(self, shard: pb.Shard, labels: Mapping[str, str]) -> pb.Manifest:
        digest = version_digest(
            DenseTensor(each.name, each.dtype, tuple(each.global_shape), each.digest) for each in shard.tensors
        )
        return pb.Manifest(
            run=self._run,
            version=self.version.to_proto(),
            kind=pb.VERSION_KIND_ANCHOR,
            shards=[shard],
            digest=digest,
            labels=dict(labels),
        )

    def _remaining(self) -> float:
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise SluiceError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "PUSH_DEADLINE",
                f"version {self.version} was not published in time; the version before serves on: push again, or allow more",
            )
        return remaining


def _prepare(source: ShardSource, span: tuple[int, int] | None) -> asyncio.Future[pb.PushWeightsRequest] | None:
    if span is None:
        return None
    return asyncio.get_running_loop().run_in_executor(None, _chunk, source, *span)


def _chunk(source: ShardSource, begin: int, end: int) -> pb.PushWeightsRequest:
    request = pb.PushWeightsRequest()
    fill_chunk(request.chunk, begin, source.read(begin, end))
    return request
