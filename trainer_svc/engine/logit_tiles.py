"""Tiles of logits (some tokens x some of the vocabulary): making them, learning from them, their gradients.

Everything about one token is a column of shape [rows, 1], so that it meets a tile without further ado.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

__all__ = ["Block", "Distribution", "Head", "HeadGradient", "RowGradient", "Rows"]


def _product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> torch.Tensor:
    """Write or add a matrix product into `out`, whose precision may be wider than the factors' (CUDA only)."""
    if left.dtype == out.dtype:
        return out.addmm_(left, right) if add else torch.mm(left, right, out=out)
    wide = torch.mm(left, right, out_dtype=out.dtype)
    return out.add_(wide) if add else out.copy_(wide)


@dataclass(frozen=True, slots=True)
class Block:
    """Some of the vocabulary.

    Attributes:
        columns: Its place in this rank's slice of the vocabulary.
        first: Token id of its first column.
        weight: Its rows of the output layer, as factors of products.
        bias: Its part of the bias.
    """

    columns: slice
    first: int
    weight: torch.Tensor
    bias: torch.Tensor | None

    def __len__(self) -> int:
        return len(self.weight)


@dataclass(frozen=True, slots=True)
class Head:
    """An output layer, or one rank's slice of it.

    Attributes:
        weight: Shape [vocabulary, width].
        bias: Shape [vocabulary].
        start: First token id of the slice.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    start: int

    def blocks(self, columns: int, factor: torch.dtype) -> Iterator[Block]:
        """The vocabulary in order, at most `columns` of it at once, in the precision of factors."""
        for first in range(0, len(self.weight), columns):
            place = slice(first, min(first + columns, len(self.weight)))
            bias = None if self.bias is None else self.bias[place]
            yield Block(place, self.start + first, self.weight[place].to(factor), bias)


@dataclass(frozen=True, slots=True)
class Rows:
    """Some of the tokens.

    Attributes:
        hidden: Their states, as factors of products.
        scale: One over the temperature; its precision is that of logits and sums.
        targets: Token ids.
        scaled: Whether the states are multiplied by the scale already, which spares every tile a pass.
    """

    hidden: torch.Tensor
    scale: torch.Tensor
    targets: torch.Tensor
    scaled: bool

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: slice | torch.Tensor) -> Rows:
        return Rows(self.hidden[index], self.scale[index], self.targets[index], self.scaled)

    def logits(self, block: Block, out: torch.Tensor) -> torch.Tensor:
        """Logits over a block of the vocabulary, after temperature."""
        _product(self.hidden, block.weight.t(), out)
        if block.bias is not None:
            out.add_(block.bias)
        return out if self.scaled else out.mul_(self.scale)

    def place(self, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        """Column of each target in a block, and whether it is there at all."""
        column = self.targets - block.first
        return column.clamp(0, len(block) - 1), (column >= 0) & (column < len(block))


class Distribution:
    """What is known of each token's distribution so far; the sums are relative to the largest logit seen.

    Args:
        rows: The tokens.
        entropy: Whether the entropy is wanted.
    """

    def __init__(self, rows: Rows, *, entropy: bool) -> None:
        self.rows = rows
        self._entropy = entropy
        self._top = torch.full_like(rows.scale, -torch.inf)
        self._chosen = self._top.clone()
        self._exp_sum = torch.zeros_like(rows.scale, dtype=torch.float64)
        self._product_sum = self._exp_sum.clone()

    def see(self, block: Block, logits: torch.Tensor, scratch: torch.Tensor) -> None:
        """Take in a tile of logits, which stays as it is."""
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
        """Log-probability of the target, log-sum-exp and entropy over all ranks' vocabulary, float64."""
        tops, sums = torch.stack([self._top, self._chosen]), torch.stack([self._exp_sum, self._product_sum])
        if group is not None:
            dist.all_reduce(tops, dist.ReduceOp.MAX, group)
            sums *= (self._top - tops[0]).double().exp_()
            dist.all_reduce(sums, dist.ReduceOp.SUM, group)
        log_sum = sums[0].log() + tops[0]
        return tops[1] - log_sum, log_sum, log_sum - sums[1] / sums[0]


