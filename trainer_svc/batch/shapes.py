"""Names for the tensor shapes of the trainer.

Axis names: `length` tokens of one sequence, `packed` tokens of one micro-batch, `tokens` its loss tokens,
`pairs` of a chosen and a rejected sequence, `rows` and `columns` a padded block of sequences, `width` a hidden state, `vocabulary` an output layer.
"""
# mypy: disable-error-code="name-defined"
# ruff: noqa: F722  (jaxtyping's axis names are strings, not forward references)

from __future__ import annotations

from typing import TypeAlias

from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor

IdsOfSequence: TypeAlias = Int64[Tensor, " length"]
MaskOfSequence: TypeAlias = Bool[Tensor, " length"]
PerSequenceToken: TypeAlias = Float[Tensor, " length"]
MaskPerToken: TypeAlias = Bool[Tensor, " tokens"]
PackedIds: TypeAlias = Int64[Tensor, "1 packed"]
Indices: TypeAlias = Int64[Tensor, " tokens"]
Block: TypeAlias = Int64[Tensor, "rows columns"]
PerToken: TypeAlias = Float[Tensor, " tokens"]
PerPair: TypeAlias = Float[Tensor, " pairs"]
Scalar: TypeAlias = Float[Tensor, ""]
TokenStates: TypeAlias = Float[Tensor, "tokens width"]
HeadWeight: TypeAlias = Float[Tensor, "vocabulary width"]
HeadBias: TypeAlias = Float[Tensor, " vocabulary"]
PackedHeads: TypeAlias = Float[Tensor, "packed heads head_dim"]
Bounds: TypeAlias = Int32[Tensor, " bounds"]
