"""The OpenAI dialect: which fields of a request are taken, how they become a GenerateRequest, and how results become responses.

A field that is not named here is refused, so that none is ignored silently. `user`, `metadata`, `store`,
`safety_identifier` and `prompt_cache_key` describe the caller and change no answer: they are taken and ignored. Fields for
which only one value is supported (such as `echo` or `service_tier`) may be sent with that value. Only the form of the values
is checked here. Whether they fit the model is checked where gRPC requests are.

These fields of responses are not OpenAI's: `stop_reason` is the stop string that ended a choice. With `return_token_ids`, each
choice has `token_ids` and `version_spans` (which policy version sampled the tokens from index `start` on). `prompt_token_ids` is
a field of the response in a chat, and of each choice in a completion, which may have several prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sluice.openai.errors import error_body
from sluice.openai.fields import (
    FINISH_REASONS,
    LEAST,
    MAX_ALTERNATIVES,
    MAX_MESSAGES,
    MAX_TOOLS,
    NO_ALTERNATIVES,
    Bias,
    JsonObject,
    TokenId,
    Unsigned,
    inconsistent,
    usage,
)
from sluice.openai.shown import MessageFilter, StopStringFilter
from sluice.rpc import MAX_SAMPLES, SluiceError
from sluice.template_arguments import set_template_arguments
from sluice.tool_schemas import tool_message
from sluice.v1 import rollout_pb2, tokens_pb2
from sluice.versions import Version

# --- requests ---------------------------------------------------------------------------------------------------

COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for `/v1/completions`. `/v1/chat/completions` has none: the context is the limit."""

SAME_NAMES = (
    "max_tokens",
    "temperature",
    "top_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "min_p",
    "repetition_penalty",
    "ignore_eos",
)
"""Parameters with the same name in the contract."""

MAX_PROMPTS = 256
"""Maximum number of prompts in one request."""

MAX_COMPLETIONS = 1024
"""Maximum number of samples of one request, over all of its prompts."""


class Body(BaseModel):
    """A JSON object in which an unknown key is an error."""

    model_config = ConfigDict(extra="forbid")


class Said(Body):
    """A part of a conversation. Clients send back what they were sent: an unknown key is no error if its value says nothing."""

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, data: Any) -> Any:  # noqa: ANN401 - whatever was sent
        if not isinstance(data, dict) or data.keys() <= cls.model_fields.keys():
            return data
        return {
            name: value
            for name, value in data.items()
            if name in cls.model_fields or not (value is None or value is False or value == [])
        }


class StreamOptions(Body):
    """Options of a streamed response."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GenerationBody(Body):
    """Parameters of both endpoints. One that is null or left out has the default of the contract."""

    model: str | None = None
    n: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Unsigned | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=0, lt=2**64)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[Unsigned, Bias] | None = None

    # OpenAI does not have these; the names are those of vLLM's server.
    top_k: int | None = Field(None, ge=-1, lt=2**32)
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    return_token_ids: bool | None = None

    service_tier: Literal["auto", "default"] | None = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise inconsistent("stream_options", "needs stream = true")
        return self

    @property
    def stops(self) -> list[str]:
        """Return the stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        """Return whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class TextPart(Said):
    """A part of a message. Only text is supported."""

    type: Literal["text"]
    text: str


class CalledFunction(Said):
    """The function in a tool call."""

    name: str
    arguments: str = ""


class ToolCall(Said):
    """A tool call of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Said):
    """One message. The chat template decides which roles exist."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None


class Function(Body):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: Literal[False] | None = None


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class TextFormat(Body):
    """The one response format: text."""

    type: Literal["text"]


class ChatRequest(GenerationBody):
    """Body of `/v1/chat/completions`.

    Tools are passed to the chat template. Tool calls in the response are not parsed: they stay in its content.
    """

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: Unsigned | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_ALTERNATIVES)
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: TextFormat | None = None
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: JsonObject | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise inconsistent("top_logprobs", "needs logprobs = true")
        if None not in {self.max_tokens, self.max_completion_tokens} and self.max_tokens != self.max_completion_tokens:
            raise inconsistent("max_completion_tokens", "differs from max_tokens: send one of them")
        return self


class CompletionRequest(GenerationBody):
    """Body of `/v1/completions`."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_ALTERNATIVES)
    echo: Literal[False] | None = None
    best_of: int | None = None
    suffix: None = None

    @model_validator(mode="after")
    def _all_samples_are_returned(self) -> Self:
        if self.best_of not in {None, self.n or 1}:
            raise inconsistent("best_of", "must equal n: samples are not ranked here")
        if len(self.prompts) * (self.n or 1) > MAX_COMPLETIONS:
            raise inconsistent(
                "n", f"{len(self.prompts)} prompts with n = {self.n} are more than {MAX_COMPLETIONS} samples"
            )
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each as text or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [each for each in self.prompt if isinstance(each, int)]
        return [ids] if ids else [each for each in self.prompt if not isinstance(each, int)]


