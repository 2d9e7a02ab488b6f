"""Pulls one version into a staging file, going on where it broke."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass

import grpc
import structlog

from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from weightsync.staging import StagingFile

__all__ = ["PullError", "PullLimits", "pull_version"]

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

log = structlog.get_logger(__name__)


class PullError(Exception):
    """The version could not be pulled."""


@dataclass(frozen=True, slots=True)
class PullLimits:
    """How long a pull waits.

    Attributes:
        deadline_s: Seconds that one stream may last.
        idle_s: Seconds that it may pass without a chunk.
        attempts: Streams in a row that may fail without a single chunk.
        first_pause_s: Pause before the second of them; doubled from each to the next.
    """

    deadline_s: float = 3600.0
    idle_s: float = 30.0
    attempts: int = 6
    first_pause_s: float = 0.1


async def pull_version(
    stub: weightsync_pb2_grpc.WeightDeliveryServiceAsyncStub,
    staging: StagingFile,
    thread: Executor,
    limits: PullLimits,
) -> None:
    """Pull every shard of the staging file's version; bytes that are verified are not pulled again.

    Args:
        stub: The service.
        staging: The file to fill.
        thread: One thread, in which the file is written while the next chunk arrives.
        limits: How long to wait.

    Raises:
        PullError: if the service does not give the version, or cannot be reached in so many attempts.
        StagingError: if what it gives is damaged.
        OSError: if shared memory is full.
    """
    for shard in staging.manifest.shards:
        failures = 0
        while (before := staging.stored(shard.name)) < shard.size_bytes:
            try:
                await _stream(stub, staging, shard.name, thread, limits)
            except grpc.aio.AioRpcError as error:
                failure = SluiceError.from_rpc(error)
                if failure.code in _FINAL:
                    raise PullError(str(failure)) from error
                reason = str(failure)
            except TimeoutError:
                reason = f"no chunk came for {limits.idle_s:g} s"
            else:
                reason = "the stream ended early"
            if staging.stored(shard.name) >= shard.size_bytes:
                break
            failures = 0 if staging.stored(shard.name) > before else failures + 1
            if failures >= limits.attempts:
                raise PullError(f"shard {shard.name} could not be pulled in {failures} attempts: {reason}")
            log.info("pull broke, going on", shard=shard.name, offset=staging.stored(shard.name), reason=reason)
            await asyncio.sleep(limits.first_pause_s * 2**failures)


async def _stream(
    stub: weightsync_pb2_grpc.WeightDeliveryServiceAsyncStub,
    staging: StagingFile,
    shard: str,
    thread: Executor,
    limits: PullLimits,
) -> None:
    """One stream, from the last good byte on. When this ends, no thread works on the file."""
    request = pb.PullWeightsRequest(
        run=staging.manifest.run, version=staging.manifest.version, shard=shard, offset=staging.stored(shard)
    )
    call = stub.PullWeights(request, timeout=limits.deadline_s)
    loop = asyncio.get_running_loop()
    writing: asyncio.Future[None] | None = None
    try:
        while True:
            async with asyncio.timeout(limits.idle_s):
                response = await call.read()
            if writing is not None:
                await asyncio.shield(writing)
            if not isinstance(response, pb.PullWeightsResponse):  # the end of the stream
                return
            writing = loop.run_in_executor(thread, staging.feed, shard, response.chunk)
    finally:
        call.cancel()
        if writing is not None and not writing.done():
            await asyncio.wait({writing})
