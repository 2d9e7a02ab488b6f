"""RolloutService: checks and admits requests, samples with the engine, and answers repeated requests from a cache."""
# ruff: noqa: N802  (gRPC names the methods)

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import grpc
import structlog

from rollout_svc.config import LimitsConfig
from rollout_svc.engines.adapters import LoraEngine, UnknownAdapterError
from rollout_svc.engines.base import (
    DEFAULT_PACE,
    EngineBusyError,
    EngineError,
    FinishReason,
    GenerationRequest,
    InferenceEngine,
    ModelInfo,
    Pace,
    Sample,
    Sampling,
    Stage,
)
from rollout_svc.replica import EngineSupervisor
from rollout_svc.responses import ResponseCache
from rollout_svc.tokenizer import ModelTokenizer, Prompt, ReplyStream, TextStream
from sluice.clock import CLOCK, Clock
from sluice.limits import MAX_TEMPERATURE
from sluice.rpc import MAX_SAMPLES, SluiceError
from sluice.rpc.access import caller
from sluice.rpc.drain import Drain
from sluice.v1 import rollout_pb2 as pb
from sluice.v1 import rollout_pb2_grpc, tokens_pb2
from sluice.versions import Version

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

log = structlog.get_logger()

MAX_COALESCE_S = 60.0

_ANSWER_S, _MOST_ANSWERS, _MOST_ANSWER_BYTES = 300.0, 4096, 256 << 20
"""Seconds that a response is kept for retries of its request_id; maximum number of responses; their maximum bytes. The oldest go first."""

RETRY_AFTER_S = 0.5
"""Seconds after which to retry if the queue is full: a few engine steps."""

HAND_OVER_S = 1.0
"""Seconds in which requests that a drain ends can send their tokens to their callers."""

ABORT_AGAIN_S = 0.05
"""Seconds between two attempts to end these requests."""

MAX_NAME = 128
"""Maximum length of a request id, run or adapter name."""

MAX_TOP_LOGPROBS = 20
MAX_STOPS = 64

MAX_STOP_LENGTH = 1024
"""Maximum length of a stop string, since text of this length is searched after every token."""

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
"""The key None stands for a sample that has not ended."""

STAGES = {
    Stage.QUEUED: pb.REQUEST_STAGE_QUEUED,
    Stage.RUNNING: pb.REQUEST_STAGE_RUNNING,
    Stage.PAUSED: pb.REQUEST_STAGE_PAUSED,
    Stage.SWITCHING: pb.REQUEST_STAGE_SWITCHING,
}


