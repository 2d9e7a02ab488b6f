"""What a server does around every call: admission, request id, errors, metrics, log, drain.

One interceptor wraps the handler once per method and does its work at the beginning and the end of a call; the messages of
a stream pass through the same loop that gRPC itself would run, so that streaming tokens costs nothing extra.
"""

from __future__ import annotations

import asyncio
import inspect
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import grpc
import structlog
from prometheus_client import Counter, Gauge, Histogram

from sluice.rpc.access import Role, TokenCheck
from sluice.rpc.errors import DETAILS_KEY, SluiceError

RPC_TOTAL = Counter("sluice_rpc", "Calls answered, by status code.", ("service", "method", "code"))
RPC_SECONDS = Histogram(
    "sluice_rpc_seconds",
    "Time from the arrival of a call to its end, streams included.",
    ("service", "method"),
    buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800),
)
RPC_IN_FLIGHT = Gauge("sluice_rpc_in_flight", "Calls in progress.", ("service", "method"))

REQUEST_ID_KEY = "x-request-id"
"""Metadata with the id of a call, for the logs of both sides."""

_REQUEST_ID_CHARACTERS = 128

_RETRY_AFTER_S = 1.0
"""Seconds after which a caller beyond the limit of concurrent calls should retry."""

Message: TypeAlias = Any
"""A request, a response or an iterator of them: the interceptor never looks inside."""
Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Body: TypeAlias = Callable[[Message, Context], Awaitable[Message]]

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_FAULTS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}

