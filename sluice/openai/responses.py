"""OpenAI's Responses: `POST /v1/responses`.

The items of the input that the assistant wrote in one turn (reasoning, then text, then calls) become one message of the contract. The
id of a response is the id of its generation, and `previous_response_id` may name any generation of the session.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from sluice.openai.answers import Begun, Delta, Result, Unshown, event, logprob_content
from sluice.openai.bodies import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ROLES,
    Alternatives,
    ClientRequest,
    Content,
    Inner,
    JsonObject,
    Part,
    RequestBody,
    Typed,
    Unsigned,
    add_content,
    fault,
    note_choice,
)
from sluice.openai.errors import error_body
from sluice.rpc import SluiceError
from sluice.tool_schemas import tool_message
from sluice.v1 import episode_pb2, rollout_pb2, tokens_pb2

NAME = "openai.responses"

ENCRYPTED = "c2x1aWNl"
"""`encrypted_content` of each reasoning item, if a client asks to include it. It is not read when the client sends it back."""

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_CONTENT = "reasoning.encrypted_content"

SERVED_INCLUDES = {LOGPROBS, ENCRYPTED_CONTENT}


class Item(Inner):
    """An item of the input, of any type. An item without a type is a message."""

    type: str = "message"
    role: str | None = None
    content: Content = None
    summary: list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content = None


class Tool(Inner):
    """A tool. Only functions are given to the model."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Text(Inner):
    """Format of the text of the response."""

    format: Typed | None = None


class ResponsesBody(RequestBody):
    """Body of a request."""

    model: str = ""
    input: str | Annotated[list[Item], Field(max_length=MAX_MESSAGES)] = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | Typed | None = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    include: list[str] | None = None
    stream: bool | None = None
    background: bool | None = None
    max_output_tokens: Unsigned | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Alternatives | None = None
    metadata: dict[str, Any] | None = None


