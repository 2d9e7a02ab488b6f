"""The OpenAI dialect, seen by OpenAI's own client."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import socket
import ssl
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from certificates import Authority
from rollout_stack import Replica, build_engine, running_engine, save_chat_model, until
from small_models import CONTEXT, EOS, VOCABULARY, greedy, text_of

from rollout_svc.config import LimitsConfig
from rollout_svc.openai_api import HttpServer
from sluice.config import ConfigError, SecurityConfig

pytestmark = pytest.mark.asyncio(loop_scope="module")

USER = [{"role": "user", "content": text_of([20, 30, 40])}]
CHAT_PROMPT = [10, 20, 30, 40, 9]
PROMPT = [5, 9, 17, 33, 64]
TOKENS = 12

ROUNDING = 1e-5
"""Log-probabilities differ in their last bits with what else is in the batch."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("openai") / "small")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model):
    async with running_engine(model) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica(model, engine):
    async with Replica(model, engine) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(replica):
    async with client_of(replica) as made:
        yield made


def client_of(replica: Replica, key: str = "none", timeout: float = 30.0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{replica.url}/v1", api_key=key, max_retries=0, timeout=timeout)


def chat(client: openai.AsyncOpenAI, **more: Any) -> Any:
    given = {"model": "small", "messages": USER, "max_tokens": TOKENS, "temperature": 0.0}
    return client.chat.completions.create(**(given | more))


def complete(client: openai.AsyncOpenAI, **more: Any) -> Any:
    given = {"model": "small", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0.0}
    return client.completions.create(**(given | more))


def visible(ids: list[int]) -> str:
    return text_of([id_ for id_ in ids if id_ > EOS])


IDS = {"return_token_ids": True}
PAST_THE_END = {"ignore_eos": True}


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
        async with httpx.AsyncClient() as http:
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


class TestRefusals:
    @pytest.mark.parametrize(
        ("more", "param"),
        [
            ({"temperature": -1}, "temperature"),
            ({"top_p": 0}, "top_p"),
            ({"n": 0}, "n"),
            ({"n": 1000}, "n"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"presence_penalty": 3}, "presence_penalty"),
            ({"logit_bias": {"5": 1000}}, "logit_bias"),
            ({"stop": [""]}, "stop"),
            ({"seed": -1}, "seed"),
            ({"messages": []}, "messages"),
            ({"messages": [{"role": "pirate", "content": "x"}]}, "messages"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
            ({"messages": [{"role": "user", "content": text_of([20] * CONTEXT)}]}, "prompt"),
            ({"top_logprobs": 2}, "top_logprobs"),
            ({"response_format": {"type": "json_object"}}, "response_format.type"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"functions": []}, "functions"),
            ({"reasoning_effort": "low"}, "reasoning_effort"),
            ({"no_such_parameter": None}, "no_such_parameter"),
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_bad_parameter_is_named(self, replica, more, param, stream):
        body = {"messages": USER, "max_tokens": 2} | more
        error = await refusal(replica, "/v1/chat/completions", body | {"stream": stream})
        assert error["type"] == "invalid_request_error"
        assert error["param"].partition("[")[0] == param
        assert error["message"]

    async def test_stream_options_need_a_stream(self, replica):
        body = {"messages": USER, "stream_options": {"include_usage": True}}
        error = await refusal(replica, "/v1/chat/completions", body)
        assert error["param"] == "stream_options"

    @pytest.mark.parametrize(
        ("more", "param"),
        [
            ({"prompt": []}, "prompt"),
            ({"prompt": [[]]}, "prompt"),
            ({"prompt": ""}, "prompt"),
            ({"prompt": [VOCABULARY]}, "prompt"),
            ({"prompt": [-1]}, "prompt"),
            ({"prompt": [2**40]}, "prompt"),
            ({"prompt": ["x", [5]]}, "prompt"),
            ({"logprobs": 50}, "logprobs"),
            ({"logit_bias": {str(VOCABULARY): 1}}, None),
            ({"echo": True}, "echo"),
            ({"suffix": "x"}, "suffix"),
            ({"best_of": 3}, "best_of"),
        ],
    )
    async def test_a_bad_completion_is_refused(self, replica, more, param):
        error = await refusal(replica, "/v1/completions", {"prompt": PROMPT, "max_tokens": 2} | more)
        assert (error["param"] or "").split("[")[0] == (param or "")

    async def test_the_client_raises_its_own_error(self, client):
        with pytest.raises(openai.BadRequestError) as caught:
            await chat(client, temperature=-1)
        assert (caught.value.param, caught.value.code) == ("temperature", "INVALID_REQUEST")

    async def test_what_describes_the_caller_is_taken_and_ignored(self, client):
        await chat(client, user="me", metadata={"a": "b"}, store=False, service_tier="auto", max_tokens=1)

    async def test_a_model_that_is_not_served_is_not_found(self, client):
        with pytest.raises(openai.NotFoundError, match="small"):
            await chat(client, model="gpt-x")

    @pytest.mark.parametrize("content", [b"{", b"", b"[]", b"\xff\xfe", b'"text"', b'{"prompt": "\\ud800"}'])
    async def test_what_is_not_a_json_object_is_refused(self, replica, content):
        async with httpx.AsyncClient() as http:
            response = await http.post(
                f"{replica.url}/v1/completions", content=content, headers={"content-type": "application/json"}
            )
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"

    async def test_an_unknown_path_or_method_is_told_in_the_same_shape(self, replica):
        async with httpx.AsyncClient() as http:
            missing = await http.get(f"{replica.url}/v1/embeddings")
            wrong = await http.get(f"{replica.url}/v1/completions")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "UNKNOWN_PATH")
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "METHOD_NOT_ALLOWED")

    @pytest.mark.parametrize("declared", [True, False])
    async def test_a_body_beyond_the_limit_is_cut_off(self, replica, declared):
        body = b'{"prompt": "' + b"x" * (5 << 20) + b'"}'

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 1 << 16):
                yield body[start : start + (1 << 16)]

        async with httpx.AsyncClient() as http:
            response = await http.post(
                f"{replica.url}/v1/completions",
                content=body if declared else pieces(),
                headers={"content-type": "application/json"},
            )
        assert (response.status_code, response.json()["error"]["code"]) == (413, "BODY_TOO_LARGE")


