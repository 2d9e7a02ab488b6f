"""OpenAI's Chat Completions: `POST /v1/chat/completions`.

Fields of responses beyond OpenAI's: `reasoning_content` and `stop_reason` as in vLLM; with `return_token_ids` also `token_ids`,
`version_spans` (the policy version that sampled the tokens from index `start` on) and, once, `prompt_token_ids`; at a gateway also
`generation_id` of each choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from sluice.openai import answers, bodies
from sluice.openai.answers import Begun, Delta, Result, TokenText
from sluice.openai.bodies import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ClientRequest,
    Inner,
    JsonObject,
    Refused,
    Said,
    Typed,
    Unsaid,
    Unsigned,
    fault,
    inconsistent,
    note_choice,
)
from sluice.template_arguments import set_template_arguments
from sluice.tool_schemas import tool_message
from sluice.v1 import rollout_pb2, tokens_pb2

NAME = "openai.chat"


class CalledFunction(Inner):
    """The function in a tool call."""

    name: str
    arguments: str | None = None


class ToolCall(Inner):
    """A tool call of the assistant."""

    id: str | None = None
    function: CalledFunction


class Message(Inner):
    """One message."""

    roles: ClassVar[Mapping[str, str]] = bodies.ROLES

    role: str
    content: bodies.Content = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


class Function(Inner):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Inner):
    """A tool that the model may call."""

    type: str = "function"
    function: Function | None = None


class ChatBody(bodies.SamplingBody):
    """Body of a request.

    Tools are passed to the chat template.
    """

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Unsigned | None = None
    logprobs: bool | None = None
    top_logprobs: bodies.Alternatives | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | Typed | None = None
    parallel_tool_calls: bool | None = None
    response_format: Typed | None = None
    chat_template_kwargs: JsonObject | None = None
    functions: list[Any] | None = None


# The strict forms. They narrow the element types of lists. That is safe as long as nobody appends to the lists, which mypy cannot know.


class StrictCalledFunction(Said, CalledFunction, extra="forbid"):
    """The function in a tool call."""

    arguments: str = ""


class StrictToolCall(Said, ToolCall, extra="forbid"):
    """A tool call of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: StrictCalledFunction


class StrictPart(Said, bodies.Part, extra="forbid"):
    """A part of a message. Only text is supported."""

    type: Literal["text"]
    text: str
    refusal: Unsaid = None
    image_url: Unsaid = None


class StrictMessage(Said, Message, extra="forbid"):
    """One message. The chat template decides which roles exist."""

    roles: ClassVar[Mapping[str, str]] = {}

    content: str | list[StrictPart] | None = None  # type: ignore[assignment]
    tool_calls: list[StrictToolCall] | None = None  # type: ignore[assignment]
    reasoning: Unsaid = None
    refusal: None = None


class StrictFunction(Function, extra="forbid"):
    """A function that the model may call."""

    strict: Literal[False] | None = None


class StrictTool(Tool, extra="forbid"):
    """A tool that the model may call."""

    type: Literal["function"]
    function: StrictFunction


class TextFormat(Typed, extra="forbid"):
    """The only supported response format: text."""

    type: Literal["text"]


class StrictChatBody(bodies.StrictSamplingBody, ChatBody, extra="forbid"):
    """Body of a request to a replica."""

    messages: Annotated[list[StrictMessage], Field(min_length=1, max_length=MAX_MESSAGES)]  # type: ignore[assignment]
    tools: Annotated[list[StrictTool], Field(max_length=MAX_TOOLS)] | None = None  # type: ignore[assignment]
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: TextFormat | None = None
    modalities: list[Literal["text"]] | None = None
    functions: Refused = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise inconsistent("top_logprobs", "needs logprobs = true")
        if None not in {self.max_tokens, self.max_completion_tokens} and self.max_tokens != self.max_completion_tokens:
            raise inconsistent("max_completion_tokens", "differs from max_tokens: send one of them")
        return self


def parse(body: ChatBody) -> ClientRequest:
    """Return the request of a body.

    Raises:
        SluiceError: INVALID_ARGUMENT with the field at fault.
    """
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    top_logprobs = (body.top_logprobs or 0) if body.logprobs else 0
    request = ClientRequest(NAME, body.model or "", body.generate_request(max_tokens, top_logprobs), bool(body.stream))
    body.note_unknown(request)
    if body.functions:
        raise fault("functions", "are not supported: send them as tools")
    conversation = request.generate.conversation
    for index, message in enumerate(body.messages):
        _add_message(conversation, message, f"messages[{index}]", request)
    if body.tool_choice == "none":
        request.note("left_out", "tools") if body.tools else None
    else:
        _add_tools(conversation, body, request)
    if body.response_format is not None and body.response_format.type != "text":
        request.note("not_enforced", f"response_format.{body.response_format.type}")
    set_template_arguments(conversation, body.chat_template_kwargs)
    return request


def _add_message(conversation: tokens_pb2.Conversation, message: Message, where: str, request: ClientRequest) -> None:
    added = conversation.messages.add(
        role=message.roles.get(message.role, message.role),
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
        reasoning=message.reasoning_content or message.reasoning or "",
    )
    bodies.add_content(added, message.content if message.content is not None else message.refusal, where, request)
    for call in message.tool_calls or []:
        added.tool_calls.add(id=call.id or "", name=call.function.name, arguments=call.function.arguments or "")


