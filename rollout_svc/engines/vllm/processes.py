"""Starts and stops the processes of vLLM."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpc._cython import cygrpc  # type: ignore[attr-defined]  # the stubs leave it out

from rollout_svc.engines.adapters import LoraLimits
from rollout_svc.engines.base import EngineError, ModelInfo
from rollout_svc.engines.vllm.arguments import (
    engine_arguments,
    has_accelerator,
    prepare_environment,
    require_tested_version,
    workers_of,
)
from rollout_svc.engines.vllm.types import Llm, ModelConfig, SchedulerStats, VllmConfig
from weightsync.vllm_plugin import children_die_with_us

__all__ = ["LoadRecorder", "VllmProcesses", "collect_rpc_garbage", "describe", "fork_is_sound", "launch"]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where vLLM puts its own segments


_OWNERS = (cygrpc.AioChannel, cygrpc.AioServer, cygrpc.Channel, cygrpc.Server)
"""The objects that own the threads of gRPC: every channel, server, stub and call holds one of these."""


class LoadRecorder:
    """Keeps the last statistics of the scheduler, in place of vLLM's own loggers."""

    def __init__(self) -> None:
        self._last: dict[int, SchedulerStats] = {}

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: object,
        mm_cache_stats: object = None,
        engine_idx: int = 0,
    ) -> None:
        """Record the statistics of one step of one engine (vLLM's signature)."""
        del iteration_stats, mm_cache_stats
        if scheduler_stats is not None:
            self._last[engine_idx] = scheduler_stats

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
    def kv_cache_usage(self) -> float:
        """Return the used fraction of the fullest KV cache, from 0 to 1."""
        return max((stats.kv_cache_usage for stats in self._last.values()), default=0.0)


@dataclass(slots=True)
class VllmProcesses:
    """A running vLLM.

    Attributes:
        llm: ``AsyncLLM``.
        recorder: The load of its schedulers.
        config: ``VllmConfig``.
        on_cpu: Whether there is no accelerator.
    """

    llm: Llm
    recorder: LoadRecorder
    config: VllmConfig
    on_cpu: bool
    _thread: ThreadPoolExecutor
    _segments: frozenset[Path]

    async def shut_down(self, deadline_s: float = 10.0) -> None:
        """End the processes and the thread that owns them. Idempotent."""
        handler = self.llm.output_handler
        if handler is not None:  # it would report the end of the processes as an error
            handler.cancel()
            await asyncio.wait([handler], timeout=deadline_s)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self.llm.shutdown, deadline_s)
        self.llm.shutdown = _already_shut_down  # type: ignore[method-assign]  # its finaliser calls it once more
        self._thread.shutdown(wait=False)
        for segment in self._segments:  # vLLM does not delete those of tensor-parallel workers
            segment.unlink(missing_ok=True)


async def launch(
    model: str, given: Mapping[str, Any], *, fork: bool, deadline_s: float, lora: LoraLimits | None = None
) -> VllmProcesses:
    """Start vLLM's engine.

    Args:
        model: Directory or hub id.
        given: The user's engine arguments.
        fork: Fork the engine's process instead of spawning it, where the platform allows and nothing of gRPC lives here
            (see `fork_is_sound`): 8 s instead of 15, but only sound while this process serves nothing (a forked child would
            hold its sockets open).
        deadline_s: How long it may take.
        lora: Adapters that it has to hold; None for none.

    Raises:
        EngineError: if it cannot start or takes longer.
    """
    # The kernel ends the children when the thread that started them ends. This thread lives as long as they should.
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm-owner")
    if fork:
        collect_rpc_garbage()
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(deadline_s):
            return await loop.run_in_executor(thread, _launch, model, dict(given), lora, fork, thread)
    except TimeoutError as error:
        thread.shutdown(wait=False)
        raise EngineError(f"vLLM did not start within {deadline_s:.0f} s; raise rollout.deadlines.start_s") from error
    except EngineError:
        thread.shutdown(wait=False)
        raise
    except (RuntimeError, ValueError, OSError, ImportError, AssertionError, TypeError, KeyError) as error:
        thread.shutdown(wait=False)
        raise EngineError(f"vLLM did not start: {type(error).__name__}: {error}") from error


