"""The protocol that every inference engine implements, and the data that it takes and returns.

Nothing here depends on gRPC: an engine can be used in process as a library.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, Protocol

from rollout_svc.config import RolloutConfig
from sluice.config import CommonConfig
from sluice.versions import Version, VersionSpan
from weightsync.staged import ApplyReport, HeldVersions, StagedVersion


class FinishReason(Enum):
    """Why a sample ended, with the names of the contract."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    VERSION_RETIRED = "version_retired"


class PauseMode(Enum):
    """What happens to requests in progress when an engine is paused."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


class Stage(Enum):
    """Stage of a request, with the names of the contract."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SWITCHING = "switching"


class EngineError(Exception):
    """The engine failed. Requests in progress are lost, and the service restarts the engine."""


class EngineSettingsError(EngineError):
    """The engine can never serve this model with these settings. The message says what to change."""


class UnfitVersionError(EngineError):
    """A version or an adapter can never fit the model or the settings. The engine keeps serving its present version."""


class EngineTimeoutError(EngineError):
    """An operation of the engine did not end by its deadline."""


class EngineBusyError(Exception):
    """The engine's queue is full, and the request was not queued. Retry later."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. ``None`` and the defaults mean off.

    Sample i of a request uses ``seed + i``. ``max_tokens=None`` means up to the context length.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    top_logprobs: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    logit_bias: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt, and how many samples to generate for it.

    ``adapter`` is a name given by `LoraEngine.load_named`. If it is empty, the policy samples: the weights, with their newest
    adapter version if there is one.

    If the samples continue earlier tokens, these are ``continued``, and the prompt ends with them. A stop string may begin in them, but not end.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: Sampling
    n: int = 1
    priority: int = 0
    prompt_logprobs: bool = False
    adapter: str = ""
    continued: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Sample:
    """One whole sample, or in a stream the next tokens of a sample.

    ``logprobs`` has one entry per token. ``spans`` cover exactly these tokens, with starts counted from the sample's first
    token; ``offset`` is the position of the first of these tokens. The last part of a sample in a stream has the
    ``finish_reason``, and may have no tokens; earlier parts have no ``finish_reason``.
    """

    index: int
    token_ids: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    finish_reason: FinishReason | None = None
    stop_string: str = ""
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Pace:
    """When a stream gives its new tokens: after `seconds`, or as soon as a sample has `tokens` of them."""

    seconds: float = 0.02
    tokens: int = 64


DEFAULT_PACE = Pace()
"""For a reader that shows the text while it is sampled."""


@dataclass(slots=True)
class Progress:
    """The new tokens of a request, at most one part per sample. A message without parts says that the request is alive.

    ``steps`` counts the engine's steps since it started.
    """

    parts: list[Sample]
    stage: Stage
    steps: int


@dataclass(slots=True)
class GenerationResult:
    """All samples of a request, in the order of their index."""

    request_id: str
    samples: list[Sample]
    prompt_logprobs: list[float] = field(default_factory=list)
    cached_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A description of the served model."""

    model: str
    architecture: str
    vocabulary_size: int
    max_model_len: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    engine: str


