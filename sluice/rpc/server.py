"""The gRPC server of every service: what happens around each call, health, and drain.

One interceptor wraps the handler once per method and does its work at the beginning and the end of a call; the messages of
a stream pass through the same loop that gRPC itself would run, so that streaming tokens costs nothing extra.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import random
import resource
import signal
import socket
import time
import uuid
from collections import Counter as Counts
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import structlog
from google.protobuf import descriptor_pool
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from sluice.clock import CLOCK, Clock
from sluice.config import ConfigError, SecurityConfig, ServerConfig
from sluice.errors import BindError
from sluice.limits import HEAD_S, IDLE_S, LIMITS, MAX_MESSAGE_BYTES, MAX_PROBE_CONNECTIONS, REQUEST_S
from sluice.rpc.access import ADMIN_SERVICE, INFO_SERVICE, Access, check_exposure, name_request, roles_for
from sluice.rpc.call_log import CallLog, is_logged, may_be_logged
from sluice.rpc.channel import REQUEST_ID_KEY, TOO_OLD, TRANSPORT_OPTIONS, UNIX
from sluice.rpc.drain import Drain, describe_left
from sluice.rpc.errors import CODES, DETAILS_KEY, SluiceError
from sluice.rpc.from_files import unusable_files
from sluice.rpc.quota import Usage
from sluice.rpc.readiness import READY_SERVICE, Readiness
from sluice.rpc.rows import ROWS
from sluice.rpc.tls import server_credentials
from sluice.tasks import settle
from sluice.v1 import common_pb2, common_pb2_grpc

LOOPBACK = "127.0.0.1"

_WILDCARDS = {"0.0.0.0", "::", "[::]"}

CONTRACT_VERSION = 1
"""Grows with every additive change within ``sluice.v1``."""

Servicer: TypeAlias = Any
"""An implementation of a generated servicer class."""

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *TRANSPORT_OPTIONS,
    # With SO_REUSEPORT, two servers on one port would each get half of the calls. Without it, the second one fails to start.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.server_handshake_timeout_ms", int(HEAD_S * 1000)),
    ("grpc.max_connection_idle_ms", int(IDLE_S * 1000)),
)
"""gRPC options of our servers. A server without them would close the connections of our clients because of their keepalive pings."""

RPC_TOTAL = Counter("sluice_rpc", "Calls answered, by status code.", ("service", "method", "code"))
RPC_SECONDS = Histogram(
    "sluice_rpc_seconds",
    "Time from the arrival of a call to its end, streams included.",
    ("service", "method"),
    buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800),
)
RPC_IN_FLIGHT = Gauge("sluice_rpc_in_flight", "Calls in progress.", ("service", "method"))

FLUSH_S = 0.5
"""Seconds after `finish` for the last responses to leave."""

LAST_S = 1.0
"""Seconds that `finish` gets after the time of the drain, to hand over the rest of the work."""

LAST_CALLS_S = 3600.0
"""Seconds for the calls in progress on a connection that is closed for its age: as long as our longest call may take."""

_NEVER_MS = 2**31 - 1
"""Milliseconds that gRPC treats as no limit."""

RECHECK_S = 5.0
"""Seconds between two checks whether the callers of watches and of waiting calls are still admitted."""

WAITING_CALLS = frozenset(
    {
        "sluice.v1.EpisodeService/LeaseTasks",
        "sluice.v1.SessionService/BeginGeneration",
        "sluice.v1.SessionService/Exchange",
    }
)
"""Idempotent calls that mostly wait for another process. A server ends them at the same times as watches: when it drains, and when they
reach the maximum age of a connection."""

_WAITS_TO_THE_END = "sluice.v1.TrainingService/WaitOperation"
"""A call that waits, too, but for work of this server. A drain lets that work end."""

_MOST_PROBES = 64
"""Most health checks in progress at the port of probes, watches included. They are limited because anybody may call this port."""

_LOOK_S = 0.1
"""Seconds between two checks of what a drain still waits for."""

_SAY_S = 10.0
"""Seconds between two log lines about what a drain still waits for."""

_READY_LOOK_S = 1.0
"""Seconds between two checks of what the service waits for, to update watchers of its health."""

NOT_STARTED = "its own start"
DRAINING = "its end: it drains, and another one has to take its place"
"""What a server waits for that does not serve yet, or that no longer serves."""

_NO_WORK = frozenset({ADMIN_SERVICE, INFO_SERVICE})
"""Services whose calls a drain does not wait for: these calls start the drain, and ask for its progress."""

_REQUEST_ID_CHARACTERS = 128

_RETRY_AFTER_S = 1.0
"""Seconds after which a caller beyond the limit of concurrent calls should retry."""

Message: TypeAlias = Any
"""A request, a response or an iterator of them: the interceptor never looks inside."""
Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Body: TypeAlias = Callable[[Message, Context], Awaitable[Message]]

_OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 10_000
"""The lowest port to offer. Well-known programs listen on lower ones."""

_TAKEN_AT_MOST = 1000
"""Number of candidates to try before the kernel chooses a port."""

_FAULTS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}

log = structlog.get_logger(__name__)


def free_ports(count: int, host: str = LOOPBACK) -> list[int]:
    """Return TCP ports of an address of this machine that were free a moment ago, all different.

    They lie outside the range from which the kernel takes the ports of outgoing connections. So a service that is restarted finds its
    port free.
    """
    lasting = _lasting_ports()
    sockets: list[socket.socket] = []
    candidates = random.SystemRandom().sample(lasting, min(len(lasting), count + _TAKEN_AT_MOST))
    try:
        while len(sockets) < count:
            each = socket.socket()
            sockets.append(each)
            try:
                each.bind((host, candidates.pop() if candidates else 0))
            except OSError:
                sockets.pop().close()
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


def most_open(connections: int) -> int:
    """Return how many connections a port may have: `connections`, but at most three quarters of the process's file limit."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return connections if files < 0 else min(connections, max(1, files * 3 // 4))


