"""Log-probabilities and entropies of loss tokens from hidden states, without ever holding all logits.

The output layer, the softmax and their gradients are computed tile by tile (some tokens x some of the vocabulary). The
forward pass keeps one log-sum-exp per token (online, as flash attention does). The backward pass computes each tile of
logits again, turns it into its gradient in place, and adds that to the gradients of the hidden states and of the weight's
rows in the tile. Tiles that fit in `cells` are kept instead of computed again, so that a small output layer costs what
plain autograd costs. In the spirit of cut cross-entropy (arXiv 2411.09009) and Liger (arXiv 2410.10989), for gradients
that arrive per token.

Products and sums are float32 for bfloat16 and float32 hidden states, and float64 for float64 ones. Sums over the whole
vocabulary are always float64. Values per token are columns of shape [tokens, 1], so that they broadcast over a tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard
from torch.utils.checkpoint import checkpoint

from trainer_svc.batch.shapes import HeadBias, HeadWeight, Indices, PerToken, TokenStates
from trainer_svc.parallel.sharding import local_slice

Entropy = Literal["none", "measure", "train"]
"""none: compute no entropies; measure: compute them without a gradient; train: compute them with a gradient."""

CPU_TILE_ROWS = 1024
CPU_TILE_CELLS = 1 << 20
"""Tokens and logits of a tile on the CPU: its 4 MiB stay in the cache between the product and the passes over it."""

CUDA_TILE_ROWS = 4096
"""Tokens of a tile on CUDA, where only `cells` bounds the tile: few large kernels."""


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """This rank's slice of the vocabulary, if an output layer is split over ranks.

    Attributes:
        group: The ranks that share the output layer.
        start: First token id of this rank's slice.
    """

    group: dist.ProcessGroup
    start: int


def logprobs_of_states(
    head: torch.nn.Module,
    states: TokenStates,
    targets: Indices,
    temperatures: PerToken,
    *,
    vocabulary: int,
    entropy: Entropy,
    cells: int,
) -> tuple[PerToken, PerToken | None]:
    """Return the log-probability of each target and the entropy, in nats, after temperature.

    A linear layer is fused with the softmax. If its weight is a DTensor over a tensor-parallel mesh, this rank has a slice of
    the vocabulary. Any other module is called for some of the tokens at a time, and again in the backward pass.
    Arguments are as of `fused_logprobs`.

    Raises:
        ValueError: if the layer's weight is split in another way than by vocabulary.
    """
    if type(head) is not torch.nn.Linear:  # an adapter's or FSDP's layer does more than a product
        return _in_parts(head, states, targets, temperatures, entropy=entropy, rows=max(1, cells // vocabulary))
    weight, bias, shard = _own_slice(head.weight, head.bias)
    return fused_logprobs(states, weight, targets, temperatures, bias=bias, entropy=entropy, cells=cells, shard=shard)


def logprobs_of_logits(
    logits: torch.Tensor, targets: Indices, temperatures: PerToken, *, entropy: Entropy
) -> tuple[PerToken, PerToken | None]:
    """Return the same as `logprobs_of_states` from logits of shape [tokens, vocabulary]."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    scaled = torch.log_softmax(wide / temperatures.to(wide.dtype).unsqueeze(1), dim=-1)
    chosen = scaled.gather(1, targets.unsqueeze(1)).squeeze(1)
    if entropy == "none":
        return chosen, None
    spread = scaled if entropy == "train" else scaled.detach()
    return chosen, -(spread.exp() * spread).sum(-1)


def _own_slice(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, VocabularyShard | None]:
    """Return this rank's rows of an output layer (weight and bias), and which ranks share the layer."""
    if not isinstance(weight, DTensor):
        return weight, bias, None
    mesh = weight.device_mesh
    if mesh.mesh_dim_names != ("tp",) or weight.placements != (Shard(0),):
        raise ValueError(
            f"the output layer's weight is {weight.placements} over {mesh.mesh_dim_names}: gather it over data-parallel "
            "ranks first, and split it by rows over `tp` (ColwiseParallel)"
        )
    own = bias.to_local() if isinstance(bias, DTensor) else bias
    return weight.to_local(), own, VocabularyShard(mesh.get_group(), local_slice(weight)[1][0])


