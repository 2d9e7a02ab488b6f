"""What the transformers engine does beyond the conformance tests."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_waits import first_tokens_only, step_until_stopped, until, until_tokens
from safetensors.torch import load_file, save_file
from simulated_clock import SimulatedClock
from small_models import CONTEXT, VOCABULARY, greedy, recompute, save_model, staged, versions_of
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rollout_svc.engines.base import EngineBusyError, EngineError, FinishReason, GenerationRequest, PauseMode, Sampling
from rollout_svc.engines.slots.engine import SlotOptions, TransformersEngine
from sluice.clock import CLOCK, Clock
from sluice.versions import BASE, Version
from weightsync.staged import HeldVersions

pytestmark = pytest.mark.slow

PROMPT = [5, 9, 17, 33, 64, 21, 7]
FREE = Sampling(max_tokens=24, ignore_eos=True)
LONG = replace(FREE, max_tokens=400)
DEADLINE_S = 60.0


def ask(sampling: Sampling = FREE, name: str = "request", **more: Any) -> GenerationRequest:
    return GenerationRequest(name, more.pop("prompt", PROMPT), sampling, **more)


@asynccontextmanager
async def running(model: Path, clock: Clock = CLOCK, **settings: Any) -> AsyncIterator[TransformersEngine]:
    engine = TransformersEngine(str(model), SlotOptions(**settings), clock=clock)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def save(model: PreTrainedModel, directory: Path) -> Path:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    model.save_pretrained(directory)
    return directory


@torch.no_grad()
def reference(directory: Path, model_class: type[PreTrainedModel], sampled: list[int]) -> torch.Tensor:
    model = model_class.from_pretrained(directory).eval()
    logits = model(torch.tensor([PROMPT + sampled])).logits[0, len(PROMPT) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(sampled)[:, None])[:, 0]


SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
}


class TestModels:
    @pytest.mark.parametrize(
        ("config", "model_class"),
        [
            (LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=4), LlamaForCausalLM),
            (LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=1), LlamaForCausalLM),
            (Qwen2Config(**SIZES, num_attention_heads=4, num_key_value_heads=2), Qwen2ForCausalLM),
            (GPT2Config(vocab_size=128, n_positions=256, n_embd=64, n_layer=2, n_head=4), GPT2LMHeadModel),
        ],
        ids=["llama", "llama-one-kv-head", "qwen2", "gpt2"],
    )
    async def test_decoders_with_plain_attention_are_served(self, tmp_path, config, model_class):
        torch.manual_seed(0)
        directory = save(model_class(config), tmp_path / "model")
        async with running(directory) as engine:
            result = await engine.sample(ask(n=3))
            for sample in result.samples:
                expected = reference(directory, model_class, sample.token_ids)
                torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-4, rtol=0)

    @pytest.mark.parametrize(
        ("config", "model_class", "reason"),
        [
            (
                MistralConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, sliding_window=16),
                MistralForCausalLM,
                "sliding window",
            ),
            (
                Gemma2Config(**SIZES, num_attention_heads=4, num_key_value_heads=2, head_dim=16),
                Gemma2ForCausalLM,
                "softcap",
            ),
            (
                MixtralConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4),
                MixtralForCausalLM,
                "does not name so",
            ),
        ],
        ids=["sliding-window", "softcap", "fused-experts"],
    )
    async def test_what_cannot_be_served_exactly_is_refused_at_the_start(self, tmp_path, config, model_class, reason):
        directory = save(model_class(config), tmp_path / "model")
        with pytest.raises(EngineError, match=reason) as refusal:
            await TransformersEngine(str(directory)).start()
        assert 'engine = "vllm"' in str(refusal.value)

    async def test_bfloat16_stays_near_the_reference(self, tmp_path):
        directory = save_model(tmp_path / "bf16", 1, dtype=torch.bfloat16)
        async with running(directory) as engine:
            assert engine.info.dtype == "bfloat16"
            sample = (await engine.sample(ask())).samples[0]
            difference = (torch.tensor(sample.logprobs) - recompute(directory, PROMPT, sample.token_ids)).abs()
            assert float(difference.mean()) < 0.2

    async def test_a_wish_for_another_precision_is_followed(self, models):
        async with running(models.base, dtype="bfloat16") as engine:
            assert engine.info.dtype == "bfloat16"

    @pytest.mark.parametrize(
        ("settings", "remedy"),
        [({"kv_cache_bytes": 1000}, "max_model_len"), ({"max_model_len": 2 * CONTEXT}, "positions")],
    )
    async def test_settings_that_cannot_work_are_refused(self, models, settings, remedy):
        with pytest.raises(EngineError, match=remedy):
            await TransformersEngine(str(models.base), SlotOptions(**settings)).start()

    async def test_a_directory_without_a_model_is_refused(self, tmp_path):
        with pytest.raises(EngineError, match="cannot load"):
            await TransformersEngine(str(tmp_path)).start()


class TestBatching:
    async def test_end_tokens_beyond_the_vocabulary_end_nothing(self, tmp_path):
        """GPT-2's configuration names one by default; masking it must not reach outside of the logits."""
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=128, n_positions=256, n_embd=64, n_layer=2, n_head=4)
        async with running(save(GPT2LMHeadModel(config), tmp_path / "model")) as engine:
            assert engine.info.eos_token_ids == ()
            sample = (await engine.sample(ask(Sampling(max_tokens=9, min_tokens=3)))).samples[0]
            assert len(sample.token_ids) == 9

    async def test_requests_of_all_lengths_share_the_steps(self, models):
        prompts = [[2 + (i * 7 + j) % 120 for j in range(1 + 17 * i % 90)] for i in range(12)]
        expected = [greedy(models.base, prompt, 3 + 5 * i) for i, prompt in enumerate(prompts)]
        async with running(models.base, max_running=5, prefill_tokens=64) as engine:
            sampling = replace(FREE, temperature=0.0)
            requests = [
                engine.sample(ask(replace(sampling, max_tokens=3 + 5 * i), str(i), prompt=prompt))
                for i, prompt in enumerate(prompts)
            ]
            results = await asyncio.gather(*requests)
            assert [result.samples[0].token_ids for result in results] == expected

    async def test_a_request_may_have_more_samples_than_there_are_places(self, models):
        async with running(models.base, max_running=3) as engine:
            result = await engine.sample(ask(n=8, prompt_logprobs=True))
            assert len({tuple(sample.token_ids) for sample in result.samples}) == 8
            assert len(result.prompt_logprobs) == len(PROMPT) - 1
            assert engine.status().prompt_tokens == len(PROMPT)
            for sample in result.samples:
                expected = recompute(models.base, PROMPT, sample.token_ids)
                torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-4, rtol=0)

    async def test_a_small_cache_makes_samples_wait_instead_of_failing(self, models):
        one_sample = 2 * 2 * 2 * 32 * 4 * CONTEXT
        async with running(models.base, kv_cache_bytes=one_sample) as engine:
            results = await asyncio.gather(*(engine.sample(ask(LONG, str(i))) for i in range(3)))
            assert [len(result.samples[0].token_ids) for result in results] == [400, 400, 400]
            assert engine.status().kv_cache_usage == 0

    async def test_urgent_requests_go_first(self, models):
        order: list[str] = []

        async def one(name: str, priority: int) -> None:
            await engine.sample(ask(name=name, priority=priority))
            order.append(name)

        async with running(models.base, max_running=1) as engine:
            await engine.pause(PauseMode.KEEP)
            tasks = [asyncio.create_task(one(name, priority)) for name, priority in (("late", 1), ("a", 0), ("b", 0))]
            tasks.append(asyncio.create_task(one("urgent", -5)))
            async with asyncio.timeout(DEADLINE_S):
                while engine.status().queued < 4:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            await engine.resume()
            await asyncio.gather(*tasks)
        assert order == ["urgent", "a", "b", "late"]

    async def test_a_full_queue_refuses_and_goes_on(self, models):
        async with running(models.base, max_running=1, max_queued=2) as engine:
            await engine.pause(PauseMode.KEEP)
            tasks = [asyncio.create_task(engine.sample(ask(name=str(i)))) for i in range(2)]
            async with asyncio.timeout(DEADLINE_S):
                while engine.status().queued < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            with pytest.raises(EngineBusyError, match="2"):
                await engine.sample(ask())
            await engine.resume()
            assert [len((await task).samples[0].token_ids) for task in tasks] == [24, 24]

    @pytest.mark.parametrize(
        "request_",
        [
            ask(prompt=[]),
            ask(prompt=[VOCABULARY]),
            ask(prompt=[-1]),
            ask(replace(FREE, stop_token_ids=(VOCABULARY,))),
            ask(replace(FREE, logit_bias={VOCABULARY: 1.0})),
        ],
        ids=["empty", "beyond", "negative", "stop", "bias"],
    )
    async def test_ids_outside_of_the_vocabulary_are_refused(self, models, request_):
        async with running(models.base) as engine:
            with pytest.raises(ValueError, match=r"tokens|vocabulary"):
                await engine.sample(request_)
            assert len((await engine.sample(ask())).samples[0].token_ids) == 24


