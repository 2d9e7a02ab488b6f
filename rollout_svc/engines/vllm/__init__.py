"""The engine that samples with vLLM."""

from __future__ import annotations

import os

from rollout_svc.config import RolloutConfig
from rollout_svc.engines.base import EngineError, InferenceEngine
from rollout_svc.engines.vllm.processes import check_names, lora_arguments
from sluice.config import CommonConfig, ConfigError
from sluice.models import sizes_on_disk

__all__ = ["build", "check"]


def build(model: str, config: RolloutConfig, max_staleness: int) -> InferenceEngine:
    """See `rollout_svc.engines.EnginePackage`."""
    from rollout_svc.engines.vllm.engine import VllmEngine, VllmOptions  # noqa: PLC0415 - only where vLLM is wanted

    if config.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(config.threads)  # vLLM's processes read it when they start
    chosen = {
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.limits.max_running,
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "dtype": None if config.dtype == "auto" else config.dtype,
    }
    given = {name: value for name, value in chosen.items() if value is not None}
    options = VllmOptions(
        engine_args=given | config.engine_args,
        kv_policy=config.kv_policy,
        patch=config.patch_on_device,
        start_deadline_s=config.deadlines.start_s,
        phase_deadline_s=config.deadlines.apply_s,
        drain_deadline_s=config.deadlines.pause_s,
    )
    return VllmEngine(model, options, config.lora.limits(max_staleness))


def check(run: CommonConfig, config: RolloutConfig) -> None:
    """See `rollout_svc.engines.EnginePackage`."""
    lora = config.lora.limits(run.max_staleness)
    try:
        check_names(config.engine_args, set(config.engine_args))
        if lora is not None:
            lora_arguments(lora, on_cpu=False)
    except EngineError as error:
        raise ConfigError(f"rollout: {error}") from error
    sizes, tensor = sizes_on_disk(run.model), config.engine_args.get("tensor_parallel_size", 1)
    if sizes is not None and sizes.heads is not None and sizes.heads % tensor:
        raise ConfigError(
            f"vLLM cannot share the {sizes.heads} attention heads of {run.model} over {tensor} devices: set"
            " rollout.engine_args.tensor_parallel_size, or t of the allocation, to a divisor of it"
        )
