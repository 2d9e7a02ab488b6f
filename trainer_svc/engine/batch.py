"""Training rows and how they are packed into micro-batches without padding.

A micro-batch is one row of tokens. Sequences lie in it one after another, each with its own position ids and its own
causal attention. Sequences of one group that begin alike (samples of one prompt) share that beginning: its tokens are
forwarded once, and each sequence's attention reads them. Both are exact, since a causal model's state at a token
depends on that sequence's earlier tokens alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from sluice.versions import Version
from trainer_svc.engine.attention import AttentionPlan
from trainer_svc.engine.shapes import IdsOfSequence, Indices, MaskOfSequence, PackedIds, PerSequenceToken, PerToken

__all__ = ["MicroBatch", "Sequence", "VersionSpan", "pack"]

Ids = NDArray[np.int64]


class VersionSpan(NamedTuple):
    """A stretch of tokens sampled by one policy version; it ends where the next span starts.

    Attributes:
        start: Index of the first token, counted from the start of the sequence.
        version: The policy version that sampled the stretch.
    """

    start: int
    version: Version


@dataclass(frozen=True, slots=True)
class Sequence:
    """One root-to-leaf row of training data.

    Attributes:
        input_ids: Prompt, observations and sampled tokens in order.
        loss_mask: True where the policy sampled the token and it may be trained.
        behaviour_logprobs: Log-probability (nats, after temperature) under the policy that sampled it; NaN elsewhere.
        advantages: Advantage of each token; read where `loss_mask` is set.
        reference_logprobs: Log-probability under the frozen reference policy, for a KL term.
        versions: Which policy version sampled which tokens, by increasing start.
        temperature: Sampling temperature; logits are divided by it before the log-softmax.
        group_id: Episodes of one task share it; "" means the sequence stands alone.
        episode_id: The attempt that this sequence belongs to.
        trajectory_id: Names the sequence in reports.
    """

    input_ids: IdsOfSequence
    loss_mask: MaskOfSequence
    behaviour_logprobs: PerSequenceToken
    advantages: PerSequenceToken
    reference_logprobs: PerSequenceToken | None = None
    versions: tuple[VersionSpan, ...] = ()
    temperature: float = 1.0
    group_id: str = ""
    episode_id: str = ""
    trajectory_id: str = ""

    def __post_init__(self) -> None:
        length = len(self.input_ids)
        if length == 0:
            raise ValueError(f"sequence {self.trajectory_id!r} has no tokens; leave it out of the batch")
        for name in ("loss_mask", "behaviour_logprobs", "advantages", "reference_logprobs"):
            values = getattr(self, name)
            if values is not None and values.shape != (length,):
                raise ValueError(
                    f"{name} of sequence {self.trajectory_id!r} has shape {tuple(values.shape)}, expected ({length},)"
                )
        if bool(self.loss_mask[0]):
            raise ValueError(
                f"sequence {self.trajectory_id!r} trains its first token, which nothing predicts; set loss_mask[0] to False"
            )
        if not self.temperature > 0:
            raise ValueError(
                f"sequence {self.trajectory_id!r} has temperature {self.temperature}; trained tokens need one above 0"
            )

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences packed into one row, with what the loss needs about each loss token.

    Attributes:
        sequences: The sequences inside, in packed order.
        order: Their places in the list that was packed.
        input_ids: The packed tokens.
        position_ids: Position of each packed token in its own sequence.
        attention: Which packed tokens form which sequence.
        predictors: Packed index of the token whose output predicts each loss token.
        targets: Token id of each loss token.
        owners: Index into `sequences` of each loss token.
        temperatures: Sampling temperature of each loss token.
        behaviour: Behaviour log-probability of each loss token.
        reference: Reference log-probability of each loss token, when all sequences carry it.
        advantages: Advantage of each loss token.
    """

    sequences: tuple[Sequence, ...]
    order: tuple[int, ...]
    input_ids: PackedIds
    position_ids: PackedIds
    attention: AttentionPlan
    predictors: Indices
    targets: Indices
    owners: Indices
    temperatures: PerToken
    behaviour: PerToken
    reference: PerToken | None
    advantages: PerToken

    @property
    def packed_tokens(self) -> int:
        """Tokens that are forwarded."""
        return int(self.input_ids.shape[1])

    def to(self, device: torch.device) -> Self:
        """Copy the tensors to a device; a no-op where they are there already."""
        if device.type == "cpu":
            return self
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True)
            for name in self.__slots__
            if isinstance(value := getattr(self, name), (torch.Tensor, AttentionPlan))
        }
        kept = {name: getattr(self, name) for name in self.__slots__ if name not in moved}
        return type(self)(**kept, **moved)


@dataclass(slots=True)
class _Unit:
    """Sequences that share their first `prefix` tokens and must lie in one micro-batch."""

    members: list[int]
    prefix: int
    cost: int


