"""The data of a `google.protobuf.Struct`, as Python has it."""

from __future__ import annotations

from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message


def plain_data(message: Message) -> Any:  # noqa: ANN401 - anything that JSON has
    """Return the data of a Struct. Whole numbers are ints, although they travel as floats."""
    return _with_ints(MessageToDict(message))


def _with_ints(value: Any) -> Any:  # noqa: ANN401 - anything that JSON has
    match value:
        case float() if value.is_integer():
            return int(value)
        case dict():
            return {name: _with_ints(each) for name, each in value.items()}
        case list():
            return [_with_ints(each) for each in value]
        case _:
            return value
