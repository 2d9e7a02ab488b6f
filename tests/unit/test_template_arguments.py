"""The arguments of a chat template reach it as they were given, and the nearest ones to the request take precedence."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tiny_policy import TINY

from gateway_svc.canonical import conversation_keys
from rollout_svc.tokenizer import MAX_ARGUMENT_BYTES, ModelTokenizer, check_size
from sluice.cli.init_model import character_tokenizer
from sluice.openai import chat
from sluice.openai.chat import ChatBody, StrictChatBody
from sluice.rpc import SluiceError
from sluice.template_arguments import set_template_arguments, template_arguments
from sluice.v1 import tokens_pb2

ASK = [{"role": "user", "content": "x"}]
GIVEN = {"b": [1, 1.0, 9007199254740993, {"z": None, "a": "<&>"}], "a": True}
PRINTS = "{{ a | tojson }} {{ b | tojson }}"


def _tokenizer(template: str, arguments: dict[str, Any] | None = None) -> ModelTokenizer:
    tokenizer = character_tokenizer(TINY)
    tokenizer.chat_template = template
    return ModelTokenizer(tokenizer, arguments=arguments)


def _prompt(tokenizer: ModelTokenizer, conversation: tokens_pb2.Conversation) -> str:
    return tokenizer.decode(tokenizer.render(tokens_pb2.Conversation.FromString(conversation.SerializeToString())))


def _replica() -> tokens_pb2.Conversation:
    body = json.dumps({"messages": ASK, "chat_template_kwargs": GIVEN})
    return chat.parse(StrictChatBody.model_validate_json(body)).generate.conversation


def _gateway() -> tokens_pb2.Conversation:
    body = json.dumps({"model": "policy", "messages": ASK, "chat_template_kwargs": GIVEN})
    return chat.parse(ChatBody.model_validate_json(body)).generate.conversation


@pytest.mark.parametrize("travels", [_replica, _gateway])
def test_a_template_gets_the_arguments_that_the_client_sent(travels):
    expected = f"{json.dumps(GIVEN['a'])} {json.dumps(GIVEN['b'], ensure_ascii=False)}"
    assert _prompt(_tokenizer(PRINTS), travels()) == expected


def test_a_sender_that_does_not_know_the_text_sends_a_struct():
    conversation = tokens_pb2.Conversation(messages=ASK)
    set_template_arguments(conversation, {"b": {"z": 1, "a": 1.5}, "a": False})
    conversation.ClearField("template_arguments_json")
    assert json.dumps(template_arguments(conversation)) == '{"a": false, "b": {"a": 1.5, "z": 1}}'


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"a": NaN}', '{"a": 1e999}', '{"a": ' * 10_000])
def test_text_that_is_no_object_is_refused(text):
    conversation = tokens_pb2.Conversation(messages=ASK, template_arguments_json=text)
    with pytest.raises(SluiceError, match="template_arguments_json is n") as caught:
        _tokenizer(PRINTS).render(conversation)
    assert list(caught.value.violations) == ["conversation.template_arguments"]


def test_the_size_of_what_is_read_is_limited():
    large = tokens_pb2.Conversation(messages=ASK, template_arguments_json=json.dumps({"a": "x" * MAX_ARGUMENT_BYTES}))
    with pytest.raises(SluiceError, match=r"conversation.template_arguments"):
        check_size(large)
    twice = tokens_pb2.Conversation(messages=ASK)
    set_template_arguments(twice, {"a": [0] * 10_000})  # as a Struct: 110 kB
    check_size(twice)


def test_the_key_of_a_conversation_follows_its_arguments_and_not_how_they_are_written():
    keys = []
    for text in ('{"a": 1, "b": 2}', '{"b":2.0,"a":1}', '{"a": 2, "b": 2}', ""):
        conversation = tokens_pb2.Conversation(messages=ASK)
        if text:
            conversation.template_arguments_json = text
        keys.append(conversation_keys(conversation).whole)
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def test_the_arguments_of_a_request_take_precedence_over_the_replicas():
    tokenizer = _tokenizer(PRINTS, {"a": 1, "b": 2})
    conversation = tokens_pb2.Conversation(messages=ASK)
    assert _prompt(tokenizer, conversation) == "1 2"
    set_template_arguments(conversation, {"b": "own"})
    assert _prompt(tokenizer, conversation) == '1 "own"'


def test_a_continuation_is_written_with_the_replicas_arguments_too():
    tokenizer = _tokenizer("{% for m in messages %}{{ date + m.content }}{% endfor %}", {"date": "May "})
    first = tokenizer.render(tokens_pb2.Conversation(messages=ASK))
    more = tokenizer.render(tokens_pb2.Conversation(messages=[{"role": "user", "content": "y"}]), first)
    assert tokenizer.decode(more) == "May xMay y"


def test_replicas_with_other_arguments_have_other_digests():
    digests = {json.dumps(given): _tokenizer(PRINTS, given).digest for given in (None, {}, {"a": 1}, {"a": True})}
    assert digests["null"] == digests["{}"]
    assert len(set(digests.values())) == 3
    both = _tokenizer(PRINTS, {"a": 1, "b": 2}), _tokenizer(PRINTS, {"b": 2, "a": 1})
    assert both[0].digest == both[1].digest
