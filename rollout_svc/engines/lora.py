"""What an engine that serves LoRA adapters adds to `InferenceEngine`, and what an adapter must satisfy to be served exactly."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from rollout_svc.config import LoraConfig
from rollout_svc.engines.base import EngineError
from sluice.versions import Version
from weightsync.staged import ApplyReport, StagedAdapter

__all__ = ["AdapterInfo", "LoraEngine", "LoraLimits", "check_adapter", "lora_limits"]

PREFIX, A_END, B_END = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
"""How PEFT names the two factors of a module's adapter in its files."""

PLAIN = {
    "use_dora": False,
    "lora_bias": False,
    "fan_in_fan_out": False,
    "use_qalora": False,
    "bias": "none",
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layer_replication": None,
    "alora_invocation_tokens": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "use_bdlora": None,
}
"""Features of PEFT that would compute something else than ``x W + scale x A B``, with the value that switches them off."""

PLAIN_INITS = ("gaussian", "orthogonal", "eva")
"""Ways to begin that leave the base weights alone; with others (PiSSA, OLoRA, ...) the adapter belongs to changed ones."""


@dataclass(frozen=True, slots=True)
class LoraLimits:
    """How many adapters an engine holds at a time, and the highest rank of one."""

    max_loras: int
    max_rank: int


def lora_limits(config: LoraConfig, max_staleness: int) -> LoraLimits | None:
    """Return what an engine has to hold by the settings; None where adapters are off.

    Raises:
        ConfigError: if `max_loras` is too small for the run's bound on staleness.
    """
    return LoraLimits(config.places(max_staleness), config.max_rank) if config.enabled else None


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter that the engine holds.

    Attributes:
        version: Which policy it makes of its base.
        base: Version of the weights that it belongs to.
        names: What requests may call it; a version that serves the policy needs none.
        serves_policy: Whether requests without a name run on it.
        requests: Requests under way on it.
    """

    version: Version
    base: Version
    names: tuple[str, ...]
    serves_policy: bool
    requests: int


@runtime_checkable
class LoraEngine(Protocol):
    """An engine that serves LoRA adapters beside its weights, several at a time.

    The weights are not touched. A request stays on the adapter that it began on, and its tokens carry that one's version;
    when the adapter is taken away, it ends with `FinishReason.VERSION_RETIRED` and the tokens so far.
    """

    @property
    def lora_limits(self) -> LoraLimits | None:
        """What it holds; None where it was started without adapters."""
        ...

    async def apply_adapter(self, staged: StagedAdapter) -> ApplyReport:
        """Let new requests run on an adapter; older versions stay as long as they have requests and there is room.

        Raises:
            EngineError: if it does not fit the engine or its weights; what served before serves on.
        """
        ...

    async def load_named(self, name: str, staged: StagedAdapter) -> None:
        """Give an adapter a name for `GenerationRequest.adapter`. Idempotent; a name may move to another version.

        Raises:
            AdaptersFullError: if names hold as many as they may.
            EngineError: if it does not fit the engine or its weights.
        """
        ...

    async def unload_named(self, name: str) -> bool:
        """Take a name away and end its requests. False if there was no such name."""
        ...

    def adapters(self) -> Sequence[AdapterInfo]:
        """What it holds."""
        ...


def check_adapter(staged: StagedAdapter, shapes: Mapping[str, tuple[int, ...]], limits: LoraLimits | None) -> None:
    """Whether an adapter can be served, and means the same in every engine.

    Args:
        staged: The adapter.
        shapes: The base model's tensors by Hugging Face name.
        limits: What the engine was started with.

    Raises:
        EngineError: if not, with what to change.
    """
    if limits is None:
        raise EngineError(
            f"version {staged.version} is an adapter and the engine was started without: set rollout.lora.enabled = true"
        )
    config = json.loads((staged.path / "adapter_config.json").read_text())
    rank = _check_config(staged.version, config, limits)
    pairs = [name.removesuffix(A_END) for name in staged.tensors if name.endswith(A_END)]
    known = {name + end for name in pairs for end in (A_END, B_END)}
    if not pairs or known != staged.tensors.keys():
        strange = sorted(known ^ staged.tensors.keys())[:3]
        raise EngineError(f"adapter {staged.version} must hold pairs of lora_A and lora_B weights, not {strange}")
    for name in pairs:
        _check_pair(staged, name, shapes, rank)


def _check_config(version: Version, config: Mapping[str, Any], limits: LoraLimits) -> int:
    if config.get("peft_type") != "LORA":
        raise EngineError(f"adapter {version} is of type {config.get('peft_type')!r}; only LORA is served")
    used = sorted(name for name, off in PLAIN.items() if (config.get(name) or off) != off)
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init not in PLAIN_INITS:
        used.append(f"init_lora_weights = {init}")
    if used:
        raise EngineError(f"adapter {version} uses {', '.join(used)}, which not every engine computes; train without")
    rank = config.get("r")
    if not isinstance(rank, int) or not 0 < rank <= limits.max_rank:
        raise EngineError(f"adapter {version} has rank {rank}; raise rollout.lora.max_rank, now {limits.max_rank}")
    if not isinstance(config.get("lora_alpha"), int | float):
        raise EngineError(f"adapter {version} has no lora_alpha in its adapter_config.json")
    return rank


def _check_pair(staged: StagedAdapter, name: str, shapes: Mapping[str, tuple[int, ...]], rank: int) -> None:
    weight = f"{name.removeprefix(PREFIX)}.weight"
    shape = shapes.get(weight)
    if not name.startswith(PREFIX) or shape is None or ".layers." not in weight:
        raise EngineError(f"adapter {staged.version} changes {weight}: only linear layers of the base model's blocks")
    found = (staged.tensors[name + A_END].shape, staged.tensors[name + B_END].shape)
    if len(shape) != 2 or found != ((rank, shape[1]), (shape[0], rank)):
        raise EngineError(f"adapter {staged.version}: {weight} is {list(shape)}, its factors are {found}, rank {rank}")
