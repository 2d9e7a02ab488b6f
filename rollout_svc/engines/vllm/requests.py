"""The one place that reads vLLM's internals: tokens, log-probabilities and version spans of requests under way.

vLLM reports version spans only with a request's last output. A stream needs them earlier, so that the tokens that were
received before a replica dies stay usable. They are read here from the front end's request states, which also saves one
Python object per token and stream. `require_tested_version` guards it; the conformance tests compare with the final spans.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from rollout_svc.engines.adapter_slots import Adapter
from rollout_svc.engines.base import FinishReason, GenerationChunk, GenerationRequest, ModelInfo, Sample, Sampling
from rollout_svc.engines.vllm.types import (
    Collector,
    CompletionOutput,
    FlatLogprobs,
    Llm,
    ParentRequest,
    RequestOutput,
    RequestState,
    SamplingParams,
)
from sluice.versions import Version, VersionSpan, spans_between

__all__ = [
    "TrackedRequest",
    "check_request",
    "chunk",
    "cut_at_nan",
    "live_token_count",
    "prompt_logprobs",
    "refusals",
    "sample",
    "sampling_params",
    "submit",
]


SEED_RANGE = 2**62
"""Seeds are taken modulo this: vLLM adds the sample's index and stores 64 bits; larger values would kill its engine."""

REPETITION_PENALTIES = (0.01, 100.0)
"""Beyond these, logits overflow to infinity and then to NaN."""

GREATEST_BIAS = 100.0
"""vLLM silently cuts larger ones."""

LEAST_TEMPERATURE = 0.01
"""vLLM silently raises lower ones to this, and the log-probabilities would not be those asked for."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens of one sample from ``offset`` on; log-probabilities as vLLM lays them flat (see `flat_logprobs`)."""

    offset: int
    token_ids: list[int]
    flat: FlatLogprobs
    spans: list[VersionSpan]


@dataclass(frozen=True, slots=True)
class Ended:
    """Why one sample ended, in vLLM's words."""

    finish_reason: str
    stop_reason: int | str | None


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """A request that vLLM has accepted.

    Attributes:
        internal_id: vLLM's own name of it; aborting by it touches no other request.
        adapter: What it runs on beside the weights: then all of its tokens carry the adapter's version.
        adapter_name: What its caller called the adapter; empty for the policy's.
        retired: It was ended since its adapter was taken away.
    """

    internal_id: str
    _collector: Collector
    _states: list[RequestState]
    _parent: ParentRequest | None
    adapter: Adapter | None = None
    adapter_name: str = ""
    retired: bool = False
    _given: list[int] = field(default_factory=list)
    _ended: list[bool] = field(default_factory=list)
    _final: RequestOutput | None = None

    def __post_init__(self) -> None:
        self._given = [0] * len(self._states)
        self._ended = [False] * len(self._states)

    async def result(self) -> RequestOutput:
        """Wait for the end of all samples: vLLM's ``RequestOutput``. Raises what the engine raised."""
        self._final = await self._collector.get()
        return self._final

    async def wait(self, seconds: float) -> None:
        """Return after the time, or as soon as all samples have ended. Raises what the engine raised."""
        ready = self._collector.ready
        timer = asyncio.get_running_loop().call_later(seconds, ready.set)
        try:
            await ready.wait()
        finally:
            timer.cancel()
        self._final = self._collector.get_nowait()
        if self._final is None:
            ready.clear()

    @property
    def ended(self) -> bool:
        """Whether all samples have ended, as of the last `result` or `wait`."""
        return self._final is not None

    def advance(self) -> Iterator[tuple[int, Sampled, Ended | None]]:
        """Give what is new of each sample since the last call; each sample's end once."""
        finals = {output.index: output for output in self._final.outputs} if self._final is not None else {}
        for index, state in enumerate(self._states):
            if self._ended[index]:
                continue
            output = finals.get(index) or self._ended_child(index)
            sampled = self._new_tokens(index, state)
            if output is not None:
                self._ended[index] = True
                yield index, sampled, Ended(output.finish_reason, output.stop_reason)
            elif sampled.token_ids:
                yield index, sampled, None

    def _ended_child(self, index: int) -> CompletionOutput | None:
        """One of several samples that ended before the others: its output waits in the parent."""
        return self._parent.output_aggregator[index] if self._parent is not None else None

    def _new_tokens(self, index: int, state: RequestState) -> Sampled:
        start = self._given[index]
        token_ids = state.detokenizer.output_token_ids
        end = self._given[index] = len(token_ids)
        flat = state.logprobs_processor.logprobs[start:end]
        if self.adapter is not None:
            spans = [VersionSpan(0, self.adapter.version)]
        else:
            spans = [VersionSpan(first, Version.parse(label)) for label, first in state.weight_version_starts]
        return Sampled(start, token_ids[start:end], flat, spans_between(spans, start, end))


