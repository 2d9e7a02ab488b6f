"""Takes one PushWeights stream in: header, then chunks, written in threads while the next chunk arrives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import grpc

from sluice.rpc import SluiceError
from sluice.tasks import settle
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.format.chunks import ChunkError, ChunkSizeError
from weightsync.format.layout import LayoutError
from weightsync.format.names import BadNameError, check_shard
from weightsync.service.ledger import RefusedError
from weightsync.service.local_source import LocalSource, NoLocalFileError
from weightsync.service.runs import Run, Runs, disk_error, refused
from weightsync.service.upload import OffsetError, SupersededError, Upload

__all__ = ["receive_shard"]

_FLUSHED_AT_ONCE = 32 << 20
"""Bytes after which the disk begins to write, while more come in."""

_COPIED_AT_ONCE = 32 << 20
"""Bytes of a local file per turn of a thread: some hundredths of a second."""

_FAILURES = (
    ChunkError,
    ChunkSizeError,
    LayoutError,
    NoLocalFileError,
    OffsetError,
    OSError,
    SluiceError,
    SupersededError,
)


async def receive_shard(runs: Runs, requests: AsyncIterator[pb.PushWeightsRequest]) -> pb.PushWeightsResponse:
    """Serve one stream.

    Raises:
        SluiceError: as the contract says of PushWeights.
    """
    idle_s = runs.config.chunk_idle_s
    first = await _next(requests, idle_s)
    if first is None or first.WhichOneof("part") != "header":
        raise SluiceError.invalid_argument("header", "the first message of a push carries the header")
    header = first.header
    _check_header(header)
    run = await runs.open(header.run)
    version = Version.from_proto(header.version)
    stored = _compare_committed(run, version, header.shard)
    if stored is not None:
        return pb.PushWeightsResponse(stored_bytes=stored.size_bytes, digest=stored.digest)
    if not header.HasField("local"):
        upload = await _find_upload(runs, run, version, header)
        return await _receive(runs, run, upload, header, partial(_write_chunks, runs, requests))
    source = await _open_local(runs, header)
    try:
        upload = await _find_upload(runs, run, version, header)
        return await _receive(runs, run, upload, header, partial(_copy_file, runs, source))
    finally:
        source.close()


async def _open_local(runs: Runs, header: pb.PushHeader) -> LocalSource:
    if header.resume_offset:
        raise SluiceError.invalid_argument("header.resume_offset", "a local file is read from its beginning")
    directory = runs.config.local_dir
    try:
        return await runs.in_thread(LocalSource, header.local, header.shard.size_bytes, directory)
    except NoLocalFileError as error:
        raise _no_local_file(error) from error


def _no_local_file(error: NoLocalFileError) -> SluiceError:
    return SluiceError.failed_precondition("NO_LOCAL_FILE", f"{error}: push the shard in chunks")


def _check_header(header: pb.PushHeader) -> None:
    try:
        check_shard(header.shard.name)
    except BadNameError as error:
        raise SluiceError.invalid_argument("header.shard.name", str(error)) from error
    if not header.shard.size_bytes:
        raise SluiceError.invalid_argument("header.shard.size_bytes", "give the size of the whole file")
    if header.resume_offset > header.shard.size_bytes:
        raise SluiceError.invalid_argument("header.resume_offset", "lies beyond the end of the shard")


def _compare_committed(run: Run, version: Version, shard: pb.Shard) -> pb.Shard | None:
    """The shard if the version is committed with it; None if the version is not committed."""
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


async def _find_upload(runs: Runs, run: Run, version: Version, header: pb.PushHeader) -> Upload:
    """The upload to go on with, a new one where the stream begins anew."""
    if run.committing == version:
        raise SluiceError.aborted("COMMITTING", f"version {version} is being committed; ask again by CommitVersion")
    try:
        run.ledger.check_push(version)
    except RefusedError as error:
        raise refused(error) from error
    key = (version, header.shard.name)
    known = run.uploads.get(key)
    if known is not None and _goes_on(known, header):
        return known
    if header.resume_offset:
        raise _offset_error(0)
    return await runs.begin_upload(run, version, header.shard)


def _goes_on(upload: Upload, header: pb.PushHeader) -> bool:
    """Whether the header means the file that is coming in: the same, and not from its beginning."""
    same = (
        header.shard.size_bytes == upload.shard.size
        and (not header.shard.digest or header.shard.digest == (upload.shard.digest or upload.announced.digest))
    )  # fmt: skip
    return same and (header.resume_offset > 0 or (upload.shard.complete and bool(header.shard.digest)))


def _offset_error(stored: int) -> SluiceError:
    return SluiceError(
        grpc.StatusCode.FAILED_PRECONDITION,
        "SHARD_OFFSET",
        f"the service holds {stored} bytes of the shard: go on there",
        metadata={"stored_bytes": str(stored)},
    )


async def _receive(
    runs: Runs,
    run: Run,
    upload: Upload,
    header: pb.PushHeader,
    fill: Callable[[Upload, object], Awaitable[None]],
) -> pb.PushWeightsResponse:
    ticket, stored = await runs.in_thread(upload.take_over)
    if not upload.shard.complete and stored != header.resume_offset:
        raise _offset_error(stored)
    try:
        if not upload.shard.complete:
            await fill(upload, ticket)
        if upload.shard.stored == upload.shard.size:
            await runs.in_thread(upload.finish, ticket)
            _check_digest(upload, header.shard)
    except _FAILURES as error:
        failure = _failure(error)
        if (
            isinstance(error, ChunkError | LayoutError | OSError | NoLocalFileError)
            or failure.code is grpc.StatusCode.DATA_LOSS
        ):
            await runs.discard_upload(run, upload, ticket)
        raise failure from error
    return pb.PushWeightsResponse(stored_bytes=upload.shard.stored, digest=upload.shard.digest)


async def _write_chunks(
    runs: Runs, requests: AsyncIterator[pb.PushWeightsRequest], upload: Upload, ticket: object
) -> None:
    """One chunk is written while the next one arrives; never more, so that a slow disk slows the sender down.

    More at once would save starts of threads, and cost more than that in fresh memory for the buffers.
    """
    writing: asyncio.Future[None] | None = None
    flushing: asyncio.Future[None] | None = None
    flushed = upload.shard.stored
    try:
        while (part := await _next(requests, runs.config.chunk_idle_s)) is not None:
            if part.WhichOneof("part") != "chunk":
                raise SluiceError.invalid_argument("part", "after the header, only chunks follow")
            upload.active_at = runs.clock()
            if writing is not None:
                await writing
            writing = runs.in_thread(upload.write, ticket, part.chunk)
            if upload.shard.stored - flushed >= _FLUSHED_AT_ONCE and (flushing is None or flushing.done()):
                flushed, flushing = upload.shard.stored, runs.in_thread(upload.flush)
        if writing is not None:
            await writing
        if flushing is not None:
            await flushing
    finally:
        working = [each for each in (writing, flushing) if each is not None]
        await settle(*working, timeout_s=runs.config.chunk_idle_s)


async def _copy_file(runs: Runs, source: LocalSource, upload: Upload, ticket: object) -> None:
    """Copied in pieces, so that a caller who leaves ends the work."""
    size = upload.shard.size
    for begin in range(0, size, _COPIED_AT_ONCE):
        upload.active_at = runs.clock()
        copying = runs.in_thread(source.copy, upload, ticket, begin, min(begin + _COPIED_AT_ONCE, size))
        try:
            await asyncio.shield(copying)
        finally:
            # The file stays open until the thread is done with it.
            await settle(copying, timeout_s=runs.config.chunk_idle_s)


def _check_digest(upload: Upload, announced: pb.Shard) -> None:
    if announced.digest and announced.digest != upload.shard.digest:
        raise SluiceError.data_loss(
            "SHARD_DIGEST",
            f"shard {announced.name} has digest {upload.shard.digest}, announced was {announced.digest}:"
            " it was discarded, push it again",
        )


def _failure(error: Exception) -> SluiceError:
    """An error on the way in as the contract words it."""
    if isinstance(error, SluiceError):
        return error
    if isinstance(error, ChunkError):
        return SluiceError.data_loss("CHUNK_CRC", f"{error}; the shard was discarded, push it from its beginning")
    if isinstance(error, SupersededError):
        return SluiceError.aborted("SUPERSEDED", str(error))
    if isinstance(error, NoLocalFileError):
        return _no_local_file(error)
    if isinstance(error, OSError):
        return disk_error(error)
    return SluiceError.invalid_argument("chunk", str(error))


async def _next(requests: AsyncIterator[pb.PushWeightsRequest], idle_s: float) -> pb.PushWeightsRequest | None:
    """The next message, None at the end of the stream."""
    try:
        async with asyncio.timeout(idle_s):
            return await anext(requests, None)
    except TimeoutError as error:
        raise SluiceError(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "PUSH_IDLE",
            f"no chunk came for {idle_s:g} s (weightsync.chunk_idle_s); what came in stays: resume the push",
        ) from error
