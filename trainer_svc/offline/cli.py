"""The commands of offline training: `sluice sft`, `dpo`, `reward-model`, `distill`. Imports no torch before training begins."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from sluice.config import Command, ConfigError, load_command
from sluice.models import check_files, check_hub, check_model
from trainer_svc.offline.config import DistillConfig, DpoConfig, OfflineConfig, RewardModelConfig, SftConfig
from trainer_svc.offline.rows import DataError, is_file
from trainer_svc.start_check import check_compiler, check_sizes

__all__ = ["DISTILL", "DPO", "REWARD_MODEL", "SFT", "load_offline"]

_Config = TypeVar("_Config", bound=OfflineConfig)


def load_offline(config_class: type[_Config], argv: list[str], command: str) -> _Config:
    """Resolve the settings: flags > files (later wins) > `SLUICE_<COMMAND>__*` > defaults.

    Raises:
        ConfigError: if anything is unknown, malformed or out of range, the model cannot be one, or the data is not there.
        SystemExit: with code 0 after ``--help`` or ``--dry-run`` printed what it prints.
    """
    return load_command(config_class, argv, command, check=_check)


def _run(config_class: type[OfflineConfig], command: str, examples: str, argv: list[str]) -> int:
    """Train: print a line of progress every `log_every` steps and a summary. Under torchrun, rank 0 prints.

    Args:
        config_class: The command's settings.
        command: Its name.
        examples: What the examples are called, in the plural.
        argv: The words after the command's name.

    Raises:
        ConfigError: if the data, the output, a checkpoint or the number of processes does not fit.
    """
    config = load_offline(config_class, argv, command)
    for setting, model in _models(config).items():
        check_hub(model, setting)
    import torch.distributed as dist  # noqa: PLC0415  `--help` must not import torch
    from transformers.utils import logging  # noqa: PLC0415

    from trainer_svc.offline.checkpoints import FinishedError, remove_checkpoints  # noqa: PLC0415
    from trainer_svc.offline.runs import run  # noqa: PLC0415
    from trainer_svc.parallel.mesh import join  # noqa: PLC0415

    logging.disable_progress_bar()
    try:
        mesh = join(config.parallel, config.device)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    say: Callable[[object], None] = _print if mesh.rank == 0 else _discard
    try:
        say(run(config, say, mesh).told(examples))
    except FinishedError as finished:
        if dist.is_initialized():
            dist.barrier()  # every rank has looked at the directories
        if mesh.rank == 0:
            remove_checkpoints(config.output)
        say(finished)
    except (DataError, FileExistsError) as error:
        raise ConfigError(str(error)) from error
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


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
    """Return the models that are loaded, by their settings."""
    return {name: getattr(config, name) for name in ("model", "teacher") if hasattr(config, name)}


def _print(line: object) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _discard(_: object) -> None:
    """Print nothing: rank 0 prints."""


SFT = Command("sft", "fine-tune a model on demonstrations", partial(_run, SftConfig, "sft", "demonstrations"))
DPO = Command("dpo", "train a model on preferences", partial(_run, DpoConfig, "dpo", "pairs"))
REWARD_MODEL = Command(
    "reward-model", "train a reward model on preferences", partial(_run, RewardModelConfig, "reward-model", "pairs")
)
DISTILL = Command(
    "distill", "train a model on a teacher's log-probabilities", partial(_run, DistillConfig, "distill", "texts")
)