async def submit(
    engine: Llm,
    request_id: str,
    prompt: Mapping[str, object],
    params: SamplingParams,
    *,
    priority: int,
    lora_request: object | None = None,
) -> TrackedRequest:
    """Hand a request to vLLM's ``AsyncLLM``.

    Args:
        engine: The running engine.
        request_id: Unique among the requests under way.
        prompt: vLLM's ``TokensInput``.
        params: How to sample; several samples share one `TrackedRequest`.
        priority: Lower goes first.
        lora_request: vLLM's ``LoRARequest``; None for the weights alone.

    Raises:
        VLLMClientError: if vLLM refuses it.
    """
    try:
        collector = await engine.add_request(request_id, prompt, params, lora_request=lora_request, priority=priority)
    except BaseException:
        await engine.abort(request_id)  # it may have been registered before it failed or was cancelled
        raise
    processor = engine.output_processor
    if params.n == 1:
        names, parent = [collector.request_id], None
    else:
        names = [f"{index}_{collector.request_id}" for index in range(params.n)]
        parent = processor.parent_requests[collector.request_id]
    states = [processor.request_states[name] for name in names]
    return TrackedRequest(collector.request_id, collector, states, parent)


def live_token_count(engine: Llm) -> int:
    """Tokens sampled so far by requests that have not ended."""
    return sum(len(state.detokenizer.output_token_ids) for state in engine.output_processor.request_states.values())


def sampling_params(request: GenerationRequest, info: ModelInfo, *, has_tokenizer: bool) -> SamplingParams:
    """Build vLLM's ``SamplingParams``.

    End tokens become stop tokens, so that all of a model's end tokens count and not only the tokenizer's.

    Raises:
        ValueError: if this engine cannot sample so.
    """
    import vllm.sampling_params as vllm  # noqa: PLC0415 - vLLM is loaded by start()

    sampling = request.sampling
    check_sampling(sampling, info.vocabulary_size, has_tokenizer=has_tokenizer)
    stop_token_ids = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stop_token_ids.update(info.eos_token_ids)
    parameters: SamplingParams = vllm.SamplingParams(
        n=request.n,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        seed=None if sampling.seed is None else sampling.seed % SEED_RANGE,
        stop=list(sampling.stop) or None,
        stop_token_ids=sorted(stop_token_ids) or None,
        include_stop_str_in_output=True,
        ignore_eos=True,
        logprobs=sampling.top_logprobs,
        prompt_logprobs=0 if request.prompt_logprobs else None,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        output_kind=vllm.RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )
    return parameters


def check_request(request: GenerationRequest, info: ModelInfo, *, seeds: bool) -> None:
    """Refuse what would end vLLM's engine for everybody.

    Raises:
        ValueError: naming it.
    """
    ids = request.prompt_ids
    if ids and not 0 <= min(ids) <= max(ids) < info.vocabulary_size:
        wrong = next(id_ for id_ in ids if not 0 <= id_ < info.vocabulary_size)
        raise ValueError(f"token id {wrong} is outside the vocabulary of {info.vocabulary_size}")
    if request.sampling.seed is not None and not seeds:
        raise ValueError("a seed needs enable_chunked_prefill = false on CPU, or vLLM's engine dies of a cut prompt")


@contextmanager
def refusals() -> Iterator[None]:
    """Turn vLLM's own refusal of a request into ValueError."""
    from vllm.exceptions import VLLMClientError  # noqa: PLC0415 - vLLM is loaded by start()

    try:
        yield
    except VLLMClientError as error:
        raise ValueError(str(error)) from error


