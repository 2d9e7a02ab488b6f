"""Settings of a rollout replica. Imports neither torch nor vLLM, so that `--help` is fast."""

from __future__ import annotations

import importlib
import importlib.util
import math
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator

from sluice.chat_template import check_chat_template
from sluice.config import CommonConfig, ConfigError, Section, ServerConfig
from sluice.config.allocation import Allocation
from sluice.config.footprint import GIB, STEP, USABLE, Footprint
from sluice.config.schema import check_repeatable, not_repeatable
from sluice.config.tables import RolloutTable, ServedAdaptersTable
from sluice.decoder import decoder_of
from sluice.engines import ENGINES, EngineName
from sluice.models import check_model, sizes_on_disk

PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
"""Arguments of vLLM whose product is the number of processes of an engine."""

WORK_BYTES = 2 * GIB
"""Assumed memory of vLLM on a GPU besides weights and cache: activations of its largest batch, logits, CUDA graphs."""

_BYTES = {"float32": 4, "float": 4}
"""Bytes of a weight by precision; 2 for all other precisions."""

PARSER_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"


class LimitsConfig(Section):
    """How many requests and responses a replica holds."""

    max_running: int | None = Field(
        None,
        ge=1,
        description="Maximum number of samples in one engine step. Unset: the default of the engine (vLLM: max_num_seqs).",
    )
    max_queued: int = Field(
        4096,
        ge=1,
        description="Maximum number of samples that are queued or running; further requests get RESOURCE_EXHAUSTED.",
    )


class RolloutDeadlines(Section):
    """Seconds after which an operation of a replica counts as failed."""

    start_s: float = Field(600.0, gt=0, description="Seconds to load the model.")
    apply_s: float = Field(
        120.0,
        gt=0,
        description="Seconds for each of the three steps of a weight update: prepare; pause and load; go back if that fails. Also for any other command to the engine.",
    )
    pause_s: float = Field(
        600.0,
        gt=0,
        description="Seconds that a pause in mode WAIT waits for requests to end; its time to live may be shorter.",
    )
    pull_s: float = Field(600.0, gt=0, description="Seconds to fetch and stage one version.")
    request_s: float = Field(
        3600.0,
        gt=0,
        description="Seconds for a request that names no deadline itself, as all requests over HTTP; then it ends with DEADLINE_EXCEEDED or 504.",
    )


@dataclass(frozen=True, slots=True)
class LoraLimits:
    """How many adapters an engine holds at a time, and their maximum rank."""

    max_loras: int
    max_rank: int


class LoraConfig(ServedAdaptersTable):
    """LoRA adapters."""

    enabled: bool = Field(
        False,
        description="Serve LoRA adapters. A version that is an adapter is loaded without a change of the weights.",
    )
    max_rank: int = Field(16, ge=1, description="Maximum rank of an adapter; memory is allocated for it at the start.")
    max_loras: int | None = Field(
        None,
        ge=2,
        description="Maximum number of loaded adapters, versions of the policy and named ones together. Unset: max_staleness + 2, the minimum,"
        " which leaves room for max_staleness names.",
    )

    def limits(self, max_staleness: int) -> LoraLimits | None:
        """Return how many adapters the engine must hold; None if adapters are off.

        Tokens may be `max_staleness` versions behind, and the newest version is loaded before the oldest is unloaded.

        Raises:
            ConfigError: if `max_loras` is too small for that.
        """
        if not self.enabled:
            return None
        least = max_staleness + 2
        if self.max_loras is not None and self.max_loras < least:
            raise ConfigError(
                f"rollout.lora.max_loras is {self.max_loras}, but max_staleness = {max_staleness} needs {least}: raise it, or"
                " leave it out"
            )
        return LoraLimits(self.max_loras or least, self.max_rank)


