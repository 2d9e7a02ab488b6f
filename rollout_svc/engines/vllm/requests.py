"""Translates between our requests and results and vLLM's, and reads its load.

vLLM reports version spans only with the last output of a request. A stream needs them earlier, so that the tokens that a client
has when a replica dies stay usable. So tokens, log-probabilities and spans of requests in progress are read from the request
states of vLLM's front end, which also saves one Python object per token. `require_tested_version` refuses other versions of vLLM,
and the conformance tests compare the spans with the final ones.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollout_svc.engines.adapters import Adapter
from rollout_svc.engines.base import FinishReason, GenerationRequest, GenerationResult, ModelInfo, Sample, Sampling
from rollout_svc.engines.steps import Steps
from sluice.limits import MIN_TEMPERATURE, may_train_at
from sluice.versions import Version, VersionSpan, spans_between

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer
    from vllm.v1.engine.output_processor import RequestOutputCollector, RequestState
    from vllm.v1.engine.parallel_sampling import ParentRequest
    from vllm.v1.metrics.stats import SchedulerStats

SEED_RANGE = 2**62
"""Seeds are reduced modulo this. vLLM adds the index of the sample and stores 64 bits; a larger value would kill its engine."""

REPETITION_PENALTIES = (0.01, 100.0)
"""Outside of this range, logits overflow to infinity and then to NaN."""

GREATEST_BIAS = 100.0
"""vLLM silently reduces a larger bias."""

HOLD_S = 0.1
"""Maximum seconds for which the engine's process holds tokens back from a reader that does not want them at once."""

HOLD_TOKENS = 64
"""Maximum number of tokens of a sample that it holds back."""


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """A request that vLLM has accepted.

    Attributes:
        adapter: Its adapter, if it has one. Then all of its tokens carry the version of the adapter.
        internal_id: Its id in vLLM, which is unique.
        retired: Whether it was ended because its adapter was unloaded.
        released: Whether its caller has left.
        held: Whether the engine's process may hold its tokens back.
    """

    request: GenerationRequest
    adapter: Adapter | None
    internal_id: str
    _collector: RequestOutputCollector
    _states: list[RequestState]
    _parent: ParentRequest | None
    retired: bool = False
    released: bool = False
    held: bool = False
    _given: list[int] = field(default_factory=list)
    _ended: list[bool] = field(default_factory=list)
    _final: RequestOutput | None = None

    def __post_init__(self) -> None:
        self._given = [0] * len(self._states)
        self._ended = [False] * len(self._states)

    async def result(self) -> GenerationResult:
        """Wait for the end of all samples and return them. Raise the engine's error."""
        self._final = await self._collector.get()
        return GenerationResult(
            self.request.request_id,
            [self._sample(each) for each in self._final.outputs],
            prompt_logprobs(self._final.prompt_logprobs) if self.request.prompt_logprobs else [],
            self._final.num_cached_tokens or 0,
        )

    async def wait(self, seconds: float) -> None:
        """See `StreamedRequest`."""
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
        """Return whether all samples had ended at the last `result` or `wait`."""
        return self._final is not None

    @property
    def started(self) -> bool:
        """Return whether one of the samples has a token."""
        return any(state.detokenizer.output_token_ids for state in self._states)

    def new_tokens(self) -> int:
        """See `StreamedRequest`."""
        return max(
            len(state.detokenizer.output_token_ids) - given
            for state, given in zip(self._states, self._given, strict=True)
        )

    def watched(self, tokens: int) -> Callable[[], int]:
        """Return a function for `Steps.watch` that wakes `wait` when a sample has `tokens` new tokens."""

        def look() -> int:
            if self.ended or self.released:
                return 0
            new = self.new_tokens()
            if new < tokens:
                return tokens - new
            self._collector.ready.set()
            return tokens

        return look

    def parts(self) -> list[Sample]:
        """See `StreamedRequest`."""
        return list(self._parts())

    def drop(self, index: int) -> str:
        """Give no more tokens of a sample. Return its id in vLLM."""
        self._ended[index] = True
        return str(self._states[index].request_id)

    def _parts(self) -> Iterator[Sample]:
        top = self.request.sampling.top_logprobs
        finals = {output.index: output for output in self._final.outputs} if self._final is not None else {}
        for index, state in enumerate(self._states):
            if self._ended[index]:
                continue
            output = finals.get(index)
            if output is None and self._parent is not None:  # the parent keeps the samples that ended before the others
                output = self._parent.output_aggregator[index]
            start, token_ids = self._given[index], state.detokenizer.output_token_ids
            end = self._given[index] = len(token_ids)
            if output is None and start == end:
                continue
            self._ended[index] = output is not None
            flat = state.logprobs_processor.logprobs
            alternatives = flat[start:end] if top else None
            yield Sample(
                index=index,
                offset=start,
                token_ids=token_ids[start:end],
                logprobs=flat_logprobs(alternatives, top) if top else flat.logprobs[start:end],
                spans=self._spans(state, start, end) if end > start else [],
                finish_reason=None if output is None else self._finish_reason(output),
                stop_string="" if output is None else stop_string(output),
                top_logprobs=flat_top_logprobs(alternatives, top),
            )

    def _spans(self, state: RequestState, start: int, end: int) -> list[VersionSpan]:
        if self.adapter is not None:
            return [VersionSpan(start, self.adapter.version)]
        starts = state.weight_version_starts
        if starts and starts[-1][1] <= start:  # one version sampled the whole chunk, which is nearly always so
            return [VersionSpan(start, _version(starts[-1][0]))]
        return spans_between([VersionSpan(first, _version(label)) for label, first in starts], start, end)

    def _sample(self, output: CompletionOutput) -> Sample:
        top = self.request.sampling.top_logprobs
        spans = [VersionSpan(span.start, Version.parse(span.version)) for span in output.weight_versions or ()]
        if self.adapter is not None:
            spans = [VersionSpan(0, self.adapter.version)] if output.token_ids else []
        return Sample(
            index=output.index,
            token_ids=list(output.token_ids),
            logprobs=flat_logprobs(output.logprobs, top),
            spans=spans,
            finish_reason=self._finish_reason(output),
            stop_string=stop_string(output),
            top_logprobs=flat_top_logprobs(output.logprobs, top),
        )

    def _finish_reason(self, output: CompletionOutput) -> FinishReason:
        """Return our finish reason for vLLM's. An unknown reason becomes an error."""
        aborted = FinishReason.VERSION_RETIRED if self.retired else FinishReason.ABORT
        known = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": aborted}
        return known.get(output.finish_reason, FinishReason.ERROR)


