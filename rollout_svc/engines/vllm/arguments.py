"""The arguments and environment variables of vLLM: the user's, and our defaults for the others."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, MutableMapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from rollout_svc.engines.adapters import LoraLimits
from rollout_svc.engines.base import EngineError
from weightsync.vllm_plugin import BACKEND, WORKER_EXTENSION

__all__ = [
    "TESTED_VERSIONS",
    "engine_arguments",
    "has_accelerator",
    "prepare_environment",
    "require_tested_version",
    "workers_of",
]

TESTED_VERSIONS = ("0.32.0",)
"""vLLM releases whose internals (see `requests`) and weight-transfer interface were tested."""

CPU_KV_CACHE_BYTES = 256 << 20
"""Default size of the KV cache on a CPU: 65,000 tokens of a 2.4 M model. vLLM's own default is a fraction of all memory."""

CPU_MAX_NUM_SEQS = 256
"""Default number of sequences in one step on a CPU. 64 already reach 72-96% of the throughput of 256."""

OURS = ("logprobs_mode", "worker_extension_cls", "weight_transfer_config", "disable_log_stats", "model")
"""Arguments that the engine sets itself, since it would not work with other values."""

LORA = ("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank")
"""Arguments that the table `[rollout.lora]` sets."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM can allocate buffers for."""


def prepare_environment(environment: MutableMapping[str, str], *, workers: int) -> None:
    """Set the environment variables that vLLM reads. Call this before its import. Values of the user are kept.

    Args:
        environment: Normally ``os.environ``.
        workers: Tensor times pipeline parallel size: with one worker on CPU it lives in the engine's process, which saves
            the time of one more start.
    """
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if workers > 1 else "0"
    if workers > 1:
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # "auto" wants a NUMA node per rank
    defaults = {
        "OMP_NUM_THREADS": "1",  # two spinning OpenMP pools on the same cores slow each other tenfold
        "TORCHDYNAMO_DISABLE": "1",  # otherwise the first log-probability compiles a kernel with g++ for 16 s
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "sluice",
    }
    if not has_accelerator():
        for name, value in defaults.items():
            environment.setdefault(name, value)
    else:
        for name in ("VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS", "VLLM_PLUGINS"):
            environment.setdefault(name, defaults[name])


def has_accelerator() -> bool:
    """Return whether a CUDA or ROCm device is visible, without a CUDA context, which forked children could not use."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()


def require_tested_version(version: str) -> None:
    """Refuse a version of vLLM that was not tested.

    Raises:
        EngineError: with the tested versions.
    """
    if version.split("+", maxsplit=1)[0] not in TESTED_VERSIONS:
        raise EngineError(
            f"vLLM {version} was not tested with this engine, which reads version spans from its internals; "
            f'install {" or ".join(TESTED_VERSIONS)}, or use engine = "transformers"'
        )


def check_names(given: Mapping[str, Any], known: set[str]) -> None:
    """Refuse unknown argument names, and those that the engine sets itself.

    Raises:
        EngineError: with the most similar known name.
    """
    for name in given:
        if name in OURS:
            raise EngineError(f"engine argument {name!r} is set by the engine itself; remove it")
        if name in LORA:
            raise EngineError(f"engine argument {name!r} comes from the table [rollout.lora]; set enabled = true there")
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise EngineError(f"vLLM has no engine argument {name!r}{hint}")


def engine_arguments(
    model: str, given: Mapping[str, Any], *, on_cpu: bool, arguments_class: type, lora: LoraLimits | None = None
) -> dict[str, Any]:
    """Return the engine arguments of the user with our defaults.

    Args:
        model: Directory or hub id.
        given: Fields of vLLM's ``AsyncEngineArgs``.
        on_cpu: Whether vLLM runs without an accelerator.
        arguments_class: ``AsyncEngineArgs``.
        lora: Adapters that the engine must be able to hold; None for none.

    Raises:
        EngineError: for an unknown name, or a rank that vLLM has no buffers for.
    """
    check_names(given, {field.name for field in fields(arguments_class)})
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": not has_tokenizer(str(given.get("tokenizer") or model)),
        "generation_config": "vllm",  # only the request sets sampling parameters
        "max_logprobs": 20,
        "use_tqdm_on_load": False,
    }
    if on_cpu:
        arguments |= cpu_defaults(model)
    arguments |= given
    if lora is not None:
        arguments |= lora_arguments(lora, on_cpu=on_cpu)
    return arguments | {
        "model": model,
        "logprobs_mode": "processed_logprobs",  # after temperature, as the trainer computes them
        "worker_extension_cls": WORKER_EXTENSION,
        "weight_transfer_config": {"backend": BACKEND},
        "disable_log_stats": True,  # switches its default loggers off; ours is passed separately
    }


def lora_arguments(lora: LoraLimits, *, on_cpu: bool) -> dict[str, Any]:
    """Return the arguments for an engine with adapters.

    Raises:
        EngineError: if vLLM has no buffers for such a rank.
    """
    rank = next((rank for rank in LORA_RANKS if rank >= lora.max_rank), None)
    if rank is None:
        raise EngineError(f"rollout.lora.max_rank is {lora.max_rank}; vLLM goes up to {LORA_RANKS[-1]}")
    # On a CPU, vLLM's kernels give sequences without an adapter that of the last place. One more place, always empty, prevents it.
    places = lora.max_loras + 1 if on_cpu else lora.max_loras
    return {"enable_lora": True, "max_loras": places, "max_cpu_loras": places, "max_lora_rank": rank}


def cpu_defaults(model: str) -> dict[str, Any]:
    """Return the default arguments for a machine without an accelerator."""
    return {
        "dtype": model_dtype(model),
        "enforce_eager": True,
        "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES,
        "gpu_memory_utilization": 0.1,
        "max_num_seqs": CPU_MAX_NUM_SEQS,
        # A seeded request whose prompt is split into chunks kills the CPU engine ("Generator does not use offset").
        "enable_chunked_prefill": False,
    }


def model_dtype(model: str) -> str:
    """Return the dtype of the saved model, or "auto" for a hub id. vLLM's "auto" would turn float32 into bfloat16."""
    path = Path(model) / "config.json"
    if not path.is_file():
        return "auto"
    config = json.loads(path.read_text())
    return str(config.get("dtype") or config.get("torch_dtype") or "auto")


def has_tokenizer(model: str) -> bool:
    """Return whether the model has a tokenizer; True for a hub id."""
    directory = Path(model)
    if not directory.is_dir():
        return True
    return any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def workers_of(given: Mapping[str, Any]) -> int:
    """Return the number of worker processes per engine."""
    return int(given.get("tensor_parallel_size") or 1) * int(given.get("pipeline_parallel_size") or 1)
