"""How far the trainer's policy lies from the one that sampled: sums per micro-batch, finished once per step."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trainer_svc.engine.shapes import Scalar
from trainer_svc.objectives.terms import TokenTerms, log_difference

__all__ = ["finish", "policy_gap"]


def policy_gap(terms: TokenTerms) -> dict[str, Scalar]:
    """Sums over tokens of what `finish` turns into means; `max_...` are maxima."""
    gap = log_difference(terms.current.detach(), terms.behaviour).double()
    weight = gap.exp()
    return {
        "gap_tokens": torch.tensor(float(len(gap)), dtype=torch.float64, device=gap.device),
        "weight": weight.sum(),
        "weight_squared": weight.square().sum(),
        "k3": (weight - gap - 1).sum(),
        "max_abs_log_difference": gap.abs().max(),
    }


def finish(sums: Mapping[str, float]) -> dict[str, float]:
    """Means of the summed diagnostics.

    Returns:
        `mismatch_kl` (nats), `max_abs_log_difference` (nats), `effective_sample_size` (share of the tokens),
        `chi_square`, `clip_fraction_low`, `clip_fraction_high`, `entropy` and `kl` (nats): those that were measured.
    """
    done: dict[str, float] = {}
    tokens = sums.get("gap_tokens", 0.0)
    if tokens:
        done["mismatch_kl"] = sums["k3"] / tokens
        done["max_abs_log_difference"] = sums["max_abs_log_difference"]
        done["effective_sample_size"] = sums["weight"] ** 2 / (tokens * sums["weight_squared"])
        done["chi_square"] = sums["weight_squared"] / tokens - 1.0
    measured = sums.get("tokens", 0.0)
    means = {"clipped_low": "clip_fraction_low", "clipped_high": "clip_fraction_high", "entropy": "entropy", "kl": "kl"}
    done |= {name: sums[total] / measured for total, name in means.items() if measured and total in sums}
    return done
