"""What an objective sees of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer_svc.engine.shapes import Indices, MaskPerToken, PerToken

__all__ = ["MAX_LOG_DIFFERENCE", "TokenTerms", "log_difference"]

MAX_LOG_DIFFERENCE = 20.0
"""Nats. A ratio of e^20 is far beyond every clip; without the clamp `exp` would overflow and poison the sum."""


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """The loss tokens of one micro-batch; the letters are those of docs/objectives.md. Sequences are never cut.

    Attributes:
        current: log t, the only tensor with a gradient (but for `entropy`).
        behaviour: log b, as the rollout engine reported it.
        proximal: log o, a constant; equal to `behaviour` in the bypass form.
        advantages: A.
        owners: Index of the sequence of each token, within the micro-batch.
        sequences: Sequences in the micro-batch.
        factors: What each token's loss is multiplied by, from `aggregation`.
        reference: log of the frozen reference policy, where it is known.
        teacher: log of a teacher, where it is known.
        entropy: Entropy of the current policy at each token, in nats, where it was computed.
        kept: False drops a token from the numerator.
    """

    current: PerToken
    behaviour: PerToken
    proximal: PerToken
    advantages: PerToken
    owners: Indices
    sequences: int
    factors: PerToken
    reference: PerToken | None = None
    teacher: PerToken | None = None
    entropy: PerToken | None = None
    kept: MaskPerToken | None = None

    def sequence_sum(self, values: PerToken) -> PerToken:
        """The sum over each token's sequence, at each token."""
        totals = torch.zeros(self.sequences, dtype=values.dtype, device=values.device)
        return totals.index_add(0, self.owners, values)[self.owners]

    def sequence_mean(self, values: PerToken) -> PerToken:
        """The mean over the loss tokens of each token's sequence, at each token."""
        return self.sequence_sum(values) / self.sequence_sum(torch.ones_like(values))


def log_difference(minuend: PerToken, subtrahend: PerToken) -> PerToken:
    """The difference of two log-probabilities, clamped so that its exponential is finite."""
    return (minuend - subtrahend).clamp(-MAX_LOG_DIFFERENCE, MAX_LOG_DIFFERENCE)
