"""A reply becomes content, reasoning and tool calls; what is malformed stays in the content, and nothing raises."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from small_models import text_of, tokenizer
from test_render import CHATML, word_piece
from test_render_continuation import CALLS

from rollout_svc.replies import PROBE_TOOLS, Call, Said, call_marks, read_json_calls, reply_format, split_thinking
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


@pytest.mark.slow
@settings(max_examples=40)
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


@settings(max_examples=100)
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


@pytest.mark.parametrize(
    ("call", "marks"),
    [
        ('<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>', ["<tool_call>"]),
        ("<tool_call>\n<function=NAME>\n<parameter=where>\nthere\n</parameter>", ["<tool_call>", "<function="]),
        ('[TOOL_CALLS] [{"name": "NAME", "arguments": ARGUMENTS}]', ["[TOOL_CALLS]"]),
        ('{"name": "NAME", "parameters": ARGUMENTS}', ['{"name":']),
        ("<|start|>assistant to=functions.NAME ARGUMENTS", ["<|start|>"]),
        ("[NAME(where='there')]", []),
    ],
)
def test_a_template_shows_how_a_call_begins(call, marks):
    written = call.replace("NAME", "' + call.function.name + '").replace("'there'", '"there"')
    written = written.replace("ARGUMENTS", "' + (call.function.arguments | tojson) + '")
    own = "{%- for call in message.tool_calls %}{{ '" + written.replace("\n", "\\n") + "' }}{% endfor %}"
    template = (
        "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}"
        "{%- if message.tool_calls %}" + own + "{%- endif %}{{ '<|im_end|>' }}{% endfor %}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    assert call_marks(word_piece(template)) == marks


BAD = "<tool_call>{look</tool_call>"


@pytest.fixture(scope="module")
def vllm_parsers() -> str:
    pytest.importorskip("vllm")
    return "rollout_svc.engines.vllm.parsers"


@pytest.mark.slow
def test_a_parser_of_vllm_that_cannot_be_had_is_named_with_its_cause(vllm_parsers):
    with pytest.raises(ConfigError, match=r"rollout\.tool_parser is 'herms', which vLLM refuses: .*herms"):
        reply_format(word_piece(CALLS), "herms", "auto", parsers=vllm_parsers)
    with pytest.raises(
        ConfigError, match=r"rollout\.tool_parser is 'openai', which vLLM cannot use by itself: .*Harmony"
    ):
        reply_format(word_piece(CALLS), "openai", "auto", parsers=vllm_parsers)


@pytest.mark.slow
def test_every_parser_of_vllm_reads_or_says_what_the_tokenizer_lacks(vllm_parsers, monkeypatch):
    """None lacks a package of the CPU install, except Cohere's, whose package vLLM does not bring either."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    monkeypatch.setattr(logging.getLogger("vllm"), "level", logging.CRITICAL)
    model = word_piece(CALLS)
    settings = [("tool_parser", name, "none") for name in ToolParserManager.list_registered()]
    settings += [("reasoning_parser", "none", name) for name in ReasoningParserManager.list_registered()]
    assert len(settings) > 80
    refused, read = {}, set()
    for setting, tool, reasoning in settings:
        try:
            reply_format(model, tool, reasoning, parsers=vllm_parsers)
            read.add((setting, tool if reasoning == "none" else reasoning))
        except ConfigError as error:
            refused[setting, tool if reasoning == "none" else reasoning] = str(error)
    lacking = {name for (_setting, name), problem in refused.items() if "No module named" in problem}
    assert lacking <= {"cohere_command3", "cohere_command4"}, refused
    assert {("tool_parser", name) for name in ("hermes", "qwen3_coder", "gemma4", "glm45")} <= read
    assert {("reasoning_parser", name) for name in ("qwen3", "gemma4", "glm45")} <= read


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "names", "malformed"),
    [
        (LOOK, ["look"], 0),
        ("hello", [], 0),
        (BAD, [], 1),
        (f"{BAD} no, {BAD}", [], 2),
        ('<tool_call>{"name": "look", "arguments": {"where": "<tool_call>"}}</tool_call>', ["look"], 0),
    ],
)
def test_a_malformed_call_is_counted_under_hermes_too(vllm_parsers, text, names, malformed):
    how = reply_format(word_piece(CALLS), "hermes", "none", parsers=vllm_parsers)
    said = how.read_calls(text, PROBE_TOOLS)
    assert ([call.name for call in said.calls], said.malformed) == (names, malformed)
    assert names or said.content == text