def _add_tools(conversation: tokens_pb2.Conversation, body: ChatBody, request: ClientRequest) -> None:
    for tool in body.tools or []:
        if tool.function is None or tool.type != "function":
            request.note("left_out", f"tool.{tool.type}")
            continue
        function = tool.function
        conversation.tools.append(tool_message(function.name, function.description, function.parameters))
        if tool.function.strict:
            request.note("not_enforced", "strict")
    note_choice(request, body.tool_choice, body.parallel_tool_calls)


class ChatReply(answers.OpenAIReply[ChatBody]):
    """Writes the response to one request; see `OpenAIReply`."""

    prefix = "chatcmpl-"
    kinds = ("chat.completion", "chat.completion.chunk")
    choices_have_prompts = False

    def choice(
        self,
        index: int,
        sample: rollout_pb2.GeneratedSample,
        message: tokens_pb2.ChatMessage,
        prompt_ids: Sequence[int],
        generation_id: str = "",
    ) -> dict[str, Any]:
        """Return a whole choice, with a message of `visible_message`."""
        del prompt_ids
        calls = [_call(call) for call in message.tool_calls]
        said: dict[str, Any] = {"role": "assistant", "content": message.content or (None if calls else "")}
        if message.reasoning:
            said["reasoning_content"] = message.reasoning
        if calls:
            said["tool_calls"] = calls
        return {"index": index, "message": said} | self._rest(sample, message, generation_id)

    def begin(self, indices: Sequence[int], prompt_ids: Sequence[int] | None = None) -> Iterator[bytes]:
        """Yield the chunks before the first token: the role of each choice."""
        for index in indices:
            delta = {"role": "assistant", "content": ""}
            extras = self.prompt(prompt_ids, of_choice=False) if index == indices[0] else {}
            yield self._chunk({"index": index, "delta": delta, **_UNFINISHED}, extras)

    def part(
        self, index: int, new: rollout_pb2.GeneratedSample, shown: Delta, prompt_ids: Sequence[int] | None
    ) -> bytes:
        """Return the chunk for the next tokens of a choice, at a replica; the last one has the tool calls."""
        del prompt_ids
        said = {"reasoning_content": shown.reasoning, "content": shown.content, "tool_calls": _numbered(new.message)}
        delta = {name: value for name, value in said.items() if value}
        return self._chunk({"index": index, "delta": delta} | self._rest(new, new.message))

    def whole(self, result: Result) -> dict[str, Any]:
        """Return the JSON of a recorded response."""
        answer = super().whole(result)
        for choice in answer["choices"]:
            choice["message"]["refusal"] = None
        return answer

    def opening(self, begun: Begun) -> Iterator[bytes]:
        """Yield the events before the first token: the role of each choice."""
        self.set_id(begun.response_id)
        yield from self.begin(range(self.body.n or 1))

    def text(self, delta: Delta) -> Iterator[bytes]:
        """Yield the events for more text."""
        self._unshown.sent(delta)
        for name, text in (("reasoning_content", delta.reasoning), ("content", delta.content)):
            if text:
                yield self._chunk({"index": delta.index, "delta": {name: text}, **_UNFINISHED})

    def ending(self, result: Result) -> Iterator[bytes]:
        """Yield the events that end the stream: the rest of each message, its tool calls, and why it ended."""
        for index, each in enumerate(result.generations):
            yield from self.text(self._unshown.rest(index, each.message))
            if each.message.tool_calls:
                delta = {"tool_calls": _numbered(each.message)}
                yield self._chunk({"index": index, "delta": delta, **_UNFINISHED})
            rest = self._rest(each.sample, each.message, each.generation_id)
            extras = self.prompt(result.prompt_token_ids, of_choice=False) if index == 0 else {}
            yield self._chunk({"index": index, "delta": {}, **rest}, extras)
        yield from self.end(answers.usage_of(result))

    def _rest(
        self, sample: rollout_pb2.GeneratedSample, message: tokens_pb2.ChatMessage, generation_id: str = ""
    ) -> dict[str, Any]:
        """Return the fields of a choice, or of a chunk of a choice, other than its text."""
        logprobs = chat_logprobs(sample, self._token_text) if self.body.logprobs else None
        return {"logprobs": logprobs} | self._end_fields(sample, generation_id, calls=bool(message.tool_calls))


_UNFINISHED = {"logprobs": None, "finish_reason": None}


def chat_logprobs(sample: rollout_pb2.GeneratedSample, token_text: TokenText | None) -> dict[str, Any]:
    """Return the `logprobs` of a choice."""
    return {"content": answers.logprob_content(sample, token_text), "refusal": None}


def _call(call: tokens_pb2.ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _numbered(message: tokens_pb2.ChatMessage) -> list[dict[str, Any]]:
    """Return the tool calls of a message in the form of a chunk."""
    return [{"index": at, **_call(call)} for at, call in enumerate(message.tool_calls)]
