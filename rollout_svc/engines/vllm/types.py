"""The surface of vLLM 0.32 that we touch, written down as types: vLLM itself is imported only where an engine starts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

__all__ = [
    "Collector",
    "CompletionOutput",
    "EngineCore",
    "FlatLogprobs",
    "Llm",
    "ModelConfig",
    "OutputProcessor",
    "ParentRequest",
    "RequestOutput",
    "RequestState",
    "SamplingParams",
    "SchedulerConfig",
    "SchedulerStats",
    "VllmConfig",
]


class FlatLogprobs(Protocol):
    """``vllm.logprobs.FlatLogprobs``: per position the sampled token, then the most likely ones, all in flat lists."""

    start_indices: list[int]
    end_indices: list[int]
    token_ids: list[int]
    logprobs: list[float]

    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> FlatLogprobs: ...


class WeightVersionSpan(Protocol):
    """``vllm.outputs.WeightVersionSpan``."""

    version: str
    start: int


class CompletionOutput(Protocol):
    """``vllm.outputs.CompletionOutput``: one ended sample."""

    index: int
    token_ids: Sequence[int]
    logprobs: FlatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    weight_versions: Sequence[WeightVersionSpan] | None


class RequestOutput(Protocol):
    """``vllm.outputs.RequestOutput``: all samples of a request."""

    outputs: list[CompletionOutput]
    prompt_logprobs: FlatLogprobs | None
    num_cached_tokens: int | None


class SamplingParams(Protocol):
    """``vllm.SamplingParams``."""

    n: int


class Collector(Protocol):
    """``vllm.v1.engine.output_processor.RequestOutputCollector``: where a request's outputs arrive."""

    request_id: str
    ready: asyncio.Event

    async def get(self) -> RequestOutput:
        """Wait for the next output."""
        ...

    def get_nowait(self) -> RequestOutput | None:
        """Take the next output if there is one."""
        ...


class _Detokenizer(Protocol):
    output_token_ids: list[int]


class _LogprobsProcessor(Protocol):
    logprobs: FlatLogprobs


class RequestState(Protocol):
    """``vllm.v1.engine.output_processor.RequestState``: one sample in progress."""

    detokenizer: _Detokenizer
    logprobs_processor: _LogprobsProcessor
    weight_version_starts: list[tuple[str, int]]


class ParentRequest(Protocol):
    """``vllm.v1.engine.parallel_sampling.ParentRequest``: a request for several samples."""

    output_aggregator: list[CompletionOutput | None]


class OutputProcessor(Protocol):
    """``vllm.v1.engine.output_processor.OutputProcessor``."""

    log_stats: bool
    request_states: Mapping[str, RequestState]
    parent_requests: Mapping[str, ParentRequest]

    def propagate_error(self, e: Exception) -> None:
        """Raise an error in every waiting caller."""
        ...


class EngineCore(Protocol):
    """The client of vLLM's engine process."""

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        """Stop scheduling."""
        ...


class Llm(Protocol):
    """``vllm.v1.engine.async_llm.AsyncLLM``."""

    engine_core: EngineCore
    output_processor: OutputProcessor
    log_stats: bool
    logger_manager: object
    tokenizer: object
    errored: bool
    output_handler: asyncio.Task[None] | None

    async def add_request(
        self,
        request_id: str,
        prompt: Mapping[str, object],
        params: SamplingParams,
        *,
        lora_request: object | None,
        priority: int,
    ) -> Collector:
        """Register a request."""
        ...

    async def remove_lora(self, lora_id: int) -> bool:
        """Let the workers forget an adapter."""
        ...

    async def abort(self, request_id: str, internal: bool = False) -> None:
        """End a request; its collector gets a last output."""
        ...

    async def resume_generation(self) -> None:
        """Schedule again."""
        ...

    async def start_weight_update(self) -> None:
        """Open an update in every worker."""
        ...

    async def update_weights(self, request: object) -> None:
        """Hand each worker's transfer engine its information."""
        ...

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Close the update and label what is sampled from now on."""
        ...

    async def update_weight_version(self, new_version: str) -> None:
        """Label what is sampled from now on."""
        ...

    async def collective_rpc(self, method: str, *, kwargs: Mapping[str, object] | None = None) -> list[tuple[str, Any]]:
        """Call a method of every worker."""
        ...

    def get_num_unfinished_requests(self) -> int:
        """Samples running or queued."""
        ...

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine's processes."""
        ...


class SchedulerStats(Protocol):
    """``vllm.v1.metrics.stats.SchedulerStats``."""

    num_running_reqs: int
    kv_cache_usage: float


class SchedulerConfig(Protocol):
    """``vllm.config.SchedulerConfig``."""

    max_num_seqs: int
    enable_chunked_prefill: bool


class ModelConfig(Protocol):
    """``vllm.config.ModelConfig``."""

    model: str
    revision: str | None
    hf_config_path: str | None
    trust_remote_code: bool
    architectures: list[str]
    max_model_len: int
    dtype: object
    hf_text_config: object

    def get_vocab_size(self) -> int:
        """Number of token ids."""
        ...


class VllmConfig(Protocol):
    """``vllm.config.VllmConfig``."""

    model_config: ModelConfig
    scheduler_config: SchedulerConfig