@dataclass(frozen=True, slots=True)
class UncheckedWeights:
    """Weights that an engine cannot compare with their file.

    Attributes:
        layers: Kind of layer that holds them, such as ``RoutedExperts (Fp8MoEMethod)``.
        tensors: Number of tensors in the file that belong to such layers.
        example: Name of one of these tensors.
    """

    layers: str
    tensors: int
    example: str


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Version and load of an engine.

    ``version`` samples the requests that name no adapter. Counters count from the start; ``kv_cache_usage`` is a fraction
    from 0 to 1. ``healthy`` says whether the engine can sample. ``steps`` does not grow when it hangs. ``preemptions`` are samples
    that lost their place in the KV cache and were computed again. ``switching`` says that it samples nothing until other weights are
    loaded. ``unchecked`` are the weights that the last `verify_weights` could not compare, one entry for each kind of layer.
    """

    version: Version
    running: int
    queued: int
    kv_cache_usage: float
    generated_tokens: int
    prompt_tokens: int
    max_running: int
    paused: bool
    healthy: bool
    steps: int = 0
    preemptions: int = 0
    switching: bool = False
    unchecked: tuple[UncheckedWeights, ...] = ()


class InferenceEngine(Protocol):
    """Samples tokens, and changes its weights between steps.

    Log-probabilities are those of the sampled tokens after temperature. The service checks the token ids of prompts before it
    passes them on.
    """

    info: ModelInfo

    async def start(self) -> None:
        """Load the model.

        Raises:
            EngineError: if that fails; the message says what to do.
        """

    async def restart(self) -> Version:
        """Start the engine again on the last applied version if its staged file still exists, else on the base model.

        Returns:
            The version that serves now.

        Raises:
            EngineError: if it cannot start.
        """

    async def stop(self) -> None:
        """End every request and free everything. Idempotent."""

    async def sample(self, request: GenerationRequest) -> GenerationResult:
        """Sample, and return when all samples have ended. Cancelling aborts them.

        Raises:
            ValueError: if this engine does not support the parameters.
            EngineBusyError: if too many samples wait.
            EngineError: if the engine failed.
        """

    def stream(self, request: GenerationRequest, pace: Pace = DEFAULT_PACE) -> AsyncGenerator[Progress, None]:
        """Sample, and yield the new tokens of all samples together as they are sampled. Closing the iterator aborts.

        Raises what `sample` raises.
        """

    async def abort(self, request_id: str) -> bool:
        """End a request with finish reason ABORT and its tokens so far. Return False if it is not in progress."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling. New requests are queued.

        Raises:
            EngineError: if requests in progress did not end in time (mode WAIT); sampling continues.
        """

    async def resume(self) -> None:
        """Resume sampling. Idempotent."""

    async def apply(self, staged: StagedVersion) -> ApplyReport:
        """Switch to a staged version: pause, copy, resume. Requests in progress continue.

        Raises:
            EngineError: if the version could not be applied. The old version keeps serving, unless `status` says that the
                engine is not healthy: then call `restart`. It never samples from a partly loaded version.
        """

    async def reload_base(self) -> ApplyReport:
        """Return to the base model on disk, as version (0, 0). Raises what `apply` raises."""

    async def verify_weights(self, staged: StagedVersion | None, fraction: float = 1.0) -> list[str]:
        """Compare the live weights bit for bit with a version's files, between steps.

        Args:
            staged: The version; None for the base model.
            fraction: Fraction of the tensors to compare, above 0; 1 for all. Which ones depends on the version.

        Returns:
            The tensors that differ; the next `apply` of the version loads it again. Tensors that it cannot compare are left out:
            `status` names them.

        Raises:
            EngineError: if the comparison fails.
        """

    def held(self) -> HeldVersions | None:
        """Return the versions that the engine holds; None if it cannot sample. This is cheap."""

    def status(self) -> EngineStatus:
        """Return version and load. This is cheap."""


@dataclass(frozen=True, slots=True)
class ServedTemplate:
    """The chat template that a replica serves.

    Attributes:
        text: The template; None: the model's own.
        arguments: Its arguments, for requests that do not set them.
    """

    text: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


OWN_TEMPLATE = ServedTemplate()
"""The model's own template, without arguments."""


class EnginePackage(Protocol):
    """Functions that the package of an engine has; `sluice.engines` lists the packages."""

    def build(self, run: CommonConfig, config: RolloutConfig) -> InferenceEngine:
        """Build the engine for the settings, without starting it.

        Raises:
            ConfigError: if it could not hold the adapters that the run's bound on staleness asks for, or the run's template cannot be read.
        """

    def check(self, run: CommonConfig, config: RolloutConfig) -> None:
        """Refuse settings with which the engine would fail at start. Loads neither the model nor the engine's library.

        Raises:
            ConfigError: with the setting to change.
        """
