"""Estimators of the KL divergence from the current to the reference policy, on the current policy's samples.

Source: J. Schulman, "Approximating KL divergence" (2020).
"""

from __future__ import annotations

from trainer_svc.engine.shapes import PerToken
from trainer_svc.objectives.presets import KlKind
from trainer_svc.objectives.terms import log_difference

__all__ = ["MAX_KL", "kl_estimate"]

MAX_KL = 10.0
"""Nats per token. Keeps one token that the reference finds impossible from drowning the batch."""


def kl_estimate(kind: KlKind, current: PerToken, reference: PerToken) -> PerToken:
    """k1 = x, k2 = x^2 / 2 or k3 = exp(-x) - 1 + x per token, with x = log t - log ref, clamped to [-10, 10]."""
    x = log_difference(current, reference)
    match kind:
        case "k1":
            estimate = x
        case "k2":
            estimate = x.square() / 2
        case "k3":
            estimate = (-x).exp() - 1 + x
    return estimate.clamp(-MAX_KL, MAX_KL)