def _in_parts(
    head: torch.nn.Module,
    states: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    *,
    entropy: Entropy,
    rows: int,
) -> tuple[PerToken, PerToken | None]:
    def part(some: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor) -> tuple[PerToken, PerToken | None]:
        return logprobs_of_logits(head(some), targets, temperatures, entropy=entropy)

    if len(states) <= rows:
        return part(states, targets, temperatures)
    parts = zip(states.split(rows), targets.split(rows), temperatures.split(rows), strict=True)
    done = [checkpoint(part, *each, use_reentrant=False) for each in parts]
    logprobs = torch.cat([logprob for logprob, _ in done])
    return logprobs, torch.cat([value for _, value in done]) if entropy != "none" else None


def fused_logprobs(
    hidden: TokenStates,
    weight: HeadWeight,
    targets: Indices,
    temperatures: PerToken,
    *,
    bias: HeadBias | None = None,
    entropy: Entropy = "none",
    cells: int = 3 << 24,
    shard: VocabularyShard | None = None,
) -> tuple[PerToken, PerToken | None]:
    """Return each target's log-probability under softmax((hidden weight^T + bias) / temperature), and the entropy.

    Args:
        hidden: States that predict the targets, shape [tokens, width].
        weight: Output layer, shape [vocabulary, width]; with `shard` this rank's slice of the vocabulary.
        targets: Token ids. An id outside of the whole vocabulary has log-probability minus infinity.
        temperatures: Divisor of each token's logits, above 0.
        bias: Added to the logits, shape [vocabulary].
        entropy: Whether to compute the entropy in nats, and whether it carries a gradient.
        cells: Most logits in memory at once (at least 2), including those kept between forward and backward pass.
        shard: This rank's slice, if the layer is split. All ranks pass the same `hidden`, `targets` and `temperatures`, get the
            same results, and must use them alike: the gradient of `hidden` is summed over the ranks.

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
    keep = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (hidden, weight, bias))
    cells, rows, columns = _tile(tokens, cells, hidden.device)
    rounding = _rounding(hidden, weight)
    factor = rounding if hidden.device.type == "cuda" else torch.promote_types(rounding, torch.float32)
    work = _Work(tokens, rows, columns, cells if keep else 0, rounding, factor, entropy, shard)
    with torch.autocast(hidden.device.type, enabled=False):
        logprobs, entropies = _FusedLogprobs.apply(hidden, weight, bias, targets, temperatures, work)
    return logprobs, entropies


@dataclass(frozen=True, slots=True)
class _Work:
    """How one call computes: in tiles of at most `rows` tokens x `columns` token ids.

    Attributes:
        kept_cells: Logits that may stay in memory for the backward pass.
        rounding: Precision to which states and weight are rounded.
        factor: Precision of the factors of products. Below float32 only on CUDA, where such factors can give a float32 product.
    """

    tokens: int
    rows: int
    columns: int
    kept_cells: int
    rounding: torch.dtype
    factor: torch.dtype
    entropy: Entropy
    shard: VocabularyShard | None

    def chunks(self) -> Iterator[slice]:
        """Yield ranges of tokens in order; one empty range if there are no tokens."""
        for first in range(0, max(1, self.tokens), self.rows):
            yield slice(first, min(first + self.rows, self.tokens))

    def buffers(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for a tile, and the same amount for intermediate results."""
        return like.new_empty(self.rows * self.columns), like.new_empty(self.rows * self.columns)


