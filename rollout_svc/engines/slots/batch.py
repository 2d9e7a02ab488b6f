"""The samples that are generated together: a request and its samples, the queue, and the batch that samples a token for each row.

The engine's thread writes them, and callers read them in the event loop. The lists of a sample only grow, and `settle` sets how far
they may be read. So a reader in another thread sees whole steps without a lock, and never a last token without its finish reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import structlog
import torch
from torch import Tensor

from rollout_svc.engines.adapters import Adapter
from rollout_svc.engines.base import EngineError, FinishReason, GenerationRequest, GenerationResult, ModelInfo, Sample
from rollout_svc.engines.slots.model import SlotAdapters, SlotCache, SlotModel
from rollout_svc.engines.slots.sampling import Logits, RowSampling, draw
from sluice.versions import Version, VersionSpan, spans_between

CHARACTERS_PER_TOKEN = 4
"""A character has up to four tokens in byte-level vocabularies."""

SLACK_TOKENS = 16
"""Further tokens to decode, since special tokens have no text."""

log = structlog.get_logger()


class ActiveSample:
    """One active sample."""

    def __init__(self, request: GenerationRequest, index: int, info: ModelInfo) -> None:
        sampling = request.sampling
        seed = sampling.seed
        self.request, self.index = request, index
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[list[tuple[int, float]]] = []
        self.spans: list[VersionSpan] = []
        self.stop_string = ""
        self._settled: tuple[int, FinishReason | None] = (0, None)
        room = info.max_model_len - len(request.prompt_ids)
        self.most_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        end_ids = frozenset(sampling.stop_token_ids) | frozenset(() if sampling.ignore_eos else info.eos_token_ids)
        generator = None if seed is None else np.random.default_rng(seed + index)
        self.continued = request.continued
        self.row = RowSampling(sampling, request.prompt_ids, self.token_ids, end_ids, generator)

    @property
    def most_positions(self) -> int:
        """Return the maximum number of positions that it needs in the KV cache."""
        return len(self.request.prompt_ids) + self.most_tokens

    @property
    def last_position(self) -> int:
        """Return the position of its last token, whose keys and values are not computed yet."""
        return len(self.request.prompt_ids) + len(self.token_ids) - 1

    @property
    def finish_reason(self) -> FinishReason | None:
        """Return why it ended; None if it has not."""
        return self._settled[1]

    def settle(self, reason: FinishReason | None) -> None:
        """Let readers have the tokens so far. A reason means that no more tokens follow."""
        self._settled = (len(self.token_ids), reason)

    def append(self, token: int, logprob: float, top: list[tuple[int, float]], version: Version) -> None:
        """Append a token."""
        if not self.spans or self.spans[-1].version != version:
            self.spans.append(VersionSpan(len(self.token_ids), version))
        self.logprobs.append(logprob)
        if self.request.sampling.top_logprobs:
            self.top.append(top)
        self.token_ids.append(token)

    def part(self, start: int = 0) -> Sample:
        """Return the settled tokens from `start` on."""
        end, reason = self._settled
        return Sample(
            index=self.index,
            offset=start,
            token_ids=self.token_ids[start:end],
            logprobs=self.logprobs[start:end],
            spans=spans_between(self.spans, start, end),
            finish_reason=reason,
            stop_string=self.stop_string if reason is not None else "",
            top_logprobs=self.top[start:end],
        )


class ActiveRequest:
    """One active request."""

    def __init__(self, request: GenerationRequest, info: ModelInfo, adapter: Adapter | None = None) -> None:
        self.request, self.adapter = request, adapter
        self.samples = [ActiveSample(request, index, info) for index in range(request.n)]
        self.prompt_logprobs: list[float] = []
        self.error: EngineError | None = None
        self.ended = False
        self.released = False
        """Whether its caller has left."""
        self.admitted = False
        """Whether one of the samples has, or had, a row."""
        self._given = [0] * request.n
        self._told = [False] * request.n
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._left = request.n

    def sample_ended(self) -> None:
        """Note that a sample has ended. The last one wakes the caller."""
        self._left -= 1
        if self._left == 0:
            self._wake_caller()

    def fail(self, error: EngineError) -> None:
        """End the request with an error."""
        self.error = error
        self._wake_caller()

    def new_tokens(self) -> int:
        """See `StreamedRequest`."""
        return max(len(sample.token_ids) - given for sample, given in zip(self.samples, self._given, strict=True))

    def watched(self, tokens: int) -> Callable[[], int]:
        """Return a function for `Steps.watch` that wakes `wait` when a sample has `tokens` new tokens."""

        def look() -> int:
            if self.ended or self.released:
                return 0
            new = self.new_tokens()
            if new < tokens:
                return tokens - new
            with contextlib.suppress(RuntimeError):  # the event loop of the caller is closed
                self._loop.call_soon_threadsafe(self._wake.set)
            return tokens

        return look

    def parts(self) -> list[Sample]:
        """See `StreamedRequest`."""
        found = []
        for index, sample in enumerate(self.samples):
            if self._told[index]:
                continue
            part = sample.part(self._given[index])
            if part.token_ids or part.finish_reason is not None:
                self._given[index] += len(part.token_ids)
                self._told[index] = part.finish_reason is not None
                found.append(part)
        return found

    def _wake_caller(self) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop of the caller is closed
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self.ended = True
        self._wake.set()

    async def wait(self, seconds: float | None = None) -> None:
        """Wait until all samples have ended, or for `seconds`. Call this in the event loop.

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
            raise EngineError(*self.error.args)  # a new error for each caller, since errors keep tracebacks

    def result(self) -> GenerationResult:
        """Return all samples after their end."""
        return GenerationResult(
            self.request.request_id, [sample.part() for sample in self.samples], self.prompt_logprobs
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


Row = tuple[ActiveRequest, ActiveSample]
"""A sample and its request. Its index in the batch is its row of the KV cache."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How much is computed at once.

    Attributes:
        running: Maximum number of samples in a step.
        prefill_tokens: Maximum number of prompt tokens, padding included, between two steps; a longer prompt is computed alone.
    """

    running: int
    prefill_tokens: int


class SlotBatch:
    """Rows of the KV cache and the samples that they belong to. Used by one thread.

    A sample is admitted when its longest possible sequence fits the cache beside the longest sequences of the running samples, so that
    no sample has to be preempted.

    Args:
        decoder: Decodes for stop strings; None where the model has no tokenizer.
    """

    def __init__(self, model: SlotModel, cache: SlotCache, limits: BatchLimits, decoder: Decoder | None) -> None:
        self._model, self._cache, self._limits, self._decoder = model, cache, limits, decoder
        self._random = np.random.default_rng()
        self.rows: list[Row] = []
        self.generated_tokens = 0
        self.prompt_tokens = 0

    @property
    def adapters(self) -> SlotAdapters:
        """Return the adapters of the model."""
        return self._model.adapters

    @property
    def kv_usage(self) -> float:
        """Return the fraction of the cache in use."""
        return self._cache.usage(sum(sample.last_position for _, sample in self.rows))

    def step(self, waiting: WaitingQueue, version: Version) -> list[Row]:
        """Admit waiting samples for which there is room, and sample one token for each row. Return those that ended."""
        admitted = self._admit(waiting)
        ended = self._prefill(admitted, version) if admitted else []
        if self.rows:
            samples = [sample for _, sample in self.rows]
            tokens = [sample.token_ids[-1] for sample in samples]
            positions = [sample.last_position for sample in samples]
            logits = self._model.decode(self._cache, tokens, positions, [active.adapter for active, _ in self.rows])
            ended += self._deliver(logits, 0, version)
        return ended

    def free(self, rows: Sequence[int]) -> list[Row]:
        """Remove rows, given in ascending order, and move the last rows to their places.

        Returns:
            Their samples.
        """
        gone = [self.rows[row] for row in rows]
        for row in reversed(rows):
            last = len(self.rows) - 1
            if row != last:
                self._cache.move(last, row, self.rows[last][1].last_position)
                self.rows[row] = self.rows[last]
            self.rows.pop()
        return gone

    def recompute_kv(self) -> None:
        """Compute the keys and values of all rows again, with the present weights."""
        sequences = [[*sample.request.prompt_ids, *sample.token_ids[:-1]] for _, sample in self.rows]
        first = 0
        while first < len(sequences):
            count = _within_budget(sequences[first:], self._limits.prefill_tokens)
            batch = sequences[first : first + count]
            adapters = [active.adapter for active, _ in self.rows[first : first + count]]
            self._model.prefill(self._cache, first, batch, range(count), [(0, 0)], adapters=adapters)
            first += count

    def _admit(self, waiting: WaitingQueue) -> list[Row]:
        admitted: list[Row] = []
        longest = max((sample.most_positions for _, sample in self.rows), default=0)
        prompts, width = 0, 0
        while waiting and len(self.rows) + len(admitted) < self._limits.running:
            active, sample = waiting.first()
            longest = max(longest, sample.most_positions)
            if not self._cache.fits(len(self.rows) + len(admitted) + 1, longest):
                break
            if not admitted or admitted[-1][0] is not active:
                prompts, width = prompts + 1, max(width, len(active.request.prompt_ids))
                if admitted and prompts * width > self._limits.prefill_tokens:
                    break
            admitted.append(waiting.pop())
        return admitted

    def _prefill(self, admitted: list[Row], version: Version) -> list[Row]:
        """Forward each new prompt once, copy it to the rows of all of its samples, and sample their first tokens."""
        first = len(self.rows)
        owners = list({id(active): active for active, _ in admitted}.values())
        number = {id(active): position for position, active in enumerate(owners)}
        sources = [number[id(active)] for active, _ in admitted]
        longest = max(sample.most_positions for _, sample in (*self.rows, *admitted))
        for active in owners:
            active.admitted = True
        self.rows += admitted  # before the next steps, so that their failure reaches the callers
        self._cache.reserve(first + len(admitted), longest, used=first)
        wanted = [_wanted_positions(active) for active in owners]
        logits = self._model.prefill(
            self._cache,
            first,
            [active.request.prompt_ids for active in owners],
            sources,
            [(prompt, position) for prompt, each in enumerate(wanted) for position in each],
            adapters=[active.adapter for active in owners],
        )
        ends = np.cumsum([len(each) for each in wanted])
        for active, each, end in zip(owners, wanted, ends, strict=True):
            if len(each) > 1:
                active.prompt_logprobs = _prompt_logprobs(logits[end - len(each) : end - 1], active.request.prompt_ids)
        self.prompt_tokens += sum(len(active.request.prompt_ids) for active, sample in admitted if sample.index == 0)
        return self._deliver(logits[torch.from_numpy(ends[sources] - 1).to(logits.device)], first, version)

    def _deliver(self, logits: Logits, first: int, version: Version) -> list[Row]:
        """Sample a token for each row from `first` on, append it, and remove the rows that ended."""
        rows = self.rows[first:]
        drawn = draw(logits, [sample.row for _, sample in rows], self._random)
        ended: list[int] = []
        for number, (active, sample) in enumerate(rows):
            logprob = drawn.logprobs[number]
            if math.isnan(logprob):
                log.error("the model's output is not finite", request=sample.request.request_id, version=str(version))
                self._cache.clean(first + number)
                sample.settle(FinishReason.ERROR)
            else:
                sampled_by = version if active.adapter is None else active.adapter.version
                sample.append(drawn.token_ids[number], logprob, drawn.top[number], sampled_by)
                sample.settle(self._reason_to_end(sample))
                self.generated_tokens += 1
            if sample.finish_reason is not None:
                ended.append(first + number)
        return self.free(ended)

    def _reason_to_end(self, sample: ActiveSample) -> FinishReason | None:
        count, sampling = len(sample.token_ids), sample.request.sampling
        if sample.token_ids[-1] in sample.row.end_ids:
            return FinishReason.STOP
        if sampling.stop and self._decoder is not None and count >= sampling.min_tokens:
            sample.stop_string = completed_stop(self._decoder, sample.token_ids, sampling.stop, sample.continued)
            if sample.stop_string:
                return FinishReason.STOP
        return FinishReason.LENGTH if count >= sample.most_tokens else None


def _wanted_positions(active: ActiveRequest) -> range:
    """Return the positions of the prompt whose logits are needed: the last one, or all for prompt log-probabilities."""
    length = len(active.request.prompt_ids)
    return range(0 if active.request.prompt_logprobs and not active.prompt_logprobs else length - 1, length)


def _prompt_logprobs(logits: Tensor, prompt_ids: Sequence[int]) -> list[float]:
    targets = torch.tensor(prompt_ids[1:], device=logits.device)
    values: list[float] = torch.log_softmax(logits.float(), -1).gather(1, targets[:, None])[:, 0].tolist()
    return values


def _within_budget(sequences: Sequence[Sequence[int]], tokens: int) -> int:
    """Return how many of the first sequences have at most `tokens` tokens together when padded to the longest of them; at least one."""
    width = 0
    for count, sequence in enumerate(sequences):
        width = max(width, len(sequence))
        if count and width * (count + 1) > tokens:
            return count
    return len(sequences)


class Decoder(Protocol):
    """The one method of a tokenizer that is used here."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids."""


def completed_stop(
    decoder: Decoder, token_ids: Sequence[int], stops: Sequence[str], continued: Sequence[int] = ()
) -> str:
    """Return the stop string that the last token completed, or an empty one. If there are several, return the one that begins first.

    A stop string may begin in the `continued` tokens before the sample's. Only the last tokens are decoded, enough for the longest
    stop string.
    """
    reach = CHARACTERS_PER_TOKEN * max(map(len, stops)) + SLACK_TOKENS
    new = token_ids[-reach:]
    before = list(continued[max(0, len(continued) + len(new) - reach) :])
    text = decoder.decode([*before, *new], skip_special_tokens=True)
    # The last character of the earlier text may be incomplete without the new tokens.
    known = len(decoder.decode(before, skip_special_tokens=True).rstrip("\N{REPLACEMENT CHARACTER}")) if before else 0
    places = [(text.find(stop, max(0, known - len(stop) + 1)), stop) for stop in stops]
    found = [(place, stop) for place, stop in places if place >= 0]
    return min(found)[1] if found else ""
