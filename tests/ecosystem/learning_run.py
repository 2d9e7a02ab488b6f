"""A small run that learns within a minute, for clusters that do things to it: its flags, and whether it learned as if nothing had been done."""

from __future__ import annotations

import json
from pathlib import Path

from sluice.cli.init_model import ModelShape, init_model

STEPS = 100
COMPARED = 30
"""Last steps whose mean reward is compared."""

LEARNED, NOISE = 0.15, 0.05
"""That mean of a run without faults, which begins at 0.06, and most difference to it: its standard deviation between runs is below 0.02."""

FLAGS = (
    *("--rollout.engine", "transformers", "--orchestrator.batch-size", "4", "--orchestrator.group-size", "8"),
    *("--orchestrator.max-steps", str(STEPS), "--orchestrator.checkpoint.every-steps", "10"),
    *("--orchestrator.sampling.max-tokens", "8", "--trainer.lr", "3e-3"),
)


def settings(model: Path, output_dir: Path, name: str) -> tuple[str, ...]:
    """The words of its settings, from the root of the repository."""
    words = ("@", "examples/reverse_text/rl.toml", "--model", str(model), "--output-dir", str(output_dir))
    return (*words, "--run", name, *FLAGS)


def make_model(directory: Path) -> Path:
    """The model that it starts from."""
    init_model(directory, ModelShape(layers=1))
    return directory


def learned(directory: Path) -> float:
    """Assert that faults did not change what the run in a directory learned; return the mean reward of its last steps."""
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    by_step = {line["step"]: line["reward/mean"] for line in lines if "reward/mean" in line}
    last = [by_step[step] for step in sorted(by_step)[-COMPARED:]]
    reward = sum(last) / len(last)
    assert abs(reward - LEARNED) < NOISE
    return reward