def check_sampling(sampling: Sampling, vocabulary_size: int, *, has_tokenizer: bool) -> None:
    """Refuse what vLLM would change silently, cannot do, or would let its engine die of.

    Raises:
        ValueError: naming the field.
    """
    if 0 < sampling.temperature < LEAST_TEMPERATURE:
        raise ValueError(f"temperature must be 0 (greedy) or at least {LEAST_TEMPERATURE}, not {sampling.temperature}")
    least, most = REPETITION_PENALTIES
    if not least <= sampling.repetition_penalty <= most:
        raise ValueError(f"repetition_penalty must be in [{least}, {most}], not {sampling.repetition_penalty}")
    if not all(abs(bias) <= GREATEST_BIAS for bias in sampling.logit_bias.values()):
        raise ValueError(f"logit_bias must be in [-{GREATEST_BIAS}, {GREATEST_BIAS}]")
    if not all(0 <= id_ < vocabulary_size for id_ in (*sampling.stop_token_ids, *sampling.logit_bias)):
        raise ValueError(f"stop_token_ids and logit_bias must name ids below the vocabulary size, {vocabulary_size}")
    if sampling.stop and not has_tokenizer:
        raise ValueError("stop strings need a tokenizer in the model's directory; use stop_token_ids")


def sample(output: CompletionOutput, sampling: Sampling, tracked: TrackedRequest) -> Sample:
    """One sample from vLLM's ``CompletionOutput``."""
    spans = [VersionSpan(span.start, Version.parse(span.version)) for span in output.weight_versions or ()]
    if tracked.adapter is not None:
        spans = [VersionSpan(0, tracked.adapter.version)] if output.token_ids else []
    return Sample(
        index=output.index,
        token_ids=list(output.token_ids),
        logprobs=flat_logprobs(output.logprobs, sampling.top_logprobs),
        spans=spans,
        finish_reason=finish_reason(output.finish_reason, retired=tracked.retired),
        stop_string=stop_string(output.stop_reason),
        top_logprobs=flat_top_logprobs(output.logprobs, sampling.top_logprobs),
    )


def cut_at_nan(part: Sample | GenerationChunk) -> bool:
    """End a sample before its first NaN, if there is one: what was sampled from it on is noise. True if it was cut."""
    if not math.isnan(sum(part.logprobs)):
        return False
    keep = next(position for position, value in enumerate(part.logprobs) if math.isnan(value))
    start = part.offset if isinstance(part, GenerationChunk) else 0
    del part.token_ids[keep:], part.logprobs[keep:], part.top_logprobs[keep:]
    part.spans = [span for span in part.spans if span.start < start + keep]
    part.finish_reason = FinishReason.ERROR
    return True


def finish_reason(text: str, *, retired: bool) -> FinishReason:
    """Our word for vLLM's; anything unforeseen is an error. ``retired`` says why a request was aborted."""
    aborted = FinishReason.VERSION_RETIRED if retired else FinishReason.ABORT
    known = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": aborted}
    return known.get(text, FinishReason.ERROR)


def stop_string(reason: int | str | None) -> str:
    """The stop string that ended a sample; empty for token ids."""
    return reason if isinstance(reason, str) else ""


def flat_logprobs(flat: FlatLogprobs | None, top: int) -> list[float]:
    """Log-probabilities of the sampled tokens: the first of each position's entries."""
    if not flat:
        return []
    if top == 0:
        return list(flat.logprobs)
    return [flat.logprobs[start] for start in flat.start_indices]


def flat_top_logprobs(flat: FlatLogprobs | None, top: int) -> list[list[tuple[int, float]]]:
    """The most likely tokens of each position with their log-probabilities; empty if none were asked for."""
    if top == 0 or not flat:
        return []
    ranges = zip(flat.start_indices, flat.end_indices, strict=True)
    return [
        list(zip(flat.token_ids[start + 1 : end], flat.logprobs[start + 1 : end], strict=True)) for start, end in ranges
    ]


def prompt_logprobs(flat: FlatLogprobs | None) -> list[float]:
    """Log-probabilities of prompt tokens 1, 2, ...; the first has none."""
    if not flat:
        return []
    starts = [start for start, end in zip(flat.start_indices, flat.end_indices, strict=True) if end > start]
    return [flat.logprobs[start] for start in starts]


def chunk(
    index: int, sampled: Sampled, ended: Ended | None, sampling: Sampling, *, retired: bool = False
) -> GenerationChunk:
    """Tokens of one sample under way."""
    return GenerationChunk(
        index=index,
        offset=sampled.offset,
        token_ids=sampled.token_ids,
        logprobs=flat_logprobs(sampled.flat, sampling.top_logprobs),
        spans=sampled.spans,
        finish_reason=finish_reason(ended.finish_reason, retired=retired) if ended is not None else None,
        stop_string=stop_string(ended.stop_reason) if ended is not None else "",
        top_logprobs=flat_top_logprobs(sampled.flat, sampling.top_logprobs),
    )
