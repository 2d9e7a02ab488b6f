"""Starts and stops the processes of vLLM: its environment variables, its arguments and our defaults for them, the fork."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import logging
import multiprocessing.util  # waits for children at exit: import it first, so that it waits after `OwnerThread` has ended them
import os
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # the stubs leave it out

from rollout_svc.config import LoraLimits
from rollout_svc.engines.base import EngineError, EngineSettingsError, ModelInfo
from rollout_svc.engines.vllm import check_names, lora_arguments
from rollout_svc.engines.vllm.requests import LoadRecorder
from sluice.clock import CLOCK, Clock
from sluice.end_tokens import find_end_tokens
from sluice.imports import large_imports
from sluice.tasks import settle
from sluice.threads import SerialThread
from weightsync.vllm_plugin import BACKEND, CPU_KERNELS, WORKER_EXTENSION, children_die_with_us

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM

TESTED_VERSIONS = ("0.32.0",)
"""vLLM releases whose internals (see `requests`) and weight-transfer interface were tested."""


class Parts(NamedTuple):
    """The model runner and the kind of scheduler that an engine of vLLM has. There are two of each.

    Attributes:
        runner_v2: Model Runner V2, which vLLM 0.32 uses if Triton is installed; otherwise V1.
        asynchronous: The scheduler plans a step before it has the tokens of the last step; vLLM's default except on a CPU.
    """

    runner_v2: bool
    asynchronous: bool

    def __str__(self) -> str:
        """Return for example ``Model Runner V2 with asynchronous scheduling``."""
        return f"Model Runner V{1 + self.runner_v2} with {'a' if self.asynchronous else ''}synchronous scheduling"


TESTED_PARTS = Parts(runner_v2=False, asynchronous=False)
"""The parts that this project's tests use, on a CPU without Triton."""

CPU_KV_CACHE_BYTES = 256 << 20
"""Default size of the KV cache on a CPU: 65,000 tokens of a 2.4 M model. vLLM's own default is a fraction of all memory."""

CPU_MAX_NUM_SEQS = 256
"""Default number of sequences in one step on a CPU. 64 already reach 72-96% of the throughput of 256."""

END_S = 1.0
"""Seconds at the exit of the interpreter for the call in progress, before the processes are killed."""

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where vLLM puts its own segments


log = structlog.get_logger()

_OWNERS = (cygrpc.AioChannel, cygrpc.AioServer, cygrpc.Channel, cygrpc.Server)
"""The objects that own the threads of gRPC: every channel, server, stub and call holds one of these."""


class OwnerThread(SerialThread):
    """The thread that starts and ends the processes of vLLM.

    The kernel ends these processes when the thread that started them ends. If the thread hangs, `kill` ends them.
    """

    def __init__(self) -> None:
        super().__init__("vllm-owner")
        atexit.register(self._exit)

    def kill(self) -> None:
        """Kill the processes that the thread started, unless it has ended."""
        try:
            ids = Path(f"/proc/self/task/{self._thread.native_id}/children").read_text().split()
        except OSError as error:
            if self._thread.is_alive():
                log.warning("vLLM's processes cannot be found; they end with this one", error=str(error))
            return
        for process in multiprocessing.active_children():
            if str(process.pid) in ids:
                process.kill()

    def _run(self) -> None:
        super()._run()
        atexit.unregister(self._exit)

    def _exit(self) -> None:
        self.end()
        self._thread.join(END_S)
        self.kill()


@dataclass(slots=True)
class VllmProcesses:
    """A running vLLM."""

    llm: AsyncLLM
    recorder: LoadRecorder
    config: VllmConfig
    on_cpu: bool
    _owner: OwnerThread
    _segments: frozenset[Path]

    async def shut_down(self, deadline_s: float = 10.0, clock: Clock = CLOCK) -> None:
        """End the processes and the thread that owns them. Idempotent."""
        handler = self.llm.output_handler
        if handler is not None:  # it would report the end of the processes as an error
            handler.cancel()
            await settle(handler, timeout_s=deadline_s, clock=clock)
        ending = self._owner.submit(self.llm.shutdown, deadline_s)
        if await settle(ending, timeout_s=2 * deadline_s, clock=clock):
            ending.result()
        else:
            log.error("vLLM did not shut down in time; its processes are killed", seconds=2 * deadline_s)
            self._owner.kill()
        self.llm.shutdown = _already_shut_down  # its finaliser calls it once more
        self._owner.end()
        for segment in self._segments:  # vLLM does not delete those of tensor-parallel workers
            segment.unlink(missing_ok=True)


