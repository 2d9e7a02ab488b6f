"""Warnings about settings that a step shows to be a poor choice: pure functions of its metrics."""

from __future__ import annotations

from collections.abc import Mapping

from trainer_svc.objectives.config import ResolvedObjective

__all__ = ["MISMATCH_BOUNDS", "NARROW_BOUND", "bypass_warning", "estimator_warning", "mismatch_warning"]

NARROW_BOUND = 5e-3
"""A clip whose bounds are nearer to 1 than this clips bf16 rounding (8 bits of mantissa) alone."""

SAME_ESTIMATOR = {"centered": "dr_grpo"}
"""Two names of one estimator."""

MISMATCH_BOUNDS = {"float32": 1e-3, "bfloat16": 1e-2}
"""Largest `mismatch_kl` at staleness 0, in nats a token, that rounding explains, by the precision of the forward pass."""


def mismatch_warning(measured: Mapping[str, float], *, staleness: int, sampled: str, computed: str) -> str | None:
    """Return a warning if trainer and engine disagree about tokens that the present weights sampled.

    Args:
        measured: Metrics of a step, with its `mismatch_kl`.
        staleness: The largest age of a trained token, in versions. Above 0 the policies differ on purpose.
        sampled: Precision of the engine's weights; empty if it is not known.
        computed: Precision of the trainer's forward pass.
    """
    mismatch = measured.get("mismatch_kl", 0.0)
    if staleness > 0 or mismatch <= MISMATCH_BOUNDS.get(computed, 1e-2):
        return None
    finding = f"mismatch_kl is {mismatch:.4f} at staleness 0"
    if sampled and sampled != computed:
        return (
            f"{finding}: the engine samples with {sampled} weights and the trainer computes in {computed}, so the engine misses small"
            f" updates; set rollout.dtype to {computed} or auto"
        )
    precision = f"both use {computed}" if sampled else "the precision of the engine's weights is not known"
    return (
        f"{finding}: the engine does not sample from the policy that is trained ({precision}); check that both load the same model,"
        f" that rollout.dtype is {computed} or auto, and that rollout.engine_args quantises neither weights nor the KV cache"
    )


def bypass_warning(
    objective: ResolvedObjective, measured: Mapping[str, float], *, bf16: bool, staleness: int
) -> str | None:
    """Return a warning if bounds as narrow as rounding are applied to the engine's own log-probabilities.

    Args:
        objective: What is minimised.
        measured: Metrics of a step, with its clip fractions.
        bf16: Whether engine or trainer compute in bfloat16.
        staleness: The largest age of a trained token, in versions.
    """
    bounds = [objective.parameters.get(name) for name in ("eps_low", "eps_high")]
    narrow = any(bound is not None and bound < NARROW_BOUND for bound in bounds)
    if objective.decoupled or not narrow or not (bf16 or staleness > 0):
        return None
    clipped = measured.get("clip_fraction_low", 0.0) + measured.get("clip_fraction_high", 0.0)
    cause = "bfloat16" if bf16 else f"staleness {staleness}"
    return (
        f"objective {objective.name} in the bypass form clips {clipped:.1%} of the tokens: its bounds are as narrow as the "
        f"differences that {cause} makes between engine and trainer; set proximal to recompute"
    )


def estimator_warning(objective: ResolvedObjective, estimator: str) -> str | None:
    """Return a warning if a batch's advantages come from another estimator than the preset was published with.

    Args:
        objective: What is minimised.
        estimator: The estimator that the batch names; empty if it names none.
    """
    published = objective.preset.advantage
    if not estimator or not published or objective.is_own or objective.runs_estimator:
        return None
    if SAME_ESTIMATOR.get(estimator, estimator) == SAME_ESTIMATOR.get(published, published):
        return None
    return (
        f"objective {objective.name} was published with {published} advantages, but the batches bring {estimator} advantages: "
        f"set orchestrator.advantage to {published}, unless this is what you want"
    )
