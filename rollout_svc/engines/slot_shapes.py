"""Names for the tensor shapes of the slot engine.

Axis names: `rows` samples in a step, `prompts` distinct prompts of a batch, `picked` positions whose logits are wanted.
"""
# mypy: disable-error-code="name-defined"
# ruff: noqa: F722  (jaxtyping's axis names are strings, not forward references)

from __future__ import annotations

from typing import TypeAlias

from jaxtyping import Float, Int64
from torch import Tensor

__all__ = ["Keys", "Logits", "LogitsOfRow", "PerRow", "PickedLogits", "Queries", "RowIndices", "Uniform"]

RowIndices: TypeAlias = Int64[Tensor, " rows"]
PerRow: TypeAlias = Int64[Tensor, " rows"]
Uniform: TypeAlias = Float[Tensor, " rows"]
Logits: TypeAlias = Float[Tensor, "rows vocabulary"]
LogitsOfRow: TypeAlias = Float[Tensor, " vocabulary"]
PickedLogits: TypeAlias = Float[Tensor, "picked vocabulary"]
Queries: TypeAlias = Float[Tensor, "rows heads queries dim"]
Keys: TypeAlias = Float[Tensor, "rows kv_heads keys dim"]
