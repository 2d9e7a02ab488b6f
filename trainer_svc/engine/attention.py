"""Causal attention over sequences that lie packed in one row, for any transformers model.

transformers looks attention up by name and hands extra keyword arguments of the model call down to it. Under our name
it finds `packed_attention`, and the keyword `packed` carries the plan. Everything except attention works on the packed
row and sees no padding; attention gathers the sequences into blocks of similar length and runs the stock causal kernel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from trainer_svc.engine.prefix_attention import SHORT, PrefixPlan, fits, prefix_attention
from trainer_svc.engine.shapes import Block, Indices
from trainer_svc.engine.varlen_attention import Ragged, varlen_attention

__all__ = ["PACKED_ATTENTION", "AttentionPlan", "packed_attention"]

PACKED_ATTENTION = "sluice_packed"
"""The name under which transformers finds the function."""

FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
"""PyTorch's kernels that hold no matrix of scores: all but the math one."""

WINDOW_QUERIES = 256
"""Queries of a call with a sliding window: their mask has this many rows, and the window's length more columns."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Which packed tokens form which sequence.

    Attributes:
        blocks: Packed indices of the sequences of similar length, one sequence a row, padded behind its end with 0.
        sources: For each packed token, its place in the concatenation of the flattened blocks.
        longest: Tokens of the longest sequence.
        padded_tokens: Block cells in all, of `prefixes` where there are some.
        real_tokens: Block cells that are not padding; in `blocks` a token shared by several sequences counts in each.
        pairs: Tokens that attend to tokens, each packed token once with all before it in its sequence and itself.
        prefixes: The same as parts and shared beginnings, for a CPU; None where the sequences do not lie so.
        ragged: The same for the kernel that takes rows of varying length; None likewise.
    """

    blocks: tuple[Block, ...]
    sources: Indices
    longest: int
    padded_tokens: int
    real_tokens: int
    pairs: int
    prefixes: PrefixPlan | None
    ragged: Ragged | None

    @classmethod
    def of(cls, segments: Rows[NDArray[np.int64]], packed_tokens: int) -> Self:
        """Plan the attention of sequences given as packed indices in order.

        Args:
            segments: Packed indices of each sequence; indices may be shared between sequences with a common beginning.
            packed_tokens: Tokens in the packed row; each must belong to a sequence.
        """
        by_size: dict[int, list[NDArray[np.int64]]] = defaultdict(list)
        for segment in segments:
            by_size[_size_class(len(segment))].append(segment)
        sources = np.zeros(packed_tokens, dtype=np.int64)
        blocks: list[torch.Tensor] = []
        cells = 0
        for _, rows in sorted(by_size.items()):
            block = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
            for number, row in enumerate(rows):
                block[number, : len(row)] = row
                start = cells + number * block.shape[1]
                sources[row] = np.arange(start, start + len(row))
            blocks.append(torch.from_numpy(block))
            cells += block.size
        prefixes = PrefixPlan.of(segments, packed_tokens)
        seen = np.zeros(packed_tokens, dtype=np.int64)
        for segment in segments:
            seen[segment] = np.arange(1, len(segment) + 1)
        return cls(
            tuple(blocks),
            torch.from_numpy(sources),
            max(map(len, segments)),
            cells if prefixes is None else prefixes.padded_tokens,
            sum(map(len, segments)) if prefixes is None else packed_tokens,
            int(seen.sum()),
            prefixes,
            Ragged.of(segments, packed_tokens),
        )

    def to(self, device: torch.device) -> Self:
        """Copy the indices from pinned memory to a device, which the host does not wait for; a no-op on the CPU."""
        if device.type == "cpu":
            return self
        blocks = tuple(block.pin_memory().to(device, non_blocking=True) for block in self.blocks)
        sources = self.sources.pin_memory().to(device, non_blocking=True)
        ragged = None if self.ragged is None else self.ragged.to(device)
        return replace(self, blocks=blocks, sources=sources, ragged=ragged)


def _size_class(length: int) -> int:
    """Upper bound of the block a sequence of this length goes to: powers of two and the middles between them.

    Coarser than the classes of `PrefixPlan`, since these blocks are a GPU's as well, where a call weighs more than padding.
    """
    size = SHORT
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


