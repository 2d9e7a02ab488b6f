"""The terms of the loss per token that all presets share: log-ratios, corrections f(rho), masks, KL, and aggregation.

Everything here is a pure function of the loss tokens; docs/objectives.md explains the letters. The settings are checked against
`CORRECTIONS`, and `--help` must not import torch, so this module calls methods of tensors only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import torch

    from trainer_svc.batch.rows import MicroBatch, Sequence
    from trainer_svc.batch.shapes import Indices, MaskPerToken, PerToken, Scalar

MAX_LOG_DIFFERENCE = 20.0
"""Nats. e^20 is far beyond every clip of a ratio. Without this clamp `exp` would overflow."""


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """What a loss reads about the loss tokens of one micro-batch. A sequence never lies in two micro-batches.

    Attributes:
        current: log t; only this column and `entropy` carry a gradient.
        behaviour: log b, reported by the rollout engine.
        proximal: log o, a constant; equal to `behaviour` in the bypass form.
        advantages: A.
        owners: Index of the sequence of each token, within the micro-batch.
        sequences: Number of sequences in the micro-batch.
        factors: The aggregation's factor for each token's loss.
        reference: Log-probability under the frozen reference policy; None if unknown.
        teacher: Log-probability under a teacher; None if unknown.
        entropy: Entropy of the current policy at each token, in nats; None if it was not computed.
        kept: False drops a token from the numerator of the loss.
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
        """Return, at each token, the sum over its sequence."""
        return values.new_zeros(self.sequences).index_add(0, self.owners, values)[self.owners]

    def sequence_mean(self, values: PerToken) -> PerToken:
        """Return, at each token, the mean over the loss tokens of its sequence."""
        return self.sequence_sum(values) / self.sequence_sum(values.new_ones(values.shape))


def log_difference(minuend: PerToken, subtrahend: PerToken) -> PerToken:
    """Return the difference of two log-probabilities, clamped so that its exponential is finite."""
    return (minuend - subtrahend).clamp(-MAX_LOG_DIFFERENCE, MAX_LOG_DIFFERENCE)


# Corrections f(rho) of the decoupled form, rho = o / b: constants that multiply the surrogate of each token.


CorrectionKind = Literal[
    "none", "token_tis", "sequence_tis", "sequence_mask", "geometric_mask", "token_mask", "k3_mask"
]
TokenWeights: TypeAlias = "tuple[PerToken, dict[str, Scalar]]"
"""A weight for each token, and counts of the tokens that were truncated or masked."""


def _log_rho(terms: TokenTerms) -> PerToken:
    return log_difference(terms.proximal, terms.behaviour)


def _sequence_rho(terms: TokenTerms) -> PerToken:
    """Return at each token the product of rho over its sequence; its logarithm is clamped like that of one token."""
    return terms.sequence_sum(_log_rho(terms)).clamp(-MAX_LOG_DIFFERENCE, MAX_LOG_DIFFERENCE).exp()


def none(terms: TokenTerms) -> TokenWeights:
    """1."""
    return terms.proximal.new_ones(terms.proximal.shape), {}


def token_tis(terms: TokenTerms, *, cap: float) -> TokenWeights:
    """min(rho, cap): truncated importance sampling per token."""
    return _truncated(_log_rho(terms).exp(), cap)


def sequence_tis(terms: TokenTerms, *, cap: float) -> TokenWeights:
    """min(product of rho over the sequence, cap), the same for each of its tokens."""
    return _truncated(_sequence_rho(terms), cap)


def _truncated(weights: PerToken, cap: float) -> TokenWeights:
    return weights.clamp(max=cap), {"correction_truncated": (weights > cap).sum()}


def sequence_mask(terms: TokenTerms, *, low: float, high: float) -> TokenWeights:
    """1 for sequences with low <= product of rho <= high, else 0."""
    return _mask(_sequence_rho(terms), low, high)


def geometric_mask(terms: TokenTerms, *, low: float, high: float) -> TokenWeights:
    """1 for sequences with low <= exp(mean log rho) <= high, else 0."""
    return _mask(terms.sequence_mean(_log_rho(terms)).exp(), low, high)


def _mask(values: PerToken, low: float, high: float) -> TokenWeights:
    below, above = values < low, values > high
    counts = {"correction_masked_low": below.sum(), "correction_masked_high": above.sum()}
    return (~(below | above)).to(values.dtype), counts


def token_mask(terms: TokenTerms, *, low: float, high: float) -> TokenWeights:
    """Rho where low <= rho <= high, else 0."""
    rho = _log_rho(terms).exp()
    inside, counts = _mask(rho, low, high)
    return rho * inside, counts


def k3_mask(terms: TokenTerms, *, threshold: float) -> TokenWeights:
    """1 for sequences whose mean of rho - log rho - 1 is at most `threshold`, else 0."""
    gap = _log_rho(terms)
    beyond = terms.sequence_mean(gap.exp() - gap - 1.0) > threshold
    return (~beyond).to(gap.dtype), {"correction_masked_high": beyond.sum()}


@dataclass(frozen=True, slots=True)
class Correction:
    """One f(rho).

    Attributes:
        weights: Computes the weight of each token.
        bounds: Its keyword arguments with their defaults: ratios, and nats for `k3_mask`.
    """

    weights: Callable[..., TokenWeights]
    bounds: Mapping[str, float] = field(default_factory=dict)


