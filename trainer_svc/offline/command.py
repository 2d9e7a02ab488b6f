"""What the commands of offline training share: settings, lines of progress, a summary, errors that a user can act on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from sluice.config import ConfigError, load_command
from sluice.models import check_files, check_hub, check_model
from trainer_svc.offline.progress import Report, Summary
from trainer_svc.offline.rows import DataError, is_file
from trainer_svc.offline.settings import OfflineConfig
from trainer_svc.start_check import check_compiler, check_sizes

if TYPE_CHECKING:
    from trainer_svc.parallel.mesh import Mesh

__all__ = ["load_offline", "run_offline"]

_Config = TypeVar("_Config", bound=OfflineConfig)


def load_offline(config_class: type[_Config], argv: list[str], command: str) -> _Config:
    """Resolve the settings: flags > files (later wins) > `SLUICE_<COMMAND>__*` > defaults.

    Raises:
        ConfigError: if anything is unknown, malformed or out of range, the model cannot be one, or the data is not there.
        SystemExit: with code 0 after ``--help`` or ``--dry-run`` printed what it prints.
    """
    return load_command(config_class, argv, command, check=_check)


def _check(config: OfflineConfig) -> None:
    """Find what would fail later, before anything is loaded.

    Raises:
        ConfigError: if the model cannot be one, or the data is not there or has no splits.
    """
    for setting, model in _models(config).items():
        check_model(model, setting)
        check_sizes(model, setting, config.parallel)
        check_files(model, setting)
    check_compiler(config)
    for setting, data in (("split", config.data), ("eval_split", config.eval_data)):
        if not data:
            continue
        try:
            from_file = is_file(data)
        except DataError as error:
            raise ConfigError(str(error)) from error
        if from_file and setting in config.model_fields_set:
            raise ConfigError(f"{setting}: {data} is a file, which has no splits: remove {setting}, or name a dataset")


def _models(config: OfflineConfig) -> dict[str, str]:
    """The models that are loaded, by their settings."""
    return {name: getattr(config, name) for name in ("model", "teacher") if hasattr(config, name)}


def run_offline(config: OfflineConfig, begin: Callable[[Report, Mesh], Summary], examples: str) -> int:
    """Train, with a line of progress every `log_every` steps and a summary; under torchrun together with the other processes.

    Args:
        config: The settings.
        begin: Imports what trains, and trains.
        examples: What the examples are called, in the plural.

    Raises:
        ConfigError: if the data, the output or the number of processes does not fit.
    """
    for setting, model in _models(config).items():
        check_hub(model, setting)
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
