"""vLLM's workers compare the weights that they compute with to a version's files, with and without tensor parallelism."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import altering_worker
import pytest
import pytest_asyncio
import torch
from small_models import CONTEXT, recompute, save_model, staged

from rollout_svc.engines.base import GenerationRequest, Sampling
from rollout_svc.engines.vllm import processes as vllm_processes
from rollout_svc.engines.vllm.engine import VllmEngine, VllmOptions
from sluice.versions import Version

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [5, 9, 17, 33, 64]
GREEDY = Sampling(max_tokens=24, ignore_eos=True, temperature=0.0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [save_model(root / f"m{seed}", seed) for seed in range(2)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[1, 2], ids=["tp1", "tp2"])
async def engine(request: pytest.FixtureRequest, models: list[Path]) -> AsyncIterator[VllmEngine]:
    arguments = {"max_model_len": CONTEXT, "kv_cache_memory_bytes": 32 << 20, "tensor_parallel_size": request.param}
    started = VllmEngine(str(models[0]), VllmOptions(engine_args=arguments, double_buffer=request.param == 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_processes, "WORKER_EXTENSION", altering_worker.NAME)
        await started.start()
    yield started
    await started.stop()


async def assert_samples(engine: VllmEngine, model: Path, version: Version) -> None:
    sample = (await engine.agenerate(GenerationRequest("request", PROMPT, GREEDY))).samples[0]
    assert [span.version for span in sample.spans] == [version]
    expected = recompute(model, PROMPT, sample.token_ids)
    torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-4, rtol=0.0)


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
