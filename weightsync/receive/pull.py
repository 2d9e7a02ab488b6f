"""Pulls bytes of a version's shards into a sink, going on where a stream broke."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import grpc
import structlog

from sluice.rpc import SluiceError
from sluice.tasks import settle
from sluice.v1 import common_pb2
from sluice.v1 import weightsync_pb2 as pb
from weightsync.backoff import Backoff
from weightsync.format.chunks import ChunkError, ChunkSizeError, RawChunk, parse_pull_response

__all__ = ["ChunkSink", "PullCall", "PullError", "PullLimits", "ShardRange", "pull_call", "pull_range"]

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

PullCall: TypeAlias = Callable[..., Any]
"""`WeightDeliveryService.PullWeights` on some channel, whose responses stay serialised."""

log = structlog.get_logger(__name__)


class PullError(Exception):
    """Bytes could not be pulled.

    Args:
        message: What failed.
        unreachable: Whether nobody answered, so that asking for other bytes of the same service is no way out.
    """

    def __init__(self, message: str, *, unreachable: bool = False) -> None:
        super().__init__(message)
        self.unreachable = unreachable


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


def pull_call(channel: grpc.aio.Channel) -> PullCall:
    """PullWeights of a channel, for `pull_range`."""
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
        log.info("pull broke, going on", shard=wanted.shard, offset=sink.position, reason=reason)
        await asyncio.sleep(backoff.fail())


async def _stream(call: PullCall, wanted: ShardRange, sink: ChunkSink, threads: Executor, limits: PullLimits) -> None:
    """One stream, from the last good byte on. When this ends, no thread works on the sink."""
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
            await settle(feeding)  # the next attempt meets its failure again, or what broke the stream is the news


def _feed(sink: ChunkSink, message: bytes) -> None:
    sink.feed(parse_pull_response(message))
