"""An HTTP server in the same event loop as the gRPC server, with the same TLS, the same rules for addresses, and limits on connections."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
from collections.abc import Iterator
from functools import partial
from typing import Any

import structlog
import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.http.h11_impl import H11Protocol

from sluice.clock import CLOCK, Clock
from sluice.config import SecurityConfig, ServerConfig
from sluice.errors import BindError
from sluice.limits import HEAD_S, MAX_CONNECTIONS, MAX_HEAD_BYTES, SEND_DEADLINE_S
from sluice.rpc.access import check_exposure
from sluice.rpc.bounds import Connections
from sluice.rpc.channel import UNIX
from sluice.rpc.server import LOOPBACK, most_open, some_age
from sluice.rpc.tls import certificate_names, server_context

STEP_S = 0.05
"""Seconds between two checks of whether uvicorn has started or ended. It has no event for that."""

START_DEADLINE_S = 10.0

MARGIN_S = 2.0
"""Seconds that uvicorn may take after the drain to close its connections."""

MAX_UNREAD_BYTES = 16 << 20
"""Maximum number of bytes of a body that a client may send after its request was answered."""

HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"

CERTIFICATE = "client_certificate"
"""Key in the state of a scope for the names in the client's certificate."""

CONNECTION_END_S = "connection_end_s"
"""Key in the state of a scope for the monotonic time after which the connection is closed with its next response."""

log = structlog.get_logger()


