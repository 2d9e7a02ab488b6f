"""LoRA adapters on real engines, checked against plain transformers with PEFT."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from engine_waits import parts_of, until_tokens
from small_adapters import recompute_adapted, save_adapter, staged_adapter
from small_models import CONTEXT, recompute, save_model, staged

from rollout_svc.config import LoraLimits
from rollout_svc.engines.adapters import AdaptersFullError, LoraEngine, UnknownAdapterError
from rollout_svc.engines.base import EngineError, FinishReason, GenerationRequest, Pace, Sample, Sampling
from rollout_svc.engines.slots.engine import SlotOptions, TransformersEngine
from rollout_svc.engines.vllm.engine import VllmEngine, VllmOptions
from sluice.versions import BASE, Version, VersionSpan

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [5, 9, 17, 33, 64, 21, 7]
FREE = Sampling(max_tokens=24, ignore_eos=True)
LONG = replace(FREE, max_tokens=400)
TOLERANCE = {"atol": 1e-4, "rtol": 0.0}
DEADLINE_S = 60.0
LIMITS = LoraLimits(max_loras=4, max_rank=8)
"""Two versions of the policy at a time, and two names."""


def vllm(model: Path) -> LoraEngine:
    arguments = {"max_model_len": CONTEXT, "kv_cache_memory_bytes": 32 << 20}
    return VllmEngine(str(model), VllmOptions(engine_args=arguments, start_method="fork"), LIMITS)


def transformers(model: Path) -> LoraEngine:
    return TransformersEngine(str(model), SlotOptions(max_model_len=CONTEXT, kv_cache_bytes=32 << 20), LIMITS)


@dataclass(frozen=True)
class Models:
    """Two sets of base weights and adapters of the first."""

    base: Path
    second: Path
    adapters: list[Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    base = save_model(root / "base", 1)
    return Models(
        base,
        save_model(root / "second", 2),
        [save_adapter(root / f"adapter{seed}", base, seed, rank=4 + 2 * (seed % 2)) for seed in range(6)],
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[transformers, vllm])
async def started(request: pytest.FixtureRequest, models: Models) -> AsyncIterator[LoraEngine]:
    engine = request.param(models.base)
    await engine.start()
    yield engine
    await engine.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(started: LoraEngine) -> AsyncIterator[LoraEngine]:
    """The engine on its base weights, idle and without adapters."""
    for info in started.adapters():
        for name in info.names:
            await started.unload_named(name)
    await started.reload_base()
    yield started
    await started.resume()


def ask(sampling: Sampling = FREE, n: int = 1, adapter: str = "") -> GenerationRequest:
    return GenerationRequest("request", PROMPT, sampling, n=n, adapter=adapter)


async def one(engine: LoraEngine, sampling: Sampling = FREE, adapter: str = "") -> Sample:
    return (await engine.sample(ask(sampling, adapter=adapter))).samples[0]


def assert_sampled_by(sample: Sample, version: Version, recomputed: Callable[[list[int]], torch.Tensor]) -> None:
    assert sample.spans == [VersionSpan(0, version)]
    assert len(sample.token_ids) == len(sample.logprobs) > 0
    torch.testing.assert_close(torch.tensor(sample.logprobs), recomputed(sample.token_ids), **TOLERANCE)


def by_adapter(models: Models, number: int, temperature: float = 1.0) -> Callable[[list[int]], torch.Tensor]:
    return lambda ids: recompute_adapted(models.base, models.adapters[number], PROMPT, ids, temperature)


def by_base(models: Models) -> Callable[[list[int]], torch.Tensor]:
    return lambda ids: recompute(models.base, PROMPT, ids)


async def test_adapters_differ_from_their_base(models):
    """Or the tests below would prove nothing."""
    ids = [3, 40, 90, 12]
    difference = recompute(models.base, PROMPT, ids) - by_adapter(models, 0)(ids)
    assert difference.abs().max() > 0.1


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_log_probabilities_are_those_of_base_and_adapter(engine, models, temperature):
    await engine.apply_adapter(staged_adapter(models.adapters[0], Version(1, 1)))
    assert engine.status().version == Version(1, 1)
    sample = await one(engine, replace(FREE, temperature=temperature, max_tokens=60))
    assert_sampled_by(sample, Version(1, 1), by_adapter(models, 0, temperature))


async def test_an_adapter_leaves_the_weights_untouched(engine, models):
    await engine.apply_adapter(staged_adapter(models.adapters[0], Version(1, 1)))
    await engine.apply_adapter(staged_adapter(models.adapters[1], Version(1, 2)))
    await engine.reload_base()
    assert_sampled_by(await one(engine), BASE, by_base(models))


async def test_each_of_several_versions_under_way_gives_its_own_log_probabilities(engine, models):
    base = asyncio.create_task(engine.sample(ask(LONG, n=2)))
    await until_tokens(engine, 4)
    await engine.apply_adapter(staged_adapter(models.adapters[0], Version(1, 1)))
    first = asyncio.create_task(engine.sample(ask(LONG, n=2)))
    await until_tokens(engine, 8)
    await engine.apply_adapter(staged_adapter(models.adapters[1], Version(1, 2)))
    second = await one(engine)
    assert_sampled_by(second, Version(1, 2), by_adapter(models, 1))
    for sample in (await first).samples:
        assert sample.finish_reason is FinishReason.LENGTH
        assert_sampled_by(sample, Version(1, 1), by_adapter(models, 0))
    for sample in (await base).samples:
        assert sample.finish_reason is FinishReason.LENGTH
        assert_sampled_by(sample, BASE, by_base(models))


async def test_the_oldest_version_retires_when_there_is_no_more_room(engine, models):
    under_way = []
    for number in range(LIMITS.max_loras):
        await engine.apply_adapter(staged_adapter(models.adapters[number], Version(1, number)))
        under_way.append(asyncio.create_task(engine.sample(ask(LONG))))
        await until_tokens(engine, 4)
    await engine.apply_adapter(staged_adapter(models.adapters[4], Version(1, 4)))
    samples = [(await task).samples[0] for task in under_way]
    assert [each.finish_reason for each in samples] == [FinishReason.VERSION_RETIRED] + [FinishReason.LENGTH] * 3
    assert 0 < len(samples[0].token_ids) < LONG.max_tokens
    for number, sample in enumerate(samples):
        assert_sampled_by(sample, Version(1, number), by_adapter(models, number))
    assert Version(1, 0) not in [info.version for info in engine.adapters()]


async def test_a_stream_says_that_its_version_was_retired(engine, models):
    async def collect() -> list[Sample]:
        return [part async for part in parts_of(engine.stream(ask(LONG), Pace(seconds=0.001)))]

    await engine.apply_adapter(staged_adapter(models.adapters[0], Version(1, 1)))
    task = asyncio.create_task(collect())
    await until_tokens(engine, 4)
    await engine.apply(staged(models.second, Version(1, 2)))
    chunks = await task
    assert chunks[-1].finish_reason is FinishReason.VERSION_RETIRED
    assert {span.version for chunk in chunks for span in chunk.spans} == {Version(1, 1)}
    ids = [id_ for chunk in chunks for id_ in chunk.token_ids]
    logprobs = torch.tensor([value for chunk in chunks for value in chunk.logprobs])
    torch.testing.assert_close(logprobs, by_adapter(models, 0)(ids), **TOLERANCE)


async def test_whole_weights_still_change_and_take_their_adapters_along(engine, models):
    await engine.load_named("old", staged_adapter(models.adapters[0], Version(1, 1)))
    await engine.apply(staged(models.second, Version(1, 2)))
    assert engine.adapters() == []
    sample = await one(engine)
    assert_sampled_by(sample, Version(1, 2), lambda ids: recompute(models.second, PROMPT, ids))
    with pytest.raises(EngineError, match=r"belongs to version 0\.0, the weights are 1\.2"):
        await engine.apply_adapter(staged_adapter(models.adapters[0], Version(1, 3)))


async def test_an_adapter_of_other_weights_than_the_model_s_own(engine, models, tmp_path):
    adapter = save_adapter(tmp_path / "adapter", models.second, 9)
    await engine.apply(staged(models.second, Version(1, 2)))
    await engine.apply_adapter(staged_adapter(adapter, Version(1, 3), base=Version(1, 2)))
    sample = await one(engine)
    assert_sampled_by(sample, Version(1, 3), lambda ids: recompute_adapted(models.second, adapter, PROMPT, ids))
    await engine.apply(staged(models.second, Version(1, 2)))
    sample = await one(engine)
    assert_sampled_by(sample, Version(1, 2), lambda ids: recompute(models.second, PROMPT, ids))


async def test_named_adapters_stand_beside_the_policy(engine, models):
    await engine.load_named("a", staged_adapter(models.adapters[0], Version(1, 1)))
    await engine.load_named("b", staged_adapter(models.adapters[1], Version(1, 2)))
    results = await asyncio.gather(*[one(engine, adapter=name) for name in ("a", "b", "") * 2])
    for sample, number in zip(results, [0, 1, None] * 2, strict=True):
        if number is None:
            assert_sampled_by(sample, BASE, by_base(models))
        else:
            assert_sampled_by(sample, Version(1, number + 1), by_adapter(models, number))
    assert [(info.names, info.version, info.serves_policy) for info in engine.adapters()] == [
        (("a",), Version(1, 1), False),
        (("b",), Version(1, 2), False),
    ]


async def test_names_leave_room_for_the_policy(engine, models):
    for number, name in enumerate("ab"):
        await engine.load_named(name, staged_adapter(models.adapters[number], Version(1, number)))
    with pytest.raises(AdaptersFullError, match=r"raise rollout\.lora\.max_loras"):
        await engine.load_named("c", staged_adapter(models.adapters[2], Version(1, 2)))
    for number in (3, 4, 5):
        await engine.apply_adapter(staged_adapter(models.adapters[number], Version(1, number)))
    assert_sampled_by(await one(engine), Version(1, 5), by_adapter(models, 5))
    assert_sampled_by(await one(engine, adapter="a"), Version(1, 0), by_adapter(models, 0))


async def test_unloading_a_name_ends_its_requests_and_no_others(engine, models):
    same = staged_adapter(models.adapters[0], Version(1, 1))
    await engine.apply_adapter(same)
    await engine.load_named("a", same)
    named = asyncio.create_task(engine.sample(ask(LONG, n=2, adapter="a")))
    policy = asyncio.create_task(engine.sample(ask(LONG)))
    await until_tokens(engine, 9)
    assert await engine.unload_named("a")
    for sample in (await named).samples:
        assert sample.finish_reason is FinishReason.VERSION_RETIRED
        assert_sampled_by(sample, Version(1, 1), by_adapter(models, 0))
    assert (await policy).samples[0].finish_reason is FinishReason.LENGTH
    assert not await engine.unload_named("a")
    with pytest.raises(UnknownAdapterError, match="no adapter 'a' is loaded"):
        await one(engine, adapter="a")


async def test_a_name_moves_to_another_version(engine, models):
    await engine.load_named("a", staged_adapter(models.adapters[0], Version(1, 1)))
    task = asyncio.create_task(engine.sample(ask(LONG, adapter="a")))
    await until_tokens(engine, 4)
    await engine.load_named("a", staged_adapter(models.adapters[1], Version(1, 2)))
    assert_sampled_by(await one(engine, adapter="a"), Version(1, 2), by_adapter(models, 1))
    sample = (await task).samples[0]
    assert sample.finish_reason is FinishReason.LENGTH
    assert_sampled_by(sample, Version(1, 1), by_adapter(models, 0))


async def test_no_adapter_reaches_requests_without_one(engine, models):
    """However many are loaded: vLLM's kernels for the CPU give such rows the adapter of the last place."""
    for number, name in enumerate("ab"):
        await engine.load_named(name, staged_adapter(models.adapters[number], Version(1, number)))
    tasks = [asyncio.create_task(one(engine, LONG)) for _ in range(2)]
    await until_tokens(engine, 4)
    for number in (2, 3):
        await engine.apply_adapter(staged_adapter(models.adapters[number], Version(1, number)))
        tasks.append(asyncio.create_task(one(engine, LONG)))
        await until_tokens(engine, 4)
    for sample in [await task for task in tasks[:2]]:
        assert_sampled_by(sample, BASE, by_base(models))


