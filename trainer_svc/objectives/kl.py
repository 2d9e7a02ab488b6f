"""Estimators of the KL divergence from the current policy t to a frozen reference, on samples of the current policy.

With x = log t - log ref per token: k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x.
Source: J. Schulman, "Approximating KL divergence" (2020).
"""

from __future__ import annotations

import math

from trainer_svc.batch.shapes import PerToken
from trainer_svc.objectives.presets import KlKind
from trainer_svc.objectives.surrogates import log_difference

__all__ = ["MAX_KL", "kl_estimate", "kl_loss"]

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
    """Return the estimate per token as a term of the loss, without a clamp, which would remove the gradient of far tokens.

    k3 continues linearly below x = -3: k3(x) = k3(-3) - (e^3 - 1)(x + 3). Where the policy has fallen far below the
    reference it is thus still pulled back, with a bounded gradient.

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
