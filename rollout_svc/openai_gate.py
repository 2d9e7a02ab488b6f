"""What happens around every HTTP request: request id, limits, role, metrics, log, and the failure nobody foresaw."""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection

import grpc
import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_svc.openai_errors import error_response, too_large
from sluice.openai.browser import BrowserCheck, require_json
from sluice.rpc import MAX_MESSAGE_BYTES, SluiceError
from sluice.rpc.metrics import RPC_IN_FLIGHT, RPC_SECONDS, RPC_TOTAL
from sluice.rpc.tokens import TokenCheck

__all__ = ["HEALTH_PATH", "Gate"]

REQUEST_ID = "x-request-id"
HEALTH_PATH = "/health"
"""Open to everyone, as gRPC's health service is."""

SERVICE = "openai"
"""The service's name in the metrics, where the method is the path and the code the HTTP status."""

MAX_REQUEST_ID = 128
RETRY_AFTER_S = 1.0

log = structlog.get_logger()


class Gate:
    """ASGI middleware around the whole app.

    Args:
        app: What it guards.
        tokens: Who may call; every path but health asks for the agent's role.
        paths: Paths that the metrics name; all others are counted together.
        most: Requests in progress at once.
        host: Address that the server is bound to.
    """

    def __init__(self, app: ASGIApp, tokens: TokenCheck, paths: Collection[str], most: int, host: str) -> None:
        self._browser = BrowserCheck(host)
        self._app, self._tokens, self._paths, self._most = app, tokens, frozenset(paths), most
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = _Call(scope, receive, send)
        path = scope["path"] if scope["path"] in self._paths else "other"
        structlog.contextvars.bind_contextvars(request_id=call.request_id)
        self._in_flight += 1
        RPC_IN_FLIGHT.labels(SERVICE, path).inc()
        try:
            self._admit(scope, call.headers)
            await self._app(scope, call.receive, call.send)
        except SluiceError as error:
            await error_response(error)(scope, receive, call.send)
        except Exception as error:
            log.exception("request failed unexpectedly", path=path)
            if not call.status:
                await error_response(_unexpected(error, call.request_id))(scope, receive, call.send)
        finally:
            self._in_flight -= 1
            RPC_IN_FLIGHT.labels(SERVICE, path).dec()
            call.account(path)

    def _admit(self, scope: Scope, headers: Headers) -> None:
        """Decide by the head of a request alone, before its body is read."""
        if scope["path"] == HEALTH_PATH:
            return
        if self._tokens.open:
            self._browser.verify(headers)
        self._tokens.verify(headers.get("authorization"), "agent")
        require_json(scope["method"], headers)
        if self._in_flight > self._most:
            raise SluiceError.resource_exhausted(
                "TOO_MANY_REQUESTS", f"{self._most} requests are in progress; retry after the delay", RETRY_AFTER_S
            )


class _Call:
    """One request and what became of it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers = Headers(scope=scope)
        self.request_id = _request_id(self.headers)
        self.status = 0
        self._receive, self._send = receive, send
        self._begun = time.perf_counter()
        self._bytes = 0

    async def receive(self) -> Message:
        """Take a part of the body, if it is not too large."""
        if int(self._declared_length()) > MAX_MESSAGE_BYTES:
            raise too_large(MAX_MESSAGE_BYTES)
        message = await self._receive()
        self._bytes += len(message.get("body", b""))
        if self._bytes > MAX_MESSAGE_BYTES:
            raise too_large(MAX_MESSAGE_BYTES)
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the response; its head names the request."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)[REQUEST_ID] = self.request_id
        await self._send(message)

    def account(self, path: str) -> None:
        """Count and log the request; status 0 means that the client left before an answer."""
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


def _unexpected(error: Exception, request_id: str) -> SluiceError:
    return SluiceError(
        grpc.StatusCode.INTERNAL,
        "UNEXPECTED",
        f"the server failed unexpectedly ({type(error).__name__}); its log has the traceback under request id {request_id}",
    )
