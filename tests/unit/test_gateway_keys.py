"""A history that a client sends back has the keys it was recorded under, however the client rewrote it, and no other one has."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_svc.canonical import canonical_arguments, conversation_keys, extended_key
from sluice.openai import chat, messages, responses
from sluice.openai.bodies import ClientRequest, read_body
from sluice.v1 import episode_pb2, tokens_pb2

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(TEXT, below, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(TEXT, VALUES, max_size=3).map(json.dumps) | st.sampled_from(
    ["", "{", "[1]", '"a"', '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}']
)
CALLS = st.lists(st.tuples(st.sampled_from(["look", "move"]), ARGUMENTS), max_size=3)
REPLIES = st.tuples(TEXT, TEXT, CALLS)

PARAMETERS = {"type": "object", "properties": {"to": {"type": "string"}, "by": {"type": "integer"}}, "required": ["to"]}
INSTRUCTIONS = "Be brief."
QUESTION = "Where is it?"


def sampled(reply: tuple[str, str, list[tuple[str, str]]]) -> tokens_pb2.ChatMessage:
    content, reasoning, calls = reply
    return tokens_pb2.ChatMessage(
        role="assistant",
        content=content,
        reasoning=reasoning,
        tool_calls=[
            tokens_pb2.ToolCall(id=f"call_{index}", name=name, arguments=arguments)
            for index, (name, arguments) in enumerate(calls)
        ],
    )


def answer(message: tokens_pb2.ChatMessage) -> episode_pb2.EpisodeServiceGenerateResponse:
    sample = {"token_ids": [5, 6], "logprobs": [-1.0, -2.0], "finish_reason": tokens_pb2.FINISH_REASON_STOP}
    return episode_pb2.EpisodeServiceGenerateResponse(
        generations=[episode_pb2.EpisodeGeneration(generation_id="r1/0", message=message, sample=sample)],
        prompt_token_ids=[1, 2, 3],
    )


def shuffled(value: Any) -> Any:
    """The same JSON, with its keys in the other order, and whole numbers as JavaScript writes them."""
    if isinstance(value, dict):
        return {key: shuffled(value[key]) for key in reversed(list(value))}
    if isinstance(value, list):
        return [shuffled(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def rewritten_text(draw: st.DrawFn, text: str, kind: str) -> Any:
    """Text as a client may write it: as it is, or in one or more parts."""
    form = draw(st.sampled_from(["text", "part", "cached", "parts"]))
    if form == "text":
        return text
    part: dict[str, Any] = {"type": kind}
    if form == "cached":
        part["cache_control"] = {"type": "ephemeral"}
    if form == "parts":
        at = draw(st.integers(0, len(text)))
        return [{**part, "text": text[:at]}, {**part, "text": text[at:]}]
    return [{**part, "text": text}]


class Chat:
    @staticmethod
    def first() -> dict[str, Any]:
        return {
            "model": "m",
            "messages": [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": QUESTION}],
            "tools": [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS, "strict": True}}],
        }

    @staticmethod
    def parse(body: Any) -> ClientRequest:
        return chat.parse(read_body(chat.ChatBody, json.dumps(body).encode()))

    @classmethod
    def later(cls, draw: st.DrawFn, message: tokens_pb2.ChatMessage) -> dict[str, Any]:
        body = cls.first()
        body["messages"][1]["content"] = rewritten_text(draw, QUESTION, "text")
        body["tools"][0]["function"]["parameters"] = shuffled(PARAMETERS)
        given = chat.ChatReply(chat.ChatBody(messages=[chat.Message(role="user")])).whole(answer(message))
        reply = json.loads(json.dumps(given["choices"][0]["message"]))
        if reply["content"]:
            stripped = reply["content"].strip() if draw(st.booleans()) else reply["content"]
            reply["content"] = rewritten_text(draw, stripped, "text")
        else:
            form = draw(st.sampled_from([None, "", [], "missing"]))
            reply["content"] = form
            if form == "missing":
                del reply["content"]
        if draw(st.booleans()):
            reply.pop("reasoning_content", None)
        if "tool_calls" not in reply and draw(st.booleans()):
            reply |= {"tool_calls": draw(st.sampled_from([None, []])), "reasoning_content": None, "function_call": None}
        for call in reply.get("tool_calls") or []:
            call["function"]["arguments"] = rewritten_arguments(draw, call["function"]["arguments"])
        answers = [
            {"role": "tool", "tool_call_id": call["id"], "content": rewritten_text(draw, "north", "text")}
            for call in reply.get("tool_calls") or []
        ]
        body["messages"] += [reply, *answers, {"role": "user", "content": "And now?"}]
        return body


class Messages:
    @staticmethod
    def first() -> dict[str, Any]:
        return {
            "model": "m",
            "max_tokens": 8,
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
                {"type": "text", "text": INSTRUCTIONS},
            ],
            "messages": [{"role": "user", "content": QUESTION}],
            "tools": [{"name": "look", "input_schema": PARAMETERS}],
        }

    @staticmethod
    def parse(body: Any) -> ClientRequest:
        return messages.parse(read_body(messages.MessagesBody, json.dumps(body).encode()))

    @classmethod
    def later(cls, draw: st.DrawFn, message: tokens_pb2.ChatMessage) -> dict[str, Any]:
        body = cls.first()
        cached = {"type": "text", "text": INSTRUCTIONS, "cache_control": {"type": "ephemeral"}}
        body["system"] = draw(
            st.sampled_from(
                [INSTRUCTIONS, [cached], [body["system"][0] | {"text": "x-anthropic-billing-header: cch=2;"}, cached]]
            )
        )
        body["messages"][0]["content"] = [{"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}]
        body["tools"] = [{"name": "look", "type": "custom", "input_schema": shuffled(PARAMETERS)}]
        given = messages.MessagesReply(read_body(messages.MessagesBody, json.dumps(cls.first()).encode())).whole(
            answer(message)
        )
        blocks = json.loads(json.dumps(given["content"]))
        if draw(st.booleans()):
            blocks = [block for block in blocks if block["type"] != "thinking"]
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = shuffled(block["input"])
            elif block["type"] == "text" and draw(st.booleans()):
                block["text"] = block["text"].rstrip()
            elif draw(st.booleans()):
                block["cache_control"] = {"type": "ephemeral"}
        content: Any = blocks
        if [block["type"] for block in blocks] == ["text"] and draw(st.booleans()):
            content = blocks[0]["text"]
        results: list[dict[str, Any]] = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "north"}
            for block in blocks
            if block["type"] == "tool_use"
        ]
        for each in results:
            each.update(
                draw(st.sampled_from([{}, {"is_error": False}, {"content": [{"type": "text", "text": "north"}]}]))
            )
        body["messages"] += [
            {"role": "assistant", "content": content},
            {"role": "user", "content": [*results, {"type": "text", "text": "And now?"}]},
        ]
        return body


class Responses:
    @staticmethod
    def first() -> dict[str, Any]:
        return {
            "model": "m",
            "instructions": INSTRUCTIONS,
            "input": QUESTION,
            "tools": [
                {"type": "function", "name": "look", "parameters": PARAMETERS, "strict": True},
                {"type": "web_search"},
            ],
        }

    @staticmethod
    def parse(body: Any) -> ClientRequest:
        return responses.parse(read_body(responses.ResponsesBody, json.dumps(body).encode()))

    @classmethod
    def later(cls, draw: st.DrawFn, message: tokens_pb2.ChatMessage) -> dict[str, Any]:
        body = cls.first()
        if draw(st.booleans()):
            body["input"] = [{"role": "developer", "content": INSTRUCTIONS}]
            del body["instructions"]
        else:
            body["input"] = []
        body["input"].append({"role": "user", "content": rewritten_text(draw, QUESTION, "input_text")})
        given = responses.ResponsesReply(responses.ResponsesBody()).whole(answer(message))
        items = json.loads(json.dumps(given["output"]))
        if draw(st.booleans()):
            items = [item for item in items if item["type"] != "reasoning"]
        for item in items:
            if draw(st.booleans()):
                item.pop("id")
                item.pop("status", None)
            if item["type"] == "function_call":
                item["arguments"] = rewritten_arguments(draw, item["arguments"])
        outputs = [
            {
                "type": "function_call_output",
                "call_id": item["call_id"],
                "output": rewritten_text(draw, "north", "input_text"),
            }
            for item in items
            if item["type"] == "function_call"
        ]
        body["input"] += [*items, *outputs, {"role": "user", "content": "And now?"}]
        return body


def rewritten_arguments(draw: st.DrawFn, text: str) -> str:
    """Arguments as a client may write them: as they are, or parsed and written again."""
    try:
        value = json.loads(text, parse_constant=pytest.fail)
        json.dumps(value, allow_nan=False)
    except (ValueError, pytest.fail.Exception):
        return text
    return draw(st.sampled_from([text, json.dumps(value), json.dumps(shuffled(value), indent=1)]))


@pytest.mark.slow
@pytest.mark.parametrize("dialect", [Chat, Messages, Responses])
@given(data=st.data(), reply=REPLIES)
def test_a_history_that_comes_back_has_the_key_of_the_reply(dialect, data, reply):
    message = sampled(reply)
    recorded = extended_key(conversation_keys(dialect.parse(dialect.first()).generate.conversation).whole, message)
    body = data.draw(st.composite(lambda draw: dialect.later(draw, message))())
    conversation = dialect.parse(body).generate.conversation
    (prefix,) = conversation_keys(conversation).prefixes
    assert prefix.key == recorded
    assert conversation.messages[prefix.messages - 1].role == "assistant"
    assert len(conversation.messages) == prefix.messages + len(message.tool_calls) + 1


@given(st.dictionaries(TEXT, VALUES, max_size=4))
def test_arguments_that_are_written_differently_are_equal(arguments):
    text = json.dumps(arguments)
    assert canonical_arguments(text) == canonical_arguments(
        json.dumps(shuffled(arguments), indent=2, ensure_ascii=False)
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ('{"a": 1}', '{"a": 2}'),
        ('{"a": 1}', '{"a": "1"}'),
        ('{"a": 1}', '{"a": true}'),
        ('{"a": null}', "{}"),
        ("[1, 2]", "[2, 1]"),
        ("{", "{ "),
        ('"{}"', "{}"),
        ("NaN", "null"),
    ],
)
def test_arguments_that_mean_something_else_differ(first, second):
    assert canonical_arguments(first) != canonical_arguments(second)


def test_arguments_of_any_depth_have_a_form():
    deep = "[" * 100_000 + "]" * 100_000
    assert canonical_arguments(deep) == ("text", deep)
    for depth in range(900, 1100):  # around the interpreter's own limit
        canonical_arguments("[" * depth + "]" * depth)
    assert canonical_arguments('{"a": "\\ud800"}')[0] == "json"


def conversation() -> tokens_pb2.Conversation:
    parsed = Chat.parse(Chat.first()).generate.conversation
    parsed.messages.append(sampled(("It moved.", "why", [("look", '{"to": 1}'), ("move", "{}")])))
    parsed.messages.add(role="tool", tool_call_id="call_0", content="north")
    return parsed


CHANGES: dict[str, Callable[[tokens_pb2.Conversation], Any]] = {
    "text": lambda given: setattr(given.messages[1], "content", "Where was it?"),
    "role": lambda given: setattr(given.messages[0], "role", "user"),
    "white space": lambda given: setattr(given.messages[2], "content", "It  moved."),
    "name of a call": lambda given: setattr(given.messages[2].tool_calls[0], "name", "move"),
    "arguments": lambda given: setattr(given.messages[2].tool_calls[0], "arguments", '{"to": 2}'),
    "id of a call": lambda given: setattr(given.messages[2].tool_calls[0], "id", "call_7"),
    "a call less": lambda given: given.messages[2].tool_calls.pop(),
    "answered call": lambda given: setattr(given.messages[3], "tool_call_id", "call_1"),
    "speaker": lambda given: setattr(given.messages[1], "name", "Ann"),
    "order": lambda given: given.messages[0].CopyFrom(given.messages[1]),
    "description of a tool": lambda given: setattr(given.tools[0], "description", "Look."),
    "parameters of a tool": lambda given: setattr(given.tools[0], "parameters_json", '{"required": []}'),
    "no tools": lambda given: given.tools.pop(),
    "template arguments": lambda given: given.template_arguments.update({"enable_thinking": False}),
    "image": lambda given: given.messages[1].parts.extend(
        [tokens_pb2.ContentPart(text=QUESTION), tokens_pb2.ContentPart(image=b"png")]
    ),
}


def test_what_changes_the_meaning_changes_the_key():
    keys = {conversation_keys(conversation()).whole: "nothing"}
    for name, change in CHANGES.items():
        given = conversation()
        change(given)
        assert keys.setdefault(conversation_keys(given).whole, name) == name


def test_calls_are_compared_by_id_and_reasoning_is_not():
    given = conversation()
    reversed_calls = copy.deepcopy(given)
    first, second = given.messages[2].tool_calls
    del reversed_calls.messages[2].tool_calls[:]
    reversed_calls.messages[2].tool_calls.extend([second, first])
    reversed_calls.messages[2].reasoning = ""
    assert conversation_keys(reversed_calls) == conversation_keys(given)


def test_prefixes_end_with_replies_that_something_follows():
    given = conversation()
    assert [each.messages for each in conversation_keys(given).prefixes] == [3]
    given.messages.add(role="assistant", content="north, then")
    assert [each.messages for each in conversation_keys(given).prefixes] == [3]
    given.messages.add(role="user", content="go")
    assert [each.messages for each in conversation_keys(given).prefixes] == [5, 3]
    assert {len(each.key) for each in conversation_keys(given).prefixes} == {16}
