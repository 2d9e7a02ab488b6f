"""LoRA adapters of the small models on disk, and what plain transformers and PEFT say about them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from small_models import load, written

from sluice.versions import BASE, Version
from weightsync.staged import StagedAdapter, TensorSpec

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(
    directory: Path, base: Path, seed: int, *, rank: int = 4, modules: Sequence[str] = ALL_LINEAR, **more: object
) -> Path:
    """Write an adapter as PEFT does, with both factors far from zero."""
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(modules), task_type="CAUSAL_LM", **more)
    model = get_peft_model(load(base), config)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=random))
    model.save_pretrained(directory)
    return directory


def staged_adapter(directory: Path, version: Version, base: Version = BASE) -> StagedAdapter:
    """An adapter as the receiver would stage it: here simply PEFT's own directory."""
    with safe_open(directory / "adapter_model.safetensors", framework="pt") as file:
        tensors = {name: TensorSpec("F32", tuple(file.get_slice(name).get_shape())) for name in file.keys()}  # noqa: SIM118
    return StagedAdapter(version, base, directory, tensors, digest=directory.name)


@torch.no_grad()
def recompute_adapted(
    base: Path, adapter: Path, prompt: Sequence[int], sampled: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log-probabilities of sampled tokens after temperature, by the base model with the adapter beside it."""
    model = _adapted(base, adapter, written(base, adapter))
    logits = model(input_ids=torch.tensor([[*prompt, *sampled]])).logits[0, len(prompt) - 1 : -1].float()
    logprobs = torch.log_softmax(logits / temperature, -1)
    return logprobs.gather(1, torch.tensor(sampled)[:, None])[:, 0]


@lru_cache(maxsize=8)
def _adapted(base: Path, adapter: Path, _written: tuple[int, ...]) -> PeftModel:
    return PeftModel.from_pretrained(load(base), adapter).eval()
