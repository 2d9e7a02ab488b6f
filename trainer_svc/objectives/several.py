"""Several objectives in one batch: each trajectory is trained by the one that it names.

    loss = sum over objectives of (sum of the losses of its trajectories' tokens / its own divisor over the whole batch)

So the gradient is the sum of those that each objective would give for its own trajectories alone. Neither packing, nor
ranks, nor the other objectives of the batch change an objective's part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from trainer_svc.batch.attention_plan import to_device
from trainer_svc.batch.rows import OPTIONAL_COLUMNS, LossFn, LossWeight, MicroBatch, Outputs, TrainingRow
from trainer_svc.batch.shapes import Scalar
from trainer_svc.objectives.objective import Objective
from trainer_svc.parallel.ranks import ALONE, Ranks

_PER_TOKEN = ("behaviour_logprobs", "advantages", "sequence_tokens", "group_tokens", *OPTIONAL_COLUMNS)
"""Columns of a micro-batch that a loss reads."""


def among(
    rows: Sequence[TrainingRow], names: Collection[str], work: Callable[[list[TrainingRow]], list[TrainingRow]]
) -> list[TrainingRow]:
    """Replace the rows of some objectives by what `work` makes of them. It is called on every rank, also without rows."""
    places = [place for place, row in enumerate(rows) if row.objective in names]
    changed = list(rows)
    for place, row in zip(places, work([rows[place] for place in places]), strict=True):
        changed[place] = row
    return changed


def with_common_columns(rows: Sequence[TrainingRow]) -> list[TrainingRow]:
    """Give all rows the optional columns that any of them has, so that they can share micro-batches.

    What is filled in belongs to objectives that do not read the column.
    """
    missing = {name for name in OPTIONAL_COLUMNS if len({getattr(each, name) is None for each in rows}) > 1}
    return [
        replace(row, **{name: _unread(row, name) for name in missing if getattr(row, name) is None}) for row in rows
    ]


def _unread(row: TrainingRow, name: str) -> torch.Tensor:
    return torch.ones_like(row.loss_mask) if name == "kept" else torch.full_like(row.behaviour_logprobs, torch.nan)


def mixed(
    objectives: Mapping[str, Objective], part: Sequence[TrainingRow], ranks: Ranks = ALONE
) -> tuple[LossFn, LossWeight]:
    """Return the loss of a minibatch under several objectives, with the divisor that the engine applies.

    Args:
        objectives: By the name that rows have; "" is the trainer's own.
        part: This rank's rows of the minibatch.
        ranks: All ranks that train on it.
    """
    own = {name: each.weight([row for row in part if row.objective == name]) for name, each in objectives.items()}
    divisors = ranks.total({f"objective/{name}": weight for name, weight in own.items()})

    def loss(outputs: Outputs, batch: MicroBatch) -> tuple[Scalar, dict[str, Scalar]]:
        present = [name for name in objectives if any(each.objective == name for each in batch.sequences)]
        total, merged = outputs.main.sum() * 0.0, dict[str, Scalar]()
        for name in present:
            inner, rows = (outputs, batch) if len(present) == 1 else _of(name, outputs, batch)
            value, sums = objectives[name].loss(inner, rows)
            total = total + value / (divisors[f"objective/{name}"] or 1.0)
            for key, each in sums.items():
                before = merged.get(key)
                merged[key] = (
                    each if before is None else torch.maximum(before, each) if key.startswith("max_") else before + each
                )
        return total, merged

    # The divisors are applied above: the engine divides by 1, to which all ranks contribute.
    return loss, lambda _: 1.0 / ranks.size


def _of(name: str, outputs: Outputs, batch: MicroBatch) -> tuple[Outputs, MicroBatch]:
    """Return the loss tokens of one objective's sequences, as a loss reads them."""
    counts = np.array([each.loss_tokens for each in batch.sequences])
    members = np.array([each.objective == name for each in batch.sequences])
    device = outputs.main.device
    places = to_device(torch.from_numpy(np.flatnonzero(np.repeat(members, counts))), device)
    owners = to_device(torch.from_numpy(np.repeat(np.arange(int(members.sum())), counts[members])), device)
    columns: dict[str, Any] = {each: getattr(batch, each) for each in _PER_TOKEN}
    columns = {each: None if column is None else column[places] for each, column in columns.items()}
    chosen = replace(
        batch,
        sequences=tuple(each for each, member in zip(batch.sequences, members, strict=True) if member),
        owners=owners,
        **columns,
    )
    return (
        replace(
            outputs,
            logprobs=None if outputs.logprobs is None else outputs.logprobs[places],
            entropy=None if outputs.entropy is None else outputs.entropy[places],
        ),
        chosen,
    )
