"""In which precision each kind of weight is stored, computed, published and served. Pure; imports no torch.

A trained weight is stored as a float32 master. The forward pass uses the values that the engine serves: a bfloat16 pass rounds every
master as publishing does, on one rank and on many. Otherwise trainer and engine would differ by up to half a step of bfloat16 in
each trained weight. `trainer_svc.engine.rounding` does the rounding. Logits are float32 on both sides.
"""

from __future__ import annotations

from typing import Literal, TypeVar

Precision = Literal["auto", "float32", "bfloat16"]
"""Precision of a forward pass or of stored weights; auto depends on the device."""

Kind = Literal["matrix", "vector", "value head"]
"""matrix: all weights with two or more axes (linear layers, embedding, output layer, router, experts, and an adapter's factors).
vector: norms and biases. value head: the module that predicts returns, which no engine serves."""

VALUE_HEADS = ("score", "value_head")
"""Names of the module that predicts returns. A model has at most one of them."""

KINDS: tuple[Kind, ...] = ("matrix", "vector", "value head")


Setting = TypeVar("Setting", bound=str)


def chosen_precision(setting: Setting, device: str) -> Setting | Literal["float32", "bfloat16"]:
    """Return the precision of a forward pass or of published weights.

    Args:
        setting: The setting. `auto` depends on the device.
        device: Kind of the device that computes: cpu or cuda.
    """
    if setting != "auto":
        return setting
    return "bfloat16" if device == "cuda" else "float32"


def frozen_precision(setting: Precision, dtype: Precision, device: str) -> Precision:
    """Return the precision in which matrices that are not trained are stored.

    Args:
        setting: The setting. `auto` depends on the forward pass and the device.
        dtype: Precision of the forward pass.
        device: Kind of the device that computes: cpu or cuda.
    """
    if setting != "auto":
        return setting
    return "bfloat16" if device == "cuda" and dtype == "bfloat16" else "float32"


def stored(kind: Kind, frozen: Precision | None = None) -> Precision:
    """Return the precision of a weight in the trainer's memory. `frozen` is the precision of matrices in a frozen model; None: trained."""
    return frozen if frozen is not None and kind == "matrix" else "float32"


def computed(kind: Kind, dtype: Precision) -> Precision:
    """Return the precision to which a weight is rounded in a forward pass of precision `dtype`.

    A value head is not rounded: returns need more digits than bfloat16 has.
    """
    return "float32" if kind == "value head" else dtype


def published(kind: Kind, dtype: Precision) -> Precision | None:
    """Return the precision of a weight in published files and in engines that serve `dtype`; None: they do not have this weight."""
    return None if kind == "value head" else dtype
