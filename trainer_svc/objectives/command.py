"""`sluice objective --case case.json`: the loss and its gradient for numbers that the user gives. No torch here."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sluice.config import Command, ConfigError, Options
from trainer_svc.objectives.config import CorrectionConfig, ObjectiveConfig
from trainer_svc.objectives.presets import PRESETS

_EXAMPLE = """\
a case:
  {"preset": "grpo", "params": {"eps_high": 0.28, "kl_coef": 0.04},
   "sequences": [{"logp": [-1.0, -0.5], "behaviour_logp": [-1.2, -0.5], "ref_logp": [-1.1, -0.6],
                  "advantage": 1.0, "mask": [1, 1], "group_id": "a"}]}
docs/objectives.md lists presets, parameters and further fields.
"""


def run(argv: list[str]) -> int:
    """Print one JSON object: `loss`, `grad` (d loss / d logp, one list per sequence) and `metrics`."""
    parser = Options(
        prog="sluice objective",
        description="Evaluate an objective on given numbers, in float64, with the code that trains.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--case", required=True, metavar="FILE", help="JSON file with the numbers; - is standard input")
    case = Case.parse(_read(parser.parse_args(argv).case))
    from trainer_svc.objectives.evaluate import evaluate  # noqa: PLC0415  `--help` must not import torch

    try:
        result = evaluate(case)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    try:
        text = json.dumps(result, allow_nan=False)
    except ValueError as error:
        raise ConfigError("the result is not finite: numbers of the case are too large to be added up") from error
    sys.stdout.write(text + "\n")
    return 0


def _read(name: str) -> str:
    if name == "-":
        return sys.stdin.read()
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the case {name}: {error}") from error


COMMAND = Command("objective", "evaluate an objective and its gradient on given numbers", run)

Column = list[float | None]

_COLUMNS = (
    *("logp", "behaviour_logp", "proximal_logp", "ref_logp", "teacher_logp", "entropy"),
    *("values", "old_values", "returns", "token_rewards", "versions"),
)
_MAY_LACK = ("behaviour_logp", "ref_logp", "teacher_logp")
"""A gap in these columns drops the token from the loss, as in training. A gap in any other column is an error."""


class CaseSequence(BaseModel):
    """One sequence. Every list has one entry per token; null: no number.

    Attributes:
        logp: log t.
        behaviour_logp: log b.
        proximal_logp: log o of the decoupled form.
        ref_logp: Log-probability under the reference policy.
        teacher_logp: Log-probability under a teacher.
        entropy: Entropy of the current policy, a constant here.
        values: V of the current critic.
        old_values: V when the update began; `values` if absent.
        returns: R for the critic; those of gae if absent.
        token_rewards: Reward at each token.
        versions: Policy version that sampled each token, for the log-linear form.
        advantage: A, one for the sequence or one per token; computed from `reward` if absent.
        reward: The episode's reward.
        truncated: Whether the length limit ended the episode.
        bootstrap: V of the state after the last token, for gae if truncated.
        mask: Which tokens are in the loss; all of them if absent.
        group_id: Episodes of one task share it.
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
        preset: Row of the table of objectives, or an import path.
        params: Its settings by their names in `[trainer.objective]`; tables are nested or have dotted names.
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
        """Read a case from JSON.

        Raises:
            ConfigError: with the place and the reason.
        """
        try:
            return cls.model_validate(json.loads(text))
        except (json.JSONDecodeError, RecursionError) as error:
            raise ConfigError(f"the case is not JSON: {error}") from error
        except ValidationError as error:
            raise ConfigError("the case is malformed: " + _explained(error)) from error

    @property
    def gives_advantages(self) -> bool:
        """Whether the case gives the advantages; otherwise they are computed."""
        return all(each.advantage is not None for each in self.sequences)

    @property
    def gives_proximal(self) -> bool:
        """Whether the case gives log o."""
        return all(each.proximal_logp is not None for each in self.sequences)

    def objective(self) -> ObjectiveConfig:
        """Return the settings of the case's objective.

        With `proximal_logp` it takes the decoupled form; f(rho) is 1 unless the preset or `params` name a correction.

        Raises:
            ConfigError: with the reason, if settings contradict each other.
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
            given["kl_coef"] = 0.0  # the given advantages contain it already
        try:
            return ObjectiveConfig(preset=self.preset, **given)
        except ValidationError as error:
            raise ConfigError(_explained(error)) from error


def _nested(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with dotted names such as `correction.kind` as nested tables; a bare `correction` names its kind."""
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
    """Return the places and reasons of a validation error on one line."""
    parts = []
    for each in error.errors():
        place = ".".join(str(step) for step in each["loc"])
        what = each["msg"].removeprefix("Value error, ")
        if each["type"] == "extra_forbidden":
            what = f"there is no such field; the fields are {', '.join(_fields_beside(each['loc']))}"
        parts.append(f"{place + ': ' if place else ''}{what}")
    return "; ".join(parts)


def _fields_beside(location: tuple[int | str, ...]) -> list[str]:
    """Return the names that are allowed in place of an unknown one."""
    tables: dict[object, type[BaseModel]] = {"sequences": CaseSequence, "correction": CorrectionConfig}
    if len(location) > 1:
        return list(tables[location[0]].model_fields)
    return sorted({*Case.model_fields, *ObjectiveConfig.model_fields} - {"preset"})
