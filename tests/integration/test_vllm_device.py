"""vLLM on an accelerator: versions come in whole and as patches, and the live weights are those of the files."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from small_models import CONTEXT, recompute, save_model, staged

from rollout_svc.engines.base import GenerationRequest, Sampling
from rollout_svc.engines.vllm.engine import VllmEngine, VllmOptions
from sluice.versions import Version

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and a build of vLLM for it"),
    pytest.mark.asyncio(loop_scope="module"),
]

PROMPT = [5, 9, 17, 33, 64]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[VllmEngine, Path]]:
    model = save_model(tmp_path_factory.mktemp("device") / "base", 0, dtype=torch.bfloat16)
    arguments = {"max_model_len": CONTEXT, "gpu_memory_utilization": 0.2}
    started = VllmEngine(str(model), VllmOptions(engine_args=arguments, patch=True))
    await started.start()
    yield started, model
    await started.stop()


async def test_a_version_that_differs_little_comes_in_as_a_patch(engine, tmp_path):
    vllm, base = engine
    weights = load_file(base / "model.safetensors")
    for number in range(1, 4):
        generator = torch.Generator().manual_seed(number)
        for tensor in weights.values():
            tensor.copy_(torch.where(torch.rand(tensor.shape, generator=generator) < 0.01, tensor * 1.5, tensor))
        model = tmp_path / str(number)
        shutil.copytree(base, model)
        save_file(weights, model / "model.safetensors", {"format": "pt"})
        version = staged(model, Version(1, number))
        arguments = vllm._weights.files(version).arguments() | {"patch": True}
        answers = await vllm._llm.collective_rpc("sluice_prepare", kwargs=arguments)
        assert [kind for kind, _ in answers] == ["unsupported" if number == 1 else "ok"]
        await vllm.apply(version)
        assert await vllm.verify_weights(version) == []
        request = GenerationRequest("request", PROMPT, Sampling(max_tokens=24, ignore_eos=True))
        sample = (await vllm.sample(request)).samples[0]
        difference = torch.tensor(sample.logprobs) - recompute(model, PROMPT, sample.token_ids)
        assert difference.abs().mean() < 0.05


async def test_an_altered_weight_is_found_and_not_patched_upon(engine):
    vllm, base = engine
    version = staged(base, Version(2, 1))
    await vllm.apply(version)
    before = staged(save_model(base.parent / "other", 1, dtype=torch.bfloat16), Version(2, 0))
    assert await vllm.verify_weights(before) != []
    answers = await vllm._llm.collective_rpc(
        "sluice_prepare", kwargs=vllm._weights.files(version).arguments() | {"patch": True}
    )
    assert [kind for kind, _ in answers] == ["unsupported"]
