"""Requests of the OpenAI dialect: which fields are taken, and how they become a GenerateRequest of the contract.

A field that is not named here is refused, so that none is ignored silently. `user`, `metadata`, `store`,
`safety_identifier` and `prompt_cache_key` describe the caller and change no answer: they are taken and ignored. Fields for
which only one value is supported (such as `echo` or `service_tier`) may be sent with that value.

Only the form of the values is checked here. Whether they fit the model is checked where gRPC requests are.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from sluice.rpc import MAX_SAMPLES
from sluice.v1 import rollout_pb2, tokens_pb2

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

MAX_ALTERNATIVES = 20
"""Maximum number of alternatives per token."""

Unsigned = Annotated[int, Field(ge=0, lt=2**32)]
TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**32)]
Bias = Annotated[float, Field(ge=-100, le=100)]


def _fault(parameter: str, text: str) -> PydanticCustomError:
    """Return the error for a parameter that does not fit another one. The response names the parameter."""
    return PydanticCustomError("inconsistent", "{text}", {"parameter": parameter, "text": text})


MAX_DEPTH = 16
"""Maximum nesting of objects and lists in a JSON object of free form; protobuf has a limit of its own near this."""

MAX_VALUES = 65_536
"""Maximum number of values in a JSON object of free form."""

MAX_MESSAGES = 16_384
MAX_TOOLS = 1024

MAX_COMPLETIONS = 1024
"""Maximum number of samples of one request, over all of its prompts."""


def _bounded(given: dict[str, Any]) -> dict[str, Any]:
    """Refuse an object that is nested too deeply, too large, or holds a number that JSON does not have."""
    level: list[Any] = [given]
    count = 0
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for each in level:
            below += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
            if isinstance(each, float) and not math.isfinite(each):
                raise PydanticCustomError("not_finite", "{number} is not a number of JSON", {"number": str(each)})
            if isinstance(each, int) and abs(each) > MAX_INTEGER:
                raise PydanticCustomError("too_large", "an integer has more than 64 bits")
        count += len(below)
        if count > MAX_VALUES:
            raise PydanticCustomError("too_large", "has more than {most} values", {"most": MAX_VALUES})
        if not below:
            return given
        level = below
    raise PydanticCustomError("too_deep", "has more than {most} levels", {"most": MAX_DEPTH})


MAX_INTEGER = 2**64

JsonObject = Annotated[dict[str, Any], AfterValidator(_bounded)]


class Body(BaseModel):
    """A JSON object in which an unknown key is an error."""

    model_config = ConfigDict(extra="forbid")


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
            raise _fault("stream_options", "needs stream = true")
        return self

    @property
    def stops(self) -> list[str]:
        """Return the stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        """Return whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class TextPart(Body):
    """A part of a message. Only text is supported."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """The function in a tool call."""

    name: str
    arguments: str = ""


class ToolCall(Body):
    """A tool call of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Body):
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
            raise _fault("top_logprobs", "needs logprobs = true")
        if None not in {self.max_tokens, self.max_completion_tokens} and self.max_tokens != self.max_completion_tokens:
            raise _fault("max_completion_tokens", "differs from max_tokens: send one of them")
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
            raise _fault("best_of", "must equal n: samples are not ranked here")
        if len(self.prompts) * (self.n or 1) > MAX_COMPLETIONS:
            raise _fault("n", f"{len(self.prompts)} prompts with n = {self.n} are more than {MAX_COMPLETIONS} samples")
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
        added = request.conversation.tools.add(name=tool.function.name, description=tool.function.description or "")
        added.parameters.update(tool.function.parameters or {})
    request.conversation.template_arguments.update(body.chat_template_kwargs or {})
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
