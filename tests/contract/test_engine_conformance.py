"""What every inference engine does, checked on real engines against plain transformers."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from engine_waits import parts_of, until, until_tokens
from safetensors.torch import load_file, save_file
from small_models import (
    CONTEXT,
    EOS,
    VOCABULARY,
    greedy,
    recompute,
    recompute_mixed,
    staged,
    text_of,
    tokenizer,
    versions_of,
)

from rollout_svc.config import LimitsConfig
from rollout_svc.engines.base import (
    EngineError,
    FinishReason,
    GenerationRequest,
    InferenceEngine,
    Pace,
    PauseMode,
    Sample,
    Sampling,
    Stage,
)
from rollout_svc.engines.slots.engine import TransformersEngine
from rollout_svc.engines.vllm import weights as vllm_weights
from rollout_svc.replica import EngineSupervisor
from rollout_svc.replies import reply_format
from rollout_svc.servicer import RolloutServicer
from rollout_svc.tokenizer import ModelTokenizer
from sluice.engines import ENGINES
from sluice.rpc.drain import Drain
from sluice.v1 import rollout_pb2, tokens_pb2
from sluice.versions import BASE, Version
from weightsync.staged import StagedVersion

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [5, 9, 17, 33, 64, 21, 7]
FREE = Sampling(max_tokens=24, ignore_eos=True)
LONG = replace(FREE, max_tokens=400)
TOLERANCE = {"atol": 1e-4, "rtol": 0.0}
DEADLINE_S = 60.0


def ask(sampling: Sampling = FREE, n: int = 1, prompt: list[int] | None = None, **more: Any) -> GenerationRequest:
    return GenerationRequest("request", prompt or PROMPT, sampling, n=n, **more)


async def one(engine: InferenceEngine, sampling: Sampling = FREE, prompt: list[int] | None = None) -> Sample:
    return (await engine.sample(ask(sampling, prompt=prompt))).samples[0]


async def collect(chunks: AsyncIterator[Sample]) -> list[Sample]:
    return [chunk async for chunk in chunks]


def stop_within(ids: list[int]) -> str:
    """Text of two ordinary tokens in the middle of a continuation."""
    return next(text_of(ids[i : i + 2]) for i in range(4, len(ids)) if min(ids[i : i + 2]) > EOS)


def assert_policy(model: Path, sample: Sample, temperature: float = 1.0, prompt: list[int] | None = None) -> None:
    expected = recompute(model, prompt or PROMPT, sample.token_ids, temperature)
    torch.testing.assert_close(torch.tensor(sample.logprobs), expected, **TOLERANCE)


def delayed_copy(engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let the next version be copied when the returned function is called."""
    proceed = threading.Event()
    if isinstance(engine, TransformersEngine):
        weights = engine._running._weights
        copy = weights.copy
        monkeypatch.setattr(weights, "copy", lambda files: (proceed.wait(DEADLINE_S), copy(files)))
    else:
        load = vllm_weights.load

        async def delayed(*arguments: Any) -> float:
            await asyncio.to_thread(proceed.wait, DEADLINE_S)
            return await load(*arguments)

        monkeypatch.setattr(vllm_weights, "load", delayed)
    return proceed.set


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def on_base_weights(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Each test leaves its engine on the base model, whole and idle."""
    yield
    for name in ("engine", "keeping_engine", "tied_engine"):
        if name in request.fixturenames:
            engine = request.getfixturevalue(name)
            await engine.resume()
            await engine.reload_base()
            await until(lambda engine=engine: engine.status().running + engine.status().queued == 0)


class TestSampling:
    @pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
    async def test_logprobs_are_the_policy_after_temperature(self, engine, models, temperature):
        result = await engine.sample(ask(replace(FREE, max_tokens=64, temperature=temperature), n=4))
        for sample in result.samples:
            assert_policy(models.base, sample, temperature)

    async def test_gives_each_sample_by_index(self, engine):
        result = await engine.sample(ask(n=5))
        assert [sample.index for sample in result.samples] == [0, 1, 2, 3, 4]
        assert len({tuple(sample.token_ids) for sample in result.samples}) == 5
        for sample in result.samples:
            assert len(sample.token_ids) == len(sample.logprobs) == FREE.max_tokens
            assert sample.finish_reason is FinishReason.LENGTH
            assert versions_of(sample.spans, 24) == [BASE] * 24

    async def test_greedy_takes_the_most_likely_token(self, engine, models):
        sample = await one(engine, replace(FREE, temperature=0.0))
        assert sample.token_ids == greedy(models.base, PROMPT, 24)

    async def test_a_seed_makes_samples_reproducible(self, engine):
        seeded = replace(FREE, seed=1234)
        first = await engine.sample(ask(seeded, n=3))
        second = await engine.sample(ask(seeded, n=3))
        other = await one(engine, replace(FREE, seed=1235))
        ids = [sample.token_ids for sample in first.samples]
        assert ids == [sample.token_ids for sample in second.samples]
        assert ids[0] != ids[1]
        assert ids[1] == other.token_ids  # sample i uses seed + i

    async def test_top_logprobs_are_those_of_the_policy(self, engine, models):
        sample = await one(engine, replace(FREE, temperature=0.0, top_logprobs=3))
        for position in (0, 11, 23):
            top = sample.top_logprobs[position]
            assert len(top) == 3
            assert top[0] == (sample.token_ids[position], pytest.approx(sample.logprobs[position]))
            second = [*sample.token_ids[:position], top[1][0]]
            assert recompute(models.base, PROMPT, second)[-1].item() == pytest.approx(top[1][1], abs=1e-4)

    async def test_prompt_logprobs_leave_out_the_first_token(self, engine, models):
        result = await engine.sample(ask(prompt_logprobs=True))
        expected = recompute(models.base, PROMPT[:1], PROMPT[1:])
        torch.testing.assert_close(torch.tensor(result.prompt_logprobs), expected, **TOLERANCE)

    async def test_without_max_tokens_the_context_is_the_limit(self, engine):
        prompt = [3 + i % 100 for i in range(CONTEXT - 20)]
        sample = await one(engine, Sampling(ignore_eos=True), prompt)
        assert (len(sample.token_ids), sample.finish_reason) == (20, FinishReason.LENGTH)

    async def test_a_prompt_that_leaves_no_room_is_refused(self, engine):
        with pytest.raises(ValueError, match=str(CONTEXT)):
            await one(engine, prompt=[5] * CONTEXT)
        assert engine.status().healthy


class TestEnding:
    async def test_a_stop_token_is_kept(self, engine, models):
        ids = greedy(models.base, PROMPT, 24)
        stop = ids[10]
        sample = await one(engine, replace(FREE, temperature=0.0, stop_token_ids=(stop,)))
        assert sample.token_ids == ids[: ids.index(stop) + 1]
        assert sample.finish_reason is FinishReason.STOP

    async def test_a_stop_string_may_begin_in_the_tokens_that_a_sample_continues(self, engine, models):
        ids = greedy(models.base, PROMPT, 24)
        last = next(i for i in range(5, len(ids)) if min(ids[i - 1 : i + 1]) > EOS)
        stop = text_of(ids[last - 1 : last + 1])
        sampling = replace(FREE, temperature=0.0, stop=("zzz", stop))
        continuation = ask(sampling, prompt=[*PROMPT, *ids[:last]], continued=ids[:last])
        sample = (await engine.sample(continuation)).samples[0]
        assert (sample.token_ids, sample.finish_reason, sample.stop_string) == ([ids[last]], FinishReason.STOP, stop)
        chunks = await collect(parts_of(engine.stream(continuation)))
        assert [each.stop_string for each in chunks if each.finish_reason is not None] == [stop]

    async def test_the_tokens_that_complete_a_stop_string_are_kept(self, engine, models):
        ids = greedy(models.base, PROMPT, 24)
        stop = stop_within(ids)
        sample = await one(engine, replace(FREE, temperature=0.0, stop=("zzz", stop)))
        end = text_of(ids).index(stop) + len(stop)
        assert sample.token_ids == ids[:end]
        assert len(sample.logprobs) == end
        assert (sample.finish_reason, sample.stop_string) == (FinishReason.STOP, stop)

    async def test_the_model_s_end_token_ends_unless_ignored(self, engine):
        biased = replace(FREE, logit_bias={EOS: 100.0})
        ended = await one(engine, replace(biased, ignore_eos=False))
        assert (ended.token_ids, ended.finish_reason) == ([EOS], FinishReason.STOP)
        assert len((await one(engine, biased)).token_ids) == FREE.max_tokens

    async def test_cancelling_the_caller_frees_the_engine(self, engine):
        task = asyncio.create_task(one(engine, LONG))
        await until_tokens(engine, 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: engine.status().running + engine.status().queued == 0)
        assert engine.status().generated_tokens >= 0

    async def test_closing_a_stream_frees_the_engine(self, engine):
        stream = engine.stream(ask(LONG, n=2))
        assert (await anext(stream)).parts
        await stream.aclose()
        await until(lambda: engine.status().running + engine.status().queued == 0)

    async def test_abort_gives_the_tokens_so_far(self, engine, models):
        task = asyncio.create_task(one(engine, LONG))
        await until_tokens(engine, 3)
        assert await engine.abort("request")
        sample = await task
        assert sample.finish_reason is FinishReason.ABORT
        assert 0 < len(sample.token_ids) == len(sample.logprobs) < LONG.max_tokens
        assert_policy(models.base, sample)
        assert versions_of(sample.spans, len(sample.token_ids)) == [BASE] * len(sample.token_ids)

    async def test_abort_of_an_unknown_request_is_false(self, engine):
        assert not await engine.abort("nobody")


class TestStream:
    async def test_chunks_add_up_to_the_samples(self, engine, models):
        chunks = await collect(parts_of(engine.stream(ask(replace(LONG, max_tokens=60), n=3))))
        for index in range(3):
            mine = [chunk for chunk in chunks if chunk.index == index]
            token_ids = [id_ for chunk in mine for id_ in chunk.token_ids]
            logprobs = [value for chunk in mine for value in chunk.logprobs]
            assert len(token_ids) == 60
            assert [chunk.offset for chunk in mine] == [
                sum(len(c.token_ids) for c in mine[:i]) for i in range(len(mine))
            ]
            assert [chunk.finish_reason for chunk in mine] == [None] * (len(mine) - 1) + [FinishReason.LENGTH]
            torch.testing.assert_close(torch.tensor(logprobs), recompute(models.base, PROMPT, token_ids), **TOLERANCE)
            for chunk in mine:
                assert not chunk.token_ids or chunk.spans[0].start == chunk.offset

    async def test_comes_while_it_is_sampled(self, engine):
        stream = engine.stream(ask(LONG), Pace(seconds=0.0))
        [first] = (await anext(stream)).parts
        assert 0 < len(first.token_ids) < LONG.max_tokens
        await stream.aclose()

    async def test_carries_stop_strings_and_alternatives(self, engine, models):
        stop = stop_within(greedy(models.base, PROMPT, 24))
        sampling = replace(FREE, temperature=0.0, stop=(stop,), top_logprobs=2)
        chunks = await collect(parts_of(engine.stream(ask(sampling))))
        assert (chunks[-1].finish_reason, chunks[-1].stop_string) == (FinishReason.STOP, stop)
        assert all(len(chunk.top_logprobs) == len(chunk.token_ids) for chunk in chunks)

    async def test_gives_all_samples_together(self, engine):
        stream = engine.stream(ask(LONG, n=3), Pace(seconds=30.0, tokens=50))
        first = await anext(stream)
        assert [part.index for part in first.parts] == [0, 1, 2]
        assert 50 <= max(len(part.token_ids) for part in first.parts) < 300
        assert first.stage is Stage.RUNNING
        second = await anext(stream)
        assert [part.offset for part in second.parts] == [len(part.token_ids) for part in first.parts]
        assert second.steps > first.steps
        await stream.aclose()

    async def test_the_last_tokens_come_at_once(self, engine):
        progress = await collect(engine.stream(ask(n=3), Pace(seconds=DEADLINE_S)))
        assert [part.finish_reason for part in progress[-1].parts] == [FinishReason.LENGTH] * 3
        assert sum(len(part.token_ids) for each in progress for part in each.parts) == 3 * FREE.max_tokens

    async def test_a_waiting_request_says_where_it_stands_and_steps_stand_still(self, engine):
        stream = engine.stream(ask(LONG), Pace(seconds=0.0))
        await anext(stream)
        await engine.pause(PauseMode.KEEP)
        late = engine.stream(ask())
        waiting = await anext(late)  # a second without tokens
        assert (waiting.parts, waiting.stage) == ([], Stage.PAUSED)
        assert waiting.steps == engine.status().steps
        assert (await anext(late)).steps == waiting.steps
        await engine.resume()
        assert (await collect(late))[-1].steps > waiting.steps
        await stream.aclose()


class TestPause:
    async def test_keep_freezes_and_resume_goes_on(self, engine, models):
        task = asyncio.create_task(one(engine, LONG))
        await until_tokens(engine, 3)
        await engine.pause(PauseMode.KEEP)
        assert engine.status().paused
        frozen = engine.status().generated_tokens
        late = asyncio.create_task(one(engine))
        stream = engine.stream(ask(replace(FREE, max_tokens=1)))
        assert (await anext(stream)).parts == []  # a second without tokens has passed
        assert not task.done()
        assert not late.done()
        assert engine.status().generated_tokens == frozen
        await stream.aclose()
        await engine.resume()
        assert_policy(models.base, await task)
        assert_policy(models.base, await late)
        assert not engine.status().paused

    async def test_abort_ends_requests_with_their_tokens(self, engine):
        task = asyncio.create_task(one(engine, LONG))
        await until_tokens(engine, 3)
        await engine.pause(PauseMode.ABORT)
        sample = await asyncio.wait_for(task, DEADLINE_S)
        assert sample.finish_reason is FinishReason.ABORT
        assert 0 < len(sample.token_ids) < LONG.max_tokens

    async def test_wait_lets_requests_end(self, engine):
        task = asyncio.create_task(one(engine, LONG))
        await until_tokens(engine, 3)
        await engine.pause(PauseMode.WAIT)
        sample = await asyncio.wait_for(task, DEADLINE_S)
        assert (len(sample.token_ids), sample.finish_reason) == (LONG.max_tokens, FinishReason.LENGTH)

    async def test_an_update_leaves_a_paused_engine_paused(self, engine, models):
        await engine.pause(PauseMode.KEEP)
        await engine.apply(staged(models.second, Version(1, 1)))
        assert engine.status().paused
        await engine.resume()
        assert_policy(models.second, await one(engine))


class TestWeights:
    async def test_a_request_under_way_goes_on_under_the_new_weights(self, engine, models):
        task = asyncio.create_task(one(engine, LONG))
        await until_tokens(engine, 5)
        report = await engine.apply(staged(models.second, Version(1, 1)))
        assert report.version == engine.status().version == Version(1, 1)
        assert min(report.pause_s, report.apply_s) > 0
        sample = await task
        assert [span.version for span in sample.spans] == [BASE, Version(1, 1)]
        switch = sample.spans[1].start
        assert 0 < switch < len(sample.token_ids) == LONG.max_tokens
        logprobs = torch.tensor(sample.logprobs)
        old = recompute(models.base, PROMPT, sample.token_ids)
        new = recompute(models.second, PROMPT, sample.token_ids)
        torch.testing.assert_close(logprobs[:switch], old[:switch], **TOLERANCE)
        torch.testing.assert_close(logprobs[switch:], new[switch:], **TOLERANCE)

    async def test_kept_keys_and_values_are_the_older_weights_own(self, keeping_engine, models):
        task = asyncio.create_task(one(keeping_engine, LONG))
        await until_tokens(keeping_engine, 5)
        await keeping_engine.apply(staged(models.second, Version(1, 1)))
        sample = await task
        switch = sample.spans[1].start
        logprobs = torch.tensor(sample.logprobs)
        old = recompute(models.base, PROMPT, sample.token_ids)
        torch.testing.assert_close(logprobs[:switch], old[:switch], **TOLERANCE)
        mixed = recompute_mixed(models.base, models.second, PROMPT, sample.token_ids, switch)
        torch.testing.assert_close(logprobs[switch:], mixed, **TOLERANCE)

    async def test_a_switch_that_takes_long_gives_signs_of_life(self, engine, models, monkeypatch):
        """To the requests in progress and to new ones, which wait for the new weights."""
        stream = engine.stream(ask(replace(LONG, max_tokens=None)), Pace(seconds=0.0))
        await anext(stream)
        proceed = delayed_copy(engine, monkeypatch)
        switch = asyncio.create_task(engine.apply(staged(models.second, Version(1, 1))))
        await until(lambda: engine.status().switching)
        late = engine.stream(ask())
        async with asyncio.timeout(DEADLINE_S):
            for each in (stream, late, late):
                while (sign := await anext(each)).parts:
                    pass
                assert (sign.stage, sign.steps) == (Stage.SWITCHING, engine.status().steps)
        assert not switch.done()
        proceed()
        await switch
        assert not engine.status().switching
        progress = [each async for each in late]
        assert progress[-1].stage is Stage.RUNNING
        spans = [span for each in progress for part in each.parts for span in part.spans]
        assert {span.version for span in spans} == {Version(1, 1)}
        await stream.aclose()

    async def test_streams_carry_the_spans_as_they_go(self, engine, models):
        chunks: list[Sample] = []
        stream = parts_of(engine.stream(ask(LONG, n=2)))
        while len(chunks) < 4:
            chunks.append(await anext(stream))
        await engine.apply(staged(models.second, Version(1, 1)))
        chunks.extend(await collect(stream))
        for index in range(2):
            mine = [chunk for chunk in chunks if chunk.index == index]
            token_ids = [id_ for chunk in mine for id_ in chunk.token_ids]
            logprobs = torch.tensor([value for chunk in mine for value in chunk.logprobs])
            versions = [
                version
                for chunk in mine
                for version in versions_of(
                    [span._replace(start=span.start - chunk.offset) for span in chunk.spans], len(chunk.token_ids)
                )
            ]
            switch = versions.count(BASE)
            assert versions == [BASE] * switch + [Version(1, 1)] * (LONG.max_tokens - switch)
            old = recompute(models.base, PROMPT, token_ids)
            new = recompute(models.second, PROMPT, token_ids)
            torch.testing.assert_close(logprobs[:switch], old[:switch], **TOLERANCE)
            torch.testing.assert_close(logprobs[switch:], new[switch:], **TOLERANCE)

    async def test_applying_twice_changes_nothing(self, engine, models):
        await engine.apply(staged(models.second, Version(1, 1)))
        await engine.apply(staged(models.second, Version(1, 1)))
        assert engine.status().version == Version(1, 1)
        assert_policy(models.second, await one(engine))

    async def test_versions_follow_each_other_and_the_base_returns(self, engine, models):
        for version, model in ((Version(1, 1), models.second), (Version(1, 2), models.third)):
            await engine.apply(staged(model, version))
            sample = await one(engine)
            assert [span.version for span in sample.spans] == [version]
            assert_policy(model, sample)
        report = await engine.reload_base()
        assert report.version == engine.status().version == BASE
        assert_policy(models.base, await one(engine))

    async def test_tied_embeddings_change_on_both_ends(self, tied_engine, models):
        assert_policy(models.tied, await one(tied_engine))
        await tied_engine.apply(staged(models.tied_second, Version(1, 1)))
        assert_policy(models.tied_second, await one(tied_engine))
        await tied_engine.reload_base()
        assert_policy(models.tied, await one(tied_engine))

    async def test_prompts_are_computed_anew_after_an_update(self, engine, models):
        prompt = [2 + i * 7 % 120 for i in range(200)]
        await one(engine, prompt=prompt)
        assert_policy(models.base, await one(engine, prompt=prompt), prompt=prompt)
        await engine.apply(staged(models.second, Version(1, 1)))
        assert_policy(models.second, await one(engine, prompt=prompt), prompt=prompt)

    async def test_prompts_are_computed_anew_where_keys_are_kept(self, keeping_engine, models):
        prompt = [2 + i * 7 % 120 for i in range(200)]
        await one(keeping_engine, prompt=prompt)
        await keeping_engine.apply(staged(models.second, Version(1, 1)))
        assert_policy(models.second, await one(keeping_engine, prompt=prompt), prompt=prompt)

    @pytest.mark.parametrize("fault", ["missing", "unknown", "shape"])
    async def test_a_version_that_does_not_fit_is_refused(self, engine, models, fault):
        whole = staged(models.second, Version(1, 1))
        name = "model.norm.weight"
        tensors = {key: spec for key, spec in whole.tensors.items() if key != name}
        if fault == "unknown":
            tensors |= {name: whole.tensors[name], "model.extra.weight": whole.tensors[name]}
        elif fault == "shape":
            tensors[name] = replace(whole.tensors[name], shape=(3,))
        with pytest.raises(EngineError, match="does not fit"):
            await engine.apply(replace(whole, tensors=tensors))
        await self.assert_base_serves(engine, models)

    @pytest.mark.parametrize("fault", ["cut", "gone", "garbage"])
    async def test_a_damaged_file_leaves_the_old_version_serving(self, engine, models, tmp_path, fault):
        whole = staged(models.second, Version(1, 1))
        path = tmp_path / "damaged.safetensors"
        data = whole.path.read_bytes()
        if fault != "gone":
            path.write_bytes(data[: len(data) // 2] if fault == "cut" else b"\xff" * 4096)
        task = asyncio.create_task(one(engine, LONG))
        await until_tokens(engine, 3)
        with pytest.raises(EngineError):
            await engine.apply(replace(whole, path=path))
        sample = await task
        assert [span.version for span in sample.spans] == [BASE]
        assert_policy(models.base, sample)
        await self.assert_base_serves(engine, models)
        shutil.copy(whole.path, path)
        await engine.apply(replace(whole, path=path))
        assert_policy(models.second, await one(engine))

    async def assert_base_serves(self, engine, models):
        status = engine.status()
        assert status.healthy
        assert status.version == BASE
        assert_policy(models.base, await one(engine))


class TestStatus:
    async def test_describes_the_model(self, engine, models):
        info = engine.info
        assert info.architecture == "Qwen3ForCausalLM"
        assert (info.vocabulary_size, info.max_model_len, info.dtype) == (VOCABULARY, CONTEXT, "float32")
        assert info.eos_token_ids == (EOS,)
        assert Path(info.model) == models.base

    async def test_counts_load_and_tokens(self, engine):
        before = engine.status()
        tasks = [asyncio.create_task(one(engine, LONG)) for _ in range(3)]
        await until(lambda: engine.status().running == 3)
        assert 0 <= engine.status().kv_cache_usage <= 1
        await asyncio.gather(*tasks)
        after = engine.status()
        assert after.generated_tokens - before.generated_tokens == 3 * LONG.max_tokens
        assert after.prompt_tokens - before.prompt_tokens == 3 * len(PROMPT)
        assert (after.running, after.queued, after.healthy) == (0, 0, True)


class TestVerification:
    """Engines say whether they compute with the weights of a version: of memory as it is, not of what was once copied."""

    FIRST, SECOND = Version(1, 1), Version(1, 2)

    @staticmethod
    def altered(version: StagedVersion, directory: Path, *names: str) -> StagedVersion:
        """The same version with one value of each of some tensors in another place."""
        tensors = load_file(version.path)
        for name in names:
            tensors[name].view(-1)[-1] += 1.0
        save_file(tensors, directory / "altered.safetensors")
        return replace(version, path=directory / "altered.safetensors")

    async def test_the_version_that_was_applied_is_found_and_no_other(self, engine, models):
        first = staged(models.second, self.FIRST)
        await engine.apply(first)
        assert await engine.verify_weights(first) == []
        assert await engine.verify_weights(staged(models.third, self.SECOND)) == sorted(first.tensors)
        assert await engine.verify_weights(None) == sorted(first.tensors)
        await engine.reload_base()
        assert await engine.verify_weights(None) == []

    async def test_a_tied_output_layer_is_compared_with_the_embedding(self, tied_engine, models):
        await tied_engine.apply(staged(models.tied_second, self.FIRST))
        assert await tied_engine.verify_weights(staged(models.tied_second, self.FIRST)) == []
        assert "model.embed_tokens.weight" in await tied_engine.verify_weights(None)

    @pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight", "lm_head.weight"])
    async def test_one_value_is_enough(self, engine, models, tmp_path, name):
        await engine.apply(staged(models.second, self.FIRST))
        assert await engine.verify_weights(self.altered(staged(models.second, self.FIRST), tmp_path, name)) == [name]

    async def test_a_sample_looks_at_some_tensors(self, engine, models):
        await engine.apply(staged(models.second, self.FIRST))
        found = await engine.verify_weights(staged(models.third, self.SECOND), fraction=0.2)
        assert 0 < len(found) < len(staged(models.third, self.SECOND).tensors)
        assert await engine.verify_weights(staged(models.second, self.FIRST), fraction=0.2) == []

    async def test_a_version_that_is_not_what_serves_is_loaded_anew(self, engine, models, tmp_path):
        right = staged(models.second, self.FIRST)
        await engine.apply(self.altered(right, tmp_path, "model.norm.weight"))
        now_right = replace(right, path=tmp_path / "altered.safetensors")
        save_file(load_file(right.path), tmp_path / "next.safetensors")
        (tmp_path / "next.safetensors").replace(now_right.path)
        assert (await engine.apply(now_right)).pause_s == 0.0, "that version serves already"
        assert await engine.verify_weights(now_right) == ["model.norm.weight"]
        assert (await engine.apply(now_right)).pause_s > 0.0
        assert await engine.verify_weights(now_right) == []

    async def test_tokens_are_produced_meanwhile(self, engine, models):
        await engine.apply(staged(models.second, self.FIRST))
        request = GenerationRequest("request", [5, 9, 17], Sampling(max_tokens=200, ignore_eos=True, temperature=0.0))
        before = (await engine.sample(request)).samples[0]
        task = asyncio.create_task(engine.sample(request))
        assert await engine.verify_weights(staged(models.second, self.FIRST)) == []
        during = (await task).samples[0]
        assert during.finish_reason is FinishReason.LENGTH
        assert during.token_ids == before.token_ids
        torch.testing.assert_close(torch.tensor(during.logprobs), torch.tensor(before.logprobs), atol=1e-4, rtol=0.0)

    async def test_a_version_that_cannot_be_read_is_an_error(self, engine, models, tmp_path):
        with pytest.raises(EngineError):
            await engine.verify_weights(replace(staged(models.second, self.FIRST), path=tmp_path / "gone.safetensors"))


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_continued_sample_is_parsed_whole_by_the_parser_of_its_engine(engine, streamed):
    """vLLM's own parser where vLLM is the engine. One token is a whole call; what it continues is content."""
    said, call = 30, 31
    speaking = tokenizer(
        {said: "Let me look. ", call: '<tool_call>{"name": "look", "arguments": {"x": 1}}</tool_call>'}
    )
    parsers = ENGINES[engine.info.engine].parsers
    replies = reply_format(speaking, "hermes" if parsers else "json", "none", parsers=parsers)
    drain, limits = Drain(), LimitsConfig()
    supervisor = EngineSupervisor(engine, 0, lambda _serving: None)
    servicer = RolloutServicer(
        "runs/test", supervisor, ModelTokenizer(speaking, replies), limits, request_s=60.0, drain=drain
    )
    request = rollout_pb2.GenerateRequest(
        conversation=tokens_pb2.Conversation(tools=[tokens_pb2.Tool(name="look")]),
        rendered=tokens_pb2.TokenIds(ids=[10, 20, said]),
        continued_tokens=1,
        n=2,
        sampling=tokens_pb2.SamplingParams(max_tokens=1, logit_bias={call: 100.0}),
        return_message=True,
    )
    if streamed:
        stream = servicer.stream(rollout_pb2.GenerateStreamRequest(request=request))
        samples = [delta.tokens async for message in stream for delta in message.chunk.deltas]
    else:
        samples = list((await servicer.Generate(request)).samples)
    assert [list(sample.token_ids) for sample in samples] == [[call]] * 2
    for sample in samples:
        assert sample.message.content.strip() == "Let me look."
        assert [(each.name, each.arguments) for each in sample.message.tool_calls] == [("look", '{"x": 1}')]
    ids = {each.id for sample in samples for each in sample.message.tool_calls}
    assert len(ids) == 2
