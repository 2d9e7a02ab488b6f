"""What of a run's settings no trainer could start with, known without loading a model. Imports no torch."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from sluice.config import CommonConfig, ConfigError
from sluice.importable import importable
from sluice.models import check_files, check_model, sizes_on_disk
from trainer_svc.parallel.fits import check_fits

if TYPE_CHECKING:
    from trainer_svc.compute_config import ComputeConfig, ParallelConfig
    from trainer_svc.config import TrainerConfig

__all__ = ["check_compiler", "check_sizes", "check_trainer"]

COMPILERS = ("g++", "clang++", "gcc", "clang")
"""What `torch.compile` looks for."""


def check_trainer(run: CommonConfig, config: TrainerConfig) -> None:
    """Refuse settings that the trainer would fail on while it loads.

    Raises:
        ConfigError: if a model cannot be one or be shared out as `trainer.parallel` says, or an objective's module is nowhere.
    """
    models = {"model": run.model, **config.models_beside()}
    for setting, model in models.items():
        check_model(model, setting)
        check_sizes(model, setting, config.parallel)
    for setting, model in models.items():
        check_files(model, setting, tokenizer=setting == "model")
    check_compiler(config)
    module, separator, _ = config.objective.preset.partition(":")
    if separator and not importable(module):
        raise ConfigError(
            f"trainer.objective.preset: there is no module {module!r}: install it, or put its directory on PYTHONPATH"
        )


def check_compiler(config: ComputeConfig) -> None:
    """Refuse `compile` where nothing could compile; kernels of CUDA need a compiler for what calls them.

    Raises:
        ConfigError: if there is no C++ compiler.
    """
    if config.compile and not os.environ.get("CXX") and not any(map(shutil.which, COMPILERS)):
        raise ConfigError(
            f"compile makes kernels by a C++ compiler, and there is none ({', '.join(COMPILERS)}): install one, or set compile to false"
        )


def check_sizes(model: str, setting: str, parallel: ParallelConfig) -> None:
    """Refuse a model on disk whose heads or layers cannot be shared out.

    Raises:
        ConfigError: with the sizes that could.
    """
    sizes = sizes_on_disk(model, setting)
    if sizes is None:
        return
    try:
        check_fits(sizes, parallel)
    except ValueError as error:
        raise ConfigError(f"{setting} {model}: {error}") from error