async def submit(
    engine: AsyncLLM,
    request: GenerationRequest,
    adapter: Adapter | None,
    params: SamplingParams,
    *,
    name: str,
    salt: str,
) -> TrackedRequest:
    """Submit a request to vLLM's ``AsyncLLM``.

    Args:
        engine: The running engine.
        request: The request.
        adapter: Its adapter; None for the weights alone.
        params: vLLM's sampling parameters. Several samples share one `TrackedRequest`.
        name: Unique among the requests in progress.
        salt: Part of the key of its entries in the prefix cache.

    Raises:
        VLLMClientError: if vLLM refuses it.
    """
    from vllm.lora.request import LoRARequest  # noqa: PLC0415 - vLLM is loaded by start()

    prompt = {"type": "token", "prompt_token_ids": request.prompt_ids, "cache_salt": salt}
    lora = None if adapter is None else LoRARequest(adapter.label, adapter.number, str(adapter.staged.path))
    try:
        collector = await engine.add_request(name, prompt, params, lora_request=lora, priority=request.priority)
    except BaseException:
        await engine.abort(name)  # the request may be registered although the call failed or was cancelled
        raise
    processor = engine.output_processor
    if params.n == 1:
        names, parent = [collector.request_id], None
    else:
        names = [f"{index}_{collector.request_id}" for index in range(params.n)]
        parent = processor.parent_requests[collector.request_id]
    states = [processor.request_states[name] for name in names]
    if request.continued and request.sampling.stop:
        for state in states:
            prime(state.detokenizer, engine.tokenizer, request)
    return TrackedRequest(request, adapter, collector.request_id, collector, states, parent)


