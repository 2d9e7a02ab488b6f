"""Keys of conversations: two histories that mean the same have the same key, however a client has rewritten them.

A key is a chained hash. The root covers the template arguments and the tools (the order of keys in a schema does not count), and each
message adds its canonical form. So the keys of a history include the keys of every history that it extends, and one pass over a request
computes the keys of all prefixes.

The canonical form of a message leaves out what clients change while they send a history back:

* text in parts is joined; missing, null and empty content are the same;
* arguments of tool calls are parsed, so that spaces, the order of keys, escapes and 1 or 1.0 make no difference. Arguments that are
  not JSON count as text;
* tool calls are compared by id, in any order;
* white space around the assistant's content does not count: some clients remove it, because some servers refuse it;
* the assistant's reasoning is left out. Most clients do not send it back, and the recorded token ids contain it anyway.
"""

from __future__ import annotations

import json
import operator
from dataclasses import dataclass
from typing import Any, NoReturn

import xxhash

from sluice.v1 import tokens_pb2

ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class PrefixKey:
    """Key of the first messages of a conversation.

    Attributes:
        messages: How many messages it covers.
        key: xxh3-128, 16 bytes.
    """

    messages: int
    key: bytes


@dataclass(frozen=True, slots=True)
class ConversationKeys:
    """Keys of one conversation.

    Attributes:
        whole: Key of all messages, 16 bytes.
        prefixes: Keys of the prefixes that end with a message of the assistant and are followed by another message, longest first.
    """

    whole: bytes
    prefixes: tuple[PrefixKey, ...]


def conversation_keys(conversation: tokens_pb2.Conversation) -> ConversationKeys:
    """Return the keys of a conversation."""
    root = tokens_pb2.Conversation(tools=conversation.tools)
    if conversation.HasField("template_arguments_json"):
        root.template_arguments_json = canonical_arguments(conversation.template_arguments_json)[1]
    else:
        root.template_arguments.CopyFrom(conversation.template_arguments)
    for tool in root.tools:
        if tool.HasField("parameters_json"):
            tool.parameters_json = canonical_arguments(tool.parameters_json)[1]
            tool.ClearField("parameters")
    key = xxhash.xxh3_128_digest(root.SerializeToString(deterministic=True))
    prefixes = []
    last = len(conversation.messages) - 1
    for index, message in enumerate(conversation.messages):
        key = extended_key(key, message)
        if message.role == ASSISTANT and index < last:
            prefixes.append(PrefixKey(index + 1, key))
    return ConversationKeys(key, tuple(reversed(prefixes)))


def extended_key(key: bytes, message: tokens_pb2.ChatMessage) -> bytes:
    """Return the key of a conversation after a message, such as a sampled reply, is added to it.

    Args:
        key: Key of the conversation without the message.
        message: The message.
    """
    # Escape to ASCII: a tool call may hold half of a surrogate pair, which UTF-8 cannot encode.
    canonical = json.dumps(canonical_message(message), separators=(",", ":"))
    return xxhash.xxh3_128_digest(key + canonical.encode("ascii"))


def canonical_message(message: tokens_pb2.ChatMessage) -> list[Any]:
    """Return a list of JSON values that is equal for messages that mean the same."""
    text, images = message.content, []
    if message.parts:
        text = "".join(part.text for part in message.parts)
        images = [xxhash.xxh3_128_hexdigest(part.image) for part in message.parts if part.WhichOneof("part") == "image"]
    if message.role == ASSISTANT:
        text = text.strip()
    calls = [(call.id, call.name, *canonical_arguments(call.arguments)) for call in message.tool_calls]
    calls.sort(key=operator.itemgetter(0))
    return [message.role, text, images, calls, message.tool_call_id, message.name]


def canonical_arguments(text: str) -> tuple[str, str]:
    """Return the arguments of a tool call in a form that is equal for equal arguments.

    Numbers are compared as doubles, because JavaScript clients round them to doubles.

    Returns:
        ``("json", canonical JSON)``; ``("text", text)`` if the text is not JSON, or has a number beyond the range of a double.
    """
    if not text.strip():
        return "json", "{}"
    try:
        value = json.loads(text, parse_int=_number, parse_float=_number, parse_constant=_refuse)
        return "json", json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":"))
    except (ValueError, RecursionError):
        return "text", text


def _number(text: str) -> float:
    return float(text) + 0.0  # JavaScript writes -0 as 0


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")
