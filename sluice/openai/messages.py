"""Anthropic's Messages: `POST /v1/messages` and `POST /v1/messages/count_tokens`.

Blocks become messages of the contract: text and images of a user stay one message, each `tool_result` becomes a message of the role tool,
and `system` becomes the first message. Blocks of one message are joined by line feeds. Blocks of the assistant are joined without line
feeds, as they were sampled. Thinking blocks have a constant signature. It is not checked when a client sends them back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field
from pydantic_core import from_json

from sluice.openai.answers import Begun, Delta, Result, Unshown, dumps, event
from sluice.openai.bodies import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ClientRequest,
    Inner,
    JsonObject,
    RequestBody,
    Unsigned,
    fault,
    image_of,
)
from sluice.openai.errors import STATUSES
from sluice.rpc import SluiceError
from sluice.tool_schemas import tool_message
from sluice.v1 import episode_pb2, rollout_pb2, tokens_pb2

NAME = "anthropic.messages"

SIGNATURE = "c2x1aWNl"
"""Signature of each thinking block. Clients keep it and send it back; it is not read."""

MALFORMED = "__malformed_arguments__"
"""Key in a tool call's `input` for arguments that are not a JSON object, because `input` must be an object."""

BILLING = "x-anthropic-billing-header:"
"""Beginning of a line in the system prompt for Anthropic's accounting. The line differs from request to request."""

SYSTEM = "system"


class Source(Inner):
    """Location of an image, or text of a document."""

    type: str
    data: str | None = None
    content: str | list[Block] | None = None


