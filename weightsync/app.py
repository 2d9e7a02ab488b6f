"""The weightsync service: builds the store and the servicers, and serves until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from sluice.config import CommonConfig, ConfigError, Service
from sluice.rpc import RpcServer, SluiceError
from sluice.v1 import weightsync_pb2_grpc
from weightsync.config import WeightSyncConfig
from weightsync.delivery import WeightDeliveryServicer
from weightsync.names import run_resource
from weightsync.runs import Runs
from weightsync.service import WeightSyncServicer

__all__ = ["SERVICE", "build_runs", "serve"]


def build_runs(common: CommonConfig, config: WeightSyncConfig) -> Runs:
    """The runs of a service as its settings describe them."""

    def directory_of(run: str) -> Path:
        if config.directory is not None:
            return config.directory / run
        return common.output_dir / run / "weights"

    def model_of(run: str) -> str:
        """Another run's base model is not known here; its versions hold weights alone."""
        return common.model if run == common.run else ""

    return Runs(config, directory_of, model_of)


async def serve(common: CommonConfig, config: WeightSyncConfig) -> None:
    """Serve until SIGTERM or SIGINT."""
    runs = build_runs(common, config)
    ingest, delivery = WeightSyncServicer(runs), WeightDeliveryServicer(runs)
    server = RpcServer("weightsync", config.server, common.security)
    server.add(
        weightsync_pb2_grpc.add_WeightSyncServiceServicer_to_server, ingest, "sluice.v1.WeightSyncService", "admin"
    )
    server.add(
        weightsync_pb2_grpc.add_WeightDeliveryServiceServicer_to_server,
        delivery,
        "sluice.v1.WeightDeliveryService",
        "agent",
    )
    await _open_own_run(runs, common.run)
    await server.start()
    retention = asyncio.create_task(runs.retain_forever())
    try:
        await server.serve_until_signal()
    finally:
        retention.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await retention
        await ingest.close()
        await runs.close()


async def _open_own_run(runs: Runs, run: str) -> None:
    """Sweep and read the directory before the first call, and find out now if it cannot be used."""
    try:
        await runs.open(run_resource(run))
    except SluiceError as error:
        raise ConfigError(error.message) from error


SERVICE = Service("weightsync", WeightSyncConfig, serve)
