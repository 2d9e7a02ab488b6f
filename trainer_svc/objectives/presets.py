"""The presets: the losses per token, the table of presets with their defaults, and the settings of their parameters.

To add a preset, add its loss below (unless one fits), a row to `PRESETS`, and a field to `PresetSettings` for each parameter that
is new. Losses are pure functions of `TokenTerms`, and call methods of tensors only: `--help` reads this table without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias

from pydantic import Field

from sluice.config import Section
from trainer_svc.objectives.terms import Aggregation, CorrectionKind, KlKind, TokenTerms, log_difference

if TYPE_CHECKING:
    from trainer_svc.batch.shapes import MaskPerToken, PerToken, Scalar

TokenLosses: TypeAlias = "tuple[PerToken, dict[str, Scalar]]"
"""The loss of every token, to be minimised, and sums over tokens for the report: what a clip, truncation or mask did."""

Surrogate: TypeAlias = Callable[..., TokenLosses]
"""`(terms, **parameters) -> (loss per token, sums)`; the names of the sums must not depend on the data."""


# Losses per token. q = t / b and r = t / o.


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
    objective = (ratio * advantages).minimum(ratio.clamp(1.0 - eps_low, 1.0 + eps_high) * advantages)
    counts = {
        "clipped_high": ((ratio > 1.0 + eps_high) & (advantages > 0)).sum(),
        "clipped_low": ((ratio < 1.0 - eps_low) & (advantages < 0)).sum(),
    }
    if dual_clip is not None:
        negative = advantages < 0
        objective = objective.maximum(dual_clip * advantages).where(negative, objective)
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


def _masked(terms: TokenTerms, below: MaskPerToken, above: MaskPerToken) -> TokenLosses:
    ratio = log_difference(terms.current, terms.behaviour).exp()
    loss = (-ratio * terms.advantages).where(~(below | above), 0.0)
    return loss, {"masked_low": below.sum(), "masked_high": above.sum()}


def soft_gate(terms: TokenTerms, *, tau_pos: float, tau_neg: float) -> TokenLosses:
    """-f(r) A with f(r) = 4 / tau sigmoid(tau (r - 1)), with tau_pos where A > 0, else tau_neg (SAPO, arXiv 2511.20347)."""
    ratio = log_difference(terms.current, terms.proximal).exp()
    tau = ratio.new_full(ratio.shape, tau_neg).masked_fill(terms.advantages > 0, tau_pos)
    return -4.0 / tau * (tau * (ratio - 1.0)).sigmoid() * terms.advantages, {}


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


# The table.


KlWhere = Literal["loss", "reward"]
Proximal = Literal["bypass", "recompute", "loglinear"]
Anchor = Literal["proximal", "behaviour", "none"]
Parameters = Mapping[str, float | None]

BATCH_ESTIMATORS: Mapping[str, Parameters] = MappingProxyType(
    {"gae": {"gamma": 1.0, "gae_lambda": 1.0}, "reinforce_pp": {"gamma": 1.0}, "process": {"turn_discount": None}}
)
"""Advantage estimators that the trainer runs before its epochs, with their parameters; None: off. The orchestrator runs the others, which need only rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """The defaults of one objective.

    Attributes:
        surrogate: The loss per token; None: the user's own, which the setting `preset` names.
        advantage: The advantage estimator that it was published with; "" if it reads no advantages.
        source: The paper.
        anchor: What the ratio divides by: `proximal` (r = t / o), `behaviour` (q = t / b, which is its own correction), or
            `none` if there is no ratio.
        aggregation: How token losses become one number.
        parameters: Keyword arguments of the surrogate, with their defaults; None: off.
        other_parameters: Parameters that something else reads: the selection of tokens (m2po) or the critic (ppo).
        proximal: Default source of the proximal policy.
        correction: Default correction of the decoupled form; None: the user must name one.
        kl_coef: Weight of the KL term.
        kl_kind: Estimator of the KL term.
        kl_where: Whether the KL term is part of the loss or of the reward.
        needs_teacher: Whether the loss reads a teacher's log-probabilities.
    """

    surrogate: Surrogate | None
    advantage: str
    source: str
    anchor: Anchor = "proximal"
    aggregation: Aggregation = "token"
    parameters: Parameters = field(default_factory=dict)
    other_parameters: Parameters = field(default_factory=dict)
    proximal: Proximal = "bypass"
    correction: CorrectionKind | None = None
    kl_coef: float = 0.0
    kl_kind: KlKind = "k3"
    kl_where: KlWhere = "loss"
    needs_teacher: bool = False

    @property
    def needs_behaviour(self) -> bool:
        """Whether the loss reads the log-probabilities of the policy that sampled, and advantages."""
        return self.anchor != "none"

    @property
    def all_parameters(self) -> Parameters:
        """Return every parameter that a user may set for this preset, with its default."""
        return {**self.parameters, **self.other_parameters}


