"""In which precision each kind of weight is stored, computed, published and served. Pure; imports no torch.

A trained weight is stored in float32, its master. It is computed in what the engine serves: a bfloat16 forward pass rounds every
master as publishing does, on one rank and on many. Otherwise trainer and engine would differ by up to half a step of bfloat16 in
each weight that has moved. `trainer_svc.engine.rounding` does it. Logits are float32 on both sides.
"""

from __future__ import annotations

from typing import Literal, TypeVar

Precision = Literal["auto", "float32", "bfloat16"]
"""Precision of a forward pass or of stored weights; auto depends on the device."""

Kind = Literal["matrix", "vector", "value head"]
"""matrix: all weights with two or more axes, which are those of linear layers, embedding, output layer, router and experts, and an
adapter's factors. vector: norms and biases. value head: what predicts returns, which no engine serves."""

VALUE_HEADS = ("score", "value_head")
"""Names of modules that predict returns, one in a model."""

KINDS: tuple[Kind, ...] = ("matrix", "vector", "value head")


Setting = TypeVar("Setting", bound=str)


def chosen_precision(setting: Setting, device: str) -> Setting | Literal["float32", "bfloat16"]:
    """Return the precision of a forward pass or of published weights.

    Args:
        setting: The setting, which counts unless it is `auto`.
        device: Kind of the device that computes: cpu or cuda.
    """
    if setting != "auto":
        return setting
    return "bfloat16" if device == "cuda" else "float32"


def frozen_precision(setting: Precision, dtype: Precision, device: str) -> Precision:
    """Return the precision in which matrices that are not trained are stored.

    Args:
        setting: The setting, which counts unless it is `auto`.
        dtype: Precision of the forward pass.
        device: Kind of the device that computes: cpu or cuda.
    """
    if setting != "auto":
        return setting
    return "bfloat16" if device == "cuda" and dtype == "bfloat16" else "float32"


def stored(kind: Kind, frozen: Precision | None = None) -> Precision:
    """Return the precision of a weight in the trainer's memory. `frozen` is that of matrices that are not trained; None: it is trained."""
    return frozen if frozen is not None and kind == "matrix" else "float32"


def computed(kind: Kind, dtype: Precision) -> Precision:
    """Return the precision to which a weight is rounded in a forward pass of precision `dtype`.

    A value head is not rounded: a critic learns returns to more digits than bfloat16 has.
    """
    return "float32" if kind == "value head" else dtype


def published(kind: Kind, dtype: Precision) -> Precision | None:
    """Return the precision of a weight in published files and in engines that serve `dtype`; None: it is in neither."""
    return None if kind == "value head" else dtype
