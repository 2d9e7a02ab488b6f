"""What the commands of offline training share: settings, lines of progress, a summary, errors that a user can act on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

from sluice.config import ConfigError, check_model, load_command
from trainer_svc.offline.progress import Report, Summary
from trainer_svc.offline.rows import DataError
from trainer_svc.offline.settings import OfflineConfig

__all__ = ["load_offline", "run_offline"]

_Config = TypeVar("_Config", bound=OfflineConfig)


def load_offline(config_class: type[_Config], argv: list[str], command: str) -> _Config:
    """Resolve the settings: flags > files (later wins) > `SLUICE_<COMMAND>__*` > defaults.

    Raises:
        ConfigError: if anything is unknown, malformed or out of range, or the model cannot be one.
        SystemExit: with code 0 after ``--help`` or ``--dry-run`` printed what it prints.
    """
    config = load_command(config_class, argv, command)
    check_model(config.model)
    return config


def run_offline(begin: Callable[[Report], Summary], examples: str) -> int:
    """Train, with a line of progress every `log_every` steps and a summary.

    Args:
        begin: Imports what trains, and trains.
        examples: What the examples are called, in the plural.

    Raises:
        ConfigError: if the data or the output cannot be used.
    """
    from transformers.utils import logging  # noqa: PLC0415  `--help` must not import torch

    logging.disable_progress_bar()
    try:
        summary = begin(lambda told: _say(str(told)))
    except (DataError, FileExistsError) as error:
        raise ConfigError(str(error)) from error
    _say(summary.told(examples))
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
