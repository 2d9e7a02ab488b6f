"""Responses of OpenAI's two endpoints, whole and as a stream of server-sent events, and what happens when the client disconnects.

These fields are not OpenAI's: `stop_reason` is the stop string that ended a choice. With `return_token_ids`, each choice has
`token_ids` and `version_spans` (which policy version sampled the tokens from index `start` on). `prompt_token_ids` is a field
of the response in a chat, and of each choice in a completion, which may have several prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sluice.openai.errors import error_body
from sluice.openai.requests import ChatRequest, CompletionRequest, GenerationBody
from sluice.rpc import SluiceError
from sluice.v1 import rollout_pb2, tokens_pb2
from sluice.versions import Version

FINISH_REASONS = {
    tokens_pb2.FINISH_REASON_STOP: "stop",
    tokens_pb2.FINISH_REASON_LENGTH: "length",
    tokens_pb2.FINISH_REASON_ABORT: "abort",
    tokens_pb2.FINISH_REASON_ERROR: "error",
    tokens_pb2.FINISH_REASON_VERSION_RETIRED: "version_retired",
}
"""The last three are not OpenAI's: an operator ended the request, the model's output was NaN, or its adapter was unloaded. The
tokens up to then are valid."""


LEAST = -9999.0
"""OpenAI's value for the logarithm of zero, which JSON does not have."""

NO_ALTERNATIVES = tokens_pb2.TopLogprobs()

BACKLOG = 64
"""Maximum number of messages that wait for a slow client. Then tokens wait in the engine, where max_tokens is the bound."""

DONE = b"data: [DONE]\n\n"

Message = rollout_pb2.GenerateStreamResponse
Numbered = tuple[int, Message]
Result = TypeVar("Result")

TokenText = Callable[[int], str]
"""Returns the text of one token. Special tokens have theirs too."""


class StopStringFilter:
    """Removes the stop string from the end of a text that comes in parts. What may be its beginning is held back.

    Args:
        stops: The stop strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def after(self, new: str, stop_string: str, *, last: bool) -> str:
        """Return what can be shown after more text. `stop_string` is the one that ended the text, if any did."""
        text = self._held + new
        if stop_string:
            return text.partition(stop_string)[0]
        held = 0 if last else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of a text that is a prefix of the stop string."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if stop.startswith(text[-size:])), 0)


class ChatResponses:
    """Writes the responses of `/v1/chat/completions`. One object serves one request, since a stream has state.

    Args:
        body: The request.
        token_text: Returns the text of one token.
    """

    prefix = "chatcmpl-"
    whole = "chat.completion"
    part = "chat.completion.chunk"
    several_prompts = False

    def __init__(self, body: ChatRequest, token_text: TokenText) -> None:
        self.body, self._token_text = body, token_text

    def choice(self, index: int, sample: rollout_pb2.GeneratedSample, text: str) -> dict[str, Any]:
        """Return a whole choice."""
        return {"index": index, "message": {"role": "assistant", "content": text}} | self._rest(sample)

    def chunk(self, index: int, new: rollout_pb2.GeneratedSample, text: str) -> dict[str, Any]:
        """Return the choice of one chunk."""
        return {"index": index, "delta": {"content": text} if text else {}} | self._rest(new)

    def first_chunk(self, index: int) -> dict[str, Any]:
        """Return the choice of the chunk before the first token: it has the role."""
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def _rest(self, sample: rollout_pb2.GeneratedSample) -> dict[str, Any]:
        logprobs = chat_logprobs(sample, self._token_text) if self.body.logprobs else None
        return {"logprobs": logprobs} | _ending(sample) | _tokens(self.body, sample)


class CompletionResponses:
    """Writes the responses of `/v1/completions`; see `ChatResponses`."""

    prefix = "cmpl-"
    whole = "text_completion"
    part = "text_completion"
    several_prompts = True

    def __init__(self, body: CompletionRequest, token_text: TokenText) -> None:
        self.body, self._token_text = body, token_text
        self._offsets: dict[int, int] = {}

    def choice(self, index: int, sample: rollout_pb2.GeneratedSample, text: str) -> dict[str, Any]:
        """Return a whole choice or that of one chunk: they have the same form at this endpoint."""
        logprobs = None
        if self.body.logprobs is not None:
            offset = self._offsets.get(index, 0)
            logprobs, self._offsets[index] = completion_logprobs(sample, self._token_text, offset)
        return {"index": index, "text": text, "logprobs": logprobs} | _ending(sample) | _tokens(self.body, sample)

    chunk = choice

    def first_chunk(self, index: int) -> None:
        """Return nothing: the first chunk has tokens."""
        del index


Responses: TypeAlias = ChatResponses | CompletionResponses


def prompt_fields(responses: Responses, prompt_ids: Sequence[int], *, of_choice: bool) -> dict[str, Any]:
    """Return the ids of a prompt, if they were asked for: in each choice if choices may have different prompts, else once."""
    wanted = responses.body.return_token_ids and responses.several_prompts is of_choice
    return {"prompt_token_ids": list(prompt_ids)} if wanted else {}


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> dict[str, Any]:
    """Return the token counts. `cached_tokens` of the prompt were in the prefix cache."""
    counted: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    return counted if cached_tokens is None else counted | {"prompt_tokens_details": {"cached_tokens": cached_tokens}}


def _ending(sample: rollout_pb2.GeneratedSample) -> dict[str, Any]:
    return {"finish_reason": FINISH_REASONS.get(sample.finish_reason), "stop_reason": sample.stop_string or None}


def _tokens(body: GenerationBody, sample: rollout_pb2.GeneratedSample) -> dict[str, Any]:
    if not body.return_token_ids:
        return {}
    spans = [
        {"start": span.start, "version": str(Version.from_proto(span.policy_version))} for span in sample.version_spans
    ]
    return {"token_ids": list(sample.token_ids), "version_spans": spans}


def chat_logprobs(sample: rollout_pb2.GeneratedSample, token_text: TokenText) -> dict[str, Any]:
    """Return the `logprobs` of a chat choice. A token that is part of a character has no `bytes`."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = token_text(token)
        whole = "\N{REPLACEMENT CHARACTER}" not in text
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(text.encode()) if whole else None}

    content = []
    for position, (token, logprob) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True)):
        top = sample.top_logprobs[position] if sample.top_logprobs else NO_ALTERNATIVES
        alternatives = [entry(*each) for each in zip(top.ids, top.logprobs, strict=True)]
        content.append(entry(token, logprob) | {"top_logprobs": alternatives})
    return {"content": content, "refusal": None}


