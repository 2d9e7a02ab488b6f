"""Log-probabilities and entropies from hidden states, without ever holding all logits.

The output layer, the softmax and their gradients are computed tile by tile (some tokens x some of the vocabulary). The
forward pass keeps one log-sum-exp per token (online, as flash attention does); the backward pass makes each tile of
logits again, turns it into its gradient in place, and adds that to the gradient of the hidden states and of its rows
of the weight. As many tiles as `cells` allows are kept instead of made again, so that a small output layer costs what
plain autograd costs. In the spirit of cut cross-entropy (arXiv 2411.09009) and Liger (arXiv 2410.10989), for gradients
that arrive per token.

Products and sums are float32 even where the hidden states are bfloat16 (float64 where they are), those over the whole
vocabulary float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from trainer_svc.batch.shapes import HeadBias, HeadWeight, Indices, PerToken, TokenStates
from trainer_svc.engine.logit_tiles import Block, Distribution, Head, HeadGradient, RowGradient, Rows

__all__ = ["Entropy", "fused_logprobs"]

Entropy = Literal["none", "measure", "train"]

CPU_TILE_ROWS = 1024
CPU_TILE_CELLS = 1 << 20
"""Tokens and logits of a tile on the CPU: 4 MiB stay in the cache between a product and the passes over it."""

CUDA_TILE_ROWS = 4096
"""Tokens of a tile on CUDA, where `cells` alone bounds the tile: few large kernels."""


def fused_logprobs(
    hidden: TokenStates,
    weight: HeadWeight,
    targets: Indices,
    temperatures: PerToken,
    *,
    bias: HeadBias | None = None,
    entropy: Entropy = "none",
    cells: int = 3 << 24,
    group: dist.ProcessGroup | None = None,
    vocabulary_start: int = 0,
) -> tuple[PerToken, PerToken | None]:
    """Log-probability of each target under softmax((hidden weight^T + bias) / temperature), and the entropy.

    Args:
        hidden: States that predict the targets, shape [tokens, width].
        weight: Output layer, shape [vocabulary, width]; with `group` this rank's slice of the vocabulary.
        targets: Token ids, counted over the whole vocabulary. One that is outside of it gets minus infinity.
        temperatures: Divisor of each token's logits, above 0.
        bias: Added to the logits, shape [vocabulary].
        entropy: Whether to compute the entropy in nats, and whether it carries a gradient.
        cells: Most logits alive at once (but never fewer than 2); those that stay between forward and backward are counted in.
        group: Ranks that hold the other slices. All pass the same `hidden`, `targets` and `temperatures`, get the same
            results, and must use them alike: the gradient of `hidden` is summed over the group.
        vocabulary_start: First token id of this rank's slice.

    Returns:
        Log-probabilities in nats and entropies (None for "none"), float32 or, for float64 states, float64.

    Raises:
        ValueError: if shapes do not fit or `cells` is below 1.
    """
    tokens, width = hidden.shape
    if weight.shape[1] != width or targets.shape != (tokens,) or temperatures.shape != (tokens,):
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)} and temperatures "
            f"{tuple(temperatures.shape)} do not fit: give [tokens, width], [vocabulary, width], [tokens] and [tokens]"
        )
    if cells < 1:
        raise ValueError(f"cells is {cells}; give at least 1")
    learns = any(each is not None and each.requires_grad for each in (hidden, weight, bias))
    work = _Work.of(tokens, cells, hidden.device, keep=learns and torch.is_grad_enabled())
    factor = _factor_dtype(hidden, weight)
    with torch.autocast(hidden.device.type, enabled=False):
        logprobs, spread = _FusedLogprobs.apply(
            hidden, weight, bias, targets, temperatures, work, factor, entropy, group, vocabulary_start
        )
    return logprobs, spread


@dataclass(frozen=True, slots=True)
class _Work:
    """How the logits are cut.

    Attributes:
        tokens: Tokens in all.
        rows: Most tokens of a tile.
        columns: Most of the vocabulary in a tile.
        kept_cells: Logits that may stay for the backward pass.
    """

    tokens: int
    rows: int
    columns: int
    kept_cells: int

    @classmethod
    def of(cls, tokens: int, cells: int, device: torch.device, *, keep: bool) -> _Work:
        """Cut so that two tiles, which every pass needs, and the kept ones have at most `cells` logits."""
        if device.type == "cpu":
            tile, most = min(max(1, cells // 8), CPU_TILE_CELLS), CPU_TILE_ROWS
        else:
            tile, most = max(1, cells // 4), CUDA_TILE_ROWS
        rows = max(1, min(tokens, most, tile))
        return cls(tokens, rows, tile // rows, max(0, cells - 2 * tile) if keep else 0)

    def chunks(self) -> Iterator[slice]:
        """The tokens in order; an empty chunk if there are none."""
        for first in range(0, max(1, self.tokens), self.rows):
            yield slice(first, min(first + self.rows, self.tokens))

    def scratch(self, like: torch.Tensor) -> torch.Tensor:
        """Memory for one tile."""
        return like.new_empty(self.rows * self.columns)


def _factor_dtype(hidden: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """Precision of what is multiplied: narrow on CUDA only, where products of narrow factors come out in float32."""
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    if dtype == torch.float64:
        return dtype
    if hidden.device.type != "cuda":
        return torch.float32
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else dtype


def _rows(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    factor: torch.dtype,
    bias: torch.Tensor | None,
) -> Rows:
    wide = torch.float64 if factor == torch.float64 else torch.float32
    scale = temperatures.to(wide).reciprocal().unsqueeze(1)
    scaled = bias is None and factor == wide  # narrow factors would be rounded once more
    factors = hidden.to(factor)
    return Rows(factors * scale if scaled else factors, scale, targets.unsqueeze(1), scaled)


def _column(values: torch.Tensor, rows: Rows) -> torch.Tensor:
    return values.to(rows.scale.dtype).unsqueeze(1)


def _view(scratch: torch.Tensor, rows: Rows, block: Block) -> torch.Tensor:
    shape = (len(rows), len(block))
    return scratch[: math.prod(shape)].view(shape)


def _look(chunks: list[Distribution], head: Head, work: _Work) -> list[torch.Tensor]:
    """Show each chunk of tokens the whole vocabulary; returns the first tiles of logits, as many as may stay."""
    memory, scratch = (work.scratch(chunks[0].rows.scale) for _ in range(2))
    kept: list[torch.Tensor] = []
    room = work.kept_cells
    for block in head.blocks(work.columns, chunks[0].rows.hidden.dtype):
        for chunk in chunks:
            out = _view(memory, chunk.rows, block)
            if out.numel() <= room:
                room -= out.numel()
                out = torch.empty_like(out)
                kept.append(out)
            else:
                room = 0  # the backward pass expects the kept tiles first
            chunk.see(block, chunk.rows.logits(block, out), _view(scratch, chunk.rows, block))
    return kept


def _look_back(
    chunks: list[RowGradient], head: Head, work: _Work, kept: list[torch.Tensor], needs: tuple[bool, ...]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Go over the same tiles for the gradients: the states' add up in the chunks, weight's and bias's are returned."""
    by_hidden, by_weight, by_bias = needs[:3]
    memory, scratch = (work.scratch(chunks[0].rows.scale) for _ in range(2))
    stored = iter(kept)
    gradient = HeadGradient(head, by_weight=by_weight, by_bias=by_bias)

    def tiles(block: Block) -> Iterator[tuple[torch.Tensor, Rows]]:
        for chunk in chunks:
            views = (_view(each, chunk.rows, block) for each in (memory, scratch))
            tile = chunk.tile(block, next(stored, None), *views)
            if by_hidden:
                chunk.absorb(tile, block)
            yield tile, chunk.rows

    for block in head.blocks(work.columns, chunks[0].rows.hidden.dtype):
        gradient.take(block, tiles(block))
    return gradient.weight, gradient.bias