class TestRoles:
    @pytest_asyncio.fixture(loop_scope="module")
    async def guarded(self, model, engine, tmp_path):
        for name in ("agent", "admin"):
            (tmp_path / name).write_text(name)
        security = SecurityConfig(token_file=tmp_path / "agent", admin_token_file=tmp_path / "admin")
        async with Replica(model, engine, security) as served:
            yield served

    @pytest.mark.parametrize(
        ("path", "key", "status"),
        [
            ("/v1/completions", None, 401),
            ("/v1/completions", "stranger", 401),
            ("/v1/completions", "agent", 200),
            ("/v1/completions", "admin", 200),
            ("/reload_weights", None, 401),
            ("/reload_weights", "agent", 403),
            ("/reload_weights", "admin", 200),
            ("/reload_weights%0A", "agent", 403),
            ("/update_weights", "agent", 403),
            ("/nowhere", None, 401),
            ("/openapi.json", None, 401),
        ],
    )
    async def test_a_path_asks_for_its_role(self, guarded, path, key, status):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient() as http:
            response = await http.post(guarded.url + path, json={"prompt": PROMPT, "max_tokens": 1}, headers=headers)
        assert response.status_code == status
        assert status == 200 or response.json()["error"]["code"] in {"TOKEN_REQUIRED", "ADMIN_REQUIRED"}

    async def test_the_client_raises_its_own_errors(self, guarded):
        async with client_of(guarded, "stranger") as client:
            with pytest.raises(openai.AuthenticationError):
                await chat(client)

    async def test_health_is_open_and_metrics_are_not(self, guarded):
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"{guarded.url}/health")).status_code == 200
            assert (await http.get(f"{guarded.url}/metrics")).status_code == 401
            assert (await http.get(f"{guarded.url}/v1/models")).status_code == 401


