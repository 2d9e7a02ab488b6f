"""One HTTP request: the checks before it, and its response, which ends when the client disconnects.

The checks cover the request's id, its size, its caller and its origin. Each request is counted and logged, and an unexpected error gets a
response, too. A web page can make the user's browser send requests to a server on this machine. Two checks refuse them: a request that
changes something must be sent as JSON, and a server without tokens checks `Host` and `Origin`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import time
import uuid
from collections.abc import AsyncGenerator, Collection, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import grpc
import structlog
from google.protobuf.message import Message as ProtoMessage
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluice.limits import BODY_S, MAX_BODIES_BYTES, SEND_DEADLINE_S
from sluice.openai.errors import error_response, too_large, too_many_bytes, too_slow
from sluice.openai.server import CERTIFICATE
from sluice.rpc import MAX_MESSAGE_BYTES, SluiceError
from sluice.rpc.access import EVERY_ROLE, Access, is_local, name_request, roles_for
from sluice.rpc.bounds import Room
from sluice.rpc.call_log import CallLog, is_logged
from sluice.rpc.principals import Role
from sluice.rpc.quota import Usage
from sluice.rpc.readiness import Readiness
from sluice.rpc.rows import ROWS
from sluice.rpc.server import RPC_IN_FLIGHT, RPC_SECONDS, RPC_TOTAL

REQUEST_ID = "x-request-id"
HEALTH_PATH = "/health"
"""Path of the health check. It and `READY_PATH` need no token, like gRPC's health service."""


SERVICE = "openai"
"""Name of the service in the metrics. There the method is the path, and the code is the HTTP status."""

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that neither change anything nor start a computation."""

JSON = "application/json"

DISCONNECTED = 499
"""The status that proxies log for a client that disconnected; nobody receives it."""

MAX_REQUEST_ID = 128
RETRY_AFTER_S = 1.0

Result = TypeVar("Result")

log = structlog.get_logger()


def ready_answer(readiness: Readiness) -> JSONResponse:
    """Return 200 if the service is ready, else 503 with the reasons why it waits."""
    waits = readiness.waits_for()
    return JSONResponse({"ready": not waits, "waits_for": waits}, 503 if waits else 200)


def bearer_token(headers: Headers) -> str:
    """Return the token in the authorization of a request; empty without one."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """How many requests may be in progress, and how large their bodies may be.

    Attributes:
        requests: Maximum number of requests to the routes in `waiting`, and the same number to all others.
        body_bytes: Maximum size of a body.
        bodies_bytes: Maximum of all bodies together.
        waiting: Routes whose requests wait for work. They have a separate limit, so that they do not keep out requests that have work.
    """

    requests: int
    body_bytes: int = MAX_MESSAGE_BYTES
    bodies_bytes: int = MAX_BODIES_BYTES
    waiting: frozenset[str] = frozenset()


class Door:
    """Finds out who calls, and answers errors. This class needs a principal, by token or certificate.

    Args:
        access: Who may call.
    """

    def __init__(self, access: Access) -> None:
        self.access = access

    def token(self, headers: Headers) -> str:
        """Return the token of the caller; empty without one. Then the certificate identifies the caller, or else the session in the request."""
        return bearer_token(headers)

    def admit(self, scope: Scope, route: str, roles: frozenset[Role]) -> Usage | None:
        """Admit a request to a route for some roles. Return its usage, to be ended with the request.

        Raises:
            SluiceError: UNAUTHENTICATED, PERMISSION_DENIED, RESOURCE_EXHAUSTED.
        """
        del route
        return self.access.admit(Headers(scope=scope).get("authorization"), certificate_of(scope), roles)

    def answer(self, error: SluiceError, path: str) -> Response:
        """Return the response to an error of a request to a path."""
        del path
        return error_response(error)


class RequestGuard:
    """ASGI middleware: the checks around each request.

    Args:
        app: The app.
        door: Finds out who calls.
        port: The port in `sluice.rpc.access.ACCESS`, which says which role each route needs.
        host: Address that the server is bound to.
        bounds: How many requests may be in progress, and how large they may be.
    """

    def __init__(self, app: ASGIApp, door: Door, port: str, host: str, bounds: RequestBounds) -> None:
        self._bound = host.strip("[]").lower()
        self._loopback = is_local(self._bound)
        self._app, self._door, self._port, self._bounds = app, door, port, bounds
        self._bodies = Room(bounds.bodies_bytes)
        self._in_progress = {True: 0, False: 0}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        tenant = _tenant(scope, self._door.token(Headers(scope=scope)))
        call = _Call(scope, receive, send, self._bounds.body_bytes, self._bodies, tenant=tenant)
        usage = None
        route = _route_of(scope)
        path = route or "other"
        name_request(call.request_id)
        waits = route in self._bounds.waiting
        self._in_progress[waits] += 1
        RPC_IN_FLIGHT.labels(SERVICE, path).inc()
        try:
            usage = self._admit(scope, route, call.headers)
            await self._app(scope, call.receive, call.send)
        except SluiceError as error:
            await self._door.answer(error, scope["path"])(scope, receive, call.send)
        except ClientDisconnect:
            log.debug("the client disconnected before its request was whole", path=path)
        except asyncio.CancelledError:
            # Only a stopping server cancels a request, and its client is still connected. A response that has begun is cut off.
            if not call.status:
                await self._door.answer(_stopping(), scope["path"])(scope, receive, call.send)
        except Exception as error:
            log.exception("request failed unexpectedly", path=path)
            if not call.status:
                failed = _unexpected(error, call.request_id)
                await self._door.answer(failed, scope["path"])(scope, receive, call.send)
        finally:
            if usage is not None:
                usage.end()
            self._in_progress[waits] -= 1
            RPC_IN_FLIGHT.labels(SERVICE, path).dec()
            call.end(path)

    def _admit(self, scope: Scope, route: str, headers: Headers) -> Usage | None:
        """Accept or refuse a request by its head, before its body is read. Return its usage, to be ended with the request."""
        roles = roles_for(self._port, route.removeprefix("/")) if route else EVERY_ROLE  # without a route: 404
        if roles is None:
            return None
        if self._door.access.open:
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
        if self._in_progress[route in self._bounds.waiting] > self._bounds.requests:
            raise SluiceError.resource_exhausted(
                "TOO_MANY_REQUESTS",
                f"{self._bounds.requests} requests are in progress; retry after the delay",
                RETRY_AFTER_S,
            )
        return self._door.admit(scope, route, roles)

    def _check_origin(self, headers: Headers) -> None:
        """Refuse a request from a page of another site, by `Host` and `Origin`.

        An attacker's DNS name may resolve to this machine (DNS rebinding). Then `Host` has that name. `Origin` names the page that made
        the browser send the request.

        Raises:
            SluiceError: PERMISSION_DENIED.
        """
        host, origin = headers.get("host", ""), headers.get("origin")
        remedy = "or protect the server by tokens (security.principals_file)"
        # A server that is bound to the network may have names that it does not know. Then check only the origin.
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


def certificate_of(scope: Scope) -> Collection[str]:
    """Return the names in the client's certificate; empty without one."""
    names: Collection[str] = scope.get("state", {}).get(CERTIFICATE, ())
    return names


