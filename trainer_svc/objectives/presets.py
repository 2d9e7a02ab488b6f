"""The table of objectives. A new one is a row here, plus at most one surrogate; this module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

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
"""Advantage estimators that the trainer runs before its epochs, with their parameters; all others need rewards alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One objective as independent choices.

    Attributes:
        surrogate: Name of the loss per token in `trainer_svc.objectives.surrogates`.
        advantage: The advantage estimator that it was published with; "" where there is no advantage.
        source: Where it comes from.
        anchor: What its ratio divides by: `proximal` (r = t / o), `behaviour` (q = t / b, which is its own correction), or none.
        aggregation: How token losses become one number.
        parameters: The surrogate's parameters with their defaults; None is off.
        beside: Parameters that are read before or beside the surrogate: by the selection of tokens, or by the critic.
        proximal: Where the proximal policy comes from unless the config says otherwise.
        correction: The correction that goes with a decoupled form unless the config names one; None: it has to.
        kl_coef: Weight of the KL term.
        kl_kind: Its estimator.
        kl_where: Whether it is a term of the loss or of the reward.
        needs_teacher: Whether it reads a teacher's log-probabilities.
    """

    surrogate: str
    advantage: str
    source: str
    anchor: Anchor = "proximal"
    aggregation: Aggregation = "token"
    parameters: Parameters = field(default_factory=dict)
    beside: Parameters = field(default_factory=dict)
    proximal: Proximal = "bypass"
    correction: CorrectionKind | None = None
    kl_coef: float = 0.0
    kl_kind: KlKind = "k3"
    kl_where: KlWhere = "loss"
    needs_teacher: bool = False

    @property
    def needs_behaviour(self) -> bool:
        """Whether it learns from samples of another policy, whose log-probabilities it reads."""
        return self.anchor != "none"

    @property
    def all_parameters(self) -> Parameters:
        """Everything that may be set for it, with the defaults."""
        return {**self.parameters, **self.beside}


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
            # The bounds are as wide as the rounding between a bf16 engine and the trainer: anchored at b they clip noise.
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
            beside={"value_clip": 0.5},
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
            beside={"tau": 0.04},
            # Which tokens go is decided by (log b - log o)^2, which is 0 everywhere in the bypass form.
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