async def test_the_prefix_cache_gives_no_version_what_another_wrote(engine, models):
    prompt = [2 + position % 100 for position in range(300)]
    for number in (0, 1, 0):
        await engine.apply_adapter(staged_adapter(models.adapters[number], Version(2, number)))
        for _ in range(2):
            sample = (await engine.sample(GenerationRequest("long", prompt, FREE))).samples[0]
            expected = recompute_adapted(models.base, models.adapters[number], prompt, sample.token_ids)
            torch.testing.assert_close(torch.tensor(sample.logprobs), expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank": 16}, "raise rollout.lora.max_rank, now 8"),
        ({"use_dora": True}, "uses use_dora"),
        ({"modules": ("lm_head",)}, "must hold pairs of lora_A and lora_B"),
        ({"rank_pattern": {"q_proj": 2}}, "uses rank_pattern"),
    ],
)
async def test_an_adapter_that_cannot_be_served_exactly_is_refused(engine, models, tmp_path, change, words):
    await engine.apply_adapter(staged_adapter(models.adapters[0], Version(1, 1)))
    adapter = save_adapter(tmp_path / "adapter", models.base, 7, **change)
    with pytest.raises(EngineError, match=words):
        await engine.apply_adapter(staged_adapter(adapter, Version(1, 2)))
    assert engine.status().version == Version(1, 1)
    assert_sampled_by(await one(engine), Version(1, 1), by_adapter(models, 0))


