"""The models and versions that the weight path is measured with."""

from __future__ import annotations

from pathlib import Path

import torch

from sluice.cli.init_model import ModelShape, init_model

__all__ = ["MODEL_200M", "dense_bytes", "model_200m", "neighbour", "random_weights"]

MODEL_200M = ModelShape(hidden=1024, layers=16, heads=16, kv_heads=8, head_dim=64, mlp=3072)
"""202 million parameters, all but 0.3 million of them in the layers."""

WEIGHT_SCALE = 0.02


def model_200m(directory: Path) -> Path:
    """Make the model in bf16, if it is not there yet, and return its directory."""
    if not (directory / "config.json").exists():
        init_model(directory, MODEL_200M, dtype="bfloat16")
    return directory


def random_weights(elements: int, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, torch.Tensor]:
    """Normal weights in matrices of 16 M elements under names of a checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    rows, width, tensors = 16_384, 1024, {}
    for index in range(-(-elements // (rows * width))):
        tensor = torch.empty(rows, width).normal_(0.0, WEIGHT_SCALE, generator=generator)
        tensors[f"model.layers.{index}.mlp.up_proj.weight"] = tensor.to(dtype)
    return tensors


def neighbour(tensors: dict[str, torch.Tensor], *, seed: int, changed: float = 0.01) -> dict[str, torch.Tensor]:
    """The next version: a share of the weights moved by one unit in the last place, as a small step of AdamW does."""
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for name, tensor in tensors.items():
        bits = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)
        drawn = torch.empty(bits.shape, dtype=torch.int16).random_(generator=generator)  # 0 to 32,767
        moved[name] = (bits + (drawn < 32_768 * changed)).to(bits.dtype).view(tensor.dtype)
    return moved


def dense_bytes(tensors: dict[str, torch.Tensor]) -> int:
    """Bytes of a dense copy."""
    return sum(tensor.nbytes for tensor in tensors.values())