class RolloutConfig(RolloutTable):
    """The table `[rollout]`."""

    engine: EngineName = Field("vllm", description="The engine: vllm, or plain transformers without vLLM.")
    engine_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of vLLM's engine by their names in vLLM, such as tensor_parallel_size or quantization.",
    )
    backend: str | None = Field(
        None,
        description="The rollout part of `allocation_mode`, such as `vllm:d2t1`: engine, number of replicas, devices of each. Unset: by the other settings.",
    )
    replica: str = Field(
        default_factory=socket.gethostname,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$",
        description="Name of this replica, unique within the run: letters, digits, '.', '_' and '-', at most 63 characters, a letter or digit first.",
    )
    follow_weights: bool = Field(
        True,
        description="Follow the versions of the weight service. false: serve the base model; no weight service is needed.",
    )
    use_relays: bool = Field(
        True,
        description="Fetch versions from the nearest relay of `peers.weightsync` if there is one. false: always from that service itself.",
    )
    announce: bool = Field(
        False,
        description="Announce this replica to the orchestrator at `peers.orchestrator`, which then uses it until it leaves. false: the orchestrator finds it by `peers.rollout`.",
    )
    advertise: str | None = Field(
        None,
        min_length=1,
        description="Address at which the orchestrator reaches this replica, if it announces itself. Unset: the bound address, with the host name if it listens on all interfaces.",
    )
    kv_policy: Literal["keep", "recompute"] = Field(
        "keep",
        description="What an update does with the KV cache of requests in progress: keep what the old weights computed (cheap), or recompute it.",
    )
    patch_on_device: bool = Field(
        False,
        description="On an accelerator, write only the values of vLLM's weights that changed. Tested on a CPU only so far.",
    )
    stage_dir: Path = Field(
        Path("/dev/shm"),  # noqa: S108 - the engine's processes read a staged version from shared memory
        description="Directory in memory for staged versions, shared by the replicas of a host; needs room for two versions.",
    )
    local_files: bool = Field(
        True,
        description="Read versions from the files of a weight service on the same host. false: always over the network.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Device of the transformers engine. auto: CUDA if there is a device, else the CPU."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Precision of the weights in the engine. auto: what the trainer computes in, so that both sides use the same weights; with `follow_weights = false` the model's own.",
    )
    tool_parser: str = Field(
        "auto",
        pattern=PARSER_NAME,
        description="What reads tool calls: json (`<tool_call>{...}</tool_call>`), none, or the name of a parser of vLLM. auto: the first that reads a call back as the chat template writes it.",
    )
    reasoning_parser: str = Field(
        "auto",
        pattern=PARSER_NAME,
        description="What reads reasoning: think (`<think>...</think>`), none, or the name of a parser of vLLM. auto: think, if the chat template mentions it.",
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="Maximum number of tokens of prompt and response together. Unset: the limit of the model, or less where the commands that start a run find that no longer sample fits in the memory of the GPUs.",
    )
    kv_cache_bytes: int | None = Field(
        None,
        ge=1,
        description="Bytes for keys and values. Unset: the default of the engine (on a CPU: 256 MiB with vLLM, 1 GiB with transformers).",
    )
    threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="CPU threads of the engine. Unset: OMP_NUM_THREADS or the default of the engine.",
    )
    lora: LoraConfig = Field(default_factory=LoraConfig, description="LoRA adapters.")
    limits: LimitsConfig = Field(
        default_factory=LimitsConfig, description="How many requests and responses the replica holds."
    )
    deadlines: RolloutDeadlines = Field(default_factory=RolloutDeadlines, description="How long the replica waits.")
    engine_restarts: int = Field(
        5, ge=0, description="Maximum number of restarts in a row of an engine that died; then the replica ends."
    )
    server: ServerConfig = Field(
        default_factory=lambda: ServerConfig(port=7103, http_port=7113), description="Where the replica listens."
    )

    @field_validator("backend")
    @classmethod
    def _is_a_rollout(cls, text: str | None) -> str | None:
        if text is not None:
            Allocation.parse_roles({"rollout": text})
        return text

    @field_validator("engine_args")
    @classmethod
    def _has_sizes(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name in PARALLEL_SIZES:
            size = given.get(name, 1)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} is {size!r}: give a whole number of at least 1")
        share = given.get("gpu_memory_utilization", 1.0)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization is {share!r}: give a number above 0, and at most 1")
        return given

    def processes(self) -> int:
        """Return the number of processes of the engine: one for each device of a replica."""
        several = ENGINES[self.engine].several_devices
        return math.prod(self.engine_args.get(name, 1) for name in PARALLEL_SIZES) if several else 1

    def repeatable(self) -> Self:
        """Return a copy with the values that a deterministic run needs; see `Section.repeatable`."""
        fixed = ENGINES[self.engine].repeatable
        for name, value in fixed.items():
            if self.engine_args.get(name, value) != value:
                raise not_repeatable(f"rollout.engine_args.{name}", self.engine_args[name], value)
        check_repeatable(self, "rollout.threads", 1)
        return self.model_copy(update={"engine_args": {**self.engine_args, **fixed}, "threads": 1})

    def uses_devices(self) -> bool:
        """Return whether the engine computes on GPUs if there are any."""
        return not ENGINES[self.engine].reads_device or self.device != "cpu"

    def footprint(self, run: CommonConfig, *, cuda: bool) -> Footprint | None:
        """Estimate the memory of the weights, of the keys and values of one sample of the maximum length, and of everything else in vLLM.

        None for a hub id, quantized weights, or a model without an estimate.
        """
        held = self._weights_and_token(run)
        if held is None:
            return None
        (weights, token), found, beside = held, sizes_on_disk(run.model), self._beside(cuda=cuda)
        longest = self.engine_args.get("max_model_len", self.max_model_len) or (found and found.positions) or 0
        return Footprint(
            what="a replica",
            device=int(weights + token * longest + beside),
            parts=f"weights {weights / GIB:.1f}, keys and values of one sample {token * longest / GIB:.1f}"
            + (f", work {beside / GIB:.1f}" if beside else ""),
            host=int(2 * weights * self._shards),  # the served version and the next one, in shared memory
            remedy="divide it over more devices (`t` of an allocation, rollout.engine_args.tensor_parallel_size), lower"
            " rollout.max_model_len, or use a smaller model",
            share=self._share if cuda else 1.0,
        )

    def longest_sample(self, run: CommonConfig, *, cuda: bool, memory: int | None) -> int | None:
        """Return the maximum number of tokens of one sample that fit beside the weights, for vLLM on a GPU; see `Section.longest_sample`.

        vLLM does not start if a sample of the maximum length does not fit.
        """
        tokens, sizes = self.cache_tokens(run, cuda=cuda, memory=memory), sizes_on_disk(run.model)
        if tokens is None or sizes is None or not sizes.positions or tokens >= sizes.positions:
            return None
        return tokens // STEP * STEP

    def cache_tokens(self, run: CommonConfig, *, cuda: bool, memory: int | None) -> int | None:
        """Return the number of tokens whose keys and values fit beside the weights, for vLLM on a GPU; None if unknown."""
        held = self._weights_and_token(run)
        if not cuda or self.engine != "vllm" or memory is None or held is None:
            return None
        weights, token = held
        room = memory * self._share - self._beside(cuda=cuda) - weights
        return max(0, int(min(room, self.kv_cache_bytes or room) / token))

    def _beside(self, *, cuda: bool) -> int:
        """Return the bytes of a GPU that the engine takes besides weights and cache."""
        return WORK_BYTES if cuda and self.engine == "vllm" else 0

    @property
    def _shards(self) -> int:
        """Number of devices that share the weights of a replica."""
        return math.prod(self.engine_args.get(name, 1) for name in PARALLEL_SIZES[:2])

    @property
    def _share(self) -> float:
        """Share of a GPU's memory that the engine may use."""
        return self.engine_args.get("gpu_memory_utilization", USABLE) if self.engine == "vllm" else 1.0

    def _weights_and_token(self, run: CommonConfig) -> tuple[float, float] | None:
        """Return the bytes on each device of the weights, and of the keys and values of one token; None in the same cases as `footprint`."""
        sizes, arguments = decoder_of(run.model), self.engine_args
        if sizes is None or arguments.get("quantization"):
            return None
        width = _BYTES.get(arguments.get("dtype", self.dtype), 2)
        return width * sizes.parameters / self._shards, width * 2 * sizes.layers * sizes.keys / self._shards

    def check_start(self, run: CommonConfig) -> None:
        """Refuse settings with which the replica would fail at start; see `Section.check_start`."""
        check_model(run.model)
        check_chat_template(run.model, run.chat_template, run.chat_template_kwargs)
        engine = ENGINES[self.engine]
        if importlib.util.find_spec(engine.library) is None:
            others = " or ".join(sorted(ENGINES.keys() - {self.engine}))
            raise ConfigError(
                f"rollout.engine is {self.engine}, but {engine.library} is not installed here: install it, or set rollout.engine to"
                f" {others}"
            )
        importlib.import_module(engine.package).check(run, self)


CONFIG = RolloutConfig
