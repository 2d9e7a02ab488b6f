"""The batch of samples that are generated together: admission, prompts, steps, and the removal of ended samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import structlog
import torch
from torch import Tensor

from rollout_svc.engines.base import FinishReason
from rollout_svc.engines.slots.model import SlotAdapters, SlotCache, SlotModel
from rollout_svc.engines.slots.requests import ActiveRequest, ActiveSample, WaitingQueue
from rollout_svc.engines.slots.sampling import Logits, draw
from sluice.versions import Version

__all__ = ["BatchLimits", "Decoder", "Row", "SlotBatch", "completed_stop"]

Row = tuple[ActiveRequest, ActiveSample]
"""A sample and its request. Its index in the batch is its row of the KV cache."""

CHARACTERS_PER_TOKEN = 4
"""A character has up to four tokens in byte-level vocabularies."""

SLACK_TOKENS = 16
"""Further tokens to decode, since special ones have no text."""

log = structlog.get_logger()


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

    A sample is admitted when its longest possible sequence fits the cache beside those of the running samples, so that none has
    to be preempted.

    Args:
        model: The model.
        cache: Keys and values of the rows.
        limits: How much to compute at once.
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
        """Admit waiting samples for which there is room, and sample one token for each row.

        Args:
            waiting: The queue.
            version: The version of the weights.

        Returns:
            Samples that ended.
        """
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
        self.rows += admitted  # now, so that a failure in what follows reaches their callers
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
                sample.finish_reason = FinishReason.ERROR
            else:
                sampled_by = version if active.adapter is None else active.adapter.version
                sample.append(drawn.token_ids[number], logprob, drawn.top[number], sampled_by)
                sample.finish_reason = self._reason_to_end(sample)
                self.generated_tokens += 1
            if sample.finish_reason is not None:
                ended.append(first + number)
        return self.free(ended)

    def _reason_to_end(self, sample: ActiveSample) -> FinishReason | None:
        count, sampling = len(sample.token_ids), sample.request.sampling
        if sample.token_ids[-1] in sample.row.end_ids:
            return FinishReason.STOP
        if sampling.stop and self._decoder is not None and count >= sampling.min_tokens:
            sample.stop_string = completed_stop(self._decoder, sample.token_ids, sampling.stop)
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
    """Return how many of the first sequences, padded to the longest, have at most so many tokens; at least one."""
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


def completed_stop(decoder: Decoder, token_ids: Sequence[int], stops: Sequence[str]) -> str:
    """Return the stop string that the last token completed, or an empty one. Of several, return the one that begins first.

    Only as many of the last tokens are decoded as the longest stop string can have.
    """
    reach = CHARACTERS_PER_TOKEN * max(map(len, stops)) + SLACK_TOKENS
    text = decoder.decode(list(token_ids[-reach:]), skip_special_tokens=True)
    found = [(text.find(stop), stop) for stop in stops if stop in text]
    return min(found)[1] if found else ""
