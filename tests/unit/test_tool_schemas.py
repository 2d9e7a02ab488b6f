"""The schema of a tool reaches the chat template as the client sent it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from pydantic import BaseModel
from tiny_policy import TINY

from gateway_svc.canonical import conversation_keys
from rollout_svc.tokenizer import MAX_TOOLS_BYTES, ModelTokenizer, check_size
from sluice.cli.init_model import character_tokenizer
from sluice.environments.wire import plain_tools, tool_messages
from sluice.openai import chat, messages, responses
from sluice.openai.bodies import ClientRequest
from sluice.openai.chat import ChatBody, StrictChatBody
from sluice.openai.messages import MessagesBody
from sluice.openai.responses import ResponsesBody
from sluice.rpc import SluiceError
from sluice.tool_schemas import tool_dict, tool_message
from sluice.v1 import tokens_pb2

SCHEMA = {
    "type": "object",
    "properties": {
        "item": {"type": "string", "description": "<b> & 'c'"},
        "at": {"type": "number", "maximum": 9007199254740993, "default": 1.0, "multipleOf": 0.1},
        "any": {"enum": [1, 1.5, "1", True, None, [1, [2.0]], {"z": 1, "a": 2}]},
    },
    "required": ["item"],
    "additionalProperties": False,
}
PRICE = {"name": "price", "description": "Price of an item.", "parameters": SCHEMA}
FUNCTIONS: dict[str, dict[str, Any]] = {
    "all": PRICE,
    "no description": {"name": "go", "parameters": {"type": "object", "properties": {}}},
    "no parameters": {"name": "now", "description": "Time."},
    "empty parameters": {"name": "now", "parameters": {}},
}
Body = TypeVar("Body", bound=BaseModel)
ASK = [{"role": "user", "content": "x"}]


def _replica(function: dict[str, Any]) -> tokens_pb2.Tool:
    body = StrictChatBody.model_validate_json(
        json.dumps({"messages": ASK, "tools": [{"type": "function", "function": function}]})
    )
    return chat.parse(body).generate.conversation.tools[0]


def _gateway(parsed: ClientRequest) -> tokens_pb2.Tool:
    return parsed.generate.conversation.tools[0]


def _renamed(function: dict[str, Any]) -> dict[str, Any]:
    """Return a function as Anthropic's API has it."""
    return {"input_schema" if key == "parameters" else key: value for key, value in function.items()}


def _body(kind: type[Body], **fields: Any) -> Body:
    return kind.model_validate_json(json.dumps({"model": "policy", **fields}))


PATHS: dict[str, Callable[[dict[str, Any]], tokens_pb2.Tool]] = {
    "replica": _replica,
    "chat completions": lambda function: _gateway(
        chat.parse(_body(ChatBody, messages=ASK, tools=[{"type": "function", "function": function}]))
    ),
    "responses": lambda function: _gateway(
        responses.parse(_body(ResponsesBody, input="x", tools=[{"type": "function", **function}]))
    ),
    "messages": lambda function: _gateway(
        messages.parse(_body(MessagesBody, messages=ASK, max_tokens=4, tools=[_renamed(function)]))
    ),
    "environment": lambda function: tool_messages([{"type": "function", "function": function}])[0],
}


def _prompt(tool: tokens_pb2.Tool) -> str:
    """Return the output of a template that prints the tools as JSON, for a tool that was serialised and read again."""
    tokenizer = character_tokenizer(TINY)
    tokenizer.chat_template = "{{ tools | tojson }}"
    conversation = tokens_pb2.Conversation(messages=ASK, tools=[tool])
    conversation = tokens_pb2.Conversation.FromString(conversation.SerializeToString())
    return tokenizer.decode(ModelTokenizer(tokenizer).render(conversation))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_template_gets_the_schema_that_the_client_sent(path, function):
    given = FUNCTIONS[function]
    assert _prompt(PATHS[path](given)) == json.dumps([{"type": "function", "function": given}], ensure_ascii=False)


def test_a_reader_that_does_not_know_the_text_finds_the_schema_in_the_struct():
    tool = tool_message("price", None, {"type": "object", "required": ["item"]})
    tool.ClearField("parameters_json")
    assert tool_dict(tool)["function"]["parameters"] == {"required": ["item"], "type": "object"}


def test_an_environment_gets_its_tools_back_as_they_were():
    assert json.dumps(plain_tools(tool_messages([PRICE]))) == json.dumps([{"type": "function", "function": PRICE}])


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"a": NaN}', '{"a": 1e999}', '{"a": ' * 100_000, "1" * 5000])
def test_text_that_is_not_a_schema_is_refused(text):
    conversation = tokens_pb2.Conversation(messages=ASK, tools=[tokens_pb2.Tool(name="f", parameters_json=text)])
    with pytest.raises(SluiceError, match=r"conversation\.tools.*parameters_json of tool 'f'"):
        ModelTokenizer(character_tokenizer(TINY)).render(conversation)


def test_parameters_that_are_not_json_are_refused():
    with pytest.raises(ValueError, match=r"tool 'f'.*not JSON"):
        tool_message("f", None, {"default": {1, 2}})


def test_a_client_that_writes_a_schema_in_another_order_goes_on_with_its_conversation():
    schema = {"type": "object", "required": ["a"], "n": 1.0}
    first, again, other = (
        tokens_pb2.Conversation(messages=ASK, tools=[tool_message("f", None, each)])
        for each in (schema, {"n": 1, "required": ["a"], "type": "object"}, schema | {"n": 2})
    )
    assert conversation_keys(first) == conversation_keys(again)
    assert conversation_keys(first) != conversation_keys(other)


def test_the_size_of_a_schema_counts_once():
    def conversation(size: int) -> tokens_pb2.Conversation:
        return tokens_pb2.Conversation(messages=ASK, tools=[tool_message("f", None, {"description": "x" * size})])

    check_size(conversation(MAX_TOOLS_BYTES - 100))
    with pytest.raises(SluiceError, match=r"conversation\.tools"):
        check_size(conversation(MAX_TOOLS_BYTES))
