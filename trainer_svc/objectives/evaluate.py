"""Evaluate a `Case` with the code that trains: the same rows, terms, factors and divisor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from sluice.advantages import Episode, estimate
from trainer_svc.batch.rows import MicroBatch, Outputs, Sequence, pack
from trainer_svc.objectives.advantages import clipped_value_loss, with_advantages
from trainer_svc.objectives.command import Case, CaseSequence, Column
from trainer_svc.objectives.objective import (
    Objective,
    finish,
    keep_trainable,
    with_group_tokens,
    with_proximal_share,
    with_selection,
)


def evaluate(case: Case) -> dict[str, Any]:
    """Return loss, gradient and metrics of a case, in float64.

    Returns:
        `loss`; `grad`: d loss / d logp, one list per sequence; `metrics`: numbers by name; `advantages` if they were computed;
        `value_loss` and `value_grad` (shaped like `grad`) if there are values and returns.

    Raises:
        ValueError: if the case lacks what its objective reads.
    """
    objective = Objective.of(case.objective())
    kept, dropped = keep_trainable(_rows(case, objective), objective.resolved)
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
    if objective.resolved.needs_entropy and not has_entropy:
        raise ValueError("entropy_coef is above 0: give every sequence its entropy, one number per token")
    outputs = Outputs(_packed(logp, batch), _packed(entropy, batch) if has_entropy else None)
    summed, sums = objective.loss(outputs, batch)
    loss = summed / weight
    gradients = torch.autograd.grad(loss, logp, allow_unused=True, materialize_grads=True)
    result: dict[str, Any] = {
        "loss": loss.item(),
        "grad": [gradient.tolist() for gradient in gradients],
        "metrics": finish({name: float(value) for name, value in sums.items()})
        | {"loss_tokens": float(sum(int(each.loss_mask.sum()) for each in kept)), "divisor": weight}
        | {f"dropped_tokens/{cause}": float(count) for cause, count in dropped.items()},
    }
    if objective.resolved.needs_behaviour and not case.gives_advantages:
        result["advantages"] = [each.advantages[1:].tolist() for each in kept]
    return result | _value_loss(case, objective, kept)


def _rows(case: Case, objective: Objective) -> list[Sequence]:
    """Return the sequences as the trainer receives them, with advantages that need only rewards."""
    rows = [_row(each, index, objective) for index, each in enumerate(case.sequences)]
    settings = objective.resolved
    if objective.resolved.needs_behaviour and not case.gives_advantages and not settings.runs_estimator:
        return _estimated(case, rows, settings.advantage)
    return rows


def _prepared(case: Case, objective: Objective, rows: list[Sequence]) -> list[Sequence]:
    """Return the rows with the facts about the whole batch, computed over the trainable tokens, as in the trainer."""
    settings = objective.resolved
    if settings.proximal == "loglinear":
        if case.version is None or any(each.versions is None for each in case.sequences):
            raise ValueError("proximal = loglinear needs version, and versions in every sequence")
        pairs = zip(case.sequences, rows, strict=True)
        ages = [case.version - _column(each.versions)[row.loss_mask[1:]] for each, row in pairs]
        rows = with_proximal_share(rows, ages)
    if objective.resolved.needs_behaviour and not case.gives_advantages and settings.runs_estimator:
        bootstraps = [each.bootstrap for each in case.sequences]
        known = [value for value in bootstraps if value is not None]
        rows = with_advantages(rows, settings, bootstraps=known if len(known) == len(rows) else None)
    return with_selection(rows, settings) if settings.selects_tokens else rows


def _row(case: CaseSequence, index: int, objective: Objective) -> Sequence:
    """Return a training row. It has one token more, before the first one, because something must predict that."""
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
    return Sequence(
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


def _estimated(case: Case, rows: list[Sequence], estimator: str) -> list[Sequence]:
    if any(each.reward is None for each in case.sequences):
        raise ValueError("give every sequence an advantage, or every one a reward to compute it from")
    episodes = [Episode(row.episode_id, row.group_id, row.reward, int(row.loss_mask.sum())) for row in rows]
    values = estimate(estimator, episodes).by_episode
    return [replace(row, advantages=torch.full_like(row.advantages, values[row.episode_id])) for row in rows]


def _value_loss(case: Case, objective: Objective, rows: list[Sequence]) -> dict[str, Any]:
    """Return the critic's loss as a mean over the loss tokens, if the case has what it reads."""
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
