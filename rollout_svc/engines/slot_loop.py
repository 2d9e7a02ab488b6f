"""The thread that samples: admits waiting samples, steps all rows together, swaps weights between two steps."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import structlog
import torch
from torch import Tensor

from rollout_svc.engines.base import EngineError, FinishReason, PauseMode
from rollout_svc.engines.slot_cache import SlotCache
from rollout_svc.engines.slot_model import SlotModel
from rollout_svc.engines.slot_requests import LiveRequest, LiveSample, WaitingLine
from rollout_svc.engines.slot_sampling import draw
from rollout_svc.engines.slot_weights import InPlaceWeights
from rollout_svc.engines.stop_strings import Decoder, completed_stop
from sluice.versions import BASE, Version

__all__ = ["LoopLimits", "SlotLoop"]

Result = TypeVar("Result")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LoopLimits:
    """How much is computed at a time.

    Attributes:
        running: Most samples in a step.
        prefill_tokens: Most prompt tokens, padding included, between two steps; a longer prompt goes alone.
        threads: CPU threads of a step; None leaves PyTorch's choice.
    """

    running: int
    prefill_tokens: int
    threads: int | None


class SlotLoop:
    """Samples for all live requests in a thread of its own.

    Methods without an underscore are for other threads, unless they say otherwise; what runs in the thread is given to
    `call`.

    Args:
        model: The model.
        weights: Its tensors.
        cache: Keys and values of the rows.
        limits: How much to compute at a time.
        decoder: Decodes for stop strings; None where the model has no tokenizer.
        recompute: Whether an update computes the keys and values of running samples anew.
    """

    def __init__(
        self,
        model: SlotModel,
        weights: InPlaceWeights,
        cache: SlotCache,
        limits: LoopLimits,
        *,
        decoder: Decoder | None,
        recompute: bool,
    ) -> None:
        self._model, self._weights, self._cache, self._limits = model, weights, cache, limits
        self._decoder, self._recompute = decoder, recompute
        self._random = np.random.default_rng()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._stopping = False
        self._drained: list[Future[None]] = []
        self._rows: list[tuple[LiveRequest, LiveSample]] = []
        self._waiting = WaitingLine()
        self._held: list[LiveRequest] = []
        self._thread = threading.Thread(target=self._run, name="slot-loop", daemon=True)
        self.paused: PauseMode | None = None
        self.broken = ""
        self.version = BASE
        self.generated_tokens = 0
        self.prompt_tokens = 0

    # --- from other threads ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def stop(self) -> None:
        """End every request and the thread; blocks for the rest of a step."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    def call(self, action: Callable[[], Result]) -> Future[Result]:
        """Run something in the thread, between two steps."""
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(action())
            except Exception as error:  # noqa: BLE001 - it is the caller's, who gets it
                future.set_exception(error)

        self._commands.put(run)
        self._wake.set()
        if not self._thread.is_alive():
            self._take_commands()
        return future

    def post(self, action: Callable[[], object]) -> None:
        """As `call`, where nobody waits for the outcome."""
        self._commands.put(lambda: (action(), None)[1])
        self._wake.set()

    @property
    def running(self) -> int:
        """Samples that have a row."""
        return len(self._rows)

    @property
    def queued(self) -> int:
        """Samples that wait for one."""
        return len(self._waiting) + sum(len(live.samples) for live in self._held)

    @property
    def kv_usage(self) -> float:
        """Share of the positions that are in use."""
        return self._cache.usage(sum(sample.last_position for _, sample in self._rows))

    # --- in the thread: requests ----------------------------------------------------------------------------------

    def add(self, live: LiveRequest) -> None:
        """Queue a request. In the thread."""
        if self.broken or self._stopping:
            live.fail(EngineError(self.broken or "the engine was stopped"))
        elif self._drained or self.paused is PauseMode.WAIT:
            self._held.append(live)
        else:
            self._waiting.add(live)

    def abort(self, live: LiveRequest | None) -> bool:
        """End a request with what it has, or all of them; False if there was nothing left to end. In the thread."""
        if live is None:
            for held in self._held:
                self._waiting.add(held)
            self._held.clear()
        elif live in self._held:
            self._held.remove(live)
            self._waiting.add(live)
        gone = self._waiting.remove(live)
        for _, sample in gone:
            sample.finish_reason = FinishReason.ABORT
        rows = [row for row, (owner, _) in enumerate(self._rows) if live is None or owner is live]
        for row in rows:
            self._rows[row][1].finish_reason = FinishReason.ABORT
        gone += self._free(rows)
        for owner, _ in gone:
            owner.sample_ended()
        return bool(gone)

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop sampling; done when that is so. In the thread."""
        done: Future[None] = Future()
        if mode is PauseMode.WAIT:
            self._drained.append(done)
            self._look_if_drained()
            return done
        if mode is PauseMode.ABORT:
            self.abort(None)
        self.paused = mode
        done.set_result(None)
        return done

    def resume(self) -> None:
        """Sample again. In the thread."""
        self.paused = None
        for done in self._drained:
            done.cancel()
        self._drained.clear()
        for live in self._held:
            self._waiting.add(live)
        self._held.clear()

    def _look_if_drained(self) -> None:
        if self._drained and not self._rows and not self._waiting:
            self.paused = PauseMode.WAIT
            for done in self._drained:
                if not done.cancelled():
                    done.set_result(None)
            self._drained.clear()

    # --- in the thread: weights -----------------------------------------------------------------------------------

    def swap(self, version: Version, paths: Sequence[Path], before: Sequence[Path]) -> tuple[float, float]:
        """Copy a version into the model. In the thread.

        Args:
            version: What it is.
            paths: Its files.
            before: Files of the version that serves.

        Returns:
            Seconds without sampling, and seconds of the copy alone.

        Raises:
            EngineError: if it could not be applied. The version before serves on, unless `broken` says otherwise.
        """
        begun = time.perf_counter()
        self._weights.check(paths)
        copying = time.perf_counter()
        try:
            self._weights.copy(paths)
        except EngineError:
            self._go_back(before)
            raise
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        copied = time.perf_counter()
        self.version = version
        if self._recompute:
            self._fill_rows_anew()
        return time.perf_counter() - begun, copied - copying

    def _go_back(self, before: Sequence[Path]) -> None:
        try:
            self._weights.copy(before)
        except EngineError as error:
            self._break(f"neither the new nor the old version could be loaded: {error}; call restart()")
            raise

    def _fill_rows_anew(self) -> None:
        """Compute keys and values of all rows under the present weights."""
        sequences = [[*sample.request.prompt_ids, *sample.token_ids[:-1]] for _, sample in self._rows]
        first = 0
        while first < len(sequences):
            count = _within_budget(sequences[first:], self._limits.prefill_tokens)
            batch = sequences[first : first + count]
            self._model.prefill(self._cache, first, batch, range(count), [(0, 0)])
            first += count

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._limits.threads is not None:
            torch.set_num_threads(self._limits.threads)
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._take_commands()
                    if self.paused is None and not self.broken and (self._rows or self._waiting):
                        self._step()
                        self._look_if_drained()
                    else:
                        self._wake.wait()
                        self._wake.clear()
        except Exception as error:
            log.exception("sampling failed")
            self._break(f"sampling failed: {type(error).__name__}: {error}; call restart()")
        self._fail_all(EngineError(self.broken or "the engine was stopped"))
        self._stopping = True
        self._take_commands()

    def _take_commands(self) -> None:
        while not self._commands.empty():
            self._commands.get()()

    def _break(self, why: str) -> None:
        self.broken = why
        self._fail_all(EngineError(why))

    def _fail_all(self, error: EngineError) -> None:
        gone = {id(live): live for live, _ in [*self._rows, *self._waiting.remove(None)]}
        gone |= {id(live): live for live in self._held}
        self._rows.clear()
        self._held.clear()
        for live in gone.values():
            live.fail(error)
        for done in self._drained:
            done.set_exception(error)
        self._drained.clear()

    def _step(self) -> None:
        admitted = self._admit()
        if admitted:
            self._prefill(admitted)
        if self._rows:
            samples = [sample for _, sample in self._rows]
            tokens = [sample.token_ids[-1] for sample in samples]
            self._deliver(self._model.decode(self._cache, tokens, [sample.last_position for sample in samples]), 0)

    def _admit(self) -> list[tuple[LiveRequest, LiveSample]]:
        """Take waiting samples for which there is room."""
        admitted: list[tuple[LiveRequest, LiveSample]] = []
        longest = max((sample.most_positions for _, sample in self._rows), default=0)
        prompts, width = 0, 0
        while self._waiting and len(self._rows) + len(admitted) < self._limits.running:
            live, sample = self._waiting.first()
            longest = max(longest, sample.most_positions)
            if not self._cache.fits(len(self._rows) + len(admitted) + 1, longest):
                break
            if not admitted or admitted[-1][0] is not live:
                prompts, width = prompts + 1, max(width, len(live.request.prompt_ids))
                if admitted and prompts * width > self._limits.prefill_tokens:
                    break
            admitted.append(self._waiting.pop())
        return admitted

    def _prefill(self, admitted: list[tuple[LiveRequest, LiveSample]]) -> None:
        """Forward each new prompt once, give it to all of its samples and draw their first tokens."""
        first = len(self._rows)
        owners = list({id(live): live for live, _ in admitted}.values())
        number = {id(live): position for position, live in enumerate(owners)}
        sources = [number[id(live)] for live, _ in admitted]
        longest = max(sample.most_positions for _, sample in (*self._rows, *admitted))
        self._cache.reserve(first + len(admitted), longest, used=first)
        wanted = [_wanted_positions(live) for live in owners]
        logits = self._model.prefill(
            self._cache,
            first,
            [live.request.prompt_ids for live in owners],
            sources,
            [(number, position) for number, each in enumerate(wanted) for position in each],
        )
        ends = np.cumsum([len(each) for each in wanted])
        for live, each, end in zip(owners, wanted, ends, strict=True):
            if len(each) > 1:
                live.prompt_logprobs = _prompt_logprobs(logits[end - len(each) : end - 1], live.request.prompt_ids)
        self._rows += admitted
        self.prompt_tokens += sum(len(live.request.prompt_ids) for live, sample in admitted if sample.index == 0)
        self._deliver(logits[torch.from_numpy(ends[sources] - 1).to(logits.device)], first)

    def _deliver(self, logits: Tensor, first: int) -> None:
        """Draw a token for each row from `first` on, hand it over, and free the rows that ended."""
        rows = self._rows[first:]
        drawn = draw(logits, [sample.row for _, sample in rows], self._random)
        ended: list[int] = []
        for number, (_, sample) in enumerate(rows):
            logprob = drawn.logprobs[number]
            if math.isnan(logprob):
                log.error("the model's output is not finite", request=sample.request.request_id)
                self._cache.clean(first + number)
                sample.finish_reason = FinishReason.ERROR
            else:
                sample.take(drawn.token_ids[number], logprob, drawn.top[number], self.version)
                sample.finish_reason = self._reason_to_end(sample)
                self.generated_tokens += 1
            if sample.finish_reason is not None:
                ended.append(first + number)
        for live, _ in self._free(ended):
            live.sample_ended()

    def _reason_to_end(self, sample: LiveSample) -> FinishReason | None:
        count, sampling = len(sample.token_ids), sample.request.sampling
        if sample.token_ids[-1] in sample.row.end_ids:
            return FinishReason.STOP
        if sampling.stop and self._decoder is not None and count >= sampling.min_tokens:
            sample.stop_string = completed_stop(self._decoder, sample.token_ids, sampling.stop)
            if sample.stop_string:
                return FinishReason.STOP
        return FinishReason.LENGTH if count >= sample.most_tokens else None

    def _free(self, rows: Sequence[int]) -> list[tuple[LiveRequest, LiveSample]]:
        """Give up rows, in ascending order, and move the last ones into the holes."""
        gone = [self._rows[row] for row in rows]
        for row in reversed(rows):
            last = len(self._rows) - 1
            if row != last:
                self._cache.move(last, row, self._rows[last][1].last_position)
                self._rows[row] = self._rows[last]
            self._rows.pop()
        return gone


def _wanted_positions(live: LiveRequest) -> range:
    """Positions of the prompt whose logits are needed: the last one, or all if the caller wants them."""
    length = len(live.request.prompt_ids)
    return range(0 if live.request.prompt_logprobs and not live.prompt_logprobs else length - 1, length)


def _prompt_logprobs(logits: Tensor, prompt_ids: Sequence[int]) -> list[float]:
    targets = torch.tensor(prompt_ids[1:], device=logits.device)
    values: list[float] = torch.log_softmax(logits.float(), -1).gather(1, targets[:, None])[:, 0].tolist()
    return values


def _within_budget(sequences: Sequence[Sequence[int]], tokens: int) -> int:
    """How many of the first sequences, padded to the longest, stay within so many tokens; at least one."""
    width = 0
    for count, sequence in enumerate(sequences):
        width = max(width, len(sequence))
        if count and width * (count + 1) > tokens:
            return count
    return len(sequences)
