"""Answers of the OpenAI dialect, seen by OpenAI's own client."""

from __future__ import annotations

import json
import math

import openai
import pytest
from openai_dialect import (
    CHAT_PROMPT,
    IDS,
    PAST_THE_END,
    PROMPT,
    ROUNDING,
    TOKENS,
    USER,
    VOCABULARY_TEXTS,
    chat,
    complete,
    http_client,
    joined,
    stop_in,
    visible,
)
from small_models import CONTEXT, EOS, VOCABULARY, greedy, text_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


class TestChat:
    async def test_answers_with_what_the_model_says(self, client, model):
        answer = await chat(client, extra_body=PAST_THE_END)
        expected = greedy(model, CHAT_PROMPT, TOKENS)
        choice = answer.choices[0]
        assert (choice.index, choice.message.role, choice.finish_reason) == (0, "assistant", "length")
        assert choice.message.content == visible(expected)
        assert (answer.object, answer.model) == ("chat.completion", str(model))
        assert answer.id.startswith("chatcmpl-")
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, TOKENS, 5 + TOKENS)

    async def test_content_may_come_in_text_parts(self, client):
        parts = [{"type": "text", "text": text_of([20])}, {"type": "text", "text": text_of([30, 40])}]
        answer = await chat(client, messages=[{"role": "user", "content": parts}], extra_body=IDS)
        assert answer.prompt_token_ids == CHAT_PROMPT

    async def test_a_message_comes_back_as_the_client_library_writes_it(self, client):
        said = (await chat(client)).choices[0].message.model_dump()
        assert said["annotations"] is said["audio"] is said["function_call"] is None
        messages = [*USER, said | {"annotations": []}, *USER]
        bare = [*USER, {"role": "assistant", "content": said["content"]}, *USER]
        prompts = [(await chat(client, messages=each, extra_body=IDS)).prompt_token_ids for each in (messages, bare)]
        assert prompts[0] == prompts[1]

    async def test_gives_token_ids_and_the_versions_that_sampled_them(self, client, model):
        answer = await chat(client, extra_body=IDS | PAST_THE_END)
        assert answer.prompt_token_ids == CHAT_PROMPT
        assert answer.choices[0].token_ids == greedy(model, CHAT_PROMPT, TOKENS)
        assert answer.choices[0].version_spans == [{"start": 0, "version": "0.0"}]

    async def test_leaves_token_ids_out_unless_they_are_wanted(self, client):
        answer = (await chat(client)).model_dump()
        assert "prompt_token_ids" not in answer
        assert not {"token_ids", "version_spans"} & answer["choices"][0].keys()

    async def test_logprobs_have_one_entry_per_token(self, client):
        answer = await chat(client, logprobs=True, top_logprobs=3, extra_body=IDS | PAST_THE_END)
        entries = answer.choices[0].logprobs.content
        assert [VOCABULARY_TEXTS[id_] for id_ in answer.choices[0].token_ids] == [each.token for each in entries]
        for entry in entries:
            assert bytes(entry.bytes).decode() == entry.token
            assert len(entry.top_logprobs) == 3
            assert entry.top_logprobs[0].token == entry.token  # greedy
            assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)
            assert -math.log(VOCABULARY) < entry.logprob < 0

    async def test_logprobs_come_without_alternatives(self, client):
        answer = await chat(client, logprobs=True)
        assert all(each.top_logprobs == [] for each in answer.choices[0].logprobs.content)

    async def test_max_completion_tokens_bounds_the_answer(self, client):
        answer = await chat(client, max_tokens=openai.omit, max_completion_tokens=3, extra_body=PAST_THE_END)
        assert answer.usage.completion_tokens == 3

    @pytest.mark.slow
    async def test_without_a_limit_the_context_is_the_limit(self, client):
        answer = await chat(client, max_tokens=openai.omit, extra_body=PAST_THE_END)
        assert answer.usage.total_tokens == CONTEXT

    async def test_tools_reach_the_template_unless_none_is_to_be_chosen(self, client):
        tools = [{"type": "function", "function": {"name": text_of([50, 60]), "parameters": {"type": "object"}}}]
        offered = await chat(client, tools=tools, tool_choice="auto", extra_body=IDS)
        assert offered.prompt_token_ids == [50, 60, *CHAT_PROMPT]
        withheld = await chat(client, tools=tools, tool_choice="none", extra_body=IDS)
        assert withheld.prompt_token_ids == CHAT_PROMPT

    async def test_n_samples_have_their_indices(self, client):
        answer = await chat(client, n=4, temperature=1.0, seed=7, extra_body=IDS | PAST_THE_END)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert len({tuple(choice.token_ids) for choice in answer.choices}) == 4
        again = await chat(client, n=4, temperature=1.0, seed=7)
        assert [each.message.content for each in again.choices] == [each.message.content for each in answer.choices]

    async def test_a_stop_string_is_left_out_of_the_text_and_kept_in_the_tokens(self, client, model):
        stop, ids, before = stop_in(greedy(model, CHAT_PROMPT, TOKENS))
        answer = await chat(client, stop=stop, extra_body=IDS | PAST_THE_END)
        choice = answer.choices[0]
        assert (choice.message.content, choice.finish_reason, choice.stop_reason) == (visible(before), "stop", stop)
        assert choice.token_ids == ids

    async def test_logit_bias_forces_a_token(self, client):
        answer = await chat(client, logit_bias={"77": 100}, extra_body=IDS | PAST_THE_END)
        assert answer.choices[0].token_ids == [77] * TOKENS