class _FusedLogprobs(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed here
    """Differentiable in hidden, weight and bias."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd hands arguments on by position
        ctx: Any,  # noqa: ANN401 - autograd's own type
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        work: _Work,
        factor: torch.dtype,
        entropy: Entropy,
        group: dist.ProcessGroup | None,
        start: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = _rows(hidden, targets, temperatures, factor, bias)
        chunks = [Distribution(rows[place], entropy=entropy != "none") for place in work.chunks()]
        kept = _look(chunks, Head(weight, bias, start), work)
        ended = zip(*(chunk.finish(group) for chunk in chunks), strict=True)
        logprobs, log_sum, spread = (torch.cat(parts) for parts in ended)
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, log_sum, spread, *kept)
        ctx.work, ctx.factor, ctx.group, ctx.start = work, factor, group, start
        ctx.set_materialize_grads(False)
        chosen, entropies = (each.squeeze(1).to(rows.scale.dtype) for each in (logprobs, spread))
        if entropy == "measure":
            ctx.mark_non_differentiable(entropies)
        return chosen, None if entropy == "none" else entropies

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> Any:  # noqa: ANN401
        hidden, weight, bias, targets, temperatures, log_sum, spread, *kept = ctx.saved_tensors
        rows = _rows(hidden, targets, temperatures, ctx.factor, bias)
        arrived = torch.zeros_like(rows.scale) if grad_logprobs is None else _column(grad_logprobs, rows)
        columns = (log_sum, spread, arrived, None if grad_entropy is None else _column(grad_entropy, rows))
        chunks = [
            RowGradient(rows[place], *(None if each is None else each[place] for each in columns))
            for place in ctx.work.chunks()
        ]
        by_weight, by_bias = _look_back(chunks, Head(weight, bias, ctx.start), ctx.work, kept, ctx.needs_input_grad)
        by_hidden = None
        if ctx.needs_input_grad[0]:
            by_hidden = torch.cat([chunk.whole() for chunk in chunks])
            if ctx.group is not None:
                dist.all_reduce(by_hidden, group=ctx.group)
            by_hidden = by_hidden.to(hidden.dtype)
        return by_hidden, by_weight, by_bias, *(None,) * 7
