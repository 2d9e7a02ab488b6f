"""What clients put together from a stream is the whole response, in every dialect, wherever the reply is cut."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_openai_shapes import STOPS, stopped
from test_reply_parts import FORMATS, PIECES, cut, offered

from rollout_svc.http import Events
from rollout_svc.replies import ReplyReader
from sluice.openai import chat, messages, responses
from sluice.openai.answers import Begun, Delta, MessageFilter, Result, StopStringFilter, TextDeltas, visible_message
from sluice.v1 import rollout_pb2, tokens_pb2

STOP, LENGTH = tokens_pb2.FINISH_REASON_STOP, tokens_pb2.FINISH_REASON_LENGTH
USER: Any = [{"role": "user", "content": "Where?"}]


@dataclass
class Sampled:
    """A sample as a replica streams it: messages with one delta each, and the whole."""

    stops: list[str]
    deltas: list[rollout_pb2.SampleDelta]
    whole: rollout_pb2.GeneratedSample

    @property
    def result(self) -> Result:
        result = Result(prompt_token_ids=[5])
        result.generations.add(generation_id="r/0", message=visible_message(self.whole, "r/0"), sample=self.whole)
        return result

    def shown(self) -> list[Delta]:
        texts = TextDeltas(self.stops, of_messages=True)
        return [more for each in self.deltas for more in texts.of(rollout_pb2.StreamChunk(deltas=[each]))]


@st.composite
def samples(draw: Any) -> Sampled:
    text = "".join(draw(st.lists(st.sampled_from(PIECES) | st.text("ab", max_size=3), max_size=16)))
    stops = draw(STOPS | st.lists(st.sampled_from(["\n", "a\nb", "</think>", " a", "so"]), max_size=2))
    least = draw(st.just(0) | st.integers(0, 20))  # no string ends a sample before min_tokens
    sampled, stop = stopped(text[least:], stops)
    text = text[:least] + sampled
    how = FORMATS[draw(st.sampled_from(sorted(FORMATS)))]
    tools = offered if draw(st.booleans()) else None
    reader = ReplyReader(how, tools, opened=draw(st.booleans()))
    parts = cut(text, draw(st.lists(st.integers(0, 200), max_size=12)))
    deltas = []
    for at, part in enumerate(parts):
        reasoning, content = reader.after(part, last=at == len(parts) - 1)
        tokens = rollout_pb2.GeneratedSample(text=part)
        deltas.append(rollout_pb2.SampleDelta(reasoning=reasoning, content=content, tokens=tokens))
    reasoning, said = reader.read()
    whole = rollout_pb2.GeneratedSample(text=text, stop_string=stop, finish_reason=STOP if stop else LENGTH)
    whole.message.MergeFrom(tokens_pb2.ChatMessage(role="assistant", reasoning=reasoning, content=said.content))
    for number, call in enumerate(said.calls):
        whole.message.tool_calls.add(id=f"call_{number}", name=call.name, arguments=call.arguments)
    last = deltas[-1].tokens
    last.stop_string, last.finish_reason = whole.stop_string, whole.finish_reason
    last.message.CopyFrom(whole.message)
    return Sampled(stops, deltas, whole)


def events_of(reply: Any, sampled: Sampled) -> list[dict[str, Any]]:
    """The events of a stream of a gateway."""

    def sent() -> Iterator[bytes]:
        yield from reply.opening(Begun("r", 1))
        for delta in sampled.shown():
            yield from reply.text(delta)
        yield from reply.ending(sampled.result)

    lines = b"".join(sent()).decode().split("\n")
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


@given(samples())
def test_what_is_shown_early_begins_what_the_message_says(sampled):
    message = visible_message(sampled.whole, "r/0")
    reasoning, content = "", ""
    for delta in sampled.shown():
        assert not (delta.reasoning and content), "reasoning comes first"
        reasoning, content = reasoning + delta.reasoning, content + delta.content
    assert (reasoning, content) == (message.reasoning, message.content)


def together(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message of Chat Completions, as clients put it together, and why it ended."""
    found: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": None}
    for chunk in chunks:
        choice = chunk["choices"][0]
        found["content"] += choice["delta"].get("content") or ""
        found["reasoning_content"] += choice["delta"].get("reasoning_content") or ""
        for call in choice["delta"].get("tool_calls", []):
            assert call["index"] == len(found["tool_calls"])
            found["tool_calls"].append({name: value for name, value in call.items() if name != "index"})
        found["finish_reason"] = choice["finish_reason"] or found["finish_reason"]
    return found


