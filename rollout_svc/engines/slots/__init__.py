"""The engine that samples with plain transformers: a batch with a fixed number of slots, in this process."""

from __future__ import annotations

from rollout_svc.config import RolloutConfig
from rollout_svc.engines.base import InferenceEngine, ServedTemplate
from rollout_svc.engines.model_files import check_length
from sluice.chat_template import template_text
from sluice.config import CommonConfig, ConfigError
from sluice.imports import large_imports
from sluice.models import sizes_on_disk


def build(run: CommonConfig, config: RolloutConfig) -> InferenceEngine:
    """See `EnginePackage`."""
    with large_imports():
        from rollout_svc.engines.slots.engine import SlotOptions, TransformersEngine  # noqa: PLC0415 - imports torch

    options = SlotOptions(
        device=config.device,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        max_running=config.limits.max_running or SlotOptions.max_running,
        max_queued=config.limits.max_queued,
        kv_cache_bytes=config.kv_cache_bytes,
        kv_policy=config.kv_policy,
        threads=config.threads,
        start_deadline_s=config.deadlines.start_s,
        command_deadline_s=config.deadlines.apply_s,
        drain_deadline_s=config.deadlines.pause_s,
        template=ServedTemplate(template_text(run.chat_template), run.chat_template_kwargs),
    )
    return TransformersEngine(run.model, options, config.lora.limits(run.max_staleness))


def check(run: CommonConfig, config: RolloutConfig) -> None:
    """See `EnginePackage`."""
    config.lora.limits(run.max_staleness)
    sizes = sizes_on_disk(run.model)
    if sizes is None or config.max_model_len is None or sizes.positions is None:
        return
    try:
        check_length(run.model, config.max_model_len, sizes.positions)
    except ValueError as error:
        raise ConfigError(f"rollout.{error}") from error