def _tenant(scope: Scope, token: str) -> Hashable:
    """Return the tenant whose room the body of a request takes. It depends only on what identifies the caller."""
    if token:
        return hash(token)
    if names := certificate_of(scope):
        return hash(frozenset(names))
    return hash(scope.get("state", {}).get("session") or Headers(scope=scope).get("x-session-id"))


def peer_of(scope: Scope) -> str:
    """Return the address of a client in the form of the log of calls."""
    client = scope.get("client")
    return "http" if client is None else f"http:{client[0]}:{client[1]}"


def recorded(
    call_log: CallLog | None, http: Request, method: str, request: ProtoMessage
) -> contextlib.AbstractContextManager[None]:
    """In the block, serve a request that corresponds to a gRPC call. Then log that call, if it is one that is logged.

    Args:
        call_log: The log; None writes nothing.
        http: The request.
        method: Method of the gRPC call.
        request: Request message of the gRPC call.
    """
    if call_log is None or not is_logged(method):
        return contextlib.nullcontext()
    return call_log.recorded(method, request, peer_of(http.scope))


def _route_of(scope: Scope) -> str:
    """Return the route that will serve a request, such as `/v1/models/{name:path}`; empty if none will.

    Ask the routes themselves. Comparing paths here could give another result than theirs, and the request would be served by a route for
    which its caller was not checked.
    """
    found = ""
    for route in scope["app"].routes:
        match, _ = route.matches(scope)
        if match is Match.FULL:
            return str(route.path)
        if match is Match.PARTIAL:  # the path matches with another HTTP method
            found = found or str(route.path)
    return found