class TestLoad:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_full_queue_answers_429_and_when_to_retry(self, model, engine, stream):
        async with Replica(model, engine, limits=LimitsConfig(max_queued=2)) as full, client_of(full) as client:
            async with full.frozen():
                waiting = asyncio.create_task(chat(client, n=2))
                await until(lambda: full.servicer.samples == 2)
                with pytest.raises(openai.RateLimitError) as caught:
                    await chat(client, stream=stream)
                assert caught.value.response.headers["retry-after"] == "1"
                assert caught.value.code == "QUEUE_FULL"
                refused_whole = await refusal(full, "/v1/completions", {"prompt": [[5], [6], [7]]}, status=429)
                assert refused_whole["code"] == "QUEUE_FULL"
                assert full.servicer.samples == 2
            assert len((await waiting).choices) == 2

    async def test_requests_beyond_the_limit_are_refused_but_health_is_not(self, model, engine):
        async with (
            Replica(model, engine, max_requests=1) as busy,
            client_of(busy) as client,
            httpx.AsyncClient() as http,
        ):
            async with busy.frozen():
                waiting = asyncio.create_task(chat(client))
                await until(lambda: busy.servicer.samples == 1)
                response = await http.get(f"{busy.url}/v1/models")
                assert (response.status_code, response.headers["retry-after"]) == (429, "1")
                assert (await http.get(f"{busy.url}/health")).status_code == 200
            await waiting


class TestLeaving:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("prompt", [PROMPT, [[5], [6], [7]]], ids=["one prompt", "three prompts"])
    async def test_a_client_that_leaves_before_the_first_token_ends_its_sampling(self, replica, client, stream, prompt):
        async with replica.frozen():
            call = asyncio.create_task(complete(client, prompt=prompt, stream=stream))
            await until(lambda: replica.servicer.samples == (1 if prompt is PROMPT else 3))
            call.cancel()
            await replica.until_idle()
        with pytest.raises(asyncio.CancelledError):
            await call

    async def test_a_reader_that_leaves_within_a_stream_ends_its_sampling(self, replica, client):
        stream = await complete(client, prompt=[PROMPT, [6]], n=2, max_tokens=480, stream=True, extra_body=PAST_THE_END)
        async for _ in stream:
            break
        async with replica.frozen():
            assert replica.servicer.samples == 4
            await stream.close()
            await replica.until_idle()

    async def test_the_next_request_is_served(self, replica, client):
        assert (await chat(client, max_tokens=2)).usage.completion_tokens <= 2


class TestDescription:
    async def test_lists_the_model(self, client, model):
        listed = await client.models.list()
        assert [(each.id, each.object, each.max_model_len) for each in listed.data] == [(str(model), "model", CONTEXT)]
        assert (await client.models.retrieve("small")).id == str(model)
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")

    async def test_health_tells_the_version(self, replica):
        async with httpx.AsyncClient() as http:
            response = await http.get(f"{replica.url}/health")
        assert (response.status_code, response.json()) == (200, {"status": "ok", "version": "0.0"})

    async def test_a_dead_engine_is_told(self, model):
        engine = build_engine(model)
        await engine.start()
        async with Replica(model, engine) as served, client_of(served) as client, httpx.AsyncClient() as http:
            await engine.stop()
            assert (await http.get(f"{served.url}/health")).status_code == 503
            with pytest.raises(openai.InternalServerError) as caught:
                await chat(client)
            assert (caught.value.status_code, caught.value.code) == (503, "ENGINE_RECOVERING")
            assert "retry-after" in caught.value.response.headers

    async def test_metrics_count_requests_by_path_and_status(self, replica, client):
        with pytest.raises(openai.BadRequestError):
            await chat(client, temperature=-1)
        async with httpx.AsyncClient() as http:
            await http.get(f"{replica.url}/secret/path")
            metrics = (await http.get(f"{replica.url}/metrics")).text
        assert 'sluice_rpc_total{code="400",method="/v1/chat/completions",service="openai"}' in metrics
        assert "secret" not in metrics

    async def test_every_response_names_its_request(self, replica):
        async with httpx.AsyncClient() as http:
            first = await http.get(f"{replica.url}/health")
            second = await http.get(f"{replica.url}/nowhere", headers={"x-request-id": "mine"})
            body = {"prompt": PROMPT, "max_tokens": 1, "stream": True}
            third = await http.post(f"{replica.url}/v1/completions", json=body, headers={"x-request-id": "x" * 500})
        assert len(first.headers["x-request-id"]) == 32
        assert second.headers["x-request-id"] == "mine"
        assert third.headers["x-request-id"] == "x" * 128


