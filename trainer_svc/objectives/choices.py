"""The choices of which an objective consists, with defaults filled in and contradictions refused. No torch here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from trainer_svc.objectives.presets import (
    BATCH_ESTIMATORS,
    CORRECTION_BOUNDS,
    PRESETS,
    Aggregation,
    KlKind,
    KlWhere,
    Parameters,
    Preset,
    Proximal,
)

__all__ = ["Choices"]

_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_PRESET_PARAMETERS = frozenset(name for preset in PRESETS.values() for name in preset.all_parameters)
_ESTIMATOR_PARAMETERS = frozenset(name for taken in BATCH_ESTIMATORS.values() for name in taken)
_BOUNDS = frozenset(name for taken in CORRECTION_BOUNDS.values() for name in taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """One objective, complete.

    Attributes:
        name: The preset's name, or the import path of the surrogate.
        preset: Its row of the table.
        parameters: Keyword arguments of the surrogate.
        beside: Parameters that the preparation of the batch or the critic reads.
        advantage: The advantage estimator that goes with it; "" where there is none.
        estimator: Parameters of that estimator, where the trainer runs it.
        process_scale: Over what `process` is whitened.
        proximal: Where log o comes from.
        correction: Name of f(rho).
        bounds: Its bounds.
        veto: Smallest rho of a token whose sequence is kept; None: off.
        off_policy_mask: Largest mean log b - log t at a negative advantage; None: off.
        kl_coef: Weight of the KL term; 0: none.
        kl_kind: Its estimator.
        kl_where: Whether it is in the loss or in the reward.
        entropy_coef: Weight of the entropy bonus.
        aggregation: How token losses become one number.
        max_tokens: Divisor of aggregation `constant`.
    """

    name: str
    preset: Preset
    parameters: Parameters
    beside: Parameters
    advantage: str
    estimator: Parameters
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
        """Fill in what was not given.

        Args:
            given: Fields of `ObjectiveConfig` that are set.
            correction: Those of its table `correction`.

        Raises:
            ValueError: with the reason and the remedy, if the choices do not go together.
        """
        name = given["preset"]
        preset = _preset(name, given.get("params", {}))
        _refuse_foreign_parameters(name, preset, given)
        advantage = given.get("advantage", preset.advantage)
        proximal, kind = _form(name, preset, given, correction)
        choices = cls(
            name=name,
            preset=preset,
            parameters=_filled(preset.parameters, given),
            beside=_filled(preset.beside, given),
            advantage=advantage,
            estimator=_estimator_parameters(advantage, given),
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
        choices._refuse_contradictions()
        return choices

    @property
    def decoupled(self) -> bool:
        """Whether log o is something else than log b."""
        return self.proximal != "bypass"

    @property
    def runs_estimator(self) -> bool:
        """Whether the trainer itself computes the advantages before its epochs."""
        return self.advantage in BATCH_ESTIMATORS

    @property
    def credits_earlier_tokens(self) -> bool:
        """Whether a token is credited with what later ones earned, so that rewards per token may stand earlier than earned."""
        return self.needs_critic or self.advantage == "reinforce_pp" or self.estimator.get("turn_discount") is not None

    @property
    def needs_critic(self) -> bool:
        """Whether the advantages need values."""
        return self.advantage == "gae"

    @property
    def needs_reference(self) -> bool:
        """Whether reference log-probabilities are read, in the loss or in the reward."""
        return self.kl_coef > 0

    def _refuse_contradictions(self) -> None:
        if self.aggregation == "constant" and self.max_tokens is None:
            raise ValueError("aggregation constant divides by max_tokens: set it to the longest completion, in tokens")
        if self.aggregation != "constant" and self.max_tokens is not None:
            raise ValueError(
                "max_tokens is read by aggregation constant only: remove it or set aggregation to constant"
            )
        for table, what in ((self.parameters, self.name), (self.bounds, f"correction {self.correction}")):
            low, high = table.get("low"), table.get("high")
            if low is not None and high is not None and self.name != "dppo" and low > high:
                raise ValueError(f"{what} keeps ratios between low ({low:g}) and high ({high:g}): swap them")
        if self.kl_coef > 0 and self.kl_where == "reward" and self.advantage not in ("gae", "reinforce_pp"):
            raise ValueError(
                f"kl_where = reward is read by the estimators gae and reinforce_pp, not by {self.advantage or 'none'}: "
                "set advantage to one of them, or kl_where to loss"
            )
        if self.kl_coef > 0 and self.kl_where == "loss" and self.kl_kind == "k1":
            raise ValueError(
                "kl_kind = k1 cannot be a term of the loss: on-policy its expected gradient is zero, so kl_coef would regularise "
                "nothing; set kl_kind to k2 or k3, or kl_where to reward with the estimator gae or reinforce_pp"
            )
        if self.name == "m2po" and self.proximal != "recompute":
            raise ValueError(
                f"m2po selects tokens by (log b - log o)^2 before the first step, where {self.proximal} makes it 0 everywhere: "
                "set proximal to recompute"
            )
        self._refuse_idle_masks()

    def _refuse_idle_masks(self) -> None:
        if self.veto is not None and not (self.decoupled and self.preset.anchor == "proximal"):
            raise ValueError(
                "correction.veto looks at rho = exp(log o - log b), which this form does not have: set proximal to recompute "
                "with a preset whose ratio is t / o, or remove it"
            )
        if self.off_policy_mask is not None and self.preset.anchor == "none":
            raise ValueError(f"{self.name} reads no behaviour policy: remove correction.off_policy_sequence_mask")


def _preset(name: str, params: Mapping[str, Any]) -> Preset:
    if ":" in name:
        if not _IMPORT_PATH.fullmatch(name):
            raise ValueError(f"preset {name!r} is no import path: write package.module:function")
        return Preset(surrogate=name, advantage="centered", parameters=dict(params), source=name)
    if name not in PRESETS:
        raise ValueError(
            f"there is no objective {name!r}; choose one of {', '.join(PRESETS)}, or give your own as package.module:function"
        )
    if params:
        raise ValueError(f"params are for a surrogate of your own; {name} takes them by name: write them beside preset")
    return PRESETS[name]


def _refuse_foreign_parameters(name: str, preset: Preset, given: Mapping[str, Any]) -> None:
    taken = preset.all_parameters if ":" not in name else {}
    for parameter in sorted(_PRESET_PARAMETERS & given.keys()):
        if parameter not in taken:
            where = "put it into params" if ":" in name else "remove it"
            raise ValueError(
                f"objective {name} has no {parameter}; it takes {', '.join(taken) or 'no parameters'}: {where}"
            )
    if given.get("advantage") is not None:
        _check_advantage(name, preset, given["advantage"])


def _check_advantage(name: str, preset: Preset, advantage: str) -> None:
    if not preset.advantage:
        raise ValueError(f"objective {name} reads no advantages: remove advantage")
    if advantage not in BATCH_ESTIMATORS:
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
                f"{name} is read by the estimators {', '.join(readers)}, and the advantage is {advantage or 'none'}: "
                "remove it, or set advantage"
            )
    if given.get("process_scale", "none") != "none" and advantage != "process":
        raise ValueError("process_scale is read by the estimator process: remove it, or set advantage to process")
    return _filled(taken, given)


def _form(name: str, preset: Preset, given: Mapping[str, Any], correction: Mapping[str, Any]) -> tuple[Proximal, str]:
    """Where log o comes from, and the correction that goes with it."""
    kind = correction.get("kind")
    # These bounds are as narrow as bf16 noise and make sense for a recomputed o alone, so they bring it along.
    narrow = kind in ("geometric_mask", "k3_mask") and preset.anchor == "proximal"
    proximal: Proximal = given.get("proximal", "recompute" if narrow else preset.proximal)
    corrects = kind not in (None, "none")
    if proximal == "bypass":
        if corrects and preset.anchor == "behaviour":
            raise ValueError(_counted_twice(name, f"correction.kind = {kind}"))
        if corrects:
            raise ValueError(
                f"correction.kind = {kind} weighs rho = exp(log o - log b), which is 1 in the bypass form: "
                "set proximal to recompute or loglinear, or remove the correction"
            )
        return proximal, "none"
    if preset.anchor == "none":
        raise ValueError(f"objective {name} has no ratio, so proximal = {proximal} would not be read: remove it")
    if preset.anchor == "behaviour":
        raise ValueError(_counted_twice(name, f"proximal = {proximal}"))
    if kind is None and preset.correction is None and ":" not in name:
        raise ValueError(
            f"proximal = {proximal} without a correction silently loses the weight f(rho) of the decoupled loss: set "
            "correction.kind to token_tis, or to none if you mean that"
        )
    return proximal, kind or preset.correction or "none"


def _counted_twice(name: str, what: str) -> str:
    return (
        f"{name} divides by the behaviour policy already, so {what} would correct twice: remove it, or choose a preset "
        "whose ratio is t / o (grpo, dapo, dr_grpo, gspo, cispo, ppo, reinforce_pp, sapo)"
    )


def _bounds(kind: str, correction: Mapping[str, Any]) -> Mapping[str, float]:
    taken = CORRECTION_BOUNDS[kind]
    for name in sorted(_BOUNDS & correction.keys()):
        if name not in taken:
            raise ValueError(
                f"correction {kind} has no {name}; it takes {', '.join(taken) or 'no bounds'}: remove it, or set correction.kind"
            )
    return {name: correction.get(name, default) for name, default in taken.items()}
