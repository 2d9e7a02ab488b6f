"""`sluice sft @ sft.toml`: fine-tune a model on demonstrations."""

from __future__ import annotations

import os
import sys

from pydantic import ValidationError

from sluice.cli.command import Command
from sluice.config import ConfigError, dump_toml
from sluice.config.flags import parse_command_line
from sluice.config.layers import environment_layer
from sluice.config.merge import deep_merge
from sluice.config.reference import help_text
from trainer_svc.sft_config import SftConfig

__all__ = ["COMMAND", "load_sft"]

ENVIRONMENT_PREFIX = "SLUICE_SFT__"
"""Of the run's variables only these are read: the others belong to the services."""


def load_sft(argv: list[str]) -> SftConfig:
    """Resolve the settings: flags > files (later wins) > `SLUICE_SFT__*` > defaults.

    Raises:
        ConfigError: if anything is unknown, malformed or out of range.
        SystemExit: with code 0 after ``--help`` or ``--dry-run`` printed what it prints.
    """
    line = parse_command_line(SftConfig, argv, None)
    if line.help:
        sys.stdout.write(help_text(SftConfig, None).replace("`sluice rl`", "`sluice sft`"))
        raise SystemExit(0)
    environment = {
        "SLUICE_" + name.removeprefix(ENVIRONMENT_PREFIX): value
        for name, value in os.environ.items()
        if name.startswith(ENVIRONMENT_PREFIX)
    }
    values = environment_layer(SftConfig, environment).data
    for layer in line.files:
        values = deep_merge(values, layer.data)
    try:
        config = SftConfig.model_validate(deep_merge(values, line.flags))
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, each['loc'])) or 'settings'}: {each['msg']}" for each in error.errors())
        raise ConfigError("\n".join(problems)) from error
    if line.dry_run:
        sys.stdout.write(dump_toml(config))
        raise SystemExit(0)
    return config


def run(argv: list[str]) -> int:
    """Train, with a line of progress every `log_every` steps and a summary."""
    config = load_sft(argv)
    from transformers.utils import logging  # noqa: PLC0415  `--help` must not import torch

    from trainer_svc.demonstrations import DataError  # noqa: PLC0415
    from trainer_svc.sft import SftProgress, fine_tune  # noqa: PLC0415

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