def pack(sequences: Rows[Sequence], token_budget: int, *, fold: bool = True) -> list[MicroBatch]:
    """Pack sequences into micro-batches of at most `token_budget` forwarded tokens, first fit by decreasing size.

    Tokens behind the last loss token are not forwarded, as nothing depends on them; a sequence without loss tokens is
    left out. A sequence longer than the budget gets a micro-batch of its own and is never cut.

    Args:
        sequences: Any number of sequences.
        token_budget: Tokens per micro-batch, at least 1.
        fold: Forward the common beginning of a group's sequences once.

    Returns:
        Micro-batches, the fullest bins first; the same input gives the same packing.
    """
    if token_budget < 1:
        raise ValueError(f"token_budget is {token_budget}; give at least 1")
    inputs = [_forwarded(sequence) for sequence in sequences]
    bins: list[list[_Unit]] = []
    room: list[int] = []
    for unit in sorted(_units(sequences, inputs, token_budget, fold=fold), key=lambda unit: -unit.cost):
        place = next((i for i, free in enumerate(room) if unit.cost <= free), None)
        if place is None:
            bins.append([unit])
            room.append(token_budget - unit.cost)
        else:
            bins[place].append(unit)
            room[place] -= unit.cost
    return [_micro_batch(sequences, inputs, units) for units in bins]


def _forwarded(sequence: Sequence) -> Ids:
    """The tokens that some loss token depends on: all before the last loss token."""
    trained = np.flatnonzero(sequence.loss_mask.numpy())
    ids: Ids = sequence.input_ids.numpy()
    return ids[: trained[-1] if trained.size else 0]


def _units(sequences: Rows[Sequence], inputs: list[Ids], budget: int, *, fold: bool) -> Iterable[_Unit]:
    groups: dict[str, list[int]] = defaultdict(list)
    for index, (sequence, ids) in enumerate(zip(sequences, inputs, strict=True)):
        if len(ids) == 0:
            continue
        if fold and sequence.group_id:
            groups[sequence.group_id].append(index)
        else:
            yield _Unit([index], 0, len(ids))
    for members in groups.values():
        yield from _fold(members, inputs, budget)


def _fold(members: list[int], inputs: list[Ids], budget: int) -> Iterable[_Unit]:
    """Cut one group into units that share the group's common beginning and fit the budget."""
    prefix = _common_prefix([inputs[i] for i in members])
    unit = _Unit([], prefix, prefix)
    for index in members:
        own = len(inputs[index]) - prefix
        if unit.members and unit.cost + own > budget:
            yield unit
            unit = _Unit([], prefix, prefix)
        unit.members.append(index)
        unit.cost += own
    yield unit


def _common_prefix(inputs: list[Ids]) -> int:
    """Number of leading tokens that all inputs have in common."""
    first, prefix = inputs[0], min(len(ids) for ids in inputs)
    for ids in inputs[1:]:
        differ = np.flatnonzero(first[:prefix] != ids[:prefix])
        prefix = int(differ[0]) if differ.size else prefix
    return prefix


def _micro_batch(sequences: Rows[Sequence], inputs: list[Ids], units: list[_Unit]) -> MicroBatch:
    order: list[int] = []
    pieces: list[Ids] = []
    positions: list[Ids] = []
    segments: list[Ids] = []
    filled = 0
    for unit in units:
        shared = np.arange(filled, filled + unit.prefix)
        pieces.append(inputs[unit.members[0]][: unit.prefix])
        positions.append(np.arange(unit.prefix))
        filled += unit.prefix
        for index in unit.members:
            own = inputs[index][unit.prefix :]
            pieces.append(own)
            positions.append(np.arange(unit.prefix, unit.prefix + len(own)))
            segments.append(np.concatenate([shared, np.arange(filled, filled + len(own))]))
            order.append(index)
            filled += len(own)
    members = tuple(sequences[index] for index in order)
    return MicroBatch(
        sequences=members,
        order=tuple(order),
        input_ids=torch.from_numpy(np.concatenate(pieces)).unsqueeze(0),
        position_ids=torch.from_numpy(np.concatenate(positions)).unsqueeze(0),
        attention=AttentionPlan.of(segments, filled),
        **_loss_tokens(members, segments),
    )


def _loss_tokens(members: tuple[Sequence, ...], segments: list[Ids]) -> dict[str, Any]:
    """What the loss needs about each loss token, sequence by sequence."""
    places = [np.flatnonzero(sequence.loss_mask.numpy()) for sequence in members]
    counts = torch.tensor([len(place) for place in places])

    def gather(name: str) -> torch.Tensor:
        return torch.from_numpy(
            np.concatenate([getattr(s, name).numpy()[p] for s, p in zip(members, places, strict=True)])
        )

    has_reference = all(sequence.reference_logprobs is not None for sequence in members)
    return {
        "predictors": torch.from_numpy(np.concatenate([s[p - 1] for s, p in zip(segments, places, strict=True)])),
        "targets": gather("input_ids"),
        "owners": torch.repeat_interleave(torch.arange(len(members)), counts),
        "temperatures": torch.repeat_interleave(torch.tensor([s.temperature for s in members]), counts),
        "behaviour": gather("behaviour_logprobs"),
        "reference": gather("reference_logprobs") if has_reference else None,
        "advantages": gather("advantages"),
    }
