"""Pulls the shards of a version into sinks: over sockets, each from where a broken stream ended, or from files of this host."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import grpc
import structlog

from sluice.host_files import PeerFileError, open_peer_file
from sluice.rpc import SluiceError
from sluice.tasks import run_to_end, settle
from sluice.v1 import common_pb2
from sluice.v1 import weightsync_pb2 as pb
from weightsync.backoff import Backoff
from weightsync.format.chunks import ChunkError, ChunkSizeError, RawChunk, parse_pull_response

__all__ = [
    "ChunkSink",
    "PullCall",
    "PullCost",
    "PullError",
    "PullLimits",
    "ShardPuller",
    "ShardRange",
    "StagingError",
    "in_thread",
    "is_on_this_host",
    "pull_call",
    "pull_range",
    "read_local",
]

T = TypeVar("T")

_METHOD = "/sluice.v1.WeightDeliveryService/PullWeights"

_FINAL = {
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.DATA_LOSS,
}
"""Answers that another attempt would get again."""

_LOCAL_BYTES = 64 << 20
"""Bytes that one thread reads from a file of this host; a pull that is no longer wanted ends after so many."""

_BLOCK_BYTES = 1 << 20
"""Bytes read at a time; they stay in the processor's cache while they are hashed and written."""

PullCall: TypeAlias = Callable[..., Any]
"""`WeightDeliveryService.PullWeights` on some channel, whose responses stay serialised."""

log = structlog.get_logger(__name__)


class PullError(Exception):
    """Bytes could not be pulled.

    Args:
        message: What failed.
        unreachable: Whether nobody answered, so that asking the same service for other bytes is no way out.
    """

    def __init__(self, message: str, *, unreachable: bool = False) -> None:
        super().__init__(message)
        self.unreachable = unreachable


class StagingError(Exception):
    """What came in is not the version that was announced, or there is no room for it."""


@dataclass(frozen=True, slots=True)
class PullLimits:
    """How long a pull waits, and how much it does at a time.

    Attributes:
        deadline_s: Seconds that one stream may last.
        idle_s: Seconds that it may pass without a chunk.
        attempts: Streams in a row that may fail without a single chunk.
        first_pause_s: Pause before the second of them; doubled from each to the next, up to five seconds. With ten attempts
            a service may be away for half a minute, such as for a restart, and nothing is pulled twice.
        streams: Shards that are pulled at a time.
        copy_wait_s: Seconds to wait while another process of the host stages the same version.
        room_wait_s: Seconds to wait until receivers of the host have let go of older versions, so that base and one staged
            copy are all that lies in memory; then what is free decides.
    """

    deadline_s: float = 3600.0
    idle_s: float = 30.0
    attempts: int = 10
    first_pause_s: float = 0.1
    streams: int = 4
    copy_wait_s: float = 600.0
    room_wait_s: float = 10.0


@dataclass(slots=True)
class PullCost:
    """What a pull took.

    Attributes:
        pulled_bytes: Bytes that came over sockets.
        local_bytes: Bytes that were read from files of this host.
        last_byte_at: `time.perf_counter` when the last byte had come.
    """

    pulled_bytes: int = 0
    local_bytes: int = 0
    last_byte_at: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True, slots=True)
class ShardRange:
    """Bytes that are wanted.

    Attributes:
        run: ``runs/{run}``.
        version: The version.
        shard: Name of its shard.
        end: Byte after the last one wanted; the sink knows the first.
        base: Base of the delta that the shard is of; None for a dense form or an adapter.
    """

    run: str
    version: common_pb2.PolicyVersion
    shard: str
    end: int
    base: common_pb2.PolicyVersion | None = None


class ChunkSink(Protocol):
    """Takes the bytes of one range in order."""

    @property
    def position(self) -> int:
        """The next byte of the file that is wanted; all before it are checked and kept."""
        ...

    def feed(self, chunk: RawChunk) -> None:
        """Check and keep the next bytes. Blocking; called in a thread, one call at a time.

        Raises:
            ChunkError, ChunkSizeError: if they were damaged on their way; nothing of them is kept.
            StagingError: if they are not what was announced.
            OSError: if there is no room.
        """
        ...


class ShardPuller:
    """Pulls the shards of versions from one service.

    Args:
        call: The service.
        threads: Where sinks work.
        limits: How long to wait, and how many shards to pull at a time.
    """

    def __init__(self, call: PullCall, threads: Executor, limits: PullLimits) -> None:
        self.threads = threads
        self._call = call
        self._limits = limits

    async def pull(
        self,
        manifest: pb.Manifest,
        files: Mapping[str, pb.LocalFile],
        sinks: Mapping[str, ChunkSink],
        cost: PullCost,
    ) -> None:
        """Fill the sinks of all shards, several at a time.

        Args:
            manifest: The dense form, delta or adapter.
            files: Shards as files of the service's host, by shard name; those that are on this host are read.
            sinks: By shard name.
            cost: Grows by what came, also where the pull fails.

        Raises:
            PullError, StagingError, OSError: as `pull_range` and `read_local`.
        """
        slots = asyncio.Semaphore(self._limits.streams)

        async def pull(shard: pb.Shard) -> None:
            async with slots:
                await self._pull_shard(manifest, shard, files.get(shard.name), sinks[shard.name], cost)

        tasks = [asyncio.create_task(pull(shard)) for shard in manifest.shards]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            cost.last_byte_at = time.perf_counter()

    async def _pull_shard(
        self, manifest: pb.Manifest, shard: pb.Shard, file: pb.LocalFile | None, sink: ChunkSink, cost: PullCost
    ) -> None:
        before, end = sink.position, shard.size_bytes
        if file is not None and is_on_this_host(file):
            while sink.position < end:
                until = min(end, sink.position + _LOCAL_BYTES)
                await in_thread(self.threads, partial(read_local, file, end, sink, until))
            cost.local_bytes += sink.position - before
            return
        base = manifest.base if manifest.kind == pb.VERSION_KIND_DELTA else None
        wanted = ShardRange(manifest.run, manifest.version, shard.name, end, base)
        try:
            await pull_range(self._call, wanted, sink, self.threads, self._limits)
        finally:
            cost.pulled_bytes += sink.position - before


