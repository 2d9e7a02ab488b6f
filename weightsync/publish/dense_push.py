"""Whole tensors on their way out, from the memory in which they lie."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import grpc
import structlog

from sluice.rpc import SluiceError
from sluice.tasks import settle
from sluice.v1 import weightsync_pb2 as pb
from weightsync.format.manifest import DenseTensor, check_sendable, version_digest
from weightsync.publish.push_report import PushReport
from weightsync.publish.shard_source import ShardSource
from weightsync.publish.transfer import REPEATABLE, REPEATABLE_REASONS, Destination, ShardTransfer

__all__ = ["push_dense"]

Digests = asyncio.Task[dict[str, str]]

log = structlog.get_logger(__name__)


async def push_dense(
    to: Destination,
    source: ShardSource,
    *,
    chunk_bytes: int,
    labels: Mapping[str, str],
    form: pb.Manifest | None = None,
) -> PushReport:
    """Push one shard and commit it as a version; a failure on the way is repeated once.

    Args:
        to: The version at its service.
        source: Its tensors.
        chunk_bytes: Bytes per chunk.
        labels: Free facts for the manifest.
        form: Kind, base and adapter_config; None: an anchor.

    Raises:
        SluiceError: as the contract says of PushWeights and CommitVersion.
        ManifestError: if there are more tensors than a manifest can name.
    """
    check_sendable([source.describe()])
    announced = pb.Manifest(run=to.run, version=to.version.to_proto(), labels=dict(labels))
    announced.MergeFrom(form or pb.Manifest(kind=pb.VERSION_KIND_ANCHOR))
    transfer = ShardTransfer(to, source, source.describe(), chunk_bytes=chunk_bytes)
    digests: Digests = asyncio.create_task(asyncio.to_thread(source.tensor_digests))  # beside the transfer
    try:
        try:
            return await _attempt(to, source, transfer, digests, announced, resume=False)
        except SluiceError as error:
            if error.code not in REPEATABLE and error.reason not in REPEATABLE_REASONS:
                raise
            log.warning("push broke, going on", version=str(to.version), error=str(error))
        return await _attempt(to, source, transfer, digests, announced, resume=True)
    finally:
        await settle(digests)  # it reads the caller's memory


async def _attempt(
    to: Destination,
    source: ShardSource,
    transfer: ShardTransfer,
    digests: Digests,
    announced: pb.Manifest,
    *,
    resume: bool,
) -> PushReport:
    try:
        started = time.perf_counter()
        await transfer.send(resume=resume)
        pushed = time.perf_counter()
        shard = source.describe(await asyncio.shield(digests))
        request = pb.CommitVersionRequest(manifest=_with_shard(announced, shard))
        response = await to.stub.CommitVersion(request, timeout=to.remaining())
    except grpc.aio.AioRpcError as error:
        raise SluiceError.from_rpc(error) from error
    return PushReport(
        bytes_sent=transfer.bytes_sent,
        push_s=pushed - started,
        commit_s=time.perf_counter() - pushed,
        digest=response.manifest.digest,
        duplicate=response.duplicate,
        dense_bytes=sum(entry.size for entry in source.entries),
    )


def _with_shard(announced: pb.Manifest, shard: pb.Shard) -> pb.Manifest:
    digest = version_digest(
        DenseTensor(each.name, each.dtype, tuple(each.global_shape), each.digest) for each in shard.tensors
    )
    manifest = pb.Manifest(shards=[shard], digest=digest)
    manifest.MergeFrom(announced)
    return manifest