log = structlog.get_logger(__name__)


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of one server.

    Args:
        tokens: Who may call.
        roles: The role that each service asks for; a service that is not named is open (health).
        max_concurrent_rpcs: Calls in progress at once, open services not counted.
        unimplemented: Methods that answer UNIMPLEMENTED, as "package.Service/Method".
    """

    def __init__(
        self, tokens: TokenCheck, roles: Mapping[str, Role], max_concurrent_rpcs: int, unimplemented: frozenset[str]
    ) -> None:
        self.tokens = tokens
        self.max_concurrent_rpcs = max_concurrent_rpcs
        self.in_flight = 0
        self._roles = roles
        self._unimplemented = unimplemented
        self._watchers: set[asyncio.Task[Any]] = set()
        self._ended: set[asyncio.Task[Any]] = set()
        self._wrapped: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

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
            if handler is None:  # an unknown method: gRPC answers UNIMPLEMENTED, and nothing is remembered of its name
                return None
            wrapped = self._wrapped[method] = self._wrap(method.lstrip("/"), handler)
        return wrapped

    def end_watches(self) -> None:
        """End the streams that last until their client leaves, so that a drain waits for work only."""
        fresh = self._watchers - self._ended
        self._ended |= fresh
        for task in fresh:
            task.cancel()

    def _wrap(self, method: str, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
        service, _, name = method.partition("/")
        inner = handler.unary_unary or handler.stream_unary or handler.unary_stream or handler.stream_stream
        body = _streaming(inner) if handler.response_streaming else _unary(inner)
        if method in self._unimplemented:
            body = _unimplemented(method)
        observed = _ObservedMethod(self, service, name, self._roles.get(service), body)
        serve = observed.watch if handler.response_streaming and name.startswith("Watch") else observed.serve
        factory = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        make: Any = factory
        wrapped: grpc.RpcMethodHandler[Any, Any] = make(
            serve, handler.request_deserializer, handler.response_serializer
        )
        return wrapped

    def register_watch(self) -> None:
        """Let `end_watches` end the stream that the current task serves."""
        if (task := asyncio.current_task()) is not None:
            self._watchers.add(task)
            task.add_done_callback(self._watchers.discard)

    def has_ended(self, task: asyncio.Task[Any] | None) -> bool:
        """Return whether `end_watches` ended this stream, not its client."""
        return task in self._ended


class _ObservedMethod:
    """One method of one server, with its metrics at hand."""

    def __init__(self, calls: CallInterceptor, service: str, name: str, role: Role | None, body: Body) -> None:
        self._calls = calls
        self._service, self._name, self._role, self._body = service, name, role, body
        self._seconds = RPC_SECONDS.labels(service, name)
        self._in_flight = RPC_IN_FLIGHT.labels(service, name)
        self._totals: dict[grpc.StatusCode, Counter] = {}

    async def watch(self, request: Message, context: Context) -> Message:
        """Serve a stream that lasts until the client or the server leaves."""
        self._calls.register_watch()
        return await self.serve(request, context)

    async def serve(self, request: Message, context: Context) -> Message:
        """Serve one call and account for it."""
        started = time.perf_counter()
        request_id, authorization = _identify(context)
        structlog.contextvars.bind_contextvars(request_id=request_id)
        code = grpc.StatusCode.OK
        self._calls.in_flight += self._role is not None
        self._in_flight.inc()
        try:
            self._admit(authorization)
            response = await self._body(request, context)
            code = _code_of(context)
        except asyncio.CancelledError:
            if self._calls.has_ended(asyncio.current_task()) and not context.done():
                code = grpc.StatusCode.UNAVAILABLE
                await self._leave_drained(context)
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
            log.exception("rpc failed unexpectedly", rpc=f"{self._service}/{self._name}")
            await _abort(context, _internal(error, request_id))
        finally:
            self._calls.in_flight -= self._role is not None
            self._in_flight.dec()
            self._account(code, time.perf_counter() - started)
        return response

    def _admit(self, authorization: str | bytes | None) -> None:
        if self._role is None:
            return
        self._calls.tokens.verify(authorization, self._role)
        if self._calls.in_flight > self._calls.max_concurrent_rpcs:
            raise SluiceError.resource_exhausted(
                "TOO_MANY_RPCS",
                f"{self._calls.max_concurrent_rpcs} calls are in progress, the most that this server takes"
                " (server.max_concurrent_rpcs); retry after the delay",
                _RETRY_AFTER_S,
            )

    async def _leave_drained(self, context: Context) -> None:
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        await _abort(context, SluiceError.unavailable("DRAINING", "the server is shutting down; watch again elsewhere"))

    def _account(self, code: grpc.StatusCode, seconds: float) -> None:
        total = self._totals.get(code)
        if total is None:
            total = self._totals[code] = RPC_TOTAL.labels(self._service, self._name, code.name)
        total.inc()
        self._seconds.observe(seconds)
        write = log.debug if code is grpc.StatusCode.OK else log.warning if code in _FAULTS else log.info
        write("rpc", rpc=f"{self._service}/{self._name}", code=code.name, seconds=round(seconds, 6))


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


def _code_of(context: Context) -> grpc.StatusCode:
    """Return the code that the servicer set on the context; OK if it set none."""
    code: Any = context.code()
    return code if isinstance(code, grpc.StatusCode) else _CODES.get(code, grpc.StatusCode.OK)


def _internal(error: Exception, request_id: str) -> SluiceError:
    return SluiceError(
        grpc.StatusCode.INTERNAL,
        "UNEXPECTED",
        f"the server failed unexpectedly ({type(error).__name__}); its log has the traceback under request id {request_id}",
        metadata={"request_id": request_id},
    )


async def _abort(context: Context, error: SluiceError) -> None:
    status = error.to_status()
    await context.abort(error.code, status.message, ((DETAILS_KEY, status.SerializeToString()),))


def _unary(inner: Any) -> Body:  # noqa: ANN401 - a handler of any arity
    async def body(request: Message, context: Context) -> Message:
        response = inner(request, context)
        return await response if inspect.isawaitable(response) else response

    return body


def _streaming(inner: Any) -> Body:  # noqa: ANN401 - a handler of any arity
    """Run the loop that gRPC runs for an async generator, rather than a generator around it."""

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
