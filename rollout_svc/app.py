"""`sluice rollout`: builds a replica, announces it, serves until a signal, and stops cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import structlog

from rollout_svc.admin import ReplicaMetrics, RolloutAdminServicer
from rollout_svc.config import RolloutConfig
from rollout_svc.engines.base import EngineError, EnginePackage, EngineSettingsError, InferenceEngine
from rollout_svc.replica import EngineSupervisor, ReplicaWeights
from rollout_svc.replies import reply_format
from rollout_svc.servicer import HAND_OVER_S, RolloutServicer
from rollout_svc.tokenizer import ModelTokenizer, load_tokenizer
from sluice.backoff import Backoff
from sluice.clock import CLOCK, Clock
from sluice.config import CommonConfig, ConfigError, SecurityConfig, Service
from sluice.engines import ENGINES
from sluice.peers import missing_peers_reported
from sluice.rpc import RpcServer, SluiceError, connect
from sluice.rpc.drain import Drain
from sluice.rpc.server import DRAINING, advertised_address
from sluice.v1 import orchestrator_pb2 as pb
from sluice.v1 import orchestrator_pb2_grpc, rollout_pb2_grpc

if TYPE_CHECKING:
    from sluice.openai.server import HttpServer

CALL_S = 5.0
"""Deadline of one call in seconds."""

LONGEST_PAUSE_S = 10.0
"""Maximum seconds between two attempts to reach the orchestrator, so that a restarted orchestrator finds its replicas soon."""

BEATS = 3
"""Heartbeats within one lease, so that two may be lost."""

LEAVE_S = 1.0
"""Maximum seconds that a replica waits at its end until the orchestrator knows that it leaves."""

log = structlog.get_logger()


async def serve(common: CommonConfig, config: RolloutConfig) -> None:
    """Serve one replica.

    The port opens after the engine has started. On a CPU the engine's process is forked, and would keep inherited sockets open.

    Raises:
        ConfigError: if the engine can never serve the model with these settings.
        SluiceError: INTERNAL if the engine did not start.
    """
    # Check the address before the engine starts, which takes long.
    server = RpcServer(
        "rollout",
        config.server,
        common.security,
        features=[f"engine.{config.engine}", *(["lora"] if config.lora.enabled else [])],
        run=common.run,
        call_log=common.run_dir / f"calls/{config.replica}.jsonl",
    )
    package: EnginePackage = importlib.import_module(ENGINES[config.engine].package)
    try:
        engine = package.build(common, config)
        await engine.start()
    except EngineSettingsError as error:
        raise ConfigError(str(error)) from error
    except EngineError as error:
        raise SluiceError(grpc.StatusCode.INTERNAL, "ENGINE_FAILED", str(error)) from error
    try:
        loaded = await load_tokenizer(common)
        parsers = ENGINES[config.engine].parsers
        # vLLM's parsers take seconds to import.
        replies = await asyncio.to_thread(
            reply_format,
            loaded,
            config.tool_parser,
            config.reasoning_parser,
            parsers=parsers,
            arguments=common.chat_template_kwargs,
        )
        tokenizer = ModelTokenizer(loaded, replies, arguments=common.chat_template_kwargs)
        _freeze_what_is_loaded()
        await _serve(common, config, server, engine, tokenizer)
    finally:
        await engine.stop()


async def _serve(
    common: CommonConfig, config: RolloutConfig, server: RpcServer, engine: InferenceEngine, tokenizer: ModelTokenizer
) -> None:
    drain = Drain()
    supervisor = EngineSupervisor(engine, config.engine_restarts, partial(_report_engine, server, drain))
    weights = ReplicaWeights(common, config, supervisor)
    requests = RolloutServicer(
        f"runs/{common.run}", supervisor, tokenizer, config.limits, request_s=config.deadlines.request_s, drain=drain
    )
    admin = RolloutAdminServicer(
        config.replica, supervisor, weights, requests, drain=drain, drain_s=config.server.drain_s
    )
    server.add(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, requests, "sluice.v1.RolloutService")
    server.add(rollout_pb2_grpc.add_RolloutAdminServiceServicer_to_server, admin, "sluice.v1.RolloutAdminService")
    server.readiness.add(weights.waits_for)
    http = _http_server(common, config, requests, admin, server)
    try:
        server.count_left(lambda: {"samples": requests.samples})
        await server.start()
        if http is not None:
            await http.start()
    except BaseException:
        await server.stop(0)
        await weights.close()
        raise
    metrics = ReplicaMetrics(supervisor, weights)
    ended = asyncio.Event()
    announcer = _announcer(common, config, server) if config.announce else None

    duties = [
        weights.run_forever(),
        supervisor.watch_forever(weights.restart_engine),
        admin.expire_pauses_forever(),
        _drain_when_asked(drain, server, requests, announcer),
    ]
    if announcer is not None:
        duties.append(_announce(announcer, drain, requests))
    tasks = [asyncio.create_task(_and_end(duty, ended)) for duty in duties]

    async def finish(grace_s: float) -> None:
        """Hand the requests over while both ports still respond, then close the HTTP port."""
        drain.begin(max(0.0, grace_s - HAND_OVER_S))
        await _hand_over(requests, announcer)
        if http is not None:
            await http.stop(HAND_OVER_S)

    needed = {"weightsync": common.peers.weightsync} if config.follow_weights else {}
    needed |= {"orchestrator": common.peers.orchestrator} if config.announce else {}
    try:
        async with missing_peers_reported(needed, common, server):
            await server.serve_until_signal(ended, finish)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        metrics.close()
        if http is not None:
            await http.stop(0)
        await weights.close()
    for result in results:
        if isinstance(result, Exception):
            raise result


def _report_engine(server: RpcServer, drain: Drain, serving: bool) -> None:
    """Report through the health service that the engine died, or serves again."""
    if serving:
        _freeze_what_is_loaded()
    why_not = DRAINING if drain.begun.is_set() else "its engine, which restarts"
    server.set_serving(serving and not drain.begun.is_set(), why_not)


def _freeze_what_is_loaded() -> None:
    """Exclude the objects of torch, vLLM and the model from garbage collection.

    A full collection would visit all of them. That blocks the event loop for half a second, and takes a tenth of this process's time.
    """
    gc.collect()
    gc.freeze()


def _http_server(
    common: CommonConfig, config: RolloutConfig, requests: RolloutServicer, admin: RolloutAdminServicer, rpc: RpcServer
) -> HttpServer | None:
    server = config.server
    if server.http_port is None:
        return None
    from rollout_svc.http import create_app  # noqa: PLC0415 - only where HTTP is served
    from sluice.openai.server import HttpServer  # noqa: PLC0415

    app = create_app(
        requests, admin, common.model, rpc.access, server.host, call_log=rpc.call_log, readiness=rpc.readiness
    )
    return HttpServer(app, server.host, server.http_port, common.security, most_connections=server.max_connections)


class Announcer:
    """Registers a replica and renews its lease.

    Args:
        orchestrator: Address of the orchestrator.
        run: Name of the run.
        replica: Name of the replica.
        address: Address at which the orchestrator reaches it.
        clock: Time of pauses.
    """

    def __init__(
        self, orchestrator: str, security: SecurityConfig, *, run: str, replica: str, address: str, clock: Clock = CLOCK
    ) -> None:
        self._orchestrator, self._security, self._clock = orchestrator, security, clock
        self._run, self._replica, self._address = f"runs/{run}", replica, address
        self._left = asyncio.Event()

    async def left(self) -> None:
        """Wait until the orchestrator knows that the replica leaves, at most `LEAVE_S`. Otherwise it would take the replica's end for a failure.

        Call this when the drain has begun, and end the replica afterwards.
        """
        with contextlib.suppress(TimeoutError):
            async with self._clock.timeout(LEAVE_S):
                await self._left.wait()

    async def run(self, drain: Drain) -> None:
        """Announce the replica until it drains, then report that it leaves."""
        try:
            await self._announce(drain)
        finally:
            self._left.set()

    async def _announce(self, drain: Drain) -> None:
        async with connect(self._orchestrator, self._security, role="replica") as channel:
            stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
            asked = registered = False
            backoff = Backoff(longest_s=LONGEST_PAUSE_S)
            while not drain.begun.is_set():
                asked = True
                try:
                    lease_s = await (self._renew(stub) if registered else self._register(stub))
                except SluiceError as error:
                    if registered and error.code is grpc.StatusCode.NOT_FOUND:  # restarted, or the lease ended
                        registered = False
                        continue
                    if not backoff.failures:
                        log.warning(
                            "cannot announce this replica; trying again",
                            orchestrator=self._orchestrator,
                            error=str(error),
                        )
                    pause_s = backoff.fail()
                else:
                    if not registered or backoff.failures:
                        log.info("announced", orchestrator=self._orchestrator, address=self._address, lease_s=lease_s)
                    registered, pause_s = True, lease_s / BEATS
                    backoff.succeed()
                with contextlib.suppress(TimeoutError):
                    async with self._clock.timeout(pause_s):
                        await drain.begun.wait()
            if asked:  # even if no answer came: it may have been lost
                with contextlib.suppress(SluiceError):  # the orchestrator notices by itself, a little later
                    await self._renew(stub, leaving=True)

    async def _register(self, stub: orchestrator_pb2_grpc.OrchestratorServiceAsyncStub) -> float:
        request = pb.RegisterReplicaRequest(run=self._run, replica=self._replica, address=self._address)
        try:
            answer = await stub.RegisterReplica(request, timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            raise SluiceError.from_rpc(error) from error
        return float(answer.lease.ToNanoseconds()) / 1e9

    async def _renew(self, stub: orchestrator_pb2_grpc.OrchestratorServiceAsyncStub, *, leaving: bool = False) -> float:
        request = pb.HeartbeatRequest(run=self._run, replica=self._replica, leaving=leaving)
        try:
            answer = await stub.Heartbeat(request, timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            raise SluiceError.from_rpc(error) from error
        return float(answer.lease.ToNanoseconds()) / 1e9


def _announcer(common: CommonConfig, config: RolloutConfig, server: RpcServer) -> Announcer:
    address = advertised_address(config.advertise, server.target)
    return Announcer(
        common.peers.orchestrator, common.security, run=common.run, replica=config.replica, address=address
    )


async def _announce(announcer: Announcer, drain: Drain, requests: RolloutServicer) -> None:
    """Announce the replica until it drains, and wait until its requests have ended."""
    await announcer.run(drain)
    await requests.finish()


async def _drain_when_asked(
    drain: Drain, server: RpcServer, requests: RolloutServicer, announcer: Announcer | None
) -> None:
    """Hand the requests over when the admin asks for it. A signal meanwhile shortens the drain."""
    await drain.begun.wait()
    server.set_serving(False, DRAINING)
    await _hand_over(requests, announcer)


async def _hand_over(requests: RolloutServicer, announcer: Announcer | None) -> None:
    """Finish the requests, and let the orchestrator know that this replica leaves."""
    await requests.finish()
    if announcer is not None:
        await announcer.left()


async def _and_end(duty: Coroutine[Any, Any, None], ended: asyncio.Event) -> None:
    """Run a background task. When it ends, by a failure or because the replica was drained, the replica stops."""
    try:
        await duty
    finally:
        ended.set()


SERVICE = Service("rollout", RolloutConfig, serve)
