"""The HTTP port of a gateway: the routes of the dialects, and the routes that open, reward and end sessions.

Every request takes the same way: find the session by path, header or key -> parse the body in its dialect -> sample and record -> write
the response in the dialect. While a request waits, its connection stays open. A stream gets comments meanwhile, which every client skips.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
import structlog
import xxhash
from google.protobuf.json_format import MessageToDict
from prometheus_client import CONTENT_TYPE_LATEST, Counter, generate_latest
from pydantic import BaseModel, ConfigDict, Field
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway_svc.config import CaptureConfig
from gateway_svc.orchestrator import SessionRef
from gateway_svc.recording import RecordedSessions, RequestIdentity, Unsupported, settle_sampling
from gateway_svc.shared import Parts, deadline, paced
from sluice.clock import CLOCK, Clock
from sluice.limits import SEND_DEADLINE_S
from sluice.openai import chat, completions, messages, responses
from sluice.openai.answers import Begun, Delta, Reply, Result
from sluice.openai.bodies import ClientRequest, read_body
from sluice.openai.errors import HTTP_REASONS, error_body, error_response, error_status, too_large
from sluice.openai.requests import (
    HEALTH_PATH,
    SENT,
    Connection,
    DisconnectedError,
    Door,
    EventStream,
    RequestBounds,
    RequestGuard,
    certificate_of,
    ready_answer,
    recorded,
    while_connected,
)
from sluice.rpc import SluiceError
from sluice.rpc.access import GATEWAY_HTTP, SESSION_KEY, Access
from sluice.rpc.call_log import CallLog
from sluice.rpc.principals import Role
from sluice.rpc.quota import Usage
from sluice.rpc.readiness import READY_PATH, Readiness
from sluice.v1 import episode_pb2, session_pb2

SESSION_HEADER = "x-session-id"
SESSION_PATH = "/sessions/"
RETRY_HEADER = "x-stainless-retry-count"
"""How often the client has sent this request before. The client libraries of OpenAI and Anthropic send it, and everything built on them."""

IDEMPOTENCY_HEADER = "idempotency-key"
"""A name of a request: all requests of a session with the same name and body are one."""

MOST_RETRIES = 2**32 - 1

MAX_SESSION_ID = 256

COMMENT = b": waiting\n\n"
"""A comment in a stream. Every client skips it; not every client accepts an event of the type ping."""

MAX_WAIT_S = 60.0

OPEN_PATH = "/rl/sessions"
"""Opens a session. Waits if none is on offer."""

PRINCIPAL_ROUTES = frozenset({OPEN_PATH, "/metrics"})
"""Routes that belong to no session. They need a principal; a session key does not open them."""

SMALL_BODY_BYTES = 16 << 10
"""Maximum bytes of a body of our own routes. The server buffers more than that of a body that nobody reads."""

NOTICES = Counter(
    "sluice_capture_notices_total",
    "Parts of captured requests that were not done as the client wrote them.",
    ("dialect", "kind", "what"),
)

MAX_NOTICE_NAMES = 512
"""Maximum number of field names that are counted separately. Clients choose these names; all others share one count."""

log = structlog.get_logger()


AnyBody = TypeVar("AnyBody", bound=BaseModel)


class Strict(BaseModel):
    """A body of our own routes: an unknown key is an error."""

    model_config = ConfigDict(extra="forbid")


class OpenBody(Strict):
    """Body of `POST /rl/sessions`."""

    request_id: str = Field("", max_length=128)
    wait_s: float = Field(0.0, ge=0, le=MAX_WAIT_S)


class RewardBody(Strict):
    """Body of `POST /rl/sessions/{id}/reward`: rewards the session, one generation, or the branch that ends with a generation."""

    reward: float = Field(allow_inf_nan=False)
    generation_id: str | None = None
    branch: str | None = None


class RenewBody(Strict):
    """Body of `POST /rl/sessions/{id}/renew`, which has no fields."""


class EndBody(Strict):
    """Body of `POST /rl/sessions/{id}/end`. `abandon` is a reason: if it is set, the session is given up and not trained."""

    reward: float | None = Field(None, allow_inf_nan=False)
    truncated: bool = False
    reward_follows: bool = False
    abandon: str | None = Field(None, max_length=128)
    requeue: bool = False


class SessionDoor(Door):
    """Finds out who calls, and which session the request means.

    Args:
        sessions: The sessions.
        access: Who may call, shared with the gRPC port.
    """

    def __init__(self, sessions: RecordedSessions, access: Access) -> None:
        super().__init__(access)
        self._sessions = sessions

    def token(self, headers: Headers) -> str:
        """Return the token of a request, as the clients of OpenAI or Anthropic send it."""
        kind = headers.get("authorization", "").partition(" ")[0]
        return super().token(headers) if kind.lower() == "bearer" else headers.get("x-api-key", "").strip()

    def admit(self, scope: Scope, route: str, roles: frozenset[Role]) -> Usage | None:
        """Admit the caller. Session keys pass here: the routes of the session check them. Anything else needs a principal."""
        token = self.token(Headers(scope=scope))
        if token.startswith(SESSION_KEY) and route not in PRINCIPAL_ROUTES:
            return None
        return self.access.admit(f"Bearer {token}" if token else None, certificate_of(scope), roles)

    def answer(self, error: SluiceError, path: str) -> JSONResponse:
        """Return the response to an error, in the form of the path's dialect."""
        return error_answer(error, path)

    def ref(self, http: Request) -> SessionRef:
        """Return the session that a request names: by its path, else by its header, else by its key.

        Raises:
            SluiceError: UNAUTHENTICATED if it names none.
        """
        token = self.token(http.headers)
        key = token if token.startswith(SESSION_KEY) else ""
        named = http.scope.get("state", {}).get("session") or http.headers.get(SESSION_HEADER, "")
        if not named and not key:
            raise SluiceError(
                grpc.StatusCode.UNAUTHENTICATED,
                "SESSION_REQUIRED",
                "the request names no session: send its key as the API key, its name as the header X-Session-ID, or use the base"
                " URL /sessions/NAME/v1; POST /rl/sessions opens one",
            )
        return SessionRef(named[:MAX_SESSION_ID], key)

    async def session(self, http: Request) -> session_pb2.FindSessionResponse:
        """Return the session that a request names.

        Raises:
            SluiceError: UNAUTHENTICATED, NOT_FOUND, FAILED_PRECONDITION (it ended).
        """
        return await self._sessions.find(self.ref(http))

    async def check_key(self, ref: SessionRef) -> None:
        """Refuse a key that settles no session.

        Raises:
            SluiceError: NOT_FOUND, PERMISSION_DENIED, or the reason why the key could not be checked.
        """
        if ref.key:  # without a key, `admit` has checked the principal
            await self._sessions.find_ended(ref)


