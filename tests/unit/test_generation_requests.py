"""What is wrong with a request is told before the engine sees it, all of it at once."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import Any

import grpc
import pytest
from simulated_clock import LIMIT_S, SimulatedClock
from tiny_policy import TINY

from rollout_svc.engines.base import ModelInfo, Sampling
from rollout_svc.servicer import generation_request, sampling_of
from rollout_svc.tokenizer import LARGE_BYTES, RENDER_DEADLINE_S, RENDER_THREADS, ModelTokenizer, tenant_of
from sluice.cli.init_model import character_tokenizer
from sluice.rpc import MAX_SAMPLES, SluiceError, access
from sluice.rpc.principals import Principal, Quota
from sluice.tool_schemas import tool_dict
from sluice.v1 import rollout_pb2, tokens_pb2

INFO = ModelInfo("model", "Qwen3ForCausalLM", 100, 32, "float32", (1,), "test")
PROMPT = [5, 6, 7]


def request(**sampling: Any) -> rollout_pb2.GenerateRequest:
    return rollout_pb2.GenerateRequest(sampling=tokens_pb2.SamplingParams(**sampling))


def violations(wire: rollout_pb2.GenerateRequest, prompt: list[int] | None = None) -> dict[str, str]:
    with pytest.raises(SluiceError) as caught:
        generation_request(wire, PROMPT if prompt is None else prompt, INFO)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    return caught.value.violations


def test_what_is_unset_has_the_defaults_of_the_contract():
    assert sampling_of(tokens_pb2.SamplingParams()) == Sampling()
    asked = generation_request(rollout_pb2.GenerateRequest(), PROMPT, INFO)
    assert (asked.n, asked.priority, asked.prompt_logprobs) == (1, 0, False)
    assert len(asked.request_id) == 32


def test_what_is_set_arrives():
    wire = request(
        max_tokens=4, temperature=0.0, top_p=0.5, top_k=3, min_p=0.25, stop=["a"], stop_token_ids=[9], ignore_eos=True,
        seed=2**64 - 1, top_logprobs=2, presence_penalty=-2.0, frequency_penalty=2.0, repetition_penalty=1.5,
        min_tokens=4, logit_bias={99: -5.0},
    )  # fmt: skip
    wire.request_id, wire.n, wire.priority, wire.return_prompt_logprobs = "mine", MAX_SAMPLES, -3, True
    asked = generation_request(wire, PROMPT, INFO)
    assert asked.sampling == Sampling(
        max_tokens=4, temperature=0.0, top_p=0.5, top_k=3, min_p=0.25, stop=("a",), stop_token_ids=(9,), ignore_eos=True,
        seed=2**64 - 1, top_logprobs=2, presence_penalty=-2.0, frequency_penalty=2.0, repetition_penalty=1.5,
        min_tokens=4, logit_bias={99: -5.0},
    )  # fmt: skip
    assert (asked.request_id, asked.n, asked.priority, asked.prompt_logprobs) == ("mine", MAX_SAMPLES, -3, True)


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"temperature": -0.1}, "sampling.temperature"),
        ({"temperature": float("nan")}, "sampling.temperature"),
        ({"temperature": float("inf")}, "sampling.temperature"),
        ({"top_p": 0.0}, "sampling.top_p"),
        ({"top_p": 1.01}, "sampling.top_p"),
        ({"top_p": float("nan")}, "sampling.top_p"),
        ({"min_p": 1.5}, "sampling.min_p"),
        ({"top_logprobs": 21}, "sampling.top_logprobs"),
        ({"max_tokens": 0}, "sampling.max_tokens"),
        ({"max_tokens": 2, "min_tokens": 3}, "sampling.min_tokens"),
        ({"repetition_penalty": 0.0}, "sampling.repetition_penalty"),
        ({"presence_penalty": 2.1}, "sampling.presence_penalty"),
        ({"frequency_penalty": -2.1}, "sampling.frequency_penalty"),
        ({"stop": [""]}, "sampling.stop"),
        ({"stop": ["x"] * 65}, "sampling.stop"),
        ({"stop_token_ids": [100]}, "sampling"),
        ({"logit_bias": {100: 1.0}}, "sampling"),
    ],
)
def test_sampling_that_cannot_be_is_named(sampling, field):
    assert list(violations(request(**sampling))) == [field]


@pytest.mark.parametrize("prompt", [[], [5] * 32, [5, 100], [2**32 - 1]], ids=["empty", "long", "unknown", "huge"])
@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({"token_ids": tokens_pb2.TokenIds()}, "token_ids"),
        ({"text": "x"}, "text"),
        ({"conversation": tokens_pb2.Conversation()}, "conversation"),
    ],
)
def test_a_prompt_that_cannot_be_is_named_as_the_caller_sent_it(form, field, prompt):
    assert list(violations(rollout_pb2.GenerateRequest(**form), prompt)) == [field]


def test_everything_wrong_is_told_at_once():
    wire = request(temperature=-1.0, top_p=2.0)
    wire.n, wire.request_id = 0, "x" * 129
    assert set(violations(wire, [])) == {
        "request_id", "n", "prompt", "sampling.temperature", "sampling.top_p",
    }  # fmt: skip


def test_a_sample_continues_no_more_tokens_than_the_prompt_has():
    assert list(violations(rollout_pb2.GenerateRequest(continued_tokens=4))) == ["continued_tokens"]
    assert generation_request(rollout_pb2.GenerateRequest(continued_tokens=3), PROMPT, INFO).prompt_ids == PROMPT


def test_the_longest_prompt_leaves_room_for_one_token():
    assert len(generation_request(rollout_pb2.GenerateRequest(), [5] * 31, INFO).prompt_ids) == 31


def test_a_json_schema_reaches_the_template_the_same_way_every_time():
    schema = {
        "type": "object",
        "properties": {"zeta": {"maximum": 3, "minimum": 0.5}, "alpha": {}},
        "required": ["zeta"],
    }
    tool = tokens_pb2.Tool()
    tool.parameters.update(schema)
    for _ in range(3):
        tool = tokens_pb2.Tool.FromString(tool.SerializeToString())
        plain = tool_dict(tool)["function"]["parameters"]
        assert plain == schema
        assert list(plain) == ["properties", "required", "type"]
        assert repr(plain["properties"]) == "{'alpha': {}, 'zeta': {'maximum': 3, 'minimum': 0.5}}"


async def test_a_prompt_is_rendered_outside_of_the_event_loop(monkeypatch):
    prompts = ModelTokenizer(character_tokenizer(TINY))
    released = threading.Event()
    monkeypatch.setattr(prompts, "render", lambda _conversation, **_: [int(released.wait(LIMIT_S))])
    wire = rollout_pb2.GenerateRequest(conversation={"messages": [{"role": "user", "content": "x"}]})
    rendering = asyncio.create_task(prompts.prompt_of(wire))
    await asyncio.sleep(0)
    released.set()
    assert (await rendering).ids == [1]


async def test_a_conversation_that_was_rendered_before_is_not_rendered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = ModelTokenizer(character_tokenizer(TINY))
    monkeypatch.delattr(prompts.__class__, "render")
    conversation = {"messages": [{"role": "user", "content": "x"}]}
    wire = rollout_pb2.GenerateRequest(conversation=conversation, rendered={"ids": PROMPT}, continued_tokens=1)
    assert (await prompts.prompt_of(wire)).ids == PROMPT
    for other in ({"text": "x"}, {"conversation": conversation, "continues": {"token_ids": [1]}}):
        wrong = rollout_pb2.GenerateRequest(rendered={"ids": PROMPT}, **other)
        with pytest.raises(SluiceError, match="rendered"):
            await prompts.prompt_of(wrong)


async def test_prompts_that_hang_are_at_fault_and_do_not_hold_up_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimulatedClock()
    prompts = ModelTokenizer(character_tokenizer(TINY), clock=clock)
    released = threading.Event()

    def render(conversation: tokens_pb2.Conversation, **_: object) -> list[int]:
        return [int(conversation.messages[0].content == "good" or released.wait(LIMIT_S))]

    monkeypatch.setattr(prompts, "render", render)
    bad, good = (
        rollout_pb2.GenerateRequest(conversation={"messages": [{"role": "user", "content": text}]})
        for text in ("bad", "good")
    )
    try:
        rendering = [asyncio.create_task(prompts.prompt_of(bad)) for _ in range(RENDER_THREADS)]
        await clock.advance(RENDER_DEADLINE_S)
        outcomes = await asyncio.gather(*rendering, return_exceptions=True)
        codes = [each.code for each in outcomes if isinstance(each, SluiceError)]
        assert codes == [grpc.StatusCode.INVALID_ARGUMENT] * RENDER_THREADS
        assert (await prompts.prompt_of(good)).ids == [1]
    finally:
        released.set()


async def test_large_prompts_of_one_tenant_do_not_delay_another_one_s_small_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = ModelTokenizer(character_tokenizer(TINY), clock=SimulatedClock())
    released = threading.Event()

    def render(conversation: tokens_pb2.Conversation, **_: object) -> list[int]:
        return [int(len(conversation.messages[0].content) < LARGE_BYTES or released.wait(LIMIT_S))]

    def asking(text: str, tenant: str) -> asyncio.Task[Any]:
        conversation = tokens_pb2.Conversation(messages=[{"role": "user", "content": text}])
        return asyncio.create_task(
            prompts.prompt_of(rollout_pb2.GenerateRequest(conversation=conversation, tenant=tenant))
        )

    monkeypatch.setattr(prompts, "render", render)
    try:
        large = [asking("x" * (LARGE_BYTES + 1), "flood") for _ in range(4 * RENDER_THREADS)]
        await asyncio.sleep(0)
        assert (await asking("x", "agent")).ids == [1]
        assert not any(each.done() for each in large)
        released.set()
        assert [each.ids for each in await asyncio.gather(*large)] == [[1]] * len(large)
    finally:
        released.set()


async def test_what_waits_to_be_tokenized_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_svc.tokenizer.MAX_WAITING_BYTES", 4 * LARGE_BYTES)
    prompts = ModelTokenizer(character_tokenizer(TINY), clock=SimulatedClock())
    released = threading.Event()
    monkeypatch.setattr(prompts, "_encode", lambda _text, _most: [int(released.wait(LIMIT_S))])
    wire = rollout_pb2.GenerateRequest(text="x" * LARGE_BYTES, tenant="flood")
    waiting = [asyncio.create_task(prompts.prompt_of(wire)) for _ in range(2)]
    await asyncio.sleep(0)
    try:
        with pytest.raises(SluiceError, match="wait to be tokenized") as refused:
            await prompts.prompt_of(wire)
        assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.UNAVAILABLE, "RENDERING_BUSY")
    finally:
        released.set()
    await asyncio.gather(*waiting)
    assert (await prompts.prompt_of(wire)).ids == [1]


@pytest.mark.parametrize(
    ("role", "tenant", "priority"), [("agent", "ann", 0), ("gateway", "g1-0-0", -3), ("dispatcher", "g1-0-0", -3)]
)
def test_agents_neither_choose_their_tenant_nor_go_before_others(role: Any, tenant: str, priority: int) -> None:
    wire = rollout_pb2.GenerateRequest(tenant="g1-0-0", priority=-3)

    def served() -> tuple[str, int]:
        access._caller.set(Principal("ann", role, Quota()))
        return tenant_of(wire), generation_request(wire, PROMPT, INFO).priority

    assert contextvars.copy_context().run(served) == (tenant, priority)


def test_a_request_that_names_no_tenant_is_its_principal_s() -> None:
    assert tenant_of(rollout_pb2.TokenizeRequest()) == "anyone"
