"""Losses per token, to be minimised: pure functions of `TokenTerms`.

Each surrogate returns the loss of every token, and counts of what its clip, truncation or mask did. Counts are sums over
tokens, so that micro-batches and ranks add up. q = t / b and r = t / o; docs/objectives.md explains the letters.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import torch

from trainer_svc.batch.shapes import Indices, MaskPerToken, PerToken, Scalar

__all__ = [
    "MAX_LOG_DIFFERENCE",
    "SURROGATES",
    "Surrogate",
    "TokenLosses",
    "TokenTerms",
    "clipped_value_loss",
    "find_surrogate",
    "log_difference",
]

TokenLosses: TypeAlias = tuple[PerToken, dict[str, Scalar]]
Surrogate: TypeAlias = Callable[..., TokenLosses]
"""`(terms, **parameters) -> (loss per token, sums for the report)`; the names of the sums must not depend on the data."""

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
        totals = torch.zeros(self.sequences, dtype=values.dtype, device=values.device)
        return totals.index_add(0, self.owners, values)[self.owners]

    def sequence_mean(self, values: PerToken) -> PerToken:
        """Return, at each token, the mean over the loss tokens of its sequence."""
        return self.sequence_sum(values) / self.sequence_sum(torch.ones_like(values))


def log_difference(minuend: PerToken, subtrahend: PerToken) -> PerToken:
    """Return the difference of two log-probabilities, clamped so that its exponential is finite."""
    return (minuend - subtrahend).clamp(-MAX_LOG_DIFFERENCE, MAX_LOG_DIFFERENCE)


def truncated_importance(terms: TokenTerms, *, delta: float) -> TokenLosses:
    """-sg(min(q, delta)) A log t: the weight is truncated, the gradient is not (AIPO, arXiv 2505.24034)."""
    ratio = log_difference(terms.current.detach(), terms.behaviour).exp()
    loss = -ratio.clamp(max=delta) * terms.advantages * terms.current
    return loss, {"truncated": (ratio > delta).sum()}


def capped_importance(terms: TokenTerms, *, cap: float) -> TokenLosses:
    """-min(sg(q), cap) A log t: `truncated_importance` under the parameter name of RLOO and OPO."""
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
    """-q A, without the tokens whose probability moved too far in the direction of A (DPPO, arXiv 2602.04879).

    With the probabilities p, drop a token if A > 0 and p_t - p_b > high, or if A < 0 and p_b - p_t > low.
    """
    moved = terms.current.detach().exp() - terms.behaviour.exp()
    above, below = (terms.advantages > 0) & (moved > high), (terms.advantages < 0) & (-moved > low)
    return _masked(terms, below, above)


def distance_masked(terms: TokenTerms, *, threshold: float) -> TokenLosses:
    """-q A, without the tokens with abs(p_t - p_b) > threshold, whatever the sign of A."""
    moved = terms.current.detach().exp() - terms.behaviour.exp()
    return _masked(terms, -moved > threshold, moved > threshold)


def ratio_masked(terms: TokenTerms, *, low: float, high: float) -> TokenLosses:
    """-q A where low <= q <= high, else 0 (IcePop, arXiv 2510.18855)."""
    ratio = log_difference(terms.current.detach(), terms.behaviour).exp()
    return _masked(terms, ratio < low, ratio > high)


def _masked(terms: TokenTerms, below: torch.Tensor, above: torch.Tensor) -> TokenLosses:
    ratio = log_difference(terms.current, terms.behaviour).exp()
    loss = torch.where(below | above, 0.0, -ratio * terms.advantages)
    return loss, {"masked_low": below.sum(), "masked_high": above.sum()}


def soft_gate(terms: TokenTerms, *, tau_pos: float, tau_neg: float) -> TokenLosses:
    """-f(r) A with f(r) = 4 / tau sigmoid(tau (r - 1)), with tau_pos where A > 0, else tau_neg (SAPO, arXiv 2511.20347)."""
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
        raise ValueError("distill needs teacher log-probabilities: send them, or set teacher.model")
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


def find_surrogate(name: str, parameters: Mapping[str, object]) -> Surrogate:
    """Return a surrogate of the table, or the user's own function that `package.module:function` names.

    Python must find the module: install it, or put its directory on PYTHONPATH.

    Args:
        name: Name of a surrogate, or import path.
        parameters: The keyword arguments that the surrogate will be called with.

    Raises:
        ValueError: if the user's own function cannot be imported, or cannot be called with these parameters. This ends a
            run at its start and not in its first step.
    """
    if ":" not in name:
        return SURROGATES[name]
    module_name, function_name = name.split(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"objective {name!r}: there is no module {error.name!r}: install it, or put its directory on PYTHONPATH"
        ) from error
    surrogate: Surrogate | None = getattr(module, function_name, None)
    if not callable(surrogate):
        raise ValueError(  # noqa: TRY004 - the name is wrong, not a type
            f"objective {name!r}: {module.__file__} has no function {function_name!r}: correct the name"
        )
    try:
        inspect.signature(surrogate).bind(None, **parameters)
    except TypeError as error:
        raise ValueError(
            f"objective {name!r} is called with the terms of a micro-batch and params ({', '.join(parameters) or 'none'}): "
            f"{error}; correct params or the function"
        ) from error
    return surrogate


def clipped_value_loss(
    values: PerToken, old_values: PerToken, returns: PerToken, *, value_clip: float | None
) -> tuple[PerToken, dict[str, Scalar]]:
    """0.5 max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2) per token: the loss of PPO's critic (arXiv 1707.06347).

    Args:
        values: V of the current critic, with its gradient.
        old_values: V when the update began.
        returns: R.
        value_clip: How far V may move in one update, in reward units; None: without limit.

    Returns:
        The loss per token, and `value_clipped`: the number of tokens whose clipped error was the larger one.
    """
    plain = (values - returns).square()
    if value_clip is None:
        return 0.5 * plain, {"value_clipped": torch.zeros((), dtype=torch.int64, device=values.device)}
    moved = torch.minimum(torch.maximum(values, old_values - value_clip), old_values + value_clip)
    clipped = (moved - returns).square()
    return 0.5 * torch.maximum(plain, clipped), {"value_clipped": (clipped > plain).sum()}
