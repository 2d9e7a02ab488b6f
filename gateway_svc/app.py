"""`sluice gateway`: builds a gateway, serves until a signal, and stops cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import uuid
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog
from prometheus_client import Metric

from gateway_svc.config import GatewayConfig
from sluice.config import CommonConfig, Service
from sluice.peers import missing_peers_reported
from sluice.rpc import RpcServer, connect
from sluice.rpc.channel import wait_until_serving
from sluice.sampling.listed import follow_list
from sluice.sampling.policy import PolicyEngine
from sluice.sampling.pool import ReplicaPool
from sluice.sampling.replica import Replica
from sluice.tasks import discard_outcome, settle
from sluice.telemetry import LoopLag, StateMetrics, counter, gauge
from sluice.v1 import episode_pb2_grpc, session_pb2_grpc

if TYPE_CHECKING:
    from gateway_svc.recording import RecordedSessions
    from sluice.openai.server import HttpServer

_COLLECTIONS = (10_000, 20, 50)
"""Thresholds of the garbage collector. With Python's defaults it took a tenth of the gateway's CPU time, and found no garbage."""

EPISODE_SERVICE_NAME = "sluice.v1.EpisodeService"

FAILED_S = 5.0
"""Seconds that requests in progress get to end when a background task of the gateway has failed."""

AWAY_S = 5.0
"""Seconds without an orchestrator after which a draining gateway ends, because nobody can record what it samples. When a whole run is
stopped, the orchestrator ends first, and gateways end in this way."""

LOOK_S = 1.0
"""Seconds between two checks of the orchestrator during a drain."""

log = structlog.get_logger(__name__)


async def serve(
    common: CommonConfig, config: GatewayConfig, on_listening: Callable[[str, str], object] = lambda _target, _url: None
) -> None:
    """Serve one gateway.

    Args:
        common: Settings of the run.
        config: Settings of the gateway.
        on_listening: Called with the gRPC target and the URL of the HTTP port, once both take connections.
    """
    from gateway_svc.episodes import EpisodeServicer  # noqa: PLC0415 - brings the dialects: settings and `--help` need none of it
    from gateway_svc.http import create_app  # noqa: PLC0415
    from gateway_svc.recording import RecordedSessions  # noqa: PLC0415
    from sluice.openai.server import HttpServer  # noqa: PLC0415

    server = RpcServer(
        "gateway",
        config.server,
        common.security,
        features=["openai", "anthropic"],
        run=common.run,
        call_log=common.run_dir / "calls/gateway.jsonl",
    )
    pool = ReplicaPool([], common.security, config.replicas, _ignore, concurrency=config.concurrency, holds_back=True)
    engine = PolicyEngine(pool, common.run, config.capture.deadlines.request_s)
    channel = connect(common.peers.orchestrator, common.security, role="gateway")
    name = f"{socket.gethostname()}-{uuid.uuid4().hex[:12]}"[-128:]
    sessions = RecordedSessions(
        channel,
        engine,
        config.capture,
        run=common.run,
        base_url=lambda: config.advertise_url or _base_url(common, config, http.port),
        name=name,
    )
    servicer = EpisodeServicer(sessions, config.capture)
    server.add(episode_pb2_grpc.add_EpisodeServiceServicer_to_server, servicer, EPISODE_SERVICE_NAME)
    http = HttpServer(
        create_app(
            sessions,
            config.capture,
            server.access,
            config.server.host,
            call_log=server.call_log,
            readiness=server.readiness,
        ),
        config.server.host,
        config.server.http_port or 0,
        common.security,
        most_connections=config.server.max_connections,
    )
    server.readiness.add(partial(_waits_for, pool))
    gc.collect()
    gc.freeze()  # objects loaded so far stay for good: later collections skip them
    gc.set_threshold(*_COLLECTIONS)
    ended = asyncio.Event()
    tasks: list[asyncio.Task[None]] = []
    try:
        server.count_left(lambda: {**server.calls_left(), "requests over HTTP": http.in_progress})
        await server.start()
        await http.start()
        on_listening(server.target, _base_url(common, config, http.port))
        stub = session_pb2_grpc.SessionServiceStub(channel)
        duties = (pool.run(), follow_list(pool, stub, name), LoopLag().run())
        tasks += [asyncio.create_task(_and_end(each, ended, server)) for each in duties]
        with StateMetrics(partial(_scrape, pool)):
            async with missing_peers_reported({"orchestrator": common.peers.orchestrator}, common, server):
                await server.serve_until_signal(ended, partial(_finish, common, server, http, sessions))
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await http.stop(0)
        await server.stop(0)
        await sessions.close()
        await channel.close()
    for result in results:
        if isinstance(result, Exception):
            raise result


async def _finish(
    common: CommonConfig, server: RpcServer, http: HttpServer, sessions: RecordedSessions, grace_s: float
) -> None:
    """Refuse new requests at both ports. Wait for those in progress, as long as an orchestrator can record them."""
    sessions.end_waits()
    stopping = asyncio.gather(http.stop(grace_s), server.stop(grace_s))
    discard_outcome(stopping)
    looking = asyncio.create_task(_end_without_orchestrator(common, server), name="orchestrator")
    try:
        await server.drain.within(stopping)
    finally:
        looking.cancel()
        await settle(looking)


async def _end_without_orchestrator(common: CommonConfig, server: RpcServer) -> None:
    """End a drain once no orchestrator has served for `AWAY_S`."""
    with contextlib.suppress(TimeoutError):
        while True:
            async with asyncio.timeout(AWAY_S):
                await wait_until_serving(common.peers.orchestrator, common.security)
            await asyncio.sleep(LOOK_S)
    log.warning("no orchestrator is there to record replies: the drain ends", left=server.left)
    server.begin_drain(0.0)


def _waits_for(pool: ReplicaPool) -> Iterator[str]:
    """Yield a message if no replica gets work from this gateway."""
    replicas = pool.replicas
    if all(each.why_not() for each in replicas):
        known = f"none of the {len(replicas)} listed gets work" if replicas else "the orchestrator lists none"
        yield f"replicas: {known}"


def _scrape(pool: ReplicaPool) -> Iterator[Metric]:
    """Yield the gateway's Prometheus metrics of replicas and requests."""
    replicas = pool.replicas
    fit = sum(not each.why_not() for each in replicas)
    counts = {"fit": float(fit), "unfit": float(len(replicas) - fit)}
    yield gauge("sluice_gateway_replicas", "Replicas listed, by whether they get work.", counts, "state")
    yield gauge("sluice_gateway_waiting", "Requests that wait in line for a replica.", float(pool.waiting))
    samples = sum(each.in_flight for each in replicas)
    yield gauge("sluice_gateway_sampling", "Samples under way at replicas.", float(samples))
    happened = {name: float(count) for name, count in pool.counts.items()}
    yield counter("sluice_gateway_sampling_events", "What happened to requests at replicas.", happened, "event")


def _ignore(_replica: Replica) -> None:
    """Do nothing: requests that wait for a replica check by themselves."""


def _base_url(common: CommonConfig, config: GatewayConfig, port: int) -> str:
    host = config.server.host.strip("[]")
    if host in {"0.0.0.0", "::"}:
        host = socket.gethostname()
    elif host.startswith("unix:"):
        host = "127.0.0.1"
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if common.security.tls_cert is not None else 'http'}://{shown}:{port}"


async def _and_end(duty: Coroutine[Any, Any, None], ended: asyncio.Event, server: RpcServer) -> None:
    """Run a background task. If it fails, stop the gateway after at most `FAILED_S`, since requests in progress may be stuck."""
    try:
        await duty
    except Exception:
        server.begin_drain(FAILED_S)
        raise
    finally:
        ended.set()


SERVICE = Service("gateway", GatewayConfig, serve)
