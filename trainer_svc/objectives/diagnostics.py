"""What a loss reports beside its value: sums per micro-batch, finished once per step."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trainer_svc.engine.shapes import Scalar
from trainer_svc.objectives.terms import TokenTerms, log_difference

__all__ = ["correction_spread", "finish", "policy_gap"]

_FRACTIONS = {
    "clipped_low": "clip_fraction_low",
    "clipped_high": "clip_fraction_high",
    "dual_clipped": "dual_clip_fraction",
    "truncated": "truncate_fraction",
    "masked_low": "mask_fraction_low",
    "masked_high": "mask_fraction_high",
    "correction_truncated": "correction_truncate_fraction",
    "correction_masked_low": "correction_mask_fraction_low",
    "correction_masked_high": "correction_mask_fraction_high",
    "vetoed": "veto_fraction",
    "off_policy_masked": "off_policy_mask_fraction",
    "deselected": "deselect_fraction",
}
_MEANS = {"entropy": "entropy", "kl": "kl", "teacher_kl": "teacher_kl"}
_GAP = ("gap_tokens", "weight", "weight_squared", "k3", "max_abs_log_difference", "rho", "rho_squared")


def policy_gap(terms: TokenTerms) -> dict[str, Scalar]:
    """How far the trainer's policy lies from the one that sampled, as sums over tokens; `max_...` are maxima."""
    gap = log_difference(terms.current.detach(), terms.behaviour).double()
    weight = gap.exp()
    return {
        "gap_tokens": torch.full((), float(len(gap)), dtype=torch.float64, device=gap.device),
        "weight": weight.sum(),
        "weight_squared": weight.square().sum(),
        "k3": (weight - gap - 1).sum(),
        "max_abs_log_difference": torch.cat([gap.abs(), gap.new_zeros(1)]).max(),
    }


def correction_spread(terms: TokenTerms) -> dict[str, Scalar]:
    """How uneven rho = o / b is, before any truncation, as sums over tokens."""
    rho = log_difference(terms.proximal, terms.behaviour).double().exp()
    return {"rho": rho.sum(), "rho_squared": rho.square().sum()}


def finish(sums: Mapping[str, float]) -> dict[str, float]:
    """Means of the summed diagnostics: those that were measured.

    Returns:
        `mismatch_kl` and `max_abs_log_difference` (nats, trainer against engine), `effective_sample_size` (share of the
        tokens) and `chi_square` of the weights t / b, the same as `correction_...` of o / b; `entropy`, `kl`, `teacher_kl` (mean, in nats); as shares of the loss
        tokens `clip_fraction_low` and `_high`, `dual_clip_fraction`, `truncate_fraction`, `mask_fraction_low` and `_high`,
        the same of the correction (`correction_...`), `veto_fraction`, `off_policy_mask_fraction`, `deselect_fraction`;
        and the mean of each sum that a surrogate of the user's own gave, under its name.
    """
    done: dict[str, float] = {}
    tokens = sums.get("gap_tokens", 0.0)
    if tokens:
        done["mismatch_kl"] = sums["k3"] / tokens
        done["max_abs_log_difference"] = sums["max_abs_log_difference"]
        done["effective_sample_size"] = sums["weight"] ** 2 / (tokens * sums["weight_squared"])
        done["chi_square"] = sums["weight_squared"] / tokens - 1.0
        if "rho" in sums:
            done["correction_effective_sample_size"] = sums["rho"] ** 2 / (tokens * sums["rho_squared"])
            done["correction_chi_square"] = sums["rho_squared"] / tokens - 1.0
    measured = sums.get("tokens", 0.0)
    if measured:
        own = {name: name for name in sums if name not in (*_GAP, *_FRACTIONS, *_MEANS, "tokens")}
        for total, name in (_FRACTIONS | _MEANS | own).items():
            if total in sums:
                done[name] = sums[total] if total.startswith("max_") else sums[total] / measured
    return done
