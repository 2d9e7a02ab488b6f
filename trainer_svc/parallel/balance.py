"""Distribute rows over data-parallel ranks so that all ranks compute about equally much. Pure.

A step takes as long as its slowest rank. The cost of a row is the floating-point operations of its forward pass: linear layers
by tokens, attention by pairs of tokens. Rows of a group that are on one rank forward their common beginning only once.
`balance` therefore tries to distribute whole groups, halves of groups, quarters and so on down to single rows. It picks the
distribution whose slowest rank has the least to compute.

Each distribution assigns the heaviest part first, always to the rank with the least work so far (longest processing time first,
Graham 1969). If every row counts as forwarded alone, the slowest rank then has at most the mean of all ranks plus
(1 - 1 / ranks) of the heaviest row; with `whole_groups`, of the heaviest group.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from statistics import fmean
from typing import Any, Self

import numpy as np

from trainer_svc.batch.rows import TrainingRow, common_prefix, tokens_to_forward

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
"""Names of a decoder's sizes in transformers' configurations."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Floating-point operations of a forward pass. A backward pass has twice as many of each kind.

    Attributes:
        token: For one token in the linear layers.
        pair: For one pair of tokens, where one attends to the other.
        loss_token: For one loss token in the output layer.
    """

    token: float
    pair: float = 0.0
    loss_token: float = 0.0

    @classmethod
    def of(cls, model: Any) -> Self:  # noqa: ANN401  any architecture's configuration
        """Return the cost for a decoder's configuration; `TOKENS` if the configuration lacks one of `SIZES`.

        Args:
            model: A transformers configuration. Experts count as one MLP. If layers have different sizes, the mean is taken.
        """
        if getattr(model, "is_heterogeneous", False):  # it raises if asked for a size that differs by layer
            costs = [cls.of(model.per_layer_config[number]) for number in range(model.num_hidden_layers)]
            return cls(*(fmean(each) for each in zip(*map(astuple, costs), strict=True)))
        sizes = [getattr(model, name, None) for name in SIZES]
        if not all(isinstance(size, int) for size in sizes):
            return cls(1.0)
        hidden, inner, layers, heads, pairs_of_heads, vocabulary = (float(size) for size in sizes if size is not None)
        width = float(getattr(model, "head_dim", None) or hidden // heads)
        weights = hidden * (2 * heads * width + 2 * pairs_of_heads * width + 3 * inner)
        return cls(token=2 * layers * weights, pair=4 * layers * heads * width, loss_token=2 * hidden * vocabulary)


NO_TOKENS = np.zeros(0, dtype=np.int64)

TOKENS = Cost(1.0)
"""The cost for a model of unknown size: the number of tokens."""


@dataclass(frozen=True, slots=True)
class _Row:
    """The cost of a row. `shared`: the beginning that it shares with its group, which counts once per rank; `own`: the rest."""

    group: int
    shared: float
    own: float


def balance(
    rows: Sequence[TrainingRow],
    ranks: int,
    *,
    cost: Cost = TOKENS,
    fold: bool = True,
    whole_groups: bool = False,
    contributes: Callable[[TrainingRow], bool] | None = None,
) -> list[list[int]]:
    """Distribute rows over ranks.

    With `fold` a rank forwards a group's common beginning once. `whole_groups` never splits a group over ranks, for losses that
    compare the rows of a group. Rows that do not contribute to the gradient are not forwarded and cost nothing.

    Returns:
        The places of each rank's rows, in ascending order. The same rows always give the same result.

    Raises:
        ValueError: if there are no ranks.
    """
    if ranks < 1:
        raise ValueError(f"rows cannot be distributed over {ranks} ranks: give 1 or more")
    weighed, groups = _weigh(rows, cost, contributes, fold=fold)
    largest = max(map(len, groups), default=1)
    part_counts = [1]
    while not whole_groups and part_counts[-1] < largest:
        part_counts.append(part_counts[-1] * 2)
    candidates = [
        _distribute(weighed, [part for group in groups for part in _split_group(group, count)], ranks)
        for count in part_counts
    ]
    best = min(candidates, key=lambda each: max(_load(weighed, places) for places in each))
    return [sorted(places) for places in best]


def _weigh(
    rows: Sequence[TrainingRow], cost: Cost, contributes: Callable[[TrainingRow], bool] | None, *, fold: bool
) -> tuple[list[_Row], list[list[int]]]:
    """Return the cost of each row, and the rows of each group; a row without a group is a group of its own."""
    members: dict[object, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        members[row.group_id or place].append(place)
    inputs = [tokens_to_forward(row) if contributes is None or contributes(row) else NO_TOKENS for row in rows]
    groups = list(members.values())
    weighed: dict[int, _Row] = {}
    for number, places in enumerate(groups):
        prefix = common_prefix(inputs[place] for place in places) if fold and len(places) > 1 else 0
        for place in places:
            tokens = len(inputs[place])
            attention = cost.pair * tokens * (tokens + 1) / 2
            head = cost.loss_token * rows[place].loss_tokens if tokens else 0.0
            shared = cost.token * min(prefix, tokens)
            weighed[place] = _Row(number, shared, cost.token * tokens - shared + attention + head)
    return [weighed[place] for place in range(len(rows))], groups


def _split_group(group: list[int], count: int) -> Iterable[list[int]]:
    """Split a group into at most `count` parts with about equally many rows."""
    count = min(count, len(group))
    return (group[part * len(group) // count : (part + 1) * len(group) // count] for part in range(count))


def _distribute(weighed: Sequence[_Row], parts: Sequence[list[int]], ranks: int) -> list[list[int]]:
    loads = [_load(weighed, part) for part in parts]
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0.0, rank) for rank in range(ranks)]
    for number in sorted(range(len(parts)), key=lambda number: -loads[number]):
        load, rank = heapq.heappop(heap)
        assigned[rank] += parts[number]
        heapq.heappush(heap, (load + loads[number], rank))
    return assigned


def _load(weighed: Sequence[_Row], places: Iterable[int]) -> float:
    """Return the cost of rows on one rank: the common beginning of each group counts once."""
    shared: dict[int, float] = {}
    own = 0.0
    for place in places:
        row = weighed[place]
        shared[row.group] = max(shared.get(row.group, 0.0), row.shared)
        own += row.own
    return own + sum(shared.values())
