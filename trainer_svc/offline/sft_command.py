"""`sluice sft @ sft.toml`: fine-tune a model on demonstrations."""

from __future__ import annotations

import sys

from sluice.cli.command import Command
from sluice.config import ConfigError, check_model, load_command
from trainer_svc.offline.sft_config import SftConfig

__all__ = ["COMMAND", "load_sft"]


def load_sft(argv: list[str]) -> SftConfig:
    """Resolve the settings: flags > files (later wins) > `SLUICE_SFT__*` > defaults.

    Raises:
        ConfigError: if anything is unknown, malformed or out of range, or the model cannot be one.
        SystemExit: with code 0 after ``--help`` or ``--dry-run`` printed what it prints.
    """
    config = load_command(SftConfig, argv, "sft")
    check_model(config.model)
    return config


def run(argv: list[str]) -> int:
    """Train, with a line of progress every `log_every` steps and a summary."""
    config = load_sft(argv)
    from transformers.utils import logging  # noqa: PLC0415  `--help` must not import torch

    from trainer_svc.offline.demonstrations import DataError  # noqa: PLC0415
    from trainer_svc.offline.sft import SftProgress, fine_tune  # noqa: PLC0415

    logging.disable_progress_bar()

    def report(progress: SftProgress) -> None:
        skipped = f"  skipped {progress.skipped}" if progress.skipped else ""
        _say(
            f"step {progress.step:>{len(str(progress.steps))}}/{progress.steps}  loss {progress.loss:.4f}  "
            f"lr {progress.learning_rate:.2e}  {progress.tokens_per_s:,.0f} tokens/s{skipped}"
        )

    try:
        summary = fine_tune(config, report)
    except (DataError, FileExistsError) as error:
        raise ConfigError(str(error)) from error
    dropped = f" ({summary.dropped_long} more were too long)" if summary.dropped_long else ""
    _say(
        f"{summary.output}: {summary.steps} steps on {summary.demonstrations} demonstrations{dropped}, "
        f"{summary.tokens:,} tokens ({summary.learned_tokens:,} learned) in {summary.train_s:.1f} s = "
        f"{summary.tokens / summary.train_s:,.0f} tokens/s, final loss {summary.final_loss:.4f}"
    )
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


COMMAND = Command("sft", "fine-tune a model on demonstrations", run)