def _launch(
    model: str, given: dict[str, Any], lora: LoraLimits | None, fork: bool, thread: ThreadPoolExecutor
) -> VllmProcesses:
    prepare_environment(os.environ, workers=workers_of(given))
    import vllm  # noqa: PLC0415 - takes seconds and reads the environment: only when an engine is wanted
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

    require_tested_version(vllm.__version__)
    on_cpu = not has_accelerator()
    arguments = engine_arguments(model, given, on_cpu=on_cpu, arguments_class=AsyncEngineArgs, lora=lora)
    config = AsyncEngineArgs(**arguments).create_engine_config()
    # vLLM's CPU platform sets "spawn" in the line above; on a GPU a fork would inherit a broken CUDA context.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork" if fork and on_cpu and fork_is_sound() else "spawn"
    recorder = LoadRecorder()
    before = frozenset(SHARED_MEMORY.glob("vllm_dist_*"))
    with children_die_with_us(), threads_as_in_environment(), garbage_stays_behind():
        llm = AsyncLLM.from_vllm_config(config, stat_loggers=[_no_logger], disable_log_stats=True)
    # The scheduler reports its load once per step. Statistics per token would cost this process a tenth of its time.
    llm.log_stats = llm.output_processor.log_stats = False
    llm.logger_manager = recorder
    segments = frozenset(SHARED_MEMORY.glob("vllm_dist_*")) - before
    return VllmProcesses(llm, recorder, config, on_cpu, thread, segments)


@contextmanager
def threads_as_in_environment() -> Iterator[None]:
    """Use the number of CPU threads of ``OMP_NUM_THREADS`` in this thread and in processes that are forked from it.

    OpenMP and MKL read the variable once, and most programs have loaded them before the engine sets it. Too many threads in a
    forked engine cost a sixth of its throughput.
    """
    import torch  # noqa: PLC0415 - vLLM has loaded it

    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if not wanted.isdecimal() or int(wanted) == 0:  # OpenMP ignores it, too
        yield
        return
    had = torch.get_num_threads()
    torch.set_num_threads(int(wanted))
    try:
        yield
    finally:
        torch.set_num_threads(had)


def _already_shut_down(timeout: float | None = None) -> None:
    """Do nothing: at the exit of the interpreter, vLLM's modules are gone."""
    del timeout


def _no_logger(vllm_config: VllmConfig, engine_index: int = 0) -> LoadRecorder:
    """Return a recorder, so that vLLM reports its load. It is then replaced by one `LoadRecorder` for all engines."""
    del vllm_config, engine_index
    return LoadRecorder()


def fork_is_sound() -> bool:
    """Return whether this process holds no objects of gRPC that a forked child would inherit.

    The child gets the objects without their threads. When its garbage collector deletes the last of them, gRPC waits for its
    poller thread for ever; until then the child keeps the sockets open. Takes 60 ms when vLLM is loaded.
    """
    return not any(issubclass(kind, _OWNERS) for kind in {type(each) for each in gc.get_objects()})


def collect_rpc_garbage() -> None:
    """Delete closed channels and servers, which would prevent a fork.

    Call this in the thread of their event loop. Takes some tenths of a second if there are any.
    """
    if not fork_is_sound():
        gc.collect()


@contextmanager
def garbage_stays_behind() -> Iterator[None]:
    """Prevent processes that are forked in this block from collecting the garbage of their parent.

    That garbage may own threads and sockets that the child does not have: a store of torch.distributed would wait for its thread
    for ever, and a socket of ZeroMQ would close a descriptor that the child uses for something else.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def describe(model: str, config: VllmConfig) -> ModelInfo:
    """Return a description of the served model, from vLLM's ``VllmConfig``."""
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
    """Return the end tokens of the configuration and of the generation configuration."""
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