class RowGradient:
    """The gradient of some tokens' logits, tile by tile, and that of their states.

    With p the probabilities, H their entropy, g and e what arrives for log-probability and entropy, and T the
    temperature, it is g 1[target] - p (g + e (log p + H)), over T for logits before the division by T.

    Args:
        rows: The tokens. On a CPU those for which nothing arrives are left out of all work; elsewhere the host would have to
            wait for the device to learn how many these are.
        log_sum: Their log-sum-exp.
        spread: Their entropy; read where `e` is given.
        g: Column of what arrives for the log-probabilities.
        e: Column of what arrives for the entropies; None: nothing.
    """

    def __init__(
        self, rows: Rows, log_sum: torch.Tensor, spread: torch.Tensor, g: torch.Tensor, e: torch.Tensor | None
    ) -> None:
        self._tokens = len(rows)
        self._active = _active(g, e) if g.device.type == "cpu" else None
        if self._active is not None:
            rows, log_sum, spread, g = (each[self._active] for each in (rows, log_sum, spread, g))
            e = None if e is None else e[self._active]
        self.rows = rows
        self._hidden = torch.zeros_like(rows.hidden, dtype=rows.scale.dtype)
        self._log_sum = log_sum.to(rows.scale.dtype)
        self._at_target = g if rows.scaled else g * rows.scale
        self._slope = None
        self._level = -self._at_target
        if e is not None:
            self._slope = -e if rows.scaled else -e * rows.scale
            self._level += self._slope * spread.to(rows.scale.dtype)

    def tile(self, block: Block, logits: torch.Tensor | None, out: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        """Gradient of a tile of logits, as a factor of products.

        Args:
            block: The tile's part of the vocabulary.
            logits: The tile's logits for all tokens given, if they were kept; they stay as they are.
            out: Memory for the tile.
            scratch: As much again.
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

    def absorb(self, tile: torch.Tensor, block: Block) -> None:
        """Add a tile's part of the gradient of the states."""
        _product(tile, block.weight, self._hidden, add=True)

    def whole(self) -> torch.Tensor:
        """Gradient of the states of all tokens given."""
        own = self._hidden.mul_(self.rows.scale) if self.rows.scaled else self._hidden
        if self._active is None:
            return own
        zeros = own.new_zeros(self._tokens, own.shape[1])
        return zeros.index_copy_(0, self._active, own)


def _active(g: torch.Tensor, e: torch.Tensor | None) -> torch.Tensor | None:
    """Places of the tokens for which something arrives; None if these are all."""
    arrived = g != 0 if e is None else (g != 0) | (e != 0)
    places = arrived.flatten().nonzero().flatten()
    return places if len(places) < len(g) else None


class HeadGradient:
    """Gradients of an output layer, written block by block into one buffer of its size and precision.

    Args:
        head: The output layer.
        by_weight: Whether the weight's is wanted.
        by_bias: Whether the bias's is wanted.
    """

    def __init__(self, head: Head, *, by_weight: bool, by_bias: bool) -> None:
        self.weight = torch.empty_like(head.weight) if by_weight else None
        self.bias = torch.zeros_like(head.bias) if by_bias and head.bias is not None else None

    def take(self, block: Block, tiles: Iterable[tuple[torch.Tensor, Rows]]) -> None:
        """Sum up the gradients of a block's logits over all tokens; goes through `tiles` in any case."""
        part = None if self.weight is None else self.weight[block.columns]
        total = None
        for tile, rows in tiles:
            if part is not None and total is None:
                total = part if part.dtype == rows.scale.dtype else torch.empty_like(part, dtype=rows.scale.dtype)
                _product(tile.t(), rows.hidden, total)
            elif total is not None:
                _product(tile.t(), rows.hidden, total, add=True)
            if self.bias is not None:
                self.bias[block.columns] += tile.sum(0)
        if part is not None and total is not None and total is not part:
            part.copy_(total)