class _Call:
    """One request and its outcome."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, most_bytes: int, bodies: Room, *, tenant: Hashable
    ) -> None:
        self.headers = Headers(scope=scope)
        self._most_bytes, self._bodies = most_bytes, bodies
        self._tenant = tenant
        self.request_id = _request_id(self.headers)
        self.status = 0
        self._receive, self._send = receive, send
        self._begun = time.perf_counter()
        self._bytes = self._counted = 0
        self._whole = False
        self._body_due: float | None = None

    async def receive(self) -> Message:
        """Receive a part of the body, or a message after it. Raise if the body is too large, or takes too long."""
        if int(self._declared_length()) > self._most_bytes:
            raise too_large(self._most_bytes)
        if self._whole:
            return await self._receive()
        if self._body_due is None:
            self._body_due = asyncio.get_running_loop().time() + BODY_S
        try:
            async with asyncio.timeout_at(self._body_due):
                message = await self._receive()
        except TimeoutError as error:
            raise too_slow(BODY_S) from error
        self._whole = not message.get("more_body", False)
        size = len(message.get("body", b""))
        self._bytes += size
        if self._bytes > self._most_bytes:
            raise too_large(self._most_bytes)
        self._counted += size
        if not self._bodies.take(self._tenant, size):
            raise too_many_bytes(RETRY_AFTER_S)
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the response, with the request id in its head."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)[REQUEST_ID] = self.request_id
        await self._send(message)

    def end(self, path: str) -> None:
        """Count and log the request. Status 0 means that the client disconnected before the response."""
        self._bodies.give_back(self._tenant, self._counted)
        seconds = time.perf_counter() - self._begun
        RPC_TOTAL.labels(SERVICE, path, str(self.status)).inc()
        RPC_SECONDS.labels(SERVICE, path).observe(seconds)
        ROWS.end_quiet()
        is_told = not 200 <= self.status < 400 and (self.status == 500 or ROWS.begins(path, str(self.status)))
        (log.info if is_told else log.debug)("http", path=path, status=self.status, seconds=round(seconds, 6))

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


class Connection:
    """The connection of a client whose request was read.

    Args:
        receive: Returns the client's next message.

    Attributes:
        has_left: Whether the client has disconnected.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.has_left = False

    async def serve(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do the work of the request. If the client disconnects, cancel the work and wait until it has ended.

        Raises:
            DisconnectedError: if the client disconnected.
        """
        working, leaving = asyncio.create_task(work), asyncio.create_task(self._wait())
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
                working.exception()  # mark an error that the work raised while it was cancelled as read

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.has_left = True

    async def sent(self, send: Send) -> None:
        """Wait until all that was sent has left this process. Call it within the work of `serve`.

        A client that has read everything may close at once. That is not a disconnection, so return as soon as the buffer has room.

        Raises:
            DisconnectedError: if the client disconnected before that.
            TimeoutError: after `SEND_DEADLINE_S`.
        """
        async with asyncio.timeout(SEND_DEADLINE_S):
            # Before a write, the server waits until the buffer has room. If the connection ends instead, `_wait` gets the message first.
            await send({"type": "http.response.body", "body": b"", "more_body": True})
        if self.has_left:
            raise DisconnectedError


async def while_connected(http: Request, work: Coroutine[Any, Any, Result]) -> Result | Response:
    """Do the work of a request. If its client disconnects, return an empty response."""
    try:
        return await Connection(http.receive).serve(work)
    except DisconnectedError:
        return Response(status_code=DISCONNECTED)


SENT = b""
"""A mark in a stream of events, which is not sent. The event after it is requested only when all events before it have been sent."""


class EventStream(Response):
    """Sends events until they end or the client disconnects, then closes their source.

    If the source is waiting when the client disconnects, Starlette's StreamingResponse leaves it to the garbage collector.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the response."""
        del scope
        connection = Connection(receive)
        with contextlib.suppress(DisconnectedError, TimeoutError):
            await connection.serve(self._send(send, connection))

    async def _send(self, send: Send, connection: Connection) -> None:
        async with contextlib.aclosing(self._events):
            async with asyncio.timeout(SEND_DEADLINE_S):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in self._events:
                if event == SENT:
                    await connection.sent(send)
                    continue
                async with asyncio.timeout(SEND_DEADLINE_S):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
