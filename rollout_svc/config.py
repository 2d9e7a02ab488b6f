"""Settings of a rollout replica. Imports neither torch nor vllm, so that `--help` is quick."""

from __future__ import annotations

import importlib
import importlib.util
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from sluice.allocation import Allocation
from sluice.config import CommonConfig, ConfigError, Section, ServerConfig
from sluice.models import check_model

__all__ = ["CONFIG", "LimitsConfig", "LoraConfig", "RolloutConfig", "RolloutDeadlines"]


PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
"""Arguments of vLLM whose product is the number of an engine's processes."""


ENGINES: Mapping[str, str] = {
    "vllm": "rollout_svc.engines.vllm",
    "transformers": "rollout_svc.engines.slots",
}
"""The package of each engine, a `rollout_svc.engines.EnginePackage`. A new engine is a package, a line here and a name in `RolloutConfig.engine`."""


class LimitsConfig(Section):
    """How much a replica takes on."""

    max_running: int | None = Field(
        None, ge=1, description="Most samples generated at a time; none leaves it to the engine (vLLM: max_num_seqs)."
    )
    max_queued: int = Field(
        4096, ge=1, description="Most samples waiting or generated at a time; further requests get RESOURCE_EXHAUSTED."
    )
    max_answers: int = Field(
        4096, ge=1, description="Most answers kept for repeats of their request_id; the oldest go first."
    )
    max_answer_bytes: int = Field(
        256 << 20, ge=1, description="Bytes of the answers kept for repeats; the oldest go first."
    )
    answer_ttl_s: float = Field(300.0, gt=0, description="Seconds that an answer is kept for a repeat.")


class RolloutDeadlines(Section):
    """How long a replica waits before it calls something failed."""

    start_s: float = Field(600.0, gt=0, description="Seconds to load the model.")
    apply_s: float = Field(120.0, gt=0, description="Seconds for each step of a weight update.")
    pause_s: float = Field(600.0, gt=0, description="Seconds that a pause with WAIT waits for requests to end.")
    pull_s: float = Field(600.0, gt=0, description="Seconds to fetch and stage one version.")


class LoraConfig(Section):
    """LoRA adapters beside the weights."""

    enabled: bool = Field(
        False, description="Serve adapters: versions that are adapters load without touching the weights."
    )
    max_rank: int = Field(16, ge=1, description="Highest rank of an adapter; memory is laid out for it at the start.")
    max_loras: int | None = Field(
        None,
        ge=2,
        description="Most adapters held at a time, versions of the policy and named ones together; none takes max_staleness + 2,"
        " the least, which leaves no place to more than max_staleness names.",
    )

    def places(self, max_staleness: int) -> int:
        """How many adapters the engine has to hold: tokens may be as many versions behind, and the newest is loaded before the oldest goes.

        Raises:
            ConfigError: if `max_loras` is less.
        """
        least = max_staleness + 2
        if self.max_loras is not None and self.max_loras < least:
            raise ConfigError(
                f"rollout.lora.max_loras is {self.max_loras}, but max_staleness = {max_staleness} needs {least}: raise it, or"
                " leave it out"
            )
        return self.max_loras or least


class RolloutConfig(Section):
    """The table `[rollout]`."""

    engine: Literal["vllm", "transformers"] = Field(
        "vllm", description="What samples: vllm, or plain transformers where vLLM is not installed."
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of vLLM's engine as it names them, such as tensor_parallel_size or quantization.",
    )
    backend: str | None = Field(
        None,
        description="This side of `allocation_mode` alone, such as `vllm:d2t1`: engine, replicas and devices of each; none: their own settings.",
    )
    replica: str = Field(
        default_factory=socket.gethostname,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$",
        description="Name of this replica, unique within the run.",
    )
    follow_weights: bool = Field(
        True, description="Follow the versions of weight sync; false serves the base model and needs no weight sync."
    )
    use_relays: bool = Field(
        True,
        description="Take versions from the nearest relay of `peers.weightsync`, where there are any; false: from it alone.",
    )
    kv_policy: Literal["keep", "recompute"] = Field(
        "keep",
        description="Keys and values of requests under way at an update: keep those of the old weights (cheap), or recompute.",
    )
    patch_on_device: bool = Field(
        False,
        description="On an accelerator, bring only the values that changed into vLLM's weights. Tested on the CPU alone so far.",
    )
    stage_dir: Path = Field(
        Path("/dev/shm"),  # noqa: S108 - shared memory is where the engine's processes find a staged version
        description="Directory in memory where versions are staged, once per host; needs room for two.",
    )
    local_files: bool = Field(
        True, description="Read versions from weight sync's files where this host has them; false: always by sockets."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the transformers engine computes; auto takes CUDA where there is one."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Precision of the weights in the engine. auto: what the trainer computes in, so that both sides use the same weights; with `follow_weights = false` the model's own.",
    )
    max_model_len: int | None = Field(
        None, ge=2, description="Most tokens of prompt and continuation together; none takes the model's own."
    )
    kv_cache_bytes: int | None = Field(
        None,
        ge=1,
        description="Bytes for keys and values; none leaves it to the engine (on CPU: 256 MiB vLLM, 1 GiB else).",
    )
    threads: int | None = Field(
        None, ge=1, le=1024, description="CPU threads of the engine; none leaves it to OMP_NUM_THREADS and the engine."
    )
    lora: LoraConfig = Field(default_factory=LoraConfig, description="LoRA adapters beside the weights.")
    limits: LimitsConfig = Field(default_factory=LimitsConfig, description="How much the replica takes on.")
    deadlines: RolloutDeadlines = Field(default_factory=RolloutDeadlines, description="How long it waits.")
    engine_restarts: int = Field(
        5, ge=0, description="Times in a row that a dead engine is started again before the replica gives up."
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
    def _has_whole_sizes(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name in PARALLEL_SIZES:
            size = given.get(name, 1)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} is {size!r}: give a whole number of at least 1")
        return given

    def check_start(self, run: CommonConfig) -> None:
        """Refuse settings that the replica would fail on while it starts; see `Section.check_start`."""
        check_model(run.model)
        if importlib.util.find_spec(self.engine) is None:
            others = " or ".join(sorted(ENGINES.keys() - {self.engine}))
            raise ConfigError(
                f"rollout.engine is {self.engine}, which is not installed here: install it, or set rollout.engine to {others}"
            )
        importlib.import_module(ENGINES[self.engine]).check(run, self)


CONFIG = RolloutConfig
