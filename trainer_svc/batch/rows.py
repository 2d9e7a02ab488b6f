"""Training rows, and micro-batches of them without padding.

A micro-batch is one row of tokens. Sequences lie in it one after another, each with its own position ids and its own
causal attention. Sequences of one group that begin alike (samples of one prompt) share that beginning: its tokens are
forwarded once, and each sequence's attention reads them. Both are exact, since a causal model's state at a token
depends on that sequence's earlier tokens alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from sluice.versions import VersionSpan
from trainer_svc.batch.attention_plan import AttentionPlan
from trainer_svc.batch.shapes import (
    IdsOfSequence,
    Indices,
    MaskOfSequence,
    MaskPerToken,
    PackedIds,
    PerSequenceToken,
    PerToken,
)

__all__ = ["OPTIONAL_COLUMNS", "MicroBatch", "Sequence"]

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
"""Columns of a row that an objective may need; a micro-batch has those that all of its rows have."""


@dataclass(frozen=True, slots=True)
class Sequence:
    """One root-to-leaf row of training data.

    Attributes:
        input_ids: Prompt, observations and sampled tokens in order.
        loss_mask: True where the policy sampled the token and it may be trained.
        behaviour_logprobs: Log-probability (nats, after temperature) under the policy that sampled it; NaN elsewhere.
        advantages: Advantage of each token; read where `loss_mask` is set.
        proximal_logprobs: Log-probability under the trainer's weights at the start of the update (decoupled form).
        proximal_share: The share a of the log-linear proximal policy, log o = log b + a (log t - log b).
        reference_logprobs: Log-probability under the frozen reference policy, for a KL term.
        teacher_logprobs: Log-probability under a teacher, for distillation.
        values: The critic's value of the state before each token, when the update began.
        returns: What the critic learns at each token.
        token_rewards: Reward at each token, where the environment gives them.
        kept: False takes a token out of the numerator of the loss; the denominators count it.
        versions: Which policy version sampled which tokens, by increasing start.
        reward: Scalar reward of the episode; None where it is missing.
        truncated: Whether the episode was cut off by its length, as its finish reason says.
        group_loss_tokens: Loss tokens of its group over all ranks; 0 where the group lies on one rank.
        temperature: Sampling temperature; logits are divided by it before the log-softmax.
        group_id: Episodes of one task share it; "" means the sequence stands alone.
        episode_id: The attempt that this sequence belongs to.
        trajectory_id: Names the sequence in reports.
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
        behaviour_logprobs: Behaviour log-probability of each loss token.
        advantages: Advantage of each loss token.
        sequence_tokens: Loss tokens of the sequence of each loss token.
        group_tokens: Loss tokens of the group of each loss token, over all ranks; of its sequence where nobody counted them.
        predictor_places: A copy of `predictors` that stays in host memory, so that context parallelism can size its slices
            without waiting for the device.

    The optional columns are those of `Sequence` at each loss token, None unless all sequences carry them.
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
        """Copy the tensors from pinned memory to a device, which the host does not wait for; a no-op on the CPU."""
        if device.type == "cpu":
            return self
        moved: dict[str, Any] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, AttentionPlan):
                moved[name] = value.to(device)
            elif isinstance(value, torch.Tensor):
                moved[name] = value.pin_memory().to(device, non_blocking=True)
        kept = {name: getattr(self, name) for name in self.__slots__ if name not in moved}
        return type(self)(**kept, **moved)
