"""What a model's sizes and kind do not allow is refused before anything is cut, with what to set instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from pydantic import ValidationError
from transformers import CONFIG_MAPPING, LlamaConfig, Phi3Config, PreTrainedConfig, PreTrainedModel, Qwen3MoeConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, AutoModelForCausalLM

from sluice.models import ModelSizes
from trainer_svc.compute_config import LoraConfig as LoraSettings
from trainer_svc.compute_config import ParallelConfig, ParallelDims, check_experts, check_heads, tensor_plan
from trainer_svc.config import TrainerConfig
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.parallel.mesh import ALONE, Mesh, join
from trainer_svc.parallel.sharding import check_divides

SIZES = {
    "vocab_size": 65,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}


def built(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_a_size_that_divides_is_taken_and_the_vocabulary_need_not():
    check_divides(built(LlamaConfig(**SIZES)), 3)


@pytest.mark.parametrize(("tp", "what"), [(2, "3 key-value heads"), (4, "6 attention heads"), (6, "3 key-value heads")])
def test_a_size_that_does_not_divide_is_named(tp, what):
    with pytest.raises(ValueError, match=f"does not divide the model's {what}: set trainer.parallel.tp"):
        check_divides(built(LlamaConfig(**SIZES)), tp)


def test_every_architecture_that_transformers_splits_by_columns_and_rows_is_taken():
    for model_type in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "smollm3", "granite"):
        plan = tensor_plan(model_type)
        assert plan["self_attn.q_proj"] == "colwise"
        assert plan["mlp.down_proj"] == "rowwise"
    assert tensor_plan("qwen3")["self_attn.q_norm"] == "replicated_with_grad_allreduce"


def test_an_architecture_that_cannot_be_split_is_refused_with_the_reason():
    with pytest.raises(
        ValueError, match=r"phi3 models splits modules by colwise_gather_output, .* set trainer\.parallel\.tp to 1"
    ):
        check_divides(built(Phi3Config(**SIZES, pad_token_id=0)), 3)
    with pytest.raises(ValueError, match="no tensor-parallel plan for gpt2 models"):
        tensor_plan("gpt2")


def test_the_layers_of_an_adapter_are_refused():
    model = built(LlamaConfig(**SIZES))
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match=r"of an adapter: set trainer\.parallel\.tp to 1"):
        check_divides(model, 3)


def experts(processes: int = 1, tp: int = 1, **lora: Any) -> None:
    sizes = ModelSizes.of({"model_type": "qwen3_moe", "num_experts": 128})
    check_experts(sizes, processes, tp, LoraSettings(**lora))


def test_a_model_of_experts_trains_in_one_process_all_of_it_or_the_layers_that_are_named():
    experts()
    experts(rank=8, target_modules=("q_proj", "v_proj"))
    one = r"a model of 128 experts trains in one process only: .*set every axis of trainer\.parallel to 1"
    with pytest.raises(ValueError, match=f"{one}.*dense model") as several:
        experts(processes=4)
    assert "each of these 4 processes would read the whole model" in str(several.value)
    with pytest.raises(ValueError, match=one) as cut:
        experts(processes=4, tp=4)
    assert "tensor parallelism (tp 4) splits linear layers" in str(cut.value)
    with pytest.raises(
        ValueError, match=r"lora\.rank 8.*128 experts of a layer are stacked.*lora\.target_modules = q_proj"
    ):
        experts(rank=8)
    with pytest.raises(ValueError, match=f"{one}.*; an adapter .*stacked tensors"):
        experts(processes=4, rank=8)


def test_a_dense_model_has_no_such_limits():
    dense = ModelSizes.of({"model_type": "qwen3", "num_experts": None})
    check_experts(dense, 4, 4, LoraSettings(rank=8))


def test_a_model_that_nobody_has_looked_at_is_refused_before_its_weights_are_read(tmp_path):
    Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=8).save_pretrained(tmp_path)
    config = TrainerConfig(device="cpu", lora={"rank": 2})
    with pytest.raises(ValueError, match="4 experts of a layer are stacked"):
        TrainEngine(config, tmp_path)
    ranks = Mesh(ParallelDims(dp_shard=2), 0, torch.device("cpu"), ALONE)
    with pytest.raises(ValueError, match="a model of 4 experts trains in one process only"):
        TrainEngine(TrainerConfig(device="cpu"), tmp_path, mesh=ranks)


@pytest.mark.slow
def test_every_architecture_with_experts_is_known_as_one():
    unknown, known = [], 0
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if "musicgen" in model_type:  # it cannot be built without the configurations of its parts
            continue
        config = CONFIG_MAPPING[model_type]().get_text_config().to_dict()
        named = [name for name, value in config.items() if "expert" in name and type(value) is int and value]
        found = ModelSizes.of(config).experts
        known += found is not None
        if named and not found and config.get("is_moe") is not False:
            unknown.append((model_type, named))
    assert not unknown
    assert known >= 50


def test_heads_that_cannot_be_shared_out_are_refused_with_the_sizes_that_can():
    check_heads(8, tp=2, cp=4)
    with pytest.raises(ValueError, match=r"does not divide the 4 attention heads.*one of 1, 2, 4"):
        check_heads(8, tp=2, cp=3)


def test_compiled_layers_are_refused_where_their_matrices_are_cut():
    with pytest.raises(ValidationError, match=r"set compile to false, or parallel\.tp to 1"):
        TrainerConfig(compile=True, parallel={"tp": 2})
    TrainerConfig(compile=True, parallel={"dp_replicate": 2, "dp_shard": 2, "cp": 2, "pp": 2})


@pytest.mark.parametrize("local", ["0", "1"])
def test_every_process_of_a_host_with_too_few_devices_is_refused_before_it_waits_for_another(monkeypatch, local):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in (("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2"), ("RANK", local), ("LOCAL_RANK", local)):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"2 processes of this host need a CUDA device each, and 1 are visible"):
        join(ParallelConfig(dp_shard=2), "cuda")
