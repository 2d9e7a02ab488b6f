"""Losses per token, to be minimised: pure functions of `TokenTerms`.

Each returns the loss of every token and counts of what its clip, truncation or mask did, as sums over tokens, so that
micro-batches and ranks add up. q = t / b, r = t / o.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import torch

from trainer_svc.engine.shapes import PerToken, Scalar
from trainer_svc.objectives.terms import TokenTerms, log_difference

__all__ = ["SURROGATES", "Surrogate", "TokenLosses"]

TokenLosses: TypeAlias = tuple[PerToken, dict[str, Scalar]]
Surrogate: TypeAlias = Callable[..., TokenLosses]
"""`(terms, **parameters) -> (loss per token, sums for the report)`; names of sums do not depend on the data."""


def truncated_importance(terms: TokenTerms, *, delta: float) -> TokenLosses:
    """-sg(min(q, delta)) A log t: the weight is truncated, the gradient is not (AIPO, arXiv 2505.24034)."""
    ratio = log_difference(terms.current.detach(), terms.behaviour).exp()
    loss = -ratio.clamp(max=delta) * terms.advantages * terms.current
    return loss, {"truncated": (ratio > delta).sum()}


def capped_importance(terms: TokenTerms, *, cap: float) -> TokenLosses:
    """-min(sg(q), cap) A log t, as `truncated_importance` with the name of a correction's bound (RLOO and OPO off-policy)."""
    return truncated_importance(terms, delta=cap)


def clipped_ratio(terms: TokenTerms, *, eps_low: float, eps_high: float, dual_clip: float | None = None) -> TokenLosses:
    """-min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) (PPO, arXiv 1707.06347).

    A token whose ratio has left the interval in the direction of its advantage has no gradient. With `dual_clip` c the
    objective of a token with A < 0 is at least c A, which bounds its loss where r is huge (arXiv 1912.09729).
    """
    ratio = log_difference(terms.current, terms.proximal).exp()
    return _clipped(ratio, terms.advantages, eps_low, eps_high, dual_clip)


def clipped_sequence_ratio(terms: TokenTerms, *, eps_low: float, eps_high: float) -> TokenLosses:
    """PPO's clip of s = exp(mean of log r over the sequence), as sg(s) t / sg(t) per token (GSPO, arXiv 2507.18071)."""
    gap = log_difference(terms.current.detach(), terms.proximal)
    ratio = terms.sequence_mean(gap).exp() * (terms.current - terms.current.detach()).exp()
    return _clipped(ratio, terms.advantages, eps_low, eps_high, None)


def _clipped(
    ratio: PerToken, advantages: PerToken, eps_low: float, eps_high: float, dual_clip: float | None
) -> TokenLosses:
    objective = torch.minimum(ratio * advantages, ratio.clamp(1.0 - eps_low, 1.0 + eps_high) * advantages)
    counts = {
        "clipped_high": ((ratio > 1.0 + eps_high) & (advantages > 0)).sum(),
        "clipped_low": ((ratio < 1.0 - eps_low) & (advantages < 0)).sum(),
    }
    if dual_clip is not None:
        negative = advantages < 0
        objective = torch.where(negative, torch.maximum(objective, dual_clip * advantages), objective)
        counts["dual_clipped"] = (negative & (ratio > dual_clip)).sum()
    return -objective, counts


def clipped_weight(terms: TokenTerms, *, eps_low: float, eps_high: float) -> TokenLosses:
    """-sg(clip(r, 1 - eps_low, 1 + eps_high)) A log t: clipped tokens keep a gradient (CISPO, arXiv 2506.13585)."""
    ratio = log_difference(terms.current.detach(), terms.proximal).exp()
    loss = -ratio.clamp(1.0 - eps_low, 1.0 + eps_high) * terms.advantages * terms.current
    return loss, {"clipped_high": (ratio > 1.0 + eps_high).sum(), "clipped_low": (ratio < 1.0 - eps_low).sum()}


def divergence_masked(terms: TokenTerms, *, low: float, high: float) -> TokenLosses:
    """-q A without the tokens whose probability moved too far in the direction of A (DPPO, arXiv 2602.04879).

    With p the probabilities, a token goes where A > 0 and p_t - p_b > high, or A < 0 and p_b - p_t > low.
    """
    moved = terms.current.detach().exp() - terms.behaviour.exp()
    above, below = (terms.advantages > 0) & (moved > high), (terms.advantages < 0) & (-moved > low)
    return _masked(terms, below, above)


def distance_masked(terms: TokenTerms, *, threshold: float) -> TokenLosses:
    """-q A without the tokens with abs(p_t - p_b) > threshold, whatever the sign of A."""
    moved = terms.current.detach().exp() - terms.behaviour.exp()
    return _masked(terms, -moved > threshold, moved > threshold)


def ratio_masked(terms: TokenTerms, *, low: float, high: float) -> TokenLosses:
    """-q A where low <= q <= high, else nothing (IcePop, arXiv 2510.18855)."""
    ratio = log_difference(terms.current.detach(), terms.behaviour).exp()
    return _masked(terms, ratio < low, ratio > high)


def _masked(terms: TokenTerms, below: torch.Tensor, above: torch.Tensor) -> TokenLosses:
    ratio = log_difference(terms.current, terms.behaviour).exp()
    loss = torch.where(below | above, 0.0, -ratio * terms.advantages)
    return loss, {"masked_low": below.sum(), "masked_high": above.sum()}


def soft_gate(terms: TokenTerms, *, tau_pos: float, tau_neg: float) -> TokenLosses:
    """-f(r) A with f(r) = 4 / tau sigmoid(tau (r - 1)), tau by the sign of A (SAPO, arXiv 2511.20347)."""
    ratio = log_difference(terms.current, terms.proximal).exp()
    tau = torch.full_like(ratio, tau_neg).masked_fill(terms.advantages > 0, tau_pos)
    return -4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * terms.advantages, {}


def negative_log_likelihood(terms: TokenTerms) -> TokenLosses:
    """-log t, for demonstrations."""
    return -terms.current, {}


def reverse_kl_to_teacher(terms: TokenTerms) -> TokenLosses:
    """-sg(log t_teacher - log t) log t: the score-function gradient of KL(t || teacher) on the student's own tokens.

    Raises:
        ValueError: if the batch has no teacher log-probabilities.
    """
    if terms.teacher is None:
        raise ValueError("distill needs teacher log-probabilities: send them, or name a teacher")
    gap = log_difference(terms.teacher, terms.current.detach())
    return -gap * terms.current, {"teacher_kl": -gap.sum()}


SURROGATES: Mapping[str, Surrogate] = MappingProxyType(
    {
        surrogate.__name__: surrogate
        for surrogate in (
            truncated_importance,
            capped_importance,
            clipped_ratio,
            clipped_sequence_ratio,
            clipped_weight,
            divergence_masked,
            distance_masked,
            ratio_masked,
            soft_gate,
            negative_log_likelihood,
            reverse_kl_to_teacher,
        )
    }
)
