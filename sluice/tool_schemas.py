"""Tools in the form of the contracts, and as chat templates read them.

A template may print a schema as JSON, so that the order of keys and the form of numbers determine tokens. A `google.protobuf.Struct`
preserves neither. Therefore the schema is also sent as JSON text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from sluice.plain_data import plain_data
from sluice.v1 import tokens_pb2


def tool_message(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> tokens_pb2.Tool:
    """Return a tool in its wire form. The schema is in it twice: as text, and as a Struct for readers that do not know the text.

    Raises:
        ValueError: if the parameters are not JSON.
    """
    tool = tokens_pb2.Tool(name=name, description=description or "")
    if parameters is not None:
        try:
            tool.parameters_json = json.dumps(dict(parameters), ensure_ascii=False, allow_nan=False)
        except TypeError as error:
            raise ValueError(f"the parameters of tool {name[:64]!r} are not JSON: {error}") from error
        tool.parameters.update(json.loads(tool.parameters_json))
    return tool


def tool_dict(tool: tokens_pb2.Tool) -> dict[str, Any]:
    """Return a tool in the form that chat templates read. Fields that the tool does not have are absent.

    Raises:
        ValueError: if its schema is not a JSON object.
    """
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.HasField("parameters_json"):
        function["parameters"] = json_object(tool.parameters_json, f"parameters_json of tool {tool.name[:64]!r}")
    elif tool.HasField("parameters"):
        function["parameters"] = _sorted(plain_data(tool.parameters))
    return {"type": "function", "function": function}


def json_object(text: str, what: str) -> dict[str, Any]:
    """Parse a text as a JSON object.

    Args:
        text: The text.
        what: Names it in the error.

    Raises:
        ValueError: if it is not a JSON object, or has a number that a double cannot represent.
    """
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except RecursionError as error:
        raise ValueError(f"{what} is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{what} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not a JSON object")  # noqa: TRY004 - the same type for all mistakes
    return value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:64]} is not a number of JSON that a double holds")
    return number


def _sorted(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Return JSON with sorted keys, since the keys of a Struct have no order."""
    match value:
        case dict():
            return {key: _sorted(value[key]) for key in sorted(value)}
        case list():
            return [_sorted(each) for each in value]
        case _:
            return value
