"""Which tokens of a row are forwarded, and how many of them the rows of a group have in common."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from trainer_svc.engine.batch import Sequence

__all__ = ["Ids", "common_prefix", "forwarded"]

Ids = NDArray[np.int64]


def forwarded(sequence: Sequence) -> Ids:
    """The tokens that some loss token depends on: all before the last loss token."""
    trained = np.flatnonzero(sequence.loss_mask.numpy())
    ids: Ids = sequence.input_ids.numpy()
    return ids[: trained[-1] if trained.size else 0]


def common_prefix(inputs: Iterable[Ids]) -> int:
    """Number of leading tokens that all inputs with any have in common."""
    given = [ids for ids in inputs if len(ids)]
    prefix = min(map(len, given), default=0)
    for ids in given[1:]:
        differ = np.flatnonzero(given[0][:prefix] != ids[:prefix])
        prefix = int(differ[0]) if differ.size else prefix
    return prefix