def parse(body: ResponsesBody, previous: tokens_pb2.Conversation | None = None) -> ClientRequest:
    """Return the request of a body.

    Args:
        body: The body.
        previous: Messages up to the end of the response that `previous_response_id` names. New instructions replace its own.

    Raises:
        SluiceError: INVALID_ARGUMENT with the field at fault.
    """
    included = set(body.include or ())
    sampling = tokens_pb2.SamplingParams(
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_logprobs=(body.top_logprobs or 0) if LOGPROBS in included else 0,
    )
    request = ClientRequest(NAME, body.model, rollout_pb2.GenerateRequest(sampling=sampling, n=1), bool(body.stream))
    body.note_unknown(request)
    if body.background:
        raise fault("background", "is not supported: a response is answered by its own request")
    for name in sorted(included - SERVED_INCLUDES):
        request.note("ignored", f"include.{name}")
    conversation = request.generate.conversation
    earlier = list(previous.messages) if previous is not None else []
    if body.instructions is not None:
        conversation.messages.add(role="system", content=body.instructions)
        earlier = earlier[1:] if earlier and earlier[0].role == "system" else earlier
    conversation.messages.extend(earlier)
    items = [Item(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    if body.input:
        _Reader(conversation, request).add(items)
    if not conversation.messages:
        raise fault("input", "is empty: send a text or at least one item")
    _add_tools(conversation, body, request)
    if body.text is not None and body.text.format is not None and body.text.format.type != "text":
        request.note("not_enforced", f"text.format.{body.text.format.type}")
    return request


def _add_tools(conversation: tokens_pb2.Conversation, body: ResponsesBody, request: ClientRequest) -> None:
    if body.tool_choice == "none":
        request.note("left_out", "tools") if body.tools else None
        return
    for tool in body.tools or []:
        if tool.type != "function" or tool.name is None:
            request.note("left_out", f"tool.{tool.type}")
            continue
        conversation.tools.append(tool_message(tool.name, tool.description, tool.parameters))
        if tool.strict:
            request.note("not_enforced", "strict")
    note_choice(request, body.tool_choice, body.parallel_tool_calls)


PLACES = {"reasoning": 0, "message": 1, "function_call": 2}
"""Types of the items of one turn of the assistant, in their order."""


class _Reader:
    """Adds the items of an input to a conversation.

    Items of one turn of the assistant come in the order reasoning, text, calls. An item that cannot follow the previous item
    begins another turn.
    """

    def __init__(self, conversation: tokens_pb2.Conversation, request: ClientRequest) -> None:
        self._conversation, self._request = conversation, request
        self._turn: tokens_pb2.ChatMessage | None = None
        self._place = -1

    def add(self, items: Sequence[Item]) -> None:
        """Add the items."""
        for index, item in enumerate(items):
            where = f"input[{index}]"
            if item.type in {"reasoning", "function_call"} or (item.type == "message" and item.role == "assistant"):
                self._add_to_turn(item, where)
                continue
            self._turn = None
            if item.type == "message":
                role = item.role or "user"
                message = self._conversation.messages.add(role=ROLES.get(role, role))
                add_content(message, item.content, where, self._request)
            elif item.type == "function_call_output":
                message = self._conversation.messages.add(role="tool", tool_call_id=item.call_id or "")
                add_content(message, item.output, where, self._request)
            elif item.type == "item_reference":
                raise fault(where, "refers to an item by its id: send the item itself, or previous_response_id")
            else:
                self._request.note("left_out", f"item.{item.type}")

    def _add_to_turn(self, item: Item, where: str) -> None:
        place = PLACES[item.type]
        if self._turn is None or place < self._place or (place == self._place and item.type != "function_call"):
            self._turn = self._conversation.messages.add(role="assistant")
        self._place = place
        if item.type == "function_call":
            self._turn.tool_calls.add(id=item.call_id or "", name=item.name or "", arguments=item.arguments or "")
        elif item.type == "message":
            add_content(self._turn, item.content, where, self._request)
        else:
            parts = item.content if isinstance(item.content, list) else []
            self._turn.reasoning = "".join(part.text or "" for part in parts or item.summary or [])


class ResponsesReply:
    """Writes the response to one request.

    Args:
        body: The request.
    """

    def __init__(self, body: ResponsesBody) -> None:
        self._body = body
        self._created = int(time.time())
        self._tools = [tool.model_dump() for tool in body.tools or []]
        self._unshown = Unshown()
        self._number = 0
        self._id = ""
        self._output: list[dict[str, Any]] = []
        self._text = ""
        self._open = ""
        """Type of the item that is being sent, and its text so far."""

    def whole(self, result: Result) -> dict[str, Any]:
        """Return the JSON of a response."""
        generation = result.generations[0]
        message, self._id = generation.message, generation.generation_id
        output: list[dict[str, Any]] = []
        if message.reasoning:
            output.append(self._reasoning(0, message.reasoning))
        if message.content or not message.tool_calls:
            output.append(self._message(len(output), message.content, generation))
        for call in message.tool_calls:
            output.append(self._call(len(output), call, call.arguments, "completed"))
        return self._response(output, result)

    def opening(self, begun: Begun) -> Iterator[bytes]:
        """Yield the events before the first token."""
        self._id = begun.response_id
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response([], None))

    def text(self, delta: Delta) -> Iterator[bytes]:
        """Yield the events for more text."""
        self._unshown.sent(delta)
        if delta.reasoning:
            yield from self._begin("reasoning")
            self._text += delta.reasoning
            place = {"item_id": self._item_id("rs"), "output_index": len(self._output), "content_index": 0}
            yield self._event("response.reasoning_text.delta", **place, delta=delta.reasoning)
        if delta.content:
            yield from self._begin("message")
            self._text += delta.content
            place = {"item_id": self._item_id("msg"), "output_index": len(self._output), "content_index": 0}
            yield self._event("response.output_text.delta", **place, delta=delta.content, logprobs=[])

    def ending(self, result: Result) -> Iterator[bytes]:
        """Yield the events that end the stream: the rest of the message, its tool calls, and the whole response."""
        generation = result.generations[0]
        message = generation.message
        yield from self.text(self._unshown.rest(0, message))
        if not message.content and not message.tool_calls:
            yield from self._begin("message")
        yield from self._end(generation)
        for call in message.tool_calls:
            yield from self._send_call(call)
        response = self._response(self._output, result)
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, error: SluiceError) -> bytes:
        """Return the event of an error after which the stream ends."""
        content = error_body(error)["error"]
        return self._event("error", message=content["message"], code=content["code"], param=content["param"])

    def _begin(self, kind: str) -> Iterator[bytes]:
        if self._open == kind:
            return
        yield from self._end(None)
        self._open, self._text = kind, ""
        index = len(self._output)
        if kind == "reasoning":
            item = self._reasoning(index, "") | {"content": []}
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            item = self._message(index, "", None) | {"status": "in_progress", "content": []}
            part = _output_text("", [])
        yield self._event("response.output_item.added", output_index=index, item=item)
        place = {"item_id": item["id"], "output_index": index, "content_index": 0}
        yield self._event("response.content_part.added", **place, part=part)

    def _end(self, generation: episode_pb2.EpisodeGeneration | None) -> Iterator[bytes]:
        kind, self._open = self._open, ""
        if not kind:
            return
        index = len(self._output)
        if kind == "reasoning":
            item = self._reasoning(index, self._text)
            done: dict[str, Any] = {"text": self._text}
            name = "reasoning_text"
        else:
            item = self._message(index, self._text, generation)
            done = {"text": self._text, "logprobs": item["content"][0]["logprobs"]}
            name = "output_text"
        place = {"item_id": item["id"], "output_index": index, "content_index": 0}
        yield self._event(f"response.{name}.done", **place, **done)
        yield self._event("response.content_part.done", **place, part=item["content"][0])
        yield self._event("response.output_item.done", output_index=index, item=item)
        self._output.append(item)

    def _send_call(self, call: tokens_pb2.ToolCall) -> Iterator[bytes]:
        index = len(self._output)
        begun = self._call(index, call, "", "in_progress")
        item = self._call(index, call, call.arguments, "completed")
        place = {"item_id": item["id"], "output_index": index}
        name = "response.function_call_arguments"
        yield self._event("response.output_item.added", output_index=index, item=begun)
        yield self._event(f"{name}.delta", **place, delta=call.arguments)
        yield self._event(f"{name}.done", **place, arguments=call.arguments, name=call.name)
        yield self._event("response.output_item.done", output_index=index, item=item)
        self._output.append(item)

    def _event(self, kind: str, **content: Any) -> bytes:  # noqa: ANN401 - JSON
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **content}, kind)

    def _item_id(self, prefix: str, index: int | None = None) -> str:
        """Return the id of an item. It is the same whenever the response of the generation is sent again."""
        place = len(self._output) if index is None else index
        return f"{prefix}_{self._id}/{place}"

    def _reasoning(self, index: int, text: str) -> dict[str, Any]:
        item: dict[str, Any] = {"type": "reasoning", "id": self._item_id("rs", index), "summary": []}
        item["content"] = [{"type": "reasoning_text", "text": text}]
        if ENCRYPTED_CONTENT in (self._body.include or ()):
            item["encrypted_content"] = ENCRYPTED
        return item

    def _message(self, index: int, text: str, generation: episode_pb2.EpisodeGeneration | None) -> dict[str, Any]:
        wanted = generation is not None and LOGPROBS in (self._body.include or ())
        logprobs = logprob_content(generation.sample) if generation is not None and wanted else []
        head = {"type": "message", "id": self._item_id("msg", index), "role": "assistant", "status": "completed"}
        return head | {"content": [_output_text(text, logprobs)]}

    def _call(self, index: int, call: tokens_pb2.ToolCall, arguments: str, status: str) -> dict[str, Any]:
        head = {"type": "function_call", "id": self._item_id("fc", index), "call_id": call.id, "name": call.name}
        return head | {"arguments": arguments, "status": status}

    def _response(self, output: list[dict[str, Any]], result: Result | None) -> dict[str, Any]:
        body = self._body
        status, incomplete, usage = "in_progress", None, None
        if result is not None:
            sample = result.generations[0].sample
            cut = sample.finish_reason == tokens_pb2.FINISH_REASON_LENGTH
            status, incomplete = ("incomplete", {"reason": "max_output_tokens"}) if cut else ("completed", None)
            usage = _usage(len(result.prompt_token_ids), len(sample.token_ids))
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": incomplete,
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "model": body.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": body.previous_response_id,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "max_output_tokens": body.max_output_tokens,
            "tool_choice": "none" if body.tool_choice == "none" else "auto",
            "tools": self._tools,
            "usage": usage,
        }


def _output_text(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(prompt_tokens: int, sampled_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + sampled_tokens,
    }
