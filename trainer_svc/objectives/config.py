"""The table `[trainer.objective]`. Imports no torch, so that `--help` is quick."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from sluice.config import Section
from trainer_svc.objectives.choices import Choices
from trainer_svc.objectives.presets import PRESETS, Aggregation, CorrectionKind, KlKind, KlWhere, Proximal

__all__ = ["CorrectionConfig", "ObjectiveConfig"]


class CorrectionConfig(Section):
    """What the loss of the decoupled form is multiplied by: f(rho), rho = proximal / behaviour probability."""

    kind: CorrectionKind | None = Field(
        None,
        description="Weight of each token in the decoupled form: none (1), token_tis or sequence_tis (rho or its product, truncated), "
        "token_mask (rho inside the bounds, else 0), sequence_mask, geometric_mask or k3_mask (1 or 0 for a whole sequence). "
        "Unset takes the preset's; where it has none, a decoupled form must name one.",
    )
    cap: float | None = Field(None, gt=0, description="token_tis, sequence_tis: largest weight, a ratio; default 2.")
    low: float | None = Field(None, gt=0, description="Masks: smallest ratio kept; default 0.5 (geometric_mask 0.99).")
    high: float | None = Field(
        None, gt=0, description="Masks: largest ratio kept; default 2 (geometric_mask 1.01, token_mask 5)."
    )
    threshold: float | None = Field(
        None, gt=0, description="k3_mask: largest mean of rho - log rho - 1 kept, in nats; default 0.01."
    )
    veto: float | None = Field(
        None, gt=0, lt=1, description="Drops a sequence that has a token with rho below this, such as 1e-4; unset: off."
    )
    off_policy_sequence_mask: float | None = Field(
        None,
        gt=0,
        description="Drops tokens with a negative advantage of sequences whose mean log b - log t is above this, in nats, such as 0.5; unset: off.",
    )


class ObjectiveConfig(Section):
    """What is minimised. A parameter left out takes its preset's default; docs/objectives.md has the table."""

    preset: str = Field(
        "aipo",
        description=f"Row of the objectives' table: {', '.join(PRESETS)}; or `module:function`, a surrogate of your own.",
    )
    params: dict[str, float | bool | str] = Field(
        default_factory=dict, description="Keyword arguments of a surrogate of your own; other presets have named ones."
    )
    advantage: str | None = Field(
        None,
        description="Advantage estimator that the trainer runs before its epochs: gae, reinforce_pp or process; unset takes the preset's. "
        "Estimators that need rewards alone are named by `orchestrator.advantage`.",
    )
    delta: float | None = Field(None, gt=0, description="aipo: largest importance weight (a ratio); preset default 4.")
    cap: float | None = Field(
        None, gt=0, description="rloo, opo: largest importance weight (a ratio); preset default 2."
    )
    eps_low: float | None = Field(None, ge=0, description="Clipping presets: the ratio is clipped below 1 - eps_low.")
    eps_high: float | None = Field(None, ge=0, description="Clipping presets: the ratio is clipped above 1 + eps_high.")
    dual_clip: float | None = Field(
        None,
        gt=1,
        description="PPO's clip: tokens with a negative advantage A gain at least this times A (3 is usual); unset: off.",
    )
    low: float | None = Field(
        None, ge=0, description="dppo: largest fall of a token's probability; icepop: smallest ratio."
    )
    high: float | None = Field(
        None, ge=0, description="dppo: largest rise of a token's probability; icepop: largest ratio."
    )
    threshold: float | None = Field(
        None, gt=0, description="ipo_mask: largest change of a token's probability; default 0.1."
    )
    tau: float | None = Field(
        None, gt=0, description="m2po: largest mean of (log b - log o)^2 over the batch, in nats squared; default 0.04."
    )
    tau_pos: float | None = Field(None, gt=0, description="sapo: sharpness of the gate where A > 0; default 1.")
    tau_neg: float | None = Field(None, gt=0, description="sapo: sharpness of the gate where A < 0; default 1.05.")
    value_clip: float | None = Field(
        None,
        gt=0,
        description="ppo: how far the critic's value may move from the old one, in reward units; default 0.5.",
    )
    gamma: float | None = Field(None, ge=0, le=1, description="gae, reinforce_pp: discount per token; default 1.")
    gae_lambda: float | None = Field(None, ge=0, le=1, description="gae: share of the longer returns; default 1.")
    turn_discount: float | None = Field(
        None, ge=0, le=1, description="process: discount per turn; unset: every token has its own reward."
    )
    process_scale: Literal["none", "group", "batch"] = Field(
        "none",
        description="process: whether advantages are whitened over a group's tokens, the batch's, or not at all.",
    )
    proximal: Proximal | None = Field(
        None,
        description="The proximal policy o: bypass (o is the behaviour policy), recompute (one more forward pass per batch) or "
        "loglinear (interpolated by token age); unset takes the preset's, bypass for most.",
    )
    correction: CorrectionConfig = Field(
        default_factory=CorrectionConfig, description="Correction of the decoupled form."
    )
    kl_coef: float | None = Field(
        None,
        ge=0,
        description="Weight of the KL term to the reference policy, per nat; needs reference log-probabilities; unset takes the preset's, 0 for most.",
    )
    kl_kind: KlKind | None = Field(
        None,
        description="Estimator of the KL term: k2 or k3, in the reward also k1 (as a loss it has no effect and is refused); unset takes the preset's.",
    )
    kl_where: KlWhere | None = Field(
        None, description="Where the KL term goes: loss, or reward (gae and reinforce_pp); unset takes the preset's."
    )
    entropy_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus, per nat.")
    aggregation: Aggregation | None = Field(
        None, description="How token losses become one: token, sequence, prompt or constant; unset takes the preset's."
    )
    max_tokens: int | None = Field(
        None, ge=1, description="Tokens per sequence that `aggregation = constant` divides by."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _ = self.choices
        return self

    @property
    def choices(self) -> Choices:
        """Every choice with the preset's defaults filled in.

        Raises:
            ValueError: with the reason, if they do not go together.
        """
        given = self.model_dump(exclude={"correction"}, exclude_none=True)
        return Choices.of(given, self.correction.model_dump(exclude_none=True))
