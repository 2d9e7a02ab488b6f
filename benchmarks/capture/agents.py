"""Agents of each dialect, as small as can be: what each one sends, how it reads a reply, and how it sends its history back.

They build histories like the clients that were studied: content that is null or missing, texts in parts, arguments that were
parsed and serialized again, whole histories or `previous_response_id`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from google.protobuf.struct_pb2 import Struct

from sluice.v1 import episode_pb2, tokens_pb2

NAME, ABOUT = "price", "Price of an item."
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
"""The tool, with the schema from the model's warm-up."""

TOOL: dict[str, Any] = {"type": "function", "function": {"name": NAME, "description": ABOUT, "parameters": SCHEMA}}

MARKERS = ("<tool_call>", "</tool_call>")
END = "<|end|>"
"""Marks that the chat template of `sluice init-model` writes around calls, and after each turn."""

MAX_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of the model: its id, and the item that it asks for."""

    id: str
    item: str


@dataclass(frozen=True, slots=True)
class Turn:
    """A reply that an agent got.

    Attributes:
        generation_id: The name of the generation.
        text: Content of the message.
        calls: Its calls.
        ids: Token ids, if the dialect has them.
        prompt_ids: Token ids of the prompt, likewise.
    """

    generation_id: str
    text: str
    calls: tuple[Call, ...] = ()
    ids: tuple[int, ...] | None = None
    prompt_ids: tuple[int, ...] | None = None


class Agent(Protocol):
    """One episode's history in one dialect."""

    path: str
    """Route; empty: gRPC."""

    appends: bool
    """Whether each request only appends to earlier samples, so that the session must not fork."""

    def body(self) -> dict[str, Any]:
        """Return the body of the next request."""
        ...

    def read(self, reply: Mapping[str, Any]) -> Turn:
        """Parse a reply. It does not become part of the history."""
        ...

    def keep(self, reply: Mapping[str, Any]) -> None:
        """Add a reply to the history."""
        ...

    def answer(self, results: Sequence[tuple[str, str]]) -> None:
        """Add the results of calls, by id."""
        ...

    def say(self, text: str) -> None:
        """Add a message of the user."""
        ...


def item_of(arguments: str) -> str:
    """Return the item that a call asks for; empty if its arguments are malformed."""
    try:
        given = json.loads(arguments)
    except ValueError:
        return ""
    return str(given.get("item", "")) if isinstance(given, dict) else ""


class Chat:
    """Chat Completions. Half of the clients send back what they got, the others change its form but not its meaning."""

    path, appends = "/v1/chat/completions", True

    def __init__(self, question: str, dice: random.Random) -> None:
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
        self._dice = dice
        self._stream = dice.random() < 0.3

    def body(self) -> dict[str, Any]:
        """See `Agent`."""
        stream = {"stream": True, "stream_options": {"include_usage": True}} if self._stream else {}
        return {"model": "m", "messages": self.messages, "tools": [TOOL], "return_token_ids": True, **stream}

    def read(self, reply: Mapping[str, Any]) -> Turn:
        """See `Agent`."""
        choice = reply["choices"][0]
        message = choice["message"]
        calls = [Call(each["id"], item_of(each["function"]["arguments"])) for each in message.get("tool_calls") or ()]
        prompt = reply.get("prompt_token_ids")
        return Turn(
            choice["generation_id"],
            message.get("content") or "",
            tuple(calls),
            tuple(choice["token_ids"]),
            None if prompt is None else tuple(prompt),
        )

    def keep(self, reply: Mapping[str, Any]) -> None:
        """See `Agent`."""
        got = reply["choices"][0]["message"]
        message: dict[str, Any] = {"role": "assistant", "content": got.get("content")}
        if got.get("tool_calls"):
            message["tool_calls"] = [
                {"id": each["id"], "type": "function", "function": dict(each["function"])} for each in got["tool_calls"]
            ]
        form = self._dice.randrange(5)
        if form == 1:
            message |= {"reasoning_content": None, "tool_calls": message.get("tool_calls")}
        elif form == 2 and not message["content"]:
            del message["content"]
        elif form == 3:
            message["content"] = [{"type": "text", "text": message["content"]}] if message["content"] else ""
        elif form == 4:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = _written_again(call["function"]["arguments"])
        self.messages.append(message)

    def answer(self, results: Sequence[tuple[str, str]]) -> None:
        """See `Agent`."""
        self.messages += [{"role": "tool", "tool_call_id": name, "content": text} for name, text in results]

    def say(self, text: str) -> None:
        """See `Agent`."""
        self.messages.append({"role": "user", "content": text})


def _written_again(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), indent=1)
    except ValueError:
        return arguments


