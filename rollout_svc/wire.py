"""Translates between the contract and the engine. Checks each field of a request; packs the fields of a result."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import grpc

from rollout_svc.engines.adapters import LoraEngine
from rollout_svc.engines.base import (
    FinishReason,
    GenerationChunk,
    GenerationRequest,
    InferenceEngine,
    ModelInfo,
    Sample,
    Sampling,
)
from sluice.rpc import MAX_SAMPLES, SluiceError
from sluice.v1 import rollout_pb2, tokens_pb2

MAX_NAME = 128
"""Maximum length of a request id, run or adapter name."""

MAX_TOP_LOGPROBS = 20
MAX_STOPS = 64

MAX_STOP_LENGTH = 1024
"""Maximum length of a stop string: so much text is searched after every token."""

MAX_STOP_IDS = 1024
MAX_BIASES = 4096
MAX_BIAS = 1000.0
"""Maximum bias of a token, in logits. An engine may allow less."""


FINISH_REASONS = {
    FinishReason.STOP: tokens_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: tokens_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: tokens_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: tokens_pb2.FINISH_REASON_ERROR,
    FinishReason.VERSION_RETIRED: tokens_pb2.FINISH_REASON_VERSION_RETIRED,
    None: tokens_pb2.FINISH_REASON_UNSPECIFIED,
}
"""None stands for a sample that has not ended."""


def generation_request(
    request: rollout_pb2.GenerateRequest, prompt_ids: list[int], info: ModelInfo
) -> GenerationRequest:
    """Return the engine's request.

    Args:
        request: The call.
        prompt_ids: Token ids of its prompt.
        info: What the engine serves.

    Raises:
        SluiceError: INVALID_ARGUMENT with every field at fault.
    """
    violations = dict(violations_of(request, prompt_ids, info))
    if violations:
        raise SluiceError(
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_REQUEST",
            "; ".join(f"{name}: {text}" for name, text in violations.items()),
            violations=violations,
        )
    return GenerationRequest(
        request_id=request.request_id or uuid.uuid4().hex,
        prompt_ids=prompt_ids,
        sampling=sampling_of(request.sampling),
        n=request.n if request.HasField("n") else 1,
        priority=request.priority,
        prompt_logprobs=request.return_prompt_logprobs,
        adapter=request.adapter,
    )


def sampling_of(wire: tokens_pb2.SamplingParams) -> Sampling:
    """Return sampling parameters, with the defaults of the contract for unset fields."""
    return Sampling(
        max_tokens=wire.max_tokens if wire.HasField("max_tokens") else None,
        temperature=wire.temperature if wire.HasField("temperature") else 1.0,
        top_p=wire.top_p if wire.HasField("top_p") else 1.0,
        top_k=wire.top_k,
        min_p=wire.min_p,
        stop=tuple(wire.stop),
        stop_token_ids=tuple(wire.stop_token_ids),
        ignore_eos=wire.ignore_eos,
        seed=wire.seed if wire.HasField("seed") else None,
        top_logprobs=wire.top_logprobs,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        repetition_penalty=wire.repetition_penalty if wire.HasField("repetition_penalty") else 1.0,
        min_tokens=wire.min_tokens,
        logit_bias=dict(wire.logit_bias),
    )


def violations_of(
    request: rollout_pb2.GenerateRequest, prompt_ids: list[int], info: ModelInfo
) -> Iterator[tuple[str, str]]:
    """Yield each invalid field of a request, and what is wrong with it."""
    for field in ("request_id", "run", "adapter"):
        if len(getattr(request, field)) > MAX_NAME:
            yield field, f"at most {MAX_NAME} characters"
    if request.HasField("n") and not 1 <= request.n <= MAX_SAMPLES:
        yield "n", f"between 1 and {MAX_SAMPLES}, not {request.n}"
    yield from _prompt_violations(request.WhichOneof("prompt") or "prompt", prompt_ids, info)
    if request.continued_tokens > len(prompt_ids):
        yield "continued_tokens", f"at most the {len(prompt_ids)} tokens of the prompt, not {request.continued_tokens}"
    yield from _sampling_violations(request.sampling, info)
    yield from _token_violations(request.sampling, info)


def _prompt_violations(field: str, prompt_ids: list[int], info: ModelInfo) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the prompt, under the field that the caller set."""
    if not prompt_ids:
        yield field, "has no tokens"
        return
    if len(prompt_ids) >= info.max_model_len:
        yield field, f"has {len(prompt_ids)} tokens; at most {info.max_model_len - 1} fit this model, so shorten it"
    # An id outside of the vocabulary would kill vLLM's engine for everyone.
    if max(prompt_ids) >= info.vocabulary_size:
        yield field, f"token {max(prompt_ids)} is outside of the vocabulary of {info.vocabulary_size}"


