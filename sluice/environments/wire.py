"""Converts messages, tasks and turns of environments to the messages of the contracts, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf.json_format import ParseDict

from sluice.environments.base import Message, Task
from sluice.environments.message_fields import message_fields
from sluice.plain_data import plain_data
from sluice.tool_schemas import tool_dict, tool_message
from sluice.v1 import environment_pb2, tokens_pb2


def chat_messages(messages: Iterable[Message]) -> list[tokens_pb2.ChatMessage]:
    """Return messages in their wire form.

    Raises:
        ValueError: if a message has no role, an unknown field that is not empty, or a field that is not text.
    """
    return [_chat_message(message) for message in messages]


def _chat_message(message: Message) -> tokens_pb2.ChatMessage:
    texts, calls = message_fields(message)
    return tokens_pb2.ChatMessage(**texts, tool_calls=[tokens_pb2.ToolCall(**call) for call in calls])


def tool_messages(tools: Iterable[Mapping[str, Any]]) -> list[tokens_pb2.Tool]:
    """Return tools in their wire form. They are given in the form of the OpenAI API, or flat.

    Raises:
        ValueError: if a tool has no name, or its parameters are not a JSON schema.
    """
    found = []
    for tool in tools:
        function = tool.get("function", tool)
        if not function.get("name"):
            raise ValueError("one of the tools of an episode has no name")
        found.append(tool_message(function["name"], function.get("description"), function.get("parameters")))
    return found


def plain_tools(tools: Iterable[tokens_pb2.Tool]) -> list[dict[str, Any]]:
    """Return tools in the form of the OpenAI API."""
    return [tool_dict(each) for each in tools]


def plain_messages(messages: Iterable[tokens_pb2.ChatMessage]) -> list[dict[str, Any]]:
    """Return messages in the form of environments. Empty fields are left out."""
    return [plain_message(each) for each in messages]


def plain_message(message: tokens_pb2.ChatMessage) -> dict[str, Any]:
    """Return a message in the form of environments. Empty fields are left out."""
    content = message.content + "".join(part.text for part in message.parts)
    plain: dict[str, Any] = {"role": message.role, "content": content}
    plain |= {name: text for name in ("name", "tool_call_id", "reasoning") if (text := getattr(message, name))}
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return plain


def task_message(task: Task) -> environment_pb2.EnvironmentTask:
    """Return a task in its wire form.

    Raises:
        ValueError: if its data are not JSON values.
    """
    message = environment_pb2.EnvironmentTask(task_id=task.task_id, max_tokens=task.max_tokens)
    try:
        ParseDict(json.loads(json.dumps(dict(task.data), allow_nan=False)), message.data)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the data of task {task.task_id!r} is not what JSON has: {error}") from error
    return message


def task_of(message: environment_pb2.EnvironmentTask) -> Task:
    """Return a task from its wire form."""
    max_tokens = message.max_tokens if message.HasField("max_tokens") else None
    return Task(message.task_id, plain_data(message.data), max_tokens)