class Block(Inner):
    """A block of content, of any type."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    source: Source | None = None


Content = str | list[Block]


class Message(Inner):
    """One message."""

    role: str
    content: Content


class Tool(Inner):
    """A tool. Tools without a type, or with the type custom, are functions of the client."""

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: JsonObject | None = None
    strict: bool | None = None


class ToolChoice(Inner):
    """Which tools the model may call."""

    type: str
    disable_parallel_tool_use: bool | None = None


class CountBody(RequestBody):
    """Body of a request to count tokens."""

    model: str = ""
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Content | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None


class MessagesBody(CountBody):
    """Body of a request."""

    max_tokens: Unsigned
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Unsigned | None = None
    stop_sequences: list[str] | None = None


def parse(body: MessagesBody) -> ClientRequest:
    """Return the request of a body.

    Raises:
        SluiceError: INVALID_ARGUMENT with the field at fault.
    """
    sampling = tokens_pb2.SamplingParams(
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences or [],
    )
    request = ClientRequest(NAME, body.model, rollout_pb2.GenerateRequest(sampling=sampling, n=1), bool(body.stream))
    _read(body, request)
    return request


def counted(body: CountBody) -> tokens_pb2.Conversation:
    """Return the conversation whose tokens the client wants counted.

    Raises:
        SluiceError: INVALID_ARGUMENT with the field at fault.
    """
    request = ClientRequest(NAME, body.model, rollout_pb2.GenerateRequest())
    _read(body, request)
    return request.generate.conversation


def _read(body: CountBody, request: ClientRequest) -> None:
    body.note_unknown(request)
    conversation = request.generate.conversation
    system = [Block(type="text", text=body.system)] if isinstance(body.system, str) else body.system or []
    kept = [block for block in system if not (block.text or "").startswith(BILLING)]
    if len(kept) < len(system):
        request.note("left_out", "system.billing")
    if kept:
        _Reader(conversation, "system", request).add(SYSTEM, kept)
    for index, message in enumerate(body.messages):
        content = message.content
        blocks = [Block(type="text", text=content)] if isinstance(content, str) else content
        _Reader(conversation, f"messages[{index}].content", request).add(message.role, blocks)
    choice = body.tool_choice or ToolChoice(type="auto")
    if choice.type == "none":
        request.note("left_out", "tools") if body.tools else None
        return
    _add_tools(conversation, body.tools or [], request)
    if choice.type != "auto":
        request.note("not_enforced", f"tool_choice.{choice.type}")
    if choice.disable_parallel_tool_use:
        request.note("not_enforced", "disable_parallel_tool_use")


def _add_tools(conversation: tokens_pb2.Conversation, tools: Sequence[Tool], request: ClientRequest) -> None:
    for tool in tools:
        if tool.type not in {None, "custom"}:
            request.note("left_out", f"tool.{tool.type or ''}")
            continue
        conversation.tools.append(tool_message(tool.name, tool.description, tool.input_schema))
        if tool.strict:
            request.note("not_enforced", "strict")


class _Reader:
    """Turns the blocks of one message into messages of a conversation.

    Args:
        conversation: The messages are added to it.
        where: Path of the blocks, for errors.
        request: Notices are added to it.
    """

    def __init__(self, conversation: tokens_pb2.Conversation, where: str, request: ClientRequest) -> None:
        self._conversation, self._where, self._request = conversation, where, request
        self._parts: list[tokens_pb2.ContentPart] = []

    def add(self, role: str, blocks: Sequence[Block]) -> None:
        """Add the messages of the blocks."""
        if role == "assistant":
            self._add_assistant(blocks)
            return
        results = 0
        for index, block in enumerate(blocks):
            if block.type == "tool_result":
                self._end_message(role)
                self._add_result(block, index)
                results += 1
            elif (part := self._part(block, index)) is not None:
                self._parts.append(part)
        if self._parts or not results:
            self._end_message(role, even_if_empty=True)

    def _add_assistant(self, blocks: Sequence[Block]) -> None:
        message = self._conversation.messages.add(role="assistant")
        for block in blocks:
            if block.type == "text":
                message.content += block.text or ""
            elif block.type == "thinking":
                message.reasoning += block.thinking or ""
            elif block.type == "tool_use":
                message.tool_calls.add(id=block.id or "", name=block.name or "", arguments=_arguments(block.input))
            elif block.type != "redacted_thinking":
                self._request.note("left_out", f"block.{block.type}")

    def _add_result(self, block: Block, index: int) -> None:
        blocks = block.content if isinstance(block.content, list) else []
        parts = [part for each in blocks if (part := self._part(each, index)) is not None]
        if isinstance(block.content, str):
            parts = [tokens_pb2.ContentPart(text=block.content)]
        if block.is_error and not any(part.text.lower().startswith("error") for part in parts[:1]):
            parts.insert(0, tokens_pb2.ContentPart(text="Error:"))
        message = self._conversation.messages.add(role="tool", tool_call_id=block.tool_use_id or "")
        _set_content(message, parts)

    def _end_message(self, role: str, *, even_if_empty: bool = False) -> None:
        if self._parts or even_if_empty:
            _set_content(self._conversation.messages.add(role=role), self._parts)
            self._parts = []

    def _part(self, block: Block, index: int) -> tokens_pb2.ContentPart | None:
        if block.type == "text":
            return tokens_pb2.ContentPart(text=block.text or "")
        if block.type == "image":
            return tokens_pb2.ContentPart(image=self._image(block, index))
        if block.type == "document" and (text := _document_text(block.source)):
            return tokens_pb2.ContentPart(text=text)
        self._request.note("left_out", f"block.{block.type}")
        return None

    def _image(self, block: Block, index: int) -> bytes:
        where = f"{self._where}[{index}].source"
        if block.source is None or block.source.type != "base64" or block.source.data is None:
            raise fault(where, "the gateway fetches no images: send it as base64")
        return image_of(block.source.data, where)


def _document_text(source: Source | None) -> str:
    """Return the text of a document that holds text or text blocks; empty for files and URLs."""
    if source is None:
        return ""
    if source.type == "text":
        return source.data or ""
    if source.type != "content":
        return ""
    if isinstance(source.content, str):
        return source.content
    return "\n".join(each.text or "" for each in source.content or () if each.type == "text")


def _set_content(message: tokens_pb2.ChatMessage, parts: Sequence[tokens_pb2.ContentPart]) -> None:
    if all(part.WhichOneof("part") == "text" for part in parts):
        message.content = "\n".join(part.text for part in parts)
    else:
        message.parts.extend(parts)


def _arguments(given: Any) -> str:  # noqa: ANN401 - JSON
    """Return the arguments of a call as text, from its input."""
    malformed = given.get(MALFORMED) if isinstance(given, dict) else None
    if isinstance(malformed, str):
        return malformed
    return dumps({} if given is None else given)


def _input(arguments: str) -> dict[str, Any]:
    """Return the input of a call from its arguments, which are text. Parse them if they are a JSON object that can be sent."""
    try:
        value = from_json(arguments or "{}", allow_inf_nan=False)
        dumps(value)  # refuses 1e999, which is parsed as infinity
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {MALFORMED: arguments}


class MessagesReply:
    """Writes the response to one request.

    Args:
        body: The request.
    """

    def __init__(self, body: MessagesBody) -> None:
        self._body = body
        self._unshown = Unshown()
        self._space = ""
        """White space at the beginning of the text. It is left out if no other text follows before tool calls."""
        self._index = -1
        self._open = ""
        """Type of the block that is being sent."""

    def whole(self, result: Result) -> dict[str, Any]:
        """Return the JSON of a response."""
        generation = result.generations[0]
        message = generation.message
        content: list[dict[str, Any]] = []
        if message.reasoning:
            content.append({"type": "thinking", "thinking": message.reasoning, "signature": SIGNATURE})
        if message.content and (message.content.strip() or not message.tool_calls):
            content.append({"type": "text", "text": message.content})
        content += [_call(call) | {"input": _input(call.arguments)} for call in message.tool_calls]
        head = self._head(generation.generation_id, len(result.prompt_token_ids), len(generation.sample.token_ids))
        return head | {"content": content} | self._stop(generation)

    def opening(self, begun: Begun) -> Iterator[bytes]:
        """Yield the events before the first token."""
        message = self._head(begun.response_id, begun.prompt_tokens, 0)
        yield _event({"type": "message_start", "message": message})
        yield _event({"type": "ping"})

    def text(self, delta: Delta) -> Iterator[bytes]:
        """Yield the events for more text."""
        self._unshown.sent(delta)
        if delta.reasoning:
            yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        self._space += delta.content
        if self._space and (self._open == "text" or self._space.strip()):
            yield from self._say()

    def ending(self, result: Result) -> Iterator[bytes]:
        """Yield the events that end the stream: the rest of the message, its tool calls, and why it ended."""
        generation = result.generations[0]
        message = generation.message
        yield from self.text(self._unshown.rest(0, message))
        if self._space and not message.tool_calls:
            yield from self._say()
        for call in message.tool_calls:
            yield from self._end()
            yield from self._begin(_call(call) | {"input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": dumps(_input(call.arguments))})
        yield from self._end()
        stop = self._stop(generation)
        counts = {"input_tokens": len(result.prompt_token_ids), "output_tokens": len(generation.sample.token_ids)}
        yield _event({"type": "message_delta", "delta": stop, "usage": counts})
        yield _event({"type": "message_stop"})

    @staticmethod
    def failure(error: SluiceError) -> bytes:
        """Return the event of an error after which the stream ends."""
        return _event(anthropic_error(error))

    def _head(self, identifier: str, prompt_tokens: int, sampled_tokens: int) -> dict[str, Any]:
        return {
            "id": identifier,
            "type": "message",
            "role": "assistant",
            "model": self._body.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": prompt_tokens, "output_tokens": sampled_tokens},
        }

    def _stop(self, generation: episode_pb2.EpisodeGeneration) -> dict[str, Any]:
        sample = generation.sample
        stop = sample.stop_string or None
        if sample.finish_reason == tokens_pb2.FINISH_REASON_LENGTH:
            reason = "max_tokens"
        elif generation.message.tool_calls:
            reason = "tool_use"
        else:
            reason = "stop_sequence" if stop else "end_turn"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _say(self) -> Iterator[bytes]:
        text, self._space = self._space, ""
        yield from self._begin({"type": "text", "text": ""})
        yield self._delta({"type": "text_delta", "text": text})

    def _begin(self, block: dict[str, Any]) -> Iterator[bytes]:
        if self._open == block["type"]:
            return
        yield from self._end()
        self._index += 1
        self._open = block["type"]
        yield _event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _end(self) -> Iterator[bytes]:
        if not self._open:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        yield _event({"type": "content_block_stop", "index": self._index})
        self._open = ""


def anthropic_error(error: SluiceError) -> dict[str, Any]:
    """Return the JSON of an error in this dialect."""
    _, kind = STATUSES.get(error.code, (500, "api_error"))
    kind = {"service_unavailable_error": "overloaded_error", "not_implemented_error": "api_error"}.get(kind, kind)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _event(content: dict[str, Any]) -> bytes:
    return event(content, content["type"])


def _call(call: tokens_pb2.ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}
