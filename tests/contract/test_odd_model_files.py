"""Files of a base model with other names than its weights have: what a trainer makes of such a model is served, or refused at the start."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rollout_stack import running_engine
from safetensors.torch import load_file, save_file
from small_models import greedy, save_model, staged

from rollout_svc.engines.base import EngineError, GenerationRequest, InferenceEngine, Sampling, UnfitVersionError
from rollout_svc.engines.model_files import read_base_model
from rollout_svc.engines.vllm.weights import VllmWeights
from sluice.versions import BASE, Version
from trainer_svc.compute_config import ComputeConfig
from trainer_svc.engine.engine import TrainEngine

pytestmark = pytest.mark.slow

Tensors = dict[str, torch.Tensor]
PROMPT = [5, 9, 17, 33]
GREEDY = GenerationRequest("request", PROMPT, Sampling(max_tokens=12, temperature=0.0, ignore_eos=True))
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def only_head(tensors: Tensors) -> Tensors:
    return {HEAD if name == EMBEDDING else name: tensor for name, tensor in tensors.items()}


def with_head(tensors: Tensors) -> Tensors:
    return tensors | {HEAD: tensors[EMBEDDING].clone()}


def with_frequencies(tensors: Tensors) -> Tensors:
    return tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}


def with_further_heads(tensors: Tensors) -> Tensors:
    return tensors | {"mtp.fc.weight": torch.ones(8, 8), "model.layers.2.eh_proj.weight": torch.ones(8, 8)}


FORMS = pytest.mark.parametrize(
    ("change", "tied"),
    [(only_head, True), (with_head, True), (with_frequencies, False), (with_further_heads, False)],
    ids=["tied, only the output layer", "tied, both", "frequencies", "heads for further tokens"],
)


def odd(directory: Path, change: Callable[[Tensors], Tensors], *, tied: bool = False, seed: int = 1) -> Path:
    model = save_model(directory / f"plain{seed}", seed, tied=tied)
    changed = directory / f"odd{seed}"
    shutil.copytree(model, changed)
    tensors = change(load_file(model / "model.safetensors"))
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    return changed


def trained(model: Path, directory: Path) -> Path:
    """What a trainer publishes of a model: its tensors, by the names that it gives them."""
    shutil.copytree(model, directory)
    engine = TrainEngine(ComputeConfig(device="cpu", threads=1), model)
    save_file(engine.named_tensors(), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


async def sampled(engine: InferenceEngine) -> list[int]:
    return (await engine.sample(GREEDY)).samples[0].token_ids


@FORMS
async def test_versions_of_such_a_model_are_taken_and_the_base_comes_back(
    tmp_path: Path, change: Callable[[Tensors], Tensors], *, tied: bool
) -> None:
    base, other = (odd(tmp_path, change, tied=tied, seed=seed) for seed in (1, 2))
    version = replace(staged(trained(other, tmp_path / "version"), Version(1, 1)))
    expected = {name: greedy(tmp_path / f"plain{name}", PROMPT, 12) for name in (1, 2)}
    async with running_engine(base) as engine:
        assert await sampled(engine) == expected[1]
        await engine.apply(version)
        assert await sampled(engine) == expected[2] != expected[1]
        assert await engine.verify_weights(version) == []
        await engine.reload_base()
        assert await sampled(engine) == expected[1]
        assert await engine.verify_weights(None) == []


@FORMS
def test_vllm_is_asked_for_the_weights_of_a_version_and_for_all_tensors_of_the_base(
    tmp_path: Path, change: Callable[[Tensors], Tensors], *, tied: bool
) -> None:
    base = odd(tmp_path, change, tied=tied)
    version = staged(trained(base, tmp_path / "version"), Version(1, 1))
    weights = VllmWeights(clear_cache=True, double_buffer=False, patch=False, deadline_s=1.0)
    weights.base = read_base_model(base)
    assert set(weights.files(version).names) == version.tensors.keys()
    in_files = load_file(base / "model.safetensors").keys()
    found = weights.files(None)
    assert (found.version, set(found.names) | {HEAD}) == (BASE, in_files | {HEAD}), (
        "a tied output layer may be there or not"
    )


def test_a_version_with_a_weight_that_the_model_lacks_is_refused_for_good(tmp_path: Path) -> None:
    base = read_base_model(odd(tmp_path, with_frequencies))
    version = staged(tmp_path / "plain1", Version(1, 1))
    base.check(version)
    tensors = dict(version.tensors)
    tensors["model.extra.weight"] = tensors.pop("model.norm.weight")
    with pytest.raises(
        UnfitVersionError, match=r"missing \['model\.norm\.weight'\].*unknown \['model\.extra\.weight'\]"
    ):
        base.check(replace(version, tensors=tensors))


def test_files_whose_names_are_not_those_of_the_loaded_model_are_refused(tmp_path: Path) -> None:
    base = read_base_model(odd(tmp_path, lambda tensors: tensors | {"model.other": torch.ones(2)}))
    weights = base.shapes.keys() - {"model.other"}
    assert base.known_to(weights, weights).shapes.keys() == weights
    with pytest.raises(EngineError, match=r"does not name so: \['model\.other'\] \(1\), and lack \['model\.fused'\]"):
        base.known_to(weights | {"model.fused"}, weights | {"model.fused"})