def create_app(
    sessions: RecordedSessions,
    capture: CaptureConfig,
    access: Access,
    host: str,
    clock: Clock = CLOCK,
    *,
    call_log: CallLog | None = None,
    readiness: Readiness | None = None,
) -> SessionPaths:
    """Build the app.

    Args:
        sessions: Sample and record.
        capture: The settings.
        access: Who may call, shared with the gRPC port.
        host: Address that the server is bound to.
        clock: The time that requests are held for.
        call_log: Logs what admins do to sessions.
        readiness: What the service waits for; None: nothing.
    """
    door = SessionDoor(sessions, access)
    limits = capture.limits
    bounds = RequestBounds(
        limits.max_requests, limits.max_body_bytes, limits.max_bodies_mb << 20, waiting=frozenset({OPEN_PATH})
    )
    guard = Middleware(RequestGuard, door=door, port=GATEWAY_HTTP, host=host, bounds=bounds)
    app = Starlette(
        routes=[
            *_dialects(Capture(sessions, door, capture, clock)),
            *_sessions(sessions, door, call_log),
            *_description(sessions, door, readiness or Readiness()),
        ],
        middleware=[guard],
        exception_handlers={SluiceError: _refused, HTTPException: _refused},
    )
    app.router.redirect_slashes = False
    return SessionPaths(app)


class SessionPaths:
    """ASGI middleware: removes the session from a path such as `/sessions/NAME/v1/responses`, so that each route is defined only once.

    Attributes:
        app: The app that it wraps, with the routes.
    """

    def __init__(self, app: Starlette) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and scope["path"].startswith(SESSION_PATH):
            name, slash, rest = scope["path"].removeprefix(SESSION_PATH).partition("/")
            state = {**scope.get("state", {}), "session": name}
            scope = {**scope, "path": slash + rest, "raw_path": (slash + rest).encode(), "state": state}
        await self.app(scope, receive, send)


@dataclass(frozen=True, slots=True)
class Call(Generic[AnyBody]):
    """A request of a dialect whose session was found and whose body was read.

    Attributes:
        http: The request.
        session: Its session.
        body: Its body.
        unsupported: What happens to sampling that may not be trained.
    """

    http: Request
    session: session_pb2.FindSessionResponse
    body: AnyBody
    unsupported: Unsupported


