"""`sluice sft @ sft.toml`: fine-tune a model on demonstrations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.cli.command import Command
from trainer_svc.offline.command import load_offline, run_offline
from trainer_svc.offline.progress import Report, Summary
from trainer_svc.offline.sft_config import SftConfig

if TYPE_CHECKING:
    from trainer_svc.parallel.mesh import Mesh

__all__ = ["COMMAND", "load_sft"]


def load_sft(argv: list[str]) -> SftConfig:
    """Resolve the settings; see `load_offline`."""
    return load_offline(SftConfig, argv, "sft")


def run(argv: list[str]) -> int:
    """Train, with a line of progress every `log_every` steps and a summary."""
    config = load_sft(argv)

    def begin(report: Report, mesh: Mesh) -> Summary:
        from trainer_svc.offline.sft import fine_tune  # noqa: PLC0415  `--help` must not import torch

        return fine_tune(config, report, mesh)

    return run_offline(config, begin, "demonstrations")


COMMAND = Command("sft", "fine-tune a model on demonstrations", run)
