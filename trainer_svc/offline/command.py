"""What the commands of offline training share: settings, lines of progress, a summary, errors that a user can act on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from sluice.config import ConfigError, check_model, load_command
from trainer_svc.offline.progress import Report, Summary
from trainer_svc.offline.rows import DataError
from trainer_svc.offline.settings import OfflineConfig

if TYPE_CHECKING:
    from trainer_svc.parallel.mesh import Mesh

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


def run_offline(config: OfflineConfig, begin: Callable[[Report, Mesh], Summary], examples: str) -> int:
    """Train, with a line of progress every `log_every` steps and a summary; under torchrun together with the other processes.

    Args:
        config: The settings.
        begin: Imports what trains, and trains.
        examples: What the examples are called, in the plural.

    Raises:
        ConfigError: if the data, the output or the number of processes does not fit.
    """
    import torch.distributed as dist  # noqa: PLC0415  `--help` must not import torch
    from transformers.utils import logging  # noqa: PLC0415

    from trainer_svc.parallel.mesh import join  # noqa: PLC0415

    logging.disable_progress_bar()
    try:
        mesh = join(config.parallel, config.device)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    say = _say if mesh.rank == 0 else _keep
    try:
        summary = begin(lambda told: say(str(told)), mesh)
    except (DataError, FileExistsError) as error:
        raise ConfigError(str(error)) from error
    say(summary.told(examples))
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _keep(_: str) -> None:
    """Another process says it."""