@dataclass(slots=True)
class _SampleText:
    """Turns the tokens of one sample into text.

    Attributes:
        text: Decodes the tokens, if the request asks for text.
        reply: Parses the tokens, if the request asks for a message.
        continued: Tokens before the sample that were not parsed yet.
    """

    text: TextStream | None
    reply: ReplyStream | None
    continued: Sequence[int]


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Serves sampling requests over gRPC. The HTTP port calls it, too.

    Args:
        run: `runs/{run}` that this replica belongs to.
        request_s: Seconds for a request without a deadline.
        drain: Whether the replica is shutting down.
        clock: Time of `request_s`.
    """

    def __init__(
        self,
        run: str,
        engine: EngineSupervisor,
        tokenizer: ModelTokenizer,
        limits: LimitsConfig,
        *,
        request_s: float,
        drain: Drain,
        clock: Clock = CLOCK,
    ) -> None:
        self._run, self._engine, self._tokenizer, self._limits = run, engine, tokenizer, limits
        self._request_s, self._drain, self._clock = request_s, drain, clock
        self._responses = ResponseCache(_ANSWER_S, _MOST_ANSWERS, _MOST_ANSWER_BYTES)
        self._in_progress: dict[int, GenerationRequest] = {}
        self.samples = 0
        """Samples that are queued or running."""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def tokenizer(self) -> ModelTokenizer:
        """Return the tokenizer and chat template of the model."""
        return self._tokenizer

    @property
    def model_info(self) -> ModelInfo:
        """Return a description of the served model."""
        return self._engine.current.info

    def serving_version(self) -> Version:
        """Return the version from which requests are sampled now.

        Raises:
            SluiceError: UNAVAILABLE while the engine restarts, and when the replica is shutting down.
        """
        self._require_open()
        return self._engine.ready.status().version

    @property
    def request_ids(self) -> list[str]:
        """Return the ids of the requests in progress."""
        return [request.request_id for request in self._in_progress.values()]

    async def Generate(self, request: pb.GenerateRequest, context: Context | None = None) -> pb.GenerateResponse:
        """Sample and respond when all samples have ended. The HTTP port calls this, too."""
        try:
            async with self._clock.timeout(self._limit_s(context)):
                if not request.request_id:
                    return await self._generate(request)
                content = request.SerializeToString(deterministic=True)
                answers = self._responses.once("Generate", request.request_id, content, lambda: self._alone(request))
                return [answer async for answer in answers][-1]
        except TimeoutError as error:
            raise self._late() from error

    async def _alone(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateResponse, None]:
        yield await self._generate(request)

    async def _generate(self, request: pb.GenerateRequest) -> pb.GenerateResponse:
        async with self._admitted(request) as (wanted, prompt):
            copies = _greedy_copies(wanted)
            try:
                result = await self._engine.current.sample(replace(wanted, n=1) if copies > 1 else wanted)
            except (EngineError, EngineBusyError, ValueError) as error:
                raise _translated(error) from error
        response = pb.GenerateResponse(
            request_id=wanted.request_id,
            prompt_token_ids=wanted.prompt_ids,
            tokenizer_digest=self._tokenizer.digest,
            prompt_logprobs=result.prompt_logprobs,
            cached_prompt_tokens=result.cached_prompt_tokens,
            continued=prompt.continued,
        )
        for sample in result.samples:
            text = self._tokenizer.decode([*wanted.continued, *sample.token_ids]) if request.return_text else ""
            for index in range(sample.index, sample.index + copies):
                filled = response.samples.add()
                _fill(filled, sample, index, text)
                if request.return_message:
                    filled.message.CopyFrom(await self._message(request, wanted, index, sample.token_ids))
        return response

    # gRPC also accepts a coroutine that writes the messages; the stubs only know generators.
    async def GenerateStream(  # type: ignore[override]
        self, request: pb.GenerateStreamRequest, context: Context
    ) -> None:
        """Sample and send tokens as they are sampled.

        Write the messages here instead of yielding them, so that the deadline also covers a message that a stalled caller does not accept.
        """
        try:
            async with (
                self._clock.timeout(self._limit_s(context)),
                contextlib.aclosing(self._messages(request)) as messages,
            ):
                async for message in messages:
                    await context.write(message)
        except TimeoutError as error:
            raise self._late() from error

    async def stream(self, request: pb.GenerateStreamRequest) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        """Sample and yield tokens as they are sampled, for the HTTP port. Closing the iterator aborts the sampling."""
        end = self._clock() + self._request_s
        async with contextlib.aclosing(self._messages(request)) as messages:
            while True:
                try:
                    async with self._clock.timeout(end - self._clock()):
                        message = await anext(messages, None)
                except TimeoutError as error:
                    raise self._late() from error
                if message is None:
                    return
                yield message

    def _messages(self, request: pb.GenerateStreamRequest) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        """Return the messages of a new stream, or the messages of an earlier stream with the same request id."""
        pace, asked = _pace_of(request), request.request
        if not asked.request_id:
            return self._sampled(asked, pace)
        content = asked.SerializeToString(deterministic=True)
        return self._responses.once(
            "GenerateStream", asked.request_id, content, lambda: self._sampled(asked, pace), passing=_has_no_tokens
        )

    async def _sampled(
        self, request: pb.GenerateRequest, pace: Pace
    ) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        samples: dict[int, _SampleText] = {}
        async with self._admitted(request) as (wanted, prompt):
            copies = _greedy_copies(wanted)
            response = pb.GenerateStreamResponse(
                opening=pb.StreamOpening(
                    request_id=wanted.request_id,
                    prompt_token_ids=wanted.prompt_ids,
                    tokenizer_digest=self._tokenizer.digest,
                    continued=prompt.continued,
                )
            )
            try:
                stream = self._engine.current.stream(replace(wanted, n=1) if copies > 1 else wanted, pace)
                async with contextlib.aclosing(stream):
                    async for progress in stream:
                        response.chunk.stage, response.chunk.engine_steps = STAGES[progress.stage], progress.steps
                        for part in progress.parts:
                            if part.index not in samples:
                                samples[part.index] = self._sample_text(request, wanted)
                            await self._add(response.chunk, part, samples[part.index], wanted.request_id, copies)
                        yield response
                        response = pb.GenerateStreamResponse()
            except (EngineError, EngineBusyError, ValueError) as error:
                raise _translated(error) from error

    def _sample_text(self, request: pb.GenerateRequest, wanted: GenerationRequest) -> _SampleText:
        """Return the decoder and the parser for a new sample's tokens that the request needs."""
        before = wanted.prompt_ids[: len(wanted.prompt_ids) - len(wanted.continued)]
        return _SampleText(
            self._tokenizer.text_stream(wanted.continued) if request.return_text else None,
            self._tokenizer.reply_stream(request, before) if request.return_message else None,
            wanted.continued,
        )

    async def _add(
        self, chunk: pb.StreamChunk, part: Sample, sample: _SampleText, request_id: str, copies: int
    ) -> None:
        """Add the next tokens of a sample to a message, with the text that they complete."""
        last = part.finish_reason is not None
        text, reasoning, content = "", "", ""
        if sample.text is not None:
            text = sample.text.after(part.token_ids, last=last)
        if sample.reply is not None:
            reasoning, content = await sample.reply.after([*sample.continued, *part.token_ids], last=last)
            sample.continued = ()
        for index in range(part.index, part.index + copies):
            delta = chunk.deltas.add(offset=part.offset, reasoning=reasoning, content=content)
            _fill(delta.tokens, part, index, text)
            if sample.reply is not None and last:
                delta.tokens.message.CopyFrom(self._tokenizer.message(f"{request_id}/{index}", sample.reply))

    async def _message(
        self, request: pb.GenerateRequest, wanted: GenerationRequest, index: int, token_ids: Sequence[int]
    ) -> tokens_pb2.ChatMessage:
        """Return the message of a sample, including the tokens that it continues."""
        before = wanted.prompt_ids[: len(wanted.prompt_ids) - len(wanted.continued)]
        name = f"{wanted.request_id}/{index}"
        return await self._tokenizer.message_of(request, name, before, [*wanted.continued, *token_ids])

    def _limit_s(self, context: Context | None) -> float | None:
        """Return the seconds for a request. None if its caller set a deadline, at which gRPC cancels it."""
        return self._request_s if context is None or context.time_remaining() is None else None

    def _late(self) -> SluiceError:
        message = f"the request did not end within {self._request_s:g} s (rollout.deadlines.request_s): lower max_tokens, or raise it"
        return SluiceError(grpc.StatusCode.DEADLINE_EXCEEDED, "REQUEST_DEADLINE", message)

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        """Describe the served model."""
        del request, context
        engine = self._engine.current
        info = engine.info
        lora = engine.lora_limits if isinstance(engine, LoraEngine) else None
        return pb.GetModelResponse(
            model=info.model,
            vocabulary_size=info.vocabulary_size,
            max_model_len=info.max_model_len,
            dtype=info.dtype,
            tokenizer_digest=self._tokenizer.digest,
            eos_token_ids=info.eos_token_ids,
            engine=info.engine,
            policy_version=engine.status().version.to_proto(),
            architecture=info.architecture,
            adapters=loaded_adapters(engine),
            max_adapters=lora.max_loras if lora else 0,
            max_adapter_rank=lora.max_rank if lora else 0,
            tool_parser=self._tokenizer.replies.tool_parser,
            reasoning_parser=self._tokenizer.replies.reasoning_parser,
        )

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Return the token ids of text or messages."""
        del context
        return pb.TokenizeResponse(
            token_ids=await self._tokenizer.tokenize(request), tokenizer_digest=self._tokenizer.digest
        )

    @contextlib.asynccontextmanager
    async def _admitted(self, request: pb.GenerateRequest) -> AsyncIterator[tuple[GenerationRequest, Prompt]]:
        """Check a request and reserve its place in the queue for as long as the block runs.

        Yield the engine's request and the prompt that it samples from.
        """
        engine, n = self._engine.ready, self._places(request)
        self.samples += n
        self._idle.clear()
        try:
            check_continuation(request, engine.info)
            prompt = await self._tokenizer.prompt_of(request, engine.info.max_model_len - 1)
            wanted = generation_request(request, prompt.ids, engine.info)
            if request.HasField("min_policy_version"):
                least, held = Version.from_proto(request.min_policy_version), engine.held()
                present = engine.status().version if held is None else held.serving
                if present < least:
                    raise SluiceError.failed_precondition(
                        "VERSION_TOO_OLD", f"this replica serves version {present}, the request needs {least}"
                    )
            self._in_progress[id(wanted)] = wanted
            try:
                yield wanted, prompt
            finally:
                del self._in_progress[id(wanted)]
        finally:
            self.samples -= n
            if not self.samples:
                self._idle.set()

    async def finish(self) -> None:
        """Wait until the requests in progress have ended or the drain is over. Then end the rest with their tokens so far."""
        await self._drain.until(self._idle)
        if not self.samples:
            return
        log.info("handing over what is left", samples=self.samples)
        with contextlib.suppress(TimeoutError):
            async with self._clock.timeout(HAND_OVER_S):
                while self.samples:  # a request that was just admitted may not have reached the engine yet
                    with contextlib.suppress(EngineError):  # a dead engine ends its requests itself
                        await asyncio.gather(*map(self._engine.current.abort, self.request_ids))
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(ABORT_AGAIN_S):
                            await self._idle.wait()

    def _require_open(self) -> None:
        if self._drain.begun.is_set():
            raise SluiceError.unavailable("DRAINING", "this replica is shutting down; use another one", RETRY_AFTER_S)

    def _places(self, request: pb.GenerateRequest) -> int:
        """Return the number of places in the queue that a request needs.

        Raises:
            SluiceError: FAILED_PRECONDITION for another run, INVALID_ARGUMENT if it never fits the queue,
                RESOURCE_EXHAUSTED if the queue is full, UNAVAILABLE when the replica is shutting down.
        """
        self._require_open()
        if request.run and request.run != self._run:
            raise SluiceError.failed_precondition(
                "WRONG_RUN", f"this replica belongs to {self._run}, the request to {request.run[:MAX_NAME]}"
            )
        n, most = request.n if request.HasField("n") else 1, self._limits.max_queued
        if n > MAX_SAMPLES:
            return 0  # `generation_request` refuses it, and also reports all other faults
        if n > most:
            raise SluiceError.invalid_argument("n", f"at most {most} samples are queued here, {n} never fit")
        if self.samples + n > most:
            raise SluiceError.resource_exhausted(
                "QUEUE_FULL",
                f"{self.samples} samples are queued or running and at most {most} may be; retry later, or add replicas",
                RETRY_AFTER_S,
            )
        return n


def _pace_of(request: pb.GenerateStreamRequest) -> Pace:
    pace = DEFAULT_PACE
    if request.HasField("coalesce"):
        seconds = request.coalesce.seconds + request.coalesce.nanos / 1e9
        if not 0 <= seconds <= MAX_COALESCE_S:
            raise SluiceError.invalid_argument("coalesce", f"between 0 and {MAX_COALESCE_S:.0f} s, not {seconds:g} s")
        pace = replace(pace, seconds=seconds)
    if request.HasField("coalesce_tokens"):
        if not request.coalesce_tokens:
            raise SluiceError.invalid_argument("coalesce_tokens", "at least 1; leave it out for 64")
        pace = replace(pace, tokens=request.coalesce_tokens)
    return pace


def _has_no_tokens(message: pb.GenerateStreamResponse) -> bool:
    """Return whether a message only says that the request is alive."""
    return not message.HasField("opening") and not message.chunk.deltas


def _translated(error: EngineError | EngineBusyError | ValueError) -> SluiceError:
    if isinstance(error, UnknownAdapterError):
        return SluiceError.failed_precondition("ADAPTER_NOT_LOADED", str(error))
    if isinstance(error, ValueError):
        return SluiceError.invalid_argument("sampling", str(error))
    if isinstance(error, EngineBusyError):
        return SluiceError.resource_exhausted("QUEUE_FULL", str(error), RETRY_AFTER_S)
    return SluiceError.unavailable("ENGINE_FAILED", f"{error}; retry, or use another replica", RETRY_AFTER_S)


def generation_request(request: pb.GenerateRequest, prompt_ids: list[int], info: ModelInfo) -> GenerationRequest:
    """Return the engine's request.

    Raises:
        SluiceError: INVALID_ARGUMENT with every field at fault.
    """
    _refuse(dict(violations_of(request, prompt_ids, info)))
    return GenerationRequest(
        request_id=request.request_id or uuid.uuid4().hex,
        prompt_ids=prompt_ids,
        sampling=sampling_of(request.sampling),
        n=request.n if request.HasField("n") else 1,
        priority=max(0, request.priority) if caller().role == "agent" else request.priority,
        prompt_logprobs=request.return_prompt_logprobs,
        adapter=request.adapter,
        continued=prompt_ids[len(prompt_ids) - request.continued_tokens :],
    )


def check_continuation(request: pb.GenerateRequest, info: ModelInfo) -> None:
    """Check the ids that a request continues, before its conversation is rendered.

    Raises:
        SluiceError: INVALID_ARGUMENT with every field at fault.
    """
    if request.HasField("continues"):
        _refuse(dict(_continuation_violations(request, info)))


def _continuation_violations(request: pb.GenerateRequest, info: ModelInfo) -> Iterator[tuple[str, str]]:
    if request.WhichOneof("prompt") != "conversation":
        yield "continues", "needs a conversation, the whole one from its first message"
        return
    known, messages = request.continues.messages, request.conversation.messages
    if not 1 <= known < len(messages):
        yield (
            "continues.messages",
            f"at least 1 and less than the {len(messages)} messages of the conversation, not {known}",
        )
    elif messages[known - 1].role != "assistant":
        yield (
            "continues.messages",
            f"the ids must end with a message of the assistant; message {known - 1} has the role {messages[known - 1].role[:64]!r}",
        )
    yield from _prompt_violations("continues.token_ids", request.continues.token_ids, info)


def _refuse(violations: dict[str, str]) -> None:
    if violations:
        raise SluiceError(
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_REQUEST",
            "; ".join(f"{name}: {text}" for name, text in violations.items()),
            violations=violations,
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


def violations_of(request: pb.GenerateRequest, prompt_ids: list[int], info: ModelInfo) -> Iterator[tuple[str, str]]:
    """Yield each invalid field of a request, and what is wrong with it."""
    for field in ("request_id", "run", "adapter", "tenant"):
        if len(getattr(request, field)) > MAX_NAME:
            yield field, f"at most {MAX_NAME} characters"
    if request.HasField("n") and not 1 <= request.n <= MAX_SAMPLES:
        yield "n", f"between 1 and {MAX_SAMPLES}, not {request.n}"
    yield from _prompt_violations(request.WhichOneof("prompt") or "prompt", prompt_ids, info)
    if request.continued_tokens > len(prompt_ids):
        yield "continued_tokens", f"at most the {len(prompt_ids)} tokens of the prompt, not {request.continued_tokens}"
    yield from _sampling_violations(request.sampling, info)
    yield from _token_violations(request.sampling, info)


def _prompt_violations(field: str, prompt_ids: Sequence[int], info: ModelInfo) -> Iterator[tuple[str, str]]:
    """Yield each fault of the prompt, under the field that the caller set."""
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
        ("temperature", wire.temperature, 0.0, MAX_TEMPERATURE),
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


def _greedy_copies(request: GenerationRequest) -> int:
    """Return how often to return each sample of the engine. Greedy samples of one request are all the same, so it samples only one."""
    return request.n if request.sampling.temperature == 0 else 1


def _fill(message: pb.GeneratedSample, part: Sample, index: int, text: str) -> None:
    """Fill the message for a whole sample, or for the next tokens of a sample. Fields are set in place, since protobuf copies messages."""
    message.index, message.text, message.stop_string = index, text, part.stop_string
    message.token_ids.extend(part.token_ids)
    message.logprobs.extend(part.logprobs)
    for start, version in part.spans:
        span = message.version_spans.add(start=start).policy_version
        span.epoch, span.number = version
    message.finish_reason = FINISH_REASONS[part.finish_reason]
    for each in part.top_logprobs:
        message.top_logprobs.add(ids=[token for token, _ in each], logprobs=[logprob for _, logprob in each])


def loaded_adapters(engine: InferenceEngine) -> list[pb.LoadedAdapter]:
    """Return the adapters that an engine holds."""
    if not isinstance(engine, LoraEngine):
        return []
    return [
        pb.LoadedAdapter(
            version=each.version.to_proto(),
            base=each.base.to_proto(),
            adapters=each.names,
            serves_policy=each.serves_policy,
            requests=each.requests,
        )
        for each in engine.adapters()
    ]
