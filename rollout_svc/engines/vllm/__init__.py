"""The engine that samples with vLLM: how it is built, and the settings that it refuses before anything is loaded."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any

from rollout_svc.config import LoraLimits, RolloutConfig
from rollout_svc.engines.base import EngineSettingsError, InferenceEngine, ServedTemplate
from sluice.chat_template import template_text
from sluice.config import CommonConfig, ConfigError
from sluice.models import sizes_on_disk

OURS = ("logprobs_mode", "worker_extension_cls", "weight_transfer_config", "disable_log_stats", "model")
"""Arguments that the engine sets itself, since it would not work with other values."""

LORA = ("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank")
"""Arguments that the table `[rollout.lora]` sets."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM can allocate buffers for."""


def build(run: CommonConfig, config: RolloutConfig) -> InferenceEngine:
    """See `EnginePackage`."""
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
        template=ServedTemplate(template_text(run.chat_template), run.chat_template_kwargs),
    )
    return VllmEngine(run.model, options, config.lora.limits(run.max_staleness))


def check(run: CommonConfig, config: RolloutConfig) -> None:
    """See `EnginePackage`."""
    lora = config.lora.limits(run.max_staleness)
    try:
        check_names(config.engine_args, set(config.engine_args))
        if lora is not None:
            lora_arguments(lora, on_cpu=False)
    except EngineSettingsError as error:
        raise ConfigError(f"rollout: {error}") from error
    sizes, tensor = sizes_on_disk(run.model), config.engine_args.get("tensor_parallel_size", 1)
    if sizes is not None and sizes.heads is not None and sizes.heads % tensor:
        raise ConfigError(
            f"vLLM cannot share the {sizes.heads} attention heads of {run.model} over {tensor} devices: set"
            " rollout.engine_args.tensor_parallel_size, or t of the allocation, to a divisor of it"
        )


def check_names(given: Mapping[str, Any], known: set[str]) -> None:
    """Refuse unknown argument names, and those that the engine sets itself.

    Raises:
        EngineSettingsError: with the most similar known name.
    """
    for name in given:
        if name in OURS:
            raise EngineSettingsError(f"engine argument {name!r} is set by the engine itself; remove it")
        if name in LORA:
            raise EngineSettingsError(
                f"engine argument {name!r} comes from the table [rollout.lora]; set enabled = true there"
            )
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise EngineSettingsError(f"vLLM has no engine argument {name!r}{hint}")


def lora_arguments(lora: LoraLimits, *, on_cpu: bool) -> dict[str, Any]:
    """Return the arguments for an engine with adapters.

    Raises:
        EngineSettingsError: if vLLM has no buffers for such a rank.
    """
    rank = next((rank for rank in LORA_RANKS if rank >= lora.max_rank), None)
    if rank is None:
        raise EngineSettingsError(f"rollout.lora.max_rank is {lora.max_rank}; vLLM goes up to {LORA_RANKS[-1]}")
    # On a CPU, vLLM's kernels apply the adapter in the last place to sequences without an adapter. So keep one more place, always empty.
    places = lora.max_loras + 1 if on_cpu else lora.max_loras
    return {"enable_lora": True, "max_loras": places, "max_cpu_loras": places, "max_lora_rank": rank}
