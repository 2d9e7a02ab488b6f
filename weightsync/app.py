"""The weightsync service: builds the runs and the servicers, and serves until a signal stops it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.chat_template import template_text
from sluice.clock import CLOCK, Clock
from sluice.config import CommonConfig, ConfigError, Service
from sluice.peers import missing_peers_reported
from sluice.rpc import RpcServer, SluiceError, connect
from sluice.rpc.server import advertised_address
from sluice.telemetry import StateMetrics
from sluice.v1 import weightsync_pb2_grpc
from weightsync.config import WeightSyncConfig, is_store_url
from weightsync.format.manifest import run_resource
from weightsync.mirror.bucket import Bucket
from weightsync.mirror.layout import PART_BYTES
from weightsync.mirror.reader import MirrorReader
from weightsync.mirror.writer import Mirror
from weightsync.relay import Relay, RelayCycleError
from weightsync.service.runs import Runs, Upstream
from weightsync.service.servicer import WeightDeliveryServicer, WeightSyncServicer

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
"""Parameters of mallopt(3)."""

_KEPT_BYTES = 256 << 20
_LARGEST_KEPT_BYTES = 32 << 20

_UNUSABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT}


def build_runs(
    common: CommonConfig,
    config: WeightSyncConfig,
    upstream: Upstream | None = None,
    mirror: Mirror | None = None,
    clock: Clock = CLOCK,
) -> Runs:
    """Build the runs of a service as its settings describe them."""

    def directory_of(run: str) -> Path:
        if config.directory is not None:
            return config.directory / run
        return common.output_dir / run / "weights"

    def model_of(run: str) -> str:
        # Another run's base model is not known here; its versions hold weights alone.
        return common.model if run == common.run else ""

    template = template_text(common.chat_template)
    return Runs(config, directory_of, model_of, upstream, mirror=mirror, clock=clock, chat_template=template)


@dataclass(frozen=True, slots=True)
class Serving:
    """A service that answers.

    Attributes:
        server: The server; `target` is where it listens.
        relay: Follows the upstream service, if this is a relay.
        failed: Set when the service cannot continue; the end of `serving` raises the reason.
    """

    server: RpcServer
    runs: Runs
    relay: Relay | None
    failed: asyncio.Event


@asynccontextmanager
async def serving(common: CommonConfig, config: WeightSyncConfig, *, clock: Clock = CLOCK) -> AsyncIterator[Serving]:
    """Serve until the block ends. Raise ConfigError if the settings do not work, for example if relays feed each other."""
    async with AsyncExitStack() as stack:
        relay: Relay | None = None
        reader: MirrorReader | None = None
        mirror: Mirror | None = None
        if config.upstream is not None and is_store_url(config.upstream):
            reader = MirrorReader(Bucket.open(config.upstream, config.mirror_deadline_s))
        elif config.upstream is not None:
            relay = Relay(
                await stack.enter_async_context(connect(config.upstream, common.security, role="trainer")),
                config.upstream,
            )
        if config.mirror is not None:
            bucket = Bucket.open(config.mirror, config.mirror_deadline_s)
            mirror = Mirror(bucket, lambda run: common.output_dir / run / "checkpoints", part_bytes=PART_BYTES)
        runs = build_runs(common, config, relay or reader, mirror, clock)
        stack.push_async_callback(runs.close)
        server = RpcServer(
            "weightsync", config.server, common.security, call_log=common.run_dir / "calls/weightsync.jsonl"
        )
        server.add(
            weightsync_pb2_grpc.add_WeightSyncServiceServicer_to_server,
            WeightSyncServicer(runs),
            "sluice.v1.WeightSyncService",
        )
        server.add(
            weightsync_pb2_grpc.add_WeightDeliveryServiceServicer_to_server,
            WeightDeliveryServicer(runs),
            "sluice.v1.WeightDeliveryService",
        )
        server.readiness.add(runs.waits_for)
        await _open_own_run(runs, common.run)
        failed = asyncio.Event()
        await server.start()
        stack.push_async_callback(server.stop, 0)
        stack.enter_context(StateMetrics(runs.scrape))
        await stack.enter_async_context(_background(runs.retain_forever(), failed))
        if relay is not None:
            address = advertised_address(config.advertise, server.target)
            await stack.enter_async_context(_background(relay.run_forever(address), failed))
        for copying in (reader, mirror):
            if copying is not None:
                await stack.enter_async_context(_background(copying.run_forever(), failed))
        yield Serving(server, runs, relay, failed)


@asynccontextmanager
async def _background(work: Coroutine[Any, Any, None], failed: asyncio.Event) -> AsyncIterator[None]:
    """Run endless work in the background of the block. If it fails, `failed` is set and the error is raised at the end."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda _: failed.set())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            try:
                await task
            except RelayCycleError as error:
                raise ConfigError(str(error)) from error


async def serve(common: CommonConfig, config: WeightSyncConfig) -> None:
    """Serve until SIGTERM or SIGINT."""
    _keep_freed_memory()
    upstream = {} if config.upstream is None else {"weightsync": config.upstream}
    async with serving(common, config) as service, missing_peers_reported(upstream, common, service.server):
        await service.server.serve_until_signal(service.failed)


def _keep_freed_memory() -> None:
    """Let the C library keep freed memory in the process, because chunks come and go thousands of times a second.

    By default glibc adapts its thresholds to the chunks' size, so that it would return each buffer to the kernel and fault it
    in again. No effect with other C libraries.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


async def _open_own_run(runs: Runs, run: str) -> None:
    """Clean up and read the directory before the first call, so that an unusable directory is found now."""
    try:
        kept = await runs.open(run_resource(run))
    except SluiceError as error:
        raise ConfigError(error.message) from error
    try:
        await asyncio.to_thread(kept.store.try_directory)
    except OSError as error:
        if error.errno in _UNUSABLE:  # a full disk may have room again
            raise ConfigError(
                f"{kept.store.root} cannot hold versions ({error}): set weightsync.directory, or output_dir, to a"
                " directory that this user may write to"
            ) from error


SERVICE = Service("weightsync", WeightSyncConfig, serve)
