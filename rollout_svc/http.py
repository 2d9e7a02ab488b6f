"""The OpenAI dialect of a replica, and the two calls by which seeds of older programs change its weights.

It is a translation and nothing else: requests become those of the contract and pass the same checks, limits and version
stamps as those that come by gRPC.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import PurePath
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from rollout_svc.admin import RolloutAdminServicer
from rollout_svc.servicer import RolloutServicer
from sluice.config import SecurityConfig
from sluice.openai.errors import answer_errors
from sluice.openai.requests import (
    Body,
    ChatRequest,
    CompletionRequest,
    GenerationBody,
    chat_request,
    completion_requests,
)
from sluice.openai.responses import ChatResponses, CompletionResponses, Responses, StopStringFilter, usage
from sluice.openai.server import HEALTH_PATH, RequestGuard
from sluice.openai.stream import Events, EventStream, Numbered, ReaderGoneError, merged, while_connected
from sluice.rpc import SluiceError
from sluice.rpc.tokens import TokenCheck
from sluice.telemetry.metrics import CONTENT_TYPE, metrics_text
from sluice.v1 import rollout_pb2
from sluice.versions import Version

__all__ = ["create_app"]

MAX_REQUESTS = 4096
"""Requests in progress at once; those that sample are bounded by the replica's queue as well."""

CLIENT_GONE = 499
"""Nobody reads this status; it is what proxies log for a client that left."""

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    HEALTH_PATH,
    "/metrics",
    "/update_weights",
    "/reload_weights",
)

Request_ = rollout_pb2.GenerateRequest


