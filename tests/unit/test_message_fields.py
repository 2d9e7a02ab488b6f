"""What a message of an environment may hold; anything else is named by its field."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.environments.message_fields import message_fields

CALL = {"id": "1", "function": {"name": "look", "arguments": {"at": "sky"}}}


def test_a_message_is_read_by_its_fields() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": None}, {"type": "text", "text": "b"}]
    texts, calls = message_fields({"role": "assistant", "content": parts, "tool_calls": [CALL], "refusal": None})
    assert texts == {"role": "assistant", "content": "ab", "name": "", "tool_call_id": "", "reasoning": ""}
    assert calls == [{"id": "1", "name": "look", "arguments": '{"at": "sky"}'}]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"thinking": "x"}, "unknown fields thinking"),
        ({"content": 7}, "field content of a message is int, not text"),
        ({"content": [{"type": "text", "text": 7}]}, "field content of a message is list, not text"),
        ({"name": 7}, "field name of a message is int, not text"),
        ({"tool_calls": "look"}, "field tool_calls of a message is not a list of objects"),
        ({"tool_calls": CALL}, "field tool_calls of a message is not a list of objects"),
        ({"tool_calls": ["look"]}, "field tool_calls of a message is not a list of objects"),
        ({"tool_calls": [{"function": "look"}]}, "has no name"),
        ({"tool_calls": [{**CALL, "id": 7}]}, "name or id of one of the tool_calls of a message is not text"),
        ({"tool_calls": [{"name": 7}]}, "name or id of one of the tool_calls of a message is not text"),
    ],
)
def test_what_is_not_text_is_named(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        message_fields({"role": "user", "content": "x", **fields})


def test_a_message_needs_a_role() -> None:
    with pytest.raises(ValueError, match="no role"):
        message_fields({"content": "x"})
