"""Active requests of the engine. Its thread writes them, and callers read them in the event loop.

The lists of a sample only grow, and its token ids grow last. So a reader in another thread that reads as many log-probabilities
as there are tokens sees whole steps, without a lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools

import numpy as np

from rollout_svc.engines.adapters import Adapter
from rollout_svc.engines.base import (
    EngineError,
    FinishReason,
    GenerationChunk,
    GenerationRequest,
    GenerationResult,
    ModelInfo,
    Sample,
)
from rollout_svc.engines.slots.sampling import RowSampling
from sluice.versions import Version, VersionSpan, spans_between

__all__ = ["ActiveRequest", "ActiveSample", "WaitingQueue"]


class ActiveSample:
    """One active sample.

    Args:
        request: Its request.
        index: Its index in the request.
        info: The served model.
    """

    def __init__(self, request: GenerationRequest, index: int, info: ModelInfo) -> None:
        sampling = request.sampling
        seed = sampling.seed
        self.request, self.index = request, index
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[list[tuple[int, float]]] = []
        self.spans: list[VersionSpan] = []
        self.stop_string = ""
        self.finish_reason: FinishReason | None = None
        room = info.max_model_len - len(request.prompt_ids)
        self.most_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        end_ids = frozenset(sampling.stop_token_ids) | frozenset(() if sampling.ignore_eos else info.eos_token_ids)
        generator = None if seed is None else np.random.default_rng(seed + index)
        self.row = RowSampling(sampling, request.prompt_ids, self.token_ids, end_ids, generator)

    @property
    def most_positions(self) -> int:
        """Return the number of positions of the KV cache that it needs at most."""
        return len(self.request.prompt_ids) + self.most_tokens

    @property
    def last_position(self) -> int:
        """Return the position of its last token, whose keys and values are not computed yet."""
        return len(self.request.prompt_ids) + len(self.token_ids) - 1

    def append(self, token: int, logprob: float, top: list[tuple[int, float]], version: Version) -> None:
        """Append a token."""
        if not self.spans or self.spans[-1].version != version:
            self.spans.append(VersionSpan(len(self.token_ids), version))
        self.logprobs.append(logprob)
        if self.request.sampling.top_logprobs:
            self.top.append(top)
        self.token_ids.append(token)

    def chunk(self, start: int) -> GenerationChunk | None:
        """Return the tokens from `start` on; None if there are none."""
        reason = self.finish_reason  # read before the tokens: no token follows once it is set
        end = len(self.token_ids)
        if start == end and reason is None:
            return None
        return GenerationChunk(
            index=self.index,
            offset=start,
            token_ids=self.token_ids[start:end],
            logprobs=self.logprobs[start:end],
            spans=spans_between(self.spans, start, end),
            finish_reason=reason,
            stop_string=self.stop_string,
            top_logprobs=self.top[start:end],
        )

    def result(self) -> Sample:
        """Return the whole sample after its end."""
        return Sample(
            index=self.index,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            spans=self.spans,
            finish_reason=self.finish_reason or FinishReason.ERROR,
            stop_string=self.stop_string,
            top_logprobs=self.top,
        )


class ActiveRequest:
    """One active request.

    Args:
        request: What was asked.
        info: The served model.
        adapter: Its adapter, if it has one.
    """

    def __init__(self, request: GenerationRequest, info: ModelInfo, adapter: Adapter | None = None) -> None:
        self.request, self.adapter, self.adapter_name = request, adapter, request.adapter
        self.samples = [ActiveSample(request, index, info) for index in range(request.n)]
        self.prompt_logprobs: list[float] = []
        self.error: EngineError | None = None
        self.ended = False
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._left = request.n

    def sample_ended(self) -> None:
        """Note that a sample has ended. The last one wakes the caller."""
        self._left -= 1
        if self._left == 0:
            self._tell()

    def fail(self, error: EngineError) -> None:
        """End the request with an error."""
        self.error = error
        self._tell()

    def _tell(self) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop of the caller is closed
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self.ended = True
        self._wake.set()

    async def wait(self, seconds: float | None = None) -> None:
        """Wait until all samples have ended, or for some seconds. Call this in the event loop.

        Raises:
            EngineError: the error that ended the request.
        """
        timer = None if seconds is None else self._loop.call_later(seconds, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            if timer is not None:
                timer.cancel()
        if not self.ended:
            self._wake.clear()
        elif self.error is not None:
            raise EngineError(*self.error.args)  # a new one for each caller, since errors keep tracebacks

    def result(self) -> GenerationResult:
        """Return all samples after their end."""
        return GenerationResult(
            self.request.request_id, [sample.result() for sample in self.samples], self.prompt_logprobs
        )


class WaitingQueue:
    """Samples that wait for a row, in the order of priority and age."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, ActiveRequest, ActiveSample]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, active: ActiveRequest) -> None:
        """Queue all samples of a request."""
        for sample in active.samples:
            heapq.heappush(self._heap, (active.request.priority, next(self._numbers), active, sample))

    def first(self) -> tuple[ActiveRequest, ActiveSample]:
        """Return the next sample."""
        return self._heap[0][2:]

    def pop(self) -> tuple[ActiveRequest, ActiveSample]:
        """Remove and return the next sample."""
        return heapq.heappop(self._heap)[2:]

    def remove(self, active: ActiveRequest | None) -> list[tuple[ActiveRequest, ActiveSample]]:
        """Remove and return the samples of a request, or all for None."""
        gone = [entry[2:] for entry in self._heap if active is None or entry[2] is active]
        self._heap = [entry for entry in self._heap if active is not None and entry[2] is not active]
        heapq.heapify(self._heap)
        return gone
