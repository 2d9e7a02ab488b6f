"""An HTTP server in the event loop that serves gRPC, with the same TLS and rules for addresses, and the checks around each request.

A web page can make the browser of the user send requests to a server on this machine. Two checks refuse them: what changes
something must be sent as JSON, and a server without tokens checks `Host` and `Origin`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

import grpc
import structlog
import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from sluice.config import ConfigError, SecurityConfig, ServerConfig
from sluice.openai.errors import error_response, too_large
from sluice.rpc import MAX_MESSAGE_BYTES, SluiceError
from sluice.rpc.access import Access, check_exposure, is_local, roles_for
from sluice.rpc.channel import UNIX
from sluice.rpc.quota import Usage
from sluice.rpc.server import LOOPBACK, RPC_IN_FLIGHT, RPC_SECONDS, RPC_TOTAL

STEP_S = 0.05
"""Seconds between two checks whether uvicorn has started; it has no event for that."""

START_DEADLINE_S = 10.0

MARGIN_S = 2.0
"""Seconds that uvicorn may take after the drain to close its connections."""

SEND_DEADLINE_S = 60.0
"""Seconds for a client to read an event of a stream before it is disconnected."""

REQUEST_ID = "x-request-id"
HEALTH_PATH = "/health"
"""Needs no token, like gRPC's health service."""

SERVICE = "openai"
"""Name of the service in the metrics. Their method is the path, their code the HTTP status."""

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that neither change anything nor start a computation."""

CERTIFICATE = "client_certificate"
"""Key of the names in the client's certificate, in the state of a scope."""

GENERATING = roles_for("sluice.v1.RolloutService", "Generate") or frozenset()

JSON = "application/json"

MAX_REQUEST_ID = 128
RETRY_AFTER_S = 1.0

Result = TypeVar("Result")

log = structlog.get_logger()


