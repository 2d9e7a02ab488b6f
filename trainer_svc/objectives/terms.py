"""What an objective sees of a micro-batch, and the counts that it divides by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Self

from trainer_svc.engine.batch import Sequence
from trainer_svc.engine.shapes import Indices, PerToken

__all__ = ["MAX_LOG_DIFFERENCE", "GlobalCounts", "TokenTerms", "log_difference"]

MAX_LOG_DIFFERENCE = 20.0
"""Nats. A ratio of e^20 is far beyond every clip; without the clamp `exp` would overflow and poison the sum."""


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """The loss tokens of one micro-batch; the letters are those of the objectives' reference.

    Attributes:
        current: log t, the only tensor with a gradient.
        behaviour: log b, as the rollout engine reported it.
        proximal: log o; equal to `behaviour` in the bypass form.
        reference: log of the frozen reference policy, where a KL term is wanted.
        advantages: A.
        owners: Index of the sequence of each token, within the micro-batch.
        weights: What each token's loss is multiplied by, from `aggregation`.
        entropy: Entropy of the current policy at each token, in nats, where it was computed.
    """

    current: PerToken
    behaviour: PerToken
    proximal: PerToken
    reference: PerToken | None
    advantages: PerToken
    owners: Indices
    weights: PerToken
    entropy: PerToken | None = None


@dataclass(frozen=True, slots=True)
class GlobalCounts:
    """Sizes of the global batch, known before the first backward pass; ranks add theirs up.

    Attributes:
        tokens: Loss tokens.
        sequences: Sequences with at least one loss token.
        group_tokens: Loss tokens of each group.
    """

    tokens: int = 0
    sequences: int = 0
    group_tokens: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, sequences: Rows[Sequence]) -> Self:
        """Count the sequences of this rank; those that need no forward pass count too."""
        sizes = [int(sequence.loss_mask.sum()) for sequence in sequences]
        groups: Counter[str] = Counter()
        for sequence, size in zip(sequences, sizes, strict=True):
            if size:
                groups[group_key(sequence)] += size
        return cls(sum(sizes), sum(size > 0 for size in sizes), dict(groups))

    def __add__(self, other: GlobalCounts) -> GlobalCounts:
        groups = dict(Counter(self.group_tokens) + Counter(other.group_tokens))
        return GlobalCounts(self.tokens + other.tokens, self.sequences + other.sequences, groups)


def group_key(sequence: Sequence) -> str:
    """The group of a sequence; one without a group is its own."""
    return sequence.group_id or f"alone/{sequence.trajectory_id}"


def log_difference(minuend: PerToken, subtrahend: PerToken) -> PerToken:
    """The difference of two log-probabilities, clamped so that its exponential is finite."""
    return (minuend - subtrahend).clamp(-MAX_LOG_DIFFERENCE, MAX_LOG_DIFFERENCE)