async def test_a_restarted_engine_holds_what_was_wanted_of_the_one_before(engine, models):
    await engine.apply_adapter(staged_adapter(models.adapters[0], Version(1, 1)))
    await engine.apply_adapter(staged_adapter(models.adapters[1], Version(1, 2)))
    await engine.load_named("a", staged_adapter(models.adapters[2], Version(1, 3)))
    assert await engine.restart() == Version(1, 2)
    assert [info.version for info in engine.adapters()] == [Version(1, 2), Version(1, 3)]
    assert_sampled_by(await one(engine), Version(1, 2), by_adapter(models, 1))
    assert_sampled_by(await one(engine, adapter="a"), Version(1, 3), by_adapter(models, 2))


async def test_an_engine_without_adapters_says_which_setting_it_lacks(models):
    engine = TransformersEngine(str(models.base), SlotOptions(max_model_len=CONTEXT, kv_cache_bytes=32 << 20))
    await engine.start()
    try:
        with pytest.raises(EngineError, match=r"set rollout\.lora\.enabled = true"):
            await engine.apply_adapter(staged_adapter(models.adapters[0], Version(1, 1)))
    finally:
        await engine.stop()


async def test_live_weights_are_still_compared_beneath_adapters(engine, models):
    await engine.apply_adapter(staged_adapter(models.adapters[0], Version(1, 1)))
    assert await engine.verify_weights(None) == []
    other = staged(models.second, Version(1, 2))
    assert "model.layers.1.mlp.down_proj.weight" in await engine.verify_weights(other)
    await engine.apply(other)
    assert await engine.verify_weights(other) == []