class TestPauses:
    async def test_while_requests_end_new_ones_wait_for_resume(self, models):
        async with running(models.base) as engine:
            with first_tokens_only(engine):
                early = asyncio.create_task(engine.sample(ask(LONG, "early")))
                await until_tokens(engine, 1)
                pausing = asyncio.create_task(engine.pause(PauseMode.WAIT))
                await until(lambda: engine._running._draining)
                late = asyncio.create_task(engine.sample(ask(name="late")))
                await until(lambda: engine.status().queued == 1)
            await pausing
            assert len((await early).samples[0].token_ids) == 400
            assert engine.status().paused
            assert engine.status().queued == 1
            await engine.resume()
            assert len((await late).samples[0].token_ids) == 24

    async def test_a_wait_that_takes_too_long_is_given_up(self, models):
        clock = SimulatedClock()
        # What the engine's thread is told takes real time, while the drain's passes at once.
        async with running(models.base, clock, command_deadline_s=1e6) as engine:
            with first_tokens_only(engine):
                task = asyncio.create_task(engine.sample(ask(LONG)))
                await until_tokens(engine, 1)
                pausing = asyncio.create_task(engine.pause(PauseMode.WAIT))
                await until(lambda: engine._running._draining)
                await clock.until(pausing.done, step_s=SlotOptions.drain_deadline_s)
                with pytest.raises(EngineError, match="KEEP"):
                    await pausing
                assert not engine.status().paused
            assert len((await task).samples[0].token_ids) == 400

    async def test_abort_reaches_requests_that_wait_in_a_drain(self, models):
        async with running(models.base) as engine:
            await engine.pause(PauseMode.WAIT)
            late = asyncio.create_task(engine.sample(ask(name="late")))
            async with asyncio.timeout(DEADLINE_S):
                while engine.status().queued < 1:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            assert await engine.abort("late")
            assert (await late).samples[0].finish_reason is FinishReason.ABORT


