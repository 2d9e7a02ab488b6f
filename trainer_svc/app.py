"""`sluice trainer`: builds the trainer, serves until a signal, stops cleanly."""

from __future__ import annotations

import asyncio
import os

import structlog

from sluice.config import CommonConfig, Service, check_model
from sluice.rpc import RpcServer, connect
from sluice.v1 import trainer_pb2_grpc
from trainer_svc.config import TrainerConfig
from trainer_svc.service.servicer import TrainerServicer
from trainer_svc.service.trainer import Trainer
from weightsync.publisher import WeightPublisher

__all__ = ["SERVICE"]

SERVICE_NAME = "sluice.v1.TrainerService"


log = structlog.get_logger(__name__)


async def serve(common: CommonConfig, config: TrainerConfig) -> None:
    """Serve one run's trainer.

    The port is open while the model loads, so that the state can be asked for; health says SERVING from then on.

    Raises:
        ConfigError: if the model cannot be one.
    """
    check_model(common.model)
    channel = connect(common.peers.weightsync, common.security)
    publisher = WeightPublisher(channel, common.run, encoding=config.publish.encoding, local=config.publish.local)
    trainer = Trainer(common, config, publisher)
    server = RpcServer(
        "trainer",
        config.server,
        common.security,
        features=[f"objective.{config.objective.preset}", f"device.{config.device}"],
        run=common.run,
    )
    server.add(
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server, TrainerServicer(trainer), SERVICE_NAME, role="admin"
    )
    server.set_serving(False)
    await server.start()
    failed = asyncio.Event()
    loading = asyncio.create_task(_load(trainer, server, failed))
    try:
        await server.serve_until_signal(failed)
    finally:
        ended = await trainer.stop(config.server.drain_s)
        publisher.close()
        await channel.close()
    if not ended:
        log.warning("the compute thread did not end in time, leaving it behind", grace_s=config.server.drain_s)
        # Python aborts the process if it shuts down beside a thread inside of a kernel; nothing is left to put away.
        os._exit(0)
    if loading.done():
        loading.result()
    else:
        loading.cancel()


async def _load(trainer: Trainer, server: RpcServer, failed: asyncio.Event) -> None:
    try:
        await trainer.load()
        server.set_serving(True)
    except BaseException:
        failed.set()
        raise


SERVICE = Service("trainer", TrainerConfig, serve)