CORRECTIONS: Mapping[str, Correction] = MappingProxyType(
    {
        "none": Correction(none),
        "token_tis": Correction(token_tis, {"cap": 2.0}),
        "sequence_tis": Correction(sequence_tis, {"cap": 2.0}),
        "sequence_mask": Correction(sequence_mask, {"low": 0.5, "high": 2.0}),
        "geometric_mask": Correction(geometric_mask, {"low": 0.99, "high": 1.01}),
        "token_mask": Correction(token_mask, {"low": 0.5, "high": 5.0}),
        "k3_mask": Correction(k3_mask, {"threshold": 0.01}),
    }
)


# Masks of whole sequences. They take tokens out of the numerator of the loss only.


def veto(terms: TokenTerms, threshold: float) -> TokenWeights:
    """0 for every token of a sequence that has one with rho < threshold, else 1."""
    impossible = (_log_rho(terms).exp() < threshold).to(terms.proximal.dtype)
    vetoed = terms.sequence_sum(impossible) > 0
    return (~vetoed).to(impossible.dtype), {"vetoed": vetoed.sum()}


def off_policy_sequence_mask(terms: TokenTerms, threshold: float) -> TokenWeights:
    """0 for tokens with A < 0 in sequences with mean(log b - log t) > threshold, else 1: what was bad and is already rare."""
    drift = terms.sequence_mean(log_difference(terms.behaviour, terms.current.detach()))
    dropped = (terms.advantages < 0) & (drift > threshold)
    return (~dropped).to(drift.dtype), {"off_policy_masked": dropped.sum()}


# KL divergence from the current policy t to a frozen reference, estimated on samples of t. With x = log t - log ref per token:
# k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x. Source: J. Schulman, "Approximating KL divergence" (2020).


KlKind = Literal["k1", "k2", "k3"]

MAX_KL = 10.0
"""Nats per token. Keeps one token that the reference finds impossible from dominating the rewards of a batch."""

LINEAR_BELOW = -3.0
"""Nats. Below this x the k3 loss is linear: its gradient stays e^3 - 1 = 19.1 per nat instead of growing like exp(-x)."""


def kl_estimate(kind: KlKind, current: PerToken, reference: PerToken) -> PerToken:
    """Return the estimate per token, clamped to [-10, 10] nats: for rewards and reports, where no gradient flows."""
    x = log_difference(current, reference)
    match kind:
        case "k1":
            estimate = x
        case "k2":
            estimate = x.square() / 2
        case "k3":
            estimate = (-x).exp() - 1 + x
    return estimate.clamp(-MAX_KL, MAX_KL)


def kl_loss(kind: KlKind, current: PerToken, reference: PerToken) -> PerToken:
    """Return the estimate per token as a term of the loss. It is not clamped, since a clamp has no gradient at far tokens.

    k3 continues linearly below x = -3: k3(x) = k3(-3) - (e^3 - 1)(x + 3). A policy that has fallen far below the reference is
    thus still pulled back, with a bounded gradient.

    Raises:
        ValueError: for k1. Its gradient is that of log t, whose mean over the policy's own samples is zero.
    """
    x = current - reference
    match kind:
        case "k1":
            raise ValueError(
                "k1 cannot be a term of the loss: on-policy its expected gradient is zero, so it regularises nothing; "
                "use k2 or k3"
            )
        case "k2":
            return x.square() / 2
        case "k3":
            bounded = x.clamp(min=LINEAR_BELOW)
            return (-bounded).exp() - 1 + bounded + (1 - math.exp(-LINEAR_BELOW)) * (x - bounded)


# Aggregation: a factor per token, and a divisor that depends on counts over the whole batch only.
#
# | aggregation | factor of a token | divisor |
# |---|---|---|
# | token | 1 | loss tokens |
# | sequence | 1 / loss tokens of its sequence | sequences with a loss token |
# | prompt | 1 / loss tokens of its group | groups with a loss token |
# | constant | 1 | sequences with a loss token x `max_tokens` |


Aggregation = Literal["token", "sequence", "prompt", "constant"]


def token_factors(aggregation: Aggregation, batch: MicroBatch, dtype: torch.dtype) -> PerToken:
    """Return the factor of each loss token of a micro-batch, on the micro-batch's device."""
    match aggregation:
        case "token" | "constant":
            return batch.owners.new_ones(batch.owners.shape, dtype=dtype)
        case "sequence":
            return batch.sequence_tokens.to(dtype).reciprocal()
        case "prompt":
            return batch.group_tokens.to(dtype).reciprocal()


def divisor(aggregation: Aggregation, sequences: Rows[Sequence], max_tokens: int | None = None) -> float:
    """Return these sequences' share of the divisor of the summed loss.

    Args:
        aggregation: How token losses become one number.
        sequences: Any part of the batch; the shares of disjoint parts add up.
        max_tokens: Read by `constant`.

    Raises:
        ValueError: if `constant` lacks `max_tokens`.
    """
    counts = [int(sequence.loss_mask.sum()) for sequence in sequences]
    match aggregation:
        case "token":
            return float(sum(counts))
        case "sequence":
            return float(sum(count > 0 for count in counts))
        case "prompt":
            pairs = zip(counts, sequences, strict=True)
            return sum(count / (each.group_loss_tokens or count) for count, each in pairs if count)
        case "constant":
            if max_tokens is None:
                raise ValueError("aggregation constant divides by max_tokens: set it")
            return float(sum(count > 0 for count in counts) * max_tokens)
