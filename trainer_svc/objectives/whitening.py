"""Mean 0 and spread 1 over the loss tokens of a batch, or of each group: the same on every rank that has a share of it."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from hashlib import blake2b

import torch

from sluice.advantages import STD_OFFSET
from trainer_svc.engine.shapes import PerToken
from trainer_svc.parallel.ranks import ALONE, Ranks

__all__ = ["whiten", "whiten_by_group"]


def whiten(values: Rows[PerToken], ranks: Ranks = ALONE) -> list[PerToken]:
    """(x - mean) / (std + 1e-6) over the tokens of all sequences on all ranks, std unbiased; 0 for a lone token.

    Args:
        values: The loss tokens of each of this rank's sequences.
        ranks: All ranks that have a share of the batch; they call this together.

    Returns:
        Whitened values in float64.
    """
    own = torch.cat([each.double() for each in values]) if values else torch.zeros(0, dtype=torch.float64)
    sums = ranks.total({"tokens": float(len(own)), "sum": float(own.sum())})
    tokens = sums["tokens"]
    if tokens < 2:
        return [torch.zeros_like(each, dtype=torch.float64) for each in values]
    mean = sums["sum"] / tokens
    # The second pass avoids the cancellation of sums of squares, which large returns of equal size would suffer.
    squares = ranks.total({"squares": float((own - mean).square().sum())})["squares"]
    std = (squares / (tokens - 1)) ** 0.5
    return [(each.double() - mean) / (std + STD_OFFSET) for each in values]


def whiten_by_group(values: Rows[PerToken], groups: Rows[str], ranks: Ranks = ALONE) -> list[PerToken]:
    """As `whiten`, over the tokens of each group alone, also where a group lies on several ranks.

    Args:
        values: The loss tokens of each of this rank's sequences.
        groups: The group of each.
        ranks: All ranks that have a share of the batch; they call this together.
    """
    keys = [_key(group) for group in groups]
    sums = _totals(keys, [[float(len(each)), float(each.double().sum())] for each in values], 2, ranks)
    centred = [each.double() - sums[key][1] / sums[key][0] for each, key in zip(values, keys, strict=True)]
    squares = _totals(keys, [[float(each.square().sum())] for each in centred], 1, ranks)
    whitened = []
    for each, key in zip(centred, keys, strict=True):
        tokens = float(sums[key][0])
        std = (float(squares[key][0]) / (tokens - 1)) ** 0.5 if tokens > 1 else 0.0
        whitened.append(each / (std + STD_OFFSET))
    return whitened


def _key(group: str) -> float:
    """A number for a group's name that is the same on every rank, exact in float64."""
    return float(int.from_bytes(blake2b(group.encode(), digest_size=6).digest(), "big"))


def _totals(keys: Rows[float], rows: Rows[list[float]], width: int, ranks: Ranks) -> dict[float, torch.Tensor]:
    """Sums of the rows of each key over all ranks."""
    own = torch.tensor([[key, *row] for key, row in zip(keys, rows, strict=True)], dtype=torch.float64)
    totals: dict[float, torch.Tensor] = {}
    for row in ranks.gather(own.reshape(-1, width + 1)):
        key = float(row[0])
        totals[key] = totals.get(key, torch.zeros(width, dtype=torch.float64)) + row[1:]
    return totals
