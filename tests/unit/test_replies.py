"""A reply becomes content, reasoning and tool calls; what is malformed stays in the content, and nothing raises."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from small_models import text_of, tokenizer
from test_render import CHATML, word_piece
from test_render_continuation import CALLS

from rollout_svc.replies import Call, Said, read_json_calls, reply_format, split_thinking
from rollout_svc.tokenizer import ModelTokenizer
from sluice.config import ConfigError
from sluice.v1 import rollout_pb2, tokens_pb2

LOOK = '<tool_call>\n{"name": "look", "arguments": {"where":  "there"}}\n</tool_call>'
LOOKED = Call("look", '{"where":  "there"}')


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hello ", Said("hello ")),
        (LOOK, Said("", [LOOKED])),
        (f"Let me look.\n{LOOK}\n{LOOK}<end>", Said("Let me look.\n<end>", [LOOKED, LOOKED])),
        (LOOK.removesuffix("\n</tool_call>"), Said("", [LOOKED])),  # ended by a stop string
        (LOOK[:40], Said(LOOK[:40], malformed=1)),
        (f"{LOOK[:40]} no, {LOOK}", Said(f"{LOOK[:40]} no,", [LOOKED], 1)),
        ('<tool_call>{"name": "f"}</tool_call>', Said("", [Call("f", "{}")])),
        ('<tool_call>{"arguments": "{\\"a\\": 1}", "name": "f"}</tool_call>', Said("", [Call("f", '{"a": 1}')])),
        ('<tool_call>{"name": "f", "parameters": {"a": [1, {}]} }</tool_call>', Said("", [Call("f", '{"a": [1, {}]}')])),
        *[
            (f"<tool_call>{inner}</tool_call>", Said(f"<tool_call>{inner}</tool_call>", malformed=1))
            for inner in ("", "{", "[]", "{}", '{"name": 3}', '{"name": ""}', '{"name": "f", "arguments": [1]}', "x", '"name"')
        ],
        ("<tool_call>" * 3, Said("<tool_call>" * 3, malformed=3)),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", Said("<tool_call>" + "[" * 100_000 + "</tool_call>", malformed=1)),
    ],
)  # fmt: skip
def test_calls_are_read_with_the_models_own_text_of_their_arguments(text, said):
    assert read_json_calls(text, []) == said


def test_a_reply_has_a_maximum_number_of_calls():
    said = read_json_calls(LOOK * 300, [])
    assert len(said.calls) == 256
    assert said.malformed == 44
    assert said.content.count("<tool_call>") == 44


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_characters="<>")),
            st.text(min_size=1),
            st.dictionaries(st.text(max_size=8), json_values),
        ),
        max_size=4,
    ),
    st.sampled_from([None, 1]),
)
def test_what_was_written_is_read_back(turns, indent):
    text = ""
    wanted = []
    for before, name, arguments in turns:
        # The tags themselves may stand inside of neither a name nor an argument: no format of this kind can tell them apart.
        text += (
            before + "<tool_call>" + json.dumps({"name": name, "arguments": arguments}, indent=indent) + "</tool_call>"
        )
        wanted.append((name, arguments))
    said = read_json_calls(text, [])
    assert [(call.name, json.loads(call.arguments)) for call in said.calls] == wanted
    assert all(call.arguments in text for call in said.calls)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "{", "}", '"name"', ":", '"f"', ",", "[", "<think>", " "]))
)
def test_whatever_a_model_says_is_read(pieces):
    text = "".join(pieces)
    said = read_json_calls(text, [])
    assert said.calls or said.content == text
    assert said.malformed <= text.count("<tool_call>")


@pytest.mark.parametrize(
    ("text", "opened", "parts"),
    [
        ("hello", False, ("", "hello")),
        ("<think>\nso\n</think>\n\nhello", False, ("so", "hello")),
        ("so\n</think>\n\nhello", True, ("so", "hello")),
        ("so\n</think>\n\nhello", False, ("", "so\n</think>\n\nhello")),
        ("<think>so", False, ("so", "")),
        ("so", True, ("so", "")),
        ("<think>\n\n</think>\n\nhello", False, ("", "hello")),
        ("I <think> so </think>", False, ("", "I <think> so </think>")),
    ],
)
def test_reasoning_is_what_precedes_the_answer(text, opened, parts):
    assert split_thinking(text, opened) == parts


def test_the_template_decides_which_parser_reads_its_replies():
    assert reply_format(word_piece(CALLS), "auto", "auto").tool_parser == "json"
    assert reply_format(word_piece(CHATML), "auto", "auto").tool_parser == "none"
    assert reply_format(word_piece(CHATML), "auto", "auto").reasoning_parser == "none"
    thinks = word_piece(CALLS.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'"))
    assert reply_format(thinks, "auto", "auto").reasoning_parser == "think"
    assert reply_format(thinks, "none", "none").read_calls is None
    with pytest.raises(ConfigError, match=r"rollout\.tool_parser is 'hermes': only vLLM has further parsers"):
        reply_format(word_piece(CALLS), "hermes", "auto")


def ask(**fields: object) -> rollout_pb2.GenerateRequest:
    conversation = tokens_pb2.Conversation(tools=[tokens_pb2.Tool(name="look")])
    return rollout_pb2.GenerateRequest(conversation=conversation, **fields)


def counted(outcome: str) -> float:
    return REGISTRY.get_sample_value("sluice_rollout_tool_calls_total", {"outcome": outcome}) or 0.0


CALL, BROKEN, THINKS, THOUGHT = 20, 21, 22, 23
SPEAKING = {CALL: LOOK, BROKEN: "<tool_call>{look", THINKS: "<think>", THOUGHT: "</think>"}


@pytest.fixture(scope="module")
def speaking() -> ModelTokenizer:
    model = tokenizer(SPEAKING)
    return ModelTokenizer(model, reply_format(model, "json", "think"))


async def test_a_reply_is_read_from_its_ids_and_its_calls_have_stable_ids(speaking):
    parsed, malformed = counted("parsed"), counted("malformed")
    message = await speaking.message_of(ask(), "r/0", [9], [THINKS, 30, THOUGHT, 31, BROKEN, 32, CALL, CALL, 1])
    assert (message.role, message.reasoning) == ("assistant", text_of([30]))
    assert message.content == text_of([31]) + "<tool_call>{look" + text_of([32])
    assert [(call.name, call.arguments) for call in message.tool_calls] == [(LOOKED.name, LOOKED.arguments)] * 2
    assert len({call.id for call in message.tool_calls}) == 2
    again = await speaking.message_of(ask(), "r/0", [9], [CALL, CALL])
    assert [call.id for call in again.tool_calls] == [call.id for call in message.tool_calls]
    other = await speaking.message_of(ask(), "r/1", [9], [CALL])
    assert other.tool_calls[0].id not in {call.id for call in message.tool_calls}
    assert (counted("parsed") - parsed, counted("malformed") - malformed) == (5, 1)


async def test_reasoning_may_begin_in_the_prompt_and_calls_need_tools(speaking):
    message = await speaking.message_of(rollout_pb2.GenerateRequest(), "r/0", [9, THINKS], [30, THOUGHT, CALL])
    assert (message.reasoning, message.content) == (text_of([30]), LOOK)
    assert not message.tool_calls


async def test_a_parser_that_fails_or_hangs_leaves_everything_in_the_content(monkeypatch):
    model = tokenizer(SPEAKING)

    def fails(text: str, tools: object) -> Said:
        raise KeyError(text)

    broken = ModelTokenizer(model, reply_format(model, "json", "none"))
    monkeypatch.setattr(broken, "replies", type(broken.replies)("x", "none", fails, None, None))
    before = counted("malformed")
    message = await broken.message_of(ask(), "r/0", [9], [30, CALL])
    assert message.content == text_of([30]) + LOOK
    assert counted("malformed") - before == 1


@pytest.mark.slow
def test_a_parser_of_vllm_that_cannot_be_had_is_named_with_its_cause():
    parsers = "rollout_svc.engines.vllm.parsers"
    pytest.importorskip("vllm")
    with pytest.raises(ConfigError, match=r"rollout\.tool_parser is 'herms', which vLLM refuses: .*herms"):
        reply_format(word_piece(CALLS), "herms", "auto", parsers=parsers)
