"""Versions whose every bit follows from their number, so that anybody can say what they must be."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import torch
import xxhash

from sluice.versions import BASE, Version

__all__ = ["DENSE_BYTES", "Tensors", "digest", "expected_digest", "tensors_of"]

Tensors: TypeAlias = Mapping[str, torch.Tensor]

_SHAPES = {
    "model.embed.weight": (512, 128),
    **{f"model.layers.{layer}.mlp.weight": (256, 128) for layer in range(6)},
    "model.norm.weight": (1024,),
}
"""Elements of two bytes; small, so that a whole fault takes a second, and yet hundreds of the small chunks used here."""

DENSE_BYTES = 2 * sum(int(np.prod(shape)) for shape in _SHAPES.values())

_CHANGED = 0.08
"""Share of the values that a version changes: deltas of several small chunks, and far below half a dense copy."""


@lru_cache(maxsize=64)
def _bits(version: Version) -> dict[str, np.ndarray]:
    """The bit patterns of a version: those of the one before, some of them a step up or down."""
    random = np.random.default_rng([version.epoch, version.number])
    if version.number == 0:
        sign_and_size = {name: random.standard_normal(shape, dtype=np.float32) for name, shape in _SHAPES.items()}
        return {name: (values.view(np.uint32) >> 16).astype(np.uint16) for name, values in sign_and_size.items()}
    before = _bits(BASE if version.number == 1 else Version(version.epoch, version.number - 1))
    bits = {}
    for name, shape in _SHAPES.items():
        steps = random.choice(np.array([-1, 1], dtype=np.int16), shape) * (random.random(shape) < _CHANGED)
        bits[name] = (before[name].view(np.int16) + steps).astype(np.int16).view(np.uint16)
    return bits


def tensors_of(version: Version) -> dict[str, torch.Tensor]:
    """Fresh bfloat16 tensors of a version; number 0 is the base of every epoch."""
    return {name: torch.from_numpy(bits.copy()).view(torch.bfloat16) for name, bits in _bits(version).items()}


def digest(tensors: Tensors) -> str:
    """xxh3-128 over names and bytes: computed here alone, so that no mistake of the product can hide in it."""
    whole = xxhash.xxh3_128()
    for name in sorted(tensors):
        whole.update(name.encode())
        whole.update(tensors[name].contiguous().view(torch.uint8).numpy())
    return str(whole.hexdigest())


@lru_cache(maxsize=64)
def expected_digest(version: Version) -> str:
    """What `digest` must say of the version."""
    return digest(tensors_of(version))
