"""Arguments of the chat template, such as `enable_thinking`: in the settings, in a conversation's wire form, and as a template reads them.

A template may print an argument, so that the order of keys and the form of numbers determine tokens. A `google.protobuf.Struct`
preserves neither. Therefore the arguments are also sent as JSON text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from google.protobuf.struct_pb2 import Struct, Value

from sluice.tool_schemas import json_object
from sluice.v1 import tokens_pb2


def set_template_arguments(conversation: tokens_pb2.Conversation, arguments: Mapping[str, Any] | None) -> None:
    """Set the template arguments of a conversation: as text, and as a Struct for readers that do not know the text.

    Raises:
        ValueError: if they are not JSON.
    """
    if arguments:
        conversation.template_arguments.update(arguments)
        conversation.template_arguments_json = arguments_text(arguments)


def template_arguments(conversation: tokens_pb2.Conversation) -> dict[str, Any]:
    """Return the template arguments of a conversation.

    Raises:
        ValueError: if the text is not a JSON object, or has a number that JSON does not allow.
    """
    if conversation.HasField("template_arguments_json"):
        return json_object(conversation.template_arguments_json, "template_arguments_json")
    return _plain_object(conversation.template_arguments)


def arguments_text(arguments: Mapping[str, Any]) -> str:
    """Return template arguments as JSON text.

    Raises:
        ValueError: if they are not JSON.
    """
    try:
        return json.dumps(dict(arguments), ensure_ascii=False, allow_nan=False)
    except TypeError as error:
        raise ValueError(f"template arguments are not JSON: {error}") from error


def _plain_object(struct: Struct) -> dict[str, Any]:
    """Return a JSON object, always the same for the same content: its keys in order, whole numbers as integers."""
    return {key: _plain(struct.fields[key]) for key in sorted(struct.fields)}


def _plain(value: Value) -> Any:  # noqa: ANN401 - JSON
    match value.WhichOneof("kind"):
        case "struct_value":
            return _plain_object(value.struct_value)
        case "list_value":
            return [_plain(each) for each in value.list_value.values]
        case "number_value":
            number = value.number_value
            if not math.isfinite(number):
                raise ValueError(f"{number} is not a number of JSON")
            return int(number) if number.is_integer() else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case _:
            return None