def whole_choice(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice["message"]
    fields: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    return {name: message.get(name) or other for name, other in fields.items()} | {
        "finish_reason": choice["finish_reason"]
    }


@given(samples())
def test_chat_completions_of_a_gateway(sampled):
    body = chat.ChatBody(messages=USER)
    (choice,) = chat.ChatReply(body).whole(sampled.result)["choices"]
    assert together(events_of(chat.ChatReply(body), sampled)) == whole_choice(choice)


@given(samples())
def test_messages_of_a_gateway(sampled):
    body = messages.MessagesBody(messages=USER, max_tokens=9)
    whole = messages.MessagesReply(body).whole(sampled.result)
    content: list[dict[str, Any]] = []
    for event in events_of(messages.MessagesReply(body), sampled):
        if event["type"] == "content_block_start":
            assert event["index"] == len(content)
            content.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = content[event["index"]], event["delta"]
            assert event["index"] == len(content) - 1, "a block ends before the next one begins"
            if delta["type"] == "input_json_delta":
                block["input"] = json.loads(delta["partial_json"])
            else:
                block[delta["type"].removesuffix("_delta")] += delta[delta["type"].removesuffix("_delta")]
        elif event["type"] == "message_delta":
            reasons = event["delta"]
    assert content == whole["content"]
    assert reasons == {name: whole[name] for name in ("stop_reason", "stop_sequence")}


@given(samples())
def test_responses_of_a_gateway(sampled):
    body = responses.ResponsesBody(input="Where?")
    reply = responses.ResponsesReply(body)
    whole = reply.whole(sampled.result)
    events = events_of(responses.ResponsesReply(body), sampled)
    last = events[-1]["response"]
    assert last | {"created_at": 0} == whole | {"created_at": 0}
    for kind, name in (("reasoning_text", "reasoning"), ("output_text", "message")):
        told = "".join(each["delta"] for each in events if each["type"] == f"response.{kind}.delta")
        assert told == "".join(each["content"][0]["text"] for each in whole["output"] if each["type"] == name)


@pytest.mark.parametrize("tools", [True, False])
@given(sampled=samples())
async def test_chat_completions_of_a_replica(tools, sampled):
    body = chat.StrictChatBody(messages=USER, tools=offered() if tools else None, stop=sampled.stops[:4] or None)
    if not tools:
        for each in (sampled.whole, *(delta.tokens for delta in sampled.deltas)):
            each.ClearField("message")
    whole = chat.ChatReply(body, "m", str).choice(0, sampled.whole, visible_message(sampled.whole, "r/0"), [5])

    async def stream() -> AsyncGenerator[tuple[int, rollout_pb2.GenerateStreamResponse], None]:
        yield 0, rollout_pb2.GenerateStreamResponse(opening=rollout_pb2.StreamOpening(prompt_token_ids=[5]))
        for delta in sampled.deltas:
            yield 0, rollout_pb2.GenerateStreamResponse(chunk=rollout_pb2.StreamChunk(deltas=[delta]))

    request = chat.parse(body).generate
    request.return_message = tools
    events = [each async for each in Events(chat.ChatReply(body, "m", str), request).encode([], stream())]
    chunks = [json.loads(each.removeprefix(b"data: ")) for each in events[:-1]]
    assert together(chunks) == whole_choice(whole)


def test_the_end_of_the_reasoning_is_shown_when_the_content_begins():
    visible = MessageFilter(["\nUser:"])
    assert visible.after("so\n", "", "", last=False) == ("so", "")
    assert visible.after("", "yes\nU", "", last=False) == ("\n", "yes")
    assert visible.after("", "ser:", "\nUser:", last=True) == ("", "")


def test_what_follows_a_stop_string_before_the_end_is_held_back():
    """The texts before and after a call are joined by a line feed, and the sample went on to another one."""
    visible = StopStringFilter(["a\nb"])
    assert [visible.after(text, "", last=False) for text in ("x a", "\nb", " more")] == ["x ", "", ""]
    assert visible.after(" a\nb", "a\nb", last=True) == ""
    visible = StopStringFilter(["a\nb"])
    assert [visible.after(text, "", last=False) for text in ("x a", "\nb", " more")] == ["x ", "", ""]
    assert visible.after(".", "", last=True) == "a\nb more."


def test_content_waits_for_reasoning_that_a_stop_string_may_cut():
    visible = MessageFilter(["STOP"])
    assert visible.after("so STOP and", "", "", last=False) == ("so ", "")
    assert visible.after("", "yes", "", last=False) == ("", "")
    assert visible.after("", ".", "", last=True) == ("STOP and", "yes.")


def test_white_space_before_calls_alone_is_no_block_of_a_message():
    reply = messages.MessagesReply(messages.MessagesBody(messages=USER, max_tokens=9))
    assert b"".join(reply.text(Delta(0, " \n"))) == b""
    message = tokens_pb2.ChatMessage(content=" \n", tool_calls=[{"id": "c", "name": "look", "arguments": "{}"}])
    result = Result()
    result.generations.add(message=message)
    ended = b"".join(reply.ending(result))
    assert b'"tool_use"' in ended
    assert b'"text_delta"' not in ended
    another = messages.MessagesReply(messages.MessagesBody(messages=USER, max_tokens=9))
    assert b"".join(another.text(Delta(0, " \n"))) == b""
    assert b'"text":" \\nyes"' in b"".join(another.text(Delta(0, "yes")))
