"""A merged model computes what PEFT computes with base and adapter side by side, whatever the adapter's targets are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tiny_policy import tiny_model
from transformers import AutoModelForCausalLM

from sluice.config import ConfigError
from sluice.models import check_model
from trainer_svc.engine.lora import UnmergeableError, merge_adapter
from trainer_svc.offline.commands import MERGE_ADAPTER

TARGETS = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
IDS = torch.arange(7, 40)[None]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """A model by whether its head is its embeddings."""
    return {tie: tiny_model(tmp_path_factory.mktemp("base"), tie=tie) for tie in (False, True)}


def an_adapter(base: Path, directory: Path, settings: dict[str, Any]) -> Path:
    """Write an adapter whose weights are all drawn."""
    wrapped = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    )
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    wrapped.save_pretrained(directory)
    return directory


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.slow
@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"target_modules": "all-linear"},
        {"use_rslora": True, "layers_to_transform": [1]},
        {"use_dora": True},
        {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 32}},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["lm_head", "embed_tokens"]},
        {"modules_to_save": ["lm_head", "norm"]},
        {"modules_to_save": ["embed_tokens"]},
        {"trainable_token_indices": [10, 11]},
    ],
    ids=str,
)
def test_it_computes_what_peft_computes(bases, tmp_path: Path, settings: dict[str, Any], tie: bool) -> None:
    adapter = an_adapter(bases[tie], tmp_path / "adapter", TARGETS | settings)
    side_by_side = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(bases[tie]), adapter)
    merge_adapter(str(bases[tie]), str(adapter), tmp_path / "merged", torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    wanted = logits(side_by_side)
    assert torch.allclose(logits(merged), wanted, atol=1e-4)
    assert not torch.allclose(logits(AutoModelForCausalLM.from_pretrained(bases[tie])), wanted, atol=1e-2)


def test_a_head_stays_tied_that_the_adapter_leaves_alone(bases, tmp_path: Path) -> None:
    adapter = an_adapter(bases[True], tmp_path / "adapter", TARGETS)
    merge_adapter(str(bases[True]), str(adapter), tmp_path / "merged", torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.get_output_embeddings().weight is merged.get_input_embeddings().weight


def test_what_has_no_merged_form_is_refused_by_its_name(bases, tmp_path: Path) -> None:
    adapter = an_adapter(bases[False], tmp_path / "adapter", TARGETS | {"lora_bias": True})
    words = ["--adapter", str(adapter), "--model", str(bases[False]), "--output", str(tmp_path / "merged")]
    with pytest.raises(ConfigError, match=r"lora_bias.*serve base and adapter side by side") as refused:
        MERGE_ADAPTER.run(words)
    assert isinstance(refused.value.__cause__, UnmergeableError)
    assert not (tmp_path / "merged").exists()


def test_an_adapter_is_no_base(bases, tmp_path: Path) -> None:
    adapter = an_adapter(bases[False], tmp_path / "adapter", TARGETS)
    with pytest.raises(ConfigError, match="holds an adapter, not a model: merge it into its base first"):
        check_model(str(adapter))
