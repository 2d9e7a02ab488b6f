"""Numbers that JSON does not have are refused where a body is parsed, wherever they stand in it: they could not be sent back."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest
from pydantic import BaseModel

from sluice.openai import chat, responses
from sluice.openai.bodies import MAX_NOTICE_CHARACTERS, read_body
from sluice.openai.chat import ChatBody
from sluice.openai.completions import CompletionBody, TokensBody
from sluice.openai.messages import CountBody, MessagesBody
from sluice.openai.responses import ResponsesBody
from sluice.rpc import SluiceError

MARK = "@number@"
USED = {"type": "tool_use", "id": "t", "name": "f", "input": {"deep": [{"a": 1}, {"a": MARK}]}}
USER: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
BODIES: dict[type[BaseModel], dict[str, Any]] = {
    ChatBody: {"model": "m", "messages": USER},
    CompletionBody: {"model": "m", "prompt": "x"},
    ResponsesBody: {"model": "m", "input": "x"},
    MessagesBody: {"model": "m", "max_tokens": 8, "messages": USER},
    CountBody: {"model": "m", "messages": USER},
    TokensBody: {"token_ids": [5, 6]},
}
EVERYWHERE: list[tuple[dict[str, Any], str]] = [
    ({"metadata": {"a": MARK}}, "metadata.a"),
    ({"temperature": MARK}, "temperature"),
    ({"unknown": [0, {"b": MARK}]}, "unknown[1].b"),
]
CASES = [(kind, *case) for kind in BODIES for case in EVERYWHERE]
CASES += [
    (kind, {"messages": [{"role": "assistant", "content": [USED]}]}, "messages[0].content[0].input.deep[1].a")
    for kind in (MessagesBody, CountBody)
]
CASES += [
    (ChatBody, {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": MARK}}}]}, "tools[0]"),
    (TokensBody, {"sampling_params": {"top_p": MARK}}, "sampling_params.top_p"),
]


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize(("kind", "field", "path"), CASES)
def test_a_number_that_is_not_finite_is_refused_with_its_path(
    kind: type[BaseModel], field: dict[str, Any], path: str, number: str
) -> None:
    raw = json.dumps(BODIES[kind] | field).replace(f'"{MARK}"', number).encode()
    with pytest.raises(SluiceError) as caught:
        read_body(kind, raw)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    (where,) = caught.value.violations
    assert where.startswith(path)
    assert "is not a number of JSON" in caught.value.message


@pytest.mark.parametrize("kind", BODIES)
def test_large_numbers_and_words_that_look_like_others_are_taken(kind: type[BaseModel]) -> None:
    given = BODIES[kind] | {"metadata": {"a": 1.7e308, "b": "1e999 NaN Infinity", "c": None, "d": [True, 10**30]}}
    read_body(kind, json.dumps(given).encode())


def test_a_body_that_is_no_object_or_not_json_is_refused_as_before() -> None:
    for raw in (b"[1e999]", b"3", b"{", b"null", b'{"token_ids": [5.5]}', b'{"token_ids": [true]}'):
        with pytest.raises(SluiceError) as caught:
            read_body(TokensBody, raw)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(("dialect", "kind"), [(chat, ChatBody), (responses, ResponsesBody)])
def test_a_choice_of_a_tool_is_named_in_a_notice_by_its_first_characters(dialect: Any, kind: type[BaseModel]) -> None:
    body = read_body(kind, json.dumps(BODIES[kind] | {"tool_choice": "x" * 100_000}).encode())
    assert [what for _, what in dialect.parse(body).notices] == [("tool_choice." + "x" * 64)[:MAX_NOTICE_CHARACTERS]]
