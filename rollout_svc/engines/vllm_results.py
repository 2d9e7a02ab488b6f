"""Between our words and vLLM's: sampling parameters in, samples out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from rollout_svc.engines.base import FinishReason, GenerationChunk, GenerationRequest, ModelInfo, Sample, Sampling, Span
from rollout_svc.engines.vllm_spans import Ended, Sampled, TrackedRequest
from rollout_svc.engines.vllm_types import CompletionOutput, FlatLogprobs, SamplingParams
from sluice.versions import Version

__all__ = ["check_request", "chunk", "cut_at_nan", "prompt_logprobs", "refusals", "sample", "sampling_params"]

SEED_RANGE = 2**62
"""Seeds are taken modulo this: vLLM adds the sample's index and stores 64 bits; larger values would kill its engine."""

REPETITION_PENALTIES = (0.01, 100.0)
"""Beyond these, logits overflow to infinity and then to NaN."""

GREATEST_BIAS = 100.0
"""vLLM silently cuts larger ones."""

LEAST_TEMPERATURE = 0.01
"""vLLM silently raises lower ones to this, and the log-probabilities would not be those asked for."""


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
    spans = [Span(span.start, Version.parse(span.version)) for span in output.weight_versions or ()]
    if tracked.adapter is not None:
        spans = [Span(0, tracked.adapter.version)] if output.token_ids else []
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
