"""OpenAI's Chat Completions: `POST /v1/chat/completions`.

Fields of responses that are not OpenAI's: `reasoning_content` and `stop_reason` as vLLM has them, `generation_id` of each choice, and
with `return_token_ids` also `token_ids`, `version_spans` and, once, `prompt_token_ids`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from sluice.openai import fields
from sluice.openai.fields import MAX_MESSAGES, MAX_TOOLS, ClientRequest, Inner, JsonObject, Unsigned, fault
from sluice.openai.shown import Begun, Delta, Result, Unshown
from sluice.template_arguments import set_template_arguments
from sluice.tool_schemas import tool_message
from sluice.v1 import episode_pb2, tokens_pb2

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

    role: str
    content: fields.Content = None
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


class Typed(Inner):
    """An object of which only the type counts."""

    type: str


class ChatBody(fields.SamplingBody):
    """Body of a request."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Unsigned | None = None
    logprobs: bool | None = None
    top_logprobs: fields.Alternatives | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | Typed | None = None
    parallel_tool_calls: bool | None = None
    response_format: Typed | None = None
    chat_template_kwargs: JsonObject | None = None
    functions: list[Any] | None = None


def parse(body: ChatBody) -> ClientRequest:
    """Return what a body asks for.

    Raises:
        SluiceError: INVALID_ARGUMENT with the field at fault.
    """
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    top_logprobs = (body.top_logprobs or 0) if body.logprobs else 0
    request = ClientRequest(NAME, body.model, body.generate_request(max_tokens, top_logprobs), bool(body.stream))
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
        role=fields.ROLES.get(message.role, message.role),
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
        reasoning=message.reasoning_content or message.reasoning or "",
    )
    fields.add_content(added, message.content if message.content is not None else message.refusal, where, request)
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
    choice = (body.tool_choice or "auto") if isinstance(body.tool_choice, str | None) else "named"
    if choice != "auto":
        request.note("not_enforced", f"tool_choice.{choice}")
    if body.parallel_tool_calls is False:
        request.note("not_enforced", "parallel_tool_calls")


class ChatReply:
    """Writes the response to one request.

    Args:
        body: The request.
    """

    def __init__(self, body: ChatBody) -> None:
        self._body = body
        self._created = int(time.time())
        self._head: dict[str, Any] = {}
        self._unshown = Unshown()

    def whole(self, result: Result) -> dict[str, Any]:
        """Return the JSON of a response."""
        choices = [
            {"index": index, "message": self._message(each.message)} | self._rest(each)
            for index, each in enumerate(result.generations)
        ]
        head = self._fields(result.generations[0].generation_id, "chat.completion")
        return {**head, "choices": choices, "usage": fields.usage_of(result), **self._prompt(result)}

    def opening(self, begun: Begun) -> Iterator[bytes]:
        """Yield the events before the first token: the role of each choice."""
        self._head = self._fields(begun.response_id, "chat.completion.chunk")
        for index in range(self._body.n or 1):
            yield self._chunk(index, {"role": "assistant", "content": ""}, _UNFINISHED)

    def text(self, delta: Delta) -> Iterator[bytes]:
        """Yield the events for more text."""
        self._unshown.sent(delta)
        if delta.reasoning:
            yield self._chunk(delta.index, {"reasoning_content": delta.reasoning}, _UNFINISHED)
        if delta.content:
            yield self._chunk(delta.index, {"content": delta.content}, _UNFINISHED)

    def ending(self, result: Result) -> Iterator[bytes]:
        """Yield the events that end the stream: what is left of each message, its tool calls, and why it ended."""
        for index, each in enumerate(result.generations):
            yield from self.text(self._unshown.rest(index, each.message))
            if each.message.tool_calls:
                calls = [{"index": at, **_call(call)} for at, call in enumerate(each.message.tool_calls)]
                yield self._chunk(index, {"tool_calls": calls}, _UNFINISHED)
            yield self._chunk(index, {}, self._rest(each), self._prompt(result) if index == 0 else {})
        if self._body.include_usage:
            yield fields.event({**self._head, "choices": [], "usage": fields.usage_of(result)})
        yield fields.DONE

    failure = staticmethod(fields.failure)

    def _fields(self, identifier: str, kind: str) -> dict[str, Any]:
        return {"id": identifier, "object": kind, "created": self._created, "model": self._body.model}

    def _message(self, message: tokens_pb2.ChatMessage) -> dict[str, Any]:
        calls = [_call(call) for call in message.tool_calls]
        written: dict[str, Any] = {"role": "assistant", "content": message.content or (None if calls else "")}
        if message.reasoning:
            written["reasoning_content"] = message.reasoning
        return written | ({"tool_calls": calls} if calls else {}) | {"refusal": None}

    def _rest(self, generation: episode_pb2.EpisodeGeneration) -> dict[str, Any]:
        sample = generation.sample
        logprobs = {"content": fields.logprob_content(sample), "refusal": None} if self._body.logprobs else None
        return (
            {"logprobs": logprobs}
            | fields.ending(sample, calls=bool(generation.message.tool_calls))
            | {"generation_id": generation.generation_id}
            | (fields.token_fields(sample) if self._body.return_token_ids else {})
        )

    def _prompt(self, result: Result) -> dict[str, Any]:
        return {"prompt_token_ids": list(result.prompt_token_ids)} if self._body.return_token_ids else {}

    def _chunk(self, index: int, delta: Any, rest: dict[str, Any], extras: dict[str, Any] | None = None) -> bytes:  # noqa: ANN401 - JSON
        no_usage = {"usage": None} if self._body.include_usage else {}
        return fields.event(
            {**self._head, "choices": [{"index": index, "delta": delta, **rest}], **no_usage, **(extras or {})}
        )


_UNFINISHED = {"logprobs": None, "finish_reason": None}


def _call(call: tokens_pb2.ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
