"""`sluice envserver`: serves an environment of Python to runs on other machines, over EnvironmentService."""

from __future__ import annotations

import asyncio

from envserver_svc.config import EnvServerConfig
from envserver_svc.servicer import EnvironmentServicer
from sluice.clock import CLOCK, Clock
from sluice.config import CommonConfig, Service
from sluice.environments.processes import EnvironmentProcesses
from sluice.rpc import RpcServer
from sluice.tasks import settle
from sluice.telemetry import StateMetrics
from sluice.v1 import environment_pb2_grpc


async def serve(common: CommonConfig, config: EnvServerConfig, clock: Clock = CLOCK) -> None:
    """Serve until a signal.

    Args:
        common: Settings that all services of a run share.
        config: Settings of this service.
        clock: Times the calls of the environment, and how long episodes are idle.

    Raises:
        ConfigError: if the environment cannot be constructed, or the address cannot be bound.
    """
    server = RpcServer("envserver", config.server, common.security, run=common.run, keeps_clients=True)
    limit = (config.start_s, "envserver.start_s")
    async with EnvironmentProcesses(
        config.source, config.args, config.environment_processes, limit, "envserver.environment_processes", clock=clock
    ) as processes:
        servicer = EnvironmentServicer(processes, config, clock, server.drain)
        server.add(
            environment_pb2_grpc.add_EnvironmentServiceServicer_to_server, servicer, "sluice.v1.EnvironmentService"
        )
        server.readiness.add(processes.waits_for)
        server.count_left(lambda: {**server.calls_left(), "episodes": servicer.open_episodes})

        async def finish(_grace_s: float) -> None:
            """Wait until the open episodes have ended."""
            await server.until_nothing_is_left()

        closing = asyncio.create_task(servicer.run(), name="idle episodes")
        try:
            await server.start()
            with StateMetrics(servicer.scrape):
                await server.serve_until_signal(finish=finish)
        finally:
            await server.stop(0)
            closing.cancel()
            await settle(closing)


SERVICE = Service("envserver", EnvServerConfig, serve)