class Capture:
    """Serves the requests of all dialects.

    Args:
        sessions: Sample and record.
        door: Finds out which session a request means.
        settings: The settings.
        clock: The time that requests are held for.
    """

    def __init__(self, sessions: RecordedSessions, door: SessionDoor, settings: CaptureConfig, clock: Clock) -> None:
        self.sessions = sessions
        self._door, self._settings, self._clock = door, settings, clock
        self._names: set[str] = set()

    async def read(self, http: Request, kind: type[AnyBody]) -> Call[AnyBody]:
        """Find the session of a request and read its body.

        Raises:
            SluiceError: UNAUTHENTICATED, NOT_FOUND, FAILED_PRECONDITION (the session ended), INVALID_ARGUMENT.
        """
        session = await self._door.session(http)  # first, so that no body is read for an unknown key
        raw = await http.body()
        unsupported: Unsupported = "allow" if session.evaluation else self._settings.on_unsupported
        return Call(http, session, read_body(kind, raw), unsupported)

    async def reply(self, call: Call[Any], request: ClientRequest, reply: Reply) -> Response:
        """Sample for a request, and answer whole or as a stream, until its client disconnects."""
        if not request.stream:
            return await self.whole(call, request, reply.whole)
        deadlines = self._settings.deadlines
        parts = paced(await self._sample(call, request), deadlines.keepalive_s, deadlines.request_s, self._clock)
        # An error before the first part, or before the first comment, can still set the HTTP status.
        first = await while_connected(call.http, anext(parts))
        return first if isinstance(first, Response) else EventStream(_events(first, parts, reply))

    async def whole(
        self, call: Call[Any], request: ClientRequest, write: Callable[[Result], dict[str, Any]]
    ) -> Response:
        """Sample for a request, and answer with one JSON object, unless its client disconnects."""
        parts = await self._sample(call, request)
        async with contextlib.AsyncExitStack() as closing:
            closing.push_async_callback(parts.aclose)
            async with deadline(self._settings.deadlines.request_s, self._clock):
                result = await while_connected(call.http, _result(parts))
            if isinstance(result, Response):
                return result
            answer = _Given(write(result), parts)
            closing.pop_all()
            return answer

    async def _sample(self, call: Call[Any], request: ClientRequest) -> AsyncGenerator[Begun | Delta | Result, None]:
        settle_sampling(request, call.unsupported)
        self._count(request)
        identity = _identity(request.dialect, call.http.headers, await call.http.body())
        return self.sessions.generate(call.session, request, identity)

    def _count(self, request: ClientRequest) -> None:
        for kind, what in request.notices:
            if len(self._names) < MAX_NOTICE_NAMES:
                self._names.add(what)
            NOTICES.labels(request.dialect, kind, what if what in self._names else "other").inc()
        if request.notices:
            log.debug("captured request was changed", dialect=request.dialect, notices=[*map(list, request.notices)])


def _identity(dialect: str, headers: Headers, body: bytes) -> RequestIdentity:
    """Return what identifies a request within its session: two requests with the same identity are one."""
    name, sent_before = headers.get(IDEMPOTENCY_HEADER, ""), headers.get(RETRY_HEADER, "0")
    named = [name.encode()] if name else []
    digest = xxhash.xxh3_128_digest(b"\0".join([dialect.encode(), *named, body]))
    if name:
        return RequestIdentity(digest, is_retry=True)
    retry = min(int(sent_before), MOST_RETRIES) if sent_before.isdecimal() and len(sent_before) < 16 else 0
    return RequestIdentity(digest, is_retry=sent_before != "0", retry=retry)


class _Given(JSONResponse):
    """A reply. After sending it, it asks the source for the next part, which tells the source that the client has the reply.

    Args:
        content: The reply.
        parts: The source that gave the reply.
    """

    def __init__(self, content: dict[str, Any], parts: AsyncGenerator[Begun | Delta | Result, None]) -> None:
        super().__init__(content)
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the response."""
        del scope
        connection = Connection(receive)
        with contextlib.suppress(DisconnectedError, TimeoutError):
            async with contextlib.aclosing(self._parts):
                await connection.serve(self._send(send, connection))

    async def _send(self, send: Send, connection: Connection) -> None:
        async with asyncio.timeout(SEND_DEADLINE_S):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self.body, "more_body": True})
        await connection.sent(send)
        await anext(self._parts, None)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _result(parts: AsyncGenerator[Begun | Delta | Result, None]) -> Result:
    """Return the result. Leave the source open."""
    async for part in parts:
        if isinstance(part, Result):
            return part
    raise SluiceError.unavailable("INTERRUPTED", "the reply broke off; send the same request again")


async def _events(first: Begun | Delta | Result | None, rest: Parts, reply: Reply) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream. An error is the last one."""
    opened = False
    async with contextlib.aclosing(rest):
        try:
            part: Begun | Delta | Result | None = first
            while True:
                if part is None:
                    yield COMMENT
                elif isinstance(part, Begun):
                    opened = True
                    yield b"".join(reply.opening(part))
                elif isinstance(part, Delta):
                    yield b"".join(reply.text(part))
                else:
                    yield b"".join(_ending(part, reply, opened=opened))
                    yield SENT
                    await anext(rest, None)
                    return
                part = await anext(rest)
        except SluiceError as error:
            yield reply.failure(error)


