"""What a page in the user's browser, or a client that sends nonsense, cannot do to a replica."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai_dialect import PROMPT, USER, http_client, refusal
from rollout_stack import Replica, running_engine
from small_models import save_model
from transformers import AutoTokenizer

from sluice.config import SecurityConfig

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUTES = ["/reload_weights", "/update_weights", "/v1/completions", "/v1/chat/completions"]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 1},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 1},
}
TEMPLATE = (
    "{%- for message in messages -%}{{ 'Ċ' ~ message.content }}{%- endfor -%}"
    "{%- if enable_thinking -%}ĉĉ{%- endif -%}{%- if add_generation_prompt -%}ĉ{%- endif -%}"
)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_model(tmp_path_factory.mktemp("thinking") / "small", 1)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(thinking):
    async with running_engine(thinking) as engine, Replica(thinking, engine) as started:
        yield started


async def post(url: str, path: str, **headers: str) -> httpx.Response:
    content = json.dumps(BODIES.get(path, {})).encode()
    async with http_client() as http:
        return await http.post(
            url + path, content=content, headers={"content-type": "application/json"} | headers, timeout=60
        )


class TestBrowsers:
    @pytest.mark.parametrize("path", ROUTES)
    @pytest.mark.parametrize("origin", ["https://evil.example", "http://127.0.0.1.evil.example", "null", "http://[::"])
    async def test_a_page_of_another_site_is_refused(self, replica, path, origin):
        response = await post(replica.url, path, origin=origin)
        assert (response.status_code, response.json()["error"]["code"]) == (403, "ORIGIN_NOT_ALLOWED")

    @pytest.mark.parametrize("path", ROUTES)
    @pytest.mark.parametrize("host", ["evil.example", "evil.example:7113", "127.0.0.1.evil.example", "[", ""])
    async def test_a_name_that_was_rebound_to_this_machine_is_refused(self, replica, path, host):
        response = await post(replica.url, path, host=host, origin=f"http://{host}")
        assert (response.status_code, response.json()["error"]["code"]) == (403, "HOST_NOT_ALLOWED")

    async def test_a_rebound_name_cannot_read_either(self, replica):
        async with http_client() as http:
            response = await http.get(f"{replica.url}/v1/models", headers={"host": "evil.example"})
        assert response.status_code == 403

    @pytest.mark.parametrize("path", ROUTES)
    @pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
    async def test_what_a_form_can_send_is_refused(self, replica, path, kind):
        response = await post(replica.url, path, **{"content-type": kind})
        assert (response.status_code, response.json()["error"]["code"]) == (415, "JSON_REQUIRED")

    @pytest.mark.parametrize("host", ["localhost", "127.0.0.1:7113", "[::1]:7113", "127.8.8.8"])
    async def test_programs_and_pages_of_this_machine_are_served(self, replica, host):
        response = await post(replica.url, "/v1/completions", host=host, origin=f"http://{host}")
        assert response.status_code == 200

    async def test_a_token_protects_whatever_the_name(self, model, engine, tmp_path):
        (tmp_path / "admin").write_text("admin")
        async with Replica(model, engine, SecurityConfig(admin_token_file=tmp_path / "admin")) as served:
            known = await post(served.url, "/reload_weights", host="replica.example", authorization="Bearer admin")
            unknown = await post(served.url, "/reload_weights", host="replica.example", origin="https://evil.example")
        assert (known.status_code, unknown.status_code) == (200, 401)


class TestTemplateArguments:
    @pytest.mark.parametrize(
        "arguments",
        [
            {"chat_template": "{{ 7 * 7 }}"},
            {"continue_final_message": True},
            {"tokenize": True, "return_dict": True},
            {"messages": []},
            {"tools": [{}]},
            {"add_generation_prompt": False},
            {"eos_token": "x"},
            {"raise_exception": 1},
            {"unheard_of": 1, "enable_thinking": True},
        ],
    )
    async def test_only_variables_of_the_models_template_can_be_set(self, served, arguments):
        body = BODIES["/v1/chat/completions"] | {"chat_template_kwargs": arguments}
        error = await refusal(served, "/v1/chat/completions", body)
        assert error["param"] == "chat_template_kwargs"
        assert "takes enable_thinking" in error["message"]

    async def test_a_variable_of_the_template_is_set(self, served):
        body = BODIES["/v1/chat/completions"] | {
            "return_token_ids": True,
            "chat_template_kwargs": {"enable_thinking": True},
        }
        async with http_client() as http:
            response = await http.post(f"{served.url}/v1/chat/completions", json=body)
        assert response.json()["prompt_token_ids"][-3:] == [9, 9, 9]

    @pytest.mark.parametrize(
        ("more", "param"),
        [
            ({"chat_template_kwargs": {"enable_thinking": "x" * 100_000}}, "chat_template_kwargs"),
            ({"chat_template_kwargs": {"enable_thinking": [0] * 70_000}}, "chat_template_kwargs"),
            ({"tools": [{"type": "function", "function": {"name": "x" * 2_000_000}}]}, "tools"),
            ({"messages": [{"role": "user"}] * 20_000}, "messages"),
        ],
    )
    async def test_large_conversations_are_refused(self, served, more, param):
        error = await refusal(served, "/v1/chat/completions", BODIES["/v1/chat/completions"] | more)
        assert error["param"] == param

    @pytest.mark.parametrize("levels", [20, 200, 900, 100_000])
    async def test_deep_arguments_are_refused(self, served, levels):
        deep = '{"a":' * levels + "1" + "}" * levels
        body = '{"messages":[{"role":"user","content":"x"}],"max_tokens":1,"chat_template_kwargs":' + deep + "}"
        async with http_client() as http:
            response = await http.post(
                f"{served.url}/v1/chat/completions", content=body, headers={"content-type": "application/json"}
            )
        assert response.status_code == 400, response.text


ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5),
    st.sampled_from([[], {}, [[]], {"a": float("nan")}, {"chat_template": "x"}, "\ud800", 1e300, -1e300, 1e39, 2**31, "a\0b"]),
    st.dictionaries(st.text(max_size=3), st.floats() | st.integers() | st.none(), max_size=2),
    st.lists(st.integers(-2, 2**33) | st.text(max_size=2) | st.floats(), max_size=3),
)  # fmt: skip
NAMES = [
    "n", "temperature", "top_p", "top_k", "min_p", "stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias",
    "repetition_penalty", "stop_token_ids", "ignore_eos", "priority", "stream", "stream_options", "logprobs", "model",
    "top_logprobs", "tools", "chat_template_kwargs", "messages", "prompt", "best_of", "max_tokens", "tool_choice", "metadata",
]  # fmt: skip
CHANGES = st.dictionaries(st.sampled_from(NAMES), ODD, min_size=1, max_size=3)
PARTS = st.dictionaries(
    st.sampled_from(["role", "content", "tool_calls", "name", "tool_call_id", "x"]), ODD, max_size=4
)
FUNCTIONS = st.dictionaries(st.sampled_from(["name", "description", "parameters", "strict"]), ODD, max_size=3)
TOOLS = st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTIONS})
FUZZ = settings(
    max_examples=150, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


class TestNonsense:
    """Whatever the fields hold, the answer is a result or says what is wrong with the request; it is never a failure of the server."""

    async def check(self, replica: Replica, path: str, body: dict[str, Any]) -> None:
        async with http_client() as http:
            response = await http.post(
                replica.url + path,
                content=json.dumps(body).encode(),
                headers={"content-type": "application/json"},
                timeout=60,
            )
        assert response.status_code in {200, 400, 404, 413, 429}, f"{body}: {response.text}"

    @pytest.mark.slow
    @FUZZ
    @given(changes=CHANGES)
    async def test_odd_values_of_a_chat(self, replica, changes):
        await self.check(replica, "/v1/chat/completions", {"messages": USER, "max_tokens": 1} | changes)

    @pytest.mark.slow
    @FUZZ
    @given(changes=CHANGES)
    async def test_odd_values_of_a_completion(self, replica, changes):
        await self.check(replica, "/v1/completions", {"prompt": PROMPT, "max_tokens": 1} | changes)

    @pytest.mark.slow
    @FUZZ
    @given(messages=st.lists(PARTS, max_size=3), tools=st.lists(TOOLS, max_size=2))
    async def test_odd_messages_and_tools(self, replica, messages, tools):
        await self.check(replica, "/v1/chat/completions", {"messages": messages, "max_tokens": 1, "tools": tools})
        messages = [{"role": "user", "content": "x"} | message for message in messages]
        await self.check(replica, "/v1/chat/completions", {"messages": messages, "max_tokens": 1, "tools": tools})
