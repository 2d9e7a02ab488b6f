"""A reply that comes in parts says what the whole reply says; each part is given as soon as nothing can change it, for its own time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import text_of, tokenizer
from test_text_stream import TEXTS, TOKENIZERS

from rollout_svc import replies
from rollout_svc.replies import MARKERS, ReplyFormat, ReplyReader, Said, read_json_calls, split_thinking
from rollout_svc.tokenizer import MAX_QUICK_TOKENS, ModelTokenizer
from sluice.v1 import rollout_pb2, tokens_pb2

LOOK = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'
FORMATS = {
    "calls and reasoning": ReplyFormat("json", "think", read_json_calls, split_thinking),
    "calls": ReplyFormat("json", "none", read_json_calls, None),
    "reasoning": ReplyFormat("none", "think", None, split_thinking),
    "neither": ReplyFormat(),
}
"""Replies as the templates of known models write them."""

PIECES = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", LOOK, LOOK[:30], "<", "</", "<t", "<tool", "</tool_call", "</thin"),
    *(" ", "\n", "\n\n", " \n ", "a", "so ", "é", "🙂", "{", '{"name": "f"}', "\u2003", "\ufffd", "<think"),
]  # fmt: skip


def offered() -> list[dict[str, Any]]:
    """The tools of a request."""
    return [{"type": "function", "function": {"name": "look"}}]


texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=24).map("".join)


def in_parts(how: ReplyFormat, parts: Sequence[str], *, opened: bool, tools: bool = True) -> list[tuple[str, str]]:
    """What each part of a reply tells."""
    reader = ReplyReader(how, offered if tools else None, opened=opened)
    told = [reader.after(part, last=at == len(parts) - 1) for at, part in enumerate(parts)]
    reasoning, said = reader.read()
    assert "".join(part for part, _ in told) == reasoning
    assert "".join(part for _, part in told) == said.content
    return told


def cut(text: str, places: Sequence[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def whole_thinking(text: str, opened: bool) -> tuple[str, str]:
    """Reasoning and the rest, from the whole text."""
    if not opened:
        before, mark, text_after = text.partition("<think>")
        if not mark or before.strip():
            return "", text
        text = text_after
    reasoning, mark, rest = text.partition("</think>")
    return reasoning.strip("\n"), rest.lstrip("\n") if mark else ""


def whole_calls(text: str) -> tuple[str, list[str], int]:
    """Content, names of the calls and how many are malformed, from the whole text."""
    outside, names, malformed, done, at = [], [], 0, 0, 0
    while (start := text.find("<tool_call>", at)) >= 0:
        at = start + len("<tool_call>")
        end = text.find("</tool_call>", at)
        call = replies._json_call(text[at : len(text) if end < 0 else end])
        if call is None:
            malformed += 1
            continue
        names.append(call.name)
        outside.append(text[done:start])
        done = at = len(text) if end < 0 else end + len("</tool_call>")
    outside.append(text[done:])
    if not names:
        return text, names, malformed
    first = outside[0].rstrip()
    kept = [first] * bool(first) + [part.strip() for part in outside[1:] if part.strip()]
    return "\n".join(kept), names, malformed


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=100)
@given(text=texts, places=st.lists(st.integers(0, 300), max_size=12), opened=st.booleans(), tools=st.booleans())
def test_the_parts_joined_are_what_the_whole_reply_says(name, text, places, opened, tools):
    how = FORMATS[name]
    reasoning, rest = whole_thinking(text, opened) if how.read_reasoning is not None else ("", text)
    content, names, malformed = whole_calls(rest) if tools and how.read_calls is not None else (rest, [], 0)
    for parts in ([text], cut(text, places), list(text) or [""]):
        reader = ReplyReader(how, offered if tools else None, opened=opened)
        told = [reader.after(part, last=at == len(parts) - 1) for at, part in enumerate(parts)]
        assert "".join(part for part, _ in told) == reasoning
        assert "".join(part for _, part in told) == content
        first_content = next((at for at, (_, part) in enumerate(told) if part), len(told))
        assert not any(part for part, _ in told[first_content + 1 :]), "reasoning comes first"
        read = reader.read()
        assert (read[0], read[1].content) == (reasoning, content)
        assert ([call.name for call in read[1].calls], read[1].malformed) == (names, malformed)


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        (["Hello", " there", "."], ["Hello", " there", "."]),
        (["Hello ", "there"], ["Hello", " there"]),
        (["a <", "b"], ["a", " <b"]),
        (["a <too", "l", "s>"], ["a", "", " <tools>"]),
        (["a ", LOOK, " b", " c"], ["a", "", "\nb", " c"]),
        (["a\n", LOOK[:20], LOOK[20:], "\n", LOOK, "\n"], ["a", "", "", "", "", ""]),
        (["<tool_call>", "no", "</tool_", "call> b"], ["", "", "", "<tool_call>no</tool_call> b"]),
        (["\n ", "a"], ["", "\n a"]),
        (["a", "  "], ["a", "  "]),
    ],
)
def test_content_is_told_as_soon_as_it_is_known(parts, told):
    assert [content for _, content in in_parts(FORMATS["calls"], parts, opened=False)] == told


@pytest.mark.parametrize(
    ("parts", "opened", "told"),
    [
        (["Hel", "lo"], False, [("", "Hel"), ("", "lo")]),
        (["<thi", "nk>", "so", "</think>", "\n", "\nyes"], False, [("", ""), ("", ""), ("so", ""), *[("", "")] * 2, ("", "yes")]),
        (["<th", "ose"], False, [("", ""), ("", "<those")]),
        (["\nso\n", "\nit <", "/think>no"], True, [("so", ""), ("\n\nit ", ""), ("", "no")]),
        (["so <", " a", "\n"], True, [("so ", ""), ("< a", ""), ("", "")]),
        (["so", " <tool_call>"], True, [("so", ""), (" <tool_call>", "")]),
    ],
)  # fmt: skip
def test_reasoning_is_told_as_soon_as_it_is_known(parts, opened, told):
    assert in_parts(FORMATS["calls and reasoning"], parts, opened=opened) == told


def test_without_tools_nothing_that_looks_like_a_call_is_held_back():
    assert in_parts(FORMATS["calls"], ["a <tool_call>", "{"], opened=False, tools=False) == [
        ("", "a <tool_call>"),
        ("", "{"),
    ]


def test_what_a_parser_of_the_engines_library_reads_is_told_at_the_end():
    def foreign(text: str, tools: object) -> Said:
        return Said(text.upper())

    how = ReplyFormat("theirs", "think", foreign, split_thinking, None)
    reader = ReplyReader(how, offered, opened=True)
    assert [reader.after(part, last=False) for part in ("so", "</think>a", "b")] == [("so", ""), ("", ""), ("", "")]
    assert reader.after("c", last=True) == ("", "")
    assert reader.read() == ("so", Said("ABC"))
    assert in_parts(how, ["a", "b"], opened=False, tools=False) == [("", "a"), ("", "b")]


@pytest.mark.parametrize(
    "piece", ["word ", "<", "\n", "<tool_call>", "</tool_call>", "<tool_call>{</tool_call>", LOOK, "</think>", "x"]
)
@pytest.mark.parametrize("begin", ["", "<think>", "<tool_call>"])
def test_a_part_costs_time_for_its_own_length(piece, begin, monkeypatch):
    """The text that is searched again, and that is read as a call, is at most a fixed number of times the reply."""
    searched = 0
    overlap, json_call = replies.overlap, replies._json_call

    def counting_overlap(text: str, mark: str) -> int:
        nonlocal searched
        searched += len(text)
        return overlap(text, mark)

    def counting_call(text: str) -> replies.Call | None:
        nonlocal searched
        searched += len(text)
        return json_call(text)

    monkeypatch.setattr(replies, "overlap", counting_overlap)
    monkeypatch.setattr(replies, "_json_call", counting_call)
    text = begin + piece * (20_000 // len(piece))
    reader = ReplyReader(FORMATS["calls and reasoning"], offered, opened=False)
    longest = 0
    for at in range(0, len(text), 4):
        reader.after(text[at : at + 4], last=False)
        held = [*vars(reader._thinking).values(), *vars(reader._calls).values()]
        longest = max(longest, *(len(each) for each in held if isinstance(each, str)))
    reader.after("", last=True)
    assert longest < len("</tool_call>"), "so much is searched again with each part"
    # A text that opens calls and never ends one is read once for each of the first 256.
    assert searched < (30 + replies.MAX_CALLS * (piece == "<tool_call>" or begin == "<tool_call>")) * len(text)


SPEAKING = {
    20: LOOK,
    21: "<tool_call>{look",
    22: "<think>",
    23: "</think>",
    24: "<tool",
    25: "_call>",
    26: "\n",
    27: " ",
}


def speaking() -> Any:
    """A tokenizer with marks as tokens, some of them special."""
    model = tokenizer(SPEAKING)
    model.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<|turn|>"]})
    return model


MODELS = {"marks as tokens": speaking(), **TOKENIZERS}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kept", [MARKERS, None])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
async def test_tokens_in_parts_say_what_all_of_them_say(name, kept, data):
    model = MODELS[name]
    how = FORMATS[data.draw(st.sampled_from(sorted(FORMATS)))]
    prompts = ModelTokenizer(
        model, ReplyFormat(how.tool_parser, how.reasoning_parser, how.read_calls, how.read_reasoning, kept)
    )
    size = len(model)
    some = st.lists(st.integers(0, size - 1), max_size=30)
    few = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4))
    written = st.sampled_from([model.encode(text, add_special_tokens=False) for text in [*TEXTS, *PIECES]])
    marks = st.lists(st.sampled_from([*(each for each in SPEAKING if each < size), size - 1]), max_size=12)
    runs = st.lists(
        st.one_of(some, st.lists(st.sampled_from(few), max_size=20), written, marks), min_size=1, max_size=5
    )
    ids = [id_ for run in data.draw(runs) for id_ in run]
    request = rollout_pb2.GenerateRequest(conversation=tokens_pb2.Conversation(tools=[tokens_pb2.Tool(name="look")]))
    before = model.encode("<think>", add_special_tokens=False) if data.draw(st.booleans()) else [3]
    whole = await prompts.message_of(request, "r/0", before, ids)
    reply = prompts.reply_stream(request, before)
    reasoning, content, start = "", "", 0
    while True:
        end = start + data.draw(st.integers(0, 7))
        more = await reply.after(ids[start:end], last=end >= len(ids))
        reasoning, content, start = reasoning + more[0], content + more[1], end
        if end >= len(ids):
            break
    assert prompts.message("r/0", reply) == whole
    assert (reasoning, content) == (whole.reasoning, whole.content)


async def test_parsers_of_the_engines_library_read_special_tokens_except_those_that_end_the_reply():
    model = MODELS["marks as tokens"]
    how = ReplyFormat("theirs", "none", lambda text, _: Said(text), None, None)
    end = model.convert_tokens_to_ids("<|turn|>")
    request = rollout_pb2.GenerateRequest()
    for tools in ([], [tokens_pb2.Tool(name="look")]):
        request.conversation.tools.extend(tools)
        reply = ModelTokenizer(model, how).reply_stream(request, [3])
        told = [await reply.after([id_], last=False) for id_ in (30, end, 31, end)]
        told.append(await reply.after([end], last=True))
        whole = f"{text_of([30])}<|turn|>{text_of([31])}"
        early = [text_of([30]), "", f"<|turn|>{text_of([31])}", "", ""]
        assert [content for _, content in told] == (["", "", "", "", whole] if tools else early)
        assert reply.said == Said(whole)


async def test_a_long_reply_gives_others_a_turn():
    model = MODELS["marks as tokens"]
    prompts = ModelTokenizer(model, FORMATS["neither"])
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    others = asyncio.create_task(other())
    message = await prompts.message_of(rollout_pb2.GenerateRequest(), "r/0", [3], [30] * (3 * MAX_QUICK_TOKENS))
    others.cancel()
    assert message.content == text_of([30]) * (3 * MAX_QUICK_TOKENS)
    assert turns == 2
