"""What a user should hear about an objective that runs but cannot work well. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from trainer_svc.objectives.choices import Choices

__all__ = ["NARROW_BOUND", "bypass_warning", "estimator_warning"]

NARROW_BOUND = 5e-3
"""Half-width of a clip, as a ratio, below which rounding of bf16 (8 bits of mantissa) alone reaches it."""

ALIKE = {"centered": "dr_grpo"}
"""Two names of one estimator."""


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
