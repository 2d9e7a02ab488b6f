"""`sluice dpo @ dpo.toml`: train a model on preferences (DPO, IPO)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.cli.command import Command
from trainer_svc.offline.command import load_offline, run_offline
from trainer_svc.offline.dpo_config import DpoConfig
from trainer_svc.offline.progress import Report, Summary

if TYPE_CHECKING:
    from trainer_svc.parallel.mesh import Mesh

__all__ = ["COMMAND", "load_dpo"]


def load_dpo(argv: list[str]) -> DpoConfig:
    """Resolve the settings; see `load_offline`."""
    return load_offline(DpoConfig, argv, "dpo")


def run(argv: list[str]) -> int:
    """Train, with a line of progress every `log_every` steps and a summary."""
    config = load_dpo(argv)

    def begin(report: Report, mesh: Mesh) -> Summary:
        from trainer_svc.offline.dpo import prefer  # noqa: PLC0415  `--help` must not import torch

        return prefer(config, report, mesh)

    return run_offline(config, begin, "pairs")


COMMAND = Command("dpo", "train a model on preferences (DPO, IPO)", run)
