"""One report of an update that made several optimizer steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import replace

from trainer_svc.engine.step_metrics import StepMetrics
from trainer_svc.objectives.objective import finish
from trainer_svc.update.critic import CRITIC

__all__ = ["critic_report", "update_report", "warmup_report"]

FIRST_FORWARD = ("mismatch_kl", "max_abs_log_difference", "effective_sample_size", "chi_square")
"""What says how far the trainer is from the engine: true of the weights that the update began with alone."""


def update_report(epochs: Rows[Rows[StepMetrics]]) -> StepMetrics:
    """The report of a whole update.

    Loss and gradient norm are means over the steps that were applied (over all, if none was), sizes are those of the batch,
    work and seconds are sums. `mismatch_kl` and what goes with it come from the first step that forwarded tokens at all,
    as its forward pass sees the weights that the update began with; where there were several steps, `mismatch_kl_last` is
    that of the last one.

    Args:
        epochs: The steps of each epoch, at least one; sums whose names begin with ``critic/`` are left out.
    """
    steps = [step for epoch in epochs for step in epoch]
    applied = [step for step in steps if not step.skipped] or steps
    began = next((step for step in steps if step.sums.get("gap_tokens")), steps[0])
    first, last = finish(_policy_sums([began])), finish(_policy_sums(steps[-1:]))
    measured = finish(_policy_sums(steps)) | {name: first[name] for name in FIRST_FORWARD if name in first}
    if len(steps) > 1:
        measured |= {f"{name}_last": last[name] for name in ("mismatch_kl",) if name in last}
    return replace(
        steps[0],
        loss=_mean(step.loss for step in applied),
        grad_norm=_mean(step.grad_norm for step in applied),
        learning_rate=steps[-1].learning_rate,
        skipped=all(step.skipped for step in steps),
        sequences=sum(step.sequences for step in epochs[0]),
        tokens=sum(step.tokens for step in epochs[0]),
        loss_tokens=sum(step.loss_tokens for step in epochs[0]),
        forward_tokens=sum(step.forward_tokens for step in steps),
        micro_batches=sum(step.micro_batches for step in steps),
        padding_fraction=_weighted([step.padding_fraction for step in steps], [step.forward_tokens for step in steps]),
        seconds=_summed([step.seconds for step in steps]),
        sums=_policy_sums(steps),
        flops=None if steps[0].flops is None else sum(step.flops or 0.0 for step in steps),
        peak_memory_bytes=max((step.peak_memory_bytes or 0.0 for step in steps), default=None),
        measured=measured
        | {
            "optimizer_steps": float(sum(not step.skipped for step in steps)),
            "skipped_steps": float(sum(step.skipped for step in steps)),
        },
    )


def warmup_report(judged: StepMetrics, critic_steps: Rows[StepMetrics]) -> StepMetrics:
    """The report of an update in which the critic learned alone.

    Gradient norm and learning rate are the policy's, and 0. The batch counts as skipped if all of the critic's steps were.

    Args:
        judged: What a forward pass of the policy said about the batch.
        critic_steps: The critic's steps, at least one.
    """
    report = update_report([[judged]])
    none_made = {"optimizer_steps": 0.0, "skipped_steps": 0.0}
    return replace(
        report, skipped=all(step.skipped for step in critic_steps), measured={**report.measured, **none_made}
    )


def critic_report(steps: Rows[StepMetrics], *, shared: bool) -> dict[str, float]:
    """What is told about the critic's steps.

    Returns:
        `critic/value_loss`, `critic/value_error` (root mean square, in reward units) and `critic/value_clip_fraction`; of a
        critic of its own also `critic/grad_norm`, `critic/learning_rate` and `critic/skipped_steps`.
    """
    sums = _merged([_critic_sums(step) if shared else step.sums for step in steps])
    tokens = sums.get("tokens", 0.0)
    report: dict[str, float] = {}
    if tokens:
        report = {
            "value_loss": sums["loss"] / tokens,
            "value_error": (sums["error"] / tokens) ** 0.5,
            "value_clip_fraction": sums["value_clipped"] / tokens,
        }
    if steps and not shared:
        report |= {
            "grad_norm": _mean(step.grad_norm for step in steps),
            "learning_rate": steps[-1].learning_rate,
            "skipped_steps": float(sum(step.skipped for step in steps)),
        }
    return {CRITIC + name: value for name, value in report.items()}


def _policy_sums(steps: Rows[StepMetrics]) -> dict[str, float]:
    return _merged([{k: v for k, v in step.sums.items() if not k.startswith(CRITIC)} for step in steps])


def _critic_sums(step: StepMetrics) -> dict[str, float]:
    return {name.removeprefix(CRITIC): value for name, value in step.sums.items() if name.startswith(CRITIC)}


def _merged(tables: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sums added up, maxima compared."""
    merged: dict[str, float] = {}
    for table in tables:
        for name, value in table.items():
            before = merged.get(name)
            merged[name] = (
                value if before is None else max(before, value) if name.startswith("max_") else before + value
            )
    return merged


def _summed(tables: Iterable[Mapping[str, float]]) -> dict[str, float]:
    totals: Counter[str] = Counter()
    for table in tables:
        totals.update(table)
    return dict(totals)


def _mean(values: Iterable[float]) -> float:
    given = list(values)
    return sum(given) / len(given)


def _weighted(values: Rows[float], weights: Rows[int]) -> float:
    total = sum(weights)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total if total else 0.0