@pytest.mark.soak
async def test_tensor_parallel_workers_serve_adapters_together(models):
    """In `make test` one worker serves adapters, and tensor-parallel workers switch weights (test_vllm_weight_update.py)."""
    arguments = {"max_model_len": CONTEXT, "kv_cache_memory_bytes": 32 << 20, "tensor_parallel_size": 2}
    engine = VllmEngine(str(models.base), VllmOptions(engine_args=arguments), LIMITS)
    await engine.start()
    try:
        for number in (0, 1):
            await engine.apply_adapter(staged_adapter(models.adapters[number], Version(1, number)))
            assert_sampled_by(await one(engine), Version(1, number), by_adapter(models, number))
        await engine.reload_base()
        assert_sampled_by(await one(engine), BASE, by_base(models))
    finally:
        await engine.stop()


async def test_a_load_whose_caller_left_can_be_repeated(engine, models):
    adapter = staged_adapter(models.adapters[0], Version(1, 71))

    def is_in() -> bool:
        return adapter.version in [info.version for info in engine.adapters()]

    loading = asyncio.create_task(engine.load_named("left", adapter))
    async with asyncio.timeout(DEADLINE_S):
        while not is_in():  # noqa: ASYNC110 - the moment before it is in
            await asyncio.sleep(0)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert not is_in()
    await engine.load_named("left", adapter)
    assert is_in()
    assert_sampled_by(await one(engine, adapter="left"), adapter.version, by_adapter(models, 0))
