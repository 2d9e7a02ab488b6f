"""Losses per token: ratio and correction. Pure functions of `TokenTerms`.

Each returns the loss of every token, to be minimised, and counts of what its correction did: sums over tokens, so that
micro-batches and ranks add up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from trainer_svc.engine.shapes import PerToken, Scalar
from trainer_svc.objectives.terms import TokenTerms, log_difference

__all__ = ["SURROGATES", "Surrogate", "clipped_ratio", "negative_log_likelihood", "truncated_importance"]

Surrogate = Callable[..., tuple[PerToken, dict[str, Scalar]]]


def truncated_importance(terms: TokenTerms, *, delta: float) -> tuple[PerToken, dict[str, Scalar]]:
    """-sg(min(q, delta)) A log t with q = t / b: the weight is truncated, the gradient is not (AIPO, arXiv 2505.24034)."""
    ratio = log_difference(terms.current.detach(), terms.behaviour).exp()
    loss = -ratio.clamp(max=delta) * terms.advantages * terms.current
    return loss, {"clipped_high": (ratio > delta).sum()}


def clipped_ratio(terms: TokenTerms, *, eps_low: float, eps_high: float) -> tuple[PerToken, dict[str, Scalar]]:
    """-min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) with r = t / o (PPO's clip as in GRPO, arXiv 2402.03300).

    A token whose ratio has left the interval in the direction of its advantage has no gradient.
    """
    ratio = log_difference(terms.current, terms.proximal).exp()
    clipped = ratio.clamp(1.0 - eps_low, 1.0 + eps_high)
    loss = -torch.minimum(ratio * terms.advantages, clipped * terms.advantages)
    return loss, {
        "clipped_high": ((ratio > 1.0 + eps_high) & (terms.advantages > 0)).sum(),
        "clipped_low": ((ratio < 1.0 - eps_low) & (terms.advantages < 0)).sum(),
    }


def negative_log_likelihood(terms: TokenTerms) -> tuple[PerToken, dict[str, Scalar]]:
    """-log t, for demonstrations."""
    return -terms.current, {}


SURROGATES: Mapping[str, Surrogate] = MappingProxyType(
    {
        "truncated_importance": truncated_importance,
        "clipped_ratio": clipped_ratio,
        "negative_log_likelihood": negative_log_likelihood,
    }
)
