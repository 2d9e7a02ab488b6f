"""What clients send that have no library here: Anthropic's dialect event by event, the first requests of coding CLIs, token ids."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from memory_sessions import prompt_ids

from sluice.v1 import tokens_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "additionalProperties": False}
TOOLS = [{"name": "look", "description": "Look.", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}]
QUESTION: dict[str, Any] = {"role": "user", "content": "Where is it?"}


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream; the name of each, where it has one, is its type."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    events = []
    for block in response.text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        if fields:
            events.append(json.loads(fields["data"]))
            assert fields.get("event", events[-1].get("type")) == events[-1].get("type")
    return events


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream, as a client puts it together."""
    message = dict(events[0]["message"])
    inputs: dict[int, str] = {}
    for event in events:
        kind = event["type"]
        if kind == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"] = [*message["content"], dict(event["content_block"])]
        elif kind == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif kind == "message_delta":
            message |= event["delta"]
            message["usage"] = event["usage"]
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    return message


class TestMessages:
    BODY = {"model": "any", "max_tokens": 100, "system": "Be brief.", "messages": [QUESTION], "tools": TOOLS}  # noqa: RUF012 - not changed

    @pytest.mark.parametrize("streamed", [False, True])
    async def test_a_tool_is_called_and_its_result_continues_the_turn(self, gateway, streamed):
        messages: list[dict[str, Any]] = [QUESTION]
        async with gateway.http() as http:
            for _ in range(2):
                response = await http.post("/v1/messages", json=self.BODY | {"messages": messages, "stream": streamed})
                reply = assembled(events_of(response)) if streamed else response.json()
                calls = [block for block in reply["content"] if block["type"] == "tool_use"]
                results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "a cat"} for call in calls]
                messages += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": results}]
                assert reply["stop_reason"] == ("tool_use" if calls else "end_turn")
        assert [block["type"] for block in reply["content"]] == ["thinking", "text"]
        assert reply["content"][1]["text"] == "It said a cat."
        first, second = gateway.session.generations.values()
        assert second.prompt[: len(first.prompt + first.sampled)] == first.prompt + first.sampled
        assert reply["usage"] == {"input_tokens": len(second.prompt), "output_tokens": len(second.sampled)}

    async def test_the_events_of_a_stream(self, gateway):
        async with gateway.http() as http:
            response = await http.post("/v1/messages", json=self.BODY | {"stream": True})
        kinds = [event["type"] for event in events_of(response)]
        block = ["content_block_start", "content_block_delta", "content_block_stop"]
        thinking = ["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"]
        assert kinds == ["message_start", "ping", *thinking, *block, "message_delta", "message_stop"]

    async def test_text_is_sent_as_it_comes_and_once(self, gateway):
        async with gateway.http() as http:
            response = await http.post("/v1/messages", json=self.BODY | {"stream": True, "tools": None})
        deltas = [event["delta"]["text"] for event in events_of(response) if event["type"] == "content_block_delta"]
        assert deltas == ["Yo", "u said: Where is it?"]

    async def test_arguments_that_are_no_object_survive(self, gateway):
        calls = [
            tokens_pb2.ToolCall(id=f"c{n}", name="look", arguments=text) for n, text in enumerate(["{", "[1]", ""])
        ]
        gateway.sessions.say = lambda _: tokens_pb2.ChatMessage(role="assistant", tool_calls=calls)
        async with gateway.http() as http:
            reply = (await http.post("/v1/messages", json=self.BODY)).json()
            again = [QUESTION, {"role": "assistant", "content": reply["content"]}, QUESTION]
            await http.post("/v1/messages", json=self.BODY | {"messages": again})
        _, second = gateway.session.generations.values()
        assert second.parent, "the reply that came back is the one that was given"
        arguments = [call.arguments for call in second.conversation.messages[2].tool_calls]
        assert arguments == ["{", "[1]", "{}"]

    @pytest.mark.parametrize(
        ("source", "said"),
        [
            ({"type": "text", "media_type": "text/plain", "data": "the text"}, "Look:\nthe text"),
            ({"type": "content", "content": "the text"}, "Look:\nthe text"),
            (
                {"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                "Look:\na\nb",
            ),
            ({"type": "base64", "media_type": "application/pdf", "data": "cGRm"}, "Look:"),
            ({"type": "url", "url": "http://example.com"}, "Look:"),
        ],
    )
    async def test_a_document_with_a_text_is_its_text(self, gateway, source, said):
        content = [{"type": "text", "text": "Look:"}, {"type": "document", "title": "T", "source": source}]
        async with gateway.http() as http:
            await http.post("/v1/messages", json=self.BODY | {"messages": [{"role": "user", "content": content}]})
        (request,) = gateway.session.requests
        assert request.generate.conversation.messages[1].content == said
        assert (("left_out", "block.document") in request.notices) == (said == "Look:")

    async def test_an_image_is_a_part_and_a_document_without_a_text_is_left_out(self, gateway):
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "cG5n"}}
        content = [
            {"type": "text", "text": "Look:"},
            image,
            {"type": "document", "source": {"type": "base64", "data": "cGRm"}},
        ]
        async with gateway.http() as http:
            messages = [{"role": "user", "content": content}]
            await http.post("/v1/messages", json=self.BODY | {"messages": messages})
            remote = [{"type": "image", "source": {"type": "url", "url": "http://example.com"}}]
            refused = await http.post(
                "/v1/messages", json=self.BODY | {"messages": [{"role": "user", "content": remote}]}
            )
        (request,) = gateway.session.requests
        parts = request.generate.conversation.messages[1].parts
        assert [part.WhichOneof("part") for part in parts] == ["text", "image"]
        assert parts[1].image == b"png"
        assert ("left_out", "block.document") in request.notices
        assert (refused.status_code, "base64" in refused.text) == (400, True)

    async def test_tokens_are_counted_as_they_are_sampled(self, gateway):
        async with gateway.http() as http:
            counted = await http.post(
                "/v1/messages/count_tokens", json={k: v for k, v in self.BODY.items() if k != "max_tokens"}
            )
            await http.post("/v1/messages", json=self.BODY)
        (generation,) = gateway.session.generations.values()
        assert counted.json() == {"input_tokens": len(generation.prompt)}