def create_app(
    servicer: RolloutServicer,
    admin: RolloutAdminServicer,
    model_name: str,
    security: SecurityConfig,
    host: str,
    *,
    max_requests: int = MAX_REQUESTS,
) -> FastAPI:
    """Build the app.

    Args:
        servicer: What samples.
        admin: What changes the weights.
        model_name: The served model, a directory or hub id; requests name it so, or by its last part.
        security: Tokens of the two roles.
        host: Address that the server is bound to.
        max_requests: Requests in progress at once.

    Raises:
        ConfigError: if a token file cannot be used.
    """
    tokens = TokenCheck(security)
    app = FastAPI(title="Sluice rollout", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_middleware(RequestGuard, tokens=tokens, paths=PATHS, most=max_requests, host=host)
    answer_errors(app)
    _add_generation(app, _Generation(servicer, model_name))
    _add_description(app, servicer, model_name)
    _add_administration(app, admin, tokens)
    return app


def _add_generation(app: FastAPI, generation: _Generation) -> None:
    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await generation.answer(request, body, [chat_request(body)], ChatResponses(body, generation.token_text))

    @app.post("/v1/completions")
    async def complete(body: CompletionRequest, request: Request) -> Response:
        responses = CompletionResponses(body, generation.token_text)
        return await generation.answer(request, body, completion_requests(body), responses)


def _add_description(app: FastAPI, servicer: RolloutServicer, model_name: str) -> None:
    created = int(time.time())

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [_model_card(servicer, model_name, created)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> JSONResponse:
        _require_model(name, model_name)
        return JSONResponse(_model_card(servicer, model_name, created))

    @app.get(HEALTH_PATH)
    async def health() -> JSONResponse:
        return JSONResponse({"status": "ok", "version": str(servicer.serving_version())})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(metrics_text(), media_type=CONTENT_TYPE)


def _add_administration(app: FastAPI, admin: RolloutAdminServicer, tokens: TokenCheck) -> None:
    # The role is asked for at the route itself: a comparison of paths could differ from how the router matches them.
    def admins_only(request: Request) -> None:
        tokens.verify(request.headers.get("authorization"), "admin")

    @app.post("/update_weights", dependencies=[Depends(admins_only)])
    async def update_weights(body: UpdateRequest | None = None) -> JSONResponse:
        version = None
        if body is not None and body.version is not None:
            try:
                version = Version.parse(body.version)
            except ValueError as error:
                raise SluiceError.invalid_argument("version", str(error)) from error
        done = await admin.update(version)
        present = Version.from_proto(done.policy_version)
        return JSONResponse({"version": str(present), "pause_s": done.pause.ToNanoseconds() / 1e9})

    @app.post("/reload_weights", dependencies=[Depends(admins_only)])
    async def reload_weights() -> JSONResponse:
        done = await admin.reload()
        return JSONResponse({"version": str(Version.from_proto(done.policy_version))})


def _model_card(servicer: RolloutServicer, model_name: str, created: int) -> dict[str, Any]:
    return {
        "id": model_name,
        "object": "model",
        "created": created,
        "owned_by": "sluice",
        "max_model_len": servicer.model_info.max_model_len,
    }


def _require_model(name: str, served: str) -> None:
    if name not in {served, PurePath(served).name}:
        raise SluiceError.not_found("MODEL_NOT_FOUND", f"the model {name!r} is not served here; this is {served!r}")


class UpdateRequest(Body):
    """Body of `/update_weights`."""

    version: str | None = None


class _Generation:
    """Answers the two endpoints that sample."""

    def __init__(self, servicer: RolloutServicer, model_name: str) -> None:
        self._servicer, self._model_name = servicer, model_name
        self.token_text = servicer.tokenizer.token_text

    async def answer(
        self, request: Request, body: GenerationBody, asked: Sequence[Request_], responses: Responses
    ) -> Response:
        """Sample for one request; a client that leaves ends its sampling."""
        if body.model is not None:
            _require_model(body.model, self._model_name)
        make = self._stream if body.stream else self._whole
        try:
            return await while_connected(request.receive, make(body, asked, responses))
        except ReaderGoneError:
            return Response(status_code=CLIENT_GONE)

    async def _whole(self, body: GenerationBody, asked: Sequence[Request_], responses: Responses) -> Response:
        answers = await _all(self._servicer, asked)
        choices: list[dict[str, Any]] = []
        for answer in answers:
            for sample in answer.samples:
                text = StopStringFilter(body.stops).after(sample.text, sample.stop_string, last=True)
                choice = responses.choice(len(choices), sample, text)
                choices.append(choice | responses.choice_extras(answer.prompt_token_ids))
        counted = usage(
            sum(len(answer.prompt_token_ids) for answer in answers),
            sum(len(sample.token_ids) for answer in answers for sample in answer.samples),
            sum(answer.cached_prompt_tokens for answer in answers),
        )
        head = self._head(responses.prefix + answers[0].request_id, responses.whole)
        extras = responses.answer_extras(answers[0].prompt_token_ids)
        return JSONResponse({**head, "choices": choices, "usage": counted, **extras})

    async def _stream(self, body: GenerationBody, asked: Sequence[Request_], responses: Responses) -> Response:
        """Begin a stream; what is refused before the first token is still answered with its HTTP status."""
        messages = merged([self._servicer.stream(rollout_pb2.GenerateStreamRequest(request=each)) for each in asked])
        first: list[Numbered] = []
        async for message in messages:
            first.append(message)
            if message[1].HasField("chunk"):
                break
        head = self._head(responses.prefix + first[0][1].opening.request_id, responses.part)
        events = Events(head, responses, body.n or 1, body.stops, include_usage=body.include_usage)
        return EventStream(events.encode(_rejoined(first, messages)))

    def _head(self, name: str, kind: str) -> dict[str, Any]:
        return {"id": name, "object": kind, "created": int(time.time()), "model": self._model_name}


async def _all(servicer: RolloutServicer, asked: Sequence[Request_]) -> list[rollout_pb2.GenerateResponse]:
    """Answers to several requests at a time; the first failure cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(servicer.generate(each)) for each in asked]
    except* SluiceError as errors:
        raise _first(errors) from errors
    return [task.result() for task in tasks]


def _first(errors: BaseExceptionGroup[SluiceError]) -> SluiceError:
    found = errors.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found


async def _rejoined(first: Sequence[Numbered], rest: AsyncGenerator[Numbered, None]) -> AsyncGenerator[Numbered, None]:
    try:
        for each in first:
            yield each
        async for each in rest:
            yield each
    finally:
        await rest.aclose()
