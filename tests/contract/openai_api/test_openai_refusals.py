"""What the OpenAI dialect refuses, and to whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio
from openai_dialect import PROMPT, USER, chat, client_of, http_client, refusal
from rollout_stack import Replica, until
from small_models import CONTEXT, VOCABULARY, text_of

from rollout_svc.config import LimitsConfig
from sluice.config import SecurityConfig

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
            ({"messages": [{"role": "user", "content": text_of([20] * CONTEXT)}]}, "messages"),
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
            ({"prompt": text_of([20] * CONTEXT)}, "prompt"),
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
        async with http_client() as http:
            response = await http.post(
                f"{replica.url}/v1/completions", content=content, headers={"content-type": "application/json"}
            )
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"

    async def test_an_unknown_path_or_method_is_told_in_the_same_shape(self, replica):
        async with http_client() as http:
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

        async with http_client() as http:
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

    @pytest.mark.slow
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
        async with http_client() as http:
            response = await http.post(guarded.url + path, json={"prompt": PROMPT, "max_tokens": 1}, headers=headers)
        assert response.status_code == status
        assert status == 200 or response.json()["error"]["code"] in {"TOKEN_REQUIRED", "ROLE_REQUIRED"}

    async def test_the_client_raises_its_own_errors(self, guarded):
        async with client_of(guarded, "stranger") as client:
            with pytest.raises(openai.AuthenticationError):
                await chat(client)

    async def test_health_is_open_and_metrics_are_not(self, guarded):
        async with http_client() as http:
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
        async with Replica(model, engine, max_requests=1) as busy, client_of(busy) as client, http_client() as http:
            async with busy.frozen():
                waiting = asyncio.create_task(chat(client))
                await until(lambda: busy.servicer.samples == 1)
                response = await http.get(f"{busy.url}/v1/models")
                assert (response.status_code, response.headers["retry-after"]) == (429, "1")
                assert (await http.get(f"{busy.url}/health")).status_code == 200
            await waiting
