"""Weights of a model of experts change under vLLM on a CPU, which packs those of the experts in its own way.

Tests share an engine for each kind of weights, which each of them leaves on its base weights.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from small_models import CONTEXT, recompute, save_experts_model, staged
from structlog.testing import capture_logs

from rollout_svc.engines.base import EngineError, GenerationRequest, Sampling, UncheckedWeights
from rollout_svc.engines.vllm import processes as vllm_processes
from rollout_svc.engines.vllm.engine import VllmEngine, VllmOptions
from sluice.versions import Version
from weightsync.staged import StagedVersion

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [5, 9, 17, 33, 64]
EXPERTS = "model.layers.{layer}.mlp.experts"
ALTERED = {
    ("w13_weight", 0): "model.layers.1.mlp.experts.2.gate_proj.weight",
    ("w13_weight", 1): "model.layers.1.mlp.experts.2.up_proj.weight",
    ("w2_weight", 0): "model.layers.1.mlp.experts.2.down_proj.weight",
}
"""By parameter of vLLM and part of it: the tensor of layer 1's third expert that is found altered."""


@dataclass
class Served:
    """An engine, and the directories of its base model and of a second set of weights."""

    engine: VllmEngine
    models: list[Path]
    difference: float
    """Nats by which its log-probabilities may differ from recomputed ones, on average."""

    async def assert_computes_with(self, model: Path) -> None:
        sampling = Sampling(max_tokens=64, ignore_eos=True)
        sample = (await self.engine.sample(GenerationRequest("request", PROMPT, sampling))).samples[0]
        expected = recompute(model, PROMPT, sample.token_ids)
        assert (torch.tensor(sample.logprobs) - expected).abs().mean() < self.difference

    def second(self, number: int) -> StagedVersion:
        return staged(self.models[1], Version(1, number))

    async def ask(self, name: str, **arguments: object) -> object:
        [(kind, value)] = await self.engine._llm.collective_rpc(name, kwargs=arguments)
        assert kind == "ok"
        return value


SERVED = {"float32": (torch.float32, 64, 1e-4), "bfloat16_filled_up": (torch.bfloat16, 48, 0.05)}
"""Type of the weights, size of an expert (vLLM's kernels fill 48 up to 64), and how far log-probabilities may be off."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=SERVED.values(), ids=SERVED)
async def running(request, tmp_path_factory) -> AsyncIterator[Served]:
    import altering_worker  # imports vLLM, which a process that only collects tests need not

    dtype, size, difference = request.param
    root = tmp_path_factory.mktemp("experts")
    models = [save_experts_model(root / str(seed), seed, size=size, dtype=dtype) for seed in range(2)]
    engine = VllmEngine(
        str(models[0]), VllmOptions(engine_args={"max_model_len": CONTEXT, "kv_cache_memory_bytes": 32 << 20})
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_processes, "WORKER_EXTENSION", altering_worker.NAME)
        await engine.start()
    try:
        served = Served(engine, models, difference)
        await served.ask("compare_in_pieces", octets=4096)
        yield served
    finally:
        await engine.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def served(running: Served) -> AsyncIterator[Served]:
    yield running
    await running.engine.reload_base()


async def test_experts_compute_with_the_weights_that_came_last(served):
    engine, (base, second) = served.engine, served.models
    await served.assert_computes_with(base)
    for number in (1, 2):
        await engine.apply(served.second(number))
        await served.assert_computes_with(second)
        assert await engine.verify_weights(served.second(number)) == []
        await engine.reload_base()
        await served.assert_computes_with(base)
        assert await engine.verify_weights(None) == []
    assert engine.status().unchecked == (), "every layer was compared"


async def test_weights_of_another_version_are_found_in_every_expert(served):
    different = await served.engine.verify_weights(served.second(1))
    experts = {name for name in load_file(served.models[1] / "model.safetensors") if ".experts." in name}
    assert len(experts) == 24
    assert experts <= set(different)


async def test_altered_values_of_an_expert_are_found_and_loaded_anew(served):
    engine, version = served.engine, served.second(1)
    await engine.apply(version)
    altered: list[str] = []
    for (parameter, part), found in ALTERED.items():
        where = {"module": f"{EXPERTS.format(layer=1)}.routed_experts", "parameter": parameter}
        parts = 2 if parameter == "w13_weight" else 1
        await served.ask("set_one_of_an_expert", **where, expert=2, part=part, parts=parts)
        altered.append(found)
        assert await engine.verify_weights(version) == sorted(altered)
    await engine.apply(version)
    assert await engine.verify_weights(version) == []
    await served.assert_computes_with(served.models[1])


async def test_a_load_that_fails_within_the_experts_leaves_the_old_version_and_the_next_one_is_loaded(served, tmp_path):
    """The file's header is complete, and a tensor of one expert has another shape than the version says."""
    whole = served.second(1)
    tensors = load_file(whole.path)
    tensors["model.layers.1.mlp.experts.3.up_proj.weight"] = torch.zeros(
        99, 64, dtype=tensors["model.norm.weight"].dtype
    )
    save_file(tensors, tmp_path / "wrong.safetensors")
    with pytest.raises(EngineError, match=r"version 0\.0 keeps serving"):
        await served.engine.apply(replace(whole, path=tmp_path / "wrong.safetensors"))
    assert served.engine.status().healthy
    await served.assert_computes_with(served.models[0])
    await served.engine.apply(whole)
    await served.assert_computes_with(served.models[1])
    assert await served.engine.verify_weights(whole) == []


async def test_experts_that_cannot_be_compared_are_named_once_by_their_kind(served):
    kind = UncheckedWeights(
        "RoutedExperts (UnquantizedFusedMoEMethod)", 24, "model.layers.0.mlp.experts.0.down_proj.weight"
    )
    await served.ask("pack_by_zentorch", yes=True)
    try:
        with capture_logs() as told:
            for _ in range(2):
                assert await served.engine.verify_weights(None) == []
                assert served.engine.status().unchecked == (kind,)
    finally:
        await served.ask("pack_by_zentorch", yes=False)
    [line] = [line for line in told if line["log_level"] == "warning"]
    assert (line["layers"], line["tensors"], line["example"]) == (kind.layers, kind.tensors, kind.example)


async def test_packed_experts_take_no_patches(served):
    why = await served.ask("patched", paths=[str(served.second(1).path)])
    assert "RoutedExperts" in why
