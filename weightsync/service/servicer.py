"""The service's RPCs: trainers push versions through WeightSyncService, engines pull them through WeightDeliveryService."""

# ruff: noqa: N802 - RPCs have gRPC's names
from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import Message

from sluice.clock import Clock
from sluice.host_files import PeerFileError, host_id, open_peer_file
from sluice.rpc import SluiceError
from sluice.rpc.access import require_role
from sluice.tasks import settle
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import Version
from weightsync.format.chunks import ChunkError, fill_chunk
from weightsync.format.manifest import check_shard, without_tensors
from weightsync.format.safetensors import BadNameError, LayoutError
from weightsync.service.chain import Form, VersionForm, damaged_on_the_way, find_path
from weightsync.service.runs import RELAY_PREFIX, Run, Runs
from weightsync.service.store import StoredForm
from weightsync.service.upload import FAILURES, ChunkSums, Upload, next_cut, translated

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

_DEFAULT_PAGE = 100
_LARGEST_PAGE = 1000

_FLUSHED_AT_ONCE = 32 << 20
"""Bytes after which the disk begins to write, while more come in."""

_COPIED_AT_ONCE = 32 << 20
"""Bytes of a local file per turn of a thread: some hundredths of a second."""

_MOST_REPLICA_CHARACTERS = 128


class WeightSyncServicer(weightsync_pb2_grpc.WeightSyncServiceServicer):
    """Serves `sluice.v1.WeightSyncService`. A relay changes no version: it refuses to push, commit and delete."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    async def PushWeights(
        self, request_iterator: AsyncIterator[pb.PushWeightsRequest], context: Context
    ) -> pb.PushWeightsResponse:
        """Take in one shard."""
        self._check_no_relay()
        first = await self._next(request_iterator)
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

    async def CommitVersion(self, request: pb.CommitVersionRequest, context: Context) -> pb.CommitVersionResponse:
        """Make a version visible."""
        self._check_no_relay()
        return await self._runs.commit(await self._runs.open(request.manifest.run), request.manifest)

    async def ListVersions(self, request: pb.ListVersionsRequest, context: Context) -> pb.ListVersionsResponse:
        """List versions, newest first; the page token is the last version of the previous page."""
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
            mirrors=self._runs.describe_mirrors(run),
        )

    async def GetManifest(self, request: pb.GetManifestRequest, context: Context) -> pb.GetManifestResponse:
        """Describe a version."""
        run = await self._runs.find(request.run)
        wanted = Version.from_proto(request.version) if request.HasField("version") else None
        return pb.GetManifestResponse(manifest=run.find(wanted).manifest)

    async def DeleteVersion(self, request: pb.DeleteVersionRequest, context: Context) -> pb.DeleteVersionResponse:
        """Delete a version that nobody needs."""
        self._check_no_relay()
        run = await self._runs.find(request.run)
        await self._runs.delete(run, Version.from_proto(request.version))
        return pb.DeleteVersionResponse()

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
        """Continue or begin the upload that a header names, and check it once it is whole."""
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
        """Return the upload that the stream continues, or begin a new one if the stream starts at byte 0."""
        version = Version.from_proto(header.version)
        if run.committing == version:
            raise SluiceError.aborted("COMMITTING", f"version {version} is being committed; ask again by CommitVersion")
        run.ledger.check_push(version)
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

        Write only one chunk at a time, so that a slow disk slows the sender down. Larger writes would start fewer threads, but
        fresh memory for their buffers would cost more than that.
        """
        writing: asyncio.Future[None] | None = None
        flushing: asyncio.Future[None] | None = None
        flushed = upload.stored
        try:
            while (part := await self._next(requests)) is not None:
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
            await settle(
                *(each for each in (writing, flushing) if each is not None), timeout_s=self._runs.config.chunk_idle_s
            )

    async def _next(self, requests: AsyncIterator[pb.PushWeightsRequest]) -> pb.PushWeightsRequest | None:
        """Return the next message, None at the end of the stream."""
        idle_s = self._runs.config.chunk_idle_s
        try:
            async with self._runs.clock.timeout(idle_s):
                return await anext(requests, None)
        except TimeoutError as error:
            raise SluiceError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "PUSH_IDLE",
                f"no chunk came for {idle_s:g} s (weightsync.chunk_idle_s); what came in stays: resume the push",
            ) from error

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
        """Copy a local file in parts, so that the work ends if the caller leaves."""
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
    """Return the shard of a committed version, None if it is not committed; raise ALREADY_EXISTS if it differs."""
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
    """Return whether the header continues this upload: it names the same file and does not start at byte 0."""
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


