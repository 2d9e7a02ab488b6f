"""What a client sees of a sample, whole and in parts, and which sampling may be trained."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_svc.recording import NEUTRAL, settle_sampling
from sluice.openai.answers import TextDeltas, visible_message
from sluice.openai.bodies import ClientRequest
from sluice.rpc import SluiceError
from sluice.v1 import rollout_pb2, tokens_pb2

STOP = tokens_pb2.FINISH_REASON_STOP


def chunk(text: str, *, stop: str = "", last: bool = False) -> rollout_pb2.StreamChunk:
    tokens = rollout_pb2.GeneratedSample(text=text, stop_string=stop, finish_reason=STOP if last else 0)
    return rollout_pb2.StreamChunk(deltas=[rollout_pb2.SampleDelta(tokens=tokens)])


@given(st.lists(st.text("ab<", max_size=3), min_size=1, max_size=6), st.booleans())
def test_text_in_parts_is_the_content_of_the_message(parts, stopped):
    stop = "<<" if stopped else ""
    before = re.sub("<+", "<", "".join(parts))
    whole = (before.rstrip("<") if stop else before) + stop  # the engine stops at the first one
    texts = TextDeltas(["<<"], of_messages=False)
    shown = ""
    for at, character in enumerate(whole, 1):
        last = at == len(whole)
        shown += "".join(each.content for each in texts.of(chunk(character, stop=stop if last else "", last=last)))
    sample = rollout_pb2.GeneratedSample(text=whole, stop_string=stop)
    assert shown == visible_message(sample, "r/0").content


def test_a_message_has_its_role_no_stop_string_and_ids_for_its_calls():
    calls = [
        tokens_pb2.ToolCall(name="look"),
        tokens_pb2.ToolCall(name="look"),
        tokens_pb2.ToolCall(id="c7", name="look"),
    ]
    said = tokens_pb2.ChatMessage(content="one\nUser:", reasoning="two\nUser:", tool_calls=calls)
    sample = rollout_pb2.GeneratedSample(text="<think>", message=said, stop_string="\nUser:")
    shown = visible_message(sample, "r/0")
    assert (shown.role, shown.content, shown.reasoning) == ("assistant", "one", "two")
    first, second, third = (call.id for call in shown.tool_calls)
    assert (first != second, third) == (True, "c7")
    assert first.replace("_", "").isalnum(), "Anthropic's clients take no other characters"
    assert visible_message(sample, "r/0") == shown
    assert visible_message(sample, "r/1").tool_calls[0].id != first
    assert sample.message == said


@pytest.mark.parametrize("name", [*NEUTRAL, "logit_bias", "temperature"])
def test_each_field_that_changes_the_distribution_follows_the_settings(name):
    values = {"logit_bias": {5: 1.0}, "temperature": 0.0, "ignore_eos": True}
    given = {name: values.get(name, 2 if name in {"top_k", "min_tokens"} else 0.5)}

    def settled(unsupported) -> ClientRequest:
        request = ClientRequest("d", "m", rollout_pb2.GenerateRequest(sampling=tokens_pb2.SamplingParams(**given)))
        settle_sampling(request, unsupported)
        return request

    overridden = settled("override")
    assert not overridden.generate.sampling.ListFields()
    assert overridden.notices == [("overridden", name)]
    trained_not = settled("not_trained")
    assert (trained_not.not_trained, trained_not.notices) == (name.upper(), [("not_trained", name)])
    assert settled("allow").generate == trained_not.generate
    with pytest.raises(SluiceError, match=name):
        settled("reject")


def test_what_means_nothing_is_no_notice():
    sampling = tokens_pb2.SamplingParams(**NEUTRAL, temperature=0.7, seed=3, max_tokens=5)
    request = ClientRequest("d", "m", rollout_pb2.GenerateRequest(sampling=sampling))
    settle_sampling(request, "reject")
    assert {each.name for each, _ in request.generate.sampling.ListFields()} == {"temperature", "seed", "max_tokens"}
    assert not request.notices


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-6, 0.0099])
def test_a_temperature_that_is_no_sampling_follows_the_settings_as_greedy_does(temperature):
    def settled(unsupported) -> ClientRequest:
        sampling = tokens_pb2.SamplingParams(temperature=temperature)
        request = ClientRequest("d", "m", rollout_pb2.GenerateRequest(sampling=sampling))
        settle_sampling(request, unsupported)
        return request

    assert not settled("override").generate.sampling.HasField("temperature")
    assert settled("not_trained").not_trained == "TEMPERATURE"
    assert settled("allow").generate.sampling.HasField("temperature")
    with pytest.raises(SluiceError, match=r"temperature: is .* need at least 0\.01"):
        settled("reject")


@pytest.mark.parametrize("temperature", [0.01, 0.7, 100.0, -1.0, 1e9])
def test_other_temperatures_are_taken_or_left_to_the_replica_to_refuse(temperature):
    sampling = tokens_pb2.SamplingParams(temperature=temperature)
    request = ClientRequest("d", "m", rollout_pb2.GenerateRequest(sampling=sampling))
    settle_sampling(request, "reject")
    assert request.generate.sampling == sampling
