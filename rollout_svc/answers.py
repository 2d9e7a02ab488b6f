"""From the engine to the wire: packed fields, filled without a Python object per token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollout_svc.engines.base import (
    FinishReason,
    GenerationChunk,
    GenerationRequest,
    GenerationResult,
    InferenceEngine,
    Sample,
    Span,
)
from rollout_svc.engines.lora import LoraEngine
from sluice.v1 import common_pb2, rollout_pb2, tokens_pb2

__all__ = ["chunk_message", "generate_response", "loaded_adapters"]

FINISH_REASONS = {
    FinishReason.STOP: tokens_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: tokens_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: tokens_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: tokens_pb2.FINISH_REASON_ERROR,
    FinishReason.VERSION_RETIRED: tokens_pb2.FINISH_REASON_VERSION_RETIRED,
}

Decode = Callable[[Sequence[int]], str]


def generate_response(
    request: GenerationRequest, result: GenerationResult, digest: str, decode: Decode | None
) -> rollout_pb2.GenerateResponse:
    """The answer to Generate.

    Args:
        request: What was asked.
        result: What the engine gave.
        digest: Digest of tokenizer and template.
        decode: Turns token ids into text; None leaves the text out.
    """
    return rollout_pb2.GenerateResponse(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_ids,
        samples=[sample_message(sample, decode) for sample in result.samples],
        tokenizer_digest=digest,
        prompt_logprobs=result.prompt_logprobs,
        cached_prompt_tokens=result.cached_prompt_tokens,
    )


def sample_message(sample: Sample, decode: Decode | None) -> rollout_pb2.GeneratedSample:
    """One whole sample."""
    return rollout_pb2.GeneratedSample(
        index=sample.index,
        token_ids=sample.token_ids,
        logprobs=sample.logprobs,
        version_spans=spans_message(sample.spans),
        finish_reason=FINISH_REASONS[sample.finish_reason],
        stop_string=sample.stop_string,
        text=decode(sample.token_ids) if decode else "",
        top_logprobs=top_message(sample.top_logprobs),
    )


def chunk_message(chunk: GenerationChunk, text: str) -> rollout_pb2.GenerateStreamResponse:
    """Some tokens of one sample, with the text that they complete."""
    delta = rollout_pb2.GeneratedSample(
        index=chunk.index,
        token_ids=chunk.token_ids,
        logprobs=chunk.logprobs,
        version_spans=spans_message(chunk.spans),
        finish_reason=FINISH_REASONS[chunk.finish_reason]
        if chunk.finish_reason
        else tokens_pb2.FINISH_REASON_UNSPECIFIED,
        stop_string=chunk.stop_string,
        text=text,
        top_logprobs=top_message(chunk.top_logprobs),
    )
    return rollout_pb2.GenerateStreamResponse(chunk=rollout_pb2.StreamChunk(delta=delta, offset=chunk.offset))


def loaded_adapters(engine: InferenceEngine) -> list[rollout_pb2.LoadedAdapter]:
    """The adapters that an engine holds."""
    if not isinstance(engine, LoraEngine):
        return []
    return [
        rollout_pb2.LoadedAdapter(
            version=each.version.to_proto(),
            base=each.base.to_proto(),
            adapters=each.names,
            serves_policy=each.serves_policy,
            requests=each.requests,
        )
        for each in engine.adapters()
    ]


def spans_message(spans: Sequence[Span]) -> list[tokens_pb2.VersionSpan]:
    """Version spans, as they are."""
    return [
        tokens_pb2.VersionSpan(
            start=span.start,
            policy_version=common_pb2.PolicyVersion(epoch=span.version.epoch, number=span.version.number),
        )
        for span in spans
    ]


def top_message(positions: Sequence[Sequence[tuple[int, float]]]) -> list[tokens_pb2.TopLogprobs]:
    """Alternatives per position."""
    return [
        tokens_pb2.TopLogprobs(ids=[token for token, _ in each], logprobs=[logprob for _, logprob in each])
        for each in positions
    ]