def prime(
    detokenizer: BaseIncrementalDetokenizer, tokenizer: PreTrainedTokenizerBase, request: GenerationRequest
) -> None:
    """Let vLLM find stop strings that begin in the tokens that a new request continues. vLLM looks for stop strings that end in new text.

    A character may be cut where the new tokens begin. vLLM's stream of text begins with the prompt, and would give the whole
    prompt as new text when the character is complete. So begin the stream before that character.
    """
    reach = 4 * max(map(len, request.sampling.stop)) + 16  # a token may be a single byte of a character
    near = request.continued[-reach:]
    text, cut = tokenizer.decode(near, skip_special_tokens=True), 0
    while text.endswith("\ufffd") and cut < min(3, len(near)):
        cut += 1
        text = tokenizer.decode(near[:-cut], skip_special_tokens=True)
    if cut:
        from tokenizers.decoders import DecodeStream  # noqa: PLC0415 - comes with transformers

        detokenizer.stream = DecodeStream(ids=request.prompt_ids[:-cut], skip_special_tokens=True)
        text += "".join(map(detokenizer.decode_next, near[-cut:]))
    detokenizer.output_text = text + detokenizer.output_text


@functools.lru_cache(maxsize=64)
def _version(label: str) -> Version:
    """Return the version of a label. Cached, because each chunk of each stream has a label, but there are few versions."""
    return Version.parse(label)


class LoadRecorder:
    """Keeps the last statistics of the scheduler, in place of vLLM's own loggers, and counts its steps.

    Each engine reports after each step, even after a step that computed a part of a long prompt and gave no token.

    Attributes:
        steps: Steps of all engines.
        preemptions: Samples that lost their place in the KV cache and were computed again. vLLM reports them only if its prefix
            cache is enabled, which is its default.
    """

    def __init__(self) -> None:
        self.steps = Steps()
        self.preemptions = 0
        self._last: dict[int, SchedulerStats] = {}
        self._own = 0

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: object,
        mm_cache_stats: object = None,
        engine_idx: int = 0,
    ) -> None:
        """Record the statistics of one step of one engine (vLLM's signature)."""
        del iteration_stats, mm_cache_stats
        if scheduler_stats is None:
            return
        self._last[engine_idx] = scheduler_stats
        again = scheduler_stats.prefix_cache_stats.preempted_requests
        if again:
            own = min(again, self._own)
            self._own -= own
            self.preemptions += again - own
        self.steps.advance()

    def expect_recomputation(self) -> None:
        """Do not count the running samples as preempted when they are computed again, because the cache was cleared on purpose."""
        self._own = self.running

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Do nothing: sleep is not used."""

    def record_admission_rejection(self, reason: str) -> None:
        """Do nothing: the service admits requests."""

    def log(self) -> None:
        """Do nothing."""

    def log_engine_initialized(self) -> None:
        """Do nothing."""

    @property
    def running(self) -> int:
        """Return the number of sequences in the last step of all engines."""
        return sum(stats.num_running_reqs for stats in self._last.values())

    @property
    def waiting(self) -> int:
        """Return the number of sequences that waited for a place in the last step of all engines."""
        return sum(stats.num_waiting_reqs + stats.num_skipped_waiting_reqs for stats in self._last.values())

    @property
    def kv_cache_usage(self) -> float:
        """Return the used fraction of the fullest KV cache, from 0 to 1."""
        return max((stats.kv_cache_usage for stats in self._last.values()), default=0.0)


def live_token_count(engine: AsyncLLM) -> int:
    """Return the number of tokens of requests in progress."""
    return sum(len(state.detokenizer.output_token_ids) for state in engine.output_processor.request_states.values())


def sampling_params(
    request: GenerationRequest, info: ModelInfo, *, has_tokenizer: bool, hold: bool = False
) -> SamplingParams:
    """Return vLLM's ``SamplingParams``.

    End tokens become stop tokens, so that all of a model's end tokens count and not only the tokenizer's.

    Args:
        request: The request.
        info: The model.
        has_tokenizer: Whether stop strings can be found.
        hold: Whether the engine's process may hold tokens back; see `rollout_svc.engines.vllm.scheduler`. It never does for requests
            with stop strings, because vLLM finds these in its front end.

    Raises:
        ValueError: if this engine does not support the parameters.
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
        stream_interval=HOLD_TOKENS if hold and not sampling.stop else None,
        skip_clone=True,
    )
    return parameters


