"""Training rows with loss tokens in several turns."""

from __future__ import annotations

import torch

from trainer_svc.batch.rows import TrainingRow

__all__ = ["column", "training_row"]


def training_row(
    mask: list[int], *, name: str = "s", group: str = "", reward: float | None = None, **columns
) -> TrainingRow:
    """A row with this loss mask; a column is given by its values at the loss tokens (NaN elsewhere)."""
    loss_mask = torch.tensor(mask, dtype=torch.bool)
    scalars = {key: value for key, value in columns.items() if not isinstance(value, list)}
    lists = {key: column(loss_mask, value) for key, value in columns.items() if isinstance(value, list)}
    lists.setdefault("behaviour_logprobs", column(loss_mask, [-1.0] * sum(mask)))
    lists.setdefault("advantages", torch.zeros(len(mask), dtype=torch.float64))
    return TrainingRow(
        input_ids=torch.zeros(len(mask), dtype=torch.int64),
        loss_mask=loss_mask,
        reward=reward,
        group_id=group,
        trajectory_id=name,
        **lists,
        **scalars,
    )


def column(loss_mask: torch.Tensor, values: list[float]) -> torch.Tensor:
    spread = torch.full((len(loss_mask),), torch.nan, dtype=torch.float64)
    spread[loss_mask] = torch.tensor(values, dtype=torch.float64)
    return spread
