"""Engines say whether they compute with the weights of a version: of memory as it is, not of what was once copied."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import staged

from rollout_svc.engines.base import EngineError, FinishReason, GenerationRequest, InferenceEngine, Sampling
from sluice.versions import Version
from weightsync.staged import StagedVersion

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

FIRST, SECOND = Version(1, 1), Version(1, 2)


def altered(version: StagedVersion, directory: Path, *names: str) -> StagedVersion:
    """The same version with one value of each of some tensors in another place."""
    tensors = load_file(version.path)
    for name in names:
        tensors[name].view(-1)[-1] += 1.0
    save_file(tensors, directory / "altered.safetensors")
    return replace(version, path=directory / "altered.safetensors")


async def test_the_version_that_was_applied_is_found_and_no_other(engine: InferenceEngine, models):
    first = staged(models.second, FIRST)
    await engine.apply(first)
    assert await engine.verify_weights(first) == []
    assert await engine.verify_weights(staged(models.third, SECOND)) == sorted(first.tensors)
    assert await engine.verify_weights(None) == sorted(first.tensors)
    await engine.reload_base()
    assert await engine.verify_weights(None) == []


async def test_a_tied_output_layer_is_compared_with_the_embedding(tied_engine: InferenceEngine, models):
    await tied_engine.apply(staged(models.tied_second, FIRST))
    assert await tied_engine.verify_weights(staged(models.tied_second, FIRST)) == []
    assert "model.embed_tokens.weight" in await tied_engine.verify_weights(None)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight", "lm_head.weight"])
async def test_one_value_is_enough(engine: InferenceEngine, models, tmp_path, name):
    await engine.apply(staged(models.second, FIRST))
    assert await engine.verify_weights(altered(staged(models.second, FIRST), tmp_path, name)) == [name]


async def test_a_sample_looks_at_some_tensors(engine: InferenceEngine, models):
    await engine.apply(staged(models.second, FIRST))
    found = await engine.verify_weights(staged(models.third, SECOND), share=0.2)
    assert 0 < len(found) < len(staged(models.third, SECOND).tensors)
    assert await engine.verify_weights(staged(models.second, FIRST), share=0.2) == []


async def test_a_version_that_is_not_what_serves_is_loaded_anew(engine: InferenceEngine, models, tmp_path):
    right = staged(models.second, FIRST)
    await engine.apply(altered(right, tmp_path, "model.norm.weight"))
    now_right = replace(right, path=tmp_path / "altered.safetensors")
    save_file(load_file(right.path), tmp_path / "next.safetensors")
    (tmp_path / "next.safetensors").replace(now_right.path)
    assert (await engine.apply(now_right)).pause_s == 0.0, "that version serves already"
    assert await engine.verify_weights(now_right) == ["model.norm.weight"]
    assert (await engine.apply(now_right)).pause_s > 0.0
    assert await engine.verify_weights(now_right) == []


async def test_tokens_are_produced_meanwhile(engine: InferenceEngine, models):
    await engine.apply(staged(models.second, FIRST))
    request = GenerationRequest("request", [5, 9, 17], Sampling(max_tokens=200, ignore_eos=True, temperature=0.0))
    before = (await engine.agenerate(request)).samples[0]
    task = asyncio.create_task(engine.agenerate(request))
    assert await engine.verify_weights(staged(models.second, FIRST)) == []
    during = (await task).samples[0]
    assert during.finish_reason is FinishReason.LENGTH
    assert during.token_ids == before.token_ids
    torch.testing.assert_close(torch.tensor(during.logprobs), torch.tensor(before.logprobs), atol=1e-4, rtol=0.0)


async def test_a_version_that_cannot_be_read_is_an_error(engine: InferenceEngine, models, tmp_path):
    with pytest.raises(EngineError):
        await engine.verify_weights(replace(staged(models.second, FIRST), path=tmp_path / "gone.safetensors"))
