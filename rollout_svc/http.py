"""The HTTP port of a replica: OpenAI's endpoints, and two calls that change the weights.

Requests are translated to the contract's. They pass the same checks and limits as gRPC requests, and get the same versions.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, TypeAlias

import grpc
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from google.protobuf.message import Message
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.types import Scope

from rollout_svc.admin import RolloutAdminServicer
from rollout_svc.servicer import RolloutServicer
from sluice.openai import chat, completions
from sluice.openai.answers import TextDeltas, usage, visible_message
from sluice.openai.bodies import ClientRequest
from sluice.openai.errors import answer_errors
from sluice.openai.requests import (
    HEALTH_PATH,
    Door,
    EventStream,
    RequestBounds,
    RequestGuard,
    peer_of,
    ready_answer,
    recorded,
    while_connected,
)
from sluice.rpc import SluiceError
from sluice.rpc.access import ROLLOUT_HTTP, Access
from sluice.rpc.call_log import CallLog
from sluice.rpc.principals import Role
from sluice.rpc.quota import Usage
from sluice.rpc.readiness import READY_PATH, Readiness
from sluice.v1 import rollout_pb2
from sluice.versions import Version

MAX_REQUESTS = 4096
"""Maximum number of requests in progress. The replica's queue also limits those that sample."""

CHANGES: Mapping[str, tuple[str, type[Message]]] = {
    "/update_weights": ("sluice.v1.RolloutAdminService/UpdateWeights", rollout_pb2.UpdateWeightsRequest),
    "/reload_weights": ("sluice.v1.RolloutAdminService/ReloadWeights", rollout_pb2.ReloadWeightsRequest),
}
"""Routes that change the weights, each with its gRPC call and the request message of that call."""


BACKLOG = 64
"""Maximum number of messages that wait for a slow client. Beyond it, tokens wait in the engine, where max_tokens limits them."""

Numbered: TypeAlias = tuple[int, rollout_pb2.GenerateStreamResponse]
"""A message of one of several streams, with the number of the stream."""

Reply: TypeAlias = chat.ChatReply | completions.CompletionReply


class ReplicaDoor(Door):
    """Finds out who calls. Refused attempts to change the weights are logged, as over gRPC.

    Args:
        access: Who may call, shared with the gRPC port.
        call_log: Logs the calls that change the weights.
    """

    def __init__(self, access: Access, call_log: CallLog | None) -> None:
        super().__init__(access)
        self._call_log = call_log

    def admit(self, scope: Scope, route: str, roles: frozenset[Role]) -> Usage | None:
        """Admit a principal; see `Door`."""
        try:
            return super().admit(scope, route, roles)
        except SluiceError as error:
            if self._call_log is not None and route in CHANGES and error.code is grpc.StatusCode.PERMISSION_DENIED:
                method, request = CHANGES[route]
                self._call_log.record(method, request(), peer_of(scope), error.code.name)
            raise


class UpdateRequest(BaseModel, extra="forbid"):
    """Body of `/update_weights`. Without a version, the newest is fetched."""

    version: str | None = None


