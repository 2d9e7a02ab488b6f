"""The table of objectives: each preset with its defaults, and the settings of its parameters. Imports no torch.

To add a preset, add a row to `PRESETS`. If its loss is new, write it in `surrogates.py`; if a parameter is new, add its
field to `PresetSettings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from pydantic import Field

from sluice.config import Section

__all__ = [
    "BATCH_ESTIMATORS",
    "CORRECTION_BOUNDS",
    "PRESETS",
    "Aggregation",
    "Anchor",
    "CorrectionKind",
    "KlKind",
    "KlWhere",
    "Parameters",
    "Preset",
    "PresetSettings",
    "Proximal",
]

Aggregation = Literal["token", "sequence", "prompt", "constant"]
KlKind = Literal["k1", "k2", "k3"]
KlWhere = Literal["loss", "reward"]
Proximal = Literal["bypass", "recompute", "loglinear"]
Anchor = Literal["proximal", "behaviour", "none"]
CorrectionKind = Literal[
    "none", "token_tis", "sequence_tis", "sequence_mask", "geometric_mask", "token_mask", "k3_mask"
]
Parameters = Mapping[str, float | None]

CORRECTION_BOUNDS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "none": {},
        "token_tis": {"cap": 2.0},
        "sequence_tis": {"cap": 2.0},
        "sequence_mask": {"low": 0.5, "high": 2.0},
        "geometric_mask": {"low": 0.99, "high": 1.01},
        "token_mask": {"low": 0.5, "high": 5.0},
        "k3_mask": {"threshold": 0.01},
    }
)
"""The bounds of each correction f(rho) with their defaults: ratios, and nats for `k3_mask`."""

BATCH_ESTIMATORS: Mapping[str, Parameters] = MappingProxyType(
    {
        "gae": {"gamma": 1.0, "gae_lambda": 1.0},
        "reinforce_pp": {"gamma": 1.0},
        "process": {"turn_discount": None},
    }
)
"""Advantage estimators that the trainer runs before its epochs, with their parameters; None: off. The orchestrator runs the others, which need only rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """The defaults of one objective.

    Attributes:
        surrogate: Name of the loss per token, a function in `trainer_svc.objectives.surrogates`.
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

    surrogate: str
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
            surrogate="truncated_importance",
            advantage="centered",
            anchor="behaviour",
            parameters={"delta": 4.0},
            source="arXiv 2505.24034",
        ),
        "grpo": Preset(
            surrogate="clipped_ratio",
            advantage="grpo",
            aggregation="sequence",
            parameters=_CLIP,
            source="arXiv 2402.03300",
        ),
        "dapo": Preset(surrogate="clipped_ratio", advantage="grpo", parameters=_CLIP_HIGHER, source="arXiv 2503.14476"),
        "dr_grpo": Preset(
            surrogate="clipped_ratio",
            advantage="dr_grpo",
            aggregation="constant",
            parameters=_CLIP,
            source="arXiv 2503.20783",
        ),
        "gspo": Preset(
            surrogate="clipped_sequence_ratio",
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
            surrogate="capped_importance",
            advantage="rloo",
            anchor="behaviour",
            parameters={"cap": 2.0},
            source="arXiv 2402.14740",
        ),
        "opo": Preset(
            surrogate="capped_importance",
            advantage="opo",
            anchor="behaviour",
            parameters={"cap": 2.0},
            source="arXiv 2505.23585",
        ),
        "cispo": Preset(
            surrogate="clipped_weight",
            advantage="grpo",
            parameters={"eps_low": 1.0, "eps_high": 4.0},
            source="arXiv 2506.13585",
        ),
        "ppo": Preset(
            surrogate="clipped_ratio",
            advantage="gae",
            parameters=_CLIP,
            other_parameters={"value_clip": 0.5},
            source="arXiv 1707.06347, dual clip 1912.09729",
        ),
        "reinforce_pp": Preset(
            surrogate="clipped_ratio",
            advantage="reinforce_pp",
            parameters=_CLIP,
            kl_coef=0.001,
            kl_kind="k1",
            kl_where="reward",
            source="arXiv 2501.03262",
        ),
        "dppo": Preset(
            surrogate="divergence_masked",
            advantage="centered",
            anchor="behaviour",
            parameters={"low": 0.2, "high": 0.2},
            source="arXiv 2602.04879",
        ),
        "ipo_mask": Preset(
            surrogate="distance_masked",
            advantage="centered",
            anchor="behaviour",
            parameters={"threshold": 0.1},
            source="dppo with a bound that ignores the sign of A",
        ),
        "icepop": Preset(
            surrogate="ratio_masked",
            advantage="centered",
            anchor="behaviour",
            parameters={"low": 0.5, "high": 5.0},
            source="arXiv 2510.18855",
        ),
        "sapo": Preset(
            surrogate="soft_gate",
            advantage="grpo",
            parameters={"tau_pos": 1.0, "tau_neg": 1.05},
            source="arXiv 2511.20347",
        ),
        "m2po": Preset(
            surrogate="clipped_ratio",
            advantage="grpo",
            parameters=_CLIP,
            other_parameters={"tau": 0.04},
            # Tokens are dropped by (log b - log o)^2, which is 0 everywhere in the bypass form.
            proximal="recompute",
            correction="none",
            source="arXiv 2510.01161",
        ),
        "sft": Preset(
            surrogate="negative_log_likelihood",
            advantage="",
            anchor="none",
            source="maximum likelihood on demonstrations",
        ),
        "distill": Preset(
            surrogate="reverse_kl_to_teacher",
            advantage="",
            anchor="none",
            needs_teacher=True,
            source="on-policy distillation, arXiv 2306.13649",
        ),
    }
)


class PresetSettings(Section):
    """The preset, and the parameters of all presets by name. A parameter left out takes its preset's default."""

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
