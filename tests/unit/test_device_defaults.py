"""Settings left at auto are decided by the device; settings that were given stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_policy import ragged_batch, tiny_model
from transformers import AutoModelForCausalLM

from trainer_svc.compute_config import ComputeConfig, LoraConfig, on_device
from trainer_svc.config import ReferenceConfig, TrainerConfig
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.objectives.config import ObjectiveConfig
from trainer_svc.precision import frozen_precision
from trainer_svc.update.policy import load_frozen


@pytest.mark.parametrize(
    ("device", "dtype", "recompute", "base"),
    [("cuda", "bfloat16", True, "bfloat16"), ("cpu", "float32", False, "float32")],
)
def test_the_device_decides_what_is_left_open(device, dtype, recompute, base):
    settings = on_device(ComputeConfig(lora=LoraConfig(rank=4)), device)
    assert (settings.dtype, settings.gradient_checkpointing, settings.lora.base_dtype) == (dtype, recompute, base)
    assert on_device(settings, "cpu") == settings  # nothing is left to decide


def test_what_was_given_stays_on_every_device():
    given = TrainerConfig(dtype="float32", gradient_checkpointing=False, lora=LoraConfig(rank=4, base_dtype="float32"))
    assert on_device(given, "cuda") == given
    bold = ComputeConfig(dtype="bfloat16", gradient_checkpointing=True, lora=LoraConfig(rank=4, base_dtype="bfloat16"))
    assert on_device(bold, "cpu") == bold


def test_frozen_weights_are_narrow_only_where_the_forward_pass_is():
    assert frozen_precision("auto", "bfloat16", "cuda") == "bfloat16"
    assert frozen_precision("auto", "float32", "cuda") == "float32"
    assert frozen_precision("auto", "bfloat16", "cpu") == "float32"
    assert frozen_precision("bfloat16", "bfloat16", "cpu") == "bfloat16"


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def published(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A model whose files are bfloat16, as most are."""
    root = tmp_path_factory.mktemp("frozen")
    path = tiny_model(root, tie=request.param)
    AutoModelForCausalLM.from_pretrained(path).bfloat16().save_pretrained(path)
    return path


def test_a_narrow_reference_takes_half_the_memory_and_says_the_same(published):
    def reference(dtype: str) -> TrainEngine:
        kl = ObjectiveConfig(preset="grpo", kl_coef=0.1)
        config = TrainerConfig(
            device="cpu", dtype="bfloat16", objective=kl, reference=ReferenceConfig(model="base", dtype=dtype)
        )
        engine = load_frozen(config, published)["reference"]
        assert engine is not None
        assert not any(each.requires_grad for each in engine.network.model.parameters())
        return engine

    narrow, wide = reference("bfloat16"), reference("float32")
    sizes = [sum(each.nbytes for each in engine.network.model.parameters()) for engine in (narrow, wide)]
    assert sizes[0] < 0.55 * sizes[1]
    rows = ragged_batch(seed=2)
    pairs = zip(narrow.forward(rows), wide.forward(rows), strict=True)
    assert all(torch.equal(ours.nan_to_num(), theirs.nan_to_num()) for ours, theirs in pairs)


def test_a_narrow_reference_of_a_wide_forward_pass_is_refused(published):
    with pytest.raises(ValueError, match=r"set trainer\.dtype to bfloat16"):
        TrainEngine(ComputeConfig(device="cpu"), published, frozen="bfloat16")