async def launch(
    model: str,
    given: Mapping[str, Any],
    *,
    fork: bool,
    deadline_s: float,
    lora: LoraLimits | None = None,
    clock: Clock = CLOCK,
) -> VllmProcesses:
    """Start vLLM's engine.

    Args:
        model: Directory or hub id.
        given: The user's engine arguments.
        fork: Fork the engine's process instead of spawning it, if the platform allows it and this process has no objects of gRPC
            (see `fork_is_sound`). That takes 8 s instead of 15, but is only sound while this process serves nothing: a forked
            child would hold its sockets open.
        deadline_s: Seconds that the start may take.
        lora: Maximum number and rank of adapters; None: no adapters.
        clock: Time of the deadline.

    Raises:
        EngineError: if it cannot start or takes longer.
    """
    if fork:
        collect_rpc_garbage()
    with contextlib.ExitStack() as on_failure:
        owner = OwnerThread()
        on_failure.callback(owner.end)
        try:
            async with clock.timeout(deadline_s):
                processes = await owner.submit(_launch, model, dict(given), lora, fork, owner)
        except TimeoutError as error:
            owner.kill()
            raise EngineError(
                f"vLLM did not start within {deadline_s:.0f} s; raise rollout.deadlines.start_s"
            ) from error
        except EngineError:
            raise
        except (RuntimeError, ValueError, OSError, ImportError, AssertionError, TypeError, KeyError) as error:
            raise EngineError(f"vLLM did not start: {type(error).__name__}: {error}") from error
        on_failure.pop_all()
    return processes


def _launch(
    model: str, given: dict[str, Any], lora: LoraLimits | None, fork: bool, owner: OwnerThread
) -> VllmProcesses:
    prepare_environment(os.environ, workers=workers_of(given))
    with large_imports():
        import vllm  # noqa: PLC0415 - takes seconds and reads the environment: only when an engine is wanted
        from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

    require_tested_version(vllm.__version__)
    on_cpu = not has_accelerator()
    arguments = engine_arguments(model, given, on_cpu=on_cpu, arguments_class=AsyncEngineArgs, lora=lora)
    config = AsyncEngineArgs(**arguments).create_engine_config()
    hold_tokens(config)
    if not on_cpu:
        log.info(compared_with_tests(vllm.__version__, parts_of(config)), model=model)
    # vLLM's CPU platform sets "spawn" in the line above. On a GPU a fork would inherit a broken CUDA context.
    forks = fork and on_cpu and fork_is_sound()
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork" if forks else "spawn"
    if forks:  # once here, instead of in each forked process
        importlib.import_module(config.parallel_config.worker_cls.rpartition(".")[0])
    recorder = LoadRecorder()
    before = frozenset(SHARED_MEMORY.glob("vllm_dist_*"))
    with children_die_with_us(), threads_as_in_environment(), garbage_stays_behind():
        llm = AsyncLLM.from_vllm_config(config, stat_loggers=[_no_logger], disable_log_stats=True)
    # The scheduler reports its load once per step. Statistics per token would cost this process a tenth of its time.
    llm.log_stats = llm.output_processor.log_stats = False
    llm.logger_manager = recorder
    segments = mapped_segments(os.getpid()) - before
    return VllmProcesses(llm, recorder, config, on_cpu, owner, segments)


def hold_tokens(config: VllmConfig) -> None:
    """Let vLLM use `rollout_svc.engines.vllm.scheduler`, unless it needs a scheduler other than its two usual ones."""
    scheduler = config.scheduler_config
    if scheduler.scheduler_cls is None:
        name = "HoldingAsyncScheduler" if scheduler.async_scheduling else "HoldingScheduler"
        scheduler.scheduler_cls = f"rollout_svc.engines.vllm.scheduler.{name}"
        # vLLM warns about every foreign scheduler, because the interface may change. `require_tested_version` pins the version.
        logging.getLogger("vllm.config.scheduler").setLevel(logging.ERROR)