class TestChatStream:
    async def test_equals_the_whole_answer(self, client):
        asked = {"n": 2, "logprobs": True, "top_logprobs": 2, "extra_body": IDS | PAST_THE_END}
        whole = await chat(client, **asked)
        chunks = [chunk async for chunk in await chat(client, stream=True, **asked)]
        assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", "assistant"]
        assert chunks[0].prompt_token_ids == whole.prompt_token_ids
        assert {chunk.id for chunk in chunks} == {chunks[0].id}
        for expected in whole.choices:
            parts = [chunk.choices[0] for chunk in chunks[2:] if chunk.choices[0].index == expected.index]
            assert "".join(part.delta.content or "" for part in parts) == expected.message.content
            assert joined(part.token_ids for part in parts) == expected.token_ids
            entries = joined(part.logprobs.content for part in parts)
            assert [each.token for each in entries] == [each.token for each in expected.logprobs.content]
            logprobs = [each.logprob for each in expected.logprobs.content]
            assert [each.logprob for each in entries] == pytest.approx(logprobs, abs=ROUNDING)
            assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [expected.finish_reason]
            assert {each["version"] for part in parts for each in part.version_spans} == {"0.0"}

    async def test_holds_a_stop_string_back(self, client, model):
        stop, ids, before = stop_in(greedy(model, CHAT_PROMPT, TOKENS))
        stream = await chat(client, stop=[stop, "never"], stream=True, extra_body=IDS | PAST_THE_END)
        parts = [chunk.choices[0] async for chunk in stream][1:]
        assert "".join(part.delta.content or "" for part in parts) == visible(before)
        assert joined(part.token_ids for part in parts) == ids
        assert parts[-1].stop_reason == stop

    async def test_ends_with_the_usage_where_it_is_wanted(self, client):
        stream = await chat(client, n=2, stream=True, stream_options={"include_usage": True}, extra_body=PAST_THE_END)
        chunks = [chunk async for chunk in stream]
        assert all(chunk.usage is None for chunk in chunks[:-1])
        assert chunks[-1].choices == []
        assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (5, 2 * TOKENS)

    async def test_events_follow_the_format(self, replica):
        body = {"messages": USER, "max_tokens": 2, "stream": True}
        async with http_client() as http:
            response = await http.post(f"{replica.url}/v1/chat/completions", json=body)
        assert response.headers["content-type"].startswith("text/event-stream")
        events = response.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        for event in events[:-2]:
            assert json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk"


class TestCompletions:
    @pytest.mark.parametrize(
        "prompt", [text_of(PROMPT), PROMPT, [text_of(PROMPT)], [PROMPT]], ids=["text", "ids", "texts", "lists of ids"]
    )
    async def test_takes_every_form_of_prompt(self, client, model, prompt):
        answer = await complete(client, prompt=prompt, extra_body=IDS | PAST_THE_END)
        assert answer.object == "text_completion"
        assert answer.choices[0].prompt_token_ids == PROMPT
        assert answer.choices[0].token_ids == greedy(model, PROMPT, TOKENS)
        assert answer.choices[0].text == visible(answer.choices[0].token_ids)

    async def test_choices_of_several_prompts_follow_each_other(self, client):
        prompts = [[5, 6], [7, 8, 9], [10]]
        answer = await complete(client, prompt=prompts, n=2, temperature=1.0, extra_body=IDS | PAST_THE_END)
        assert [choice.index for choice in answer.choices] == list(range(6))
        assert [choice.prompt_token_ids for choice in answer.choices] == [each for each in prompts for _ in range(2)]
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 6 * TOKENS)

    async def test_a_stream_of_several_prompts_equals_the_whole_answer(self, client):
        asked = {"prompt": [[5, 6], [7, 8, 9]], "n": 2, "logprobs": 1, "extra_body": IDS | PAST_THE_END}
        whole = await complete(client, **asked)
        parts = [chunk.choices[0] async for chunk in await complete(client, stream=True, **asked)]
        for expected in whole.choices:
            mine = [part for part in parts if part.index == expected.index]
            assert "".join(part.text for part in mine) == expected.text
            assert joined(part.token_ids for part in mine) == expected.token_ids
            assert joined(part.logprobs.text_offset for part in mine) == expected.logprobs.text_offset
            logprobs = joined(part.logprobs.token_logprobs for part in mine)
            assert logprobs == pytest.approx(expected.logprobs.token_logprobs, abs=ROUNDING)
            assert mine[0].prompt_token_ids == expected.prompt_token_ids

    async def test_logprobs_have_the_old_shape(self, client):
        answer = await complete(client, logprobs=2, temperature=1.0, seed=3, extra_body=IDS | PAST_THE_END)
        told, ids = answer.choices[0].logprobs, answer.choices[0].token_ids
        assert told.tokens == [VOCABULARY_TEXTS[id_] for id_ in ids]
        assert len(told.token_logprobs) == len(told.text_offset) == TOKENS
        for token, logprob, top in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
            assert top[token] == pytest.approx(logprob)
            assert 2 <= len(top) <= 3

    async def test_without_a_limit_there_are_sixteen_tokens(self, client):
        answer = await complete(client, max_tokens=openai.omit, extra_body=PAST_THE_END)
        assert answer.usage.completion_tokens == 16

    async def test_an_end_token_ends_the_text_and_is_not_shown(self, client):
        answer = await complete(client, logit_bias={str(EOS): 100}, extra_body=IDS)
        choice = answer.choices[0]
        assert (choice.text, choice.token_ids, choice.finish_reason) == ("", [EOS], "stop")
