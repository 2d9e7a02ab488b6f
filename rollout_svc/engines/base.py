"""The protocol that every inference engine implements, and the plain data that crosses it.

Nothing here knows gRPC: an engine can be used in process as a library.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from sluice.versions import Version, VersionSpan
from weightsync.staged import ApplyReport, StagedVersion

__all__ = [
    "EngineBusyError",
    "EngineError",
    "EngineStatus",
    "FinishReason",
    "GenerationChunk",
    "GenerationRequest",
    "GenerationResult",
    "InferenceEngine",
    "ModelInfo",
    "PauseMode",
    "Sample",
    "Sampling",
]


class FinishReason(Enum):
    """Why a sample ended; the names are those of the contract."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    VERSION_RETIRED = "version_retired"


class PauseMode(Enum):
    """What happens to requests under way while an engine is paused."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


class EngineError(Exception):
    """The engine failed; requests under way are lost, the service restarts it."""


class EngineBusyError(Exception):
    """The engine's queue is full; nothing was taken on, try again later."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample; ``None`` and the defaults mean off.

    ``seed`` is that of sample 0; sample i uses ``seed + i``. ``max_tokens=None`` means up to the context length.
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
    """One prompt and how many samples of it are wanted.

    ``adapter`` names one of `LoraEngine.load_named`; empty means the policy: the weights, with their newest adapter version if
    they have one.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: Sampling
    n: int = 1
    priority: int = 0
    prompt_logprobs: bool = False
    adapter: str = ""


@dataclass(slots=True)
class GenerationChunk:
    """Tokens of one sample that follow those already given.

    ``spans`` cover exactly the tokens of this chunk, with starts counted from the sample's first token;
    ``finish_reason`` is set on the last chunk of the sample, which may be empty of tokens.
    """

    index: int
    offset: int
    token_ids: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    finish_reason: FinishReason | None = None
    stop_string: str = ""
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)


@dataclass(slots=True)
class Sample:
    """One whole sample. Lengths of ``token_ids`` and ``logprobs`` are equal; ``spans`` cover them."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    finish_reason: FinishReason
    stop_string: str = ""
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)


@dataclass(slots=True)
class GenerationResult:
    """All samples of a request, by index."""

    request_id: str
    samples: list[Sample]
    prompt_logprobs: list[float] = field(default_factory=list)
    cached_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine serves."""

    model: str
    architecture: str
    vocabulary_size: int
    max_model_len: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    engine: str


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What an engine serves, and its load.

    ``version`` is what requests without an adapter's name are sampled from, ``weights`` the version of the weights, which is
    another one where an adapter serves. Counters run since the start; ``kv_cache_usage`` is a share from 0 to 1.
    """

    version: Version
    weights: Version
    running: int
    queued: int
    kv_cache_usage: float
    generated_tokens: int
    prompt_tokens: int
    max_running: int
    paused: bool
    healthy: bool


class InferenceEngine(Protocol):
    """Samples tokens and swaps its weights while it does.

    Log-probabilities are those of the sampled tokens after temperature. Token ids of prompts are valid when they
    arrive here: the service checks them.
    """

    info: ModelInfo

    async def start(self) -> None:
        """Load the model. Raises EngineError with the remedy if it cannot."""
        ...

    async def stop(self) -> None:
        """End every request and free everything. Idempotent."""
        ...

    async def agenerate(self, request: GenerationRequest) -> GenerationResult:
        """Sample and answer when all samples have ended. Cancelling aborts them."""
        ...

    def stream(self, request: GenerationRequest, *, coalesce_s: float = 0.02) -> AsyncGenerator[GenerationChunk, None]:
        """Sample and give chunks as they come; chunks of different samples interleave. Closing the iterator aborts."""
        ...

    async def abort(self, request_id: str) -> bool:
        """End a request with finish reason ABORT and its tokens so far. False if it is not under way."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling; new requests queue."""
        ...

    async def resume(self) -> None:
        """Sample again. Idempotent."""
        ...

    async def apply(self, staged: StagedVersion) -> ApplyReport:
        """Switch to a staged version: pause, copy, resume; requests under way continue.

        Raises EngineError if the version could not be applied; nothing is sampled from half a version.
        """
        ...

    async def reload_base(self) -> ApplyReport:
        """Return to the base model on disk, as version (0, 0)."""
        ...

    async def verify_weights(self, staged: StagedVersion | None, share: float = 1.0) -> list[str]:
        """Compare the live weights with a version (None: the base), or a share of its tensors, between steps.

        Returns the tensors that differ; `apply` of that version then loads it anew. Raises EngineError if it could not.
        """
        ...

    def status(self) -> EngineStatus:
        """Report load and version; cheap."""
        ...