def is_free(port: int, host: str) -> bool:
    """Return whether a server could bind a TCP port of an address of this machine a moment ago."""
    return _bind_problem(port, host) == 0


def _bind_problem(port: int, host: str) -> int:
    """Return the error number with which the system refuses a TCP port; 0 if it accepts the port, -1 if the error has no number."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as each:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does: closed connections do not count
        try:
            each.bind((host.strip("[]"), port))
        except OSError as error:
            return error.errno or -1
    return 0


def check_ports_free(service: str, config: ServerConfig) -> None:
    """Refuse ports that another program uses. Call this before the service loads anything slow, since a server binds its ports after that.

    Raises:
        BindError: with the setting of the first such port.
    """
    host = LOOPBACK if config.host.startswith(UNIX) else config.host
    for name in ("port", "http_port", "probe_port"):
        number = getattr(config, name)
        unused = name == "port" and host != config.host
        if number and not unused and _bind_problem(number, host) == errno.EADDRINUSE:
            raise BindError(
                f"cannot listen on {f'[{host}]' if ':' in host else host}:{number}: another program does; end it, or set {service}.server.{name} to another port,"
                " or to 0 for a free one"
            )


def _lasting_ports() -> range:
    """Return the ports below those of outgoing connections; empty if the system does not say, or has too few."""
    try:
        lowest = int(_OUTGOING_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return range(0)
    return range(_FIRST_PORT, max(_FIRST_PORT, lowest))


def advertised_address(configured: str | None, target: str) -> str:
    """Return where others reach a server that is bound to `target`: ``host:port`` or ``unix:/path``."""
    if configured:
        return configured
    host, separator, port = target.rpartition(":")
    return f"{socket.gethostname()}{separator}{port}" if host in _WILDCARDS else target


class RpcServer:
    """A gRPC server with the behaviour that the contracts require of every server.

    Args:
        name: The service's name in logs and in GetServerInfo.
        server: Where to listen and how much to take on.
        security: Principals and TLS.
        features: Optional abilities that are switched on.
        run: Name of the run served, not its resource name; empty if there are several.
        call_log: Where calls that change something are written; None writes them nowhere.
        clock: The time of a drain.
        keeps_clients: Whether calls depend on earlier calls that only this server knows, so that a client must not reach another server
            of the same name. Then connections are closed at their maximum age only if that makes certificates or tokens be checked again.

    Attributes:
        drain: Whether the service drains; then it takes no new work.
        access: Decides about its calls; an HTTP port of the same service shares it.
        call_log: Receives the calls that change something; also shared.
        readiness: What the service waits for.

    Raises:
        ConfigError: if the address needs TLS and principals that are not configured.
        ValueError: if `run` is a resource name.
    """

    def __init__(
        self,
        name: str,
        server: ServerConfig,
        security: SecurityConfig,
        *,
        features: Sequence[str] = (),
        run: str = "",
        call_log: Path | None = None,
        clock: Clock = CLOCK,
        keeps_clients: bool = False,
    ) -> None:
        check_exposure(server, security)
        if "/" in run:
            raise ValueError(f"{run!r} is not the name of a run: leave out the collection (`r1`, not `runs/r1`)")
        self.name = name
        self.target = ""
        self._config, self._security = server, security
        self._features, self._run = list(features), run
        self._keeps_clients = keeps_clients
        self._unimplemented: set[str] = set()
        self.access = Access(security)
        self.call_log = None if call_log is None else CallLog(call_log, security)
        self._services: list[str] = []
        self._registrations: list[tuple[Callable[[Servicer, grpc.aio.Server], None], Servicer]] = []
        self.readiness = Readiness()
        self._health = _Health(self.readiness)
        self._serving = True
        self._server: grpc.aio.Server | None = None
        self._probes: grpc.aio.Server | None = None
        self._looking: asyncio.Task[None] | None = None
        self._calls: CallInterceptor | None = None
        self.drain, self._clock = Drain(clock), clock
        self._count_left: Callable[[], Mapping[str, int]] = self.calls_left

    def add(self, add_fn: Callable[[Servicer, Any], None], servicer: Servicer, service_name: str) -> None:
        """Register a servicer before `start`; `sluice.rpc.access` says who may call it.

        Args:
            add_fn: The generated ``add_XServicer_to_server``.
            servicer: The implementation; methods that it leaves out answer UNIMPLEMENTED and are listed as such.
            service_name: Fully qualified name, such as ``sluice.v1.TrainerService``.
        """
        self._registrations.append((add_fn, servicer))
        self._services.append(service_name)
        self._unimplemented.update(_missing_methods(service_name, servicer))

    def count_left(self, count: Callable[[], Mapping[str, int]]) -> None:
        """Set what a drain waits for, if that is more than the gRPC calls in progress.

        Args:
            count: Returns how much is left, by kind in the plural, such as ``{"episodes": 3}``. It must be fast.
        """
        self._count_left = count

    @property
    def drain_s(self) -> float:
        """Return the default duration of a drain in seconds."""
        return self._config.drain_s

    def begin_drain(self, grace_s: float) -> None:
        """Drain and end within `grace_s` seconds, as after a signal. A further call can shorten the grace."""
        self.drain.begin(grace_s)

    def calls_left(self) -> Mapping[str, int]:
        """Count the gRPC calls in progress by method. Watches do not count, since they end first, nor do calls that asked for the drain."""
        return {} if self._calls is None else {name: count for name, count in self._calls.by_name.items() if count}

    @property
    def left(self) -> Mapping[str, int]:
        """Count, by kind, what a drain still has to wait for."""
        return {kind: count for kind, count in self._count_left().items() if count > 0}

    async def until_nothing_is_left(self) -> None:
        """Wait until a drain has nothing to wait for, or its time is over."""
        while self.left and self.drain.left_s:
            await self._clock.sleep(_LOOK_S)

    async def start(self) -> int:
        """Bind and serve.

        Returns:
            The bound port, 0 for a unix socket.

        Raises:
            BindError: if the address cannot be bound.
            ConfigError: if a key file cannot be read.
        """
        unimplemented = {*self._unimplemented, *_missing_methods(health.SERVICE_NAME, self._health)}
        self._calls = CallInterceptor(
            self.access,
            self._config.max_concurrent_rpcs,
            self._config.max_waiting_rpcs,
            frozenset(unimplemented),
            self.call_log,
            watch_s=self._security.connection_age_s,
        )
        options = [*SERVER_OPTIONS, _connections_option(self._config.max_connections), *self._age_options()]
        self._server = grpc.aio.server(interceptors=[self._calls], options=options)
        for add_fn, servicer in self._registrations:
            add_fn(servicer, self._server)
        names = sorted([*self._services, INFO_SERVICE, ADMIN_SERVICE])
        info = _ServerInfo(
            common_pb2.GetServerInfoResponse(
                service=self.name,
                software_version=version("sluice"),
                contract_version=CONTRACT_VERSION,
                services=names,
                features=self._features,
                unimplemented_rpcs=sorted(self._unimplemented),
                max_message_bytes=MAX_MESSAGE_BYTES,
                max_concurrent_rpcs=self._config.max_concurrent_rpcs,
                max_waiting_rpcs=self._config.max_waiting_rpcs,
                run=f"runs/{self._run}" if self._run else "",
                limits=[common_pb2.Limit(name=each.name, value=each.value, unit=each.unit) for each in LIMITS],
            ),
            self,
        )
        common_pb2_grpc.add_ServerInfoServiceServicer_to_server(info, self._server)
        common_pb2_grpc.add_ServerAdminServiceServicer_to_server(_ServerAdmin(self), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        await self._publish_health()
        port = self._bind(self._server)
        await self._server.start()
        self._probes = await serve_probes(self._config, self._health)
        self._looking = asyncio.create_task(self._health.look_forever(), name="readiness")
        log.info(
            "listening", target=self.target, services=sorted(self._services), tls=self._security.tls_cert is not None
        )
        return port

    def _age_options(self) -> Iterator[tuple[str, int]]:
        """Yield the options with which gRPC closes connections at a maximum age, varied by a tenth, after the calls in progress on them."""
        if self._keeps_clients and self.access.open and self._security.tls_cert is None:
            return
        yield "grpc.max_connection_age_ms", min(round(self._security.connection_age_s * 1000), _NEVER_MS)
        yield "grpc.max_connection_age_grace_ms", round(LAST_CALLS_S * 1000)

    def _bind(self, server: grpc.aio.Server) -> int:
        wanted = host = self._config.host
        if not host.startswith(UNIX):
            wanted = f"[{host}]" if ":" in host and not host.startswith("[") else host
            wanted += f":{self._config.port}"
        credentials = None if host.startswith(UNIX) else server_credentials(self._security)
        try:
            port = (
                server.add_insecure_port(wanted) if credentials is None else server.add_secure_port(wanted, credentials)
            )
        except RuntimeError as error:
            raise BindError(
                f"cannot listen on {wanted}: {error}; is the port taken? port 0 picks a free one"
            ) from error
        if wanted.startswith(UNIX):
            self.target = wanted
            return 0
        self.target = f"{wanted.rpartition(':')[0]}:{port}"
        return port

    def set_serving(self, serving: bool, why_not: str = NOT_STARTED) -> asyncio.Future[None]:
        """Report by grpc.health.v1 whether the service serves. From `start` on it does, unless this was called before.

        Args:
            serving: Whether it answers its calls. It may still wait for others: `readiness`.
            why_not: What it waits for if it does not.

        Returns:
            Done when watchers of the health service have the new state; it need not be awaited.
        """
        self._serving = serving
        self.readiness.own = "" if serving else why_not
        # The loop keeps weak references to tasks only.
        self._published = asyncio.ensure_future(self._publish_health())
        return self._published

    async def _publish_health(self) -> None:
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if self._serving else statuses.NOT_SERVING
        for name in ("", *self._services):
            await self._health.set(name, status)
        await self._health.look()
        # SERVING as long as the process lives, even while a model loads. Liveness probes ask for this.
        await self._health.set(INFO_SERVICE, statuses.SERVING)

    async def serve_until_signal(
        self, until: asyncio.Event | None = None, finish: Callable[[float], Awaitable[None]] | None = None
    ) -> float:
        """Serve until SIGTERM, SIGINT, `DrainServer` or `until`, then drain and stop; a second signal stops at once.

        A drain reports NOT_SERVING, refuses new calls, and waits until no work is left. Meanwhile it logs how much is left.
        The signal handlers stay installed afterwards, so that a further signal does not interrupt the clean-up of the service.

        Args:
            until: Ends the service as a signal does.
            finish: For a service that still answers calls while it drains: called first, while the ports are open, with the
                seconds that the drain may take. Its time counts towards the drain.

        Returns:
            Seconds of the drain that remain for the rest of the service; 0 after a second signal.
        """
        loop = asyncio.get_running_loop()
        drain, signalled, again = self.drain, asyncio.Event(), asyncio.Event()

        def on_signal() -> None:
            if signalled.is_set():
                again.set()
            signalled.set()
            drain.begin(0.0 if again.is_set() else self._config.drain_s)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        waits = {asyncio.create_task(event.wait()) for event in (drain.begun, until) if event is not None}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not drain.begun.is_set():
            drain.begin(self._config.drain_s)
        self.readiness.own = DRAINING
        saying = asyncio.create_task(self._say_what_is_left(), name="what is left of the drain")
        try:
            if finish is not None:
                await self._health.enter_graceful_shutdown()
                finishing = asyncio.ensure_future(finish(drain.left_s))
                if not await drain.within(finishing):
                    await asyncio.wait({finishing}, timeout=0.0 if again.is_set() else LAST_S)
                finishing.cancel()
                await asyncio.wait({finishing})
            await self._stop_when_nothing_is_left(0.0 if finish is None or again.is_set() else FLUSH_S)
        finally:
            saying.cancel()
            await settle(saying)
        if finish is not None and not finishing.cancelled():
            finishing.result()
        return drain.left_s

    async def _stop_when_nothing_is_left(self, flush_s: float) -> None:
        """Refuse new calls, wait for the work in progress within the time of the drain, then stop.

        Args:
            flush_s: Seconds that calls in progress get in any case.
        """
        stopping = asyncio.create_task(self.stop(max(self.drain.left_s, flush_s)))
        await self.until_nothing_is_left()
        if not await self.drain.within(stopping):
            await asyncio.wait({stopping}, timeout=flush_s)
        if left := self.left:
            log.warning("the time of the drain is over; what is left ends now", left=left)
        await self.stop(0)
        await stopping

    async def _say_what_is_left(self) -> None:
        """Log how much is left: at once, then at intervals if that has changed. Run until cancelled."""
        said: Mapping[str, int] | None = None
        while True:
            left = self.left
            if left != said:
                log.info("draining", left=left, grace_left_s=round(self.drain.left_s, 3))
                said = left
            await self._clock.sleep(_SAY_S)

    async def stop(self, grace: float) -> None:
        """Report NOT_SERVING, refuse new calls, give calls in progress `grace` seconds, then cancel them.

        Without effect on a server that has stopped.
        """
        server = self._server
        if server is None or self._calls is None:
            return
        if self._looking is not None:
            self._looking.cancel()
            await settle(self._looking)
            self._looking = None
        self.readiness.own = DRAINING
        await self._health.enter_graceful_shutdown()
        self._calls.end_watches()
        await server.stop(grace)
        self._server = None
        if self._probes is not None:
            await self._probes.stop(0)
            self._probes = None
        if self.call_log is not None:
            await self.call_log.close()
        log.info("stopped")


def some_age(oldest_s: float) -> float:
    """Vary an age by up to a tenth, so that the clients of a fleet, which began together, do not all come back at once."""
    return oldest_s * random.uniform(0.9, 1.1)  # noqa: S311 - no secret


def _connections_option(most: int) -> tuple[str, int]:
    """Return the gRPC option that limits the number of connections."""
    return "grpc.max_allowed_incoming_connections", most_open(most)


async def serve_probes(
    server: ServerConfig, servicer: health_pb2_grpc.HealthServicer | None = None
) -> grpc.aio.Server | None:
    """Serve only health checks at `server.probe_port`. Return the server; None if no such port is set.

    Args:
        server: Where to listen.
        servicer: Answers the checks. None: always answer SERVING, for a process without another port.

    Raises:
        ConfigError: if the address cannot be bound.
    """
    if server.probe_port is None:
        return None
    if servicer is None:
        alive = health.aio.HealthServicer()
        for name in ("", INFO_SERVICE, READY_SERVICE):
            await alive.set(name, health_pb2.HealthCheckResponse.SERVING)
        servicer = alive
    host = LOOPBACK if server.host.startswith(UNIX) else server.host
    address = f"{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{server.probe_port}"
    options = [*SERVER_OPTIONS, _connections_option(MAX_PROBE_CONNECTIONS)]
    probes = grpc.aio.server(options=options, maximum_concurrent_rpcs=_MOST_PROBES)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, probes)
    try:
        port = probes.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen for probes on {address} (server.probe_port): {error}; is the port taken?"
        ) from error
    await probes.start()
    log.info("answering probes", target=f"{address.rpartition(':')[0]}:{port}")
    return probes


class _Health(health.aio.HealthServicer):
    """Answers health checks. For `READY_SERVICE` it determines the state at the moment of the check."""

    def __init__(self, readiness: Readiness) -> None:
        super().__init__()
        self._readiness = readiness

    async def Check(  # noqa: N802 - gRPC's name
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        """Return the status of a service."""
        if request.service == READY_SERVICE:
            await self.look()
        return await super().Check(request, context)

    async def look(self) -> None:
        """Determine whether the service is ready, and tell watchers."""
        statuses = health_pb2.HealthCheckResponse
        waits = self._readiness.look()
        await self.set(READY_SERVICE, statuses.NOT_SERVING if waits else statuses.SERVING)

    async def look_forever(self) -> None:
        """Call `look` at intervals until cancelled, for watchers and for the log."""
        while True:
            await asyncio.sleep(_READY_LOOK_S)
            await self.look()


class _ServerInfo(common_pb2_grpc.ServerInfoServiceServicer):
    """GetServerInfo, which every server answers with facts that are fixed at its start, what it waits for, and its clock."""

    def __init__(self, answer: common_pb2.GetServerInfoResponse, server: RpcServer) -> None:
        self._answer, self._server = answer, server

    async def GetServerInfo(self, request: object, context: object) -> common_pb2.GetServerInfoResponse:  # noqa: N802
        """Return the facts and the time."""
        del request, context
        answer = common_pb2.GetServerInfoResponse()
        answer.CopyFrom(self._answer)
        answer.waits_for.extend(self._server.readiness.waits_for())
        if self._server.drain.begun.is_set():
            left = describe_left(self._server.left)
            answer.waits_for.append(f"what is left: {left}, at most {self._server.drain.left_s:.0f} s")
        answer.time.GetCurrentTime()
        return answer


class _ServerAdmin(common_pb2_grpc.ServerAdminServiceServicer):
    """The calls for operators that every server has."""

    def __init__(self, server: RpcServer) -> None:
        self._server = server

    async def DrainServer(  # noqa: N802
        self, request: common_pb2.DrainServerRequest, context: Context
    ) -> AsyncIterator[common_pb2.DrainServerResponse]:
        """Drain the server, and report how much is left until nothing is left."""
        del context
        grace_s = self._server.drain_s
        if request.HasField("grace"):
            grace_s = request.grace.ToNanoseconds() / 1e9
        if grace_s < 0:
            raise SluiceError.invalid_argument("grace", f"is {grace_s:g} s; give 0 s or more")
        self._server.begin_drain(grace_s)
        said: Mapping[str, int] | None = None
        while said is None or said:
            left = self._server.left
            if left != said:
                response = common_pb2.DrainServerResponse(left=sum(left.values()), left_by_kind=left)
                response.grace_left.FromNanoseconds(int(self._server.drain.left_s * 1e9))
                yield response
                said = left
            else:
                await asyncio.sleep(_LOOK_S)


def _missing_methods(service_name: str, servicer: object) -> Iterator[str]:
    """Yield the methods of a service that its servicer does not implement, as "package.Service/Method"."""
    service = descriptor_pool.Default().FindServiceByName(service_name)  # type: ignore[no-untyped-call, unused-ignore]
    for method in service.methods:
        owner = next((base for base in type(servicer).__mro__ if method.name in vars(base)), None)
        if owner is None or owner.__module__.endswith("_pb2_grpc"):
            yield f"{service_name}/{method.name}"


class _Places:
    """The calls of one kind that are in progress, and their limit.

    Args:
        most: The limit.
        what: The calls, for people.
        setting: The setting that says how many.

    Attributes:
        taken: Calls in progress, including calls that are about to be refused.
    """

    def __init__(self, most: int, what: str, setting: str) -> None:
        self._most, self._what, self._setting = most, what, setting
        self.taken = 0

    def check(self) -> None:
        """Refuse the newest call if it exceeds the limit.

        Raises:
            SluiceError: RESOURCE_EXHAUSTED with the time after which a retry may succeed.
        """
        if self.taken > self._most:
            raise SluiceError.resource_exhausted(
                "TOO_MANY_RPCS",
                f"{self._most} {self._what} are in progress, the most that this server takes ({self._setting}); retry after the"
                " delay",
                _RETRY_AFTER_S,
            )


class _UnusableFiles(Collector):
    """Counts the values that keep their previous content because their files are broken now."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        text = "Values made from files (principals, a token, a certificate) that are kept because the files are broken now."
        gauge = GaugeMetricFamily("sluice_security_files_unusable", text, labels=["what"])
        for what, count in unusable_files().items():
            gauge.add_metric([what.removeprefix("the ")], count)
        yield gauge