class Rewriting(Chat):
    """Chat Completions by an agent that rewrites its history: its calls as text, without earlier turns, or edited."""

    appends = False

    def keep(self, reply: Mapping[str, Any]) -> None:
        """Add a reply, sometimes as a different message."""
        super().keep(reply)
        message = self.messages[-1]
        form = self._dice.randrange(4)
        if form == 0 and message.get("tool_calls"):
            called = ", ".join(item_of(each["function"]["arguments"]) for each in message["tool_calls"])
            self.messages[-1] = {"role": "assistant", "content": f"I ask for {called}"}
        elif form == 1 and len(self.messages) > 2:
            self.messages = [self.messages[0], message]
        elif form == 2:
            self.messages[0] = {"role": "user", "content": self.messages[0]["content"] + " please"}

    def answer(self, results: Sequence[tuple[str, str]]) -> None:
        """Add the results of calls; if the calls became text, as a message of the user."""
        if self.messages[-1].get("tool_calls"):
            super().answer(results)
        else:
            self.say("; ".join(text for _, text in results))


class Completions:
    """Completions with a prompt as text, which the agent renders itself."""

    path, appends = "/v1/completions", False  # the text of a reply may encode to other ids

    def __init__(self, prompt: str) -> None:
        self.prompt = prompt
        self._number = 0

    def body(self) -> dict[str, Any]:
        """See `Agent`."""
        return {"model": "m", "prompt": self.prompt, "max_tokens": MAX_TOKENS, "return_token_ids": True}

    def read(self, reply: Mapping[str, Any]) -> Turn:
        """See `Agent`."""
        choice = reply["choices"][0]
        calls = parsed_calls(choice["text"])
        return Turn(
            choice["generation_id"],
            choice["text"],
            calls,
            tuple(choice["token_ids"]),
            tuple(choice["prompt_token_ids"]),
        )

    def keep(self, reply: Mapping[str, Any]) -> None:
        """See `Agent`."""
        self.prompt += reply["choices"][0]["text"] + END

    def answer(self, results: Sequence[tuple[str, str]]) -> None:
        """See `Agent`."""
        self.prompt += "".join(turn_of("tool", text) for _, text in results) + "<|assistant|>"

    def say(self, text: str) -> None:
        """See `Agent`."""
        self.prompt += turn_of("user", text) + "<|assistant|>"


def parsed_calls(text: str) -> tuple[Call, ...]:
    """Return the calls in a text, as read by an agent that gets no parsed message."""
    calls = []
    for number, part in enumerate(text.split(MARKERS[0])[1:]):
        content, closed, _ = part.partition(MARKERS[1])
        try:
            call = json.loads(content) if closed else None
        except ValueError:
            call = None
        if isinstance(call, dict) and isinstance(call.get("arguments"), dict):
            calls.append(Call(str(number), str(call["arguments"].get("item", ""))))
    return tuple(calls)


def turn_of(role: str, text: str) -> str:
    """Return a turn as the chat template of `sluice init-model` writes it."""
    return f"<|{role}|>{text}{END}"


class Tokenizer(Protocol):
    """The tokenizer methods that an agent needs to use token ids."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of ids."""
        ...


