"""What of a run's settings no replica could start with, known without loading a model. Imports neither torch nor vllm."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from rollout_svc.engines.base import EngineError
from rollout_svc.engines.lora import LoraLimits
from rollout_svc.engines.vllm_args import check_names, lora_arguments
from sluice.config import CommonConfig, ConfigError
from sluice.models import check_model, sizes_on_disk

if TYPE_CHECKING:
    from rollout_svc.config import RolloutConfig

__all__ = ["check_length", "check_replica"]

INSTEAD = {
    "vllm": 'install it (`pip install -e ".[gpu]"`), or set rollout.engine to transformers',
    "transformers": "install it, or set rollout.engine to vllm",
}
"""What to do where an engine's package is missing."""


def check_replica(run: CommonConfig, config: RolloutConfig) -> None:
    """Refuse settings that the engine would fail on while it starts.

    Raises:
        ConfigError: if the model cannot be one or does not fit the engine's sizes, or the engine is not installed.
    """
    check_model(run.model)
    places = config.lora.places(run.max_staleness) if config.lora.enabled else 0
    if importlib.util.find_spec(config.engine) is None:
        raise ConfigError(f"rollout.engine is {config.engine}, which is not installed here: {INSTEAD[config.engine]}")
    if config.engine == "vllm":
        _check_arguments(config, places)
    sizes = sizes_on_disk(run.model)
    if sizes is None:
        return
    tensor = config.engine_args.get("tensor_parallel_size", 1)
    if config.engine == "vllm" and sizes.heads is not None and sizes.heads % tensor:
        raise ConfigError(
            f"vLLM cannot share the {sizes.heads} attention heads of {run.model} over {tensor} devices: set"
            " rollout.engine_args.tensor_parallel_size, or t of the allocation, to a divisor of it"
        )
    if config.engine == "transformers" and config.max_model_len is not None and sizes.positions is not None:
        try:
            check_length(run.model, config.max_model_len, sizes.positions)
        except ValueError as error:
            raise ConfigError(f"rollout.{error}") from error


def _check_arguments(config: RolloutConfig, places: int) -> None:
    """Refuse arguments of vLLM that are ours to set, and ranks that it has no buffers for."""
    try:
        check_names(config.engine_args, set(config.engine_args))
        if places:
            lora_arguments(LoraLimits(places, config.lora.max_rank), on_cpu=False)
    except EngineError as error:
        raise ConfigError(f"rollout: {error}") from error


def check_length(model: str, asked: int, longest: int) -> None:
    """Refuse sequences that are longer than the model was made for.

    Raises:
        ValueError: with the longest.
    """
    if asked > longest:
        raise ValueError(f"max_model_len is {asked}, but {model} was made for {longest} positions: lower it")