def check_request(request: GenerationRequest, info: ModelInfo, *, seeds: bool) -> None:
    """Refuse a request that would kill vLLM's engine.

    Raises:
        ValueError: with the reason.
    """
    ids = request.prompt_ids
    if ids and not 0 <= min(ids) <= max(ids) < info.vocabulary_size:
        wrong = next(id_ for id_ in ids if not 0 <= id_ < info.vocabulary_size)
        raise ValueError(f"token id {wrong} is outside the vocabulary of {info.vocabulary_size}")
    if request.sampling.seed is not None and not seeds:
        raise ValueError("a seed needs enable_chunked_prefill = false on CPU, or vLLM's engine dies of a cut prompt")


@contextmanager
def refusals() -> Iterator[None]:
    """Turn vLLM's refusal of a request into ValueError."""
    from vllm.exceptions import VLLMClientError  # noqa: PLC0415 - vLLM is loaded by start()

    try:
        yield
    except VLLMClientError as error:
        raise ValueError(str(error)) from error


def check_sampling(sampling: Sampling, vocabulary_size: int, *, has_tokenizer: bool) -> None:
    """Refuse parameters that vLLM does not support or silently changes, and parameters that kill its engine.

    Raises:
        ValueError: with the field.
    """
    if sampling.temperature > 0 and not may_train_at(
        sampling.temperature
    ):  # vLLM would silently sample at MIN_TEMPERATURE
        raise ValueError(
            f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE:g}, not {sampling.temperature:g}"
        )
    least, most = REPETITION_PENALTIES
    if not least <= sampling.repetition_penalty <= most:
        raise ValueError(f"repetition_penalty must be in [{least}, {most}], not {sampling.repetition_penalty}")
    if not all(abs(bias) <= GREATEST_BIAS for bias in sampling.logit_bias.values()):
        raise ValueError(f"logit_bias must be in [-{GREATEST_BIAS}, {GREATEST_BIAS}]")
    if not all(0 <= id_ < vocabulary_size for id_ in (*sampling.stop_token_ids, *sampling.logit_bias)):
        raise ValueError(f"stop_token_ids and logit_bias must name ids below the vocabulary size, {vocabulary_size}")
    if sampling.stop and not has_tokenizer:
        raise ValueError("stop strings need a tokenizer in the model's directory; use stop_token_ids")


def cut_at_nan(part: Sample) -> bool:
    """Cut a sample before its first NaN, since later tokens are noise. Return whether there was one."""
    if not math.isnan(sum(part.logprobs)):
        return False
    keep = next(position for position, value in enumerate(part.logprobs) if math.isnan(value))
    del part.token_ids[keep:], part.logprobs[keep:], part.top_logprobs[keep:]
    part.spans = [span for span in part.spans if span.start < part.offset + keep]
    part.finish_reason = FinishReason.ERROR
    return True


def stop_string(output: CompletionOutput) -> str:
    """Return the stop string that ended a sample; empty if a token ended it."""
    return output.stop_reason if isinstance(output.stop_reason, str) else ""


def flat_logprobs(flat: FlatLogprobs | None, top: int) -> list[float]:
    """Return the log-probabilities of the sampled tokens: the first entry of each position."""
    if not flat:
        return []
    if top == 0:
        return list(flat.logprobs)
    return [flat.logprobs[start] for start in flat.start_indices]


def flat_top_logprobs(flat: FlatLogprobs | None, top: int) -> list[list[tuple[int, float]]]:
    """Return the most likely tokens of each position with their log-probabilities, if they were requested."""
    if top == 0 or not flat:
        return []
    ranges = zip(flat.start_indices, flat.end_indices, strict=True)
    return [
        list(zip(flat.token_ids[start + 1 : end], flat.logprobs[start + 1 : end], strict=True)) for start, end in ranges
    ]


def prompt_logprobs(flat: FlatLogprobs | None) -> list[float]:
    """Return the log-probabilities of the prompt tokens from the second on."""
    if not flat:
        return []
    starts = [start for start, end in zip(flat.start_indices, flat.end_indices, strict=True) if end > start]
    return [flat.logprobs[start] for start in starts]