def _ending(result: Result, reply: Reply, *, opened: bool) -> Iterator[bytes]:
    """Yield the events that end a stream. A reply that was recorded earlier comes as a result only: then open the stream first."""
    if not opened:
        request_id = result.generations[0].generation_id.rpartition("/")[0]
        yield from reply.opening(Begun(request_id, len(result.prompt_token_ids)))
    yield from reply.ending(result)


def _dialects(capture: Capture) -> list[Route]:
    async def chat_completions(http: Request) -> Response:
        call = await capture.read(http, chat.ChatBody)
        return await capture.reply(call, chat.parse(call.body), chat.ChatReply(call.body))

    async def complete(http: Request) -> Response:
        call = await capture.read(http, completions.CompletionBody)
        request = completions.parse(call.body)
        return await capture.reply(call, request, completions.CompletionReply(call.body))

    async def respond(http: Request) -> Response:
        call = await capture.read(http, responses.ResponsesBody)
        named = call.body.previous_response_id
        previous = await capture.sessions.conversation(call.session, named) if named else None
        request = responses.parse(call.body, previous)
        return await capture.reply(call, request, responses.ResponsesReply(call.body))

    async def create_message(http: Request) -> Response:
        call = await capture.read(http, messages.MessagesBody)
        request = messages.parse(call.body)
        return await capture.reply(call, request, messages.MessagesReply(call.body))

    async def count_tokens(http: Request) -> JSONResponse:
        call = await capture.read(http, messages.CountBody)
        counted = await capture.sessions.count_tokens(call.session, messages.counted(call.body))
        return JSONResponse({"input_tokens": counted})

    async def generate(http: Request) -> Response:
        call = await capture.read(http, completions.TokensBody)
        return await capture.whole(call, completions.parse_tokens(call.body), completions.whole_tokens)

    return [
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/responses", respond, methods=["POST"]),
        Route("/v1/messages", create_message, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
        Route("/inference/v1/generate", generate, methods=["POST"]),
    ]


async def small_body(http: Request) -> bytes:
    """Return the body of one of our own routes, `{}` if it is empty.

    Raises:
        HTTPException: 413.
    """
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > SMALL_BODY_BYTES:
            raise too_large(SMALL_BODY_BYTES)
    return bytes(body) or b"{}"


def _sessions(sessions: RecordedSessions, door: SessionDoor, call_log: CallLog | None) -> list[Route]:
    async def open_session(http: Request) -> JSONResponse:
        body = read_body(OpenBody, await small_body(http))
        request = episode_pb2.OpenEpisodeRequest(request_id=body.request_id)
        with recorded(call_log, http, "sluice.v1.EpisodeService/OpenEpisode", request):
            opened = await sessions.open(body.request_id, body.wait_s)
        task, episode = opened.task, opened.episode
        return JSONResponse(
            {
                "id": episode.episode_id,
                "key": episode.session_key,
                "settling_key": episode.settling_key,
                "openai_base_url": episode.openai_base_url,
                "anthropic_base_url": episode.anthropic_base_url,
                "idle_s": episode.idle.ToNanoseconds() / 1e9,
                "lease_id": task.lease_id,
                "lease_s": task.lease.ToNanoseconds() / 1e9,
                "group_id": task.group_id,
                "evaluation": task.evaluation,
                "task": MessageToDict(task.task, preserving_proto_field_name=True),
                "opening": MessageToDict(task.opening, preserving_proto_field_name=True),
            }
        )

    async def renew(http: Request) -> JSONResponse:
        name = _name(http)
        ref = await _named(http, name)
        read_body(RenewBody, await small_body(http))
        return JSONResponse({"id": name, "lease_s": await sessions.renew(ref)})

    async def reward(http: Request) -> JSONResponse:
        name = _name(http)
        ref = await _named(http, name)
        body = read_body(RewardBody, await small_body(http))
        if body.generation_id is not None and body.branch is not None:
            raise SluiceError.invalid_argument("branch", "is set beside generation_id: a reward belongs to one of them")
        request = episode_pb2.RecordRewardRequest(episode_id=name, reward=body.reward)
        if body.generation_id is not None:
            request.generation_id = body.generation_id
        if body.branch is not None:
            request.branch = body.branch
        with recorded(call_log, http, "sluice.v1.EpisodeService/RecordReward", request):
            await sessions.reward(ref, request)
        return JSONResponse({"id": name})

    async def end(http: Request) -> JSONResponse:
        name = _name(http)
        ref = await _named(http, name)
        body = read_body(EndBody, await small_body(http))
        if body.abandon is not None:
            given_up = episode_pb2.AbandonEpisodeRequest(episode_id=name, reason=body.abandon, requeue=body.requeue)
            with recorded(call_log, http, "sluice.v1.EpisodeService/AbandonEpisode", given_up):
                await sessions.abandon(ref, given_up)
            return JSONResponse({"id": name, "trajectory_ids": []})
        request = episode_pb2.SubmitTrajectoryRequest(
            episode_id=name, reward=body.reward, truncated=body.truncated, reward_follows=body.reward_follows
        )
        with recorded(call_log, http, "sluice.v1.EpisodeService/SubmitTrajectory", request):
            submitted = await sessions.submit(ref, request)
        return JSONResponse({"id": name, "trajectory_ids": list(submitted.trajectory_ids)})

    async def _named(http: Request, name: str) -> SessionRef:
        """Return the session that a path names. Call it first, so that no body is read for an unknown key."""
        http.scope.setdefault("state", {})["session"] = name
        ref = door.ref(http)
        await door.check_key(ref)
        return ref

    return [
        Route(OPEN_PATH, open_session, methods=["POST"]),
        Route("/rl/sessions/{name}/renew", renew, methods=["POST"]),
        Route("/rl/sessions/{name}/reward", reward, methods=["POST"]),
        Route("/rl/sessions/{name}/end", end, methods=["POST"]),
    ]


def _name(http: Request) -> str:
    """Return the name in the path of a request."""
    return str(http.path_params["name"])


def _description(sessions: RecordedSessions, door: SessionDoor, readiness: Readiness) -> list[Route]:
    created = int(time.time())

    async def card(name: str | None) -> dict[str, Any]:
        """Return the entry of a model, with the fields of both OpenAI and Anthropic."""
        served = await sessions.model()
        shown = served.name if name is None else name
        openai = {"id": shown, "object": "model", "created": created, "owned_by": "sluice"}
        anthropic = {"type": "model", "display_name": shown, "created_at": "1970-01-01T00:00:00Z"}
        return openai | anthropic | {"max_model_len": served.max_model_len}

    async def models(http: Request) -> JSONResponse:
        await door.session(http)
        return JSONResponse({"object": "list", "data": [await card(None)], "has_more": False})

    async def model(http: Request) -> JSONResponse:
        await door.session(http)
        return JSONResponse(await card(_name(http)))

    async def health(_http: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def ready(_http: Request) -> JSONResponse:
        return ready_answer(readiness)

    async def metrics(_http: Request) -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    return [
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{name:path}", model, methods=["GET"]),
        Route(HEALTH_PATH, health, methods=["GET"]),
        Route(READY_PATH, ready, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]


def error_answer(error: SluiceError, path: str) -> JSONResponse:
    """Return the response to an error, in the form of the dialect that the path belongs to.

    Never return 409, since clients retry it, nor 429 where waiting does not help. A session that ended gives 410.
    """
    status = error_status(error)
    if status == 409 or (status == 429 and error.retry_after_s is None):
        status = 400
    status = 410 if error.reason == "SESSION_ENDED" else status
    body = messages.anthropic_error(error) if path.startswith("/v1/messages") else error_body(error)
    return error_response(error, status=status, body=body)


async def _refused(http: Request, error: Exception) -> Response:
    """Answer a request with the error that ended it, ours or Starlette's, in the form of the dialect."""
    if isinstance(error, SluiceError):
        return error_answer(error, http.scope["path"])
    if not isinstance(error, HTTPException):
        raise error
    reason = HTTP_REASONS.get(error.status_code, "INVALID_REQUEST")
    answer = error_answer(SluiceError(grpc.StatusCode.INVALID_ARGUMENT, reason, str(error.detail)), http.scope["path"])
    answer.status_code = error.status_code
    answer.headers.update(error.headers or {})
    return answer
