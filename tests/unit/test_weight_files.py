"""Weights that stay in their files: what is read of them later is what a whole read gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_policy import tiny_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    Qwen3MoeConfig,
)

from trainer_svc.compute_config import LoraConfig
from trainer_svc.engine.loading import load_network
from trainer_svc.engine.lora import attach_adapter
from trainer_svc.engine.network import Head, Network
from trainer_svc.engine.weight_files import WeightFiles, read_weights

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
CONFIGS = {
    "tied llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "gpt2": GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=4),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "mamba": MambaConfig(vocab_size=128, hidden_size=32, num_hidden_layers=2),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for name, config in CONFIGS.items():
        # In half precision and several files, as large models are.
        AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(root / name, max_shard_size="20KB")
    critic = AutoModelForSequenceClassification.from_config(LlamaConfig(**SIZES, num_labels=1, pad_token_id=0))
    critic.save_pretrained(root / "critic")
    return {"qwen3": tiny_model(root), "critic": root / "critic", **{name: root / name for name in CONFIGS}}


def loaded(path: Path, *, read: bool, head: Head = "language", lora: int = 0) -> Network:
    torch.manual_seed(7)
    network = load_network(str(path), CPU, head=head, lazy=None if read else (0, 1))
    network, _ = attach_adapter(network, LoraConfig(rank=lora))
    return network


def assert_the_same(one: Network, other: Network) -> None:
    named = {**dict(one.model.named_parameters()), **dict(one.model.named_buffers())}
    expected = {**dict(other.model.named_parameters()), **dict(other.model.named_buffers())}
    assert named.keys() == expected.keys()  # tied weights appear once
    assert {name for name in named if not torch.equal(named[name], expected[name])} == set()
    assert {name for name in named if named[name].requires_grad != expected[name].requires_grad} == set()
    assert one.own_head == other.own_head
    left = {name for name, module in one.model.named_modules() if "_hf_hook" in vars(module)}
    assert left == set()


@pytest.mark.parametrize(
    ("model", "head", "lora"),
    [
        ("qwen3", "language", 0),
        ("tied llama", "language", 0),
        ("gpt2", "language", 0),
        ("qwen3", "both", 4),
        ("tied llama", "value", 4),
        ("critic", "value", 0),
    ],
)
def test_weights_that_are_read_later_are_those_of_a_whole_read(models, model, head, lora):
    network = loaded(models[model], read=False, head=head, lora=lora)
    assert any(each.is_meta for each in network.model.parameters())
    read_weights(network.model, network.files, CPU)
    assert_the_same(network, loaded(models[model], read=True, head=head, lora=lora))


def test_a_model_whose_weights_are_made_of_several_tensors_is_read_whole(models):
    network = loaded(models["qwen3_moe"], read=False)
    assert network.files is None
    assert_the_same(network, loaded(models["qwen3_moe"], read=True))


def test_packing_is_checked_with_weights_that_stay_in_their_files(models):
    with pytest.raises(ValueError, match="mix tokens outside of softmax attention"):
        loaded(models["mamba"], read=False)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_process_checks_its_own_layers_and_reads_no_others(models, monkeypatch, rank):
    names: list[str] = []
    read = WeightFiles.read

    def noting(files, name, *box):
        names.append(name)
        return read(files, name, *box)

    monkeypatch.setattr(WeightFiles, "read", noting)
    network = load_network(str(models["qwen3"]), CPU, lazy=(rank, 2))
    assert {name.split(".")[2] for name in names if ".layers." in name} == {str(rank)}
    monkeypatch.undo()
    read_weights(network.model, network.files, CPU)
    assert_the_same(network, loaded(models["qwen3"], read=True))


@pytest.mark.parametrize("rank", [0, 2])
def test_packing_is_refused_by_each_share_of_the_layers(models, rank):
    with pytest.raises(ValueError, match="mix tokens outside of softmax attention"):
        load_network(str(models["mamba"]), CPU, lazy=(rank, 3))


def test_a_missing_tensor_is_named(models, tmp_path):
    (tmp_path / "config.json").write_text((models["qwen3"] / "config.json").read_text())
    tensors = load_file(models["qwen3"] / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        loaded(tmp_path, read=False)


def test_files_of_another_size_than_the_config_says_are_refused(models, tmp_path):
    config = json.loads((models["qwen3"] / "config.json").read_text())
    config["intermediate_size"] *= 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(models["qwen3"] / "model.safetensors")
    with pytest.raises(RuntimeError, match="mismatch"):
        loaded(tmp_path, read=False)


class BorrowingConfig(LlamaConfig):
    model_type = "borrowing"


class BorrowingForCausalLM(LlamaForCausalLM):
    """Computes with the weight of a module that it does not call."""

    config_class = BorrowingConfig

    def forward(self, input_ids, **options):
        output = super().forward(input_ids, **options)
        output.logits = output.logits * self.model.norm.weight[:1]
        return output


def test_a_model_that_computes_with_the_weights_of_modules_it_does_not_call_is_read_whole(tmp_path):
    AutoConfig.register("borrowing", BorrowingConfig)
    AutoModelForCausalLM.register(BorrowingConfig, BorrowingForCausalLM)
    BorrowingForCausalLM(BorrowingConfig(**SIZES)).save_pretrained(tmp_path)
    network = loaded(tmp_path, read=False)
    assert network.files is None
    assert_the_same(network, loaded(tmp_path, read=True))
