"""Context parallelism: the processes of a group share each packed row of tokens (Ulysses, arXiv 2309.14509).

Outside of attention each process holds an equal slice of the row's tokens. Attention needs all tokens of a sequence, but its
heads are independent. So before attention the processes exchange their slices of tokens of all heads for all tokens of a
share of the heads, and after attention back again. Attention itself runs as in one process, on the whole packed row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from trainer_svc.batch.rows import MicroBatch
from trainer_svc.batch.shapes import Indices, PerToken

__all__ = ["Context"]


@dataclass(frozen=True, slots=True)
class Context:
    """The processes that share a row of tokens.

    Attributes:
        group: The processes, in the order of their slices.
    """

    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        """Number of processes."""
        return int(dist.get_world_size(self.group))

    def width(self, batch: MicroBatch) -> int:
        """Return the tokens of a slice, including the cells behind the row's end."""
        return math.ceil(batch.packed_tokens / self.size)

    def share(self, batch: MicroBatch) -> tuple[MicroBatch, Indices]:
        """Return this process's slice of a micro-batch.

        Returns:
            The micro-batch with the tokens and loss tokens of the slice, but the attention plan of the whole row; and the
            places of the slice's loss tokens among all.
        """
        width = self.width(batch)
        start = width * dist.get_rank(self.group)
        # Found on the host, since their number decides shapes: asking the device would wait for it.
        places = np.flatnonzero((batch.predictor_places >= start) & (batch.predictor_places < start + width))
        own, device = torch.from_numpy(places), batch.predictors.device
        own = own.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else own
        part = replace(
            batch,
            input_ids=_slice(batch.input_ids, start, width),
            position_ids=_slice(batch.position_ids, start, width),
            predictors=batch.predictors[own] - start,
            predictor_places=batch.predictor_places[places] - start,
            targets=batch.targets[own],
            temperatures=batch.temperatures[own],
        )
        return part, own

    def gather(self, columns: Rows[PerToken | None], own: Indices, tokens: int) -> list[PerToken | None]:
        """Join the slices' columns into columns over all loss tokens; gradients flow back to this process's slice only.

        Args:
            columns: Outputs at the loss tokens of this slice; the same ones are None in every process.
            own: The places of these loss tokens among all.
            tokens: Number of all loss tokens.
        """
        given = [column for column in columns if column is not None]
        whole = iter(_Gather.apply(torch.stack(given, 1), own, tokens, self.group).unbind(1) if given else ())
        return [None if column is None else next(whole) for column in columns]

    def gather_tokens(self, states: Rows[torch.Tensor], tokens: int) -> list[torch.Tensor]:
        """Exchange this slice's tokens of all heads for all tokens of this process's share of the heads.

        Args:
            states: Queries, keys and values of shape [1, heads, slice, head_dim]. The number of query heads divides by the
                number of processes; key-value heads are repeated if theirs does not.
            tokens: Tokens of the row without the cells behind its end.

        Returns:
            Shape [1, share of the heads, tokens, head_dim] each.
        """
        spread = [each.repeat_interleave(math.lcm(each.shape[1], self.size) // each.shape[1], 1) for each in states]
        # One exchange for all of them: [process, its heads of each, slice, head_dim].
        parts = torch.cat([each[0].unflatten(0, (self.size, -1)) for each in spread], 1)
        whole = _Exchange.apply(parts, self.group).transpose(0, 1).flatten(1, 2).unsqueeze(0)[:, :, :tokens]
        return list(whole.split([each.shape[1] // self.size for each in spread], 1))

    def scatter_tokens(self, output: torch.Tensor, slice_tokens: int) -> torch.Tensor:
        """Exchange all tokens of this process's share of the heads for this slice's tokens of all heads.

        Args:
            output: What attention gave, of shape [tokens, share of the heads, head_dim].
            slice_tokens: Tokens of a slice.

        Returns:
            Shape [slice, heads, head_dim].
        """
        behind = self.size * slice_tokens - output.shape[0]
        whole = torch.nn.functional.pad(output, (0, 0, 0, 0, 0, behind))
        heads = _Exchange.apply(whole.unflatten(0, (self.size, -1)), self.group)
        return heads.transpose(0, 1).flatten(1, 2)


def _slice(row: torch.Tensor, start: int, width: int) -> torch.Tensor:
    """Return cells of a row of shape [1, packed]; behind its end zeros, which belong to no sequence."""
    part = row[:, start : start + width]
    cells = row.new_zeros((1, width))  # a copy, since compiled layers would be compiled again for a view's strides
    cells[:, : part.shape[1]] = part
    return cells


class _Gather(torch.autograd.Function):  # type: ignore[misc]
    """Put the rows of all slices in their places. Every process computes the whole loss, so it needs only its slice's gradient."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  autograd's own type
        rows: torch.Tensor,
        own: torch.Tensor,
        count: int,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.save_for_backward(own)
        whole = rows.new_zeros((count, *rows.shape[1:])).index_copy_(0, own, rows)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # noqa: ANN401
        (own,) = ctx.saved_tensors
        return gradient.index_select(0, own), None, None, None


class _Exchange(torch.autograd.Function):  # type: ignore[misc]
    """Give row i to process i, and take from it its row of this process's number. Its own inverse and transpose."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # noqa: ANN401
        ctx.group = group
        return _exchange(rows, group)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        return _exchange(gradient, ctx.group), None


def _exchange(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    given = rows.contiguous()
    taken = torch.empty_like(given)
    dist.all_to_all_single(taken, given, group=group)
    return taken
