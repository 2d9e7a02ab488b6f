"""Takes a version from another service into this one's store, as a push and a commit would."""

from __future__ import annotations

import asyncio

import grpc
import structlog

from sluice.rpc import SluiceError
from sluice.tasks import run_to_end, settle
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import Version
from weightsync.format.chunks import ChunkError, ChunkSizeError
from weightsync.format.layout import LayoutError
from weightsync.format.manifest import ManifestError, check_manifest
from weightsync.metrics import RELAYED_BYTES
from weightsync.receive.pull import PullLimits
from weightsync.store.commit import commit_version
from weightsync.store.runs import Run, Runs, disk_error
from weightsync.store.upload import OffsetError, SupersededError, Upload

__all__ = ["FetchError", "fetch_version"]

_TRANSIENT = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
}
"""Answers that another attempt may not get again."""

log = structlog.get_logger(__name__)


class FetchError(Exception):
    """The version could not be had."""


async def fetch_version(
    runs: Runs,
    run: Run,
    stub: weightsync_pb2_grpc.WeightDeliveryServiceAsyncStub,
    manifest: pb.Manifest,
    limits: PullLimits,
) -> None:
    """Pull every shard of a form as it is stored and commit it; bytes that came in before are not pulled again.

    Args:
        runs: All runs of this service.
        run: The run.
        stub: The service that has the version.
        manifest: The form: a dense one, a delta, or an adapter.
        limits: How long to wait.

    Raises:
        FetchError: if the other service does not give it, cannot be reached in so many attempts, or gives something else
            than the manifest says.
        SluiceError: as the contract says of CommitVersion, and for a full disk.
    """
    try:
        await runs.in_thread(check_manifest, manifest)  # before the names of its shards become those of files
    except ManifestError as error:
        raise FetchError(f"the manifest of {Version.from_proto(manifest.version)}: {error}") from error
    fetch = _Fetch(runs, run, stub, manifest, limits)
    for shard in manifest.shards:
        await fetch.bring(shard)
    committing = asyncio.ensure_future(commit_version(runs, run, manifest))
    await run_to_end(committing)  # so that the version is whole or not there


class _Fetch:
    """The shards of one version on their way."""

    def __init__(
        self,
        runs: Runs,
        run: Run,
        stub: weightsync_pb2_grpc.WeightDeliveryServiceAsyncStub,
        manifest: pb.Manifest,
        limits: PullLimits,
    ) -> None:
        self._runs, self._run, self._stub = runs, run, stub
        self._manifest, self._limits = manifest, limits
        self._version = Version.from_proto(manifest.version)

    async def bring(self, shard: pb.Shard) -> None:
        """Pull a shard, in as many streams as it takes."""
        failures = 0
        while True:
            upload = await self._upload(shard)
            if upload.shard.complete:
                return
            before = upload.shard.stored
            reason = await self._attempt(shard, upload)
            if not reason:
                return
            failures = 0 if upload.shard.stored > before else failures + 1
            if failures >= self._limits.attempts:
                raise FetchError(f"shard {shard.name} could not be pulled in {failures} attempts: {reason}")
            log.info("pull broke, going on", shard=shard.name, offset=upload.shard.stored, reason=reason)
            await asyncio.sleep(self._limits.first_pause_s * 2**failures)

    async def _upload(self, shard: pb.Shard) -> Upload:
        """What came in so far, if it is the same file; retention may have dropped it since."""
        upload = self._run.uploads.get((self._version, shard.name))
        if upload is not None and upload.announced.digest == shard.digest:
            return upload
        return await self._runs.begin_upload(self._run, self._version, shard)

    async def _attempt(self, shard: pb.Shard, upload: Upload) -> str:
        """One stream, from the last good byte on.

        Returns:
            Why the shard is not whole; empty if it is.
        """
        ticket, _ = await self._runs.in_thread(upload.take_over)
        try:
            await self._stream(shard.name, upload, ticket)
            if upload.shard.stored == upload.shard.size:
                await self._runs.in_thread(upload.finish, ticket)
                return await self._check(shard, upload, ticket)
        except grpc.aio.AioRpcError as error:
            failure = SluiceError.from_rpc(error)
            if failure.code not in _TRANSIENT:
                raise FetchError(str(failure)) from error
            return str(failure)
        except TimeoutError:
            return f"no chunk came for {self._limits.idle_s:g} s"
        except (ChunkError, ChunkSizeError, OffsetError, SupersededError) as error:
            return str(error)
        except LayoutError as error:
            await self._discard(shard, upload, ticket)
            return str(error)
        except OSError as error:
            await self._discard(shard, upload, ticket)
            raise disk_error(error) from error
        return "the stream ended early"

    async def _stream(self, shard: str, upload: Upload, ticket: object) -> None:
        """Write one chunk while the next arrives. When this ends, no thread works on the file."""
        request = pb.PullWeightsRequest(
            run=self._manifest.run,
            version=self._manifest.version,
            shard=shard,
            offset=upload.shard.stored,
            base=self._manifest.base if self._manifest.kind == pb.VERSION_KIND_DELTA else None,
        )
        call = self._stub.PullWeights(request, timeout=self._limits.deadline_s)
        writing: asyncio.Future[None] | None = None
        try:
            while True:
                async with asyncio.timeout(self._limits.idle_s):
                    response = await call.read()
                if writing is not None:
                    await asyncio.shield(writing)
                if not isinstance(response, pb.PullWeightsResponse):  # the end of the stream
                    return
                upload.active_at = self._runs.clock()
                RELAYED_BYTES.labels(self._run.name).inc(response.chunk.ByteSize())
                writing = self._runs.in_thread(upload.write, ticket, response.chunk)
        finally:
            call.cancel()
            if writing is not None:
                await settle(writing)

    async def _check(self, shard: pb.Shard, upload: Upload, ticket: object) -> str:
        if shard.digest in {"", upload.shard.digest}:
            return ""
        await self._discard(shard, upload, ticket)
        return f"the file has digest {upload.shard.digest}, announced was {shard.digest}"

    async def _discard(self, shard: pb.Shard, upload: Upload, ticket: object) -> None:
        discarded = await self._runs.in_thread(upload.discard, ticket)
        if discarded and self._run.uploads.get((self._version, shard.name)) is upload:
            del self._run.uploads[self._version, shard.name]