class _CertificateProtocol(H11Protocol):
    """HTTP over mutual TLS: `scope["state"]` has the names of the client's certificate."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        certificate = transport.get_extra_info("peercert") or {}
        subject = [value for pairs in certificate.get("subject", ()) for key, value in pairs if key == "commonName"]
        uris = [value for key, value in certificate.get("subjectAltName", ()) if key == "URI"]
        self.app_state = {**self.app_state, CERTIFICATE: frozenset([*subject, *uris])}


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
        security: TLS, and whether an unprotected address is allowed.

    Raises:
        ConfigError: if the address is reachable from the network and nothing protects it.
    """

    def __init__(self, app: ASGIApp, host: str, port: int, security: SecurityConfig) -> None:
        self._host = LOOPBACK if host.startswith(UNIX) else host.strip("[]")
        check_exposure(ServerConfig(host=self._host, port=port), security)
        self._port, self._security = port, security
        self._uvicorn = _Server(
            uvicorn.Config(
                app,
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                http=_CertificateProtocol if security.require_client_cert else "auto",
                ssl_certfile=security.tls_cert,
                ssl_keyfile=security.tls_key,
                ssl_ca_certs=str(security.tls_ca) if security.require_client_cert else None,
                ssl_cert_reqs=ssl.CERT_REQUIRED if security.require_client_cert else ssl.CERT_NONE,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Bind and serve.

        Returns:
            The bound port.

        Raises:
            ConfigError: if the address cannot be bound or the certificate cannot be read.
        """
        listener = self._bind()
        port = int(listener.getsockname()[1])
        try:
            self._uvicorn.config.load()
        except (OSError, ssl.SSLError) as error:
            listener.close()
            raise ConfigError(f"cannot use security.tls_cert and security.tls_key: {error}") from error
        self._serving = asyncio.create_task(self._uvicorn.serve([listener]))
        async with asyncio.timeout(START_DEADLINE_S):
            while not self._uvicorn.started and not self._serving.done():
                await asyncio.wait({self._serving}, timeout=STEP_S)
        if self._serving.done():
            await self._serving
        log.info("listening", url=f"{self._scheme}://{self._host}:{port}")
        return port

    async def stop(self, grace: float = 5.0) -> None:
        """Refuse new connections, give requests in progress `grace` seconds, then cancel them. Idempotent."""
        serving, self._serving = self._serving, None
        if serving is None:
            return
        self._uvicorn.config.timeout_graceful_shutdown = max(1, round(grace)) if grace else 0
        self._uvicorn.should_exit = True
        _, late = await asyncio.wait({serving}, timeout=grace + MARGIN_S)
        if late:
            log.warning("http server did not stop in time", grace_s=grace)
            serving.cancel()
            await asyncio.wait({serving}, timeout=MARGIN_S)
        else:
            serving.result()
        # uvicorn cancels what outlives the drain but does not wait for it.
        if self._uvicorn.server_state.tasks:
            await asyncio.wait(set(self._uvicorn.server_state.tasks), timeout=MARGIN_S)

    @property
    def _scheme(self) -> str:
        return "https" if self._security.tls_cert is not None else "http"

    def _bind(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            listener = socket.create_server((self._host, self._port), family=family, backlog=2048)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {self._host}:{self._port} for HTTP: {error.strerror or error}; is the port taken? "
                "set server.http_port, 0 picks a free one"
            ) from error
        # A connection inherits it: the kernel cuts a client off that does not read.
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SEND_DEADLINE_S * 1000))
        return listener


class RequestGuard:
    """ASGI middleware: request id, limits, who may call, metrics, the log, and the response to an unexpected error.

    Args:
        app: The app.
        access: Who may call. Every path but health needs a role that may generate.
        paths: Paths with metrics of their own; all others are counted together.
        most: Maximum number of requests in progress.
        host: Address that the server is bound to.
        most_bytes: Maximum size of a body.
        admit: Admits a request by its path, its headers and the names in its client certificate; returns what must be told of its
            end. By default every request needs a principal that may generate.
        respond: Returns the response to an error of a request to a path.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        paths: Collection[str],
        most: int,
        host: str,
        *,
        most_bytes: int = MAX_MESSAGE_BYTES,
        admit: Callable[[str, Headers, Collection[str]], Usage | None] | None = None,
        respond: Callable[[SluiceError, str], Response] | None = None,
    ) -> None:
        self._bound = host.strip("[]").lower()
        self._loopback = is_local(self._bound)
        self._app, self._paths, self._most = app, frozenset(paths), most
        self._access, self._most_bytes = access, most_bytes
        self._admit_caller = admit or self._admit_principal
        self._respond = respond or (lambda error, _path: error_response(error))
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = _Call(scope, receive, send, self._most_bytes)
        usage = None
        path = scope["path"] if scope["path"] in self._paths else "other"
        structlog.contextvars.bind_contextvars(request_id=call.request_id)
        self._in_flight += 1
        RPC_IN_FLIGHT.labels(SERVICE, path).inc()
        try:
            usage = self._admit(scope, call.headers)
            await self._app(scope, call.receive, call.send)
        except SluiceError as error:
            await self._respond(error, scope["path"])(scope, receive, call.send)
        except asyncio.CancelledError:
            # Nobody but the server cancels a request: it stops, and the client is still there. What has begun is cut.
            if not call.status:
                await self._respond(_stopping(), scope["path"])(scope, receive, call.send)
        except Exception as error:
            log.exception("request failed unexpectedly", path=path)
            if not call.status:
                failed = _unexpected(error, call.request_id)
                await self._respond(failed, scope["path"])(scope, receive, call.send)
        finally:
            if usage is not None:
                usage.end()
            self._in_flight -= 1
            RPC_IN_FLIGHT.labels(SERVICE, path).dec()
            call.account(path)

    def _admit(self, scope: Scope, headers: Headers) -> Usage | None:
        """Accept or refuse a request by its head, before its body is read; return what counts it."""
        if scope["path"] == HEALTH_PATH:
            return None
        if self._access.open:
            self._check_origin(headers)
        # A page can make a browser send a form or plain text to any server. To send JSON, the browser first asks the server
        # by CORS, and ours never agrees.
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] not in SAFE_METHODS and kind != JSON:
            raise SluiceError(
                grpc.StatusCode.INVALID_ARGUMENT,
                "JSON_REQUIRED",
                f"send the header `content-type: {JSON}`, even without a body",
            )
        if self._in_flight > self._most:
            raise SluiceError.resource_exhausted(
                "TOO_MANY_REQUESTS", f"{self._most} requests are in progress; retry after the delay", RETRY_AFTER_S
            )
        certificate = scope.get("state", {}).get(CERTIFICATE, ())
        return self._admit_caller(scope["path"], headers, certificate)

    def _admit_principal(self, _path: str, headers: Headers, certificate: Collection[str]) -> Usage | None:
        return self._access.admit(headers.get("authorization"), certificate, GENERATING)

    def _check_origin(self, headers: Headers) -> None:
        """Refuse a request that a page of another site made, by `Host` and `Origin`.

        An attacker may let a name of theirs resolve to this machine (DNS rebinding): then `Host` has that name. `Origin` names
        the page that made the browser send the request.

        Raises:
            SluiceError: PERMISSION_DENIED.
        """
        host, origin = headers.get("host", ""), headers.get("origin")
        remedy = "or protect the server by tokens (security.principals_file)"
        # A server that is bound to the network may have names that it does not know; then only the origin is checked.
        if self._loopback and not self._is_ours(f"//{host}"):
            message = f"the request is addressed to {host[:100]!r}: use localhost or 127.0.0.1, {remedy}"
            raise SluiceError(grpc.StatusCode.PERMISSION_DENIED, "HOST_NOT_ALLOWED", message)
        if origin is not None and not self._is_ours(origin):
            message = f"the page {origin[:100]!r} may not use this server: use a page of this machine, {remedy}"
            raise SluiceError(grpc.StatusCode.PERMISSION_DENIED, "ORIGIN_NOT_ALLOWED", message)

    def _is_ours(self, url: str) -> bool:
        try:
            name = (urlsplit(url).hostname or "").lower()
            return name in {self._bound, "localhost"} or (ipaddress.ip_address(name).is_loopback or not self._loopback)
        except ValueError:  # not a URL, or a name that we do not know
            return False