class _OpenTransport(asyncio.Transport):
    """A transport whose methods do nothing after it is closed. uvloop's methods would raise, and uvicorn does not handle that in every place."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport

    def __getattribute__(self, name: str) -> Any:  # noqa: ANN401 - any attribute of a transport
        transport: asyncio.Transport = object.__getattribute__(self, "_transport")
        if name in _FAIL_ON_CLOSED and transport.is_closing():
            return _do_nothing
        return getattr(transport, name)


_FAIL_ON_CLOSED = frozenset({"write", "writelines", "pause_reading", "resume_reading"})


def _do_nothing(*_arguments: object) -> None:
    """Stand in for a method of a closed transport."""


class _BoundedProtocol(asyncio.Protocol):
    """Limits time and size of the head of a request, and the number of connections, which uvicorn does not limit.

    It closes connections beyond these limits. `scope["state"]` has the time from which on the connection is too old.
    """

    transport: asyncio.Transport
    flow: Any
    cycle: Any  # the last request whose head is complete; None at first
    client: tuple[str, int] | None
    app_state: dict[str, Any]
    _timer: asyncio.TimerHandle | None = None
    _received = _ahead = 0
    _is_whole = False

    def __init__(
        self,
        *args: Any,  # noqa: ANN401 - as uvicorn's own
        connections: Connections,
        oldest_s: float,
        clock: Clock,
        **options: Any,  # noqa: ANN401 - as uvicorn's own
    ) -> None:
        super().__init__(*args, **options)
        self._open, self._oldest_s, self._clock = connections, oldest_s, clock

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(_OpenTransport(transport))
        self.app_state = {**self.app_state, CONNECTION_END_S: self._clock() + some_age(self._oldest_s)}
        closed: Any = self._open.open(self, self.client[0] if self.client else "")
        if closed is not None:
            closed.transport.abort()
        self._await_head()

    def connection_lost(self, error: Exception | None) -> None:
        self._head_is_complete()
        self._open.close(self)
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            self._head_is_complete()
            # Data after a complete request belongs to the head of the next request, which waits: its bytes are held in memory.
            self._ahead = self._ahead + len(data) if cycle is before and self._is_whole else 0
            self._is_whole = not cycle.more_body
            if self._ahead > MAX_HEAD_BYTES:
                self.transport.close()
            return
        self._is_whole = False
        self._await_head()
        self._received += len(data)
        # A client that is refused while it sends a body reads the answer only if its body is read, too.
        if cycle is not None and cycle.more_body:
            if self._received > MAX_UNREAD_BYTES:
                self.transport.close()
        elif self._received > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(HEAD_TOO_LARGE)
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # type: ignore[misc]  # of both protocols; may begin with a request that was sent ahead
        self._wait_if_idle()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._open.serve(self)  # its client is still reading the response

    def resume_writing(self) -> None:
        super().resume_writing()
        self._wait_if_idle()

    def _wait_if_idle(self) -> None:
        if self.cycle is not None and self.cycle.response_complete and not self.flow.write_paused:
            self._open.wait(self)

    def _await_head(self) -> None:
        self._open.wait(self)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(HEAD_S, self.transport.close)

    def _head_is_complete(self) -> None:
        self._open.serve(self)
        self._received = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _HttpProtocol(_BoundedProtocol, AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # one of two classes of uvicorn
    """HTTP."""


class _CertificateProtocol(_BoundedProtocol, H11Protocol):
    """HTTP over mutual TLS: `scope["state"]` has the names of the client's certificate, too."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        names = certificate_names(transport.get_extra_info("peercert") or {})
        self.app_state = {**self.app_state, CERTIFICATE: names}


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: signals belong to the service."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves one ASGI app.

    Args:
        app: What to serve.
        host: Address to bind. If it is a unix socket of gRPC, HTTP listens on loopback.
        port: TCP port; 0 picks a free one.
        security: TLS, whether an unprotected address is allowed, and how old connections become.
        clock: Measures the age of connections.
        most_connections: How many may be open at once.

    Attributes:
        port: The bound port, once it has started.

    Raises:
        ConfigError: if the address is reachable from the network and nothing protects it, or the certificate cannot be used.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        security: SecurityConfig,
        *,
        clock: Clock = CLOCK,
        most_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._host = LOOPBACK if host.startswith(UNIX) else host.strip("[]")
        check_exposure(ServerConfig(host=self._host, port=port), security)
        self.port, self._security = port, security
        context = server_context(security, ssl.CERT_REQUIRED)
        self._connections = connections = Connections(most_open(most_connections))
        self._uvicorn = _Server(
            uvicorn.Config(
                _ending_old_connections(app, clock),
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,  # nothing here asks for the address of a client
                http=partial(  # type: ignore[arg-type]  # makes one
                    _CertificateProtocol if security.require_client_cert else _HttpProtocol,
                    connections=connections,
                    oldest_s=security.connection_age_s,
                    clock=clock,
                ),
                ssl_context_factory=None if context is None else lambda _config, _default: context,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Bind and serve.

        Returns:
            The bound port.

        Raises:
            BindError: if the address cannot be bound.
        """
        listener = self._bind()
        self.port = int(listener.getsockname()[1])
        self._serving = asyncio.create_task(self._uvicorn.serve([listener]))
        async with asyncio.timeout(START_DEADLINE_S):
            while not self._uvicorn.started and not self._serving.done():
                await asyncio.wait({self._serving}, timeout=STEP_S)
        if self._serving.done():
            await self._serving
        log.info("listening", url=f"{self._scheme}://{self._host}:{self.port}")
        return self.port

    async def stop(self, grace: float = 5.0) -> None:
        """Refuse new connections, give requests in progress `grace` seconds, then cancel them. A second call shortens the grace."""
        serving = self._serving
        if serving is None:
            return
        if self._uvicorn.should_exit:
            await asyncio.wait({serving}, timeout=grace)
            for task in self._uvicorn.server_state.tasks:
                task.cancel()
        else:
            self._uvicorn.config.timeout_graceful_shutdown = max(1, round(grace)) if grace else 0
            self._uvicorn.should_exit = True
        late = not await self._ended(serving, grace + MARGIN_S)
        if self._serving is None:
            return
        self._serving = None
        if late:
            log.warning("http server did not stop in time", grace_s=grace)
            serving.cancel()
            await asyncio.wait({serving}, timeout=MARGIN_S)
        else:
            serving.result()
        # uvicorn cancels requests that outlive the drain, but does not wait for them.
        if self._uvicorn.server_state.tasks:
            await asyncio.wait(set(self._uvicorn.server_state.tasks), timeout=MARGIN_S)

    async def _ended(self, serving: asyncio.Task[None], within_s: float) -> bool:
        """Wait for the end of the server. Abort connections without a request: over TLS a client may take long to agree to a close.

        Returns:
            Whether it has ended.
        """
        now = asyncio.get_running_loop().time
        end = busy = now()
        end += within_s
        while not serving.done() and now() < end:
            await asyncio.wait({serving}, timeout=STEP_S)
            if self.in_progress:
                busy = now()
            elif now() - busy >= MARGIN_S:
                for connection in list(self._uvicorn.server_state.connections):
                    connection.transport.abort()
        return serving.done()

    @property
    def in_progress(self) -> int:
        """The number of requests in progress."""
        return len(self._uvicorn.server_state.tasks)

    @property
    def _scheme(self) -> str:
        return "https" if self._security.tls_cert is not None else "http"

    def _bind(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            listener = socket.create_server((self._host, self.port), family=family, backlog=2048)
        except OSError as error:
            raise BindError(
                f"cannot listen on {self._host}:{self.port} for HTTP: {error.strerror or error}; is the port taken? "
                "set server.http_port, 0 picks a free one"
            ) from error
        # Connections inherit this: the kernel cuts off a client that does not read.
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SEND_DEADLINE_S * 1000))
        return listener


def _ending_old_connections(app: ASGIApp, clock: Clock) -> ASGIApp:
    """Wrap an app so that old connections are closed after a response.

    A client that connects again may reach a server that was added behind the same name, and must show a certificate that is still valid.
    """

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        end_s = scope.get("state", {}).get(CONNECTION_END_S, math.inf)

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start" and clock() > end_s:
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        await app(scope, receive, sending)

    return serve