class TestFailures:
    async def test_nan_ends_what_it_reached_and_nothing_after(self, models, tmp_path):
        poisoned = tmp_path / "nan.safetensors"
        tensors = load_file(models.second / "model.safetensors")
        tensors["model.layers.0.self_attn.v_proj.weight"].fill_(float("nan"))
        save_file(tensors, poisoned)
        async with running(models.base) as engine:
            with first_tokens_only(engine):
                task = asyncio.create_task(engine.sample(ask(LONG, n=3)))
                await until_tokens(engine, 3)
                await engine.apply(replace(staged(models.second, Version(1, 1)), path=poisoned))
            for sample in (await task).samples:
                assert sample.finish_reason is FinishReason.ERROR
                assert versions_of(sample.spans, len(sample.token_ids)) == [BASE] * len(sample.token_ids)
            await engine.apply(staged(models.second, Version(1, 2)))
            for sample in (await engine.sample(ask(n=3))).samples:
                expected = recompute(models.second, PROMPT, sample.token_ids)
                torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-4, rtol=0)

    async def test_a_failed_step_fails_its_requests_and_a_restart_serves_the_same_version(self, models):
        async with running(models.base) as engine:
            await engine.apply(staged(models.second, Version(1, 1)))
            batch = engine._running.batch
            step = batch.step

            def failing(*arguments: object) -> object:
                if batch.generated_tokens > 3:
                    batch._cache.keys = torch.zeros(0)  # as a device that fails under it
                return step(*arguments)

            batch.step = failing
            with pytest.raises(EngineError, match="restart"):
                await asyncio.wait_for(engine.sample(ask(LONG)), DEADLINE_S)
            assert not engine.status().healthy
            with pytest.raises(EngineError, match="broken"):
                await engine.sample(ask())
            assert await engine.restart() == Version(1, 1)
            assert engine.status().healthy
            sample = (await engine.sample(ask())).samples[0]
            expected = recompute(models.second, PROMPT, sample.token_ids)
            torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-4, rtol=0)

    async def test_a_step_that_hangs_breaks_the_engine_instead_of_its_callers(self, models, monkeypatch):
        hanging, released = threading.Event(), threading.Event()

        def hang(*_: object) -> list[object]:
            hanging.set()
            released.wait(60)
            return []

        clock, command_s = SimulatedClock(), 1.0  # real time, when the thread of the step is given up at the restart
        async with running(models.base, clock, command_deadline_s=command_s) as engine:
            monkeypatch.setattr(engine._running.batch, "step", hang)
            task = asyncio.create_task(engine.sample(ask(LONG)))
            await asyncio.to_thread(hanging.wait, DEADLINE_S)
            try:
                async with asyncio.timeout(DEADLINE_S):
                    pausing = asyncio.create_task(engine.pause(PauseMode.KEEP))
                    await clock.advance(command_s)
                    with pytest.raises(EngineError, match="still in one step"):
                        await pausing
                    with pytest.raises(EngineError, match="still in one step"):
                        await task
                    assert not engine.status().healthy
                    assert await engine.restart() == BASE
                    assert (await engine.sample(ask())).samples[0].token_ids
            finally:
                released.set()

    async def test_a_model_that_loads_too_long_is_not_waited_for(self, models, monkeypatch):
        released, clock = threading.Event(), SimulatedClock()
        engine = TransformersEngine(str(models.base), clock=clock)
        monkeypatch.setattr(engine, "_build", lambda: released.wait(60))
        try:
            starting = asyncio.create_task(engine.start())
            await clock.advance(SlotOptions.start_deadline_s)
            with pytest.raises(EngineError, match="start_s"):
                await asyncio.wait_for(starting, DEADLINE_S)
        finally:
            released.set()

    async def test_a_request_whose_first_step_fails_is_told(self, models):
        async with running(models.base) as engine:
            engine._running.batch._cache.keys = torch.zeros(0)
            with pytest.raises(EngineError, match="restart"):
                await asyncio.wait_for(engine.sample(ask(n=2)), DEADLINE_S)

    @pytest.mark.parametrize("failures", [1, 2])
    async def test_a_copy_that_fails_half_way_is_recovered_by_the_engine(self, models, monkeypatch, failures):
        """The version before is copied back; if that fails too, nothing is sampled until a restart serves it."""
        first, second = staged(models.second, Version(1, 1)), staged(models.third, Version(1, 2))
        async with running(models.base) as engine:
            await engine.apply(first)
            weights, left = engine._running._weights, [failures]
            copy = weights.copy

            def fail_half_way(paths):
                if left[0]:
                    left[0] -= 1
                    weights._live["model.norm.weight"].zero_()
                    raise EngineError("the weights could not be copied")
                copy(paths)

            monkeypatch.setattr(weights, "copy", fail_half_way)
            with pytest.raises(EngineError, match="could not be copied"):
                await engine.apply(second)
            assert engine.status().healthy is (failures == 1)
            if failures == 2:
                assert await engine.restart() == Version(1, 1)
            assert engine.held() == HeldVersions(Version(1, 1), Version(1, 1))
            assert await engine.verify_weights(first) == []

    async def test_a_restart_without_the_staged_file_serves_the_base(self, models, tmp_path):
        path = tmp_path / "staged.safetensors"
        shutil.copy(models.second / "model.safetensors", path)
        async with running(models.base) as engine:
            await engine.apply(replace(staged(models.second, Version(1, 1)), path=path))
            path.unlink()
            assert await engine.restart() == BASE

    async def test_a_restart_with_a_damaged_staged_file_fails_once_and_then_serves_the_base(self, models, tmp_path):
        path = tmp_path / "staged.safetensors"
        shutil.copy(models.second / "model.safetensors", path)
        async with running(models.base) as engine:
            await engine.apply(replace(staged(models.second, Version(1, 1)), path=path))
            path.write_bytes(b"damaged")
            with pytest.raises(EngineError, match="stage it again"):
                await engine.restart()
            assert not engine.status().healthy
            assert await engine.restart() == BASE
            assert engine.status().healthy

    async def test_stopping_ends_every_request(self, models):
        engine = TransformersEngine(str(models.base), SlotOptions(max_running=1))
        await engine.start()
        last_step = step_until_stopped(engine, 3)
        tasks = [asyncio.create_task(engine.sample(ask(LONG, str(i)))) for i in range(3)]
        await asyncio.to_thread(last_step.wait, DEADLINE_S)
        await engine.stop()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(outcome) for outcome in outcomes] == ["the engine was stopped"] * 3
        await engine.stop()
        with pytest.raises(EngineError, match="start"):
            await engine.sample(ask())

    @pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
    async def test_requests_that_are_given_up_as_it_stops_end_in_its_thread(self, models):
        async with running(models.base) as engine:
            last_step = step_until_stopped(engine, 16)
            tasks = [asyncio.create_task(engine.sample(ask(LONG, str(index)))) for index in range(8)]
            await asyncio.to_thread(last_step.wait, DEADLINE_S)
            for task in tasks[:4]:  # rows behind theirs move up
                task.cancel()
            await asyncio.sleep(0)
            await engine.stop()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, EngineError | asyncio.CancelledError) for each in answers)

    async def test_a_command_whose_caller_is_gone_is_skipped(self, models):
        async with running(models.base) as engine:
            task = asyncio.create_task(engine.sample(ask(LONG)))
            await until_tokens(engine, 3)
            commands = [asyncio.create_task(engine.abort("request")) for _ in range(5)]
            await asyncio.sleep(0)
            for command in commands:
                command.cancel()
            await asyncio.gather(*commands, return_exceptions=True)
            assert engine.status().healthy
            await task
            assert len((await engine.sample(ask())).samples[0].token_ids) == 24

    async def test_a_request_outlives_no_event_loop(self, models):
        """A library user's loop may close under a request; the engine must not mind."""
        engine = TransformersEngine(str(models.base))
        await engine.start()
        started = asyncio.Event()

        def other_loop() -> None:
            async def give_up() -> None:
                task = asyncio.ensure_future(engine.sample(ask(replace(FREE, max_tokens=200))))
                await asyncio.sleep(0)
                started_in.call_soon_threadsafe(started.set)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

            asyncio.run(give_up())

        started_in = asyncio.get_running_loop()
        await asyncio.to_thread(other_loop)
        await started.wait()
        assert len((await engine.sample(ask())).samples[0].token_ids) == 24
        assert engine.status().healthy
        await engine.stop()
