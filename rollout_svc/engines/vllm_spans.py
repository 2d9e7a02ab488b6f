"""The one place that reads vLLM's internals: tokens, log-probabilities and version spans of requests under way.

vLLM reports version spans only with a request's last output. A stream needs them earlier, so that the tokens that were
received before a replica dies stay usable. They are read here from the front end's request states, which also saves one
Python object per token and stream. `require_tested_version` guards it; the conformance tests compare with the final spans.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rollout_svc.engines.adapter_slots import Adapter
from rollout_svc.engines.base import Span
from rollout_svc.engines.vllm_types import (
    Collector,
    CompletionOutput,
    FlatLogprobs,
    Llm,
    ParentRequest,
    RequestOutput,
    RequestState,
    SamplingParams,
)
from sluice.versions import Version

__all__ = ["Ended", "Sampled", "TrackedRequest", "live_token_count", "submit"]


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens of one sample from ``offset`` on; log-probabilities as vLLM lays them flat (see `vllm_results`)."""

    offset: int
    token_ids: list[int]
    flat: FlatLogprobs
    spans: list[Span]


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
            starts: Sequence[tuple[str, int]] = [(str(self.adapter.version), 0)]
        else:
            starts = state.weight_version_starts
        return Sampled(start, token_ids[start:end], flat, spans_between(starts, start, end))


def spans_between(starts: Sequence[tuple[str, int]], first: int, end: int) -> list[Span]:
    """Spans of the tokens from ``first`` to ``end`` (exclusive), given where each version begins."""
    spans: list[Span] = []
    for position, (label, start) in enumerate(starts):
        stop = starts[position + 1][1] if position + 1 < len(starts) else end
        if max(start, first) < min(stop, end):
            spans.append(Span(max(start, first), Version.parse(label)))
    return spans


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
