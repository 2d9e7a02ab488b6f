"""Settings that would make a trainer fail at start, found without loading a model. Imports no torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sluice.config import ConfigError
from sluice.models import check_files, check_model, sizes_on_disk
from trainer_svc.parallel.dims import check_fits

if TYPE_CHECKING:
    from trainer_svc.compute_config import ComputeConfig, ParallelConfig

__all__ = ["check_compiler", "check_models", "check_sizes"]

COMPILERS = ("g++", "clang++", "gcc", "clang")
"""Compilers that `torch.compile` looks for."""


def check_models(models: Mapping[str, str], parallel: ParallelConfig) -> None:
    """Refuse models that are not there, or that cannot be shared out as `parallel` says.

    Args:
        models: Directories or hub ids, by their settings; only that of `model` needs a tokenizer.
        parallel: How ranks share a model.

    Raises:
        ConfigError: with the setting and the remedy.
    """
    for setting, model in models.items():
        check_model(model, setting)
        check_sizes(model, setting, parallel)
    for setting, model in models.items():
        check_files(model, setting, tokenizer=setting == "model")


def check_compiler(config: ComputeConfig) -> None:
    """Refuse `compile` without a C++ compiler. CUDA kernels need one too, for the code that calls them.

    Raises:
        ConfigError: if there is no C++ compiler.
    """
    if config.compile and not os.environ.get("CXX") and not any(map(shutil.which, COMPILERS)):
        raise ConfigError(
            f"compile needs a C++ compiler, and none of {', '.join(COMPILERS)} is installed: install one, or set compile to false"
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
