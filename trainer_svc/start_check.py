"""Settings that would make a trainer fail at start, found without loading a model. Imports no torch."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.config import ConfigError
from sluice.config.allocation import smallest_memory, visible_devices
from sluice.models import check_files, check_model, sizes_on_disk
from trainer_svc.memory import Decoder, estimate
from trainer_svc.parallel.dims import check_fits

if TYPE_CHECKING:
    from trainer_svc.compute_config import ComputeConfig, ParallelConfig

COMPILERS = ("g++", "clang++", "gcc", "clang")
"""Compilers that `torch.compile` looks for."""


def check_models(models: Mapping[str, str], parallel: ParallelConfig) -> None:
    """Refuse models that are missing, or that the axes of `parallel` cannot split.

    Args:
        models: Directories or hub ids by the name of their setting; only `model` needs a tokenizer.
        parallel: How processes share a model.

    Raises:
        ConfigError: with the setting and the remedy.
    """
    for setting, model in models.items():
        check_model(model, setting)
        check_sizes(model, setting, parallel)
    for setting, model in models.items():
        check_files(model, setting, tokenizer=setting == "model")


def check_compiler(config: ComputeConfig) -> None:
    """Refuse `compile` without a C++ compiler. CUDA kernels need one too, for the code that launches them.

    Raises:
        ConfigError: if there is no C++ compiler.
    """
    if config.compile and not os.environ.get("CXX") and not any(map(shutil.which, COMPILERS)):
        raise ConfigError(
            f"compile needs a C++ compiler, and none of {', '.join(COMPILERS)} is installed: install one, or set compile to false"
        )


def check_sizes(model: str, setting: str, parallel: ParallelConfig) -> None:
    """Refuse a model on disk whose heads or layers the axes of `parallel` cannot split.

    Raises:
        ConfigError: with the sizes that work.
    """
    sizes = sizes_on_disk(model, setting)
    if sizes is None:
        return
    try:
        check_fits(sizes, parallel)
    except ValueError as error:
        raise ConfigError(f"{setting} {model}: {error}") from error


def check_memory(
    model: str, config: ComputeConfig, *, frozen: Mapping[str, int] | None = None, critic: str = ""
) -> tuple[str, ...]:
    """Refuse settings with which a training step does not fit in a device's memory.

    Args:
        model: Directory of the model that is trained; a hub id is not checked.
        config: The settings.
        frozen: Directories of the reference and teacher models, each with the bytes of one of its weights.
        critic: Directory of a critic with a model of its own; empty: none.

    Returns:
        A line with the estimate; empty without an estimate.

    Raises:
        ConfigError: with the largest uses and the settings that lower them.
    """
    sizes = _decoder(model)
    if sizes is None:
        return ()
    cuda = config.device == "cuda" or (config.device == "auto" and bool(visible_devices(os.environ)))
    axes = config.parallel
    fixed = axes.dp_replicate * axes.tp * axes.cp * axes.pp
    processes = fixed * axes.dp_shard if axes.dp_shard > 0 else max(fixed, int(os.environ.get("WORLD_SIZE", "1")))
    beside = [(found, width) for name, width in (frozen or {}).items() if (found := _decoder(name)) is not None]
    try:
        held = estimate(
            sizes,
            config,
            device="cuda" if cuda else "cpu",
            processes=processes,
            frozen=beside,
            critic=_decoder(critic) if critic else None,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    capacity = _capacity(config, cuda=cuda)
    if capacity is not None and held.total > capacity:
        raise ConfigError(
            f"a training step is estimated to need {held} on each device, which has {capacity / 2**30:.1f} GiB: lower token_budget, set"
            " gradient_checkpointing or optimizer_offload, train an adapter (lora.rank), or shard the model over more devices"
            " (parallel.dp_shard)"
        )
    return (f"memory of one trainer device, estimated: {held}",)


def _decoder(model: str) -> Decoder | None:
    path = Path(model) / "config.json"
    try:
        return Decoder.of(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
    except (OSError, ValueError):
        return None  # `check_models` reports what is wrong with it


def _capacity(config: ComputeConfig, *, cuda: bool) -> int | None:
    if config.device_memory_gb is not None:
        return int(config.device_memory_gb * 1e9)
    return smallest_memory() if cuda else None
