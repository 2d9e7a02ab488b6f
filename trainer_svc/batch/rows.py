"""Training rows, micro-batches of rows without padding, and a network's outputs for a micro-batch.

A micro-batch is one row of tokens. Sequences lie in it one after another, each with its own position ids and its own
causal attention. Sequences of one group that begin alike (samples of one prompt) share that beginning: its tokens are
forwarded once, and each sequence's attention reads them. Both are exact, since a causal model's state at a token
depends on that sequence's earlier tokens alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from sluice.versions import VersionSpan
from trainer_svc.batch.attention_plan import AttentionPlan, to_device
from trainer_svc.batch.shapes import (
    IdsOfSequence,
    Indices,
    MaskOfSequence,
    MaskPerToken,
    PackedIds,
    PerSequenceToken,
    PerToken,
    Scalar,
)

Ids = NDArray[np.int64]

OPTIONAL_COLUMNS = (
    "proximal_logprobs",
    "proximal_share",
    "reference_logprobs",
    "teacher_logprobs",
    "values",
    "returns",
    "token_rewards",
    "kept",
)
"""Columns that only some objectives need. A micro-batch has such a column if all of its sequences have it."""


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One root-to-leaf row of training data.

    Attributes:
        input_ids: Prompt, observations and sampled tokens in order.
        loss_mask: True for tokens that the policy sampled and that may be trained.
        behaviour_logprobs: Log-probability of each sampled token (nats, after temperature) under the policy that sampled it; NaN at other
            tokens.
        advantages: Advantage of each token; only read where `loss_mask` is True.
        proximal_logprobs: Log-probability under the trainer's weights at the start of the update (decoupled form).
        proximal_share: The share a of the log-linear proximal policy, log o = log b + a (log t - log b).
        reference_logprobs: Log-probability under the frozen reference policy, for a KL term.
        teacher_logprobs: Log-probability under a teacher, for distillation.
        values: The critic's value of the state before each token at the start of the update.
        returns: Target of the critic at each token.
        token_rewards: Reward at each token, if the environment gives such rewards.
        kept: False takes a token out of the numerator of the loss; the denominators still count it.
        versions: Which policy version sampled which tokens, by increasing start.
        reward: Scalar reward of the episode; None if it is missing.
        truncated: Whether a length limit ended the episode.
        group_loss_tokens: Loss tokens of its group over all ranks; 0 if the group lies on one rank.
        temperature: Sampling temperature; logits are divided by it before the log-softmax.
        group_id: Identifies the group of episodes of one task; "" means no group.
        episode_id: The attempt that this sequence belongs to.
        trajectory_id: Identifies the sequence in reports and errors.
        objective: Name of the objective that trains it; "" is the trainer's own.
    """

    input_ids: IdsOfSequence
    loss_mask: MaskOfSequence
    behaviour_logprobs: PerSequenceToken
    advantages: PerSequenceToken
    proximal_logprobs: PerSequenceToken | None = None
    proximal_share: PerSequenceToken | None = None
    reference_logprobs: PerSequenceToken | None = None
    teacher_logprobs: PerSequenceToken | None = None
    values: PerSequenceToken | None = None
    returns: PerSequenceToken | None = None
    token_rewards: PerSequenceToken | None = None
    kept: MaskOfSequence | None = None
    versions: tuple[VersionSpan, ...] = ()
    reward: float | None = None
    truncated: bool = False
    group_loss_tokens: int = 0
    temperature: float = 1.0
    group_id: str = ""
    episode_id: str = ""
    trajectory_id: str = ""
    objective: str = ""

    def __post_init__(self) -> None:
        length = len(self.input_ids)
        if length == 0:
            raise ValueError(f"sequence {self.trajectory_id!r} has no tokens; leave it out of the batch")
        for name in ("loss_mask", "behaviour_logprobs", "advantages", *OPTIONAL_COLUMNS):
            values = getattr(self, name)
            if values is not None and values.shape != (length,):
                raise ValueError(
                    f"{name} of sequence {self.trajectory_id!r} has shape {tuple(values.shape)}, expected ({length},)"
                )
        if self.loss_mask.numpy()[0]:
            raise ValueError(
                f"sequence {self.trajectory_id!r} trains its first token, which nothing predicts; set loss_mask[0] to False"
            )
        if not self.temperature > 0:
            raise ValueError(
                f"sequence {self.trajectory_id!r} has temperature {self.temperature}; trained tokens need one above 0"
            )

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def loss_tokens(self) -> int:
        """The number of tokens in the loss."""
        return int(np.count_nonzero(self.loss_mask.numpy()))  # for such short rows, a tenth of PyTorch's time


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences packed into one row, with the columns that the loss reads at each loss token.

    Attributes:
        sequences: The sequences inside, in packed order.
        order: The places of the sequences in the list that was packed.
        position_ids: Position of each packed token in its own sequence.
        predictors: Packed index of the token whose output predicts each loss token.
        owners: Index of each loss token's sequence in `sequences`.
        sequence_tokens: For each loss token, the number of loss tokens of its sequence.
        group_tokens: For each loss token, the number of loss tokens of its group over all ranks; of its sequence if the group was
            not counted.
        predictor_places: A copy of `predictors` that stays in host memory, so that context parallelism can size its slices
            without waiting for the device.

    The other columns have the values of `TrainingRow` at each loss token. An optional column is None unless all sequences have it.
    """

    sequences: tuple[TrainingRow, ...]
    order: tuple[int, ...]
    input_ids: PackedIds
    position_ids: PackedIds
    attention: AttentionPlan
    predictors: Indices
    targets: Indices
    owners: Indices
    temperatures: PerToken
    behaviour_logprobs: PerToken
    advantages: PerToken
    sequence_tokens: Indices
    group_tokens: Indices
    predictor_places: NDArray[np.int64]
    proximal_logprobs: PerToken | None = None
    proximal_share: PerToken | None = None
    reference_logprobs: PerToken | None = None
    teacher_logprobs: PerToken | None = None
    values: PerToken | None = None
    returns: PerToken | None = None
    token_rewards: PerToken | None = None
    kept: MaskPerToken | None = None

    @property
    def packed_tokens(self) -> int:
        """Tokens that are forwarded."""
        return int(self.input_ids.shape[1])

    def to(self, device: torch.device) -> Self:
        """Copy the tensors that the device reads to it; the host does not wait (see `to_device`)."""
        if device.type == "cpu":
            return self
        columns: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        for name, value in columns.items():
            if isinstance(value, AttentionPlan):
                columns[name] = value.to(device)
            elif isinstance(value, torch.Tensor):
                columns[name] = to_device(value, device)
        return type(self)(**columns)


@dataclass(frozen=True, slots=True)
class Outputs:
    """A network's outputs at each loss token of a micro-batch, with gradients; float32 or wider.

    Attributes:
        logprobs: Log-probability of each token under the current weights, after temperature, in nats; None if the
            network has a value head only.
        entropy: Entropy of the distribution at each token, in nats; None if it was not requested.
        values: Value of the state before each token; None without a value head.
    """

    logprobs: PerToken | None = None
    entropy: PerToken | None = None
    values: PerToken | None = None

    @property
    def main(self) -> PerToken:
        """The log-probabilities, or the values if the network has a value head only."""
        if self.logprobs is not None:
            return self.logprobs
        if self.values is None:
            raise ValueError("the network gave neither log-probabilities nor values")
        return self.values


LossFn: TypeAlias = Callable[[Outputs, MicroBatch], tuple[Scalar, dict[str, Scalar]]]
"""Returns the sum of the losses of a micro-batch's tokens, and named sums for the report (``max_...``: maxima)."""

