"""RolloutService and RolloutAdminService over gRPC, on a real engine."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from engine_waits import first_tokens_only
from google.protobuf.duration_pb2 import Duration
from rollout_stack import PLACES, RUN, Replica, refused, running_engine, save_chat_model, until
from simulated_clock import SimulatedClock
from small_models import CONTEXT, EOS, VOCABULARY, greedy, save_model, staged, text_of

from rollout_svc.config import LimitsConfig
from rollout_svc.engines.base import PauseMode
from sluice.v1 import common_pb2, rollout_pb2, rollout_pb2_grpc, tokens_pb2
from sluice.versions import BASE, Version

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [10, 20, 30, 40, 9]
CONVERSATION = tokens_pb2.Conversation(messages=[tokens_pb2.ChatMessage(role="user", content=text_of([20, 30, 40]))])
TOKENS = 12
TIMEOUT_S = 60.0

Code = grpc.StatusCode


@dataclass
class Served:
    """A replica and its stubs."""

    replica: Replica
    agent: rollout_pb2_grpc.RolloutServiceStub
    admin: rollout_pb2_grpc.RolloutAdminServiceStub

    def generate(self, request: rollout_pb2.GenerateRequest, timeout: float = TIMEOUT_S) -> Any:
        return self.agent.Generate(request, timeout=timeout)

    def stream(self, request: rollout_pb2.GenerateRequest, **options: Any) -> Any:
        wire = rollout_pb2.GenerateStreamRequest(request=request, **options)
        return self.agent.GenerateStream(wire, timeout=TIMEOUT_S)

    async def status(self) -> rollout_pb2.GetStatusResponse:
        return await self.admin.GetStatus(rollout_pb2.GetStatusRequest(), timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("rollout") / "small")


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("rollout") / "second", 2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model):
    async with running_engine(model) as started:
        yield started


async def serve(replica: Replica) -> AsyncIterator[Served]:
    async with replica as running, running.stub() as agent, running.admin_stub() as admin:
        yield Served(running, agent, admin)


@pytest_asyncio.fixture(loop_scope="module")
async def served(model, engine):
    async for each in serve(Replica(model, engine)):
        yield each
    await engine.reload_base()


def ask(n: int = 1, prompt: list[int] | None = None, **more: Any) -> rollout_pb2.GenerateRequest:
    """A greedy request that ends by its length."""
    request = rollout_pb2.GenerateRequest(
        n=n, sampling=tokens_pb2.SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True), return_text=True
    )
    if not {"text", "conversation"} & more.keys():
        request.token_ids.ids.extend(PROMPT if prompt is None else prompt)
    request.MergeFrom(rollout_pb2.GenerateRequest(**more))
    return request


def sampled(**more: Any) -> rollout_pb2.GenerateRequest:
    """A request whose answer differs each time that it is sampled."""
    request = ask(**more)
    request.sampling.temperature = 1.0
    return request


def spans_of(sample: rollout_pb2.GeneratedSample) -> list[tuple[int, Version]]:
    return [(span.start, Version.from_proto(span.policy_version)) for span in sample.version_spans]


class TestGenerate:
    @pytest.mark.parametrize(
        "prompt", [{}, {"text": text_of(PROMPT)}, {"conversation": CONVERSATION}], ids=["ids", "text", "messages"]
    )
    async def test_samples_from_ids_text_or_messages(self, served, model, prompt):
        answer = await served.generate(ask(**prompt))
        assert list(answer.prompt_token_ids) == PROMPT
        sample = answer.samples[0]
        expected = greedy(model, PROMPT, TOKENS)
        assert list(sample.token_ids) == expected
        assert sample.text == text_of([id_ for id_ in expected if id_ > EOS])
        assert len(sample.logprobs) == TOKENS
        assert sample.finish_reason == tokens_pb2.FINISH_REASON_LENGTH
        assert spans_of(sample) == [(0, BASE)]
        assert re.fullmatch("[0-9a-f]{64}", answer.tokenizer_digest)  # SHA-256, as the contract says
        assert answer.request_id

    @pytest.mark.parametrize("name", ["chat_template", "continue_final_message", "eos_token", "unheard_of"])
    async def test_only_variables_of_the_models_template_can_be_set(self, served, name):
        conversation = tokens_pb2.Conversation(messages=CONVERSATION.messages, template_arguments={name: "{{ 7 * 7 }}"})
        generate = await refused(served.generate(ask(conversation=conversation)))
        tokenize = await refused(
            served.agent.Tokenize(rollout_pb2.TokenizeRequest(conversation=conversation), timeout=TIMEOUT_S)
        )
        for error in (generate, tokenize):
            assert (error.code, list(error.violations)) == (Code.INVALID_ARGUMENT, ["conversation.template_arguments"])
            assert "takes no arguments" in error.message

    @pytest.mark.parametrize(
        "fields",
        [
            {"request_id": "x" * 129},
            {"adapter": "x" * 3_000_000},
            {"run": "x" * 3_000_000},
            {"tokenizer_digest": "x" * 3_000_000},
            {"n": 2**32 - 1},
            {"sampling": {"stop": ["x" * 2000]}},
            {"sampling": {"stop_token_ids": [5] * 2000}},
            {"sampling": {"logit_bias": {5: float("nan")}}},
            {"sampling": {"min_tokens": 2**32 - 1}},
            {
                "conversation": {
                    "tools": [{"name": "x", "parameters": {"a": float("nan")}}],
                    "messages": [{"role": "user"}],
                }
            },
            {"conversation": {"messages": [{"role": "x" * 3_000_000}]}},
            {"conversation": {"messages": [{"role": "assistant", "tool_calls": [{}] * 20_000}]}},
            {"conversation": {"messages": [{"role": "user", "parts": [{}] * 20_000}]}},
        ],
    )
    async def test_what_is_too_large_or_no_number_is_refused(self, served, fields):
        error = await refused(served.generate(ask(**fields)))
        assert error.code in {Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION}
        assert len(error.message) < 1000

    @pytest.mark.parametrize("seconds", [-1, 61, 10**11])
    async def test_chunks_are_held_back_a_minute_at_most(self, served, seconds):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.stream(ask(), coalesce=Duration(seconds=seconds)).read()
        assert caught.value.code() is Code.INVALID_ARGUMENT

    async def test_gives_n_samples_by_index(self, served):
        answer = await served.generate(sampled(n=4))
        assert [sample.index for sample in answer.samples] == [0, 1, 2, 3]
        assert len({tuple(sample.token_ids) for sample in answer.samples}) == 4

    async def test_leaves_text_and_alternatives_out_unless_they_are_wanted(self, served):
        request = ask()
        request.return_text = False
        sample = (await served.generate(request)).samples[0]
        assert not sample.text
        assert not sample.top_logprobs

    async def test_prompt_logprobs_leave_out_the_first_token(self, served):
        answer = await served.generate(ask(return_prompt_logprobs=True))
        assert len(answer.prompt_logprobs) == len(PROMPT) - 1

    async def test_what_the_replica_checks_matches(self, served):
        digest = (await served.agent.GetModel(rollout_pb2.GetModelRequest(), timeout=TIMEOUT_S)).tokenizer_digest
        request = ask(run=f"runs/{RUN}", tokenizer_digest=digest, min_policy_version=BASE.to_proto())
        assert (await served.generate(request)).tokenizer_digest == digest


class TestRefusals:
    async def test_every_field_at_fault_is_named(self, served):
        request = ask(prompt=[VOCABULARY])
        request.n = 0
        request.sampling.temperature = -1
        request.sampling.top_p = 3
        error = await refused(served.generate(request))
        assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "INVALID_REQUEST")
        assert error.violations.keys() == {"n", "token_ids", "sampling.temperature", "sampling.top_p"}

    @pytest.mark.parametrize(
        ("request_", "field"),
        [
            (rollout_pb2.GenerateRequest(), "prompt"),
            (ask(prompt=[]), "token_ids"),
            (ask(prompt=[5] * CONTEXT), "token_ids"),
            (ask(conversation=tokens_pb2.Conversation(messages=[tokens_pb2.ChatMessage(role="pirate")])), "conversation"),
            (ask(conversation=tokens_pb2.Conversation(messages=[
                tokens_pb2.ChatMessage(role="user", parts=[tokens_pb2.ContentPart(image=b"png")])])), "conversation.messages.parts"),
            (ask(request_id="x" * 129), "request_id"),
        ],
    )  # fmt: skip
    async def test_a_request_that_can_never_succeed_is_refused(self, served, request_, field):
        for call in (served.generate(request_), first_of(served.stream(request_))):
            error = await refused(call)
            assert (error.code, list(error.violations)) == (Code.INVALID_ARGUMENT, [field])

    @pytest.mark.parametrize(
        ("more", "reason", "names"),
        [
            ({"run": "runs/other"}, "WRONG_RUN", "runs/other"),
            ({"tokenizer_digest": "0" * 64}, "TOKENIZER_MISMATCH", "0" * 64),
            ({"min_policy_version": common_pb2.PolicyVersion(epoch=1, number=3)}, "VERSION_TOO_OLD", "1.3"),
        ],
    )
    async def test_a_wrong_expectation_is_a_failed_precondition(self, served, more, reason, names):
        for call in (served.generate(ask(**more)), first_of(served.stream(ask(**more)))):
            error = await refused(call)
            assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, reason)
            assert names in error.message

    async def test_a_full_queue_says_when_to_retry(self, model, engine):
        async for served in serve(Replica(model, engine, limits=LimitsConfig(max_queued=3))):
            async with served.replica.frozen():
                waiting = asyncio.ensure_future(served.generate(ask(n=2)))
                await until(lambda served=served: served.replica.servicer.samples == 2)
                for call in (served.generate(ask(n=2)), first_of(served.stream(ask(n=2)))):
                    error = await refused(call)
                    assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
                    assert error.retry_after_s
                fits = asyncio.ensure_future(served.generate(ask()))
                await until(lambda served=served: served.replica.servicer.samples == 3)
            assert len((await waiting).samples) == 2
            assert len((await fits).samples) == 1

    async def test_a_dead_engine_is_unavailable(self, model):
        async with running_engine(model) as engine:
            async for served in serve(Replica(model, engine)):
                await engine.stop()
                error = await refused(served.generate(ask(request_id="given")))
                assert (error.code, error.reason) == (Code.UNAVAILABLE, "ENGINE_RECOVERING")
                assert error.retry_after_s
                assert (await served.status()).state == rollout_pb2.REPLICA_STATE_RECOVERING

    async def test_an_engine_that_dies_under_a_request_is_unavailable(self, model):
        async with running_engine(model) as engine:
            async for served in serve(Replica(model, engine)):
                await engine.pause(PauseMode.KEEP)
                waiting = asyncio.ensure_future(served.generate(ask()))
                await until(lambda served=served: served.replica.servicer.samples == 1)
                await engine.stop()
                error = await refused(waiting)
                assert (error.code, error.reason) == (Code.UNAVAILABLE, "ENGINE_FAILED")
                assert served.replica.servicer.samples == 0


class TestRetries:
    async def test_a_repeat_gets_the_first_answer(self, served):
        first = await served.generate(sampled(request_id="r1"))
        assert await served.generate(sampled(request_id="r1")) == first
        assert first.request_id == "r1"

    async def test_concurrent_repeats_are_sampled_once(self, served):
        async with served.replica.frozen():
            calls = [asyncio.ensure_future(served.generate(sampled(request_id="r2"))) for _ in range(4)]
            await until(lambda: served.replica.servicer.samples > 0)
        answers = await asyncio.gather(*calls)
        assert all(answer == answers[0] for answer in answers)

    async def test_one_caller_may_leave_while_another_waits(self, served):
        async with served.replica.frozen():
            leaving = served.generate(sampled(request_id="r3"))
            await until(lambda: served.replica.servicer.samples == 1)
            staying = asyncio.ensure_future(served.generate(sampled(request_id="r3")))
            # Answered on the same connection after the call before it has arrived.
            await served.agent.GetModel(rollout_pb2.GetModelRequest(), timeout=TIMEOUT_S)
            leaving.cancel()
            await until(leaving.done)
        assert len((await staying).samples[0].token_ids) == TOKENS

    async def test_an_id_belongs_to_one_request(self, served):
        await served.generate(sampled(request_id="r4"))
        error = await refused(served.generate(sampled(request_id="r4", n=2)))
        assert (error.code, error.reason) == (Code.ALREADY_EXISTS, "REQUEST_ID_REUSED")

    async def test_a_refusal_is_not_kept(self, served):
        await refused(served.generate(sampled(request_id="r5", run="runs/other")))
        assert (await served.generate(sampled(request_id="r5"))).samples


class TestRepeatedStreams:
    async def test_a_repeat_gets_the_same_tokens_from_the_beginning(self, served):
        request = sampled(request_id="s1", n=2)
        first = [message async for message in served.stream(request, coalesce=Duration(nanos=1_000_000))]
        again = [message async for message in served.stream(request)]
        assert again == [message for message in first if message.HasField("opening") or message.chunk.deltas]

    async def test_a_repeat_while_the_first_is_under_way_joins_it(self, served):
        request = sampled(request_id="s2")
        async with served.replica.frozen():
            first = asyncio.ensure_future(collected(served.stream(request)))
            await until(lambda: served.replica.servicer.samples == 1)
            second = asyncio.ensure_future(collected(served.stream(request)))
            await served.agent.GetModel(rollout_pb2.GetModelRequest(), timeout=TIMEOUT_S)
            assert served.replica.servicer.samples == 1
        assert together(deltas_of(await first)) == together(deltas_of(await second))

    async def test_the_sampling_goes_on_while_one_reader_is_left(self, served):
        request = sampled(request_id="s3")
        async with served.replica.frozen():
            leaving = served.stream(request)
            await leaving.read()
            staying = served.stream(request)
            await staying.read()
            leaving.cancel()
            await until(leaving.done)
        assert together(deltas_of(await collected(staying))).finish_reason == tokens_pb2.FINISH_REASON_LENGTH

    async def test_the_sampling_ends_with_its_last_reader(self, served):
        request = sampled(request_id="s4")
        async with served.replica.frozen():
            stream = served.stream(request)
            await stream.read()
            stream.cancel()
            await served.replica.until_idle()

    async def test_an_id_belongs_to_one_request(self, served):
        await collected(served.stream(sampled(request_id="s5")))
        error = await refused(first_of(served.stream(sampled(request_id="s5", n=2))))
        assert (error.code, error.reason) == (Code.ALREADY_EXISTS, "REQUEST_ID_REUSED")


class TestLeaving:
    @pytest.mark.parametrize("request_id", ["", "named"])
    async def test_cancelling_ends_the_sampling(self, served, request_id):
        async with served.replica.frozen():
            call = served.generate(ask(n=3, request_id=request_id))
            await until(lambda: served.replica.servicer.samples == 3)
            call.cancel()
            await served.replica.until_idle()

    async def test_a_deadline_ends_the_sampling(self, served):
        async with served.replica.frozen():
            call = served.generate(ask(), timeout=2.0)
            await until(lambda: served.replica.servicer.samples == 1 or call.done())
            error = await refused(call)
            assert error.code is Code.DEADLINE_EXCEEDED
            await served.replica.until_idle()

    async def test_leaving_a_stream_ends_the_sampling(self, served):
        request = ask(n=2)
        request.sampling.max_tokens = 400
        with first_tokens_only(served.replica.engine):
            stream = served.stream(request)
            opening = await stream.read()
            assert opening.HasField("opening")
            await stream.read()
            async with served.replica.frozen():
                assert served.replica.servicer.samples == 2
                stream.cancel()
                await served.replica.until_idle()


class TestStream:
    async def test_equals_the_whole_answer(self, served):
        request = ask(n=3)
        request.sampling.top_logprobs = 2
        whole = await served.generate(request)
        messages = [message async for message in served.stream(request, coalesce=Duration(nanos=1_000_000))]
        assert list(messages[0].opening.prompt_token_ids) == PROMPT
        assert messages[0].opening.tokenizer_digest == whole.tokenizer_digest
        for expected in whole.samples:
            assert_same(together(deltas_of(messages, expected.index)), expected)

    async def test_coalesces_tokens_within_the_time_asked_for(self, served):
        messages = [message async for message in served.stream(sampled(n=3), coalesce=Duration(seconds=60))]
        [message] = messages
        assert list(message.opening.prompt_token_ids) == PROMPT
        assert [delta.tokens.index for delta in message.chunk.deltas] == [0, 1, 2]

    async def test_a_number_of_tokens_ends_the_waiting(self, served):
        stream = served.stream(ask(), coalesce=Duration(seconds=60), coalesce_tokens=4)
        messages = [message async for message in stream]
        counts = [len(message.chunk.deltas[0].tokens.token_ids) for message in messages]
        assert len(counts) > 1
        assert min(counts[:-1]) >= 4
        assert sum(counts) == TOKENS

    async def test_equals_the_whole_answer_of_the_same_seed(self, served):
        request = sampled(n=3)
        request.sampling.seed = 7
        whole = await served.generate(request)
        messages = await collected(served.stream(request, coalesce_tokens=5))
        for expected in whole.samples:
            assert_same(together(deltas_of(messages, expected.index)), expected)

    async def test_says_that_the_request_is_alive_while_nothing_is_sampled(self, served):
        async with served.replica.frozen():
            stream = served.stream(ask())
            await stream.read()
            for _ in range(2):
                alive = (await stream.read()).chunk
                assert not alive.deltas
                assert alive.stage == rollout_pb2.REQUEST_STAGE_PAUSED
                assert alive.engine_steps == (await served.status()).engine_steps
            stream.cancel()

    async def test_a_request_without_a_place_is_queued(self, served):
        long = sampled(n=PLACES)
        long.sampling.max_tokens = 400
        running = [served.stream(long)]
        while (await running[0].read()).chunk.stage != rollout_pb2.REQUEST_STAGE_RUNNING:
            pass
        running += [served.stream(long) for _ in range(11)]
        await until(lambda: served.replica.servicer.samples == 12 * PLACES)
        waiting = served.stream(ask())
        first, second = [(await waiting.read()).chunk for _ in range(2)]
        assert first.stage == second.stage == rollout_pb2.REQUEST_STAGE_QUEUED
        assert not first.deltas
        assert second.engine_steps > first.engine_steps
        for stream in (waiting, *running):
            stream.cancel()
        await served.replica.until_idle()

    async def test_a_stalled_reader_holds_its_stream_up_until_the_replica_ends_it(self, model, engine):
        clock = SimulatedClock()
        async with (
            Replica(model, engine, request_s=600.0, clock=clock) as replica,
            grpc.aio.insecure_channel(replica.target, options=[("grpc.http2.bdp_probe", 0)]) as channel,
        ):
            request = sampled(n=PLACES)
            request.sampling.max_tokens, request.sampling.top_logprobs = 450, 20
            wire = rollout_pb2.GenerateStreamRequest(request=request, coalesce_tokens=1, coalesce=Duration())
            stream = rollout_pb2_grpc.RolloutServiceStub(channel).GenerateStream(wire)
            await stream.read()
            await until(lambda: engine.status().running + engine.status().queued == 0)
            assert replica.servicer.samples == PLACES, "all is sampled, and nobody reads it"
            await clock.advance(600.0)
            await replica.until_idle()
            received = 0
            with pytest.raises(grpc.aio.AioRpcError) as caught:  # noqa: PT012 - what was sent before may be read
                while (message := await stream.read()) is not grpc.aio.EOF:
                    received += message.ByteSize()
            assert caught.value.code() is Code.DEADLINE_EXCEEDED
            assert received < 400_000, received

    async def test_chunks_carry_the_versions_of_an_update_on_the_way(self, served, second):
        request = ask()
        request.sampling.max_tokens = 400
        with first_tokens_only(served.replica.engine):
            stream = served.stream(request, coalesce=Duration(nanos=1_000_000))
            messages = [await stream.read()]
            while not messages[-1].chunk.deltas:
                messages.append(await stream.read())
            await served.replica.engine.apply(staged(second, Version(1, 1)))
        messages += await collected(stream)
        spans = spans_of(together(deltas_of(messages)))
        assert [version for _, version in spans] == [BASE, Version(1, 1)]
        assert 0 < spans[1][0] < 400

    async def test_a_stop_string_ends_it(self, served, model):
        expected = greedy(model, PROMPT, TOKENS)
        stop = next(text_of(expected[i : i + 2]) for i in range(2, TOKENS) if min(expected[i : i + 2]) > EOS)
        request = ask()
        request.sampling.stop.append(stop)
        whole = (await served.generate(request)).samples[0]
        assert (whole.stop_string, whole.finish_reason) == (stop, tokens_pb2.FINISH_REASON_STOP)
        assert whole.text.endswith(stop)  # the tokens that complete it stay
        messages = [message async for message in served.stream(request)]
        assert_same(together(deltas_of(messages)), whole)


class TestDescription:
    async def test_describes_the_model(self, served, model):
        answer = await served.agent.GetModel(rollout_pb2.GetModelRequest(), timeout=TIMEOUT_S)
        assert (answer.model, answer.architecture) == (str(model), "Qwen3ForCausalLM")
        assert (answer.vocabulary_size, answer.max_model_len) == (VOCABULARY, CONTEXT)
        assert list(answer.eos_token_ids) == [EOS]
        assert (answer.tool_parser, answer.reasoning_parser) == ("none", "none")
        assert Version.from_proto(answer.policy_version) == BASE

    async def test_tokenizes_what_generate_would_sample_from(self, served):
        request = rollout_pb2.TokenizeRequest(conversation=CONVERSATION, add_generation_prompt=True)
        answer = await served.agent.Tokenize(request, timeout=TIMEOUT_S)
        assert list(answer.token_ids) == PROMPT

    async def test_a_continuation_keeps_the_ids_that_it_continues(self, served):
        before = [*PROMPT, 71, 72, 73]
        request = rollout_pb2.TokenizeRequest(conversation=CONVERSATION, add_generation_prompt=True)
        request.continues.ids.extend(before)
        answer = await served.agent.Tokenize(request, timeout=TIMEOUT_S)
        assert list(answer.token_ids) == [*before, *PROMPT]

    async def test_nothing_to_tokenize_is_refused(self, served):
        error = await refused(served.agent.Tokenize(rollout_pb2.TokenizeRequest(), timeout=TIMEOUT_S))
        assert list(error.violations) == ["input"]


async def test_the_text_of_a_continuation_begins_with_that_of_the_tokens_it_continues(served):
    request = ask()
    first = (await served.generate(request)).samples[0]
    request.token_ids.ids.extend(first.token_ids)
    request.continued_tokens = len(first.token_ids)
    whole = (await served.generate(request)).samples[0]
    assert whole.text == served.replica.servicer.tokenizer.decode([*first.token_ids, *whole.token_ids])
    assert whole.text.startswith(first.text)
    streamed = deltas_of([message async for message in served.stream(request)])
    assert "".join(delta.tokens.text for delta in streamed) == whole.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_without_a_deadline_gets_that_of_the_replica(model, engine, stream):
    clock = SimulatedClock()
    async with (
        Replica(model, engine, request_s=60.0, clock=clock) as replica,
        grpc.aio.insecure_channel(replica.target) as channel,
    ):
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)

        async def call() -> None:
            if stream:
                _ = [each async for each in stub.GenerateStream(rollout_pb2.GenerateStreamRequest(request=ask()))]
            else:
                await stub.Generate(ask())

        async with replica.frozen():
            calling = asyncio.create_task(call())
            await until(lambda: replica.servicer.samples == 1)
            await clock.advance(60.0)
            error = await refused(calling)
            assert (error.code, error.reason) == (Code.DEADLINE_EXCEEDED, "REQUEST_DEADLINE")


class TestAdministration:
    async def test_a_pause_freezes_and_its_owner_ends_it(self, served):
        pause = rollout_pb2.PauseRequest(mode=rollout_pb2.PAUSE_MODE_KEEP, owner="a", ttl=Duration(seconds=60))
        await served.admin.Pause(pause, timeout=TIMEOUT_S)
        waiting = asyncio.ensure_future(served.generate(ask()))
        await until(lambda: served.replica.servicer.samples == 1)
        assert (await served.status()).state == rollout_pb2.REPLICA_STATE_PAUSED
        again = await served.admin.Pause(pause, timeout=TIMEOUT_S)
        assert again.frozen_requests == 1
        pause.owner = "b"
        error = await refused(served.admin.Pause(pause, timeout=TIMEOUT_S))
        assert (error.code, error.reason) == (Code.ABORTED, "PAUSE_HELD")
        stranger = await served.admin.Resume(rollout_pb2.ResumeRequest(owner="b"), timeout=TIMEOUT_S)
        assert not stranger.running
        assert not waiting.done()
        assert (await served.admin.Resume(rollout_pb2.ResumeRequest(owner="a"), timeout=TIMEOUT_S)).running
        assert len((await waiting).samples[0].token_ids) == TOKENS

    async def test_a_forgotten_pause_ends_by_itself(self, served):
        watch = asyncio.create_task(served.replica.admin.expire_pauses_forever())
        pause = rollout_pb2.PauseRequest(mode=rollout_pb2.PAUSE_MODE_KEEP, owner="a", ttl=Duration(nanos=50_000_000))
        await served.admin.Pause(pause, timeout=TIMEOUT_S)
        assert (await served.generate(ask())).samples
        watch.cancel()

    async def test_a_pause_waits_no_longer_for_requests_than_it_may_last(self, served):
        request = ask()
        request.sampling.max_tokens = 400
        with first_tokens_only(served.replica.engine):
            endless = asyncio.ensure_future(served.generate(request))
            await until(lambda: served.replica.engine.status().running == 1)
            pause = rollout_pb2.PauseRequest(mode=rollout_pb2.PAUSE_MODE_WAIT, owner="a", ttl=Duration(nanos=1_000_000))
            error = await refused(served.admin.Pause(pause, timeout=TIMEOUT_S))
        assert (error.code, error.reason) == (Code.DEADLINE_EXCEEDED, "PAUSE_DEADLINE")
        assert len((await endless).samples[0].token_ids) == 400
        assert (await served.status()).state == rollout_pb2.REPLICA_STATE_SERVING

    @pytest.mark.parametrize(
        ("pause", "field"),
        [
            (rollout_pb2.PauseRequest(owner="a", ttl=Duration(seconds=1)), "mode"),
            (rollout_pb2.PauseRequest(mode=rollout_pb2.PAUSE_MODE_KEEP, ttl=Duration(seconds=1)), "owner"),
            (
                rollout_pb2.PauseRequest(
                    mode=rollout_pb2.PAUSE_MODE_KEEP, owner="a" * 3_000_000, ttl=Duration(seconds=1)
                ),
                "owner",
            ),
            (rollout_pb2.PauseRequest(mode=rollout_pb2.PAUSE_MODE_KEEP, owner="a"), "ttl"),
            (rollout_pb2.PauseRequest(mode=rollout_pb2.PAUSE_MODE_KEEP, owner="a", ttl=Duration(seconds=3601)), "ttl"),
        ],
    )
    async def test_a_pause_needs_mode_owner_and_end(self, served, pause, field):
        error = await refused(served.admin.Pause(pause, timeout=TIMEOUT_S))
        assert list(error.violations) == [field]
        assert (await served.status()).state == rollout_pb2.REPLICA_STATE_SERVING

    @pytest.mark.parametrize("named", [True, False])
    async def test_aborted_requests_give_their_tokens_so_far(self, served, named):
        request = ask(n=2, request_id="long")
        request.sampling.max_tokens = 400
        with first_tokens_only(served.replica.engine):
            calls = served.stream(request)
            await calls.read()
            await calls.read()
            waiting = asyncio.ensure_future(served.generate(request))
            await until(lambda: served.replica.servicer.samples == 4 and served.replica.engine.status().running == 2)
            abort = rollout_pb2.AbortRequestsRequest(request_ids=["long"] if named else [])
            assert (await served.admin.AbortRequests(abort, timeout=TIMEOUT_S)).aborted >= 1
        for sample in (await waiting).samples:
            assert sample.finish_reason == tokens_pb2.FINISH_REASON_ABORT
            assert len(sample.token_ids) < 400
        calls.cancel()
        await served.replica.until_idle()

    async def test_reload_returns_to_the_base(self, served, second):
        await served.replica.engine.apply(staged(second, Version(1, 1)))
        assert Version.from_proto((await served.status()).policy_version) == Version(1, 1)
        answer = await served.admin.ReloadWeights(rollout_pb2.ReloadWeightsRequest(), timeout=TIMEOUT_S)
        assert Version.from_proto(answer.policy_version) == BASE
        assert Version.from_proto((await served.status()).policy_version) == BASE

    async def test_status_counts_what_was_done(self, served):
        before = await served.status()
        await served.generate(ask(n=2))
        after = await served.status()
        assert after.generated_tokens - before.generated_tokens == TOKENS  # greedy samples are equal: one is sampled
        assert (after.running, after.queued, after.replica) == (0, 0, "one")
        assert after.state == rollout_pb2.REPLICA_STATE_SERVING

    async def test_a_replica_without_adapters_says_which_setting_it_lacks(self, served):
        request = rollout_pb2.LoadAdapterRequest(adapter="mine", version=Version(1, 1).to_proto())
        error = await refused(served.admin.LoadAdapter(request, timeout=TIMEOUT_S))
        assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "NO_ADAPTERS")
        assert "rollout.lora.enabled = true" in error.message
        error = await refused(served.generate(ask(adapter="mine")))
        assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "ADAPTER_NOT_LOADED")


class TestDrain:
    @pytest_asyncio.fixture(loop_scope="module")
    async def served(self, model, engine):
        """Time stands still."""
        async for each in serve(Replica(model, engine, clock=SimulatedClock())):
            yield each

    async def test_a_drain_refuses_new_requests_and_waits_for_those_under_way(self, served):
        async with served.replica.frozen():
            waiting = asyncio.ensure_future(served.generate(ask(n=2, request_id="d1")))
            await until(lambda: served.replica.servicer.samples == 2)
            answer = await served.admin.Drain(rollout_pb2.DrainRequest(grace=Duration(seconds=60)), timeout=TIMEOUT_S)
            assert (answer.samples_left, answer.grace_left.seconds) == (2, 60)
            for call in (served.generate(ask()), first_of(served.stream(ask()))):
                error = await refused(call)
                assert (error.code, error.reason) == (Code.UNAVAILABLE, "DRAINING")
            status = await served.status()
            assert (status.state, status.drain_left.seconds) == (rollout_pb2.REPLICA_STATE_DRAINING, 60)
            assert status.engine_state == rollout_pb2.REPLICA_STATE_PAUSED, "a drain does not hide what the engine does"
            finishing = asyncio.ensure_future(served.replica.servicer.finish())
        assert len((await waiting).samples) == 2
        await finishing

    async def test_a_further_drain_may_only_shorten_the_grace(self, served):
        async with served.replica.frozen():
            stream = served.stream(ask(n=3))
            await stream.read()
            finishing = asyncio.ensure_future(served.replica.servicer.finish())
            for seconds, left in ((60, 60), (600, 60), (0, 0)):
                request = rollout_pb2.DrainRequest(grace=Duration(seconds=seconds))
                assert (await served.admin.Drain(request, timeout=TIMEOUT_S)).grace_left.seconds == left
            ended = deltas_of(await collected(stream), 1)
            assert [delta.tokens.finish_reason for delta in ended] == [tokens_pb2.FINISH_REASON_ABORT]
            await finishing
            assert served.replica.servicer.samples == 0

    async def test_a_negative_grace_is_refused(self, served):
        call = served.admin.Drain(rollout_pb2.DrainRequest(grace=Duration(seconds=-1)), timeout=TIMEOUT_S)
        assert list((await refused(call)).violations) == ["grace"]


def deltas_of(messages: list[rollout_pb2.GenerateStreamResponse], index: int = 0) -> list[rollout_pb2.SampleDelta]:
    """What a stream brought of one sample."""
    return [delta for message in messages for delta in message.chunk.deltas if delta.tokens.index == index]


def together(deltas: list[rollout_pb2.SampleDelta]) -> rollout_pb2.GeneratedSample:
    """One sample from its deltas: tokens follow each other without a gap, spans are joined where the version stays."""
    whole = rollout_pb2.GeneratedSample()
    for delta in deltas:
        new = delta.tokens
        assert delta.offset == len(whole.token_ids)
        assert not new.token_ids or new.version_spans[0].start == delta.offset
        assert (new.finish_reason != 0) == (delta is deltas[-1])
        spans = list(new.version_spans)
        if whole.version_spans and spans and spans[0].policy_version == whole.version_spans[-1].policy_version:
            del spans[0]
        whole.index = new.index
        whole.token_ids.extend(new.token_ids)
        whole.logprobs.extend(new.logprobs)
        whole.top_logprobs.extend(new.top_logprobs)
        whole.version_spans.extend(spans)
        whole.text += new.text
        whole.finish_reason, whole.stop_string = new.finish_reason, new.stop_string
    return whole


def assert_same(streamed: rollout_pb2.GeneratedSample, whole: rollout_pb2.GeneratedSample) -> None:
    """Two greedy samples are equal, but for the last bits of log-probabilities, which the rest of the batch changes."""
    assert list(streamed.logprobs) == pytest.approx(list(whole.logprobs), abs=1e-5)
    for got, expected in zip(streamed.top_logprobs, whole.top_logprobs, strict=True):
        assert list(got.logprobs) == pytest.approx(list(expected.logprobs), abs=1e-5)
        assert got.ids == expected.ids
    for sample in (streamed, whole):
        sample.ClearField("logprobs")
        sample.ClearField("top_logprobs")
    assert streamed == whole


async def collected(stream: Any) -> list[rollout_pb2.GenerateStreamResponse]:
    """All further messages of a stream."""
    messages = []
    while (message := await stream.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


async def first_of(stream: Any) -> Any:
    """The first message of a stream."""
    return await stream.read()
