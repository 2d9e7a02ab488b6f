"""The engine that samples with vLLM's ``AsyncLLM``.

vLLM is imported by `VllmEngine.start`: its import takes seconds and reads environment variables.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import structlog

from rollout_svc.config import LoraLimits
from rollout_svc.engines.adapters import Adapter, LoraEngine, RequestInProgress
from rollout_svc.engines.base import (
    DEFAULT_PACE,
    OWN_TEMPLATE,
    EngineError,
    EngineStatus,
    GenerationRequest,
    GenerationResult,
    ModelInfo,
    Pace,
    PauseMode,
    Progress,
    ServedTemplate,
    Stage,
    UncheckedWeights,
)
from rollout_svc.engines.model_files import model_directory, read_base_model
from rollout_svc.engines.steps import awaiting_weights, paced
from rollout_svc.engines.vllm.processes import VllmProcesses, describe, launch
from rollout_svc.engines.vllm.requests import (
    HOLD_S,
    HOLD_TOKENS,
    LoadRecorder,
    TrackedRequest,
    check_request,
    cut_at_nan,
    live_token_count,
    refusals,
    sampling_params,
    submit,
)
from rollout_svc.engines.vllm.weights import HalfLoadedError, VllmWeights, step, verify
from sluice.tasks import run_to_end
from sluice.versions import BASE, Version
from weightsync.staged import ApplyReport, HeldVersions, StagedVersion

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

VERIFY_PHASES = 10
"""A comparison of all weights may take this many times as long as one step of an update."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """How vLLM is started, and how its weights change. `RolloutConfig` explains the settings of the same names.

    Attributes:
        double_buffer: On CPU, build the next version beside the one that samples, then swap them. This doubles the memory of
            the weights; without it, the pause lasts as long as copying and packing.
        patch: On an accelerator, load only the values that differ from the previous version; see
            `weightsync.vllm.worker.Patch` for how far that is tested.
        phase_deadline_s: Seconds that each of the three steps of an update may take (prepare; pause and load; go back if that
            fails) before the engine counts as broken.
        drain_deadline_s: Seconds that `pause` with mode WAIT waits for requests to end.
        start_method: "auto" forks on CPU at the first start and spawns later, when the process may serve sockets; "fork"
            forks at every start. Both spawn if this process uses gRPC: a fork of it may hang.
        template: The chat template that is served; a turn ends with its end token, too.
    """

    engine_args: Mapping[str, Any] = field(default_factory=dict)
    kv_policy: Literal["keep", "recompute"] = "keep"
    double_buffer: bool = True
    patch: bool = False
    start_deadline_s: float = 600.0
    phase_deadline_s: float = 120.0
    drain_deadline_s: float = 600.0
    start_method: Literal["auto", "fork", "spawn"] = "auto"
    template: ServedTemplate = OWN_TEMPLATE


class VllmEngine(LoraEngine):
    """Samples with vLLM, in process as a library or behind the service.

    Args:
        model: Directory or hub id of the base model.
        lora: Maximum number and rank of adapters; None: no adapters.
    """

    info: ModelInfo

    def __init__(self, model: str, options: VllmOptions | None = None, lora: LoraLimits | None = None) -> None:
        self._model, self._options = model, options or VllmOptions()
        super().__init__(lora, self._options.phase_deadline_s)
        self._processes: VllmProcesses | None = None
        self._weights = VllmWeights(
            clear_cache=self._options.kv_policy == "recompute",
            double_buffer=self._options.double_buffer,
            patch=self._options.patch,
            deadline_s=self._options.phase_deadline_s,
        )
        self._seeds = True
        self._commands = asyncio.Lock()
        self._paused: PauseMode | None = None
        self._scrubbing = False
        self._broken = ""
        self._unchecked: tuple[UncheckedWeights, ...] = ()
        self._told: set[str] = set()
        self._numbers = itertools.count()
        self._active: dict[str, set[TrackedRequest]] = {}
        self._submitted: dict[TrackedRequest, None] = {}
        self._queued: set[TrackedRequest] = set()
        self._queued_at = -1
        self._generated = 0
        self._prompted = 0

    # --- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """See `InferenceEngine`. Start before serving sockets: the engine's process is forked on a CPU."""
        async with self._commands:
            await self._start(fork=self._options.start_method != "spawn")

    async def restart(self) -> Version:
        """See `InferenceEngine`."""
        async with self._commands:
            await self._shut_down()
            await self._start(fork=self._options.start_method == "fork")
            staged, self._weights.staged = self._weights.staged, None
            if staged is not None and staged.path.is_file():
                await self._switch(staged)
            await self._reload_adapters()
            return self._version

    async def stop(self) -> None:
        """See `InferenceEngine`."""
        async with self._commands:
            await self._shut_down()

    async def _start(self, *, fork: bool) -> None:
        self._processes = await launch(
            self._model,
            self._options.engine_args,
            fork=fork,
            deadline_s=self._options.start_deadline_s,
            lora=self.lora_limits,
        )
        model_config = self._processes.config.model_config
        directory = await asyncio.to_thread(model_directory, self._model, model_config.revision)
        self._weights.base = await asyncio.to_thread(read_base_model, directory)
        self._weights.version = BASE
        tokenizer, template = self._processes.llm.tokenizer, self._options.template
        if tokenizer is not None and template.text is not None:
            tokenizer.chat_template = template.text
        self.info = describe(self._model, self._processes.config, tokenizer, template.arguments)
        self._seeds = not (self._processes.on_cpu and self._processes.config.scheduler_config.enable_chunked_prefill)
        self._broken, self._paused = "", None
        self._forget_adapters()
        llm = self._processes.llm
        await step(
            llm, "labelling the base weights", llm.update_weight_version(str(BASE)), self._options.phase_deadline_s
        )
        log.info("vllm started", model=self._model, dtype=self.info.dtype, max_model_len=self.info.max_model_len)

    async def _shut_down(self) -> None:
        processes, self._processes = self._processes, None
        if processes is None:
            return
        self._fail_requests(processes, "the engine was stopped")
        await processes.shut_down()

    def _fail_requests(self, processes: VllmProcesses, why: str) -> None:
        """End all requests with an error."""
        processes.llm.output_processor.propagate_error(EngineError(why))

    @property
    def _version(self) -> Version:
        """Return the version of requests that name no adapter."""
        return self._adapter_version or self._weights.version

    @property
    def _llm(self) -> AsyncLLM:
        """Return the running ``AsyncLLM``.

        Raises:
            EngineError: if the engine does not run or is broken.
        """
        if self._processes is None:
            raise EngineError("the engine is not running; call start()")
        if self._broken:
            raise EngineError(f"the engine is broken: {self._broken}; call restart()")
        if self._processes.llm.errored:
            raise EngineError("the engine's process died; call restart()")
        return self._processes.llm

    @property
    def _recorder(self) -> LoadRecorder:
        """Return the recorder of the scheduler's reports.

        Raises:
            EngineError: if the engine does not run.
        """
        if self._processes is None:
            raise EngineError("the engine is not running; call start()")
        return self._processes.recorder

    # --- sampling -------------------------------------------------------------------------------------------------

    async def sample(self, request: GenerationRequest) -> GenerationResult:
        """See `InferenceEngine`."""
        tracked = await self._submit(request, hold=True)
        try:
            result = await tracked.result()
        except Exception as error:
            raise lost(request, error) from error
        finally:
            await self._release(tracked)
        self._count(request, sum(len(each.token_ids) for each in result.samples))
        poisoned = sum(cut_at_nan(each) for each in result.samples)
        if poisoned:
            await self._scrub()
        return result

    async def stream(self, request: GenerationRequest, pace: Pace = DEFAULT_PACE) -> AsyncGenerator[Progress, None]:
        """See `InferenceEngine`."""
        steps, given = self._recorder.steps, 0
        async with contextlib.aclosing(awaiting_weights(self._gates, steps)) as signs:
            async for sign in signs:
                yield sign
        tracked = await self._submit(request, hold=pace.seconds >= 2 * HOLD_S and pace.tokens >= HOLD_TOKENS)
        try:
            steps = self._recorder.steps  # the steps of the engine that has the request
            steps.watch(pace.tokens, tracked.watched(pace.tokens))
            async with contextlib.aclosing(paced(tracked, pace, steps, lambda: self._stage(tracked))) as stream:
                async for progress in stream:
                    given += sum(len(part.token_ids) for part in progress.parts)
                    poisoned = [part.index for part in progress.parts if cut_at_nan(part)]
                    yield progress
                    if poisoned:
                        await self._llm.abort([tracked.drop(index) for index in poisoned], internal=True)
                        await self._scrub()
        except Exception as error:
            raise lost(request, error) from error
        finally:
            self._count(request, given)
            await self._release(tracked)

    @property
    def _gates(self) -> tuple[asyncio.Event, ...]:
        """Return the events that are cleared while the engine switches to other weights."""
        return (self._policy_loaded, self._weights.admit)

    @property
    def _switching(self) -> bool:
        return self._scrubbing or not all(gate.is_set() for gate in self._gates)

    def _stage(self, tracked: TrackedRequest) -> Stage:
        """Return the stage of a request. The scheduler admits requests in order of arrival, unless they have priorities."""
        if self._switching:
            return Stage.SWITCHING
        if self._paused is not None:
            return Stage.PAUSED
        if tracked.started:
            return Stage.RUNNING
        if self._queued_at != self._recorder.steps.count:
            self._queued_at, self._queued = self._recorder.steps.count, self._not_admitted()
        return Stage.QUEUED if tracked in self._queued else Stage.RUNNING

    def _not_admitted(self) -> set[TrackedRequest]:
        """Return the requests without a place in the last step: the newest requests whose samples all were among the waiting ones."""
        queued: set[TrackedRequest] = set()
        waiting = self._recorder.waiting
        for tracked in reversed(self._submitted):
            if not tracked.started:
                waiting -= tracked.request.n
                if waiting < 0:
                    break
                queued.add(tracked)
        return queued

    async def abort(self, request_id: str) -> bool:
        """See `InferenceEngine`."""
        if request_id not in self._active:
            return False
        await self._held_tokens_of(self._active[request_id])
        for each in list(self._active.get(request_id, ())):
            await self._llm.abort(each.internal_id, internal=True)
        return True

    async def _held_tokens_of(self, requests: Iterable[TrackedRequest]) -> None:
        """Wait until the engine's process has sent the tokens that it holds back for requests that are about to be ended."""
        if any(each.held for each in requests) and self._paused is None:
            await asyncio.sleep(HOLD_S)

    async def _submit(self, request: GenerationRequest, *, hold: bool = False) -> TrackedRequest:
        """Give a request to vLLM. `hold`: its reader does not want its tokens at once."""
        for gate in self._gates:  # so that the new version samples the request
            await gate.wait()
        llm = self._llm
        check_request(request, self.info, seeds=self._seeds)
        name = f"{request.request_id}.{next(self._numbers)}"
        with self._entering_with(request.adapter) as adapter:
            # The salt makes the version a part of the key of prefix-cache entries, so that no old entry is read after an update.
            salt = str(self._weights.version if adapter is None else adapter.version)
            try:
                with refusals():
                    params = sampling_params(request, self.info, has_tokenizer=llm.tokenizer is not None, hold=hold)
                    tracked = await submit(llm, request, adapter, params, name=name, salt=salt)
                    tracked.held = hold
            except ValueError:
                raise
            except Exception as error:
                raise lost(request, error) from error
            self._active.setdefault(request.request_id, set()).add(tracked)
            self._submitted[tracked] = None
        return tracked

    async def _release(self, tracked: TrackedRequest) -> None:
        """Forget a request. Abort it if it has not ended."""
        tracked.released = True
        self._left(tracked.adapter)
        del self._submitted[tracked]
        live = self._active[tracked.request.request_id]
        live.discard(tracked)
        if not live:
            del self._active[tracked.request.request_id]
        processes = self._processes
        if not tracked.ended and processes is not None and not processes.llm.errored:
            await processes.llm.abort(tracked.internal_id, internal=True)

    def _count(self, request: GenerationRequest, generated: int) -> None:
        self._generated += generated
        self._prompted += len(request.prompt_ids)

    async def _scrub(self) -> None:
        """Clear the KV cache after a NaN, which would stay in its blocks. Requests in progress are computed again.

        Raises:
            EngineError: if that fails; the engine is broken then, since it may be paused and hold the NaN.
        """
        async with self._changing():
            llm = self._llm
            log.error("sampled from NaN; cleaning the KV cache", version=str(self._weights.version))
            deadline_s = self._options.phase_deadline_s
            self._recorder.expect_recomputation()
            self._scrubbing = True  # its requests report that it switches, since it makes no step but does not hang
            try:
                pause = llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)
                await step(llm, "pausing", pause, deadline_s)
                await step(llm, "cleaning the KV cache", llm.collective_rpc("sluice_zero_kv"), deadline_s)
                if self._paused is None:
                    await step(llm, "resuming", llm.resume_generation(), deadline_s)
            finally:
                self._scrubbing = False

    # --- pausing --------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """See `InferenceEngine`."""
        async with self._changing():
            llm = self._llm
            if mode is PauseMode.ABORT:
                await self._held_tokens_of(self._submitted)
            work = llm.engine_core.pause_scheduler_async(mode=mode.value, clear_cache=False)
            try:
                await step(llm, "pausing", work, self._options.drain_deadline_s)
            except HalfLoadedError as error:
                if not llm.errored:
                    await step(llm, "resuming", llm.resume_generation(), self._options.phase_deadline_s)
                raise EngineError(f"{error}; a pause with KEEP does not wait for requests") from error
            self._paused = mode

    async def resume(self) -> None:
        """See `InferenceEngine`."""
        async with self._changing():
            self._paused = None
            llm = self._llm
            await step(llm, "resuming", llm.resume_generation(), self._options.phase_deadline_s)

    # --- weights --------------------------------------------------------------------------------------------------

    async def apply(self, staged: StagedVersion) -> ApplyReport:
        """See `InferenceEngine`."""
        async with self._commands:  # a caller that is cancelled while it waits for the lock leaves at once
            return await run_to_end(asyncio.ensure_future(self._apply(staged)))

    async def reload_base(self) -> ApplyReport:
        """See `InferenceEngine`."""
        async with self._commands:
            return await run_to_end(asyncio.ensure_future(self._switch(None)))

    async def verify_weights(self, staged: StagedVersion | None, fraction: float = 1.0) -> list[str]:
        """See `InferenceEngine`. Tensors whose form in the engine is unknown, such as quantised ones, cannot be compared."""
        async with self._commands:
            deadline_s = VERIFY_PHASES * self._options.phase_deadline_s
            found = await verify(self._llm, self._weights.files(staged), fraction, deadline_s)
            self._weights.suspect |= bool(found.tensors)
            self._unchecked = tuple(
                UncheckedWeights(kind, len(names), names[0]) for kind, names in found.unchecked.items()
            )
            for each in self._unchecked:
                if each.layers not in self._told:
                    self._told.add(each.layers)
                    log.warning("live weights cannot be compared with their file", **asdict(each))
            return found.tensors

    async def _apply(self, staged: StagedVersion) -> ApplyReport:
        if self._weights.staged == staged and not self._weights.suspect:
            self._deselect_adapter()  # from an adapter back to its base, which has not changed
            return ApplyReport(staged.version, 0.0, 0.0)
        return await self._switch(staged)

    async def _switch(self, staged: StagedVersion | None) -> ApplyReport:
        llm = self._llm
        files = self._weights.files(staged)
        try:
            await self._retire_other_bases(files.version)
            report = await self._weights.switch(llm, self._recorder, files, resume=self._paused is None)
        except HalfLoadedError as error:
            self._break(str(error))
            raise
        self._weights.staged = staged
        self._deselect_adapter()
        return report

    def _break(self, why: str) -> None:
        """Stop sampling, and end all requests with an error."""
        self._broken = why
        if self._processes is not None:
            self._fail_requests(self._processes, f"{why}; call restart()")

    @asynccontextmanager
    async def _changing(self) -> AsyncIterator[None]:
        """Hold the lock for a change. A failure that leaves the engine in an unknown state stops it."""
        async with self._commands:
            try:
                yield
            except HalfLoadedError as error:
                self._break(str(error))
                raise

    # --- adapters (see `LoraEngine`) ------------------------------------------------------------------------------

    @property
    def _base_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._weights.base.shapes if self._weights.base else {}

    @property
    def _weights_version(self) -> Version:
        return self._weights.version

    async def _add_adapter(self, adapter: Adapter) -> None:
        """Load an adapter in the workers, which keep sampling.

        Raises:
            EngineError: if a worker refuses it; then no worker has it.
            HalfLoadedError: if the engine failed.
        """
        arguments = {"label": adapter.label, "number": adapter.number, "path": str(adapter.staged.path)}
        call = self._llm.collective_rpc("sluice_add_adapter", kwargs=arguments)
        replies = await step(self._llm, "loading an adapter", call, self._options.phase_deadline_s)
        why = next((reply[1] for reply in replies if reply[0] != "ok"), None)
        if why is not None:
            await self._remove_adapter(adapter)
            raise EngineError(f"adapter {adapter.version} was not loaded: {why}; the version before keeps serving")

    async def _remove_adapter(self, adapter: Adapter) -> None:
        llm = self._llm
        await step(llm, "unloading an adapter", llm.remove_lora(adapter.number), self._options.phase_deadline_s)

    async def _end_requests(self, which: Callable[[RequestInProgress], bool]) -> None:
        """End some requests. The engine has dropped them before it answers a later call."""
        ending = [each for active in self._active.values() for each in active if which(each)]
        await self._held_tokens_of(ending)
        for tracked in ending:
            tracked.retired = True
            await self._llm.abort(tracked.internal_id, internal=True)

    # --- status ---------------------------------------------------------------------------------------------------

    def held(self) -> HeldVersions | None:
        """See `InferenceEngine`."""
        if self._processes is None or self._broken or self._processes.llm.errored:
            return None
        return self._held_with(self._weights.version)

    def status(self) -> EngineStatus:
        """See `InferenceEngine`."""
        processes, healthy = self._processes, self.held() is not None
        unfinished = processes.llm.get_num_unfinished_requests() if processes is not None and healthy else 0
        running = min(processes.recorder.running, unfinished) if processes is not None else 0
        return EngineStatus(
            version=self._version,
            running=running,
            queued=unfinished - running,
            kv_cache_usage=processes.recorder.kv_cache_usage if processes is not None and unfinished else 0.0,
            generated_tokens=self._generated + (live_token_count(processes.llm) if processes is not None else 0),
            prompt_tokens=self._prompted,
            max_running=processes.config.scheduler_config.max_num_seqs if processes is not None else 0,
            paused=self._paused is not None,
            healthy=healthy,
            steps=processes.recorder.steps.count if processes is not None else 0,
            preemptions=processes.recorder.preemptions if processes is not None else 0,
            switching=self._switching,
            unchecked=self._unchecked,
        )


def lost(request: GenerationRequest, error: Exception) -> EngineError:
    """Return the error for a request that was in progress when the engine failed."""
    if isinstance(error, EngineError):
        return error
    return EngineError(f"request {request.request_id} was lost with the engine: {type(error).__name__}: {error}")
