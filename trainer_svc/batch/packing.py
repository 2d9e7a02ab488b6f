"""Packing: rows of training data into micro-batches without padding, the common beginning of a group's rows once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_svc.batch.attention_plan import AttentionPlan
from trainer_svc.batch.rows import OPTIONAL_COLUMNS, MicroBatch, Sequence

__all__ = ["common_prefix", "empty_batch", "pack", "tokens_to_forward"]

Ids = NDArray[np.int64]


def tokens_to_forward(sequence: Sequence) -> Ids:
    """Return the tokens that some loss token depends on: all before the last loss token."""
    trained = np.flatnonzero(sequence.loss_mask.numpy())
    ids: Ids = sequence.input_ids.numpy()
    return ids[: trained[-1] if trained.size else 0]


def common_prefix(inputs: Iterable[Ids]) -> int:
    """Return how many leading tokens all inputs have in common; inputs without tokens do not count."""
    given = [ids for ids in inputs if len(ids)]
    prefix = min(map(len, given), default=0)
    for ids in given[1:]:
        differ = np.flatnonzero(given[0][:prefix] != ids[:prefix])
        prefix = int(differ[0]) if differ.size else prefix
    return prefix


@dataclass(slots=True)
class _Unit:
    """Sequences that share their first `prefix` tokens and must lie in one micro-batch."""

    members: list[int]
    prefix: int
    cost: int


def pack(
    sequences: Rows[Sequence], token_budget: int, *, fold: bool = True, whole_groups: bool = False
) -> list[MicroBatch]:
    """Pack sequences into micro-batches of at most `token_budget` forwarded tokens, first fit by decreasing size.

    Tokens behind the last loss token are not forwarded, as nothing depends on them; a sequence without loss tokens is
    left out. A sequence longer than the budget gets a micro-batch of its own and is never cut.

    Args:
        sequences: Any number of sequences.
        token_budget: Tokens per micro-batch, at least 1.
        fold: Forward the common beginning of a group's sequences once.
        whole_groups: Never split a group over micro-batches, for losses that compare its sequences.

    Returns:
        Micro-batches, the fullest bins first; the same input gives the same packing.
    """
    if token_budget < 1:
        raise ValueError(f"token_budget is {token_budget}; give at least 1")
    inputs = [tokens_to_forward(sequence) for sequence in sequences]
    bins: list[list[_Unit]] = []
    room: list[int] = []
    for unit in sorted(_units(sequences, inputs, token_budget, fold, whole_groups), key=lambda unit: -unit.cost):
        place = next((i for i, free in enumerate(room) if unit.cost <= free), None)
        if place is None:
            bins.append([unit])
            room.append(token_budget - unit.cost)
        else:
            bins[place].append(unit)
            room[place] -= unit.cost
    return [_micro_batch(sequences, inputs, units) for units in bins]


def empty_batch(ranks: int = 1) -> MicroBatch:
    """Return a micro-batch without sequences or loss tokens, for a rank that has no rows left while others have.

    It has two tokens for each process, because layers compiled for any number of tokens are compiled again for a single one.

    Args:
        ranks: Processes that share a row of tokens.
    """
    tokens = 2 * ranks
    nothing, no_place = torch.empty(0), torch.empty(0, dtype=torch.int64)
    return MicroBatch(
        sequences=(),
        order=(),
        input_ids=torch.zeros((1, tokens), dtype=torch.int64),
        position_ids=torch.arange(tokens).unsqueeze(0),
        attention=AttentionPlan.of([np.arange(tokens)], tokens),
        **{name: nothing.bool() if name == "kept" else nothing for name in OPTIONAL_COLUMNS},
        predictors=no_place,
        targets=no_place,
        owners=no_place,
        temperatures=nothing,
        behaviour_logprobs=nothing,
        advantages=nothing,
        sequence_tokens=no_place,
        group_tokens=no_place,
        predictor_places=no_place.numpy(),
    )


def _units(
    sequences: Rows[Sequence], inputs: list[Ids], budget: int, fold: bool, whole_groups: bool
) -> Iterable[_Unit]:
    groups: dict[str, list[int]] = defaultdict(list)
    for index, (sequence, ids) in enumerate(zip(sequences, inputs, strict=True)):
        if len(ids) == 0:
            continue
        if (fold or whole_groups) and sequence.group_id:
            groups[sequence.group_id].append(index)
        else:
            yield _Unit([index], 0, len(ids))
    for members in groups.values():
        prefix = common_prefix(inputs[i] for i in members) if fold else 0
        if whole_groups:
            yield _Unit(members, prefix, prefix + sum(len(inputs[i]) - prefix for i in members))
        else:
            yield from _fold(members, inputs, prefix, budget)


def _fold(members: list[int], inputs: list[Ids], prefix: int, budget: int) -> Iterable[_Unit]:
    """Split one group into units that share the group's common beginning and fit the budget."""
    unit = _Unit([], prefix, prefix)
    for index in members:
        own = len(inputs[index]) - prefix
        if unit.members and unit.cost + own > budget:
            yield unit
            unit = _Unit([], prefix, prefix)
        unit.members.append(index)
        unit.cost += own
    yield unit


