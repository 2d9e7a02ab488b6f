"""The methods that an engine with LoRA adapters adds to `InferenceEngine`, and the check whether an adapter can be served exactly."""

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
"""Names that PEFT gives the two factors of an adapter in its files."""

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
"""Features of PEFT that compute something other than ``x W + scale x A B``, with the value that switches each off."""

PLAIN_INITS = ("gaussian", "orthogonal", "eva")
"""Initialisations that leave the base weights unchanged. Others (PiSSA, OLoRA, ...) change them."""


@dataclass(frozen=True, slots=True)
class LoraLimits:
    """How many adapters an engine holds at a time, and their maximum rank."""

    max_loras: int
    max_rank: int


def lora_limits(config: LoraConfig, max_staleness: int) -> LoraLimits | None:
    """Return the limits by the settings; None if adapters are off.

    Raises:
        ConfigError: if `max_loras` is too small for the run's bound on staleness.
    """
    return LoraLimits(config.places(max_staleness), config.max_rank) if config.enabled else None


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """Description of a loaded adapter.

    Attributes:
        version: The policy version that it is.
        base: Version of the weights that it belongs to.
        names: Its names for requests. A version that serves the policy needs none.
        serves_policy: Whether requests that name no adapter use it.
        requests: Number of requests in progress that use it.
    """

    version: Version
    base: Version
    names: tuple[str, ...]
    serves_policy: bool
    requests: int


@runtime_checkable
class LoraEngine(Protocol):
    """An engine that serves LoRA adapters beside its weights, several at a time.

    The weights do not change. A request stays on the adapter that it began on, and its tokens carry the version of that adapter.
    When the adapter is unloaded, the request ends with `FinishReason.VERSION_RETIRED` and its tokens so far.
    """

    @property
    def lora_limits(self) -> LoraLimits | None:
        """Return the limits; None if the engine was started without adapters."""
        ...

    async def apply_adapter(self, staged: StagedAdapter) -> ApplyReport:
        """Use an adapter for new requests. Older versions stay loaded while they have requests and there is room.

        Raises:
            EngineError: if it does not fit the engine or its weights; the version before keeps serving.
        """
        ...

    async def load_named(self, name: str, staged: StagedAdapter) -> None:
        """Give an adapter a name for `GenerationRequest.adapter`. A name may move to another version. Idempotent.

        Raises:
            AdaptersFullError: if no more adapters can have names.
            EngineError: if it does not fit the engine or its weights.
        """
        ...

    async def unload_named(self, name: str) -> bool:
        """Remove a name and end its requests. Return False if there was no such name."""
        ...

    def adapters(self) -> Sequence[AdapterInfo]:
        """Return the loaded adapters."""
        ...


def check_adapter(staged: StagedAdapter, shapes: Mapping[str, tuple[int, ...]], limits: LoraLimits | None) -> None:
    """Check that an adapter can be served, with the same result in every engine.

    Args:
        staged: The adapter.
        shapes: The base model's tensors by Hugging Face name.
        limits: The limits of the engine.

    Raises:
        EngineError: if it cannot, with what to change.
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
