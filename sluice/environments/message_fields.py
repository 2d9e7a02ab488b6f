"""The fields that a message of an environment may have.

Imports no contracts, because the processes of environments check their messages with it, and must start in milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_KNOWN = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content"}

_OF_TRAINING = {"weight", "loss", "train"}
"""Fields by which data sets say whether SFT trains on a message. They have no meaning in a prompt."""


class UnfitMessagesError(ValueError):
    """An environment returned messages that cannot be sent to a model."""


def message_fields(message: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Return the texts of a message by field, and its tool calls as id, name and arguments. Empty fields count as absent.

    Raises:
        ValueError: if the message has no role, an unknown field that is not empty, or a field that is not text.
    """
    given = {name for name, value in message.items() if not (value is None or value is False or value == [])}
    unknown = sorted(given - _KNOWN - _OF_TRAINING)
    if unknown or "role" not in message:
        problem = f"the unknown fields {', '.join(unknown)}" if unknown else "no role"
        raise ValueError(f"a message of the environment has {problem}; known are {', '.join(sorted(_KNOWN))}")
    texts: dict[str, Any] = {name: message.get(name) or "" for name in ("role", "content", "name", "tool_call_id")}
    texts["content"] = _text(texts["content"])
    texts["reasoning"] = message.get("reasoning") or message.get("reasoning_content") or ""
    for name, value in texts.items():
        if not isinstance(value, str):
            raise ValueError(f"field {name} of a message is {type(value).__name__}, not text")  # noqa: TRY004 - one kind
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list | tuple) or not all(isinstance(each, Mapping) for each in calls):
        raise ValueError("field tool_calls of a message is not a list of objects")
    return texts, [_tool_call(call) for call in calls]


def _text(content: Any) -> Any:  # noqa: ANN401 - whatever an environment gave
    """Return the text of a list of text parts. Return other content unchanged."""
    if isinstance(content, list) and all(isinstance(each, Mapping) and each.get("type") == "text" for each in content):
        texts = [each.get("text") or "" for each in content]
        return "".join(texts) if all(isinstance(each, str) for each in texts) else texts
    return content


def _tool_call(call: Mapping[str, Any]) -> dict[str, str]:
    """Read a tool call, in the form of the OpenAI API or flat; arguments may be text or an object."""
    function = call.get("function", call)
    name, id_ = function.get("name") if isinstance(function, Mapping) else None, call.get("id") or ""
    if not name:
        raise ValueError("one of the tool_calls of a message has no name")
    if not isinstance(name, str) or not isinstance(id_, str):
        raise ValueError("name or id of one of the tool_calls of a message is not text")  # noqa: TRY004 - one kind
    arguments = function.get("arguments") or "{}"
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": id_, "name": name, "arguments": text}