LossWeight: TypeAlias = Callable[[Sequence[TrainingRow]], float]
"""Returns the contribution of these sequences to the divisor of the summed loss. The contributions of all ranks are added."""


def count_loss_tokens(sequences: Sequence[TrainingRow]) -> float:
    """Return the divisor of a mean over loss tokens."""
    return float(sum(sequence.loss_tokens for sequence in sequences))


def tokens_to_forward(sequence: TrainingRow) -> Ids:
    """Return the tokens on which any loss token depends: all tokens before the last loss token."""
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
    sequences: Sequence[TrainingRow], token_budget: int, *, fold: bool = True, whole_groups: bool = False
) -> list[MicroBatch]:
    """Pack sequences into micro-batches of at most `token_budget` forwarded tokens, first fit by decreasing size.

    Tokens after the last loss token are not forwarded, because no loss depends on them, and sequences without loss tokens are
    left out. A sequence longer than the budget gets a micro-batch of its own and is never cut. `fold` forwards the common
    beginning of a group's sequences once. `whole_groups` never splits a group, for losses that compare the sequences of a group.

    Returns:
        The micro-batches. The same input always gives the same packing.
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
    """Return a micro-batch without sequences or loss tokens, for a rank that has no rows left while other ranks have some.

    It has two tokens for each of the `ranks` that share a row, because torch.compile would compile layers again for a single token.
    """
    zeros = torch.zeros(2 * ranks)
    columns = {name: zeros.bool() if name == "kept" else zeros for name in OPTIONAL_COLUMNS}
    row = TrainingRow(zeros.long(), zeros.bool(), zeros, zeros, **columns)
    batch = _micro_batch([row], [row.input_ids.numpy()], [_Unit([0], 0, len(row))])
    return replace(batch, sequences=(), order=())


def _units(
    sequences: Sequence[TrainingRow], inputs: list[Ids], budget: int, fold: bool, whole_groups: bool
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


def _micro_batch(sequences: Sequence[TrainingRow], inputs: list[Ids], units: list[_Unit]) -> MicroBatch:
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


def _loss_tokens(members: tuple[TrainingRow, ...], segments: list[Ids]) -> dict[str, Any]:
    """Return the columns that the loss reads at each loss token, sequence by sequence."""
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