class _Call:
    """One request and its outcome."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, most_bytes: int) -> None:
        self.headers = Headers(scope=scope)
        self._most_bytes = most_bytes
        self.request_id = _request_id(self.headers)
        self.status = 0
        self._receive, self._send = receive, send
        self._begun = time.perf_counter()
        self._bytes = 0

    async def receive(self) -> Message:
        """Receive a part of the body. Raise if the body is too large."""
        if int(self._declared_length()) > self._most_bytes:
            raise too_large(self._most_bytes)
        message = await self._receive()
        self._bytes += len(message.get("body", b""))
        if self._bytes > self._most_bytes:
            raise too_large(self._most_bytes)
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the response, with the request id in its head."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)[REQUEST_ID] = self.request_id
        await self._send(message)

    def account(self, path: str) -> None:
        """Count and log the request. Status 0 means that the client disconnected before the response."""
        seconds = time.perf_counter() - self._begun
        RPC_TOTAL.labels(SERVICE, path, str(self.status)).inc()
        RPC_SECONDS.labels(SERVICE, path).observe(seconds)
        write = log.debug if 200 <= self.status < 400 else log.info
        write("http", path=path, status=self.status, seconds=round(seconds, 6))

    def _declared_length(self) -> str:
        length = self.headers.get("content-length", "")
        return length if length.isdecimal() else "0"


def _request_id(headers: Headers) -> str:
    given = headers.get(REQUEST_ID, "")[:MAX_REQUEST_ID]
    return given if given.isascii() and given.isprintable() and given else uuid.uuid4().hex


def _stopping() -> SluiceError:
    message = "the server is shutting down; make the same request again, elsewhere if there is another server"
    return SluiceError.unavailable("DRAINING", message, RETRY_AFTER_S)


def _unexpected(error: Exception, request_id: str) -> SluiceError:
    return SluiceError(
        grpc.StatusCode.INTERNAL,
        "UNEXPECTED",
        f"the server failed with an unexpected {type(error).__name__}; look for request id {request_id} in its log",
    )


class DisconnectedError(Exception):
    """The client closed its connection."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do the work of a request whose body was read. If the client disconnects, cancel the work and wait until it has ended.

    Raises:
        DisconnectedError: if the client disconnected.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise DisconnectedError
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait({working, leaving})
        if not working.cancelled():
            working.exception()  # nobody reads an error that the work raised while it was cancelled


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events until they end or the client disconnects, then closes their source.

    Starlette's own StreamingResponse leaves a source that is waiting at that moment to the garbage collector.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the response."""
        del scope
        with contextlib.suppress(DisconnectedError, TimeoutError):
            await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            async with asyncio.timeout(SEND_DEADLINE_S):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in self._events:
                async with asyncio.timeout(SEND_DEADLINE_S):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
