"""The gRPC server of every service: it registers servicers, binds, reports health, and drains."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any, TypeAlias

import grpc
import structlog
from google.protobuf import descriptor_pool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from sluice.config import ConfigError, SecurityConfig, ServerConfig
from sluice.rpc import access
from sluice.rpc.access import Role, TokenCheck
from sluice.rpc.calls import CallInterceptor
from sluice.rpc.channel import MAX_MESSAGE_BYTES, TRANSPORT_OPTIONS
from sluice.v1 import common_pb2, common_pb2_grpc

CONTRACT_VERSION = 1
"""Grows with every additive change within ``sluice.v1``."""

INFO_SERVICE = "sluice.v1.ServerInfoService"

Servicer: TypeAlias = Any
"""An implementation of a generated servicer class."""

_SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *TRANSPORT_OPTIONS,
    # Two servers on one port would each get half of the calls; without this the second one fails to start.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)

log = structlog.get_logger(__name__)


class RpcServer:
    """A gRPC server with what the contracts promise of every server.

    Args:
        name: The service's name in logs and in GetServerInfo.
        server: Where to listen and how much to take on.
        security: Tokens and TLS.
        features: Optional abilities that are switched on.
        run: Name of the run served, not its resource name; empty where there are several.

    Raises:
        ConfigError: if the address needs TLS and tokens that are not configured.
        ValueError: if `run` is a resource name.
    """

    def __init__(
        self, name: str, server: ServerConfig, security: SecurityConfig, *, features: Sequence[str] = (), run: str = ""
    ) -> None:
        access.check_exposure(server, security)
        if "/" in run:
            raise ValueError(f"{run!r} is not the name of a run: leave out the collection (`r1`, not `runs/r1`)")
        self.name = name
        self.target = ""
        self._config, self._security = server, security
        self._features, self._run = list(features), run
        self._unimplemented: set[str] = set()
        self._tokens = TokenCheck(security)
        self._roles: dict[str, Role] = {}
        self._registrations: list[tuple[Callable[[Servicer, grpc.aio.Server], None], Servicer]] = []
        self._health = health.aio.HealthServicer()
        self._serving = True
        self._published: asyncio.Future[None] | None = None
        self._server: grpc.aio.Server | None = None
        self._calls: CallInterceptor | None = None

    def add(self, add_fn: Callable[[Servicer, Any], None], servicer: Servicer, service_name: str, role: Role) -> None:
        """Register a servicer before `start`.

        Args:
            add_fn: The generated ``add_XServicer_to_server``.
            servicer: The implementation; methods that it leaves out answer UNIMPLEMENTED and are listed as such.
            service_name: Fully qualified name, such as ``sluice.v1.TrainerService``.
            role: Whose token the service asks for; the admin's is good for both.
        """
        self._registrations.append((add_fn, servicer))
        self._roles[service_name] = role
        self._unimplemented.update(_missing_methods(service_name, servicer))

    def require(self, context: grpc.aio.ServicerContext[Any, Any], role: Role) -> None:
        """Require a higher role for one call than its service requires.

        Raises:
            SluiceError: as `TokenCheck.verify`.
        """
        given = (value for key, value in context.invocation_metadata() or () if key == "authorization")
        self._tokens.verify(next(given, None), role)

    async def start(self) -> int:
        """Bind and serve.

        Returns:
            The bound port, 0 for a unix socket.

        Raises:
            ConfigError: if the address cannot be bound or a key file cannot be read.
        """
        roles: dict[str, Role] = {**self._roles, INFO_SERVICE: "agent", reflection.SERVICE_NAME: "agent"}
        self._calls = CallInterceptor(
            self._tokens, roles, self._config.max_concurrent_rpcs, frozenset(self._unimplemented)
        )
        self._server = grpc.aio.server(interceptors=[self._calls], options=_SERVER_OPTIONS)
        for add_fn, servicer in self._registrations:
            add_fn(servicer, self._server)
        await self._add_own_services(self._server)
        port = self._bind(self._server)
        await self._server.start()
        log.info("listening", target=self.target, services=sorted(self._roles), tls=self._security.tls_cert is not None)
        return port

    async def _add_own_services(self, server: grpc.aio.Server) -> None:
        names = sorted([*self._roles, INFO_SERVICE])
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
                run=f"runs/{self._run}" if self._run else "",
            )
        )
        common_pb2_grpc.add_ServerInfoServiceServicer_to_server(info, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        await self._publish_health()

    def _bind(self, server: grpc.aio.Server) -> int:
        wanted = access.address(self._config)
        credentials = access.server_credentials(self._config, self._security)
        try:
            port = (
                server.add_insecure_port(wanted) if credentials is None else server.add_secure_port(wanted, credentials)
            )
        except RuntimeError as error:
            doubt = "is the port taken? port 0 picks a free one"
            if credentials is not None:
                doubt += "; or does security.tls_key not belong to security.tls_cert?"
            raise ConfigError(f"cannot listen on {wanted}: {error}; {doubt}") from error
        if wanted.startswith(access.UNIX):
            self.target = wanted
            return 0
        self.target = f"{wanted.rpartition(':')[0]}:{port}"
        return port

    def set_serving(self, serving: bool) -> asyncio.Future[None]:
        """Report by grpc.health.v1 whether the service is ready. From `start` on it is, unless this was called before.

        Returns:
            Done when watchers of the health service have the new state; it need not be awaited.
        """
        self._serving = serving
        self._published = asyncio.ensure_future(self._publish_health())
        return self._published

    async def _publish_health(self) -> None:
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if self._serving else statuses.NOT_SERVING
        for name in ("", INFO_SERVICE, *self._roles):
            await self._health.set(name, status)

    async def serve_until_signal(
        self, until: asyncio.Event | None = None, finish: Callable[[float], Awaitable[None]] | None = None
    ) -> float:
        """Serve until SIGTERM, SIGINT or `until`, then report NOT_SERVING, drain and stop; a second signal stops at once.

        The signal handlers stay installed afterwards, so that a further signal does not interrupt the clean-up of the service.

        Args:
            until: Ends the service as a signal does.
            finish: Called first with the seconds that the drain may take, while the ports are still open, for a service that
                still answers calls while it drains. Its time counts towards the drain.

        Returns:
            Seconds of the drain that are left for the rest of the service; 0 after a second signal.
        """
        loop = asyncio.get_running_loop()
        asked, again = asyncio.Event(), asyncio.Event()

        def on_signal() -> None:
            (again if asked.is_set() else asked).set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        waits = {asyncio.create_task(event.wait()) for event in (asked, until) if event is not None}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        asked.set()
        end = loop.time() + self._config.drain_s
        hurry = asyncio.create_task(again.wait())
        if finish is not None:
            await self._health.enter_graceful_shutdown()
            finishing = asyncio.ensure_future(finish(self._config.drain_s))
            await asyncio.wait({finishing, hurry}, return_when=asyncio.FIRST_COMPLETED)
            finishing.cancel()
            await asyncio.wait({finishing})
        draining = asyncio.create_task(self.stop(max(0.0, end - loop.time())))
        await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
        if not draining.done():
            await self.stop(0)
        hurry.cancel()
        await draining
        if finish is not None and not finishing.cancelled():
            finishing.result()
        return 0.0 if again.is_set() else max(0.0, end - loop.time())

    async def stop(self, grace: float) -> None:
        """Report NOT_SERVING, refuse new calls, give those in progress `grace` seconds, then cancel them.

        Without effect on a server that has stopped.
        """
        server = self._server
        if server is None or self._calls is None:
            return
        log.info("draining", in_flight=self._calls.in_flight, grace_s=grace)
        await self._health.enter_graceful_shutdown()
        self._calls.end_watches()
        await server.stop(grace)
        self._server = None
        log.info("stopped")


class _ServerInfo(common_pb2_grpc.ServerInfoServiceServicer):
    """GetServerInfo, which every server answers with facts that are fixed at its start."""

    def __init__(self, answer: common_pb2.GetServerInfoResponse) -> None:
        self._answer = answer

    async def GetServerInfo(self, request: object, context: object) -> common_pb2.GetServerInfoResponse:  # noqa: N802
        """Return the facts."""
        del request, context
        return self._answer


def _missing_methods(service_name: str, servicer: object) -> Iterator[str]:
    """Yield the methods of a service that its servicer does not implement, as "package.Service/Method"."""
    service = descriptor_pool.Default().FindServiceByName(service_name)  # type: ignore[no-untyped-call, unused-ignore]
    for method in service.methods:
        owner = next((base for base in type(servicer).__mro__ if method.name in vars(base)), None)
        if owner is None or owner.__module__.endswith("_pb2_grpc"):
            yield f"{service_name}/{method.name}"