def chat_request(body: ChatRequest) -> rollout_pb2.GenerateRequest:
    """Return the request of the contract for a conversation."""
    request = _request(body, body.top_logprobs or 0)
    if body.max_completion_tokens is not None:
        request.sampling.max_tokens = body.max_completion_tokens
    request.conversation.messages.extend(_message(each) for each in body.messages)
    for tool in body.tools or [] if body.tool_choice != "none" else []:
        function = tool.function
        request.conversation.tools.append(tool_message(function.name, function.description, function.parameters))
    set_template_arguments(request.conversation, body.chat_template_kwargs)
    request.return_message = bool(request.conversation.tools)
    return request


def completion_requests(body: CompletionRequest) -> list[rollout_pb2.GenerateRequest]:
    """Return one request of the contract per prompt."""
    requests = []
    for prompt in body.prompts:
        request = _request(body, body.logprobs or 0)
        if body.max_tokens is None:
            request.sampling.max_tokens = COMPLETION_TOKENS
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        requests.append(request)
    return requests


def _request(body: GenerationBody, top_logprobs: int) -> rollout_pb2.GenerateRequest:
    given = {name: getattr(body, name) for name in SAME_NAMES}
    sampling = tokens_pb2.SamplingParams(
        **{name: value for name, value in given.items() if value is not None},
        top_k=max(body.top_k or 0, 0),
        stop=body.stops,
        stop_token_ids=body.stop_token_ids or [],
        logit_bias=body.logit_bias or {},
        top_logprobs=top_logprobs,
    )
    return rollout_pb2.GenerateRequest(sampling=sampling, n=body.n or 1, priority=body.priority or 0, return_text=True)


def _message(message: ChatMessage) -> tokens_pb2.ChatMessage:
    content = message.content or ""
    return tokens_pb2.ChatMessage(
        role=message.role,
        content=content if isinstance(content, str) else "".join(part.text for part in content),
        tool_calls=[
            tokens_pb2.ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in message.tool_calls or []
        ],
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
        reasoning=message.reasoning_content or "",
    )


# --- responses --------------------------------------------------------------------------------------------------

BACKLOG = 64
"""Maximum number of messages that wait for a slow client. Then tokens wait in the engine, where max_tokens is the bound."""

DONE = b"data: [DONE]\n\n"

Numbered = tuple[int, rollout_pb2.GenerateStreamResponse]
"""A message of one of several streams, with the number of the stream."""

TokenText = Callable[[int], str]
"""Returns the text of one token. Special tokens have theirs too."""


class ChatResponses:
    """Writes the responses of `/v1/chat/completions`. One object serves one request, since a stream has state."""

    prefix = "chatcmpl-"
    whole = "chat.completion"
    part = "chat.completion.chunk"
    several_prompts = False

    def __init__(self, body: ChatRequest, token_text: TokenText) -> None:
        self.body, self._token_text = body, token_text
        self._returns_message = bool(body.tools) and body.tool_choice != "none"

    def choice(self, index: int, sample: rollout_pb2.GeneratedSample, text: str) -> dict[str, Any]:
        """Return a whole choice."""
        said = _said(sample) if sample.HasField("message") else {"content": text}
        return {"index": index, "message": {"role": "assistant"} | said} | self._rest(sample)

    def chunk(
        self, index: int, new: rollout_pb2.GeneratedSample, text: str, said: tuple[str, str] = ("", "")
    ) -> dict[str, Any]:
        """Return the choice of one chunk. Where tools are given, it has what was `said`, and the last one has the tool calls."""
        delta: dict[str, Any] = {"content": text} if text else {}
        if self._returns_message:
            reasoning, content = said
            calls = _said(new).get("tool_calls", ()) if new.HasField("message") else ()
            numbered = [call | {"index": place} for place, call in enumerate(calls)]
            delta = {"reasoning_content": reasoning, "content": content, "tool_calls": numbered}
            delta = {name: value for name, value in delta.items() if value}
        return {"index": index, "delta": delta} | self._rest(new)

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
        """Return a whole choice."""
        logprobs = None
        if self.body.logprobs is not None:
            offset = self._offsets.get(index, 0)
            logprobs, self._offsets[index] = completion_logprobs(sample, self._token_text, offset)
        return {"index": index, "text": text, "logprobs": logprobs} | _ending(sample) | _tokens(self.body, sample)

    def chunk(
        self, index: int, new: rollout_pb2.GeneratedSample, text: str, said: tuple[str, str] = ("", "")
    ) -> dict[str, Any]:
        """Return the choice of one chunk, which has the form of a whole one. There are no messages here."""
        del said
        return self.choice(index, new, text)

    def first_chunk(self, index: int) -> None:
        """Return nothing: the first chunk has tokens."""
        del index