def _micro_batch(sequences: Rows[Sequence], inputs: list[Ids], units: list[_Unit]) -> MicroBatch:
    order: list[int] = []
    token_ids: list[Ids] = []
    positions: list[Ids] = []
    segments: list[Ids] = []
    filled = 0
    for unit in units:
        shared = np.arange(filled, filled + unit.prefix)
        token_ids.append(inputs[unit.members[0]][: unit.prefix])
        positions.append(np.arange(unit.prefix))
        filled += unit.prefix
        for index in unit.members:
            own = inputs[index][unit.prefix :]
            token_ids.append(own)
            positions.append(np.arange(unit.prefix, unit.prefix + len(own)))
            segments.append(np.concatenate([shared, np.arange(filled, filled + len(own))]))
            order.append(index)
            filled += len(own)
    members = tuple(sequences[index] for index in order)
    return MicroBatch(
        sequences=members,
        order=tuple(order),
        input_ids=torch.from_numpy(np.concatenate(token_ids)).unsqueeze(0),
        position_ids=torch.from_numpy(np.concatenate(positions)).unsqueeze(0),
        attention=AttentionPlan.of(segments, filled),
        **_loss_tokens(members, segments),
    )


def _loss_tokens(members: tuple[Sequence, ...], segments: list[Ids]) -> dict[str, Any]:
    """Return what the loss reads about each loss token, sequence by sequence."""
    places = [np.flatnonzero(sequence.loss_mask.numpy()) for sequence in members]
    counts = torch.tensor([len(place) for place in places])
    of_groups = torch.tensor([s.group_loss_tokens or len(p) for s, p in zip(members, places, strict=True)])
    predictors = np.concatenate([s[p - 1] for s, p in zip(segments, places, strict=True)])

    def gather(name: str) -> torch.Tensor:
        return torch.from_numpy(
            np.concatenate([getattr(s, name).numpy()[p] for s, p in zip(members, places, strict=True)])
        )

    optional = {
        name: gather(name) if all(getattr(each, name) is not None for each in members) else None
        for name in OPTIONAL_COLUMNS
    }
    return optional | {
        "predictors": torch.from_numpy(predictors),
        "targets": gather("input_ids"),
        "owners": torch.repeat_interleave(torch.arange(len(members)), counts),
        "temperatures": torch.repeat_interleave(torch.tensor([s.temperature for s in members]), counts),
        "behaviour_logprobs": gather("behaviour_logprobs"),
        "advantages": gather("advantages"),
        "sequence_tokens": torch.repeat_interleave(counts, counts),
        "group_tokens": torch.repeat_interleave(of_groups, counts),
        "predictor_places": predictors,
    }
