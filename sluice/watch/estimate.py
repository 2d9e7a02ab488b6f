"""Estimate before a run how many tokens it samples and how long it takes, from its settings and from earlier runs like it."""

from __future__ import annotations

import contextlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from sluice.config import RunConfig
from sluice.run_files import CONFIG_FILE, REPORT_FILE
from sluice.watch.follow import runs_below

_ALIKE = (
    ("model",),
    ("orchestrator", "environment"),
    ("orchestrator", "batch_size"),
    ("orchestrator", "group_size"),
    ("orchestrator", "max_turns"),
    ("orchestrator", "sampling", "max_tokens"),
    ("rollout", "engine"),
)
"""Settings that must be the same in an earlier run, so that its steps take about as long."""


def estimate(config: RunConfig) -> str:
    """Return a sentence about tokens and time, for people."""
    orchestrator: Any = config.section("orchestrator")
    size = orchestrator.batch_size * orchestrator.group_size
    said = f"{orchestrator.max_steps} steps of {size} trajectories"
    if all(each.workflow != "external" for each in orchestrator.mix):  # agents choose their own length
        most = max(each.sampling.max_tokens for each in orchestrator.mix)
        said += f", at most {short(orchestrator.max_steps * size * most)} tokens a turn"
    for directory, seconds, tokens in _runs_alike(config):
        took = timedelta(seconds=round(seconds * orchestrator.max_steps))
        return (
            f"{said}; about {short(tokens * orchestrator.max_steps)} tokens in {took} if its steps are as those of {directory},"
            f" {seconds:.2g} s each"
        )
    return f"{said}; how long that takes is known after a few steps"


def short(count: float) -> str:
    """Return a count with a unit, such as 2.4 M."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"


def _runs_alike(config: RunConfig) -> Iterator[tuple[Path, float, float]]:
    """Yield directory, seconds a step and tokens sampled a step of earlier runs with the same settings, the newest first."""
    wanted = _parts(config.model_dump(mode="json"))
    for directory in reversed(runs_below(config.output_dir)):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            report = json.loads((directory / REPORT_FILE).read_text(encoding="utf-8"))
            settings = tomllib.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
            if _parts(settings) == wanted and report["step_s_mean"]:
                yield directory, float(report["step_s_mean"]), report["tokens_generated"] / max(1, report["steps"])


def _parts(settings: Mapping[str, Any]) -> list[object]:
    """Return the settings that must be the same."""
    found: list[object] = []
    for path in _ALIKE:
        value: Any = settings
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        found.append(value)
    return found
