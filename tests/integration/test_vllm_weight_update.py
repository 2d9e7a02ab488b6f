"""Weights change under vLLM while it samples: under load, half-way failures, tensor parallelism, sharded bases.

Tests of one class share an engine, which each of them leaves on its base weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from engine_waits import parts_of, until_tokens
from safetensors.torch import load_file, save_file
from small_models import CONTEXT, load, recompute, save_model, staged, versions_of

from rollout_svc.engines.base import EngineError, FinishReason, GenerationRequest, Sample, Sampling
from rollout_svc.engines.vllm import processes as vllm_processes
from rollout_svc.engines.vllm.engine import VllmEngine, VllmOptions
from sluice.versions import BASE, Version, VersionSpan
from weightsync.staged import StagedVersion

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [5, 9, 17, 33, 64]
LONG = Sampling(max_tokens=400, ignore_eos=True)
SHORT = replace(LONG, max_tokens=24)
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [save_model(root / f"m{seed}", seed) for seed in range(3)]


@asynccontextmanager
async def started(
    model: Path, *, kv_policy: str = "recompute", double_buffer: bool = True, **arguments: object
) -> AsyncIterator[VllmEngine]:
    defaults = {"max_model_len": CONTEXT, "kv_cache_memory_bytes": 32 << 20}
    engine = VllmEngine(
        str(model), VllmOptions(engine_args=defaults | arguments, kv_policy=kv_policy, double_buffer=double_buffer)
    )
    import altering_worker  # imports vLLM, which a process that only collects tests need not

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_processes, "WORKER_EXTENSION", altering_worker.NAME)
        await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def ask(sampling: Sampling = SHORT, n: int = 1) -> GenerationRequest:
    return GenerationRequest("request", PROMPT, sampling, n=n)


async def one(engine: VllmEngine, sampling: Sampling = SHORT) -> Sample:
    return (await engine.sample(ask(sampling))).samples[0]


def assert_tokens_follow_their_versions(sample: Sample, weights: dict[Version, Path], atol: float = 1e-4) -> None:
    versions = versions_of(sample.spans, len(sample.token_ids))
    for version in set(versions):
        mine = torch.tensor([each == version for each in versions])
        expected = recompute(weights[version], PROMPT, sample.token_ids)
        torch.testing.assert_close(torch.tensor(sample.logprobs)[mine], expected[mine], atol=atol, rtol=0.0)


def shared_segments() -> set[Path]:
    """What vLLM's tensor-parallel workers would leave behind: no process has it open, as those of other tests do."""
    maps = ""
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended
            maps += path.read_text()
    return {segment for segment in Path("/dev/shm").glob("vllm_dist_*") if str(segment) not in maps}