_CLIP: Parameters = {"eps_low": 0.2, "eps_high": 0.2, "dual_clip": None}
_CLIP_HIGHER: Parameters = {**_CLIP, "eps_high": 0.28}

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "aipo": Preset(
            surrogate=truncated_importance,
            advantage="centered",
            anchor="behaviour",
            parameters={"delta": 4.0},
            source="arXiv 2505.24034",
        ),
        "grpo": Preset(
            surrogate=clipped_ratio,
            advantage="grpo",
            aggregation="sequence",
            parameters=_CLIP,
            source="arXiv 2402.03300",
        ),
        "dapo": Preset(surrogate=clipped_ratio, advantage="grpo", parameters=_CLIP_HIGHER, source="arXiv 2503.14476"),
        "dr_grpo": Preset(
            surrogate=clipped_ratio,
            advantage="dr_grpo",
            aggregation="constant",
            parameters=_CLIP,
            source="arXiv 2503.20783",
        ),
        "gspo": Preset(
            surrogate=clipped_sequence_ratio,
            advantage="grpo",
            aggregation="sequence",
            parameters={"eps_low": 3e-4, "eps_high": 4e-4},
            # These bounds are as narrow as the rounding differences between a bf16 engine and the trainer: a ratio to b
            # would be clipped by noise.
            proximal="recompute",
            correction="token_tis",
            source="arXiv 2507.18071",
        ),
        "rloo": Preset(
            surrogate=capped_importance,
            advantage="rloo",
            anchor="behaviour",
            parameters={"cap": 2.0},
            source="arXiv 2402.14740",
        ),
        "opo": Preset(
            surrogate=capped_importance,
            advantage="opo",
            anchor="behaviour",
            parameters={"cap": 2.0},
            source="arXiv 2505.23585",
        ),
        "cispo": Preset(
            surrogate=clipped_weight,
            advantage="grpo",
            parameters={"eps_low": 1.0, "eps_high": 4.0},
            source="arXiv 2506.13585",
        ),
        "ppo": Preset(
            surrogate=clipped_ratio,
            advantage="gae",
            parameters=_CLIP,
            other_parameters={"value_clip": 0.5},
            source="arXiv 1707.06347, dual clip 1912.09729",
        ),
        "reinforce_pp": Preset(
            surrogate=clipped_ratio,
            advantage="reinforce_pp",
            parameters=_CLIP,
            kl_coef=0.001,
            kl_kind="k1",
            kl_where="reward",
            source="arXiv 2501.03262",
        ),
        "dppo": Preset(
            surrogate=divergence_masked,
            advantage="centered",
            anchor="behaviour",
            parameters={"low": 0.2, "high": 0.2},
            source="arXiv 2602.04879",
        ),
        "ipo_mask": Preset(
            surrogate=distance_masked,
            advantage="centered",
            anchor="behaviour",
            parameters={"threshold": 0.1},
            source="dppo with a bound that ignores the sign of A",
        ),
        "icepop": Preset(
            surrogate=ratio_masked,
            advantage="centered",
            anchor="behaviour",
            parameters={"low": 0.5, "high": 5.0},
            source="arXiv 2510.18855",
        ),
        "sapo": Preset(
            surrogate=soft_gate,
            advantage="grpo",
            parameters={"tau_pos": 1.0, "tau_neg": 1.05},
            source="arXiv 2511.20347",
        ),
        "m2po": Preset(
            surrogate=clipped_ratio,
            advantage="grpo",
            parameters=_CLIP,
            other_parameters={"tau": 0.04},
            # Tokens are dropped by (log b - log o)^2, which is 0 everywhere in the bypass form.
            proximal="recompute",
            correction="none",
            source="arXiv 2510.01161",
        ),
        "sft": Preset(
            surrogate=negative_log_likelihood,
            advantage="",
            anchor="none",
            source="maximum likelihood on demonstrations",
        ),
        "distill": Preset(
            surrogate=reverse_kl_to_teacher,
            advantage="",
            anchor="none",
            needs_teacher=True,
            source="on-policy distillation, arXiv 2306.13649",
        ),
    }
)


class PresetSettings(Section):
    """The preset, and the parameters of all presets by name. An unset parameter takes its preset's default."""

    preset: str = Field(
        "aipo",
        description=f"Row of the table of objectives: {', '.join(PRESETS)}; or `module:function`, a loss of your own.",
    )
    params: dict[str, float | bool | str] = Field(
        default_factory=dict,
        description="Keyword arguments of a loss of your own; the presets' parameters have settings of their own.",
    )
    delta: float | None = Field(None, gt=0, description="aipo: largest importance weight (a ratio); preset default 4.")
    cap: float | None = Field(
        None, gt=0, description="rloo, opo: largest importance weight (a ratio); preset default 2."
    )
    eps_low: float | None = Field(None, ge=0, description="Clipping presets: ratios are clipped below 1 - eps_low.")
    eps_high: float | None = Field(None, ge=0, description="Clipping presets: ratios are clipped above 1 + eps_high.")
    dual_clip: float | None = Field(
        None,
        gt=1,
        description="PPO's clip: the objective of a token with a negative advantage A is at least this times A (3 is usual); unset: off.",
    )
    low: float | None = Field(
        None, ge=0, description="dppo: largest fall of a token's probability; icepop: smallest ratio that is kept."
    )
    high: float | None = Field(
        None, ge=0, description="dppo: largest rise of a token's probability; icepop: largest ratio that is kept."
    )
    threshold: float | None = Field(
        None, gt=0, description="ipo_mask: largest change of a token's probability; default 0.1."
    )
    tau: float | None = Field(
        None, gt=0, description="m2po: largest mean of (log b - log o)^2 over the batch, in nats squared; default 0.04."
    )
    tau_pos: float | None = Field(None, gt=0, description="sapo: sharpness of the soft clip where A > 0; default 1.")
    tau_neg: float | None = Field(None, gt=0, description="sapo: sharpness of the soft clip where A < 0; default 1.05.")
    value_clip: float | None = Field(
        None,
        gt=0,
        description="ppo: how far the critic's value may move from the old one in one update, in reward units; default 0.5.",
    )