@torch.compiler.disable  # type: ignore[untyped-decorator]  # each batch has other blocks: layers are compiled around it
def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed: AttentionPlan,
    varlen: bool = False,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **options: Any,  # noqa: ANN401  transformers passes what some architecture needs
) -> tuple[torch.Tensor, None]:
    """Attend causally inside each packed sequence.

    Args:
        module: The attention layer that calls.
        query: Shape [1, heads, packed, head_dim].
        key: Shape [1, key-value heads, packed, head_dim].
        value: As `key`.
        attention_mask: Must be None: the plan says what attends to what.
        packed: The plan of the micro-batch.
        varlen: Whether to use the kernel for sequences of varying length.
        scaling: Factor on the scores; None means 1 / sqrt(head_dim).
        dropout: Probability of dropping a score; must be 0.
        sliding_window: Tokens that a query sees, itself included; None means all earlier ones.
        options: What else the architecture passes.

    Returns:
        The output of shape [1, packed, heads, head_dim], and None for the weights.

    Raises:
        ValueError: if the architecture needs a feature that this function lacks, or no fused kernel takes the tensors.
    """
    wanted = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    if wanted or attention_mask is not None:
        raise ValueError(
            f"{type(module).__name__} needs {wanted or 'an attention mask'}, which packed training does not offer"
        )
    if dropout:
        raise ValueError(
            f"{type(module).__name__} drops attention scores (dropout {dropout:g}), which no memory-efficient kernel does on every"
            " device: set attention_dropout to 0 in the model's config.json"
        )
    rows = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    if varlen and packed.ragged is not None:
        whole = varlen_attention(*rows, packed.ragged, scaling=scaling, sliding_window=sliding_window)
    elif packed.prefixes is not None and fits(query, key, value) and _sees_all(sliding_window, packed):
        whole = prefix_attention(*rows, packed.prefixes, scaling=scaling)
    else:
        whole = _block_attention(*rows, packed, scaling=scaling, sliding_window=sliding_window)
    return whole.unsqueeze(0), None


def _block_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: AttentionPlan,
    *,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """Attend in blocks of sequences of similar length with PyTorch's fused kernels; shapes [packed, heads, head_dim].

    The fused kernels never hold a matrix of tokens x tokens. Outside of a CPU they take as many key-value heads as query
    heads, and they take one head_dim for all three on a CPU: heads are repeated, and columns of zeros added, where needed.
    """
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    scale = head_dim**-0.5 if scaling is None else scaling
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and query.device.type != "cpu":
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    if head_dim != value_dim:
        width = max(head_dim, value_dim)
        query, key, value = (pad(each, (0, width - each.shape[-1])) for each in (query, key, value))
    outputs = []
    for block in packed.blocks:
        index = block.flatten()
        q, k, v = (
            tensor.index_select(0, index).unflatten(0, block.shape).transpose(1, 2) for tensor in (query, key, value)
        )
        output = _causal_attention(q, k, v, scale=scale, window=sliding_window)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, packed.sources)[..., :value_dim]


def _causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, window: int | None
) -> torch.Tensor:
    """Causal attention of whole sequences, shapes [sequences, heads, tokens, head_dim].

    With a sliding window the queries are cut into parts that see the keys of their window alone, so that the mask is small.
    """
    length = query.shape[2]
    if window is None or window >= length:
        return _fused(query, key, value, None, scale)
    parts = []
    for start in range(0, length, WINDOW_QUERIES):
        end = min(start + WINDOW_QUERIES, length)
        first = max(0, start - window + 1)
        places = torch.arange(first, end, device=query.device)
        distance = places[start - first :, None] - places[None, :]
        seen = (distance >= 0) & (distance < window)
        parts.append(_fused(query[:, :, start:end], key[:, :, first:end], value[:, :, first:end], seen, scale))
    return torch.cat(parts, 2)


def _fused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """`scaled_dot_product_attention` by a fused kernel, causal without a mask.

    Raises:
        ValueError: if no fused kernel takes these tensors; the kernel that takes any holds all scores.
    """
    grouped = query.shape[1] != key.shape[1]
    try:
        with sdpa_kernel(FUSED):
            return scaled_dot_product_attention(
                query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
            )
    except RuntimeError as error:
        if "available kernel" not in str(error) and "viable backend" not in str(error):
            raise
        raise ValueError(
            f"no fused attention kernel takes {query.dtype} heads of {query.shape[-1]} on {query.device.type}, and the one that"
            " takes anything holds a score for each pair of tokens: set trainer.dtype to bfloat16, or choose another model"
        ) from error


def _sees_all(window: int | None, packed: AttentionPlan) -> bool:
    return window is None or window >= packed.longest


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