def _sampling_violations(wire: tokens_pb2.SamplingParams, info: ModelInfo) -> Iterator[tuple[str, str]]:
    for name, value, least, most in (
        ("temperature", wire.temperature, 0.0, 100.0),
        ("min_p", wire.min_p, 0.0, 1.0),
        ("presence_penalty", wire.presence_penalty, -2.0, 2.0),
        ("frequency_penalty", wire.frequency_penalty, -2.0, 2.0),
        ("top_logprobs", wire.top_logprobs, 0, MAX_TOP_LOGPROBS),
    ):
        if not least <= value <= most:  # also refuses NaN
            yield f"sampling.{name}", f"between {least:g} and {most:g}, not {value:g}"
    if wire.HasField("max_tokens") and wire.max_tokens < 1:
        yield "sampling.max_tokens", "at least 1; leave it out for as many as the context allows"
    if wire.HasField("top_p") and not 0 < wire.top_p <= 1:
        yield "sampling.top_p", f"above 0 and at most 1, not {wire.top_p:g}"
    if wire.HasField("repetition_penalty") and not 0 < wire.repetition_penalty <= 100:
        yield "sampling.repetition_penalty", f"above 0 and at most 100, not {wire.repetition_penalty:g}"
    if wire.HasField("max_tokens") and wire.min_tokens > wire.max_tokens:
        yield "sampling.min_tokens", f"at most max_tokens ({wire.max_tokens})"
    if wire.min_tokens > info.max_model_len:
        yield "sampling.min_tokens", f"at most the context of {info.max_model_len} tokens"


def _token_violations(wire: tokens_pb2.SamplingParams, info: ModelInfo) -> Iterator[tuple[str, str]]:
    if len(wire.stop) > MAX_STOPS or any(not text for text in wire.stop):
        yield "sampling.stop", f"at most {MAX_STOPS} strings, none of them empty"
    if any(len(text) > MAX_STOP_LENGTH for text in wire.stop):
        yield "sampling.stop", f"at most {MAX_STOP_LENGTH} characters each"
    if len(wire.stop_token_ids) > MAX_STOP_IDS:
        yield "sampling.stop_token_ids", f"at most {MAX_STOP_IDS}, not {len(wire.stop_token_ids)}"
    if len(wire.logit_bias) > MAX_BIASES:
        yield "sampling.logit_bias", f"at most {MAX_BIASES} tokens, not {len(wire.logit_bias)}"
    if not all(abs(bias) <= MAX_BIAS for bias in wire.logit_bias.values()):  # also refuses NaN
        yield "sampling.logit_bias", f"between -{MAX_BIAS:g} and {MAX_BIAS:g}"
    outside = [each for each in (*wire.stop_token_ids, *wire.logit_bias) if each >= info.vocabulary_size]
    if outside:
        yield "sampling", f"token {outside[0]} is outside of the vocabulary of {info.vocabulary_size}"


def sample_message(part: Sample | GenerationChunk, text: str) -> rollout_pb2.GeneratedSample:
    """Return the message for a whole sample, or for the next tokens of one, with their text."""
    return rollout_pb2.GeneratedSample(
        index=part.index,
        token_ids=part.token_ids,
        logprobs=part.logprobs,
        version_spans=[span.to_proto() for span in part.spans],
        finish_reason=FINISH_REASONS[part.finish_reason],
        stop_string=part.stop_string,
        text=text,
        top_logprobs=[
            tokens_pb2.TopLogprobs(ids=[token for token, _ in each], logprobs=[logprob for _, logprob in each])
            for each in part.top_logprobs
        ],
    )


def loaded_adapters(engine: InferenceEngine) -> list[rollout_pb2.LoadedAdapter]:
    """Return the adapters that an engine holds."""
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
