"""``report.json``: a run in a few numbers, folded from its metrics, so that it also covers earlier processes of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["build_report", "read_metrics"]

_STALENESS_PREFIX = "staleness/tokens_at_"


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """Metrics by step; of a step that was trained again after a rollback the last word counts."""
    steps: dict[int, dict[str, float]] = {}
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # the torn last line of a process that was killed
            step = int(row.pop("step"))
            values = {name: value for name, value in row.items() if value is not None}
            if "reward/mean" in values:
                steps[step] = {**_evaluations(steps.get(step, {})), **values}
            else:
                steps.setdefault(step, {}).update(values)
    return steps


def build_report(steps: Mapping[int, Mapping[str, float]], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The report of a run.

    Args:
        steps: Metrics by step.
        facts: What the metrics do not know: run, seed, state, steps, wall_s, counts of trajectories.
    """
    trained = {step: values for step, values in sorted(steps.items()) if 0 < step <= int(facts["steps"])}
    ages: dict[int, float] = {}
    for values in trained.values():
        for name, tokens in values.items():
            if name.startswith(_STALENESS_PREFIX):
                age = int(name.removeprefix(_STALENESS_PREFIX))
                ages[age] = ages.get(age, 0.0) + tokens
    tokens = sum(ages.values())
    return {
        **facts,
        "tokens_trained": round(_sum(trained, "tokens/trained")),
        "max_staleness_seen": max((age for age, count in ages.items() if count), default=0),
        "staleness_share_ge_1": sum(count for age, count in ages.items() if age >= 1) / tokens if tokens else 0.0,
        "staleness_tokens": {str(age): round(count) for age, count in sorted(ages.items())},
        "mismatch_kl_mean": _mean(trained, "trainer/mismatch_kl"),
        "step_s_mean": _mean(trained, "time/step_s"),
        "trainer_idle_share": _mean(trained, "load/trainer_idle"),
        "rollout_idle_share": _mean(trained, "load/rollout_idle"),
        "dispatch_blocked_share": _mean(trained, "load/dispatch_blocked"),
        "reward_curve": [[step, values["reward/mean"]] for step, values in trained.items() if "reward/mean" in values],
        "evaluations": [
            {"step": step, **_evaluations(values)} for step, values in sorted(steps.items()) if _evaluations(values)
        ],
    }


def _evaluations(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if name.startswith("eval/")}


def _sum(steps: Mapping[int, Mapping[str, float]], name: str) -> float:
    return sum(values.get(name, 0.0) for values in steps.values())


def _mean(steps: Mapping[int, Mapping[str, float]], name: str) -> float | None:
    found = [values[name] for values in steps.values() if name in values]
    return sum(found) / len(found) if found else None
