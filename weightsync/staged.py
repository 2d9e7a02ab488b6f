"""The contract between the receiver, which stages versions, and the engine, which applies them and says what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sluice.versions import Version


class ApplyError(Exception):
    """The engine did not apply the version. `Engine.held` says what it holds now."""


class VersionRefusedError(ApplyError):
    """The version does not fit the engine: its names, shapes or settings differ from the model's. Retrying does not help."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Data type (as safetensors names it, such as ``F32``) and shape of one tensor."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """A whole, verified version in one safetensors file, ready to be applied.

    Attributes:
        path: Safetensors file under Hugging Face names, in shared memory. Not changed or removed before its successor serves.
        tensors: Every tensor of the file by name.
        digest: xxh3-128 of the version as its manifest gives it.
    """

    version: Version
    path: Path
    tensors: Mapping[str, TensorSpec]
    digest: str


@dataclass(frozen=True, slots=True)
class StagedAdapter:
    """A whole, verified LoRA adapter in a directory as PEFT writes it, ready to be loaded.

    Attributes:
        version: The version of the policy that base and adapter make together.
        base: Version of the weights that it belongs to.
        path: Directory in shared memory with ``adapter_model.safetensors`` and ``adapter_config.json``. Not changed, and
            not removed while the engine holds the adapter.
        tensors: Every tensor of the file by name.
        digest: xxh3-128 of the version as its manifest gives it.
    """

    version: Version
    base: Version
    path: Path
    tensors: Mapping[str, TensorSpec]
    digest: str


@dataclass(frozen=True, slots=True)
class ApplyReport:
    """The version that serves now, the seconds in which no token was sampled, and the seconds of the copy alone."""

    version: Version
    pause_s: float
    apply_s: float


@dataclass(frozen=True, slots=True)
class HeldVersions:
    """What an engine holds.

    Attributes:
        serving: Version that requests without an adapter's name are sampled from.
        weights: Version of the weights. It differs from `serving` if an adapter serves.
        adapters: Versions of all adapters that the engine holds; their directories must stay.
    """

    serving: Version
    weights: Version
    adapters: frozenset[Version] = frozenset()


class Engine(Protocol):
    """An engine as its receiver sees it. It alone knows what it serves, and recovers from a failed apply by itself."""

    @property
    def serves_adapters(self) -> bool:
        """Whether it serves LoRA adapters."""
        ...

    def held(self) -> HeldVersions | None:
        """Return what the engine holds; None while it restarts and cannot say."""
        ...

    async def apply(self, staged: StagedVersion) -> ApplyReport:
        """Switch to a staged version: pause, copy, resume.

        Raises:
            VersionRefusedError: if it does not fit the model.
            ApplyError: if the version does not serve. Nothing is sampled from half a version.
        """
        ...

    async def apply_adapter(self, staged: StagedAdapter) -> ApplyReport:
        """Let new requests run on an adapter beside the weights, which are not touched.

        Raises:
            VersionRefusedError: if it does not fit the model or the settings.
            ApplyError: if it does not serve.
        """
        ...