def mapped_segments(process: int) -> frozenset[Path]:
    """Return the segments of vLLM that a process or one of its descendants has mapped, not those of other replicas."""
    segments, family = set(), [process]
    for pid in family:
        with contextlib.suppress(OSError):  # the process has ended
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                path = Path(line.split(maxsplit=5)[-1])
                if path.parent == SHARED_MEMORY and path.name.startswith("vllm_dist_"):
                    segments.add(path)
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                family += map(int, children.read_text().split())
    return frozenset(segments)


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
    poller thread for ever; until then the child keeps the sockets open. This takes 60 ms when vLLM is loaded.
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
    """Prevent processes that this thread forks in this block from ever collecting the garbage of their parent.

    That garbage may own threads and sockets that the child does not have: a store of torch.distributed would wait for its thread
    for ever, and a socket of ZeroMQ would close a descriptor that the child uses for something else. Searching the inherited
    objects also takes most of a second, and vLLM unfreezes and searches them twice when it ends.
    """
    gc.freeze()
    _forking.frozen = True
    try:
        yield
    finally:
        _forking.frozen = False
        gc.unfreeze()


_forking = threading.local()


def _stay_frozen() -> None:
    """In a forked child, make `gc.unfreeze` do nothing, so that inherited objects stay frozen. Its own children inherit this."""
    if getattr(_forking, "frozen", False):
        gc.unfreeze = _leave_frozen


def _leave_frozen() -> None:
    """Stand in for `gc.unfreeze`."""


os.register_at_fork(after_in_child=_stay_frozen)


def describe(
    model: str, config: VllmConfig, tokenizer: PreTrainedTokenizerBase | None, template_arguments: Mapping[str, Any]
) -> ModelInfo:
    """Return a description of the served model, from vLLM's ``VllmConfig``, its tokenizer and the arguments of the chat template."""
    from vllm.transformers_utils.config import try_get_generation_config  # noqa: PLC0415 - loaded by start()

    model_config = config.model_config
    generation_config = try_get_generation_config(
        model_config.hf_config_path or model_config.model,
        trust_remote_code=model_config.trust_remote_code,
        revision=model_config.revision,
    )
    size = model_config.get_vocab_size()
    ends = find_end_tokens(
        tokenizer, model_config.hf_text_config, generation_config, vocabulary_size=size, arguments=template_arguments
    )
    return ModelInfo(
        model=model,
        architecture=model_config.architectures[0],
        vocabulary_size=size,
        max_model_len=model_config.max_model_len,
        dtype=str(model_config.dtype).removeprefix("torch."),
        eos_token_ids=ends.ids,
        engine="vllm",
    )


def prepare_environment(environment: MutableMapping[str, str], *, workers: int) -> None:
    """Set the environment variables that vLLM reads. Call this before its import. Values of the user are kept.

    Args:
        environment: Normally ``os.environ``.
        workers: Tensor times pipeline parallel size. A single worker on a CPU lives in the engine's process, which saves
            the time of one more start.
    """
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if workers > 1 else "0"
    if workers > 1:
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # "auto" wants a NUMA node per rank
    defaults = {
        "OMP_NUM_THREADS": "1",  # two spinning OpenMP pools on the same cores slow each other tenfold
        "TORCHDYNAMO_DISABLE": "1",  # otherwise the first log-probability compiles a kernel with g++ for 16 s
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "sluice",
    }
    if not has_accelerator():
        for name, value in defaults.items():
            environment.setdefault(name, value)
    else:
        for name in ("VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS", "VLLM_PLUGINS"):
            environment.setdefault(name, defaults[name])


