"""External agents in `sluice eval`: a gateway for them, the desk that offers them held-out tasks, and their command.

    agents -> gateway -> desk (in this process, over a journal that is thrown away) -> replicas

They connect as they do in training. The run that they name is `run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import structlog

from orchestrator_svc.app import EPISODES, SESSIONS
from orchestrator_svc.commands.eval.children import Child, Children, ready
from orchestrator_svc.journal.store import Journal
from orchestrator_svc.run.external import EvaluationGroups, ExternalEvaluation
from orchestrator_svc.sessions.desk import Desk, Waiting
from orchestrator_svc.sessions.servicer import EpisodeServicer, SessionServicer
from sluice.config import ConfigError, SecurityConfig, ServerConfig
from sluice.errors import BindError
from sluice.rpc import RpcServer
from sluice.rpc.channel import wait_until_serving
from sluice.rpc.server import LOOPBACK
from sluice.tasks import settle
from sluice.v1 import episode_pb2_grpc, session_pb2_grpc

if TYPE_CHECKING:
    from orchestrator_svc.commands.eval.command import EvalConfig
    from sluice.environments.processes import EnvironmentProcesses
    from sluice.sampling.pool import ReplicaPool

log = structlog.get_logger(__name__)

_GATEWAY_PORTS = (7105, 7115)
"""Those of a run's gateway, which agents that are started by hand try first."""

_ANY_PORTS = (0, 0)
"""Free ones, which the system chooses."""

_FAREWELL_S = 5.0
"""Seconds that agents get to learn that nothing is on offer any more, and to end."""

_QUICK = 3
"""How often agents may end in order, one time after the other, without a submission in between."""


@contextlib.asynccontextmanager
async def served_agents(
    config: EvalConfig, environment: EnvironmentProcesses, pool: ReplicaPool, children: Children
) -> AsyncIterator[tuple[ExternalEvaluation, asyncio.Task[None]]]:
    """Serve agents, and start theirs if the settings have a command for it.

    Yields:
        The workflow that offers them tasks, and a task that raises a ConfigError if gateway or agents die.
    """
    async with contextlib.AsyncExitStack() as stack:
        waiting, groups = Waiting(), EvaluationGroups()
        journal = Journal(children.directory / "sessions", {"run": config.run}, follow=waiting.follow)
        stack.push_async_callback(journal.close)
        desk = Desk(journal, config.external, waiting, secrets.token_bytes(32), posed=groups.posed)
        server = RpcServer("orchestrator", ServerConfig(host=LOOPBACK, port=0), SecurityConfig(), run=config.run)
        server.add(session_pb2_grpc.add_SessionServiceServicer_to_server, SessionServicer(desk, pool), SESSIONS)
        episodes = EpisodeServicer(config.run, desk, offers=True)  # type: ignore[abstract]  # gateways sample: it has no Generate
        server.add(episode_pb2_grpc.add_EpisodeServiceServicer_to_server, episodes, EPISODES)
        await server.start()
        stack.push_async_callback(server.stop, 0.0)
        gateway, addresses = await stack.enter_async_context(_gateway(config, server.target, children))
        duties = [desk.run(), _must_live(gateway)]
        if config.agent_command:
            duties += [_kept_running(config, number, addresses, desk, children) for number in range(config.agents)]
        else:
            sys.stderr.write(
                f"agents may connect: gRPC {addresses['SLUICE_GATEWAY']}, HTTP {addresses['SLUICE_GATEWAY_URL']}, run {config.run}\n"
            )
        running = asyncio.ensure_future(_all(duties))
        stack.push_async_callback(settle, running)
        stack.callback(running.cancel)
        stack.callback(
            desk.end
        )  # first: agents that wait for a task learn that there is none, and have a moment to end
        yield ExternalEvaluation(environment.name, environment, desk, groups), running


@contextlib.asynccontextmanager
async def _gateway(
    config: EvalConfig, orchestrator: str, children: Children
) -> AsyncIterator[tuple[Child, Mapping[str, str]]]:
    """Start a gateway, on any ports if the usual ones are taken; yield it, with the environment variables that tell agents where it is.

    Raises:
        ConfigError: if it does not start.
    """
    for ports in (_ANY_PORTS if config.agent_command else _GATEWAY_PORTS, _ANY_PORTS):
        argv = [sys.executable, "-m", "sluice.cli.main", "gateway"]
        for name, value in _gateway_settings(config, orchestrator, children, *ports).items():
            argv += [f"--{name}", value]
        async with children.started("gateway", argv) as gateway:
            try:
                grpc_port, http_port = await ready(gateway, asyncio.create_task(_serving(gateway)), config.start_s)
            except BindError:
                if ports == _ANY_PORTS:
                    raise
                continue
            yield (
                gateway,
                {
                    "SLUICE_GATEWAY": f"{LOOPBACK}:{grpc_port}",
                    "SLUICE_GATEWAY_URL": f"http://{LOOPBACK}:{http_port}",
                    "SLUICE_RUN": config.run,
                },
            )
            return


def _gateway_settings(
    config: EvalConfig, orchestrator: str, children: Children, port: int, http_port: int
) -> Mapping[str, str]:
    return {
        "run": config.run,
        "output_dir": str(children.directory),
        "log_level": "info",  # it logs where it listens
        "peers.orchestrator": orchestrator,
        "gateway.server.host": LOOPBACK,
        "gateway.server.port": str(port),
        "gateway.server.http_port": str(http_port),
        **{f"gateway.{name}": str(value) for name, value in config.gateway.items()},
    }


async def _serving(gateway: Child) -> tuple[str, str]:
    """Wait until a gateway serves; return its ports, of gRPC and of HTTP."""
    target, url = [await gateway.logged("listening", field) for field in ("target", "url")]
    await wait_until_serving(target, SecurityConfig())
    return target.rpartition(":")[2], url.rpartition(":")[2]


async def _all(duties: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run background tasks until cancelled; raise what the first one raises."""
    tasks = [asyncio.create_task(each) for each in duties]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for each in done:
            each.result()
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _must_live(child: Child) -> None:
    """Raise a ConfigError when a child dies."""
    raise ConfigError(await child.died())


async def _kept_running(
    config: EvalConfig, number: int, addresses: Mapping[str, str], desk: Desk, children: Children
) -> None:
    """Run the command of the agents, again when it ended in order: it may play one episode only.

    Raises:
        ConfigError: if it fails, or ends again and again without having submitted anything.
    """
    name = "agent" if config.agents == 1 else f"agent {number}"
    fruitless = 0
    while True:
        before = desk.journal.ledger.last_seq
        argv = ["sh", "-c", config.agent_command]
        async with children.started(name, argv, {**os.environ, **addresses}) as agent:
            try:
                code = await agent.ended()
            except asyncio.CancelledError:
                if desk.ended:
                    await agent.stop(_FAREWELL_S)
                raise
            if desk.ended:
                return
            if code:
                raise ConfigError(await agent.died())
            fruitless = 0 if desk.journal.ledger.last_seq > before else fruitless + 1
            if fruitless >= _QUICK:
                raise ConfigError(
                    f"{await agent.died()}\nit ended {fruitless} times in a row, and began no episode: it must lease tasks at"
                    " $SLUICE_GATEWAY (gRPC) or $SLUICE_GATEWAY_URL (HTTP), of the run $SLUICE_RUN"
                )
