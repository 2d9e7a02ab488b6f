"""LoRA adapters: which ones can be served exactly, which ones an engine holds, and how it loads, selects and unloads them.

Each loaded adapter has its own name and number, since the engine's caches are keyed by them. If an adapter were replaced under
the same name, requests could read cache entries of the previous adapter.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from rollout_svc.config import LoraLimits
from rollout_svc.engines.base import EngineError, GenerationRequest, UnfitVersionError
from sluice.tasks import run_to_end
from sluice.versions import Version
from weightsync.staged import ApplyReport, HeldVersions, StagedAdapter

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
"""Features of PEFT that compute something other than ``x W + scale x A B``. For each: the value that switches it off."""

PLAIN_INITS = ("gaussian", "orthogonal", "eva")
"""Initialisations that leave the base weights unchanged. Others (PiSSA, OLoRA, ...) change them."""


SPARE = 2
"""Places that are kept for the policy: one for its version, and one for the next version, which is loaded before the first is unloaded."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """Description of a loaded adapter.

    Attributes:
        base: Version of the weights that it belongs to.
        names: Its names for requests. A version that serves the policy needs no name.
        serves_policy: Whether requests that name no adapter use it.
    """

    version: Version
    base: Version
    names: tuple[str, ...]
    serves_policy: bool
    requests: int


class UnknownAdapterError(ValueError):
    """No adapter is loaded under that name."""


class AdaptersFullError(Exception):
    """No more adapters can have names."""


@dataclass(eq=False, slots=True)
class Adapter:
    """One loaded adapter.

    Attributes:
        number: Its id in the engine. Ids are never reused, so that it never reads cache entries of another adapter.
    """

    number: int
    staged: StagedAdapter
    requests: int = 0

    @property
    def version(self) -> Version:
        """Return its policy version, which its tokens carry."""
        return self.staged.version

    @property
    def label(self) -> str:
        """Return its name in the engine, as unique as its number."""
        return f"v{self.version}-{self.number}"


@dataclass
class AdapterSlots:
    """The adapters of one engine: the policy's newest version, older ones that still have requests, and named ones.

    Attributes:
        capacity: Maximum number of adapters, at least two.
        current: The adapter for requests that name no adapter; None for the weights alone.
        loaded: All adapters, in the order in which they were loaded.
    """

    capacity: int
    current: Adapter | None = None
    named: dict[str, Adapter] = field(default_factory=dict)
    loaded: list[Adapter] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def choose(self, name: str) -> Adapter | None:
        """Return the adapter for a new request; None for the weights alone.

        Raises:
            UnknownAdapterError: if no adapter has that name.
        """
        if not name:
            return self.current
        if name not in self.named:
            known = ", ".join(sorted(self.named)) or "none"
            raise UnknownAdapterError(f"no adapter {name!r} is loaded (loaded: {known}); call LoadAdapter first")
        return self.named[name]

    def find(self, staged: StagedAdapter) -> Adapter | None:
        """Return the adapter with the same content if it is loaded."""
        same = (staged.version, staged.base, staged.digest)
        return next(
            (each for each in self.loaded if (each.version, each.staged.base, each.staged.digest) == same), None
        )

    def check_name(self, name: str) -> None:
        """Check that one more adapter can have a name.

        Raises:
            AdaptersFullError: if no more adapters can have names.
        """
        if name not in self.named and len(self.named) >= self.capacity - SPARE:
            raise AdaptersFullError(
                f"{len(self.named)} names are loaded, and of {self.capacity} adapters {SPARE} are kept for the policy: "
                "unload one, or raise rollout.lora.max_loras"
            )

    def leaving(self) -> list[Adapter]:
        """Return the adapters to unload before one more is loaded: the unused ones and, if there is still no room, the oldest in use."""
        unwanted = [each for each in self.loaded if not self._wanted(each)]
        gone = [each for each in unwanted if not each.requests]
        in_use = [each for each in unwanted if each.requests]
        too_many = len(self.loaded) - len(gone) + 1 - self.capacity
        return gone + in_use[: max(0, too_many)]

    def of_other_bases(self, base: Version) -> list[Adapter]:
        """Return the adapters that do not fit the weights of a version."""
        return [each for each in self.loaded if each.staged.base != base]

    def add(self, staged: StagedAdapter) -> Adapter:
        """Add an adapter."""
        adapter = Adapter(next(self._numbers), staged)
        self.loaded.append(adapter)
        return adapter

    def remove(self, adapter: Adapter) -> None:
        """Remove an adapter and its names."""
        self.loaded.remove(adapter)
        self.named = {name: each for name, each in self.named.items() if each is not adapter}
        if self.current is adapter:
            self.current = None

    def _wanted(self, adapter: Adapter) -> bool:
        return adapter is self.current or any(adapter is each for each in self.named.values())


def check_adapter(staged: StagedAdapter, shapes: Mapping[str, tuple[int, ...]], limits: LoraLimits | None) -> None:
    """Check that an adapter can be served, with the same result in every engine.

    Raises:
        UnfitVersionError: if it cannot; the message says what to change.
    """
    if limits is None:
        raise UnfitVersionError(
            f"version {staged.version} is an adapter and the engine was started without: set rollout.lora.enabled = true"
        )
    config = json.loads((staged.path / "adapter_config.json").read_text())
    rank = _check_config(staged.version, config, limits)
    pairs = [name.removesuffix(A_END) for name in staged.tensors if name.endswith(A_END)]
    known = {name + end for name in pairs for end in (A_END, B_END)}
    if not pairs or known != staged.tensors.keys():
        strange = sorted(known ^ staged.tensors.keys())[:3]
        raise UnfitVersionError(f"adapter {staged.version} must hold pairs of lora_A and lora_B weights, not {strange}")
    for name in pairs:
        _check_pair(staged, name, shapes, rank)


def _check_config(version: Version, config: Mapping[str, Any], limits: LoraLimits) -> int:
    if config.get("peft_type") != "LORA":
        raise UnfitVersionError(f"adapter {version} is of type {config.get('peft_type')!r}; only LORA is served")
    used = sorted(name for name, off in PLAIN.items() if (config.get(name) or off) != off)
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init not in PLAIN_INITS:
        used.append(f"init_lora_weights = {init}")
    if used:
        raise UnfitVersionError(
            f"adapter {version} uses {', '.join(used)}, which not every engine computes; train without"
        )
    rank = config.get("r")
    if not isinstance(rank, int) or not 0 < rank <= limits.max_rank:
        raise UnfitVersionError(
            f"adapter {version} has rank {rank}; raise rollout.lora.max_rank, now {limits.max_rank}"
        )
    if not isinstance(config.get("lora_alpha"), int | float):
        raise UnfitVersionError(f"adapter {version} has no lora_alpha in its adapter_config.json")
    return rank


def _check_pair(staged: StagedAdapter, name: str, shapes: Mapping[str, tuple[int, ...]], rank: int) -> None:
    weight = f"{name.removeprefix(PREFIX)}.weight"
    shape = shapes.get(weight)
    if not name.startswith(PREFIX) or shape is None or ".layers." not in weight:
        raise UnfitVersionError(
            f"adapter {staged.version} changes {weight}: only linear layers of the base model's blocks"
        )
    found = (staged.tensors[name + A_END].shape, staged.tensors[name + B_END].shape)
    if len(shape) != 2 or found != ((rank, shape[1]), (shape[0], rank)):
        raise UnfitVersionError(
            f"adapter {staged.version}: {weight} is {list(shape)}, its factors are {found}, rank {rank}"
        )


class RequestInProgress(Protocol):
    """The part of a request in progress that adapters need."""

    request: GenerationRequest
    adapter: Adapter | None


class LoraEngine(ABC):
    """Base of engines that serve LoRA adapters beside their weights, several at a time. The rules are the same in every engine.

    The weights do not change. A request stays on the adapter that it began on, and its tokens carry the version of that
    adapter. When the adapter is unloaded, the request ends with `FinishReason.VERSION_RETIRED` and its tokens so far.

    Args:
        limits: Maximum number and rank of adapters; None if it was started without adapters.
        deadline_s: Seconds that requests may take to enter the engine.
    """

    def __init__(self, limits: LoraLimits | None, deadline_s: float) -> None:
        self.lora_limits = limits
        self._entry_deadline_s = deadline_s
        self._slots = self._slots_before = self._empty_slots()
        self._entering: dict[Adapter, int] = {}
        self._entered = asyncio.Event()
        # Cleared while the policy changes its version. New requests wait for that version, so that the continuation of a
        # retired request does not begin on the version that is retired next.
        self._policy_loaded = asyncio.Event()
        self._policy_loaded.set()

    # --- what the engine does -------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def _base_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the base model's tensors."""

    @property
    @abstractmethod
    def _weights_version(self) -> Version:
        """Return the version of the weights."""

    @abstractmethod
    def _changing(self) -> AbstractAsyncContextManager[object]:
        """Return a context that holds the lock for changes of the engine."""

    @abstractmethod
    async def _add_adapter(self, adapter: Adapter) -> None:
        """Load an adapter. If this raises EngineError, the adapter is not loaded."""

    @abstractmethod
    async def _remove_adapter(self, adapter: Adapter) -> None:
        """Unload an adapter that no request uses."""

    @abstractmethod
    async def _end_requests(self, which: Callable[[RequestInProgress], bool]) -> None:
        """End the matching requests with `FinishReason.VERSION_RETIRED`."""

    # --- commands -------------------------------------------------------------------------------------------------

    async def apply_adapter(self, staged: StagedAdapter) -> ApplyReport:
        """Use an adapter for new requests that name no adapter. Sampling is not paused, and the weights do not change.

        Older versions stay loaded while they have requests and there is room.

        Raises:
            EngineError: if it does not fit the engine or its weights; the previous version keeps serving.
        """
        return await run_to_end(asyncio.ensure_future(self._apply_adapter(staged)))

    async def _apply_adapter(self, staged: StagedAdapter) -> ApplyReport:
        begun = time.perf_counter()
        async with self._changing():
            self._policy_loaded.clear()
            try:
                self._slots.current = await self._load(staged)
            finally:
                self._policy_loaded.set()
        return ApplyReport(staged.version, 0.0, time.perf_counter() - begun)

    async def load_named(self, name: str, staged: StagedAdapter) -> None:
        """Give an adapter a name for `GenerationRequest.adapter`. A name may move to another version. Idempotent.

        Requests in progress under that name stay on their adapter.

        Raises:
            AdaptersFullError: if no more adapters can have names.
            EngineError: if it does not fit the engine or its weights.
        """
        async with self._changing():
            if self.lora_limits is not None:
                self._slots.check_name(name)
            self._slots.named[name] = await self._load(staged)

    async def unload_named(self, name: str) -> bool:
        """Remove a name and end its requests. Return False if there was no such name."""
        async with self._changing():
            adapter = self._slots.named.pop(name, None)
            if adapter is None:
                return False
            await self._wait_entered(adapter)
            await self._end_requests(lambda each: each.adapter is adapter and each.request.adapter == name)
            return True

    def adapters(self) -> Sequence[AdapterInfo]:
        """Return the loaded adapters."""
        slots = self._slots
        return [
            AdapterInfo(
                each.version,
                each.staged.base,
                tuple(sorted(name for name, adapter in slots.named.items() if adapter is each)),
                each is slots.current,
                each.requests,
            )
            for each in slots.loaded
        ]

    # --- for the engine: requests ---------------------------------------------------------------------------------

    @property
    def _adapter_version(self) -> Version | None:
        """Return the adapter version that serves the policy; None if the weights serve it."""
        return None if self._slots.current is None else self._slots.current.version

    def _held_with(self, weights: Version) -> HeldVersions:
        """Return what the engine holds if its weights are of this version."""
        adapters = frozenset(each.version for each in self._slots.loaded)
        return HeldVersions(self._adapter_version or weights, weights, adapters)

    @contextmanager
    def _entering_with(self, name: str) -> Iterator[Adapter | None]:
        """Select the adapter of a new request, and keep it loaded while the block passes the request to the engine.

        Call `_left` when the request has ended.

        Raises:
            UnknownAdapterError: if no adapter has that name.
        """
        adapter = self._slots.choose(name)
        if adapter is None:
            yield None
            return
        adapter.requests += 1
        self._entering[adapter] = self._entering.get(adapter, 0) + 1
        try:
            yield adapter
        except BaseException:
            adapter.requests -= 1
            raise
        finally:
            self._entering[adapter] = self._entering.get(adapter, 1) - 1
            self._entered.set()

    def _left(self, adapter: Adapter | None) -> None:
        if adapter is not None:
            adapter.requests -= 1

    # --- for the engine: changes, under its lock ------------------------------------------------------------------

    def _deselect_adapter(self) -> None:
        """Use the weights alone for new requests that name no adapter."""
        self._slots.current = None

    async def _retire_other_bases(self, base: Version) -> None:
        """Unload the adapters that do not fit the weights that are about to be applied."""
        for adapter in self._slots.of_other_bases(base):
            await self._retire(adapter)

    def _forget_adapters(self) -> None:
        """Note that the processes are new and hold no adapters. `_reload_adapters` loads the adapters of the old processes again."""
        self._slots, self._slots_before = self._empty_slots(), self._slots
        self._entering.clear()

    async def _reload_adapters(self) -> None:
        """Load again the adapters that the dead engine held, if they are still used and fit the weights.

        Raises:
            EngineError: if loading fails.
        """
        before, self._slots_before = self._slots_before, self._empty_slots()
        for each in before.loaded:
            names = [name for name, adapter in before.named.items() if adapter is each]
            if not names and each is not before.current:
                continue
            if each.staged.base != self._weights_version or not each.staged.path.is_dir():
                log.warning("an adapter was lost when the engine died", version=str(each.version))
                continue
            adapter = await self._load(each.staged)
            self._slots.named |= dict.fromkeys(names, adapter)
            if each is before.current:
                self._slots.current = adapter

    def _empty_slots(self) -> AdapterSlots:
        return AdapterSlots(self.lora_limits.max_loras if self.lora_limits else 0)

    async def _load(self, staged: StagedAdapter) -> Adapter:
        """Load an adapter unless it is loaded. The oldest unused one is unloaded if there is no room."""
        check_adapter(staged, self._base_shapes, self.lora_limits)
        if staged.base != self._weights_version:
            raise EngineError(
                f"adapter {staged.version} belongs to version {staged.base}, the weights are {self._weights_version}: "
                "update to its base first"
            )
        found = self._slots.find(staged)
        if found is not None:
            return found
        for each in self._slots.leaving():
            await self._retire(each)
        adapter = self._slots.add(staged)
        try:
            await self._add_adapter(adapter)
        except BaseException:  # even if cancelled: the engine may or may not hold the adapter
            self._slots.remove(adapter)
            raise
        return adapter

    async def _retire(self, adapter: Adapter) -> None:
        """Unload an adapter. Its requests end with their tokens so far."""
        self._slots.remove(adapter)  # no new request can select it
        await self._wait_entered(adapter)
        if adapter.requests:
            log.info("an adapter is retired", version=str(adapter.version), requests=adapter.requests)
        await self._end_requests(lambda request: request.adapter is adapter)
        await self._remove_adapter(adapter)

    async def _wait_entered(self, adapter: Adapter) -> None:
        """Wait until no request is entering the engine: entering reads the adapter's files, which may be deleted after this."""
        try:
            async with asyncio.timeout(self._entry_deadline_s):
                while self._entering.get(adapter, 0):
                    self._entered.clear()
                    await self._entered.wait()
        except TimeoutError as error:
            raise EngineError("requests of an adapter did not reach the engine in time; restart the engine") from error
        self._entering.pop(adapter, None)
