"""`sluice distill @ distill.toml`: train a model on a teacher's log-probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.cli.command import Command
from trainer_svc.offline.command import load_offline, run_offline
from trainer_svc.offline.distill_config import DistillConfig
from trainer_svc.offline.progress import Report, Summary

if TYPE_CHECKING:
    from trainer_svc.parallel.mesh import Mesh

__all__ = ["COMMAND", "load_distill"]


def load_distill(argv: list[str]) -> DistillConfig:
    """Resolve the settings; see `load_offline`."""
    return load_offline(DistillConfig, argv, "distill")


def run(argv: list[str]) -> int:
    """Train, with a line of progress every `log_every` steps and a summary."""
    config = load_distill(argv)

    def begin(report: Report, mesh: Mesh) -> Summary:
        from trainer_svc.offline.distill import distill  # noqa: PLC0415  `--help` must not import torch

        return distill(config, report, mesh)

    return run_offline(config, begin, "texts")


COMMAND = Command("distill", "train a model on a teacher's log-probabilities", run)