def anthropic_cli(turn: int) -> dict[str, Any]:
    """A request of Anthropic's coding CLI: its system prompt says something else each time, its history is written anew."""
    cached = {"cache_control": {"type": "ephemeral"}}
    reminder = {"type": "text", "text": "<system-reminder>Today is Monday.</system-reminder>"}
    first = {"type": "text", "text": "Where is it?"}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [reminder, first | cached if turn == 1 else first]},
        {"role": "system", "content": "Mode: plan."},
    ]
    return {
        "model": "any-model-name",
        "max_tokens": 32000,
        "stream": True,
        "metadata": {"user_id": "u"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "system": [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch=0000{turn};"},
            {"type": "text", "text": "You are a coding agent. " * 900, **cached},
        ],
        "tools": [{"name": f"tool_{n}", "description": "d" * 1500, "input_schema": SCHEMA} for n in range(12)],
        "messages": messages,
    }


async def test_the_first_turns_of_anthropics_coding_cli(gateway):
    async with gateway.http(authorization="", **{"x-api-key": gateway.session.key}) as http:
        url = "/v1/messages?beta=true"
        first = assembled(events_of(await http.post(url, json=anthropic_cli(1))))
        body = anthropic_cli(2)
        call = next(block for block in first["content"] if block["type"] == "tool_use")
        result = {
            "type": "tool_result",
            "tool_use_id": call["id"],
            "content": [{"type": "text", "text": "a cat"}],
            "is_error": False,
        }
        body["messages"] += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
        second = assembled(events_of(await http.post(url, json=body)))
    assert [block["type"] for block in second["content"]] == ["thinking", "text"]
    one, two = gateway.session.generations.values()
    assert two.prompt[: len(one.prompt + one.sampled)] == one.prompt + one.sampled
    (request, _) = gateway.session.requests
    assert {what for kind, what in request.notices if kind == "ignored"} == {
        "metadata",
        "thinking",
        "context_management",
        "output_config",
    }
    assert [message.role for message in request.generate.conversation.messages] == ["system", "user", "system"]
    assert request.generate.sampling.max_tokens == 32000


async def test_the_first_turns_of_openais_coding_cli(gateway):
    def message(role: str, text: str) -> dict[str, Any]:
        return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}

    body: dict[str, Any] = {
        "model": "any-model-name",
        "instructions": "You are a coding agent. " * 900,
        "input": [
            message("developer", "<permissions>"),
            message("user", "<environment>"),
            message("user", "Where is it?"),
        ],
        "tools": [
            {"type": "function", "name": "shell", "description": "d", "strict": False, "parameters": SCHEMA},
            {
                "type": "namespace",
                "name": "files",
                "tools": [{"type": "function", "name": "read", "parameters": SCHEMA}],
            },
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "text": {"verbosity": "low"},
    }
    async with gateway.http() as http:
        events = events_of(await http.post("/v1/responses", json=body))
        items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        for item in items:
            item.pop("id")
        assert items[0]["encrypted_content"]
        items[0].pop("content")
        call = items[-1]
        body["input"] += [*items, {"type": "function_call_output", "call_id": call["call_id"], "output": "a cat"}]
        last = events_of(await http.post("/v1/responses", json=body))[-1]
    assert (last["type"], last["response"]["output"][-1]["content"][0]["text"]) == (
        "response.completed",
        "It said a cat.",
    )
    one, two = gateway.session.generations.values()
    assert two.prompt[: len(one.prompt + one.sampled)] == one.prompt + one.sampled
    (request, _) = gateway.session.requests
    assert {("left_out", "tool.namespace"), ("left_out", "tool.web_search"), ("ignored", "store")} <= set(
        request.notices
    )
    assert [each.role for each in request.generate.conversation.messages] == ["system", "system", "user", "user"]


async def test_token_ids_in_and_out(gateway):
    """As the training client of verifiers sends it."""
    conversation = tokens_pb2.Conversation(messages=[tokens_pb2.ChatMessage(role="user", content="Hello")])
    ids = prompt_ids(conversation)
    sampling = {
        "temperature": 1.0,
        "max_tokens": 32,
        "stop_token_ids": [2],
        "logprobs": 1,
        "skip_special_tokens": False,
    }
    async with gateway.http() as http:
        models = (await http.get("/v1/models")).json()
        body = {"model": "toy", "token_ids": ids, "sampling_params": sampling, "cache_salt": "1"}
        reply = (await http.post("/inference/v1/generate", json=body)).json()
        (choice,) = reply["choices"]
        more = {"model": "toy", "token_ids": [*ids, *choice["token_ids"], 7], "sampling_params": sampling}
        await http.post("/inference/v1/generate", json=more)
    assert models["data"][0]["max_model_len"] == 200_000
    first, second = gateway.session.generations.values()
    assert choice["token_ids"] == first.sampled
    content = choice["logprobs"]["content"]
    assert [(each["token"], each["token_id"]) for each in content] == [(f"token_id:{t}", t) for t in first.sampled]
    assert f"{reply['request_id']}/0" == second.parent == choice["generation_id"]
    (request, _) = gateway.session.requests
    assert (request.generate.sampling.max_tokens, list(request.generate.sampling.stop_token_ids)) == (32, [2])
    assert not request.not_trained
    assert ("ignored", "cache_salt") in request.notices
