"""What a user should hear about an objective that runs but cannot work well. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from trainer_svc.objectives.choices import Choices

__all__ = ["MISMATCH_BOUNDS", "NARROW_BOUND", "bypass_warning", "estimator_warning", "mismatch_warning"]

NARROW_BOUND = 5e-3
"""Half-width of a clip, as a ratio, below which rounding of bf16 (8 bits of mantissa) alone reaches it."""

ALIKE = {"centered": "dr_grpo"}
"""Two names of one estimator."""

MISMATCH_BOUNDS = {"float32": 1e-3, "bfloat16": 1e-2}
"""Largest `mismatch_kl` at staleness 0, in nats a token, that rounding explains, by the precision of the forward pass."""


def mismatch_warning(measured: Mapping[str, float], *, staleness: int, sampled: str, computed: str) -> str | None:
    """Return a warning if trainer and engine disagree about tokens that the present weights sampled.

    Args:
        measured: What a step reported, with its `mismatch_kl`.
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


def bypass_warning(choices: Choices, measured: Mapping[str, float], *, bf16: bool, staleness: int) -> str | None:
    """A warning where bounds as narrow as rounding are measured against the engine's own log-probabilities.

    Args:
        choices: The objective.
        measured: What a step reported, with its clip fractions.
        bf16: Whether engine or trainer compute in bfloat16.
        staleness: The largest age of a trained token, in versions.
    """
    bounds = [choices.parameters.get(name) for name in ("eps_low", "eps_high")]
    narrow = any(bound is not None and bound < NARROW_BOUND for bound in bounds)
    if choices.decoupled or not narrow or not (bf16 or staleness > 0):
        return None
    clipped = measured.get("clip_fraction_low", 0.0) + measured.get("clip_fraction_high", 0.0)
    cause = "bfloat16" if bf16 else f"staleness {staleness}"
    return (
        f"objective {choices.name} in the bypass form clips {clipped:.1%} of the tokens: its bounds are as narrow as the "
        f"differences that {cause} makes between engine and trainer; set proximal to recompute"
    )


def estimator_warning(choices: Choices, estimator: str) -> str | None:
    """A warning where advantages are others than those that a preset was published with.

    Args:
        choices: The objective.
        estimator: What a batch's advantages were estimated by; empty if it does not say.
    """
    published = choices.preset.advantage
    if not estimator or not published or ":" in choices.name or choices.runs_estimator:
        return None
    if ALIKE.get(estimator, estimator) == ALIKE.get(published, published):
        return None
    return (
        f"objective {choices.name} was published with the advantages of {published}, and the batches bring those of {estimator}: set "
        f"orchestrator.advantage to {published}, unless you mean that"
    )
