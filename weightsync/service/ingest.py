"""The side of the service that takes versions in: push, commit, list, describe, delete."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import grpc

from sluice.host_files import PeerFileError, open_peer_file
from sluice.rpc import SluiceError
from sluice.tasks import settle
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import Version
from weightsync.format.chunks import ChunkError
from weightsync.format.manifest import check_shard, without_tensors
from weightsync.format.safetensors import BadNameError, LayoutError
from weightsync.service.commit import commit_version
from weightsync.service.errors import FAILURES, translated
from weightsync.service.ledger import RefusedError
from weightsync.service.run import Run
from weightsync.service.runs import Runs
from weightsync.service.upload import Upload

__all__ = ["WeightSyncServicer"]

_DEFAULT_PAGE = 100
_LARGEST_PAGE = 1000

_FLUSHED_AT_ONCE = 32 << 20
"""Bytes after which the disk begins to write, while more come in."""

_COPIED_AT_ONCE = 32 << 20
"""Bytes of a local file per turn of a thread: some hundredths of a second."""


class WeightSyncServicer(weightsync_pb2_grpc.WeightSyncServiceServicer):
    """Serves `sluice.v1.WeightSyncService`. A relay changes no version: it refuses to push, commit and delete.

    Args:
        runs: The runs of this service.
    """

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._commits: set[asyncio.Task[pb.CommitVersionResponse]] = set()

    async def PushWeights(  # noqa: N802 - gRPC's name
        self,
        request_iterator: AsyncIterator[pb.PushWeightsRequest],
        context: grpc.aio.ServicerContext[pb.PushWeightsRequest, pb.PushWeightsResponse],
    ) -> pb.PushWeightsResponse:
        """Take one shard in."""
        self._check_no_relay()
        first = await _next(request_iterator, self._runs.config.chunk_idle_s)
        if first is None or first.WhichOneof("part") != "header":
            raise SluiceError.invalid_argument("header", "the first message of a push carries the header")
        header = first.header
        _check_header(header)
        run = await self._runs.open(header.run)
        stored = _committed_shard(run, Version.from_proto(header.version), header.shard)
        if stored is not None:
            return pb.PushWeightsResponse(stored_bytes=stored.size_bytes, digest=stored.digest)
        if not header.HasField("local"):
            return await self._receive(run, header, partial(self._write_chunks, request_iterator))
        source = await self._open_local(header)
        try:
            return await self._receive(run, header, partial(self._copy_file, source))
        finally:
            os.close(source)

    async def CommitVersion(  # noqa: N802 - gRPC's name
        self,
        request: pb.CommitVersionRequest,
        context: grpc.aio.ServicerContext[pb.CommitVersionRequest, pb.CommitVersionResponse],
    ) -> pb.CommitVersionResponse:
        """Make a version visible. The commit ends even if the caller leaves, so that the version is whole or not there."""
        self._check_no_relay()
        run = await self._runs.open(request.manifest.run)
        task = asyncio.create_task(commit_version(self._runs, run, request.manifest))
        self._commits.add(task)
        task.add_done_callback(self._commits.discard)
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
        return pb.ListVersionsResponse(
            versions=[without_tensors(run.versions[version].manifest) for version in page],
            next_page_token=str(page[-1]) if len(page) < len(versions) else "",
            replicas=run.describe_replicas(self._runs.clock()),
        )

    async def GetManifest(  # noqa: N802 - gRPC's name
        self,
        request: pb.GetManifestRequest,
        context: grpc.aio.ServicerContext[pb.GetManifestRequest, pb.GetManifestResponse],
    ) -> pb.GetManifestResponse:
        """Describe a version."""
        run = await self._runs.find(request.run)
        wanted = Version.from_proto(request.version) if request.HasField("version") else None
        return pb.GetManifestResponse(manifest=run.find(wanted).manifest)

    async def DeleteVersion(  # noqa: N802 - gRPC's name
        self,
        request: pb.DeleteVersionRequest,
        context: grpc.aio.ServicerContext[pb.DeleteVersionRequest, pb.DeleteVersionResponse],
    ) -> pb.DeleteVersionResponse:
        """Delete a version that nobody needs."""
        self._check_no_relay()
        run = await self._runs.find(request.run)
        try:
            await self._runs.delete(run, Version.from_proto(request.version))
        except RefusedError as error:
            raise translated(error) from error
        return pb.DeleteVersionResponse()

    async def close(self) -> None:
        """Wait for the commits under way."""
        if self._commits:
            await asyncio.wait(self._commits)

    def _check_no_relay(self) -> None:
        if self._runs.upstream is not None:
            raise SluiceError.failed_precondition(
                "RELAY",
                "this service is a relay and changes no version: call"
                f" {self._runs.upstream.target}, whose versions it gives out",
            )

    async def _receive(
        self, run: Run, header: pb.PushHeader, fill: Callable[[Upload, object], Awaitable[None]]
    ) -> pb.PushWeightsResponse:
        """Fill the upload that a header means, from where it stands, and check it once it is whole."""
        upload = await self._find_upload(run, header)
        ticket, stored = await self._runs.in_thread(upload.take_over)
        if not upload.complete and stored != header.resume_offset:
            raise _offset_error(stored)
        try:
            if not upload.complete:
                await fill(upload, ticket)
            if upload.stored == upload.size:
                await self._runs.in_thread(upload.finish, ticket)
                _check_digest(upload, header.shard)
        except FAILURES as error:
            failure = translated(error)
            damaged = isinstance(error, ChunkError | LayoutError | OSError | PeerFileError)
            if damaged or failure.code is grpc.StatusCode.DATA_LOSS:
                await self._runs.discard_upload(run, upload, ticket)
            raise failure from error
        return pb.PushWeightsResponse(stored_bytes=upload.stored, digest=upload.digest)

    async def _find_upload(self, run: Run, header: pb.PushHeader) -> Upload:
        """Return the upload that the stream continues, or a new one if the stream begins at its beginning."""
        version = Version.from_proto(header.version)
        if run.committing == version:
            raise SluiceError.aborted("COMMITTING", f"version {version} is being committed; ask again by CommitVersion")
        try:
            run.ledger.check_push(version)
        except RefusedError as error:
            raise translated(error) from error
        known = run.uploads.get((version, header.shard.name))
        if known is not None and _continues(known, header):
            return known
        if header.resume_offset:
            raise _offset_error(0)
        return await self._runs.begin_upload(run, version, header.shard)

    async def _write_chunks(
        self, requests: AsyncIterator[pb.PushWeightsRequest], upload: Upload, ticket: object
    ) -> None:
        """Write one chunk in a thread while the next one arrives.

        Never more than one, so that a slow disk slows the sender down. More would save starts of threads, and cost more
        than that in fresh memory for the buffers.
        """
        writing: asyncio.Future[None] | None = None
        flushing: asyncio.Future[None] | None = None
        flushed = upload.stored
        idle_s = self._runs.config.chunk_idle_s
        try:
            while (part := await _next(requests, idle_s)) is not None:
                if part.WhichOneof("part") != "chunk":
                    raise SluiceError.invalid_argument("part", "after the header, only chunks follow")
                upload.active_at = self._runs.clock()
                if writing is not None:
                    await writing
                writing = self._runs.in_thread(upload.write, ticket, part.chunk)
                if upload.stored - flushed >= _FLUSHED_AT_ONCE and (flushing is None or flushing.done()):
                    flushed, flushing = upload.stored, self._runs.in_thread(upload.flush)
            for last in (writing, flushing):
                if last is not None:
                    await last
        finally:
            await settle(*(each for each in (writing, flushing) if each is not None), timeout_s=idle_s)

    async def _open_local(self, header: pb.PushHeader) -> int:
        """Open the file that a header names; return its descriptor."""
        if header.resume_offset:
            raise SluiceError.invalid_argument("header.resume_offset", "a local file is read from its beginning")
        directory, local = self._runs.config.local_dir, header.local
        if directory is None:
            raise translated(PeerFileError("local files are switched off (weightsync.local_dir)"))
        facts = (local.path, local.device, local.inode, header.shard.size_bytes)
        try:
            return await self._runs.in_thread(partial(open_peer_file, below=directory), *facts)
        except PeerFileError as error:
            raise translated(error) from error

    async def _copy_file(self, source: int, upload: Upload, ticket: object) -> None:
        """Copy a local file in parts, so that a caller who leaves ends the work."""
        for begin in range(0, upload.size, _COPIED_AT_ONCE):
            upload.active_at = self._runs.clock()
            end = min(begin + _COPIED_AT_ONCE, upload.size)
            copying = self._runs.in_thread(upload.copy, ticket, source, end)
            try:
                await asyncio.shield(copying)
            finally:  # the file stays open until the thread is done with it
                await settle(copying, timeout_s=self._runs.config.chunk_idle_s)


def _check_header(header: pb.PushHeader) -> None:
    try:
        check_shard(header.shard.name)
    except BadNameError as error:
        raise SluiceError.invalid_argument("header.shard.name", str(error)) from error
    if not header.shard.size_bytes:
        raise SluiceError.invalid_argument("header.shard.size_bytes", "give the size of the whole file")
    if header.resume_offset > header.shard.size_bytes:
        raise SluiceError.invalid_argument("header.resume_offset", "lies beyond the end of the shard")


def _committed_shard(run: Run, version: Version, shard: pb.Shard) -> pb.Shard | None:
    """Return the shard if the version is committed with it; None if the version is not committed."""
    stored = run.versions.get(version)
    if stored is None:
        return None
    for each in stored.pushed.shards:
        if each.name == shard.name and each.digest == shard.digest:
            return each
    raise SluiceError.already_exists(
        "OTHER_DIGEST",
        f"version {version} is committed, and shard {shard.name} with digest {shard.digest or '(none given)'} is not"
        " part of it: a version never changes; compare with GetManifest",
    )


def _continues(upload: Upload, header: pb.PushHeader) -> bool:
    """Return whether the header means the file that is coming in: the same one, and not from its beginning."""
    known_digest = upload.digest or upload.announced.digest
    same = header.shard.size_bytes == upload.size and header.shard.digest in {"", known_digest}
    return same and (header.resume_offset > 0 or (upload.complete and bool(header.shard.digest)))


def _offset_error(stored: int) -> SluiceError:
    return SluiceError(
        grpc.StatusCode.FAILED_PRECONDITION,
        "SHARD_OFFSET",
        f"the service holds {stored} bytes of the shard: continue there",
        metadata={"stored_bytes": str(stored)},
    )


def _check_digest(upload: Upload, announced: pb.Shard) -> None:
    if announced.digest not in {"", upload.digest}:
        raise SluiceError.data_loss(
            "SHARD_DIGEST",
            f"shard {announced.name} has digest {upload.digest}, announced was {announced.digest}:"
            " it was discarded, push it again",
        )


async def _next(requests: AsyncIterator[pb.PushWeightsRequest], idle_s: float) -> pb.PushWeightsRequest | None:
    """Return the next message, None at the end of the stream."""
    try:
        async with asyncio.timeout(idle_s):
            return await anext(requests, None)
    except TimeoutError as error:
        raise SluiceError(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "PUSH_IDLE",
            f"no chunk came for {idle_s:g} s (weightsync.chunk_idle_s); what came in stays: resume the push",
        ) from error
