"""What the engine serves: read from vLLM's configuration and the model's files."""

from __future__ import annotations

from pathlib import Path

from rollout_svc.engines.base import ModelInfo
from rollout_svc.engines.vllm_types import ModelConfig, VllmConfig

__all__ = ["describe", "model_directory"]


def model_directory(model: str, revision: str | None) -> Path:
    """Where the model's files lie; those of a hub id were fetched by vLLM."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - only for hub ids

    return Path(snapshot_download(model, revision=revision, allow_patterns=["*.json", "*.safetensors"]))


def describe(model: str, config: VllmConfig) -> ModelInfo:
    """What the engine serves, from vLLM's ``VllmConfig``."""
    model_config = config.model_config
    return ModelInfo(
        model=model,
        architecture=model_config.architectures[0],
        vocabulary_size=model_config.get_vocab_size(),
        max_model_len=model_config.max_model_len,
        dtype=str(model_config.dtype).removeprefix("torch."),
        eos_token_ids=end_tokens(model_config),
        engine="vllm",
    )


def end_tokens(model_config: ModelConfig) -> tuple[int, ...]:
    """All end tokens that the configuration and the generation configuration name."""
    from vllm.transformers_utils.config import try_get_generation_config  # noqa: PLC0415 - loaded by start()

    generation = try_get_generation_config(
        model_config.hf_config_path or model_config.model,
        trust_remote_code=model_config.trust_remote_code,
        revision=model_config.revision,
    )
    ids: set[int] = set()
    for source in (model_config.hf_text_config, generation):
        named = getattr(source, "eos_token_id", None)
        ids.update([named] if isinstance(named, int) else named or ())
    return tuple(sorted(ids))