def split(model: Path, directory: Path) -> Path:
    """The same model in several files."""
    load(model).save_pretrained(directory, max_shard_size="100KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    return directory


async def assert_altered_weights_are_found(engine: VllmEngine, model: Path) -> None:
    """Alter one live value after the other; verification names their tensors, and another apply loads them again."""
    version = staged(model, Version(5, 1))
    await engine.apply(version)
    assert await engine.verify_weights(version) == []
    altered: list[str] = []
    for module, found in ALTERED.items():
        await engine._llm.collective_rpc("set_one", kwargs={"module": module})
        altered.append(found)
        assert await engine.verify_weights(version) == sorted(altered)
    await engine.apply(version)
    assert await engine.verify_weights(version) == []
    assert_tokens_follow_their_versions(await one(engine), {Version(5, 1): model})


ALTERED = {
    "model.layers.0.input_layernorm": "model.layers.0.input_layernorm.weight",
    "model.layers.1.mlp.gate_up_proj": "model.layers.1.mlp.up_proj.weight",
    "model.layers.0.self_attn.o_proj": "model.layers.0.self_attn.o_proj.weight",
    "model.embed_tokens": "model.embed_tokens.weight",
}
"""By the module of vLLM that is altered: the tensor at fault in the model's files."""


@pytest_asyncio.fixture(scope="class", loop_scope="module", params=[True, False], ids=["buffered", "in_place"])
async def engine(request, models):
    async with started(models[0], double_buffer=request.param) as engine:
        yield engine


@pytest_asyncio.fixture(scope="class", loop_scope="module")
async def keeping_engine(models, tmp_path_factory):
    """Its base has several files."""
    async with started(split(models[0], tmp_path_factory.mktemp("split")), kv_policy="keep") as engine:
        yield engine


@pytest_asyncio.fixture(scope="class", loop_scope="module")
async def half_engine(tmp_path_factory):
    base = save_model(tmp_path_factory.mktemp("half"), 7, dtype=torch.bfloat16)
    async with started(base) as engine:
        yield engine


@pytest.fixture(
    scope="class",
    params=[
        # In `make test` one worker loads tied weights in place, and two workers are double-buffered.
        pytest.param((True, False), id="tied_in_place", marks=pytest.mark.soak),
        pytest.param((False, True), id="buffered"),
    ],
)
def parallel(request, tmp_path_factory) -> tuple[list[Path], bool]:
    """Two sets of weights, tied or not, and whether the engine is double-buffered."""
    tied, double_buffer = request.param
    root = tmp_path_factory.mktemp("parallel")
    return [save_model(root / str(seed), seed, tied=tied) for seed in range(2)], double_buffer


@pytest_asyncio.fixture(scope="class", loop_scope="module")
async def parallel_engine(parallel):
    models, double_buffer = parallel
    before = shared_segments()
    async with started(models[0], double_buffer=double_buffer, tensor_parallel_size=2) as engine:
        yield engine
    assert shared_segments() <= before


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def on_base_weights(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    yield
    for name in ("engine", "keeping_engine", "half_engine", "parallel_engine"):
        if name in request.fixturenames:
            await request.getfixturevalue(name).reload_base()


class TestOneWorker:
    async def test_every_token_belongs_to_the_version_that_its_span_names(self, engine, models):
        weights = {BASE: models[0]} | {Version(1, n): models[n % 3] for n in range(1, 7)}
        tasks = [asyncio.create_task(engine.sample(ask(LONG, n=2))) for _ in range(8)]
        for n in range(1, 7):
            await until_tokens(engine, 200)
            await engine.apply(staged(models[n % 3], Version(1, n)))
        samples = [sample for task in tasks for sample in (await task).samples]
        assert any(len(sample.spans) > 3 for sample in samples)
        for sample in samples:
            assert (len(sample.token_ids), sample.finish_reason) == (LONG.max_tokens, FinishReason.LENGTH)
            assert_tokens_follow_their_versions(sample, weights)

    async def test_a_failure_half_way_brings_the_old_version_back(self, engine, models, tmp_path):
        """The file's header is complete, and its last tensor has another shape than the version says."""
        whole = staged(models[1], Version(1, 1))
        tensors = load_file(whole.path)
        tensors["model.layers.1.self_attn.o_proj.weight"] = torch.zeros(3, 3)
        save_file(tensors, tmp_path / "wrong.safetensors")
        task = asyncio.create_task(one(engine, LONG))
        await until_tokens(engine, 5)
        with pytest.raises(EngineError, match=r"version 0\.0 keeps serving"):
            await engine.apply(replace(whole, path=tmp_path / "wrong.safetensors"))
        sample = await task
        assert [span.version for span in sample.spans] == [BASE]
        assert_tokens_follow_their_versions(sample, {BASE: models[0]})
        assert engine.status().healthy
        await engine.apply(whole)
        assert_tokens_follow_their_versions(await one(engine), {Version(1, 1): models[1]})

    async def test_a_nan_ends_samples_and_does_not_outlive_its_weights(self, engine, models, tmp_path):
        tensors = load_file(staged(models[1], BASE).path)
        tensors["model.layers.0.mlp.down_proj.weight"][:] = float("nan")
        save_file(tensors, tmp_path / "nan.safetensors")
        poisoned = replace(staged(models[1], Version(1, 1)), path=tmp_path / "nan.safetensors")
        await engine.apply(poisoned)
        sample = await one(engine)
        assert (sample.token_ids, sample.logprobs, sample.finish_reason) == ([], [], FinishReason.ERROR)
        parts = [part async for part in parts_of(engine.stream(ask(n=3)))]
        assert sorted((part.index, part.finish_reason, len(part.token_ids)) for part in parts) == [
            (index, FinishReason.ERROR, 0) for index in range(3)
        ]
        await engine.apply(staged(models[2], Version(1, 2)))
        for result in await asyncio.gather(*[engine.sample(ask(n=4)) for _ in range(4)]):
            for sample in result.samples:
                assert_tokens_follow_their_versions(sample, {Version(1, 2): models[2]})

    async def test_an_update_ends_though_its_caller_is_cancelled(self, engine, models):
        task = asyncio.create_task(one(engine, LONG))
        await until_tokens(engine, 5)
        caller = asyncio.create_task(engine.apply(staged(models[1], Version(1, 1))))
        await asyncio.sleep(0)  # the caller has begun
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        sample = await asyncio.wait_for(task, DEADLINE_S)
        assert [span.version for span in sample.spans] == [BASE, Version(1, 1)]
        assert engine.status().version == Version(1, 1)

    async def test_an_altered_live_weight_is_found_and_loaded_anew(self, engine, models):
        await assert_altered_weights_are_found(engine, models[1])


class TestKeptKeys:
    """Keys and values of older weights are kept."""

    async def test_a_sharded_base_is_read_and_reloaded(self, keeping_engine, models):
        assert_tokens_follow_their_versions(await one(keeping_engine), {BASE: models[0]})
        await keeping_engine.apply(staged(models[1], Version(1, 1)))
        await keeping_engine.reload_base()
        assert_tokens_follow_their_versions(await one(keeping_engine), {BASE: models[0]})

    async def test_streamed_spans_are_the_engine_s_final_ones(self, keeping_engine, models):
        """The adapter reads vLLM's internals while a request runs; vLLM itself reports spans at the end."""
        tracked = await keeping_engine._submit(ask(LONG, n=2))
        streamed: dict[int, list[VersionSpan]] = {0: [], 1: []}
        applied = 0
        while not tracked.ended:
            await tracked.wait(0.005)
            for chunk in tracked.parts():
                streamed[chunk.index].extend(chunk.spans)
            if applied < 4 and sum(len(spans) for spans in streamed.values()) > 6 * (applied + 1):
                applied += 1
                await keeping_engine.apply(staged(models[applied % 3], Version(1, applied)))
        final = {output.index: output for output in tracked._final.outputs}
        await keeping_engine._release(tracked)
        for index, spans in streamed.items():
            starts = [span for i, span in enumerate(spans) if i == 0 or span.version != spans[i - 1].version]
            reported = [VersionSpan(span.start, Version.parse(span.version)) for span in final[index].weight_versions]
            assert starts == reported
            assert len(reported) == 5

    async def test_reports_the_pause_beside_a_plain_copy(self, keeping_engine, models, record_property):
        def plain_copy(version: StagedVersion) -> float:
            source = load_file(version.path)
            target = {name: torch.empty_like(tensor) for name, tensor in source.items()}
            begun = time.perf_counter()
            for name, tensor in source.items():
                target[name].copy_(tensor)
            return time.perf_counter() - begun

        tasks = [asyncio.create_task(one(keeping_engine, LONG)) for _ in range(16)]
        await until_tokens(keeping_engine, 16)
        report = await keeping_engine.apply(staged(models[1], Version(1, 1)))
        await asyncio.gather(*tasks)
        copy_s = plain_copy(staged(models[1], Version(1, 1)))
        print(f"pause {report.pause_s:.4f} s, load {report.apply_s:.4f} s, plain copy {copy_s:.4f} s")
        record_property("pause_s", report.pause_s)
        assert min(report.pause_s, report.apply_s) > 0


class TestHalfPrecision:
    async def test_a_bfloat16_engine_stays_close_to_bfloat16_recomputation(
        self, half_engine, tmp_path, record_property
    ):
        models = [save_model(tmp_path / str(seed), seed, dtype=torch.bfloat16) for seed in range(2)]
        assert half_engine.info.dtype == "bfloat16"
        await half_engine.apply(staged(models[1], Version(1, 1)))
        sample = await one(half_engine, replace(LONG, max_tokens=200))
        difference = torch.tensor(sample.logprobs) - recompute(models[1], PROMPT, sample.token_ids)
        record_property("bf16_mean_abs_difference", difference.abs().mean().item())
        print(f"bfloat16 log-probabilities: mean {difference.abs().mean():.2e}, max {difference.abs().max():.2e}")
        assert difference.abs().mean() < 0.05

    async def test_its_logits_are_not_rounded(self, half_engine):
        """Two logits between 1 and 16 that were rounded would differ by a multiple of 1/128."""
        sample = await one(half_engine, replace(LONG, max_tokens=100, top_logprobs=3))
        best = torch.tensor(
            [[value for _, value in sorted(row, key=itemgetter(1))[-2:]] for row in sample.top_logprobs]
        )
        steps = (best[:, 1] - best[:, 0]) * 128
        assert (steps - steps.round()).abs().median() > 0.1

    async def test_float32_versions_are_rounded_into_a_bfloat16_engine(self, half_engine, models):
        await half_engine.apply(staged(models[1], Version(1, 1)))
        sample = await one(half_engine, replace(LONG, max_tokens=100))
        difference = torch.tensor(sample.logprobs) - recompute(models[1], PROMPT, sample.token_ids)
        assert difference.abs().mean() < 0.05


class TestTensorParallel:
    async def test_tensor_parallel_workers_switch_together(self, parallel_engine, parallel, tmp_path):
        pair, _ = parallel
        weights = {BASE: pair[0], Version(1, 1): pair[1]}
        task = asyncio.create_task(one(parallel_engine, LONG))
        await until_tokens(parallel_engine, 5)
        await parallel_engine.apply(staged(pair[1], Version(1, 1)))
        sample = await task
        assert len(sample.spans) == 2
        assert_tokens_follow_their_versions(sample, weights)
        with pytest.raises(EngineError):
            await parallel_engine.apply(replace(staged(pair[1], Version(1, 2)), path=tmp_path / "gone.safetensors"))
        assert_tokens_follow_their_versions(await one(parallel_engine), weights)
        await parallel_engine.reload_base()
        assert_tokens_follow_their_versions(await one(parallel_engine), weights)

    async def test_an_altered_live_weight_is_found_and_loaded_anew(self, parallel_engine, parallel):
        await assert_altered_weights_are_found(parallel_engine, parallel[0][1])


async def test_data_parallel_engines_switch_together(models, monkeypatch):
    # vLLM looks for free ports before its engines bind them. Below the ephemeral range no other test takes them meanwhile.
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    monkeypatch.setenv("VLLM_PORT", str(20_000 + 100 * worker))
    weights = {BASE: models[0], Version(1, 1): models[1]}
    async with started(models[0], data_parallel_size=2) as engine:
        tasks = [asyncio.create_task(one(engine, LONG)) for _ in range(8)]
        await until_tokens(engine, 16)
        await engine.apply(staged(models[1], Version(1, 1)))
        for task in tasks:
            assert_tokens_follow_their_versions(await task, weights)
        for result in await asyncio.gather(*[engine.sample(ask()) for _ in range(8)]):
            assert result.samples[0].spans == [VersionSpan(0, Version(1, 1))]
            assert_tokens_follow_their_versions(result.samples[0], weights)


async def test_tied_weights_are_packed_again_where_they_are_loaded_in_place(tmp_path):
    models = [save_model(tmp_path / str(seed), seed, tied=True) for seed in range(2)]
    async with started(models[0], double_buffer=False) as engine:
        await engine.apply(staged(models[1], Version(1, 1)))
        assert_tokens_follow_their_versions(await one(engine), {Version(1, 1): models[1]})