class WeightDeliveryServicer(weightsync_pb2_grpc.WeightDeliveryServiceServicer):
    """Serves `sluice.v1.WeightDeliveryService`."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._watchers = 0

    async def WatchVersions(
        self, request: pb.WatchVersionsRequest, context: Context
    ) -> AsyncIterator[pb.WatchVersionsResponse]:
        """Announce the newest version, now and whenever there is a newer one.

        A watcher has no queue: a slow one finds the newest version when it reads again.
        """
        run = await self._runs.find(request.run)
        known = Version.from_proto(request.known) if request.HasField("known") else None
        if self._watchers >= self._runs.config.max_watchers:
            raise SluiceError.resource_exhausted(
                "TOO_MANY_WATCHERS",
                f"{self._watchers} replicas and relays watch, the most that this service takes: start relays, or raise"
                " weightsync.max_watchers",
                self._runs.config.heartbeat_s,
            )
        self._watchers += 1
        run.watchers += 1
        try:
            async for response in _announce(run, known, self._runs.config.heartbeat_s, self._runs.clock):
                yield response
        finally:
            self._watchers -= 1
            run.watchers -= 1

    async def GetUpdatePath(self, request: pb.GetUpdatePathRequest, context: Context) -> None:  # type: ignore[override]  # see _write
        """Send the manifests that lead to a version. Its forms stay until they are sent, and a little longer."""
        run = await self._runs.find(request.run)
        wanted = Version.from_proto(request.version) if request.HasField("version") else None
        held = Version.from_proto(request.held) if request.HasField("held") else None
        path = _find_path(run, wanted, held)
        with self._held(run, [step.version for step in path]):
            for step in path:
                response = await self._runs.in_thread(_describe_step, run, step)
                await self._write(context, response)

    async def PullWeights(self, request: pb.PullWeightsRequest, context: Context) -> None:  # type: ignore[override]  # see _write
        """Send bytes of one shard. A thread reads each chunk while the previous one is sent."""
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

    async def ListSources(self, request: pb.ListSourcesRequest, context: Context) -> pb.ListSourcesResponse:
        """Name this service and its live relays."""
        run = await self._runs.find(request.run)
        newest = run.ledger.newest
        own = pb.WeightSource(
            host=host_id(), watchers=run.watchers, newest=None if newest is None else newest.to_proto()
        )
        return pb.ListSourcesResponse(sources=[own, *run.describe_relays(self._runs.clock())])

    async def ReportVersion(self, request: pb.ReportVersionRequest, context: Context) -> pb.ReportVersionResponse:
        """Renew a replica's lease."""
        if not 0 < len(request.replica) <= _MOST_REPLICA_CHARACTERS:
            raise SluiceError.invalid_argument("replica", f"give a name of 1 to {_MOST_REPLICA_CHARACTERS} characters")
        if request.phase == pb.REPLICA_PHASE_UNSPECIFIED:
            raise SluiceError.invalid_argument("phase", "say what became of the version")
        is_relay = bool(request.relay_address) or request.replica.startswith(RELAY_PREFIX)
        if is_relay:
            require_role("trainer")  # engines load what a relay gives them
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
        most = self._runs.config.max_replicas
        if not run.ledger.has_room(replica, most, self._runs.clock()):
            raise SluiceError.resource_exhausted(
                "TOO_MANY_REPLICAS",
                f"{most} replicas and relays report, those behind relays included, the most that this service takes: raise"
                " weightsync.max_replicas of this service and of the relays before it",
                self._runs.config.heartbeat_s,
            )

    @contextmanager
    def _held(self, run: Run, versions: list[Version]) -> Iterator[None]:
        """Hold versions while they are sent. After that, retention spares them until the caller asks for their next part."""
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

    async def _write(self, context: Context, response: Message) -> None:
        """Write one message of a stream; raise DEADLINE_EXCEEDED if the caller does not read."""
        seconds = self._runs.config.chunk_idle_s
        try:
            async with self._runs.clock.timeout(seconds):
                await context.write(response)
        except TimeoutError as error:
            raise SluiceError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "PULL_IDLE",
                f"nobody read for {seconds:g} s (weightsync.chunk_idle_s): pull from where it broke",
            ) from error