def has_accelerator() -> bool:
    """Return whether a CUDA or ROCm device is visible, without a CUDA context, which forked children could not use."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()


def require_tested_version(version: str) -> None:
    """Refuse a version of vLLM that was not tested.

    Raises:
        EngineSettingsError: with the tested versions.
    """
    if version.split("+", maxsplit=1)[0] not in TESTED_VERSIONS:
        raise EngineSettingsError(
            f"vLLM {version} was not tested with this engine, which reads version spans from its internals; "
            f'install {" or ".join(TESTED_VERSIONS)}, or use engine = "transformers"'
        )


def parts_of(config: VllmConfig) -> Parts:
    """Return the parts of an engine with this configuration."""
    return Parts(bool(config.use_v2_model_runner), bool(config.scheduler_config.async_scheduling))


def compared_with_tests(version: str, parts: Parts) -> str:
    """Return a line that compares the parts of a vLLM on an accelerator with the tested parts."""
    remedies = []
    if parts.runner_v2 != TESTED_PARTS.runner_v2:
        remedies.append(f"VLLM_USE_V2_MODEL_RUNNER={int(TESTED_PARTS.runner_v2)}")
    if parts.asynchronous != TESTED_PARTS.asynchronous:
        remedies.append(f"rollout.engine_args.async_scheduling = {str(TESTED_PARTS.asynchronous).lower()}")
    if not remedies:
        return f"vLLM {version} has {parts}, as in Sluice's tests, which run on a CPU: its kernels here are not covered by them"
    return f"vLLM {version} has {parts}; Sluice's tests cover {TESTED_PARTS}, on a CPU: to compare, set {' and '.join(remedies)}"


def engine_arguments(
    model: str, given: Mapping[str, Any], *, on_cpu: bool, arguments_class: type, lora: LoraLimits | None = None
) -> dict[str, Any]:
    """Return the engine arguments of the user with our defaults.

    Raises:
        EngineError: for an unknown name, or a rank that vLLM has no buffers for.
    """
    check_names(given, {field.name for field in fields(arguments_class)})
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": not has_tokenizer(str(given.get("tokenizer") or model)),
        "generation_config": "vllm",  # only requests set sampling parameters
        "max_logprobs": 20,
        "use_tqdm_on_load": False,
    }
    if on_cpu:
        arguments |= cpu_defaults(model)
    arguments |= given
    if not quantized(model, given):
        arguments["hf_overrides"] = float32_logits(given.get("hf_overrides"))
    if lora is not None:
        arguments |= lora_arguments(lora, on_cpu=on_cpu)
    return arguments | {
        "model": model,
        "logprobs_mode": "processed_logprobs",  # after temperature, as the trainer computes them
        "worker_extension_cls": WORKER_EXTENSION,
        "weight_transfer_config": {"backend": BACKEND},
        "disable_log_stats": True,  # switches its default loggers off; ours is passed separately
    }


def cpu_defaults(model: str) -> dict[str, Any]:
    """Return the default arguments for a machine without an accelerator."""
    return {
        "dtype": model_dtype(model),
        "enforce_eager": True,
        "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES,
        "gpu_memory_utilization": 0.1,
        "max_num_seqs": CPU_MAX_NUM_SEQS,
        # A seeded request whose prompt is split into chunks kills the CPU engine ("Generator does not use offset").
        "enable_chunked_prefill": False,
        "ir_op_priority": {name: [CPU_KERNELS, "native"] for name in ("rms_norm", "fused_add_rms_norm")},
    }


def float32_logits(given: object) -> object:
    """Return overrides of the model's configuration with which the output layer does not round logits, like the trainer's.

    A user's own `head_dtype` stays, and so does a function instead of a dictionary.
    """
    if given is None or isinstance(given, Mapping):
        return {"head_dtype": "float32"} | dict(given or {})
    return given


def quantized(model: str, given: Mapping[str, Any]) -> bool:
    """Return whether weights are quantized. Then vLLM refuses another precision for an output layer that is quantized, too."""
    return bool(given.get("quantization") or _saved_config(model).get("quantization_config"))


def model_dtype(model: str) -> str:
    """Return the dtype of the saved model, or "auto" for a hub id. vLLM's "auto" would turn float32 into bfloat16."""
    config = _saved_config(model)
    return str(config.get("dtype") or config.get("torch_dtype") or "auto")


def _saved_config(model: str) -> Mapping[str, Any]:
    path = Path(model) / "config.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def has_tokenizer(model: str) -> bool:
    """Return whether the model has a tokenizer; True for a hub id."""
    directory = Path(model)
    if not directory.is_dir():
        return True
    return any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def workers_of(given: Mapping[str, Any]) -> int:
    """Return the number of worker processes per engine."""
    return int(given.get("tensor_parallel_size") or 1) * int(given.get("pipeline_parallel_size") or 1)
