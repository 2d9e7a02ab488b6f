"""The settings `[trainer.objective]`, and the objective that they resolve to. Imports no torch, so that `--help` is quick.

`ObjectiveConfig` holds what the user wrote. `ObjectiveConfig.resolved` fills in the preset's defaults, refuses
combinations that contradict each other, and gives the `ResolvedObjective` that the rest of the trainer reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from sluice.config import Section
from trainer_svc.objectives.presets import (
    BATCH_ESTIMATORS,
    CORRECTIONS,
    PRESETS,
    Aggregation,
    CorrectionKind,
    KlKind,
    KlWhere,
    Parameters,
    Preset,
    Proximal,
)

_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_PRESET_PARAMETERS = frozenset(name for preset in PRESETS.values() for name in preset.all_parameters)
_ESTIMATOR_PARAMETERS = frozenset(name for taken in BATCH_ESTIMATORS.values() for name in taken)
_BOUNDS = frozenset(name for correction in CORRECTIONS.values() for name in correction.bounds)


NARROW_BOUND = 5e-3
"""A clip whose bounds are nearer to 1 than this clips mere bf16 rounding (8 bits of mantissa)."""


class CorrectionConfig(Section):
    """The weight f(rho) of the decoupled form, with rho = proximal / behaviour probability, and masks of whole sequences."""

    kind: CorrectionKind | None = Field(
        None,
        description="Weight of each token in the decoupled form: none (1), token_tis or sequence_tis (rho or its product over the sequence, truncated), "
        "token_mask (rho inside the bounds, else 0), sequence_mask, geometric_mask or k3_mask (1 or 0 for a whole sequence). "
        "Unset: the preset's. Required in a decoupled form if the preset has none.",
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
        None, gt=0, lt=1, description="Drop a sequence that has a token with rho below this, such as 1e-4; unset: off."
    )
    off_policy_sequence_mask: float | None = Field(
        None,
        gt=0,
        description="Drop tokens with a negative advantage in sequences whose mean log b - log t is above this, in nats, such as 0.5; unset: off.",
    )


class ObjectiveConfig(Section):
    """The loss that the trainer minimises. An unset setting takes its preset's default; docs/objectives.md has the table."""

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
    kl_tau: float | None = Field(
        None,
        ge=0,
        description="dppo, ipo_mask, icepop: weight of (log t - log b)^2, which pulls towards the policy that sampled the token, per nat squared; default 0. PRIME-RL has 0.001.",
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
    advantage: str | None = Field(
        None,
        description="Advantage estimator that the trainer runs before its epochs: gae, reinforce_pp or process; unset takes the preset's. "
        "Set `orchestrator.advantage` for estimators that need only rewards.",
    )
    gamma: float | None = Field(None, ge=0, le=1, description="gae, reinforce_pp: discount per token; default 1.")
    gae_lambda: float | None = Field(None, ge=0, le=1, description="gae: weight of longer returns; default 1.")
    turn_discount: float | None = Field(
        None, ge=0, le=1, description="process: discount per turn; unset: a token gets only its own reward."
    )
    process_scale: Literal["none", "group", "batch"] = Field(
        "none", description="process: whiten advantages over the tokens of a group, of the batch, or not at all."
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
        description="Weight of the KL to the reference policy, per nat; needs reference log-probabilities. Unset: the preset's, 0 for most.",
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
        None, ge=1, description="aggregation = constant: tokens per sequence in the divisor."
    )

    _resolved: ResolvedObjective = PrivateAttr()

    @model_validator(mode="after")
    def _resolve(self) -> Self:
        given = self.model_dump(exclude={"correction"}, exclude_none=True)
        self._resolved = ResolvedObjective.of(given, self.correction.model_dump(exclude_none=True))
        return self

    @property
    def resolved(self) -> ResolvedObjective:
        """The objective with the preset's defaults filled in."""
        return self._resolved


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedObjective:
    """One objective, complete and free of contradictions.

    The settings of `ObjectiveConfig` describe the attributes of the same names.

    Attributes:
        name: The preset's name, or the import path of the user's own loss.
        parameters: Keyword arguments of the surrogate.
        other_parameters: Parameters that the term `kl_tau`, the selection of tokens or the critic reads.
        advantage: The advantage estimator; "" if the loss reads no advantages.
        estimator_parameters: Parameters of the estimator, if the trainer runs it.
        correction: Name of f(rho).
        bounds: Bounds of f(rho).
        off_policy_mask: `correction.off_policy_sequence_mask`.
    """

    name: str
    preset: Preset
    parameters: Parameters
    other_parameters: Parameters
    advantage: str
    estimator_parameters: Parameters
    process_scale: str
    proximal: Proximal
    correction: str
    bounds: Mapping[str, float]
    veto: float | None
    off_policy_mask: float | None
    kl_coef: float
    kl_kind: KlKind
    kl_where: KlWhere
    entropy_coef: float
    aggregation: Aggregation
    max_tokens: int | None

    @classmethod
    def of(cls, given: Mapping[str, Any], correction: Mapping[str, Any]) -> Self:
        """Fill in the preset's defaults.

        Args:
            given: The settings that the user set.
            correction: The settings that the user set in the table `correction`.

        Raises:
            ValueError: with the reason and the remedy, if settings contradict each other.
        """
        name = given["preset"]
        preset = _find_preset(name, given.get("params", {}))
        _refuse_foreign_parameters(name, preset, given)
        advantage = given.get("advantage", preset.advantage)
        proximal, kind = _proximal_and_correction(name, preset, given, correction)
        resolved = cls(
            name=name,
            preset=preset,
            parameters=_filled(preset.parameters, given),
            other_parameters=_filled(preset.other_parameters, given),
            advantage=advantage,
            estimator_parameters=_estimator_parameters(advantage, given),
            process_scale=given.get("process_scale", "none"),
            proximal=proximal,
            correction=kind,
            bounds=_bounds(kind, correction),
            veto=correction.get("veto"),
            off_policy_mask=correction.get("off_policy_sequence_mask"),
            kl_coef=given.get("kl_coef", preset.kl_coef),
            kl_kind=given.get("kl_kind", preset.kl_kind),
            kl_where=given.get("kl_where", preset.kl_where),
            entropy_coef=given.get("entropy_coef", 0.0),
            aggregation=given.get("aggregation", preset.aggregation),
            max_tokens=given.get("max_tokens"),
        )
        resolved._refuse_contradictions()
        return resolved

    @property
    def decoupled(self) -> bool:
        """Whether log o differs from log b."""
        return self.proximal != "bypass"

    @property
    def is_own(self) -> bool:
        """Whether the loss is a user's own function, named by its import path."""
        return ":" in self.name

    @property
    def needs_behaviour(self) -> bool:
        """Whether the loss reads behaviour log-probabilities and advantages."""
        return self.preset.anchor != "none"

    @property
    def needs_proximal(self) -> bool:
        """Whether log o must be computed by a forward pass before the first step."""
        return self.proximal == "recompute"

    @property
    def reward_reads_proximal(self) -> bool:
        """Whether the advantages need log o, because the reward contains the KL of o."""
        return self.needs_proximal and self.kl_coef > 0 and self.kl_where == "reward"

    @property
    def has_narrow_bounds(self) -> bool:
        """Whether the ratio is clipped to bounds as narrow as rounding."""
        bounds = [self.parameters.get(name) for name in ("eps_low", "eps_high")]
        return any(bound is not None and bound < NARROW_BOUND for bound in bounds)

    @property
    def needs_reference(self) -> bool:
        """Whether reference log-probabilities are read, by the loss or by the reward."""
        return self.kl_coef > 0

    @property
    def needs_teacher(self) -> bool:
        """Whether a teacher's log-probabilities are read."""
        return self.preset.needs_teacher

    @property
    def needs_critic(self) -> bool:
        """Whether the advantages need a critic's values."""
        return self.advantage == "gae"

    @property
    def loss_kl_coef(self) -> float:
        """Weight of the KL term in the loss; 0 if there is none or it is part of the reward."""
        return self.kl_coef if self.kl_where == "loss" else 0.0

    @property
    def kl_tau(self) -> float:
        """Weight of the term (log t - log b)^2; 0 if there is none."""
        return self.other_parameters.get("kl_tau") or 0.0

    @property
    def runs_estimator(self) -> bool:
        """Whether the trainer computes the advantages, before its epochs."""
        return self.advantage in BATCH_ESTIMATORS

    @property
    def selects_tokens(self) -> bool:
        """Whether tokens are dropped by their distance to the sampler, over the whole batch (m2po)."""
        return "tau" in self.other_parameters

    @property
    def credits_earlier_tokens(self) -> bool:
        """Whether the advantage of a token contains rewards of later tokens."""
        discounts_turns = self.estimator_parameters.get("turn_discount") is not None
        return self.advantage in ("gae", "reinforce_pp") or discounts_turns

    @property
    def vanishes_without_advantage(self) -> bool:
        """Whether tokens with advantage 0 have neither loss nor gradient, so that they need no forward pass."""
        return self.needs_behaviour and not self.is_own and self.loss_kl_coef == 0 and self.entropy_coef == 0

    def dead_clip(self, steps: int) -> str | None:
        """Return a warning with a remedy if the bounds of the ratio t / o have no effect, because t is o whenever a loss is computed.

        A user's own loss may read o for another reason, so it gets no warning.

        Args:
            steps: Optimizer steps that the trainer makes with each batch.
        """
        if self.is_own or not self.needs_proximal or steps > 1:
            return None
        bounds = ", ".join(name for name, value in self.parameters.items() if value is not None)
        remedy = "set trainer.minibatches or trainer.epochs to 2 or more"
        if not (self.selects_tokens or self.has_narrow_bounds):  # bypass is refused for m2po; narrow bounds clip noise
            remedy += ", or proximal to bypass, without a correction, which clips the ratio to the policy that sampled"
        return (
            f"{bounds} of {self.name} have no effect: proximal = recompute compares with the policy before the batch, and the batch"
            f" has one optimizer step, in which the ratio is 1; {remedy}"
        )

    def _refuse_contradictions(self) -> None:
        if self.aggregation == "constant" and self.max_tokens is None:
            raise ValueError("aggregation constant divides by max_tokens: set it to the longest completion, in tokens")
        if self.aggregation != "constant" and self.max_tokens is not None:
            raise ValueError("only aggregation constant has max_tokens: remove it, or set aggregation to constant")
        for table, what in ((self.parameters, self.name), (self.bounds, f"correction {self.correction}")):
            low, high = table.get("low"), table.get("high")
            if low is not None and high is not None and self.name != "dppo" and low > high:
                raise ValueError(f"{what} keeps ratios between low ({low:g}) and high ({high:g}): swap them")
        self._refuse_useless_kl()
        if self.selects_tokens and self.proximal != "recompute":
            raise ValueError(
                f"{self.name} selects tokens by (log b - log o)^2 before the first step, where {self.proximal} makes it 0 everywhere: "
                "set proximal to recompute"
            )
        if self.veto is not None and not (self.decoupled and self.preset.anchor == "proximal"):
            raise ValueError(
                "correction.veto looks at rho = exp(log o - log b), which this form does not have: set proximal to recompute "
                "with a preset whose ratio is t / o, or remove it"
            )
        if self.off_policy_mask is not None and self.preset.anchor == "none":
            raise ValueError(f"{self.name} reads no behaviour policy: remove correction.off_policy_sequence_mask")

    def _refuse_useless_kl(self) -> None:
        if self.kl_coef > 0 and self.kl_where == "reward" and self.advantage not in ("gae", "reinforce_pp"):
            raise ValueError(
                f"kl_where = reward needs the estimator gae or reinforce_pp, and the advantage is {self.advantage or 'none'}: "
                "set advantage to one of them, or kl_where to loss"
            )
        if self.loss_kl_coef > 0 and self.kl_kind == "k1":
            raise ValueError(
                "kl_kind = k1 cannot be a term of the loss: on-policy its expected gradient is zero, so kl_coef would regularise "
                "nothing; set kl_kind to k2 or k3, or kl_where to reward with the estimator gae or reinforce_pp"
            )


def _find_preset(name: str, params: Mapping[str, Any]) -> Preset:
    if ":" in name:
        if not _IMPORT_PATH.fullmatch(name):
            raise ValueError(f"preset {name!r} is not an import path: write package.module:function")
        return Preset(None, "centered", parameters=dict(params))
    if name not in PRESETS:
        raise ValueError(
            f"there is no objective {name!r}; choose one of {', '.join(PRESETS)}, or give your own as package.module:function"
        )
    if params:
        raise ValueError(
            f"params holds the arguments of a loss of your own; write the parameters of {name} beside preset"
        )
    return PRESETS[name]


def _refuse_foreign_parameters(name: str, preset: Preset, given: Mapping[str, Any]) -> None:
    taken = preset.all_parameters if ":" not in name else {}
    for parameter in sorted(_PRESET_PARAMETERS & given.keys()):
        if parameter not in taken:
            remedy = "put it into params" if ":" in name else "remove it"
            raise ValueError(
                f"objective {name} has no {parameter}; it takes {', '.join(taken) or 'no parameters'}: {remedy}"
            )
    advantage = given.get("advantage")
    if advantage is not None and not preset.advantage:
        raise ValueError(f"objective {name} reads no advantages: remove advantage")
    if advantage is not None and advantage not in BATCH_ESTIMATORS:
        raise ValueError(
            f"the trainer runs {', '.join(BATCH_ESTIMATORS)}; {advantage!r} is computed from rewards alone: "
            "set orchestrator.advantage (or the batch's advantage_estimator) to it"
        )


def _filled(defaults: Parameters, given: Mapping[str, Any]) -> Parameters:
    return {name: given.get(name, default) for name, default in defaults.items()}


def _estimator_parameters(advantage: str, given: Mapping[str, Any]) -> Parameters:
    taken = BATCH_ESTIMATORS.get(advantage, {})
    for name in sorted(_ESTIMATOR_PARAMETERS & given.keys()):
        if name not in taken:
            readers = [each for each, names in BATCH_ESTIMATORS.items() if name in names]
            raise ValueError(
                f"{name} is a parameter of {', '.join(readers)}, and the advantage is {advantage or 'none'}: "
                "remove it, or set advantage"
            )
    if given.get("process_scale", "none") != "none" and advantage != "process":
        raise ValueError("only the estimator process has process_scale: remove it, or set advantage to process")
    return _filled(taken, given)


def _proximal_and_correction(
    name: str, preset: Preset, given: Mapping[str, Any], correction: Mapping[str, Any]
) -> tuple[Proximal, str]:
    """Return where log o comes from, and the name of the correction."""
    kind = correction.get("kind")
    # The bounds of these masks are as narrow as bf16 noise. They make sense only for a recomputed o, so these masks imply recomputing.
    narrow = kind in ("geometric_mask", "k3_mask") and preset.anchor == "proximal"
    proximal: Proximal = given.get("proximal", "recompute" if narrow else preset.proximal)
    corrects = kind not in (None, "none")
    if proximal == "bypass":
        if corrects and preset.anchor == "behaviour":
            raise ValueError(_corrected_twice(name, f"correction.kind = {kind}"))
        if corrects:
            raise ValueError(
                f"correction.kind = {kind} weighs rho = exp(log o - log b), which is 1 in the bypass form: "
                "set proximal to recompute or loglinear, or remove the correction"
            )
        return proximal, "none"
    if preset.anchor == "none":
        raise ValueError(f"objective {name} has no ratio, so proximal = {proximal} has no effect: remove it")
    if preset.anchor == "behaviour":
        raise ValueError(_corrected_twice(name, f"proximal = {proximal}"))
    if kind is None and preset.correction is None and ":" not in name:
        raise ValueError(
            f"proximal = {proximal} without a correction silently loses the weight f(rho) of the decoupled loss: set "
            "correction.kind to token_tis, or to none if this is what you want"
        )
    return proximal, kind or preset.correction or "none"


def _corrected_twice(name: str, what: str) -> str:
    ratios = ", ".join(each for each, preset in PRESETS.items() if preset.anchor == "proximal" and each != "m2po")
    return (
        f"{name} already divides by the behaviour policy, so {what} would correct twice: remove it, or choose a preset "
        f"whose ratio is t / o ({ratios})"
    )


def _bounds(kind: str, correction: Mapping[str, Any]) -> Mapping[str, float]:
    taken = CORRECTIONS[kind].bounds
    for name in sorted(_BOUNDS & correction.keys()):
        if name not in taken:
            raise ValueError(
                f"correction {kind} has no {name}; it takes {', '.join(taken) or 'no bounds'}: remove it, or set correction.kind"
            )
    return {name: correction.get(name, default) for name, default in taken.items()}
