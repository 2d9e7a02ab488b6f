"""`sluice rollout`: builds a replica, serves until a signal, and stops cleanly."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from rollout_svc.admin import ReplicaMetrics, RolloutAdminServicer
from rollout_svc.config import RolloutConfig
from rollout_svc.engines.base import EnginePackage, InferenceEngine
from rollout_svc.servicer import RolloutServicer
from rollout_svc.supervision import EngineSupervisor
from rollout_svc.tokenizer import ModelTokenizer, load_tokenizer
from rollout_svc.weights import ReplicaWeights
from sluice.config import CommonConfig, Service
from sluice.engines import ENGINES
from sluice.rpc import RpcServer
from sluice.v1 import rollout_pb2_grpc

if TYPE_CHECKING:
    from sluice.openai.server import HttpServer


async def serve(common: CommonConfig, config: RolloutConfig) -> None:
    """Serve one replica.

    The port opens after the engine has started: on a CPU the engine's process is forked and would keep open sockets.
    """
    # Its address is checked before the engine takes its time to start.
    server = RpcServer(
        "rollout",
        config.server,
        common.security,
        features=[f"engine.{config.engine}", *(["lora"] if config.lora.enabled else [])],
        run=common.run,
    )
    package: EnginePackage = importlib.import_module(ENGINES[config.engine].package)
    engine = package.build(common.model, config, common.max_staleness)
    await engine.start()
    try:
        tokenizer = ModelTokenizer(await load_tokenizer(common.model))
        await _serve(common, config, server, engine, tokenizer)
    finally:
        await engine.stop()


async def _serve(
    common: CommonConfig, config: RolloutConfig, server: RpcServer, engine: InferenceEngine, tokenizer: ModelTokenizer
) -> None:
    supervisor = EngineSupervisor(engine, config.engine_restarts, server.set_serving)
    weights = ReplicaWeights(common, config, supervisor)
    requests = RolloutServicer(f"runs/{common.run}", supervisor, tokenizer, config.limits, config.deadlines.request_s)
    admin = RolloutAdminServicer(config.replica, supervisor, weights, requests)  # type: ignore[abstract]  # Drain follows
    server.add(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, requests, "sluice.v1.RolloutService")
    server.add(rollout_pb2_grpc.add_RolloutAdminServiceServicer_to_server, admin, "sluice.v1.RolloutAdminService")
    http = _http_server(common, config, requests, admin, server)
    try:
        await server.start()
        if http is not None:
            await http.start()
    except BaseException:
        await server.stop(0)
        await weights.close()
        raise
    metrics = ReplicaMetrics(supervisor, weights)
    failed = asyncio.Event()
    duties = [weights.run_forever(), supervisor.watch_forever(weights.restart_engine), admin.expire_pauses_forever()]
    tasks = [asyncio.create_task(_or_fail(duty, failed)) for duty in duties]

    async def finish(grace_s: float) -> None:
        """Wait for requests in progress while both ports still respond, then close the HTTP port."""
        begun = time.monotonic()
        await requests.finish(grace_s)
        if http is not None:
            await http.stop(max(0.0, grace_s - (time.monotonic() - begun)))

    try:
        await server.serve_until_signal(failed, finish)
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


def _http_server(
    common: CommonConfig, config: RolloutConfig, requests: RolloutServicer, admin: RolloutAdminServicer, rpc: RpcServer
) -> HttpServer | None:
    if config.server.http_port is None:
        return None
    from rollout_svc.http import create_app  # noqa: PLC0415 - only where HTTP is served
    from sluice.openai.server import HttpServer  # noqa: PLC0415

    app = create_app(requests, admin, common.model, rpc.access, config.server.host, call_log=rpc.call_log)
    return HttpServer(app, config.server.host, config.server.http_port, common.security)


async def _or_fail(duty: Coroutine[Any, Any, None], failed: asyncio.Event) -> None:
    """Run a background task that must not end: when it does, the replica stops."""
    try:
        await duty
    finally:
        failed.set()


SERVICE = Service("rollout", RolloutConfig, serve)
