"""Weights f(rho) of the decoupled form, rho = o / b per token: constants that the surrogate of each token is multiplied by.

Each returns the weights and counts of what it truncated or masked. Masks take tokens from the numerator of the loss alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import torch

from trainer_svc.batch.shapes import PerToken, Scalar
from trainer_svc.objectives.surrogates import MAX_LOG_DIFFERENCE, TokenTerms, log_difference

__all__ = ["CORRECTIONS", "Correction", "TokenWeights", "off_policy_sequence_mask", "veto"]

TokenWeights: TypeAlias = tuple[PerToken, dict[str, Scalar]]
Correction: TypeAlias = Callable[..., TokenWeights]


def _log_rho(terms: TokenTerms) -> PerToken:
    return log_difference(terms.proximal, terms.behaviour)


def _sequence_rho(terms: TokenTerms) -> PerToken:
    """The product of rho over the sequence, at each token; its logarithm is clamped like that of one token."""
    return terms.sequence_sum(_log_rho(terms)).clamp(-MAX_LOG_DIFFERENCE, MAX_LOG_DIFFERENCE).exp()


def none(terms: TokenTerms) -> TokenWeights:
    """1."""
    return torch.ones_like(terms.proximal), {}


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


CORRECTIONS: Mapping[str, Correction] = MappingProxyType(
    {
        correction.__name__: correction
        for correction in (none, token_tis, sequence_tis, sequence_mask, geometric_mask, token_mask, k3_mask)
    }
)


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
