"""The engine that samples with vLLM's ``AsyncLLM``.

vLLM is imported by `VllmEngine.start` and not before: the import takes seconds and reads the environment.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, Literal

import structlog

from rollout_svc.engines import vllm_results as results
from rollout_svc.engines.base import (
    EngineError,
    EngineStatus,
    GenerationChunk,
    GenerationRequest,
    GenerationResult,
    ModelInfo,
    PauseMode,
)
from rollout_svc.engines.base_model import BaseModel, read_base_model
from rollout_svc.engines.vllm_spans import TrackedRequest, live_token_count, submit
from rollout_svc.engines.vllm_start import VllmProcesses, launch
from rollout_svc.engines.vllm_types import Llm, ModelConfig, VllmConfig
from rollout_svc.engines.vllm_weights import HalfLoadedError, WeightFiles, load, phase
from sluice.versions import BASE, Version
from weightsync.staged import ApplyReport, StagedVersion

__all__ = ["VllmEngine"]

LEAST_COALESCE_S = 0.001
"""A stream wakes no more often than this; an engine step takes longer."""

log = structlog.get_logger()


class VllmEngine:
    """Inference with vLLM, in process as a library or behind the service.

    Args:
        model: Directory or hub id of the base model.
        engine_args: Fields of vLLM's ``AsyncEngineArgs``, such as ``tensor_parallel_size`` or ``quantization``.
        kv_policy: What happens to the keys and values of requests under way when the weights change: "keep" them
            (cheap, later tokens attend to what older weights wrote) or "recompute" them.
        start_deadline_s: How long loading may take.
        phase_deadline_s: How long each step of an update may take before the engine counts as broken.
        drain_deadline_s: How long `pause` with mode WAIT waits for requests to end.
        start_method: "auto" forks on CPU at the first start and spawns later, when the process may serve sockets.
    """

    info: ModelInfo

    def __init__(
        self,
        model: str,
        *,
        engine_args: Mapping[str, Any] | None = None,
        kv_policy: Literal["keep", "recompute"] = "keep",
        start_deadline_s: float = 600.0,
        phase_deadline_s: float = 120.0,
        drain_deadline_s: float = 600.0,
        start_method: Literal["auto", "fork", "spawn"] = "auto",
    ) -> None:
        self._model = model
        self._engine_args = dict(engine_args or {})
        self._clear_cache = kv_policy == "recompute"
        self._start_deadline_s = start_deadline_s
        self._phase_deadline_s = phase_deadline_s
        self._drain_deadline_s = drain_deadline_s
        self._start_method = start_method
        self._processes: VllmProcesses | None = None
        self._base: BaseModel | None = None
        self._seeds = True
        self._version = BASE
        self._staged: StagedVersion | None = None
        self._commands = asyncio.Lock()
        self._admit = asyncio.Event()
        self._admit.set()
        self._paused: PauseMode | None = None
        self._broken = ""
        self._numbers = itertools.count()
        self._live: dict[str, set[TrackedRequest]] = {}
        self._generated = 0
        self._prompted = 0

    # --- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model. Start before serving sockets: the engine's process is forked on CPU.

        Raises:
            EngineError: with the remedy, if it cannot.
        """
        async with self._commands:
            await self._start(fork=self._start_method != "spawn")

    async def restart(self) -> Version:
        """Build the engine anew after it died, on the version last applied if its staged file is still there.

        Returns:
            The version that serves now; the base, (0, 0), if the staged file is gone.

        Raises:
            EngineError: if it cannot start.
        """
        async with self._commands:
            await self._shut_down()
            await self._start(fork=self._start_method == "fork")
            staged = self._staged
            if staged is not None and staged.path.is_file():
                await self._switch(self._files(staged))
            else:
                self._staged = None
            return self._version

    async def stop(self) -> None:
        """End every request and free everything. Idempotent."""
        async with self._commands:
            await self._shut_down()

    async def _start(self, *, fork: bool) -> None:
        self._processes = await launch(self._model, self._engine_args, fork=fork, deadline_s=self._start_deadline_s)
        model_config = self._processes.config.model_config
        directory = await asyncio.to_thread(model_directory, self._model, model_config.revision)
        self._base = await asyncio.to_thread(read_base_model, directory)
        self.info = describe(self._model, self._processes.config)
        self._seeds = not (self._processes.on_cpu and self._processes.config.scheduler_config.enable_chunked_prefill)
        self._broken, self._paused, self._version = "", None, BASE
        self._admit.set()
        async with phase("labelling the base weights", self._phase_deadline_s):
            await self._processes.llm.update_weight_version(str(BASE))
        log.info("vllm started", model=self._model, dtype=self.info.dtype, max_model_len=self.info.max_model_len)

    async def _shut_down(self) -> None:
        processes, self._processes = self._processes, None
        if processes is None:
            return
        self._fail_requests(processes, "the engine was stopped")
        await processes.shut_down()

    def _fail_requests(self, processes: VllmProcesses, why: str) -> None:
        """Let every waiting caller know at once."""
        processes.llm.output_processor.propagate_error(EngineError(why))

    @property
    def _llm(self) -> Llm:
        """The running ``AsyncLLM``.

        Raises:
            EngineError: if there is none that can sample.
        """
        if self._processes is None:
            raise EngineError("the engine is not running; call start()")
        if self._broken:
            raise EngineError(f"the engine is broken: {self._broken}; call restart()")
        if self._processes.llm.errored:
            raise EngineError("the engine's process died; call restart()")
        return self._processes.llm

    # --- sampling -------------------------------------------------------------------------------------------------

    async def agenerate(self, request: GenerationRequest) -> GenerationResult:
        """Sample and answer when all samples have ended. Cancelling aborts them.

        Raises:
            ValueError: if this engine cannot sample so.
            EngineError: if the engine died.
        """
        tracked = await self._submit(request)
        try:
            output = await tracked.result()
        except Exception as error:
            raise lost(request, error) from error
        finally:
            await self._release(request, tracked)
        samples = [results.sample(each, request.sampling) for each in output.outputs]
        self._count(request, sum(len(each.token_ids) for each in samples))
        poisoned = sum(results.cut_at_nan(each) for each in samples)
        if poisoned:
            await self._scrub()
        return GenerationResult(
            request.request_id,
            samples,
            results.prompt_logprobs(output.prompt_logprobs) if request.prompt_logprobs else [],
            output.num_cached_tokens or 0,
        )

    async def stream(
        self, request: GenerationRequest, *, coalesce_s: float = 0.02
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Sample and give chunks as they come; chunks of different samples interleave. Closing the iterator aborts.

        Raises:
            ValueError: if this engine cannot sample so.
            EngineError: if the engine died.
        """
        tracked = await self._submit(request)
        given = 0
        try:
            while not tracked.ended:
                await tracked.wait(max(coalesce_s, LEAST_COALESCE_S))
                for index, sampled, ended in tracked.advance():
                    chunk = results.chunk(index, sampled, ended, request.sampling)
                    given += len(chunk.token_ids)
                    poisoned = results.cut_at_nan(chunk)
                    yield chunk
                    if poisoned:
                        await self._scrub()
                        return
        except Exception as error:
            raise lost(request, error) from error
        finally:
            self._count(request, given)
            await self._release(request, tracked)

    async def abort(self, request_id: str) -> bool:
        """End a request with finish reason ABORT and its tokens so far. False if it is not under way."""
        tracked = list(self._live.get(request_id, ()))
        for each in tracked:
            await self._llm.abort(each.internal_id, internal=True)
        return bool(tracked)

    async def _submit(self, request: GenerationRequest) -> TrackedRequest:
        await self._admit.wait()  # while an update is under way: the request belongs to the version that comes
        llm = self._llm
        check_request(request, self.info, seeds=self._seeds)
        # The salt keys prefix-cache entries by version: none is read after an update.
        prompt = {"type": "token", "prompt_token_ids": request.prompt_ids, "cache_salt": str(self._version)}
        unique_id = f"{request.request_id}.{next(self._numbers)}"
        try:
            with results.refusals():
                params = results.sampling_params(request, self.info, has_tokenizer=llm.tokenizer is not None)
                tracked = await submit(llm, unique_id, prompt, params, request.priority)
        except ValueError:
            raise
        except Exception as error:
            raise lost(request, error) from error
        self._live.setdefault(request.request_id, set()).add(tracked)
        return tracked

    async def _release(self, request: GenerationRequest, tracked: TrackedRequest) -> None:
        """Forget a request; abort it if its caller gave it up before its end."""
        live = self._live[request.request_id]
        live.discard(tracked)
        if not live:
            del self._live[request.request_id]
        processes = self._processes
        if not tracked.ended and processes is not None and not processes.llm.errored:
            await processes.llm.abort(tracked.internal_id, internal=True)

    def _count(self, request: GenerationRequest, generated: int) -> None:
        self._generated += generated
        self._prompted += len(request.prompt_ids)

    async def _scrub(self) -> None:
        """Clean the KV cache after a NaN, which would live on in its blocks; requests under way are computed again."""
        async with self._commands:
            llm = self._llm
            log.error("sampled from NaN; cleaning the KV cache", version=str(self._version))
            async with phase("cleaning the KV cache", self._phase_deadline_s):
                await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)
                await llm.collective_rpc("sluice_zero_kv")
                if self._paused is None:
                    await llm.resume_generation()

    # --- pausing --------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling; new requests queue.

        Raises:
            EngineError: if requests under way did not end in time (mode WAIT); sampling goes on.
        """
        async with self._commands:
            llm = self._llm
            try:
                async with asyncio.timeout(self._drain_deadline_s):
                    await llm.engine_core.pause_scheduler_async(mode=mode.value, clear_cache=False)
            except TimeoutError as error:
                await llm.resume_generation()
                raise EngineError(
                    f"requests did not end within {self._drain_deadline_s:.0f} s; pause with KEEP"
                ) from error
            self._paused = mode

    async def resume(self) -> None:
        """Sample again. Idempotent."""
        async with self._commands:
            self._paused = None
            async with phase("resuming", self._phase_deadline_s):
                await self._llm.resume_generation()

    # --- weights --------------------------------------------------------------------------------------------------

    async def apply(self, staged: StagedVersion) -> ApplyReport:
        """Switch to a staged version: pause, copy, resume; requests under way continue.

        Raises:
            EngineError: if the version could not be applied. The old version serves on, unless `status` says that the
                engine is not healthy: then it needs `restart`. Nothing is sampled from half a version.
        """
        async with self._commands:
            if self._staged == staged and self._version == staged.version:
                return ApplyReport(staged.version, 0.0, 0.0)
            self._base_model.check(staged)
            report = await self._switch(self._files(staged))
            self._staged = staged
            return report

    async def reload_base(self) -> ApplyReport:
        """Return to the base model on disk, as version (0, 0).

        Raises:
            EngineError: as `apply` does.
        """
        async with self._commands:
            report = await self._switch(self._base_files)
            self._staged = None
            return report

    async def _switch(self, files: WeightFiles) -> ApplyReport:
        llm = self._llm
        self._admit.clear()
        begun = time.perf_counter()
        try:
            async with phase("pausing", self._phase_deadline_s):
                await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=self._clear_cache)
            try:
                copy_s = await self._load_or_go_back(llm, files)
            finally:
                if not self._broken and self._paused is None:
                    async with phase("resuming", self._phase_deadline_s):
                        await llm.resume_generation()
        except HalfLoadedError as error:
            self._break(str(error))
            raise
        finally:
            self._admit.set()
        return ApplyReport(files.version, time.perf_counter() - begun, copy_s)

    async def _load_or_go_back(self, llm: Llm, files: WeightFiles) -> float:
        """Load a version; on failure once more, then what served before. Leaves the engine whole or broken."""
        try:
            copy_s = await load(llm, files, self._phase_deadline_s)
        except HalfLoadedError as first:
            log.warning("update failed, trying again", version=str(files.version), error=str(first))
            try:
                copy_s = await load(llm, files, self._phase_deadline_s)
            except EngineError as second:
                await self._go_back(llm)
                raise EngineError(f"{second}; version {self._version} serves on") from second
        self._version = files.version
        return copy_s

    async def _go_back(self, llm: Llm) -> None:
        before = self._files(self._staged) if self._staged is not None else self._base_files
        try:
            await load(llm, before, self._phase_deadline_s)
        except EngineError as error:
            self._break(f"neither the new nor the old version could be loaded: {error}")
            raise

    def _break(self, why: str) -> None:
        self._broken = why
        if self._processes is not None:
            self._fail_requests(self._processes, f"{why}; call restart()")

    @property
    def _base_model(self) -> BaseModel:
        if self._base is None:
            raise EngineError("the engine is not running; call start()")
        return self._base

    @property
    def _base_files(self) -> WeightFiles:
        return WeightFiles(BASE, self._base_model.paths, list(self._base_model.shapes))

    def _files(self, staged: StagedVersion) -> WeightFiles:
        return WeightFiles(staged.version, (staged.path,), list(self._base_model.shapes))

    # --- status ---------------------------------------------------------------------------------------------------

    def status(self) -> EngineStatus:
        """Report load and version; cheap."""
        processes = self._processes
        healthy = processes is not None and not self._broken and not processes.llm.errored
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
        )


