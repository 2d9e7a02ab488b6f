"""Context parallelism: the processes of a group share each packed row of tokens (Ulysses, arXiv 2309.14509).

Outside of attention each process holds an equal slice of the row's tokens. Attention needs all tokens of a sequence, but its
heads are independent. Before attention the processes therefore exchange data, so that each process has all tokens for some of
the heads; after attention they exchange back. Attention itself runs on the whole packed row, as it does in a single process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from trainer_svc.batch.attention_plan import to_device
from trainer_svc.batch.rows import MicroBatch
from trainer_svc.batch.shapes import Indices, PerToken


@dataclass(frozen=True, slots=True)
class Context:
    """The processes that share a row of tokens, in the order of their slices."""

    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        """Number of processes."""
        return int(dist.get_world_size(self.group))

    def width(self, batch: MicroBatch) -> int:
        """Return the number of tokens of a slice, including the padding after the row's end."""
        return math.ceil(batch.packed_tokens / self.size)

    def own_slice(self, batch: MicroBatch) -> tuple[MicroBatch, Indices]:
        """Return this process's slice of a micro-batch.

        Returns:
            The micro-batch with the slice's tokens and loss tokens and the attention plan of the whole row, and the places
            of the slice's loss tokens among all loss tokens.
        """
        width = self.width(batch)
        start = width * dist.get_rank(self.group)
        # Computed on the host: shapes depend on the number of places, and reading it from the device would make the host wait.
        places = np.flatnonzero((batch.predictor_places >= start) & (batch.predictor_places < start + width))
        own = to_device(torch.from_numpy(places), batch.predictors.device)
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

    def gather(self, columns: Sequence[PerToken | None], own: Indices, tokens: int) -> list[PerToken | None]:
        """Join the slices' columns to columns over all loss tokens; gradients flow back to this process's slice only.

        Args:
            columns: Outputs at the loss tokens of this slice; every process has None in the same places.
            own: The places of this slice's loss tokens among all loss tokens.
            tokens: Number of all loss tokens.
        """
        given = [column for column in columns if column is not None]
        whole = iter(_Gather.apply(torch.stack(given, 1), own, tokens, self.group).unbind(1) if given else ())
        return [None if column is None else next(whole) for column in columns]

    def gather_tokens(self, states: Sequence[torch.Tensor], tokens: int) -> list[torch.Tensor]:
        """Exchange this slice's tokens of all heads for all tokens of this process's heads.

        Args:
            states: Queries, keys and values of shape [1, heads, slice, head_dim]. The number of query heads is a multiple of
                the number of processes. Key-value heads are repeated if their number is not.
            tokens: Tokens of the row without the padding after its end.

        Returns:
            Shape [1, own heads, tokens, head_dim] each.
        """
        repeated = [each.repeat_interleave(math.lcm(each.shape[1], self.size) // each.shape[1], 1) for each in states]
        # One exchange for queries, keys and values: [process, its heads of all three, slice, head_dim].
        parts = torch.cat([each[0].unflatten(0, (self.size, -1)) for each in repeated], 1)
        whole = _Exchange.apply(parts, self.group).transpose(0, 1).flatten(1, 2).unsqueeze(0)[:, :, :tokens]
        return list(whole.split([each.shape[1] // self.size for each in repeated], 1))

    def scatter_tokens(self, output: torch.Tensor, slice_tokens: int) -> torch.Tensor:
        """Exchange all tokens of this process's heads for this slice's tokens of all heads.

        The output of attention has shape [tokens, own heads, head_dim].

        Returns:
            Shape [slice, heads, head_dim].
        """
        padding = self.size * slice_tokens - output.shape[0]
        whole = torch.nn.functional.pad(output, (0, 0, 0, 0, 0, padding))
        heads = _Exchange.apply(whole.unflatten(0, (self.size, -1)), self.group)
        return heads.transpose(0, 1).flatten(1, 2)


def _slice(row: torch.Tensor, start: int, width: int) -> torch.Tensor:
    """Return `width` cells of a row of shape [1, packed]. Cells after its end are zeros, which belong to no sequence."""
    part = row[:, start : start + width]
    cells = row.new_zeros((1, width))  # a copy: torch.compile would compile layers again for a view's strides
    cells[:, : part.shape[1]] = part
    return cells


class _Gather(torch.autograd.Function):  # type: ignore[misc]
    """Put the rows of all slices in their places. Every process computes the whole loss, so it keeps only its own slice's gradient."""

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
    """Send row i to process i, and receive a row from each process. This operation is its own inverse and its own transpose."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # noqa: ANN401
        ctx.group = group
        return _exchange(rows, group)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        return _exchange(gradient, ctx.group), None


def _exchange(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    sent = rows.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received
