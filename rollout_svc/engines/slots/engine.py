"""The engine that samples with plain transformers, on a CPU or one GPU, and its thread. It needs no vLLM.

Callers use the engine in their event loop. `SlotLoop` samples in its own thread; commands (pauses, aborts, weights, adapters) run
there between two steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import random
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import structlog
import torch

from rollout_svc.config import LoraLimits
from rollout_svc.engines.adapters import Adapter, LoraEngine, RequestInProgress
from rollout_svc.engines.base import (
    DEFAULT_PACE,
    OWN_TEMPLATE,
    EngineBusyError,
    EngineError,
    EngineSettingsError,
    EngineStatus,
    EngineTimeoutError,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    ModelInfo,
    Pace,
    PauseMode,
    Progress,
    ServedTemplate,
    Stage,
)
from rollout_svc.engines.model_files import BaseModel, read_base_model
from rollout_svc.engines.slots.batch import ActiveRequest, BatchLimits, Decoder, SlotBatch, WaitingQueue
from rollout_svc.engines.slots.model import InPlaceWeights, SlotCache, SlotModel
from rollout_svc.engines.steps import Steps, awaiting_weights, paced
from sluice.clock import CLOCK, Clock
from sluice.threads import CallHungError, DeadlineThreads, TooManyHungError
from sluice.versions import BASE, Version
from weightsync.staged import ApplyReport, HeldVersions, StagedVersion

SWAP_STEPS = 3
"""Parts of a change of the weights, each with the deadline of a command: wait for the step in progress, copy, and copy back if that fails."""

DEFAULT_KV_CACHE_BYTES = 1 << 30

MOST_LOGITS_BYTES = 2 << 30
"""Maximum memory for the log-probabilities of a prompt: vocabulary x length x 4 bytes."""

Result = TypeVar("Result")

log = structlog.get_logger()


@dataclass(frozen=True)
class SlotOptions:
    """How the engine computes, and how much at once. `RolloutConfig` explains the settings of the same names.

    Attributes:
        max_queued: Maximum number of waiting samples; more raise EngineBusyError.
        prefill_tokens: Maximum number of prompt tokens, padding included, between two steps; a longer prompt is computed alone.
        command_deadline_s: Seconds that a command, such as a change of the weights, may take, including the wait for the step in progress.
        drain_deadline_s: Seconds that `pause` with mode WAIT waits for requests to end.
        template: The chat template that is served; a turn ends with its end token, too.
    """

    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_running: int = 256
    max_queued: int = 65_536
    kv_cache_bytes: int | None = None
    kv_policy: Literal["keep", "recompute"] = "keep"
    prefill_tokens: int = 4096
    threads: int | None = None
    start_deadline_s: float = 600.0
    command_deadline_s: float = 120.0
    drain_deadline_s: float = 600.0
    template: ServedTemplate = OWN_TEMPLATE


class TransformersEngine(LoraEngine):
    """Samples in batches with a static KV cache, in process as a library or behind the service.

    Args:
        model: Directory or hub id of the base model.
        lora: Maximum number and rank of adapters; None: no adapters.
        clock: Time of starts, commands and drains.
    """

    info: ModelInfo

    def __init__(
        self, model: str, options: SlotOptions | None = None, lora: LoraLimits | None = None, clock: Clock = CLOCK
    ) -> None:
        self._model, self._options, self._clock = model, options or SlotOptions(), clock
        super().__init__(lora, self._options.drain_deadline_s)
        self._commands = asyncio.Lock()
        self._running: SlotLoop | None = None
        self._base: BaseModel | None = None
        self._decoder: Decoder | None = None
        self._resume_from: StagedVersion | None = None
        self._active: dict[str, set[ActiveRequest]] = {}
        # A separate thread, since the default pool cannot abandon a model that never finishes loading.
        self._loading = DeadlineThreads("loading", 1, self._options.start_deadline_s, most_hung=1, clock=clock)

    # --- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """See `InferenceEngine`."""
        async with self._commands:
            await self._start()

    async def restart(self) -> Version:
        """See `InferenceEngine`."""
        async with self._commands:
            if self._running is not None:
                self._resume_from = self._running.staged
            await self._stop()
            loop = await self._start()
            staged, self._resume_from = self._resume_from, None
            if staged is not None and staged.path.is_file():
                try:
                    await asyncio.to_thread(loop.check, staged)
                    await self._command(lambda: loop.swap(staged), deadlines=SWAP_STEPS)
                except EngineError:
                    await self._stop()  # not healthy until the next attempt, which serves the base model
                    raise
            await self._reload_adapters()
            return self._adapter_version or loop.version

    async def stop(self) -> None:
        """See `InferenceEngine`."""
        async with self._commands:
            await self._stop()

    async def _start(self) -> SlotLoop:
        try:
            loop = self._running = await self._loading.run(self._build)
        except (CallHungError, TooManyHungError) as error:
            raise EngineError(
                f"the model was not loaded within {self._options.start_deadline_s:.0f} s; raise rollout.deadlines.start_s"
            ) from error
        self._forget_adapters()
        loop.start()
        log.info("transformers engine started", model=self._model, dtype=self.info.dtype)
        return loop

    async def _stop(self) -> None:
        loop, self._running = self._running, None
        if loop is not None:
            await asyncio.to_thread(loop.stop, self._options.command_deadline_s)

    def _build(self) -> SlotLoop:
        options = self._options
        model = SlotModel(self._model, options.device, options.dtype, options.max_model_len, options.template)
        model.check()
        self._base = model.known_of(read_base_model(model.directory))
        self._decoder = model.tokenizer
        self.info = model.info
        one_sample = model.kv_shape.position_bytes * model.info.max_model_len
        budget = self._options.kv_cache_bytes or max(DEFAULT_KV_CACHE_BYTES, one_sample)
        if budget < one_sample:
            raise EngineSettingsError(
                f"kv_cache_bytes is {budget}, but one sample of {model.info.max_model_len} tokens takes {one_sample}; "
                "raise it or lower max_model_len"
            )
        limits = BatchLimits(self._options.max_running, self._options.prefill_tokens)
        batch = SlotBatch(model, SlotCache(model.kv_shape, budget), limits, self._decoder)
        weights = InPlaceWeights(model.module, self._base)
        return SlotLoop(batch, weights, threads=self._options.threads, recompute=self._options.kv_policy == "recompute")

    @property
    def _loop(self) -> SlotLoop:
        """Return the loop.

        Raises:
            EngineError: if the engine does not run or is broken.
        """
        if self._running is None:
            raise EngineError("the engine is not running; call start()")
        if self._running.broken:
            raise EngineError(f"the engine is broken: {self._running.broken}")
        return self._running

    async def _command(self, action: Callable[[], Result], *, deadlines: int = 1) -> Result:
        """Run an action in the loop's thread, between two steps, within `deadlines` times the deadline of a command.

        Raises:
            EngineError: from the action; or because the thread did not run it in time, and then the engine is broken.
        """
        loop, seconds = self._loop, deadlines * self._options.command_deadline_s
        try:
            async with self._clock.timeout(seconds):
                return await asyncio.wrap_future(loop.call(action))
        except TimeoutError as error:
            why = f"the engine is still in one step after {seconds:g} s; call restart()"
            loop.broken = loop.broken or why
            for active in [each for of_name in self._active.values() for each in of_name]:
                active.fail(EngineError(why))
            raise EngineTimeoutError(why) from error

    @property
    def _base_model(self) -> BaseModel:
        if self._base is None:
            raise EngineError("the engine is not running; call start()")
        return self._base

    # --- sampling -------------------------------------------------------------------------------------------------

    async def sample(self, request: GenerationRequest) -> GenerationResult:
        """See `InferenceEngine`."""
        await self._policy_loaded.wait()
        active = self._submit(request)
        try:
            await active.wait()
        finally:
            self._release(active)
        return active.result()

    async def stream(self, request: GenerationRequest, pace: Pace = DEFAULT_PACE) -> AsyncGenerator[Progress, None]:
        """See `InferenceEngine`."""
        async with contextlib.aclosing(awaiting_weights((self._policy_loaded,), self._loop.steps)) as signs:
            async for sign in signs:
                yield sign
        active = self._submit(request)
        try:
            loop = self._loop

            def stage() -> Stage:
                return loop.stage(active) if self._policy_loaded.is_set() else Stage.SWITCHING

            loop.post(lambda: loop.steps.watch(pace.tokens, active.watched(pace.tokens)))
            async with contextlib.aclosing(paced(active, pace, loop.steps, stage)) as stream:
                async for progress in stream:
                    yield progress
        finally:
            self._release(active)

    async def abort(self, request_id: str) -> bool:
        """See `InferenceEngine`."""
        loop = self._loop
        named = list(self._active.get(request_id, ()))
        return await self._command(lambda: sum(map(loop.abort, named)) > 0)

    def _submit(self, request: GenerationRequest) -> ActiveRequest:
        loop = self._loop
        _check(request, self.info, has_tokenizer=self._decoder is not None)
        if loop.queued + request.n > self._options.max_queued:
            raise EngineBusyError(
                f"{loop.queued} samples wait already, at most {self._options.max_queued} may; retry later"
            )
        with self._entering_with(request.adapter) as adapter:
            active = ActiveRequest(request, self.info, adapter)
            self._active.setdefault(request.request_id, set()).add(active)
            loop.post(lambda: loop.add(active))
        return active

    def _release(self, active: ActiveRequest) -> None:
        """Forget a request. Abort it if it has not ended."""
        active.released = True
        self._left(active.adapter)
        of_same_name = self._active[active.request.request_id]
        of_same_name.discard(active)
        if not of_same_name:
            del self._active[active.request.request_id]
        loop = self._running
        if loop is not None and not active.ended:
            loop.post(lambda: loop.abort(active))

    # --- pausing --------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """See `InferenceEngine`."""
        async with self._commands:
            loop = self._loop
            paused = await self._command(lambda: loop.pause(mode))
            try:
                async with self._clock.timeout(self._options.drain_deadline_s):
                    await asyncio.wrap_future(paused)
            except BaseException as error:
                await self._command(loop.resume)
                if not isinstance(error, TimeoutError):
                    raise
                raise EngineError(
                    f"requests did not end within {self._options.drain_deadline_s:.0f} s; pause with KEEP"
                ) from error

    async def resume(self) -> None:
        """See `InferenceEngine`."""
        async with self._commands:
            await self._command(self._loop.resume)

    # --- weights --------------------------------------------------------------------------------------------------

    async def apply(self, staged: StagedVersion) -> ApplyReport:
        """See `InferenceEngine`. The version is copied in place between two steps."""
        async with self._commands:
            loop = self._loop
            if loop.staged == staged and not loop.suspect:
                self._deselect_adapter()  # from an adapter back to its base, which has not changed
                return ApplyReport(staged.version, 0.0, 0.0)
            self._base_model.check(staged)
            return await self._swap(loop, staged)

    async def reload_base(self) -> ApplyReport:
        """See `InferenceEngine`."""
        async with self._commands:
            return await self._swap(self._loop, None)

    async def _swap(self, loop: SlotLoop, staged: StagedVersion | None) -> ApplyReport:
        version = BASE if staged is None else staged.version
        await asyncio.to_thread(loop.check, staged)  # while the loop samples
        await self._retire_other_bases(version)
        times = await self._command(lambda: loop.swap(staged), deadlines=SWAP_STEPS)
        self._deselect_adapter()
        return ApplyReport(version, *times)

    async def verify_weights(self, staged: StagedVersion | None, fraction: float = 1.0) -> list[str]:
        """See `InferenceEngine`. Tensors are compared one at a time."""
        async with self._commands:
            loop = self._loop
            names = chosen(loop.tensors(), fraction, BASE if staged is None else staged.version)
            return [
                name
                for name in names
                if await self._command(lambda name=name: loop.differs(name, staged))  # type: ignore[misc]
            ]

    # --- adapters (see `LoraEngine`): loaded and unloaded between two steps of the loop ----------------------------

    @property
    def _base_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._base_model.shapes

    @property
    def _weights_version(self) -> Version:
        return self._loop.version

    def _changing(self) -> asyncio.Lock:
        return self._commands

    async def _add_adapter(self, adapter: Adapter) -> None:
        batch = self._loop.batch
        await self._command(lambda: batch.adapters.add(adapter))

    async def _remove_adapter(self, adapter: Adapter) -> None:
        batch = self._loop.batch
        await self._command(lambda: batch.adapters.remove(adapter))

    async def _end_requests(self, which: Callable[[RequestInProgress], bool]) -> None:
        loop = self._loop
        ending = [each for active in self._active.values() for each in active if which(each)]

        def end() -> None:
            for active in ending:
                loop.abort(active, FinishReason.VERSION_RETIRED)

        await self._command(end)

    # --- status ---------------------------------------------------------------------------------------------------

    def held(self) -> HeldVersions | None:
        """See `InferenceEngine`."""
        loop = self._running
        return None if loop is None or loop.broken else self._held_with(loop.version)

    def status(self) -> EngineStatus:
        """See `InferenceEngine`."""
        loop = self._running
        if loop is None:
            return EngineStatus(BASE, 0, 0, 0.0, 0, 0, self._options.max_running, paused=False, healthy=False)
        return EngineStatus(
            version=self._adapter_version or loop.version,
            running=len(loop.batch.rows),
            queued=loop.queued,
            kv_cache_usage=loop.batch.kv_usage,
            generated_tokens=loop.batch.generated_tokens,
            prompt_tokens=loop.batch.prompt_tokens,
            max_running=self._options.max_running,
            paused=loop.paused is not None,
            healthy=not loop.broken,
            steps=loop.steps.count,
            switching=loop.switching or not self._policy_loaded.is_set(),
        )


def chosen(names: Sequence[str], fraction: float, version: Version) -> list[str]:
    """Return a fraction of the names, at least one. Each version gets different ones."""
    if fraction >= 1.0:
        return list(names)
    count = max(1, round(fraction * len(names)))
    return random.Random(str(version)).sample(names, count)  # noqa: S311 - no secret


def _check(request: GenerationRequest, info: ModelInfo, *, has_tokenizer: bool) -> None:
    """Refuse a request that this engine cannot sample.

    Raises:
        ValueError: with the reason.
    """
    ids, room = request.prompt_ids, info.max_model_len
    if not 0 < len(ids) < room:
        raise ValueError(f"the prompt has {len(ids)} tokens; between 1 and {room - 1} fit a context of {room}")
    named = (*request.sampling.stop_token_ids, *request.sampling.logit_bias)
    wrong = next((id_ for id_ in (*ids, *named) if not 0 <= id_ < info.vocabulary_size), None)
    if wrong is not None:
        raise ValueError(f"token id {wrong} is outside the vocabulary of {info.vocabulary_size}")
    if request.sampling.stop and not has_tokenizer:
        raise ValueError("stop strings need a tokenizer in the model's directory; use stop_token_ids")
    if request.prompt_logprobs and len(ids) * info.vocabulary_size * 4 > MOST_LOGITS_BYTES:
        raise ValueError(
            f"the log-probabilities of a prompt of {len(ids)} tokens would take too much memory; shorten it"
        )


class SlotLoop:
    """Samples for all active requests in its own thread.

    Args:
        threads: CPU threads of a step; None leaves PyTorch's choice.
        recompute: Whether the keys and values of running samples are computed again after a change of the weights.
    """

    def __init__(self, batch: SlotBatch, weights: InPlaceWeights, *, threads: int | None, recompute: bool) -> None:
        self.batch = batch
        self.steps = Steps()
        self.paused: PauseMode | None = None
        self.switching = False
        """Whether it is copying other weights."""
        self.broken = ""
        self.staged: StagedVersion | None = None
        """The version of the weights; None for the base model."""
        self.suspect = False
        """Whether the live weights were found to differ from that version, until the next swap."""
        self._weights, self._threads, self._recompute = weights, threads, recompute
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._stopping = False
        self._over = False
        self._last_command = threading.Lock()
        self._draining: list[Future[None]] = []
        self._waiting = WaitingQueue()
        self._held: list[ActiveRequest] = []
        self._thread = threading.Thread(target=self._run, name="slot-loop", daemon=True)

    # --- from other threads ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, deadline_s: float) -> None:
        """End every request and the thread. Blocks for the rest of a step; a step that hangs is left to itself."""
        self._stopping = True
        self._wake.set()
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            log.error("a step of the engine hangs; its thread is left to itself", seconds=deadline_s)

    def call(self, action: Callable[[], Result]) -> Future[Result]:
        """Run an action in the thread, between two steps."""
        future: Future[Result] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(action())
            except Exception as error:  # noqa: BLE001 - passed on to the caller
                future.set_exception(error)

        self.post(run)
        return future

    def post(self, action: Callable[[], object]) -> None:
        """Like `call`, without a result."""
        with self._last_command:
            if not self._over:
                self._commands.put(action)
                self._wake.set()
                return
        action()  # the thread has ended, so the action only refuses

    @property
    def version(self) -> Version:
        """Return the version of the weights."""
        return BASE if self.staged is None else self.staged.version

    def stage(self, active: ActiveRequest) -> Stage:
        """Return the stage of a request."""
        if self.switching:
            return Stage.SWITCHING
        if self.paused is not None:
            return Stage.PAUSED
        return Stage.RUNNING if active.admitted else Stage.QUEUED

    @property
    def queued(self) -> int:
        """Return the number of samples that wait for a row."""
        return len(self._waiting) + sum(len(active.samples) for active in self._held)

    # --- in the thread: requests ----------------------------------------------------------------------------------

    def add(self, active: ActiveRequest) -> None:
        """Queue a request. Call this in the thread."""
        if self.broken or self._stopping:
            active.fail(EngineError(self.broken or "the engine was stopped"))
        elif self._draining or self.paused is PauseMode.WAIT:
            self._held.append(active)
        else:
            self._waiting.add(active)

    def abort(self, active: ActiveRequest | None, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request, or all of them, with the tokens so far. Return False if none was active. Call this in the thread."""
        for held in [each for each in self._held if active is None or each is active]:
            self._held.remove(held)
            self._waiting.add(held)
        gone = self._waiting.remove(active)
        gone += self.batch.free(
            [row for row, (owner, _) in enumerate(self.batch.rows) if active is None or owner is active]
        )
        for owner, sample in gone:
            sample.settle(reason)
            owner.sample_ended()
        return bool(gone)

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop sampling. The future is done when sampling has stopped. Call this in the thread."""
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # from now on the caller cannot cancel it
        if mode is PauseMode.WAIT:
            self.paused = None  # requests that an earlier pause froze have to end, too
            self._draining.append(done)
            self._finish_drain()
            return done
        if mode is PauseMode.ABORT:
            self.abort(None)
        self.paused = mode
        done.set_result(None)
        return done

    def resume(self) -> None:
        """Resume sampling. A pause that still waits is abandoned. Call this in the thread."""
        self.paused = None
        self._draining.clear()
        for active in self._held:
            self._waiting.add(active)
        self._held.clear()

    def _finish_drain(self) -> None:
        if self._draining and not self.batch.rows and not self._waiting:
            self.paused = PauseMode.WAIT
            for done in self._draining:
                done.set_result(None)
            self._draining.clear()

    # --- in the thread: weights -----------------------------------------------------------------------------------

    def check(self, staged: StagedVersion | None) -> None:
        """Check that a version's files hold the model's tensors. Any thread may call this.

        Raises:
            EngineError: if they do not.
        """
        self._weights.check(self._files(staged))

    def swap(self, staged: StagedVersion | None) -> tuple[float, float]:
        """Copy a version that passed `check` into the model, or the base model for None. Call this in the thread.

        Returns:
            Seconds without sampling, and seconds of only the copy.

        Raises:
            EngineError: if it could not be applied. The previous version keeps serving, unless `broken` is set.
        """
        begun = time.perf_counter()
        self.switching = True
        try:
            try:
                self._weights.copy(self._files(staged))
            except EngineError:
                self._go_back()
                raise
            copied = time.perf_counter()
            self.staged, self.suspect = staged, False
            if self._recompute:
                self.batch.recompute_kv()
        finally:
            self.switching = False
        return time.perf_counter() - begun, copied - begun

    def tensors(self) -> list[str]:
        """Return the names of the live tensors, sorted."""
        return self._weights.names()

    def differs(self, name: str, staged: StagedVersion | None) -> bool:
        """Return whether a live tensor differs from a version, or from the base model for None. Call this in the thread.

        Raises:
            EngineError: if the version's file cannot be read.
        """
        found: bool = self._weights.differs(name, self._files(staged))
        self.suspect |= found
        return found

    def _files(self, staged: StagedVersion | None) -> Sequence[Path]:
        return self._weights.base_paths if staged is None else [staged.path]

    def _go_back(self) -> None:
        try:
            self._weights.copy(self._files(self.staged))
        except EngineError as error:
            self._break(f"neither the new nor the old version could be loaded: {error}; call restart()")
            raise

    # --- the thread -----------------------------------------------------------------------------------------------

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        try:
            while not self._stopping:
                self._take_commands()
                if self.paused is None and not self.broken and (self.batch.rows or self._waiting):
                    self._step()
                else:
                    self._wake.wait()
                    self._wake.clear()
        except Exception as error:
            log.exception("sampling failed")
            self._break(f"sampling failed: {type(error).__name__}: {error}; call restart()")
        self._stopping = True
        with self._last_command:
            self._over = True
        self._take_commands()
        self._fail_all(EngineError(self.broken or "the engine was stopped"))

    def _take_commands(self) -> None:
        while not self._commands.empty():
            self._commands.get()()

    def _step(self) -> None:
        for active, _ in self.batch.step(self._waiting, self.version):
            active.sample_ended()
        self.steps.advance()
        self._finish_drain()

    def _break(self, why: str) -> None:
        self.broken = why
        self._fail_all(EngineError(why))

    def _fail_all(self, error: EngineError) -> None:
        gone = {id(active): active for active, _ in [*self.batch.rows, *self._waiting.remove(None)]}
        gone |= {id(active): active for active in self._held}
        self.batch.rows.clear()
        self._held.clear()
        for active in gone.values():
            active.fail(error)
        for done in self._draining:
            done.set_exception(error)
        self._draining.clear()