def pull_call(channel: grpc.aio.Channel) -> PullCall:
    """Return PullWeights of a channel, for `pull_range`."""
    call: PullCall = channel.unary_stream(
        _METHOD, request_serializer=pb.PullWeightsRequest.SerializeToString, response_deserializer=None
    )
    return call


async def pull_range(
    call: PullCall, wanted: ShardRange, sink: ChunkSink, threads: Executor, limits: PullLimits
) -> None:
    """Fill a sink; bytes that it has are not pulled again.

    Args:
        call: The service.
        wanted: What to pull.
        sink: Takes it.
        threads: Where the sink works while the next chunk arrives.
        limits: How long to wait.

    Raises:
        PullError: if the service does not give the bytes, or cannot be reached in so many attempts.
        StagingError: if what it gives is not what was announced.
        OSError: if shared memory is full.
    """
    backoff = Backoff(limits.first_pause_s)
    while (before := sink.position) < wanted.end:
        try:
            await _stream(call, wanted, sink, threads, limits)
        except grpc.aio.AioRpcError as error:
            failure = SluiceError.from_rpc(error)
            if failure.code in _FINAL:
                raise PullError(str(failure)) from error
            reason = str(failure)
        except TimeoutError:
            reason = f"no chunk came for {limits.idle_s:g} s"
        except (ChunkError, ChunkSizeError) as error:
            reason = str(error)
        else:
            reason = "the stream ended early"
        if sink.position >= wanted.end:
            break
        if sink.position > before:
            backoff.succeed()
        elif backoff.failures + 1 >= limits.attempts:
            raise PullError(
                f"shard {wanted.shard} could not be pulled in {limits.attempts} attempts: {reason}", unreachable=True
            )
        log.info("pull broke; continuing", shard=wanted.shard, offset=sink.position, reason=reason)
        await asyncio.sleep(backoff.fail())


async def _stream(call: PullCall, wanted: ShardRange, sink: ChunkSink, threads: Executor, limits: PullLimits) -> None:
    """Read one stream, from the last good byte on. When this ends, no thread works on the sink."""
    request = pb.PullWeightsRequest(
        run=wanted.run,
        version=wanted.version,
        shard=wanted.shard,
        offset=sink.position,
        length=wanted.end - sink.position,
        base=wanted.base,
    )
    stream = call(request, timeout=limits.deadline_s)
    loop = asyncio.get_running_loop()
    feeding: asyncio.Future[None] | None = None
    try:
        while True:
            async with asyncio.timeout(limits.idle_s):
                message = await stream.read()
            if feeding is not None:
                await asyncio.shield(feeding)
            if not isinstance(message, bytes):  # the end of the stream
                return
            feeding = loop.run_in_executor(threads, _feed, sink, message)
    finally:
        stream.cancel()
        if feeding is not None:
            await settle(feeding)  # its failure shows again in the next attempt, or what broke the stream is raised


def _feed(sink: ChunkSink, message: bytes) -> None:
    sink.feed(parse_pull_response(message))


def is_on_this_host(file: pb.LocalFile) -> bool:
    """Whether the path leads to that very file. On another host, or in another container, it does not."""
    try:
        status = Path(file.path).lstat()
    except (OSError, ValueError):
        return False
    return bool(file.path) and (status.st_dev, status.st_ino) == (file.device, file.inode)


def read_local(file: pb.LocalFile, size: int, sink: ChunkSink, end: int) -> None:
    """Fill a sink from a file of this host. Blocking. Wrong bytes show in their digests.

    It reads and does not map the file, so that a file that is truncated meanwhile is an error and not a signal.

    Args:
        file: The file.
        size: Bytes that it must have.
        sink: Takes them, beginning with the first that it wants.
        end: Byte after the last one wanted.

    Raises:
        PullError: if it cannot be read, or is another file.
        StagingError: if it holds something else than was announced.
        OSError: if there is no room for it.
    """
    try:
        descriptor = open_peer_file(file.path, file.device, file.inode, size)
    except PeerFileError as error:
        raise PullError(str(error)) from error
    try:
        block = memoryview(bytearray(min(_BLOCK_BYTES, size)))
        while sink.position < end:
            part = block[: min(len(block), end - sink.position)]
            count = _read(file.path, descriptor, part, sink.position)
            sink.feed(RawChunk(sink.position, block[:count]))
    finally:
        os.close(descriptor)


def _read(path: str, descriptor: int, block: memoryview, position: int) -> int:
    try:
        count = os.preadv(descriptor, [block], position)
    except OSError as error:
        raise PullError(f"{path} cannot be read: {error}") from error
    if not count:
        raise PullError(f"{path} ends at byte {position}")
    return count


async def in_thread(threads: Executor, work: Callable[[], T]) -> T:
    """Run in a thread. A cancelled caller still waits for the thread, which may work on a file that is about to be removed."""
    return await run_to_end(asyncio.get_running_loop().run_in_executor(threads, work))