class Tokens:
    """Token ids in, token ids out: `/inference/v1/generate`."""

    path, appends = "/inference/v1/generate", True

    def __init__(self, prompt: str, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.ids = self._encode(prompt)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def body(self) -> dict[str, Any]:
        """See `Agent`."""
        sampling = {"temperature": 1.0, "max_tokens": MAX_TOKENS, "logprobs": 1, "skip_special_tokens": False}
        return {"model": "m", "token_ids": self.ids, "sampling_params": sampling}

    def read(self, reply: Mapping[str, Any]) -> Turn:
        """See `Agent`."""
        choice = reply["choices"][0]
        text = self._tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
        ids = tuple(each["token_id"] for each in choice["logprobs"]["content"])
        prompt = tuple(reply["prompt_token_ids"])
        return Turn(choice["generation_id"], text, parsed_calls(text), ids, prompt)

    def keep(self, reply: Mapping[str, Any]) -> None:
        """See `Agent`."""
        self.ids = self.ids + reply["choices"][0]["token_ids"]
        end = self._encode(END)
        self.ids = self.ids + ([] if self.ids[-len(end) :] == end else end)

    def answer(self, results: Sequence[tuple[str, str]]) -> None:
        """See `Agent`."""
        self.ids = self.ids + self._encode("".join(turn_of("tool", text) for _, text in results) + "<|assistant|>")

    def say(self, text: str) -> None:
        """See `Agent`."""
        self.ids = self.ids + self._encode(turn_of("user", text) + "<|assistant|>")


class Responses:
    """Responses: some clients send the whole history each turn, others name the previous response."""

    path, appends = "/v1/responses", True

    def __init__(self, question: str, dice: random.Random) -> None:
        self._items: list[Any] = [{"role": "user", "content": question}]
        self._names = dice.random() < 0.5
        self._stream = dice.random() < 0.3
        self._previous = ""

    def body(self) -> dict[str, Any]:
        """See `Agent`."""
        tool = {"type": "function", "name": NAME, "description": ABOUT, "parameters": SCHEMA, "strict": True}
        body = {"model": "m", "input": self._items, "tools": [tool], "include": [], "stream": self._stream}
        return body | ({"previous_response_id": self._previous} if self._previous else {})

    def read(self, reply: Mapping[str, Any]) -> Turn:
        """See `Agent`."""
        output = reply["output"]
        texts = [part["text"] for item in output if item["type"] == "message" for part in item["content"]]
        calls = [
            Call(item["call_id"], item_of(item["arguments"])) for item in output if item["type"] == "function_call"
        ]
        return Turn(reply["id"], "".join(texts), tuple(calls))

    def keep(self, reply: Mapping[str, Any]) -> None:
        """See `Agent`."""
        if self._names:
            self._items, self._previous = [], reply["id"]
        else:
            self._items = [*self._items, *reply["output"]]

    def answer(self, results: Sequence[tuple[str, str]]) -> None:
        """See `Agent`."""
        outputs = [{"type": "function_call_output", "call_id": name, "output": text} for name, text in results]
        self._items = [*self._items, *outputs]

    def say(self, text: str) -> None:
        """See `Agent`."""
        self._items = [*self._items, {"role": "user", "content": text}]


class Messages:
    """Anthropic's Messages. A coding CLI changes texts in parts to strings, and moves `cache_control`."""

    path, appends = "/v1/messages", True

    def __init__(self, question: str, dice: random.Random) -> None:
        part = {"type": "text", "text": question, "cache_control": {"type": "ephemeral"}}
        self._messages: list[Any] = [{"role": "user", "content": [part]}]
        self._dice = dice

    def body(self) -> dict[str, Any]:
        """See `Agent`."""
        tool = {"name": NAME, "description": ABOUT, "input_schema": SCHEMA}
        return {"model": "m", "max_tokens": MAX_TOKENS, "messages": self._messages, "tools": [tool]}

    def read(self, reply: Mapping[str, Any]) -> Turn:
        """See `Agent`."""
        content = reply["content"]
        texts = [block["text"] for block in content if block["type"] == "text"]
        calls = [
            Call(block["id"], str(block["input"].get("item", ""))) for block in content if block["type"] == "tool_use"
        ]
        return Turn(reply["id"], "".join(texts), tuple(calls))

    def keep(self, reply: Mapping[str, Any]) -> None:
        """See `Agent`."""
        first = self._messages[0]["content"]
        if isinstance(first, list) and self._dice.random() < 0.5:
            self._messages[0] = {"role": "user", "content": first[0]["text"]}
        self._messages.append({"role": "assistant", "content": reply["content"] or ""})

    def answer(self, results: Sequence[tuple[str, str]]) -> None:
        """See `Agent`."""
        blocks = [
            {"type": "tool_result", "tool_use_id": name, "content": text, "is_error": False} for name, text in results
        ]
        self._messages.append({"role": "user", "content": blocks})

    def say(self, text: str) -> None:
        """See `Agent`."""
        self._messages.append({"role": "user", "content": text})


@dataclass
class Grpc:
    """EpisodeService.Generate. `reply` is the message of the contract, under the key "reply"."""

    question: str
    messages: list[tokens_pb2.ChatMessage] = field(default_factory=list)
    path = ""
    appends = True

    def __post_init__(self) -> None:
        self.messages.append(tokens_pb2.ChatMessage(role="user", content=self.question))

    def body(self) -> dict[str, Any]:
        """See `Agent`: the conversation."""
        parameters = Struct()
        parameters.update(SCHEMA)
        tool = tokens_pb2.Tool(name=NAME, description=ABOUT, parameters=parameters)
        return {"conversation": tokens_pb2.Conversation(messages=self.messages, tools=[tool])}

    def read(self, reply: Mapping[str, Any]) -> Turn:
        """See `Agent`."""
        answer: episode_pb2.EpisodeServiceGenerateResponse = reply["reply"]
        made = answer.generations[0]
        calls = tuple(Call(each.id, item_of(each.arguments)) for each in made.message.tool_calls)
        ids, prompt = tuple(made.sample.token_ids), tuple(answer.prompt_token_ids)
        return Turn(made.generation_id, made.message.content, calls, ids, prompt)

    def keep(self, reply: Mapping[str, Any]) -> None:
        """See `Agent`."""
        self.messages.append(reply["reply"].generations[0].message)

    def answer(self, results: Sequence[tuple[str, str]]) -> None:
        """See `Agent`."""
        self.messages += [
            tokens_pb2.ChatMessage(role="tool", tool_call_id=name, content=text) for name, text in results
        ]

    def say(self, text: str) -> None:
        """See `Agent`."""
        self.messages.append(tokens_pb2.ChatMessage(role="user", content=text))


def agents(tokenizer: Any) -> dict[str, Callable[[str, random.Random], Agent]]:  # noqa: ANN401 - of transformers
    """Return for each kind a function that makes an agent from its first question.

    Args:
        tokenizer: The model's tokenizer with its chat template, for agents that render prompts themselves.
    """

    def rendered(question: str) -> str:
        messages = [{"role": "user", "content": question}]
        return str(tokenizer.apply_chat_template(messages, tools=[TOOL], add_generation_prompt=True, tokenize=False))

    return {
        "chat": Chat,
        "completions": lambda question, _: Completions(rendered(question)),
        "responses": Responses,
        "messages": Messages,
        "tokens": lambda question, _: Tokens(rendered(question), tokenizer),
        "grpc": lambda question, _: Grpc(question),
        "rewriting": Rewriting,
    }