class TestWeights:
    async def test_reload_returns_to_the_base(self, replica):
        async with httpx.AsyncClient() as http:
            response = await http.post(f"{replica.url}/reload_weights")
        assert (response.status_code, response.json()) == (200, {"version": "0.0"})

    @pytest.mark.parametrize("version", ["", "1", "1.x", "-1.2", 5])
    async def test_a_version_has_two_numbers(self, replica, version):
        error = await refusal(replica, "/update_weights", {"version": version})
        assert error["param"] == "version"

    @pytest.mark.parametrize("content", [b"", b"{}", b'{"version": "1.5"}'])
    async def test_a_replica_that_follows_nobody_says_so(self, replica, content):
        async with httpx.AsyncClient() as http:
            response = await http.post(
                f"{replica.url}/update_weights", content=content, headers={"content-type": "application/json"}
            )
        assert response.status_code == 400
        assert "follow_weights" in response.json()["error"]["message"]


class TestServer:
    async def test_requests_under_way_end_within_the_drain(self, model, engine):
        async with Replica(model, engine) as served, client_of(served) as client:
            async with served.frozen():
                waiting = asyncio.create_task(chat(client, extra_body=PAST_THE_END))
                await until(lambda: served.servicer.samples == 1)
                stopping = asyncio.create_task(served.http.stop(30))
                await until(lambda: not accepts(served.http_port))
            assert (await waiting).usage.completion_tokens == TOKENS
            await stopping

    async def test_requests_that_outlive_the_drain_are_cancelled(self, model, engine):
        async with Replica(model, engine) as served, client_of(served) as client, served.frozen():
            waiting = asyncio.create_task(chat(client))
            await until(lambda: served.servicer.samples == 1)
            await served.http.stop(0)
            assert served.servicer.samples == 0
            with pytest.raises(openai.APIError):
                await waiting

    async def test_a_taken_port_is_an_error_with_a_remedy(self, replica):
        async def app(*_: Any) -> None: ...

        with pytest.raises(ConfigError, match="http_port"):
            await HttpServer(app, "127.0.0.1", replica.http_port, SecurityConfig()).start()

    async def test_an_open_address_needs_protection(self):
        async def app(*_: Any) -> None: ...

        with pytest.raises(ConfigError, match="insecure"):
            HttpServer(app, "0.0.0.0", 0, SecurityConfig())

    async def test_serves_tls(self, model, engine, tmp_path):
        authority = Authority(tmp_path / "authority")
        certificate, key = authority.issue("server")
        security = SecurityConfig(tls_cert=certificate, tls_key=key, tls_ca=authority.path)
        async with Replica(model, engine, security) as served:
            context = ssl.create_default_context(cafile=str(authority.path))
            async with httpx.AsyncClient(verify=context) as http:
                response = await http.get(f"https://127.0.0.1:{served.http_port}/health")
            assert response.status_code == 200


def accepts(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            return True
    except OSError:
        return False


async def refusal(replica: Replica, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """The error that a request is answered with."""
    async with httpx.AsyncClient() as http:
        response = await http.post(replica.url + path, json=body)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def joined(parts: Iterable[list[Any]]) -> list[Any]:
    """One list of several."""
    return list(itertools.chain.from_iterable(parts))


def stop_in(ids: list[int]) -> tuple[str, list[int], list[int]]:
    """A stop string of two tokens in a continuation, the tokens up to its end, and those before it."""
    at = next(i for i in range(3, len(ids) - 1) if min(ids[i : i + 2]) > EOS and ids[i : i + 2] != ids[i - 1 : i + 1])
    stop = text_of(ids[at : at + 2])
    at = visible(ids).index(stop)
    return stop, ids[: at + 2], ids[:at]


VOCABULARY_TEXTS = ["<pad>", "<end>", *(chr(256 + id_) for id_ in range(2, VOCABULARY))]