REGISTRY.register(_UnusableFiles())


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of one server.

    Calls that wait for others have a separate limit per method. So working calls get through however many clients wait.

    Args:
        access: Who may call.
        max_concurrent_rpcs: Limit of working calls in progress. Calls that need no principal, such as health checks, have the same limit
            of their own.
        max_waiting_rpcs: Limit, per method, of calls in progress that wait for others, such as watches.
        unimplemented: Methods that answer UNIMPLEMENTED, as "package.Service/Method".
        call_log: Receives the calls that change something.
        watch_s: Seconds after which a watch is ended, so that its client connects again.

    Attributes:
        by_name: Calls of principals in progress that a drain waits for, by the name of their method.
    """

    def __init__(
        self,
        access: Access,
        max_concurrent_rpcs: int,
        max_waiting_rpcs: int,
        unimplemented: frozenset[str],
        call_log: CallLog | None,
        *,
        watch_s: float,
    ) -> None:
        self.access, self.call_log = access, call_log
        self._watch_s = watch_s
        self.working = _Places(max_concurrent_rpcs, "calls", "server.max_concurrent_rpcs")
        self._max_waiting_rpcs = max_waiting_rpcs
        self._waiting: dict[str, _Places] = {}
        self.open = _Places(max_concurrent_rpcs, "calls without a principal", "server.max_concurrent_rpcs")
        self.by_name: Counts[str] = Counts()
        self._unimplemented = unimplemented
        self._watches: dict[asyncio.Task[Any], Callable[[], bool]] = {}
        self._admitted_under = access.state()
        self._recheck: asyncio.TimerHandle | None = None
        self._ended: dict[asyncio.Task[Any], SluiceError] = {}
        self._wrapped: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    def waiting(self, rpc: str) -> _Places:
        """Return the places of a method whose calls wait for others."""
        if rpc not in self._waiting:
            self._waiting[rpc] = _Places(self._max_waiting_rpcs, f"calls of {rpc}", "server.max_waiting_rpcs")
        return self._waiting[rpc]

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Look the method up once, then serve its wrapped handler."""
        method = handler_call_details.method
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            handler = await continuation(handler_call_details)
            if handler is None:  # an unknown method: gRPC answers UNIMPLEMENTED, and its name is not stored
                return None
            wrapped = self._wrapped[method] = self._wrap(method.lstrip("/"), handler)
        return wrapped

    def begin_watch(self, task: asyncio.Task[Any], admitted: Callable[[], bool]) -> None:
        """Account for a call that waits for others, or until its client leaves. End it at its maximum age, or once its caller is revoked.

        Raises:
            SluiceError: if the caller is revoked already, which may happen while the request is on its way.
        """
        if not admitted():
            raise _revoked()
        self._watches[task] = admitted
        task.add_done_callback(self._forget)
        if self._recheck is None and not self.access.open:
            self._recheck = asyncio.get_running_loop().call_later(RECHECK_S, self._end_revoked)
        timer = asyncio.get_running_loop().call_later(some_age(self._watch_s), self._end, task, _too_old())
        task.add_done_callback(lambda _: timer.cancel())

    def _end_revoked(self) -> None:
        """End the watches whose callers would no longer be admitted. Check again later if any watch is left."""
        self._recheck = None
        state = self.access.state()
        if state is not self._admitted_under:
            self._admitted_under = state
            for task, admitted in self._watches.items():
                if not admitted():
                    self._end(task, _revoked())
        if self._watches:
            self._recheck = asyncio.get_running_loop().call_later(RECHECK_S, self._end_revoked)

    def end_watches(self) -> None:
        """End the calls that wait for others or until their client leaves, so that a drain only waits for work."""
        message = "the server is shutting down; make the same call again, elsewhere if there is another server"
        for task in self._watches:
            self._end(task, SluiceError.unavailable("DRAINING", message))

    def why_ended(self, task: asyncio.Task[Any] | None) -> SluiceError | None:
        """Return the error for the client of a watch that this server ended; None if it did not end it."""
        return None if task is None else self._ended.get(task)

    def _end(self, task: asyncio.Task[Any], why: SluiceError) -> None:
        if task not in self._ended and not task.done():
            self._ended[task] = why
            task.cancel()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._watches.pop(task, None)
        self._ended.pop(task, None)

    def _wrap(self, method: str, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
        service, _, name = method.partition("/")
        inner = handler.unary_unary or handler.stream_unary or handler.unary_stream or handler.stream_stream
        body = _streaming(inner) if handler.response_streaming else _unary(inner)
        if method in self._unimplemented:
            body = _unimplemented(method)
        lasts = name.startswith("Watch") or name == "ServerReflectionInfo"
        is_watch = method in WAITING_CALLS or (bool(handler.response_streaming) and lasts)
        observed = _ObservedMethod(
            self,
            service,
            name,
            body,
            takes_one=not handler.request_streaming,
            streams=bool(handler.response_streaming),
            is_watch=is_watch,
        )
        # For a method without a request stream, gRPC reads and parses the message before it calls the handler. So an unknown caller could
        # make the server wait and parse. Therefore all handlers take streams, and read that message themselves once the caller is known.
        make: Any = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        parse = _parser(method, handler.request_deserializer)
        wrapped: grpc.RpcMethodHandler[Any, Any] = make(observed.handle, parse, handler.response_serializer)
        return wrapped


def _too_old() -> SluiceError:
    return SluiceError.unavailable(
        TOO_OLD,
        "this call is as old as a connection may become (security.connection_age_s): make it again from where it is, with the"
        " certificate and token that are valid now, if you have any",
    )


def _revoked() -> SluiceError:
    return SluiceError.unavailable(
        TOO_OLD,
        "the token or certificate of this call is no longer valid: make it again from where it is, with one that is valid now",
    )


class MethodMetrics:
    """Metrics and log lines about the calls of one method."""

    def __init__(self, service: str, name: str) -> None:
        self._service, self._name = service, name
        self._seconds = RPC_SECONDS.labels(service, name)
        self._in_flight = RPC_IN_FLIGHT.labels(service, name)
        self._totals: dict[grpc.StatusCode, Counter] = {}

    def begin(self) -> None:
        """Account for a call that begins; `end` must follow."""
        self._in_flight.inc()

    def end(self, code: grpc.StatusCode, seconds: float) -> None:
        """Account for the end of a call with a code after `seconds`."""
        self._in_flight.dec()
        total = self._totals.get(code)
        if total is None:
            total = self._totals[code] = RPC_TOTAL.labels(self._service, self._name, code.name)
        total.inc()
        self._seconds.observe(seconds)
        rpc, write = f"{self._service}/{self._name}", log.debug
        ROWS.end_quiet()
        if code in _FAULTS:
            write = log.warning
        elif code is not grpc.StatusCode.OK and ROWS.begins(rpc, code.name):
            write = log.info  # of further equal answers, such as to agents that poll, only the number is logged
        write("rpc", rpc=rpc, code=code.name, seconds=round(seconds, 6))


def unexpected_failure(error: Exception, request_id: str) -> SluiceError:
    """Return the error that a client gets for an unexpected exception. The calling code has to log the exception with its traceback."""
    message = f"the server failed unexpectedly ({type(error).__name__}); its log has the traceback under request id {request_id}"
    return SluiceError(grpc.StatusCode.INTERNAL, "UNEXPECTED", message, metadata={"request_id": request_id})


class _ObservedMethod:
    """One method of one server, with its metrics.

    Args:
        calls: The interceptor of the server.
        service: Name of the service.
        name: Name of the method.
        body: Serves one call.
        takes_one: Whether the client sends one message.
        streams: Whether the server sends more than one.
        is_watch: Whether it is a stream that lasts until the client or the server leaves, or one of `WAITING_CALLS`.
    """

    def __init__(
        self,
        calls: CallInterceptor,
        service: str,
        name: str,
        body: Body,
        *,
        takes_one: bool,
        streams: bool,
        is_watch: bool,
    ) -> None:
        self._calls = calls
        self._rpc, self._body, self._takes_one, self._streams = f"{service}/{name}", body, takes_one, streams
        self._name = name
        self._roles, self._is_watch = roles_for(service, name), is_watch
        waits = is_watch or self._rpc == _WAITS_TO_THE_END
        self._places = calls.open if self._roles is None else calls.waiting(self._rpc) if waits else calls.working
        self._call_log = calls.call_log if may_be_logged(self._rpc) else None
        self._metrics = MethodMetrics(service, name)
        self._counted = self._roles is not None and service not in _NO_WORK and not is_watch

    async def handle(self, requests: Message, context: Context) -> Message:
        """Serve one call and account for it.

        Args:
            requests: Iterates over the messages of the client; not used if the method takes only one.
            context: Context of the call.
        """
        started = time.perf_counter()
        task = asyncio.current_task()
        request_id, authorization = _identify(context)
        name_request(request_id)
        code = grpc.StatusCode.OK
        usage, known = None, self._roles is None
        message: Message = None if self._takes_one else requests
        self._count(1)
        self._metrics.begin()
        try:
            usage, known = self._admit(authorization, context), True
            if self._takes_one:
                message = await _only_message(context, self._rpc)
            if self._is_watch:
                await self._begin_watch(context, task, authorization)
            response = await self._body(message, context)
            code = _code_of(context)
        except asyncio.CancelledError:
            why = self._calls.why_ended(task)
            if task is not None and why is not None and not context.done():  # the client is still there
                code = why.code
                task.uncancel()
                await _abort(context, why)
            remaining = context.time_remaining()
            late = remaining is not None and remaining <= 0
            code = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
            raise
        except grpc.aio.AbortError:
            code = _code_of(context)
            raise
        except SluiceError as error:
            code = error.code
            await _abort(context, error)
        except Exception as error:
            code = grpc.StatusCode.INTERNAL
            log.exception("rpc failed unexpectedly", rpc=self._rpc)
            await _abort(context, unexpected_failure(error, request_id))
        finally:
            if usage is not None:
                usage.end()
            self._count(-1)
            # Do not log a call that was refused before its caller was identified: such calls could push others out of the log.
            known = known or code is grpc.StatusCode.PERMISSION_DENIED
            if self._call_log is not None and known and is_logged(self._rpc):
                request = message if self._takes_one else None
                self._call_log.record(self._rpc, request, context.peer(), code.name)
            self._metrics.end(code, time.perf_counter() - started)
        return response

    def _count(self, change: int) -> None:
        """Account for a call that begins (1) or ends (-1)."""
        self._places.taken += change
        if self._counted:
            self._calls.by_name[self._name] += change

    async def _begin_watch(
        self, context: Context, task: asyncio.Task[Any] | None, authorization: str | bytes | None
    ) -> None:
        if self._streams:
            # Otherwise gRPC sends the metadata with the first message. If the watch were ended while that is being sent, the abort would
            # send the metadata a second time, which gRPC refuses, and the client would wait for ever.
            await context.send_initial_metadata(())
        if task is not None:
            access, roles = self._calls.access, self._roles
            certificate = self._certificate(context)
            self._calls.begin_watch(task, lambda: roles is None or access.admits(authorization, certificate, roles))

    def _admit(self, authorization: str | bytes | None, context: Context) -> Usage | None:
        self._places.check()
        if self._roles is None:
            return None
        return self._calls.access.admit(authorization, self._certificate(context), self._roles)

    def _certificate(self, context: Context) -> frozenset[str]:
        return _certificate_of(context) if self._calls.access.knows_certificates else frozenset()


def _identify(context: Context) -> tuple[str, str | bytes | None]:
    """Return the call's id, a new one if the caller gave none that can be logged, and its authorization."""
    request_id = ""
    authorization: str | bytes | None = None
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY and isinstance(value, str) and value.isprintable():
            request_id = value[:_REQUEST_ID_CHARACTERS]
        elif key == "authorization":
            authorization = value
    return request_id or uuid.uuid4().hex, authorization


def _certificate_of(context: Context) -> frozenset[str]:
    """Return common name and URIs of the client's certificate, which TLS has verified; empty without one."""
    properties: Mapping[str, Iterable[bytes]] = context.auth_context()
    names = [*properties.get("x509_common_name", ()), *properties.get("peer_uri", ())]
    return frozenset(name.decode(errors="replace") for name in names)


def _code_of(context: Context) -> grpc.StatusCode:
    """Return the code that the servicer set on the context; OK if it set none."""
    code: Any = context.code()
    return code if isinstance(code, grpc.StatusCode) else CODES.get(code, grpc.StatusCode.OK)


async def _abort(context: Context, error: SluiceError) -> None:
    status = error.to_status()
    await context.abort(error.code, status.message, ((DETAILS_KEY, status.SerializeToString()),))


def _parser(method: str, deserialize: Callable[[bytes], Message] | None) -> Callable[[bytes], Message] | None:
    """Return the parser for requests of a method. gRPC's own would answer malformed bytes with UNKNOWN, and log a traceback."""
    if deserialize is None:  # the handler takes bytes
        return None

    def parse(data: bytes) -> Message:
        try:
            return deserialize(data)
        except DecodeError as error:
            message = f"the request of {method} is malformed ({error}): send a message of its type in sluice.v1"
            raise SluiceError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", message) from error

    return parse


async def _only_message(context: Context, method: str) -> Message:
    """Return the only message of a call whose method takes one message."""
    try:
        async with asyncio.timeout(REQUEST_S):
            message = await context.read()
    except TimeoutError as error:
        text = f"no request came within {REQUEST_S:g} s of the call; send it with the call"
        raise SluiceError(grpc.StatusCode.DEADLINE_EXCEEDED, "REQUEST_DEADLINE", text) from error
    if message is grpc.aio.EOF:
        text = f"the call has no request: send one message to {method}"
        raise SluiceError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", text)
    return message


def _unary(inner: Any) -> Body:  # noqa: ANN401 - a handler of any arity
    async def body(request: Message, context: Context) -> Message:
        response = inner(request, context)
        return await response if inspect.isawaitable(response) else response

    return body


def _streaming(inner: Any) -> Body:  # noqa: ANN401 - a handler of any arity
    """Serve a call with the loop that gRPC itself runs for an async generator, instead of wrapping the generator in another one."""

    async def body(request: Message, context: Context) -> None:
        responses = inner(request, context)
        if inspect.isawaitable(responses):  # the servicer writes to the context itself
            await responses
            return
        try:
            async for response in responses:
                await context.write(response)
        finally:
            close = getattr(responses, "aclose", None)
            if close is not None:
                await close()

    return body


def _unimplemented(method: str) -> Body:
    async def body(_request: Message, _context: Context) -> Message:
        raise SluiceError.unimplemented(method)

    return body
