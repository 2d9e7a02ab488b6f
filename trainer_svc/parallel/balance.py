"""Which rows each data-parallel rank gets, so that all of them have about as much to compute. Pure.

A step takes as long as its slowest rank. Rows are weighed by the floating-point operations of their forward pass:
linear layers by tokens, attention by pairs of tokens. Rows of a group that begin alike are forwarded once where they
are together, so that whole groups are dealt out, then halves of groups, quarters and so on down to single rows, and the
deal with the lightest slowest rank is taken.

Each deal goes from heavy to light to the lightest rank (longest processing time first, Graham 1969). The slowest rank
of the result has at most the mean of all ranks, counting every row as forwarded alone, and (1 - 1 / ranks) of the
heaviest row; with `whole_groups`, of the heaviest group.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Self

import numpy as np

from trainer_svc.batch.packing import common_prefix, tokens_to_forward
from trainer_svc.batch.rows import Sequence

__all__ = ["TOKENS", "Cost", "balance"]

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
"""Names that transformers' configurations give to the sizes of a decoder."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Operations of a forward pass; a backward pass has twice as many of each kind.

    Attributes:
        token: Of one token in the linear layers.
        pair: Of one token that attends to one other.
        loss_token: Of one loss token in the output layer.
    """

    token: float
    pair: float = 0.0
    loss_token: float = 0.0

    @classmethod
    def of(cls, model: object) -> Self:
        """The cost in floating-point operations for a decoder's configuration; that of `TOKENS` if it names no such sizes.

        Args:
            model: A configuration of transformers. Experts count as one MLP.
        """
        sizes = [getattr(model, name, None) for name in SIZES]
        if not all(isinstance(size, int) for size in sizes):
            return cls(1.0)
        hidden, inner, layers, heads, pairs_of_heads, vocabulary = (float(size) for size in sizes if size is not None)
        width = float(getattr(model, "head_dim", None) or hidden // heads)
        weights = hidden * (2 * heads * width + 2 * pairs_of_heads * width + 3 * inner)
        return cls(token=2 * layers * weights, pair=4 * layers * heads * width, loss_token=2 * hidden * vocabulary)


NOTHING = np.zeros(0, dtype=np.int64)
"""The forwarded tokens of a row that is left out."""

TOKENS = Cost(1.0)
"""Tokens alone, for a model of unknown size."""


@dataclass(frozen=True, slots=True)
class _Row:
    """What a row costs: the tokens that it shares with its group, which are paid once, and all else."""

    group: int
    shared: float
    own: float


def balance(
    rows: Rows[Sequence],
    shares: int,
    *,
    cost: Cost = TOKENS,
    fold: bool = True,
    whole_groups: bool = False,
    contributes: Callable[[Sequence], bool] | None = None,
) -> list[list[int]]:
    """Deal rows out to ranks.

    Args:
        rows: Any number of rows.
        shares: Number of ranks, at least 1.
        cost: What a row costs.
        fold: Whether a group's common beginning is forwarded once per rank.
        whole_groups: Never split a group over ranks, for losses that compare its rows.
        contributes: As of `TrainEngine.train_batch`: rows without a gradient are not forwarded and weigh nothing.

    Returns:
        Places of the rows in each share, ascending; the same rows give the same shares.

    Raises:
        ValueError: if there are no ranks.
    """
    if shares < 1:
        raise ValueError(f"rows cannot be dealt out to {shares} ranks: give 1 or more")
    weighed, groups = _weigh(rows, cost, contributes, fold=fold)
    largest = max(map(len, groups), default=1)
    pieces = [1]
    while not whole_groups and pieces[-1] < largest:
        pieces.append(pieces[-1] * 2)
    deals = [_deal(weighed, [part for group in groups for part in _cut(group, count)], shares) for count in pieces]
    best = min(deals, key=lambda deal: max(_load(weighed, share) for share in deal))
    return [sorted(share) for share in best]


def _weigh(
    rows: Rows[Sequence], cost: Cost, contributes: Callable[[Sequence], bool] | None, *, fold: bool
) -> tuple[list[_Row], list[list[int]]]:
    """The cost of each row, and the rows of each group; a row without a group is one of its own."""
    members: dict[object, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        members[row.group_id or place].append(place)
    inputs = [tokens_to_forward(row) if contributes is None or contributes(row) else NOTHING for row in rows]
    groups = list(members.values())
    weighed: dict[int, _Row] = {}
    for number, places in enumerate(groups):
        prefix = common_prefix(inputs[place] for place in places) if fold and len(places) > 1 else 0
        for place in places:
            tokens = len(inputs[place])
            attention = cost.pair * tokens * (tokens + 1) / 2
            head = cost.loss_token * int(rows[place].loss_mask.sum()) if tokens else 0.0
            shared = cost.token * min(prefix, tokens)
            weighed[place] = _Row(number, shared, cost.token * tokens - shared + attention + head)
    return [weighed[place] for place in range(len(rows))], groups


def _cut(group: list[int], count: int) -> Iterable[list[int]]:
    """A group in at most `count` parts of about as many rows."""
    count = min(count, len(group))
    return (group[part * len(group) // count : (part + 1) * len(group) // count] for part in range(count))


def _deal(weighed: Rows[_Row], parts: Rows[list[int]], shares: int) -> list[list[int]]:
    loads = [_load(weighed, part) for part in parts]
    dealt: list[list[int]] = [[] for _ in range(shares)]
    heap = [(0.0, share) for share in range(shares)]
    for number in sorted(range(len(parts)), key=lambda number: -loads[number]):
        load, share = heapq.heappop(heap)
        dealt[share] += parts[number]
        heapq.heappush(heap, (load + loads[number], share))
    return dealt


def _load(weighed: Rows[_Row], places: Iterable[int]) -> float:
    """What rows cost together: the shared beginning of each group once."""
    shared: dict[int, float] = {}
    own = 0.0
    for place in places:
        row = weighed[place]
        shared[row.group] = max(shared.get(row.group, 0.0), row.shared)
        own += row.own
    return own + sum(shared.values())
