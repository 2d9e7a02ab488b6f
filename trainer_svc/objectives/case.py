"""The numbers of one objective as a user writes them down: what `sluice objective` reads. No torch here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sluice.config import ConfigError
from trainer_svc.objectives.config import CorrectionConfig, ObjectiveConfig
from trainer_svc.objectives.presets import PRESETS

__all__ = ["Case", "CaseSequence"]

Column = list[float | None]

_COLUMNS = (
    *("logp", "behaviour_logp", "proximal_logp", "ref_logp", "teacher_logp", "entropy"),
    *("values", "old_values", "returns", "token_rewards", "versions"),
)
_MAY_LACK = ("behaviour_logp", "ref_logp", "teacher_logp")
"""Columns without which a token leaves the loss and is counted, as in training; a gap in any other has no meaning."""


class CaseSequence(BaseModel):
    """One sequence; every list has one number per token, null where there is none.

    Attributes:
        logp: log t.
        behaviour_logp: log b.
        proximal_logp: log o of the decoupled form.
        ref_logp: log of the reference policy.
        teacher_logp: log of a teacher.
        entropy: Entropy of the current policy, a constant here.
        values: V of the current critic.
        old_values: V when the update began; `values` if absent.
        returns: R for the critic; those of gae if absent.
        token_rewards: Rewards per token.
        versions: Policy version that sampled each token, for the log-linear form.
        advantage: A, one for the sequence or one per token; computed from `reward` if absent.
        reward: The episode's reward.
        truncated: Whether its length cut the episode off.
        bootstrap: V of the state after the last token, for gae where truncated.
        mask: Which tokens are in the loss; all of them if absent.
        group_id: Group of episodes of one task.
    """

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    logp: Column = Field(min_length=1)
    behaviour_logp: Column | None = None
    proximal_logp: Column | None = None
    ref_logp: Column | None = None
    teacher_logp: Column | None = None
    entropy: Column | None = None
    values: Column | None = None
    old_values: Column | None = None
    returns: Column | None = None
    token_rewards: Column | None = None
    versions: Column | None = None
    advantage: float | Column | None = None
    reward: float | None = Field(None, allow_inf_nan=False)
    truncated: bool = False
    bootstrap: float | None = Field(None, allow_inf_nan=False)
    mask: list[bool] = Field(default_factory=list)
    group_id: str = ""

    @model_validator(mode="after")
    def _columns_are_equally_long(self) -> Self:
        length = len(self.logp)
        if not self.mask:
            self.mask = [True] * length
        lists = {name: getattr(self, name) for name in ("mask", "advantage", *_COLUMNS)}
        for name, values in lists.items():
            if isinstance(values, list) and len(values) != length:
                raise ValueError(f"{name} has {len(values)} entries and logp {length}: give one per token")
        for name in (each for each in _COLUMNS if each not in _MAY_LACK):
            for value, taken in zip(getattr(self, name) or (), self.mask, strict=False):  # absent columns are empty
                if taken and (value is None or not math.isfinite(value)):
                    said = "null" if value is None else value
                    raise ValueError(
                        f"{name} is {said} at a token whose mask is 1: give a number, or set its mask to 0"
                    )
        return self


class Case(BaseModel):
    """An objective and the sequences of its batch.

    Attributes:
        preset: Row of the table, or an import path.
        params: Its parameters by their names in `[trainer.objective]`; tables nested, or with dotted names.
        sequences: The batch.
        version: The trainer's policy version, for the log-linear form.
    """

    model_config = ConfigDict(extra="forbid")

    preset: str
    params: dict[str, Any] = Field(default_factory=dict)
    sequences: list[CaseSequence] = Field(min_length=1)
    version: float | None = Field(None, allow_inf_nan=False)

    @field_validator("sequences")
    @classmethod
    def _has_a_loss_token(cls, sequences: list[CaseSequence]) -> list[CaseSequence]:
        if not any(any(sequence.mask) for sequence in sequences):
            raise ValueError("no token has mask 1, so there is no loss")
        for name in ("proximal_logp", "values"):
            given = [getattr(sequence, name) is not None for sequence in sequences]
            if any(given) and not all(given):
                raise ValueError(
                    f"{name} is missing in sequences[{given.index(False)}]: give it to all of them or to none"
                )
        return sequences

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a case.

        Raises:
            ConfigError: with what is wrong and where.
        """
        try:
            return cls.model_validate(json.loads(text))
        except (json.JSONDecodeError, RecursionError) as error:
            raise ConfigError(f"the case is no JSON: {error}") from error
        except ValidationError as error:
            raise ConfigError("the case is malformed: " + _explained(error)) from error

    @property
    def gives_advantages(self) -> bool:
        """Whether the advantages are given rather than computed."""
        return all(each.advantage is not None for each in self.sequences)

    @property
    def gives_proximal(self) -> bool:
        """Whether the sequences have a proximal policy of their own."""
        return all(each.proximal_logp is not None for each in self.sequences)

    def objective(self) -> ObjectiveConfig:
        """The objective that it describes.

        `proximal_logp` is what makes it the decoupled form, whose correction is 1 unless the preset or `params` has one.

        Raises:
            ConfigError: with the reason, if the choices do not go together.
        """
        given = _nested(self.params)
        if "preset" in given:
            raise ConfigError("params holds the preset's parameters: write preset beside params")
        if ":" in self.preset:
            own = {name: given.pop(name) for name in list(given) if name not in ObjectiveConfig.model_fields}
            given["params"] = own | given.get("params", {})
        row = PRESETS.get(self.preset)
        if self.gives_proximal and (row is None or row.anchor == "proximal"):
            given.setdefault("proximal", "recompute")
            if given["proximal"] != "bypass" and (row is None or row.correction is None):
                given["correction"] = {"kind": "none", **given.get("correction", {})}
        estimator = given.get("advantage", row.advantage if row else "")
        where = given.get("kl_where", row.kl_where if row else "loss")
        if self.gives_advantages and where == "reward" and estimator in ("gae", "reinforce_pp"):
            given["kl_coef"] = 0.0  # it is in the advantages already
        try:
            return ObjectiveConfig(preset=self.preset, **given)
        except ValidationError as error:
            raise ConfigError(_explained(error)) from error


def _nested(params: Mapping[str, Any]) -> dict[str, Any]:
    """`correction.kind` and the like as nested tables; a bare `correction` names its kind."""
    nested: dict[str, Any] = {}
    for name, value in params.items():
        table, _, key = name.rpartition(".")
        if table:
            nested.setdefault(table, {})[key] = value
        elif name == "correction" and isinstance(value, str):
            nested.setdefault(name, {})["kind"] = value
        elif isinstance(value, Mapping):
            nested.setdefault(name, {}).update(value)
        else:
            nested[name] = value
    return nested


def _explained(error: ValidationError) -> str:
    """Where and what, on one line."""
    parts = []
    for each in error.errors():
        place = ".".join(str(step) for step in each["loc"])
        what = each["msg"].removeprefix("Value error, ")
        if each["type"] == "extra_forbidden":
            what = f"there is no such field; there are {', '.join(_fields_beside(each['loc']))}"
        parts.append(f"{place + ': ' if place else ''}{what}")
    return "; ".join(parts)


def _fields_beside(location: tuple[int | str, ...]) -> list[str]:
    """The names that may stand where an unknown one stood."""
    tables: dict[object, type[BaseModel]] = {"sequences": CaseSequence, "correction": CorrectionConfig}
    if len(location) > 1:
        return list(tables[location[0]].model_fields)
    return sorted({*Case.model_fields, *ObjectiveConfig.model_fields} - {"preset"})
