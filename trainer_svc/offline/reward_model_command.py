"""`sluice reward-model @ reward_model.toml`: train a reward model on preferences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.cli.command import Command
from trainer_svc.offline.command import load_offline, run_offline
from trainer_svc.offline.progress import Report, Summary
from trainer_svc.offline.reward_model_config import RewardModelConfig

if TYPE_CHECKING:
    from trainer_svc.parallel.mesh import Mesh

__all__ = ["COMMAND", "load_reward_model"]


def load_reward_model(argv: list[str]) -> RewardModelConfig:
    """Resolve the settings; see `load_offline`."""
    return load_offline(RewardModelConfig, argv, "reward-model")


def run(argv: list[str]) -> int:
    """Train, with a line of progress every `log_every` steps and a summary."""
    config = load_reward_model(argv)

    def begin(report: Report, mesh: Mesh) -> Summary:
        from trainer_svc.offline.reward_model import train_scorer  # noqa: PLC0415  `--help` must not import torch

        return train_scorer(config, report, mesh)

    return run_offline(config, begin, "pairs")


COMMAND = Command("reward-model", "train a reward model on preferences", run)
