"""Context parallelism: the processes of a group share each packed row of tokens (Ulysses, arXiv 2309.14509).

Outside of attention each process holds an equal slice of the row's tokens. Attention needs all tokens of a sequence, but
its heads are independent: before it, slices of tokens of all heads are exchanged for all tokens of a share of the
heads, after it back again. In between runs the same packed attention as in one process, so that folded prompts and
sequences that cross slices need no care.
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
from transformers import AttentionInterface

from trainer_svc.batch.attention_plan import AttentionPlan
from trainer_svc.batch.rows import MicroBatch
from trainer_svc.batch.shapes import Indices, PerToken
from trainer_svc.engine.attention import packed_attention

__all__ = ["EXCHANGED_ATTENTION", "Context", "exchanged_attention"]

EXCHANGED_ATTENTION = "sluice_exchanged"
"""The name under which transformers finds the function."""


@dataclass(frozen=True, slots=True)
class Context:
    """The processes that share a row of tokens.

    Attributes:
        group: They, in the order of their slices.
    """

    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        """How many there are."""
        return int(dist.get_world_size(self.group))

    def width(self, batch: MicroBatch) -> int:
        """Tokens of a slice, the cells behind the row's end included."""
        return math.ceil(batch.packed_tokens / self.size)

    def share(self, batch: MicroBatch) -> tuple[MicroBatch, Indices]:
        """This process's slice of a micro-batch.

        Returns:
            The micro-batch with tokens and loss tokens of the slice alone; attention's plan is still that of the whole row.
            And the places of its loss tokens among all.
        """
        width = self.width(batch)
        start = width * dist.get_rank(self.group)
        # Counted on the host: how many there are decides shapes, and asking the device would wait for it.
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
        """Columns over all loss tokens from those of the slices; a gradient goes to the own slice alone.

        Args:
            columns: Outputs at the loss tokens of this slice; the same ones are None in every process.
            own: Their places among all.
            tokens: Loss tokens in all.
        """
        given = [column for column in columns if column is not None]
        whole = iter(_Gather.apply(torch.stack(given, 1), own, tokens, self.group).unbind(1) if given else ())
        return [None if column is None else next(whole) for column in columns]


def _slice(row: torch.Tensor, start: int, width: int) -> torch.Tensor:
    """Cells of a row of shape [1, packed]; zeros behind its end, which belong to no sequence."""
    part = row[:, start : start + width]
    piece = row.new_zeros((1, width))  # not a view: compiled layers are compiled once more for its strides
    piece[:, : part.shape[1]] = part
    return piece


class _Gather(torch.autograd.Function):  # type: ignore[misc]
    """Rows of all slices in their places; each process's loss is the whole one, so that its gradient is its slice's."""

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


@torch.compiler.disable  # type: ignore[untyped-decorator]  # layers are compiled around it, as around packed_attention
def exchanged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed: AttentionPlan,
    context: Context,
    **options: Any,  # noqa: ANN401  what packed_attention takes
) -> tuple[torch.Tensor, None]:
    """As `packed_attention`, for a slice of the tokens.

    Args:
        module: The attention layer that calls.
        query: Shape [1, heads, slice, head_dim]; the number of heads divides by the number of processes.
        key: Shape [1, key-value heads, slice, head_dim]; heads are repeated where they do not divide.
        value: As `key`.
        attention_mask: Must be None.
        packed: The plan of the whole row.
        context: Who shares it.
        options: See `packed_attention`.

    Returns:
        The output of shape [1, slice, heads, head_dim], and None for the weights.
    """
    repeat = math.lcm(key.shape[1], context.size) // key.shape[1]
    spread = [query, *(tensor.repeat_interleave(repeat, 1) for tensor in (key, value))]
    # One exchange for all three: [process, its heads of each, slice, head_dim].
    parts = torch.cat([tensor[0].unflatten(0, (context.size, -1)) for tensor in spread], 1)
    tokens = _Exchange.apply(parts, context.group).transpose(0, 1).flatten(1, 2).unsqueeze(0)
    real = tokens[:, :, : len(packed.sources)]  # without the cells behind the row's end
    q, k, v = real.split([tensor.shape[1] // context.size for tensor in spread], 1)
    output, _ = packed_attention(module, q, k, v, attention_mask, packed=packed, **options)
    whole = torch.nn.functional.pad(output[0], (0, 0, 0, 0, 0, tokens.shape[2] - output.shape[1]))
    heads = _Exchange.apply(whole.unflatten(0, (context.size, -1)), context.group)
    return heads.transpose(0, 1).flatten(1, 2).unsqueeze(0), None


class _Exchange(torch.autograd.Function):  # type: ignore[misc]
    """Give row i to process i and take its row of this process's number; its own inverse and transpose."""

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


AttentionInterface.register(EXCHANGED_ATTENTION, exchanged_attention)