def completion_logprobs(
    sample: rollout_pb2.GeneratedSample, token_text: TokenText, offset: int
) -> tuple[dict[str, Any], int]:
    """Return the `logprobs` of a completion choice, and the offset of the end of its text.

    Args:
        sample: A sample, or its tokens in one chunk.
        token_text: Returns the text of a token.
        offset: Characters of the choice's text before these tokens.
    """
    texts = [token_text(token) for token in sample.token_ids]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    top: list[dict[str, float]] = []
    for text, logprob, each in zip(texts, sample.logprobs, sample.top_logprobs, strict=False):
        alternatives = zip(each.ids, each.logprobs, strict=True)
        top.append(
            {token_text(token): max(value, LEAST) for token, value in alternatives} | {text: max(logprob, LEAST)}
        )
    return {
        "tokens": texts,
        "token_logprobs": [max(logprob, LEAST) for logprob in sample.logprobs],
        "top_logprobs": top or None,
        "text_offset": offsets,
    }, offset


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


async def merged(sources: Sequence[AsyncGenerator[Message, None]]) -> AsyncGenerator[Numbered, None]:
    """Yield the messages of several streams as they come, each with the number of its stream. Closing it closes all streams."""
    queue: asyncio.Queue[Numbered | Exception | None] = asyncio.Queue(BACKLOG)

    async def pump(number: int, source: AsyncGenerator[Message, None]) -> None:
        try:
            async with contextlib.aclosing(source):
                async for message in source:
                    await queue.put((number, message))
        except Exception as error:  # noqa: BLE001 - whatever it is, the reader raises it
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
    """Writes the messages of a request's streams as the chunks of one endpoint, without stop strings in the text.

    Args:
        head: Fields of every chunk: id, object, created, model.
        responses: Writes the choices of the endpoint.
    """

    def __init__(self, head: Mapping[str, Any], responses: Responses) -> None:
        body = responses.body
        self._head, self._responses, self._samples, self._stops = head, responses, body.n or 1, body.stops
        self._include_usage = body.include_usage
        self._prompts: dict[int, list[int]] = {}
        self._texts: dict[int, StopStringFilter] = {}
        self._completion_tokens = 0

    async def encode(self, messages: AsyncGenerator[Numbered, None]) -> AsyncGenerator[bytes, None]:
        """Yield the encoded events of a response. After the first one the HTTP status is sent, so that an error is an event, too."""
        async with contextlib.aclosing(messages):
            try:
                async for number, message in messages:
                    for chunk in self._chunks(number, message):
                        yield _event(chunk)
            except SluiceError as error:
                yield _event(error_body(error))
                return
        if self._include_usage:
            prompt_tokens = sum(len(ids) for ids in self._prompts.values())
            yield _event({**self._head, "choices": [], "usage": usage(prompt_tokens, self._completion_tokens)})
        yield DONE

    def _chunks(self, number: int, message: Message) -> list[dict[str, Any]]:
        if message.HasField("opening"):
            self._prompts[number] = list(message.opening.prompt_token_ids)
            extras = prompt_fields(self._responses, self._prompts[number], of_choice=False)
            first = range(number * self._samples, (number + 1) * self._samples)
            openings = [each for each in map(self._responses.first_chunk, first) if each is not None]
            return [self._chunk(each, extras if not place else {}) for place, each in enumerate(openings)]
        new = message.chunk.delta
        index = number * self._samples + new.index
        self._completion_tokens += len(new.token_ids)
        extras = {}
        if index not in self._texts:
            self._texts[index] = StopStringFilter(self._stops)
            extras = prompt_fields(self._responses, self._prompts[number], of_choice=True)
        visible = self._texts[index].after(new.text, new.stop_string, last=bool(new.finish_reason))
        return [self._chunk(self._responses.chunk(index, new, visible) | extras, {})]

    def _chunk(self, choice: Mapping[str, Any], extras: Mapping[str, Any]) -> dict[str, Any]:
        no_usage = {"usage": None} if self._include_usage else {}
        return {**self._head, "choices": [choice], **no_usage, **extras}


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream(Response):
    """Sends events until they end or the client disconnects, then closes their source.

    Starlette's own StreamingResponse leaves a source that is waiting at that moment to the garbage collector.

    Args:
        events: Encoded events.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the response."""
        del scope
        with contextlib.suppress(DisconnectedError):
            await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