def _tile(tokens: int, cells: int, device: torch.device) -> tuple[int, int, int]:
    """Return how many logits may be kept, and the rows and columns of a tile. Two tiles and the kept logits take at most `cells`."""
    if device.type == "cpu":
        tile, most = min(max(1, cells // 8), CPU_TILE_CELLS), CPU_TILE_ROWS
    else:
        tile, most = max(1, cells // 4), CUDA_TILE_ROWS
    rows = max(1, min(tokens, most, tile))
    return max(0, cells - 2 * tile), rows, tile // rows


def _rounding(hidden: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """Return the precision of the output layer in the forward pass: autocast's, because an engine rounds both factors to it."""
    dtype, device = torch.promote_types(hidden.dtype, weight.dtype), hidden.device.type
    narrow = torch.is_autocast_enabled(device) and dtype != torch.float64
    return torch.get_autocast_dtype(device) if narrow else dtype


def _tokens(
    hidden: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor, work: _Work, bias: torch.Tensor | None
) -> _Tokens:
    factor = work.factor
    wide = torch.float64 if factor == torch.float64 else torch.float32
    scale = temperatures.to(wide).reciprocal().unsqueeze(1)
    scaled = bias is None and factor == wide  # narrow factors would be rounded once more
    factors = hidden.to(work.rounding).to(factor)
    return _Tokens(factors * scale if scaled else factors, scale, targets.unsqueeze(1), scaled)


def _column(values: torch.Tensor, rows: _Tokens) -> torch.Tensor:
    return values.to(rows.scale.dtype).unsqueeze(1)


def _view(buffer: torch.Tensor, rows: _Tokens, block: _Block) -> torch.Tensor:
    shape = (len(rows), len(block))
    return buffer[: math.prod(shape)].view(shape)


def _forward_tiles(chunks: list[_Distribution], layer: _OutputLayer, work: _Work) -> list[torch.Tensor]:
    """Add the whole vocabulary to each chunk of tokens. Return the first tiles of logits, up to the limit of kept cells."""
    memory, scratch = work.buffers(chunks[0].rows.scale)
    kept: list[torch.Tensor] = []
    room = work.kept_cells
    for block in layer.blocks(work.columns, chunks[0].rows.hidden.dtype):
        for chunk in chunks:
            out = _view(memory, chunk.rows, block)
            if out.numel() <= room:
                room -= out.numel()
                out = torch.empty_like(out)
                kept.append(out)
            else:
                room = 0  # the backward pass expects the kept tiles first
            chunk.add(block, chunk.rows.logits(block, out), _view(scratch, chunk.rows, block))
    return kept


def _backward_tiles(
    chunks: list[_TokenGradient], layer: _OutputLayer, work: _Work, kept: list[torch.Tensor], needs: tuple[bool, ...]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Compute gradients over the same tiles. Collect the states' gradients in the chunks; return those of weight and bias."""
    by_hidden, by_weight, by_bias = needs[:3]
    weight = torch.empty_like(layer.weight) if by_weight else None
    bias = torch.zeros_like(layer.bias) if by_bias and layer.bias is not None else None
    first = chunks[0].rows
    memory, scratch = work.buffers(first.scale)
    stored = iter(kept)
    for block in layer.blocks(work.columns, first.hidden.dtype):
        part = total = None if weight is None else weight[block.columns]
        if part is not None and part.dtype != first.scale.dtype:
            total = torch.empty_like(part, dtype=first.scale.dtype)
        for number, chunk in enumerate(chunks):
            views = (_view(each, chunk.rows, block) for each in (memory, scratch))
            tile = chunk.tile(block, next(stored, None), *views)
            if by_hidden:
                _product(tile, block.weight, chunk.states_gradient, add=True)
            if total is not None:
                _product(tile.t(), chunk.rows.hidden, total, add=number > 0)
            if bias is not None:
                bias[block.columns] += tile.sum(0)
        if part is not None and total is not part:
            part.copy_(total)
    return weight, bias


class _FusedLogprobs(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed here
    """Differentiable in hidden, weight and bias."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes arguments by position
        ctx: Any,  # noqa: ANN401 - autograd's own type
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        work: _Work,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = _tokens(hidden, targets, temperatures, work, bias)
        chunks = [_Distribution(rows[place], entropy=work.entropy != "none") for place in work.chunks()]
        kept = _forward_tiles(
            chunks, _OutputLayer(weight, bias, work.shard.start if work.shard else 0, work.rounding), work
        )
        ended = zip(*(chunk.finish(work.shard and work.shard.group) for chunk in chunks), strict=True)
        logprobs, log_sum, entropies = (torch.cat(parts) for parts in ended)
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, log_sum, entropies, *kept)
        ctx.work = work
        ctx.set_materialize_grads(False)
        chosen, measured = (each.squeeze(1).to(rows.scale.dtype) for each in (logprobs, entropies))
        if work.entropy == "measure":
            ctx.mark_non_differentiable(measured)
        return chosen, None if work.entropy == "none" else measured

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> Any:  # noqa: ANN401
        hidden, weight, bias, targets, temperatures, log_sum, entropies, *kept = ctx.saved_tensors
        work: _Work = ctx.work
        rows = _tokens(hidden, targets, temperatures, work, bias)
        arrived = torch.zeros_like(rows.scale) if grad_logprobs is None else _column(grad_logprobs, rows)
        columns = (log_sum, entropies, arrived, None if grad_entropy is None else _column(grad_entropy, rows))
        chunks = [
            _TokenGradient(rows[place], *(None if each is None else each[place] for each in columns))
            for place in work.chunks()
        ]
        layer = _OutputLayer(weight, bias, work.shard.start if work.shard else 0, work.rounding)
        by_weight, by_bias = _backward_tiles(chunks, layer, work, kept, ctx.needs_input_grad)
        by_hidden = None
        if ctx.needs_input_grad[0]:
            by_hidden = torch.cat([chunk.whole() for chunk in chunks])
            if work.shard is not None:
                dist.all_reduce(by_hidden, group=work.shard.group)
            by_hidden = by_hidden.to(hidden.dtype)
        return by_hidden, by_weight, by_bias, None, None, None


def _product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> torch.Tensor:
    """Write or add a matrix product into `out`, whose precision may be wider than the factors' (CUDA only)."""
    if left.dtype == out.dtype:
        return out.addmm_(left, right) if add else torch.mm(left, right, out=out)
    wide = torch.mm(left, right, out_dtype=out.dtype)
    return out.add_(wide) if add else out.copy_(wide)


@dataclass(frozen=True, slots=True)
class _Block:
    """A range of the vocabulary: its place in this rank's slice, its first token id, its weight (in `factor` precision) and bias."""

    columns: slice
    first: int
    weight: torch.Tensor
    bias: torch.Tensor | None

    def __len__(self) -> int:
        return len(self.weight)


@dataclass(frozen=True, slots=True)
class _OutputLayer:
    """An output layer (weight [vocabulary, width] and bias [vocabulary]), or its slice from token id `start` on."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    start: int
    rounding: torch.dtype

    def blocks(self, columns: int, factor: torch.dtype) -> Iterator[_Block]:
        """Yield ranges of at most `columns` token ids in order, with the weight in the precision of factors."""
        for first in range(0, len(self.weight), columns):
            place = slice(first, min(first + columns, len(self.weight)))
            bias = None if self.bias is None else self.bias[place].to(self.rounding).to(factor)
            yield _Block(place, self.start + first, self.weight[place].to(self.rounding).to(factor), bias)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """A range of the tokens.

    Attributes:
        hidden: Hidden states of these tokens, in the precision in which matrix products read them.
        scale: One over the temperature, in the precision of logits and sums.
        scaled: Whether the states are already multiplied by the scale, which saves a pass over every tile.
    """

    hidden: torch.Tensor
    scale: torch.Tensor
    targets: torch.Tensor
    scaled: bool

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: slice | torch.Tensor) -> _Tokens:
        return _Tokens(self.hidden[index], self.scale[index], self.targets[index], self.scaled)

    def logits(self, block: _Block, out: torch.Tensor) -> torch.Tensor:
        """Compute the logits over a block of the vocabulary, after temperature."""
        _product(self.hidden, block.weight.t(), out)
        if block.bias is not None:
            out.add_(block.bias)
        return out if self.scaled else out.mul_(self.scale)

    def place(self, block: _Block) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the column of each target in a block, and whether the target is in the block."""
        column = self.targets - block.first
        return column.clamp(0, len(block) - 1), (column >= 0) & (column < len(block))


class _Distribution:
    """The softmax statistics of each token over the blocks added so far; the sums are relative to the largest logit."""

    def __init__(self, rows: _Tokens, *, entropy: bool) -> None:
        self.rows = rows
        self._entropy = entropy
        self._top = torch.full_like(rows.scale, -torch.inf)
        self._chosen = self._top.clone()
        self._exp_sum = torch.zeros_like(rows.scale, dtype=torch.float64)
        self._product_sum = self._exp_sum.clone()

    def add(self, block: _Block, logits: torch.Tensor, scratch: torch.Tensor) -> None:
        """Add a tile of logits, which is not changed."""
        column, inside = self.rows.place(block)
        self._chosen = torch.where(inside, logits.gather(1, column), self._chosen)
        top = torch.maximum(self._top, logits.amax(1, keepdim=True))
        shrink = (self._top - top).double().exp_()
        self._top = top
        torch.sub(logits, top, out=scratch).exp_()
        self._exp_sum.mul_(shrink).add_(scratch.sum(1, keepdim=True))
        if self._entropy:
            self._product_sum.mul_(shrink).add_(scratch.mul_(logits).sum(1, keepdim=True))

    def finish(self, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return log-probability of the target, log-sum-exp and entropy over all ranks' vocabulary, float64."""
        tops, sums = torch.stack([self._top, self._chosen]), torch.stack([self._exp_sum, self._product_sum])
        if group is not None:
            dist.all_reduce(tops, dist.ReduceOp.MAX, group)
            sums *= (self._top - tops[0]).double().exp_()
            dist.all_reduce(sums, dist.ReduceOp.SUM, group)
        log_sum = sums[0].log() + tops[0]
        return tops[1] - log_sum, log_sum, log_sum - sums[1] / sums[0]


class _TokenGradient:
    """The gradient of some tokens' logits, tile by tile, and of their states.

    With p the probabilities, H their entropy, g and e the incoming gradients of log-probability and entropy, and T the
    temperature, the gradient is g 1[target] - p (g + e (log p + H)), divided by T for logits before the division by T. The
    entropy is read only if `e` is given.

    On a CPU, tokens with zero incoming gradient are skipped. On other devices they are not, because the host would have to wait
    for the device to count them.
    """

    def __init__(
        self, rows: _Tokens, log_sum: torch.Tensor, entropy: torch.Tensor, g: torch.Tensor, e: torch.Tensor | None
    ) -> None:
        self._tokens = len(rows)
        self._active = _active(g, e) if g.device.type == "cpu" else None
        if self._active is not None:
            rows, log_sum, entropy, g = (each[self._active] for each in (rows, log_sum, entropy, g))
            e = None if e is None else e[self._active]
        self.rows = rows
        self.states_gradient = torch.zeros_like(rows.hidden, dtype=rows.scale.dtype)
        self._log_sum = log_sum.to(rows.scale.dtype)
        self._at_target = g if rows.scaled else g * rows.scale
        self._slope = None
        self._level = -self._at_target
        if e is not None:
            self._slope = -e if rows.scaled else -e * rows.scale
            self._level += self._slope * entropy.to(rows.scale.dtype)

    def tile(
        self, block: _Block, logits: torch.Tensor | None, out: torch.Tensor, scratch: torch.Tensor
    ) -> torch.Tensor:
        """Write the gradient of a tile of logits to `out`, and return it as a factor of products.

        `logits` are the kept logits of all tokens, if there are any; they are not changed. `scratch` is as large as `out`.
        """
        if logits is None:
            logits = self.rows.logits(block, out)
        elif self._active is not None:
            logits = logits[self._active]
        torch.sub(logits, self._log_sum, out=out)
        if self._slope is None:
            out.exp_().mul_(self._level)
        else:
            torch.exp(out, out=scratch)
            out.mul_(self._slope).add_(self._level).mul_(scratch)
        column, inside = self.rows.place(block)
        out.scatter_add_(1, column, self._at_target * inside)
        return out.to(self.rows.hidden.dtype)

    def whole(self) -> torch.Tensor:
        """Return the gradient of the states of all tokens."""
        own = self.states_gradient.mul_(self.rows.scale) if self.rows.scaled else self.states_gradient
        if self._active is None:
            return own
        zeros = own.new_zeros(self._tokens, own.shape[1])
        return zeros.index_copy_(0, self._active, own)


def _active(g: torch.Tensor, e: torch.Tensor | None) -> torch.Tensor | None:
    """Return the places of the tokens with an incoming gradient other than zero; None if these are all tokens."""
    arrived = g != 0 if e is None else (g != 0) | (e != 0)
    places = arrived.flatten().nonzero().flatten()
    return places if len(places) < len(g) else None