def create_app(
    servicer: RolloutServicer,
    admin: RolloutAdminServicer,
    model_name: str,
    access: Access,
    host: str,
    *,
    max_requests: int = MAX_REQUESTS,
    call_log: CallLog | None = None,
    readiness: Readiness | None = None,
) -> FastAPI:
    """Build the app.

    Args:
        servicer: Samples.
        admin: Changes the weights.
        model_name: Name of the model in requests and answers.
        access: Who may call, shared with the gRPC port.
        host: Address that the server is bound to.
        max_requests: Maximum number of requests in progress.
        call_log: Logs the calls that change the weights.
        readiness: What the service waits for; None: nothing.
    """
    app = FastAPI(title="Sluice rollout", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    bounds = RequestBounds(max_requests)
    app.add_middleware(RequestGuard, door=ReplicaDoor(access, call_log), port=ROLLOUT_HTTP, host=host, bounds=bounds)
    answer_errors(app)
    _add_generation(app, servicer, model_name)
    _add_description(app, servicer, model_name, readiness or Readiness())
    _add_administration(app, admin, call_log)
    return app


def _add_generation(app: FastAPI, servicer: RolloutServicer, model_name: str) -> None:
    token_text = servicer.tokenizer.token_text

    @app.post("/v1/chat/completions")
    async def complete_chat(body: chat.StrictChatBody, http: Request) -> Response:
        return await generate(http, [chat.parse(body)], chat.ChatReply(body, model_name, token_text))

    @app.post("/v1/completions")
    async def complete(body: completions.StrictCompletionBody, http: Request) -> Response:
        reply = completions.CompletionReply(body, model_name, token_text)
        return await generate(http, completions.parse_each(body), reply)

    async def generate(http: Request, asked: Sequence[ClientRequest], reply: Reply) -> Response:
        """Sample for one HTTP request, until its client disconnects."""
        if reply.body.model is not None:
            _require_model(reply.body.model, model_name)
        requests = [each.generate for each in asked]
        for request in requests:
            request.return_text = True
            request.return_message = bool(request.conversation.tools)
        respond = _stream if reply.body.stream else _whole
        return await while_connected(http, respond(servicer, requests, reply))


async def _whole(servicer: RolloutServicer, requests: Sequence[rollout_pb2.GenerateRequest], reply: Reply) -> Response:
    results = await _generate_all(servicer, requests)
    choices: list[dict[str, Any]] = []
    for result in results:
        for sample in result.samples:
            message = visible_message(sample, f"{result.request_id}/{sample.index}")
            choices.append(reply.choice(len(choices), sample, message, result.prompt_token_ids))
    counts = usage(
        sum(len(result.prompt_token_ids) for result in results),
        sum(len(sample.token_ids) for result in results for sample in result.samples),
        sum(result.cached_prompt_tokens for result in results),
    )
    identifier = reply.prefix + results[0].request_id
    return JSONResponse(reply.response(identifier, choices, counts, results[0].prompt_token_ids))


async def _stream(servicer: RolloutServicer, requests: Sequence[rollout_pb2.GenerateRequest], reply: Reply) -> Response:
    """Begin a stream. An error before the first token can still set the HTTP status."""
    messages = merged([servicer.stream(rollout_pb2.GenerateStreamRequest(request=each)) for each in requests])
    first: list[Numbered] = []
    async for message in messages:
        if message[1].HasField("opening") or message[1].chunk.deltas:
            first.append(message)
        if message[1].chunk.deltas:
            break
    reply.set_id(reply.prefix + first[0][1].opening.request_id)
    return EventStream(Events(reply, requests[0]).encode(first, messages))


async def _generate_all(
    servicer: RolloutServicer, requests: Sequence[rollout_pb2.GenerateRequest]
) -> list[rollout_pb2.GenerateResponse]:
    """Sample for several requests at once. The first error cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(servicer.Generate(each)) for each in requests]
    except* SluiceError as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]


async def merged(
    sources: Sequence[AsyncGenerator[rollout_pb2.GenerateStreamResponse, None]],
) -> AsyncGenerator[Numbered, None]:
    """Yield the messages of several streams as they come, each with the number of its stream. Closing it closes all streams."""
    queue: asyncio.Queue[Numbered | Exception | None] = asyncio.Queue(BACKLOG)

    async def pump(number: int, source: AsyncGenerator[rollout_pb2.GenerateStreamResponse, None]) -> None:
        try:
            async with contextlib.aclosing(source):
                async for message in source:
                    await queue.put((number, message))
        except Exception as error:  # noqa: BLE001 - passed on: the reader raises it
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(number, source)) for number, source in enumerate(sources)]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Events:
    """Writes the messages of a request's streams as chunks, without stop strings in the text.

    Args:
        reply: Writes the chunks.
        request: The request of one of the streams. The requests of the streams differ only in their prompts.
    """

    def __init__(self, reply: Reply, request: rollout_pb2.GenerateRequest) -> None:
        self._reply, self._request = reply, request
        self._prompts: dict[int, Sequence[int]] = {}
        self._texts: dict[int, TextDeltas] = {}
        self._begun: set[int] = set()
        self._completion_tokens = 0

    async def encode(
        self, first: Sequence[Numbered], rest: AsyncGenerator[Numbered, None]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the encoded events of a response. The HTTP status is sent with the first event, so a later error becomes an event, too."""
        async with contextlib.aclosing(rest):
            try:
                for number, message in first:
                    for chunk in self._chunks(number, message):
                        yield chunk
                async for number, message in rest:
                    for chunk in self._chunks(number, message):
                        yield chunk
            except SluiceError as error:
                yield self._reply.failure(error)
                return
        prompt_tokens = sum(len(ids) for ids in self._prompts.values())
        for chunk in self._reply.end(usage(prompt_tokens, self._completion_tokens)):
            yield chunk

    def _chunks(self, number: int, message: rollout_pb2.GenerateStreamResponse) -> Iterator[bytes]:
        first = number * self._request.n
        if message.HasField("opening"):
            self._prompts[number] = message.opening.prompt_token_ids
            self._texts[number] = TextDeltas(self._request.sampling.stop, of_messages=self._request.return_message)
            yield from self._reply.begin(range(first, first + self._request.n), self._prompts[number])
        for delta in message.chunk.deltas:
            index = first + delta.tokens.index
            self._completion_tokens += len(delta.tokens.token_ids)
            prompt_ids = None if index in self._begun else self._prompts[number]
            self._begun.add(index)
            yield self._reply.part(index, delta.tokens, self._texts[number].after(delta), prompt_ids)


def _add_description(app: FastAPI, servicer: RolloutServicer, model_name: str, readiness: Readiness) -> None:
    created = int(time.time())

    def card() -> dict[str, Any]:
        return {
            "id": model_name,
            "object": "model",
            "created": created,
            "owned_by": "sluice",
            "max_model_len": servicer.model_info.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [card()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> JSONResponse:
        _require_model(name, model_name)
        return JSONResponse(card())

    @app.get(HEALTH_PATH)
    async def health() -> JSONResponse:
        return JSONResponse({"status": "ok", "version": str(servicer.serving_version())})

    @app.get(READY_PATH)
    async def ready() -> JSONResponse:
        return ready_answer(readiness)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)


def _require_model(name: str, served: str) -> None:
    if name not in {served, PurePath(served).name}:
        raise SluiceError.not_found("MODEL_NOT_FOUND", f"the model {name[:256]!r} is not served here; use {served!r}")


def _add_administration(app: FastAPI, admin: RolloutAdminServicer, call_log: CallLog | None) -> None:
    @app.post("/update_weights")
    async def update_weights(http: Request, body: UpdateRequest | None = None) -> JSONResponse:
        request = rollout_pb2.UpdateWeightsRequest()
        if body is not None and body.version is not None:
            try:
                request.version.CopyFrom(Version.parse(body.version).to_proto())
            except ValueError as error:
                raise SluiceError.invalid_argument("version", str(error)) from error
        with recorded(call_log, http, "sluice.v1.RolloutAdminService/UpdateWeights", request):
            updated = await admin.UpdateWeights(request)
        present = Version.from_proto(updated.policy_version)
        return JSONResponse({"version": str(present), "pause_s": updated.pause.ToNanoseconds() / 1e9})

    @app.post("/reload_weights")
    async def reload_weights(http: Request) -> JSONResponse:
        request = rollout_pb2.ReloadWeightsRequest()
        with recorded(call_log, http, "sluice.v1.RolloutAdminService/ReloadWeights", request):
            reloaded = await admin.ReloadWeights(request)
        return JSONResponse({"version": str(Version.from_proto(reloaded.policy_version))})