Responses: TypeAlias = ChatResponses | CompletionResponses


def prompt_fields(responses: Responses, prompt_ids: Sequence[int], *, of_choice: bool) -> dict[str, Any]:
    """Return the ids of a prompt, if they were asked for: in each choice if choices may have different prompts, else once."""
    wanted = responses.body.return_token_ids and responses.several_prompts is of_choice
    return {"prompt_token_ids": list(prompt_ids)} if wanted else {}


def _ending(sample: rollout_pb2.GeneratedSample) -> dict[str, Any]:
    reason = FINISH_REASONS.get(sample.finish_reason)
    if reason == "stop" and sample.message.tool_calls:
        reason = "tool_calls"
    return {"finish_reason": reason, "stop_reason": sample.stop_string or None}


def _said(sample: rollout_pb2.GeneratedSample) -> dict[str, Any]:
    """Return content, reasoning and tool calls of a sample's message, without a stop string."""
    message, stop = sample.message, sample.stop_string
    content, reasoning = (text.partition(stop)[0] if stop else text for text in (message.content, message.reasoning))
    said: dict[str, Any] = {"content": content or (None if message.tool_calls else "")}
    if reasoning:
        said["reasoning_content"] = reasoning
    if message.tool_calls:
        said["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return said


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
        self._messages: dict[int, MessageFilter] = {}
        self._completion_tokens = 0

    async def encode(
        self, first: Sequence[Numbered], rest: AsyncGenerator[Numbered, None]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the encoded events of a response. After the first one the HTTP status is sent, so that an error is an event, too."""
        async with contextlib.aclosing(rest):
            try:
                for number, message in first:
                    for chunk in self._chunks(number, message):
                        yield _event(chunk)
                async for number, message in rest:
                    for chunk in self._chunks(number, message):
                        yield _event(chunk)
            except SluiceError as error:
                yield _event(error_body(error))
                return
        if self._include_usage:
            prompt_tokens = sum(len(ids) for ids in self._prompts.values())
            yield _event({**self._head, "choices": [], "usage": usage(prompt_tokens, self._completion_tokens)})
        yield DONE

    def _chunks(self, number: int, message: rollout_pb2.GenerateStreamResponse) -> list[dict[str, Any]]:
        chunks = []
        if message.HasField("opening"):
            self._prompts[number] = list(message.opening.prompt_token_ids)
            extras = prompt_fields(self._responses, self._prompts[number], of_choice=False)
            first = range(number * self._samples, (number + 1) * self._samples)
            openings = [each for each in map(self._responses.first_chunk, first) if each is not None]
            chunks = [self._chunk(each, extras if not place else {}) for place, each in enumerate(openings)]
        return chunks + [self._next_chunk(number, delta) for delta in message.chunk.deltas]

    def _next_chunk(self, number: int, delta: rollout_pb2.SampleDelta) -> dict[str, Any]:
        new = delta.tokens
        index = number * self._samples + new.index
        self._completion_tokens += len(new.token_ids)
        extras = {}
        if index not in self._texts:
            self._texts[index], self._messages[index] = StopStringFilter(self._stops), MessageFilter(self._stops)
            extras = prompt_fields(self._responses, self._prompts[number], of_choice=True)
        last = bool(new.finish_reason)
        text = self._texts[index].after(new.text, new.stop_string, last=last)
        said = self._messages[index].after(delta.reasoning, delta.content, new.stop_string, last=last)
        return self._chunk(self._responses.chunk(index, new, text, said) | extras, {})

    def _chunk(self, choice: Mapping[str, Any], extras: Mapping[str, Any]) -> dict[str, Any]:
        no_usage = {"usage": None} if self._include_usage else {}
        return {**self._head, "choices": [choice], **no_usage, **extras}


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
