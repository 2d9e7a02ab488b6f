"""A case of `sluice objective`, and its evaluation with the code that trains: the same rows, terms, factors and divisor."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sluice.advantages import Episode, estimate
from sluice.config import ConfigError
from trainer_svc.batch.rows import MicroBatch, Outputs, TrainingRow, pack
from trainer_svc.objectives.advantages import clipped_value_loss, with_advantages
from trainer_svc.objectives.config import CorrectionConfig, ObjectiveConfig
from trainer_svc.objectives.objective import (
    Objective,
    finish,
    keep_trainable,
    with_group_tokens,
    with_proximal_share,
    with_selection,
)
from trainer_svc.objectives.presets import PRESETS

Column = list[float | None]

_COLUMNS = (
    *("logp", "behaviour_logp", "proximal_logp", "ref_logp", "teacher_logp", "entropy"),
    *("values", "old_values", "returns", "token_rewards", "versions"),
)
_MAY_LACK = ("behaviour_logp", "ref_logp", "teacher_logp")
"""In these columns a missing number drops the token from the loss, as in training. In any other column it is an error."""


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
    """Return the names that are allowed where an unknown name was given."""
    tables: dict[object, type[BaseModel]] = {"sequences": CaseSequence, "correction": CorrectionConfig}
    if len(location) > 1:
        return list(tables[location[0]].model_fields)
    return sorted({*Case.model_fields, *ObjectiveConfig.model_fields} - {"preset"})


# Evaluation.


def evaluate(case: Case) -> dict[str, Any]:
    """Return loss, gradient and metrics of a case, in float64.

    Returns:
        `loss`; `grad`: d loss / d logp, one list per sequence; `metrics`: numbers by name; `advantages` if they were computed;
        `value_loss` and `value_grad` (shaped like `grad`) if there are values and returns.

    Raises:
        ValueError: if the case lacks numbers that its objective reads.
    """
    objective = Objective.of(case.objective())
    settings = objective.resolved
    kept, dropped = keep_trainable(_rows(case, objective), settings)
    kept = with_group_tokens(kept)
    weight = objective.weight(kept)
    if weight == 0:
        causes = " or ".join(cause.removesuffix("_not_finite") for cause in dropped)
        raise ValueError(f"no loss token is left: {causes} is missing or not finite at all of them")
    kept = _prepared(case, objective, kept)
    logp = [_column(each.logp).nan_to_num().requires_grad_() for each in case.sequences]
    entropy = [_column(each.entropy) for each in case.sequences]
    (batch,) = pack(kept, token_budget=1 << 40, fold=False)
    has_entropy = all(each.entropy is not None for each in case.sequences)
    if settings.entropy_coef > 0 and not has_entropy:
        raise ValueError("entropy_coef is above 0: give every sequence its entropy, one number per token")
    outputs = Outputs(_packed(logp, batch), _packed(entropy, batch) if has_entropy else None)
    summed, sums = objective.loss(outputs, batch)
    loss = summed / weight
    gradients = torch.autograd.grad(loss, logp, allow_unused=True, materialize_grads=True)
    result: dict[str, Any] = {
        "loss": loss.item(),
        "grad": [gradient.tolist() for gradient in gradients],
        "metrics": finish({name: float(value) for name, value in sums.items()})
        | {"loss_tokens": float(sum(each.loss_tokens for each in kept)), "divisor": weight}
        | {f"dropped_tokens/{cause}": float(count) for cause, count in dropped.items()},
    }
    if settings.needs_behaviour and not case.gives_advantages:
        result["advantages"] = [each.advantages[1:].tolist() for each in kept]
    return result | _value_loss(case, objective, kept)


def _rows(case: Case, objective: Objective) -> list[TrainingRow]:
    """Return the sequences as the trainer receives them: advantages that need only rewards are computed already."""
    rows = [_row(each, index, objective) for index, each in enumerate(case.sequences)]
    settings = objective.resolved
    if settings.needs_behaviour and not case.gives_advantages and not settings.runs_estimator:
        return _estimated(case, rows, settings.advantage)
    return rows


def _prepared(case: Case, objective: Objective, rows: list[TrainingRow]) -> list[TrainingRow]:
    """Return the rows with columns that depend on the whole batch, computed over the trainable tokens as in the trainer."""
    settings = objective.resolved
    if settings.proximal == "loglinear":
        if case.version is None or any(each.versions is None for each in case.sequences):
            raise ValueError("proximal = loglinear needs version, and versions in every sequence")
        pairs = zip(case.sequences, rows, strict=True)
        ages = [case.version - _column(each.versions)[row.loss_mask[1:]] for each, row in pairs]
        rows = with_proximal_share(rows, ages)
    if settings.needs_behaviour and not case.gives_advantages and settings.runs_estimator:
        bootstraps = [each.bootstrap for each in case.sequences]
        known = [value for value in bootstraps if value is not None]
        rows = with_advantages(rows, settings, bootstraps=known if len(known) == len(rows) else None)
    return with_selection(rows, settings) if settings.selects_tokens else rows


def _row(case: CaseSequence, index: int, objective: Objective) -> TrainingRow:
    """Return a training row. It has one additional token at the start, because a token must predict the first one."""
    if objective.resolved.needs_behaviour and case.behaviour_logp is None:
        raise ValueError(f"sequences[{index}] has no behaviour_logp, which {objective.resolved.name} reads: add it")
    proximal = case.proximal_logp
    if objective.resolved.needs_proximal and proximal is None:
        if objective.resolved.preset.proximal == "bypass":
            raise ValueError(f"sequences[{index}] has no proximal_logp, which the decoupled form reads: add it")
        proximal = case.behaviour_logp  # the bypass form of a preset that is decoupled by default
    advantage: Column = case.advantage if isinstance(case.advantage, list) else [case.advantage or 0.0] * len(case.logp)
    critic = case.old_values or case.values
    optional = {
        "proximal_logprobs": proximal,
        "reference_logprobs": case.ref_logp,
        "teacher_logprobs": case.teacher_logp,
        "values": critic,
        "returns": case.returns,
        "token_rewards": case.token_rewards,
    }
    return TrainingRow(
        input_ids=torch.zeros(len(case.logp) + 1, dtype=torch.int64),
        loss_mask=torch.tensor([False, *case.mask]),
        behaviour_logprobs=_shifted(case.behaviour_logp or case.logp),
        advantages=_shifted(advantage),
        **{name: _shifted(column) for name, column in optional.items() if column is not None},
        reward=case.reward,
        truncated=case.truncated,
        group_id=case.group_id,
        episode_id=str(index),
        trajectory_id=f"sequences[{index}]",
    )


def _estimated(case: Case, rows: list[TrainingRow], estimator: str) -> list[TrainingRow]:
    if any(each.reward is None for each in case.sequences):
        raise ValueError("give every sequence an advantage, or every one a reward to compute it from")
    episodes = [Episode(row.episode_id, row.group_id, row.reward, row.loss_tokens) for row in rows]
    values = estimate(estimator, episodes)
    return [replace(row, advantages=torch.full_like(row.advantages, values[row.episode_id])) for row in rows]


def _value_loss(case: Case, objective: Objective, rows: list[TrainingRow]) -> dict[str, Any]:
    """Return the critic's loss as a mean over the loss tokens, if the case has values and returns."""
    if not all(each.values is not None for each in case.sequences) or not all(row.returns is not None for row in rows):
        return {}
    masks = [row.loss_mask[1:] for row in rows]
    values = [_column(each.values).nan_to_num().requires_grad_() for each in case.sequences]
    old = [row.values[1:] for row in rows if row.values is not None]
    returns = [row.returns[1:] for row in rows if row.returns is not None]

    def at(columns: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([column[mask] for column, mask in zip(columns, masks, strict=True)])

    clip = objective.resolved.other_parameters.get("value_clip")
    losses, _ = clipped_value_loss(at(values), at(old), at(returns), value_clip=clip)
    loss = losses.mean()
    gradients = torch.autograd.grad(loss, values, allow_unused=True, materialize_grads=True)
    return {"value_loss": loss.item(), "value_grad": [gradient.tolist() for gradient in gradients]}


def _column(values: Column | None) -> torch.Tensor:
    return torch.tensor([torch.nan if value is None else value for value in values or []], dtype=torch.float64)


def _shifted(values: Column) -> torch.Tensor:
    return torch.cat([torch.full((1,), torch.nan, dtype=torch.float64), _column(values)])


def _packed(columns: list[torch.Tensor], batch: MicroBatch) -> torch.Tensor:
    """Return the values of the loss tokens in the order of the micro-batch."""
    return torch.cat(
        [columns[index][row.loss_mask[1:]] for index, row in zip(batch.order, batch.sequences, strict=True)]
    )