def model_directory(model: str, revision: str | None) -> Path:
    """Where the model's files lie; those of a hub id were fetched by vLLM."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - only for hub ids

    return Path(snapshot_download(model, revision=revision, allow_patterns=["*.json", "*.safetensors"]))


def lost(request: GenerationRequest, error: Exception) -> EngineError:
    """What a caller is told when the engine failed under a request."""
    if isinstance(error, EngineError):
        return error
    return EngineError(f"request {request.request_id} was lost with the engine: {type(error).__name__}: {error}")


def check_request(request: GenerationRequest, info: ModelInfo, *, seeds: bool) -> None:
    """Refuse what would end vLLM's engine for everybody.

    Raises:
        ValueError: naming it.
    """
    ids = request.prompt_ids
    if ids and not 0 <= min(ids) <= max(ids) < info.vocabulary_size:
        wrong = next(id_ for id_ in ids if not 0 <= id_ < info.vocabulary_size)
        raise ValueError(f"token id {wrong} is outside the vocabulary of {info.vocabulary_size}")
    if request.sampling.seed is not None and not seeds:
        raise ValueError("a seed needs enable_chunked_prefill = false on CPU, or vLLM's engine dies of a cut prompt")


def describe(model: str, config: VllmConfig) -> ModelInfo:
    """What the engine serves, from vLLM's ``VllmConfig``."""
    model_config = config.model_config
    return ModelInfo(
        model=model,
        architecture=model_config.architectures[0],
        vocabulary_size=model_config.get_vocab_size(),
        max_model_len=model_config.max_model_len,
        dtype=str(model_config.dtype).removeprefix("torch."),
        eos_token_ids=end_tokens(model_config),
        engine="vllm",
    )


def end_tokens(model_config: ModelConfig) -> tuple[int, ...]:
    """All end tokens that the configuration and the generation configuration name."""
    from vllm.transformers_utils.config import try_get_generation_config  # noqa: PLC0415 - loaded by start()

    generation = try_get_generation_config(
        model_config.hf_config_path or model_config.model,
        trust_remote_code=model_config.trust_remote_code,
        revision=model_config.revision,
    )
    ids: set[int] = set()
    for source in (model_config.hf_text_config, generation):
        named = getattr(source, "eos_token_id", None)
        ids.update([named] if isinstance(named, int) else named or ())
    return tuple(sorted(ids))