async def _announce(
    run: Run, known: Version | None, heartbeat_s: float, clock: Clock
) -> AsyncIterator[pb.WatchVersionsResponse]:
    """Yield each newer version. Yield a heartbeat at the start and whenever no version came for a while."""
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
            async with clock.timeout(heartbeat_s):
                await changed.wait()
        except TimeoutError:
            quiet = True


def _find_path(run: Run, wanted: Version | None, held: Version | None) -> list[VersionForm]:
    """Return the forms that lead from the held version to the wanted or the newest one; raise NOT_FOUND or DATA_LOSS."""
    target = run.find(wanted).version
    path = find_path(run.ledger.committed, target, held)
    if path is None:
        damaged = damaged_on_the_way(run.ledger.committed, target) or "an older version"
        raise SluiceError.data_loss(
            "DELTA_DAMAGED",
            f"version {target} cannot be reached, because the delta of {damaged} gave other bytes than announced, or NaN:"
            " keep serving, the trainer's next version is dense; to have it now, push a dense version",
        )
    return path


def _describe_step(run: Run, step: VersionForm) -> pb.GetUpdatePathResponse:
    """Return one step with its files as this host sees them. Blocking."""
    form = run.find(step.version).forms.get(step.form)
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
    """Return the form whose shards a pull asks for; raise NOT_FOUND, or FAILED_PRECONDITION NO_DELTA."""
    version = Version.from_proto(request.version)
    stored = run.find(version)
    if request.HasField("base"):
        delta, base = stored.forms.get(Form.DELTA), Version.from_proto(request.base)
        if delta is None or Version.from_proto(delta.manifest.base) != base:
            based = "is held whole only" if delta is None else f"is based on {Version.from_proto(delta.manifest.base)}"
            raise SluiceError.failed_precondition(
                "NO_DELTA", f"version {version} {based}, there is no delta from {base}: ask GetUpdatePath for the way"
            )
        return delta
    whole = stored.forms.get(Form.DENSE) or stored.forms.get(Form.ADAPTER)
    if whole is None:
        raise SluiceError.not_found(
            "NO_DENSE_FORM",
            f"version {version} is held as a delta only, and its dense form is still being made or was given up:"
            " ask GetUpdatePath for the way to it",
        )
    return whole


def _find_range(form: StoredForm, request: pb.PullWeightsRequest) -> tuple[Path, int, int]:
    """Return the shard's file, and the first byte of the wanted range and the one after its last."""
    files = form.files
    if request.shard not in files:
        raise SluiceError.not_found(
            "NO_SUCH_SHARD",
            f"version {Version.from_proto(request.version)} has no shard {request.shard!r}; it has"
            f" {', '.join(list(files)[:5])}",
        )
    size = next(shard.size_bytes for shard in form.manifest.shards if shard.name == request.shard)
    end = request.offset + request.length if request.length else size
    if request.offset > size or end > size:
        raise SluiceError.invalid_argument("offset", f"the range ends beyond the shard's {size} bytes")
    return files[request.shard], request.offset, end


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
