"""vLLM's workers say what they read, take files that hold no more than that, and refuse files that hold less."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import altering_worker
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from small_models import CONTEXT, recompute, save_model, staged
from sparse_files import occupied, thin
from weightsync_stack import RUN, Stack, eventually, running_stack

from rollout_svc.engines import vllm_args
from rollout_svc.engines.base import EngineError, GenerationRequest, Sample, Sampling
from rollout_svc.engines.vllm import VllmEngine
from sluice.config import SecurityConfig
from sluice.rpc import connect
from sluice.versions import BASE, Version
from weightsync.engine.selection import Selection, total, union
from weightsync.publisher import WeightPublisher
from weightsync.receiver import PullLimits, WeightReceiver
from weightsync.staged import ApplyReport, StagedVersion

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [5, 9, 17, 33, 64]
GREEDY = Sampling(max_tokens=24, ignore_eos=True, temperature=0.0)
SHARDED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head", "embed_tokens")
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [save_model(root / f"m{seed}", seed) for seed in range(2)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[1, 2], ids=["tp1", "tp2"])
async def engine(request: pytest.FixtureRequest, models: list[Path]) -> AsyncIterator[VllmEngine]:
    arguments = {"max_model_len": CONTEXT, "kv_cache_memory_bytes": 32 << 20, "tensor_parallel_size": request.param}
    started = VllmEngine(str(models[0]), engine_args=arguments, double_buffer=request.param == 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_args, "WORKER_EXTENSION", altering_worker.NAME)
        await started.start()
    yield started
    await started.stop()


async def sampled(engine: VllmEngine) -> Sample:
    return (await engine.agenerate(GenerationRequest("request", PROMPT, GREEDY))).samples[0]


async def assert_samples(engine: VllmEngine, model: Path, version: Version) -> None:
    sample = await sampled(engine)
    assert [span.version for span in sample.spans] == [version]
    expected = recompute(model, PROMPT, sample.token_ids)
    torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-4, rtol=0.0)


def by_rank(whole: StagedVersion, directory: Path, plans: list[Selection]) -> StagedVersion:
    files = tuple(thin(whole.path, directory / f"rank{rank}.safetensors", plan) for rank, plan in enumerate(plans))
    return replace(whole, path=files[0], rank_paths=files)


@asynccontextmanager
async def following(
    stack: Stack, stage_dir: Path, rank: int, plan: Selection, into: dict[Version, StagedVersion]
) -> AsyncIterator[None]:
    """A receiver that stages what one worker reads."""

    async def keep(version: StagedVersion) -> ApplyReport:
        into[version.version] = version
        return ApplyReport(version.version, 0.0, 0.0)

    limits = PullLimits(deadline_s=30, idle_s=5, gap_bytes=0)
    async with connect(stack.target, SecurityConfig()) as channel:
        receiver = WeightReceiver(
            channel, RUN, f"rank{rank}", stage_dir, keep, limits=limits, local_files=False, selections=[plan]
        )
        task = asyncio.create_task(receiver.run_forever())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await receiver.close()


def save_weights(like: Path, directory: Path, weights: dict[str, torch.Tensor]) -> Path:
    """A model of other weights."""
    shutil.copytree(like, directory)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def nudge(weights: dict[str, torch.Tensor]) -> None:
    """Change one value in a hundred, as a step of training does."""
    generator = torch.Generator().manual_seed(0)
    for tensor in weights.values():
        mask = torch.rand(tensor.shape, generator=generator) < 0.01
        tensor.copy_(torch.where(mask, tensor * 1.2, tensor))


async def test_each_worker_names_what_it_reads_and_together_they_read_all(engine, models):
    plans = await engine.read_plans()
    sizes = {name: tensor.numel() for name, tensor in load_file(models[0] / "model.safetensors").items()}
    assert union(plans) == {name: ((0, size),) for name, size in sizes.items()}
    for plan in plans:
        for name, size in sizes.items():
            sharded = any(part in name for part in SHARDED)
            assert total(plan[name]) == (size // len(plans) if sharded else size), name


async def test_files_with_only_what_each_worker_reads_are_loaded(engine, models, tmp_path):
    plans = await engine.read_plans()
    version = by_rank(staged(models[1], Version(1, 1)), tmp_path, plans)
    if len(plans) > 1:
        whole = occupied(models[1] / "model.safetensors")
        assert all(occupied(path) < 0.8 * whole for path in version.rank_paths), "small rows leave no holes of a page"
    await engine.apply(version)
    await assert_samples(engine, models[1], Version(1, 1))
    assert await engine.verify_weights(version) == []
    assert await engine.verify_weights(staged(models[1], Version(1, 1))) == []
    await engine.apply(staged(models[0], Version(1, 2)))
    await assert_samples(engine, models[0], Version(1, 2))


async def test_a_receiver_for_each_worker_brings_it_anchors_and_deltas(engine, models, tmp_path):
    plans = await engine.read_plans()
    weights = load_file(models[1] / "model.safetensors")
    async with running_stack(tmp_path / "service", dense_delay_s=0) as stack, AsyncExitStack() as receivers:
        publisher = WeightPublisher(stack.channel, RUN, chunk_bytes=1 << 16)
        staged_by: list[dict[Version, StagedVersion]] = [{} for _ in plans]
        for rank, plan in enumerate(plans):
            await receivers.enter_async_context(following(stack, tmp_path / "stage", rank, plan, staged_by[rank]))
        for number in (1, 2):
            version = Version(6, number)
            report = await publisher.update(version, weights, deadline_s=60)
            assert report.kind == ("anchor" if number == 1 else "delta")
            await eventually(lambda: all(version in each for each in staged_by))  # noqa: B023 - awaited in this round
            files = [each[version] for each in staged_by]
            await engine.apply(replace(files[0], rank_paths=tuple(each.path for each in files)))
            model = save_weights(models[1], tmp_path / f"model{number}", weights)
            assert await engine.verify_weights(staged(model, version)) == []
            await assert_samples(engine, model, version)
            nudge(weights)


@pytest.mark.parametrize("lacking", [(), ((0, 64),)], ids=["all", "all but a row"])
async def test_a_file_that_lacks_part_of_a_fused_layer_is_refused(engine, models, tmp_path, lacking):
    await engine.reload_base()
    before = await sampled(engine)
    plans = await engine.read_plans()
    plans[-1] = {**plans[-1], K_PROJ: lacking}
    with pytest.raises(EngineError, match=f"(?s){K_PROJ}.*stage the version anew"):
        await engine.apply(by_rank(staged(models[1], Version(2, 1)), tmp_path, plans))
    status = engine.status()
    assert (status.healthy, status.paused, status.version) == (True, False, BASE)
    after = await sampled(engine)
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)
    assert await engine.verify_weights(None) == []


async def test_a_file_with_holes_is_no_shared_file_of_two_workers(engine, models, tmp_path):
    plans = await engine.read_plans()
    whole = staged(models[1], Version(3, 1))
    shared = replace(whole, path=thin(whole.path, tmp_path / "rank0.safetensors", plans[0]))
    if len(plans) == 1:
        await engine.apply(shared)
        await assert_samples(engine, models[1], Version(3, 1))
    else:
        with pytest.raises(EngineError, match="are read and are not there"):
            await engine.apply(shared)


async def test_too_few_files_are_refused(engine, models):
    version = staged(models[1], Version(4, 1))
    plans = await engine.read_plans()
    if len(plans) > 1:
        with pytest.raises(EngineError, match="not loaded"):
            await engine.apply(replace(version, rank_paths=(version.path,)))
        assert engine.status().healthy


@pytest.mark.parametrize(
    ("module", "found"),
    [
        ("model.layers.0.input_layernorm", {"model.layers.0.input_layernorm.weight"}),
        ("model.layers.1.mlp.gate_up_proj", {"model.layers.1.mlp.up_proj.weight"}),
        ("model.layers.0.self_attn.o_proj", {"model.layers.0.self_attn.o_proj.weight"}),
        ("model.embed_tokens", {"model.embed_tokens.weight"}),
    ],
)
async def test_an_altered_live_weight_is_found_and_loaded_anew(engine, models, module, found):
    version = staged(models[1], Version(5, 1))
    await engine.apply(version)
    assert await engine.verify_weights(version) == []
    await engine._llm.collective_rpc("set_one", kwargs={"module": module})
    assert set(await engine.verify_weights(version)) == found
    await engine.apply(version)
    assert await engine.verify_weights(version) == []
    await assert_samples(engine, models[1], Version(5, 1))
