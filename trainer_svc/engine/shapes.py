"""Names for the tensor shapes of the trainer.

Axis names: `length` tokens of one sequence, `packed` tokens of one micro-batch, `tokens` its loss tokens,
`rows` and `columns` a padded block of sequences.
"""
# mypy: disable-error-code="name-defined"
# ruff: noqa: F722  (jaxtyping's axis names are strings, not forward references)

from __future__ import annotations

from typing import TypeAlias

from jaxtyping import Bool, Float, Int64
from torch import Tensor

__all__ = [
    "Block",
    "IdsOfSequence",
    "Indices",
    "MaskOfSequence",
    "MaskPerToken",
    "PackedIds",
    "PerSequenceToken",
    "PerToken",
    "Scalar",
]

IdsOfSequence: TypeAlias = Int64[Tensor, " length"]
MaskOfSequence: TypeAlias = Bool[Tensor, " length"]
PerSequenceToken: TypeAlias = Float[Tensor, " length"]
MaskPerToken: TypeAlias = Bool[Tensor, " tokens"]
PackedIds: TypeAlias = Int64[Tensor, "1 packed"]
Indices: TypeAlias = Int64[Tensor, " tokens"]
Block: TypeAlias = Int64[Tensor, "rows columns"]
PerToken: TypeAlias = Float[Tensor, " tokens"]
Scalar: TypeAlias = Float[Tensor, ""]
