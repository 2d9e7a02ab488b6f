"""What of a sampled text a reader of the OpenAI dialect sees, and what its parameters become."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.openai import chat
from sluice.openai.answers import StopStringFilter
from sluice.openai.chat import StrictChatBody, chat_logprobs
from sluice.openai.completions import StrictCompletionBody, completion_logprobs, parse_each
from sluice.v1 import rollout_pb2, tokens_pb2

STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)
PARTS = st.lists(st.text("abc", max_size=4), min_size=1, max_size=8)


def stopped(text: str, stops: list[str]) -> tuple[str, str]:
    """Return the part of a text that an engine samples, and the stop string that ended it."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[:end], stop
    return text, ""


@given(PARTS, STOPS)
def test_a_stream_shows_what_the_whole_answer_shows(parts, stops):
    sampled, stop = stopped("".join(parts), stops)
    visible = StopStringFilter(stops)
    shown, given = "", 0
    for part in parts:
        new = sampled[given : given + len(part)]
        given += len(new)
        last = given == len(sampled)
        shown += visible.after(new, stop if last else "", last=last)
        assert not any(each in shown for each in stops)
        if last:
            break
    assert shown == StopStringFilter(stops).after(sampled, stop, last=True)


def test_text_that_begins_no_stop_string_is_shown_at_once():
    assert StopStringFilter(["xyz"]).after("abx", "", last=False) == "ab"
    assert StopStringFilter([]).after("abx", "", last=False) == "abx"


def test_impossible_tokens_have_a_logprob_that_json_can_say():
    sample = rollout_pb2.GeneratedSample(
        token_ids=[1],
        logprobs=[float("-inf")],
        top_logprobs=[tokens_pb2.TopLogprobs(ids=[1, 2], logprobs=[float("-inf"), -1.0])],
    )
    entry = chat_logprobs(sample, str)["content"][0]
    assert (entry["logprob"], [each["logprob"] for each in entry["top_logprobs"]]) == (-9999.0, [-9999.0, -1.0])
    told, end = completion_logprobs(sample, str, 5)
    assert (told["token_logprobs"], told["top_logprobs"], told["text_offset"]) == (
        [-9999.0],
        [{"1": -9999.0, "2": -1.0}],
        [5],
    )
    assert end == 6


def test_a_part_of_a_character_has_no_bytes():
    sample = rollout_pb2.GeneratedSample(token_ids=[1], logprobs=[-1.0])
    assert chat_logprobs(sample, lambda _: "\N{REPLACEMENT CHARACTER}")["content"][0]["bytes"] is None


def test_parameters_become_those_of_the_contract():
    body = StrictChatBody.model_validate(
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": None, "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "1", "content": "done"},
            ],
            "max_completion_tokens": 5, "temperature": 0.0, "top_k": -1, "stop": "x", "n": 3, "seed": 0,
            "logprobs": True, "top_logprobs": 2, "logit_bias": {"7": -100}, "chat_template_kwargs": {"enable_thinking": False},
        }
    )  # fmt: skip
    request = chat.parse(body).generate
    sampling = request.sampling
    assert (request.n, sampling.max_tokens, sampling.top_k, list(sampling.stop)) == (3, 5, 0, ["x"])
    assert sampling.HasField("temperature")
    assert sampling.HasField("seed")
    assert not sampling.HasField("top_p")
    assert (sampling.top_logprobs, dict(sampling.logit_bias)) == (2, {7: -100.0})
    messages = request.conversation.messages
    assert (messages[1].tool_calls[0].name, messages[2].tool_call_id) == ("f", "1")
    assert request.conversation.template_arguments["enable_thinking"] is False


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("ab", ["ab"]), ([5, 6], [[5, 6]]), (["a", "b"], ["a", "b"]), ([[5], [6, 7]], [[5], [6, 7]])],
)
def test_each_prompt_is_a_request_of_its_own(prompt, expected):
    asked = parse_each(StrictCompletionBody.model_validate({"prompt": prompt}))
    requests = [each.generate for each in asked]
    assert [each.text or list(each.token_ids.ids) for each in requests] == expected
    assert {each.sampling.max_tokens for each in requests} == {16}
