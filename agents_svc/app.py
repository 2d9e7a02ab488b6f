"""`sluice agents`: leases the episodes of a run from a gateway and plays them with a class of the user's, until the run has ended."""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from agents_svc.config import AgentsConfig
from agents_svc.player import Player, hosted_agent, load_agent
from sluice.agent import AgentClient
from sluice.clock import CLOCK, Clock
from sluice.config import CommonConfig, FailedForGoodError, Service, UnfinishedError
from sluice.environments.processes import EnvironmentProcesses
from sluice.peers import missing_peers_reported
from sluice.rpc import RpcServer
from sluice.tasks import settle

_UNBOUNDED_S = 86_400.0
"""More seconds than any drain takes. The server's drain limits the drain of the episodes."""

log = structlog.get_logger(__name__)


async def serve(common: CommonConfig, config: AgentsConfig, clock: Clock = CLOCK) -> None:
    """Play until the run has ended, or until a signal.

    Args:
        common: Settings that all services of the run share.
        config: Settings of the agents.
        clock: The time of an episode.

    Raises:
        ConfigError: if the class cannot be loaded.
        FailedForGoodError: if no episode is played to its end.
        SluiceError: if the gateway lends no episodes, or is away for too long.
        UnfinishedError: if a signal came before the run had ended.
    """
    async with contextlib.AsyncExitStack() as stack:
        if config.environment_processes is None:
            agent = load_agent(config.agent, config.args)
        else:
            limit = (config.start_s, "agents.start_s")
            section = "agents.environment_processes"
            processes = EnvironmentProcesses(
                config.agent, config.args, config.environment_processes, limit, section, clock=clock
            )
            agent = hosted_agent(await stack.enter_async_context(processes), config.agent, config.episode_s)
        player = Player(
            agent,
            at_a_time=config.at_a_time,
            episode_s=config.episode_s,
            most_failures=config.most_failures,
            clock=clock,
        )
        await _play(common, config, player)


async def _play(common: CommonConfig, config: AgentsConfig, player: Player) -> None:
    server = RpcServer("agents", config.server, common.security, run=common.run)
    stop = asyncio.Event()
    server.count_left(lambda: {"episodes": player.playing})
    async with AgentClient(common.peers.gateway, common.run, common.security, patience_s=config.gateway_s) as client:
        playing = asyncio.create_task(
            client.run(player.play, at_a_time=config.at_a_time, stop=stop, drain_s=_UNBOUNDED_S), name="agents"
        )
        playing.add_done_callback(lambda _: player.ended.set())

        unfinished = False

        async def finish(_grace_s: float) -> None:
            """Lease no more episodes, and wait for those in progress. Give the rest back."""
            nonlocal unfinished
            unfinished = not player.ended.is_set()
            stop.set()
            await server.drain.within(playing)

        try:
            await server.start()
            async with missing_peers_reported({"gateway": common.peers.gateway}, common, server, gives_up=False):
                await server.serve_until_signal(player.ended, finish)
        finally:
            playing.cancel()
            await settle(playing)
            await server.stop(0)
    if player.gave_up:
        raise FailedForGoodError(player.gave_up)
    if unfinished:
        raise UnfinishedError("the run has not ended; episodes that were under way are offered again")
    log.info("the run has ended", episodes=playing.result())


SERVICE = Service("agents", AgentsConfig, serve)
