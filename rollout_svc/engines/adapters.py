"""Loads, selects and unloads the adapters of one engine, by the same rules for every engine.

Each loaded adapter has its own name and number, since the engine's caches are keyed by them. If an adapter were replaced under
the same name, requests could read cache entries of the one before.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Protocol

import structlog

from rollout_svc.engines.adapter_slots import Adapter, AdapterSlots
from rollout_svc.engines.base import EngineError
from rollout_svc.engines.lora import AdapterInfo, LoraLimits, check_adapter
from sluice.tasks import run_to_end
from sluice.versions import Version
from weightsync.staged import ApplyReport, StagedAdapter

__all__ = ["AdapterCommands", "AdapterHost", "Adapters", "RequestInProgress"]

log = structlog.get_logger()


class RequestInProgress(Protocol):
    """What adapters need to know of a request in progress."""

    adapter: Adapter | None
    adapter_name: str


class AdapterHost(Protocol):
    """What an engine must be able to do with adapters."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the base model's tensors."""
        ...

    @property
    def version(self) -> Version:
        """Return the version of the weights."""
        ...

    async def add(self, adapter: Adapter) -> None:
        """Load an adapter. If it raises EngineError, the adapter is not loaded."""
        ...

    async def remove(self, adapter: Adapter) -> None:
        """Unload an adapter that no request uses."""
        ...

    async def end_requests(self, which: Callable[[RequestInProgress], bool]) -> None:
        """End the matching requests with `FinishReason.VERSION_RETIRED`."""
        ...


class Adapters:
    """The adapters of one engine. Callers hold the engine's command lock around each change.

    Args:
        host: The engine.
        limits: How many adapters it holds, and of which rank; None for none.
        deadline_s: Seconds that requests may take to enter the engine.

    Attributes:
        ready: Set unless the policy is about to change its version. New requests wait for that version, so that the
            continuation of a retired request does not begin on the version that is retired next.
    """

    def __init__(self, host: AdapterHost, limits: LoraLimits | None, deadline_s: float) -> None:
        self.limits = limits
        self._host, self._deadline_s = host, deadline_s
        self._slots = self._before = self._fresh()
        self._entering: dict[Adapter, int] = {}
        self._entered = asyncio.Event()
        self.ready = asyncio.Event()
        self.ready.set()

    def _fresh(self) -> AdapterSlots:
        return AdapterSlots(self.limits.max_loras if self.limits else 0)

    # --- life -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin with a new engine, which holds no adapters; `reload` loads those of the engine before."""
        self._slots, self._before = self._fresh(), self._slots
        self._entering.clear()

    async def reload(self) -> None:
        """Load the adapters again that the engine that died held, if they are still used and fit the weights.

        Raises:
            EngineError: if loading fails.
        """
        before, self._before = self._before, self._fresh()
        for each in before.loaded:
            names = [name for name, adapter in before.named.items() if adapter is each]
            if not names and each is not before.current:
                continue
            if each.staged.base != self._host.version or not each.staged.path.is_dir():
                log.warning("an adapter was lost when the engine died", version=str(each.version))
                continue
            adapter = await self._load(each.staged)
            self._slots.named |= dict.fromkeys(names, adapter)
            if each is before.current:
                self._slots.current = adapter

    # --- requests -------------------------------------------------------------------------------------------------

    @property
    def version(self) -> Version | None:
        """Return the adapter version that serves the policy; None if the weights serve it."""
        return None if self._slots.current is None else self._slots.current.version

    @contextmanager
    def entering(self, name: str) -> Iterator[Adapter | None]:
        """Select the adapter of a new request, and keep it loaded while the block passes the request to the engine.

        Call `left` when the request has ended.

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

    def left(self, adapter: Adapter | None) -> None:
        """Note that a request has ended."""
        if adapter is not None:
            adapter.requests -= 1

    # --- changes --------------------------------------------------------------------------------------------------

    async def serve(self, staged: StagedAdapter) -> None:
        """Use an adapter for new requests that name none.

        Raises:
            EngineError: if it does not fit or cannot be loaded.
        """
        self.ready.clear()
        try:
            self._slots.current = await self._load(staged)
        finally:
            self.ready.set()

    def serve_weights(self) -> None:
        """Use the weights alone for new requests that name no adapter."""
        self._slots.current = None

    async def name(self, name: str, staged: StagedAdapter) -> None:
        """Give an adapter a name. Requests in progress under that name stay on their adapter.

        Raises:
            AdaptersFullError: if no more adapters can have names.
            EngineError: if it does not fit or cannot be loaded.
        """
        if self.limits is not None:
            self._slots.check_name(name)
        self._slots.named[name] = await self._load(staged)

    async def unname(self, name: str) -> bool:
        """Remove a name and end its requests. Return False if there was no such name."""
        adapter = self._slots.named.pop(name, None)
        if adapter is None:
            return False
        await self._wait_entered(adapter)
        await self._host.end_requests(lambda request: request.adapter is adapter and request.adapter_name == name)
        return True

    async def retire_others(self, base: Version) -> None:
        """Unload the adapters that do not fit the weights that are about to be applied."""
        for adapter in self._slots.of_other_bases(base):
            await self._retire(adapter)

    async def _load(self, staged: StagedAdapter) -> Adapter:
        """Load an adapter unless it is loaded. The oldest unused one is unloaded if there is no room."""
        check_adapter(staged, self._host.shapes, self.limits)
        if staged.base != self._host.version:
            raise EngineError(
                f"adapter {staged.version} belongs to version {staged.base}, the weights are {self._host.version}: "
                "update to its base first"
            )
        found = self._slots.find(staged)
        if found is not None:
            return found
        for each in self._slots.leaving():
            await self._retire(each)
        adapter = self._slots.add(staged)
        try:
            await self._host.add(adapter)
        except BaseException:  # also when the caller was cancelled: it is unknown then whether the engine holds it
            self._slots.remove(adapter)
            raise
        return adapter

    async def _retire(self, adapter: Adapter) -> None:
        """Unload an adapter. Its requests end with their tokens so far."""
        self._slots.remove(adapter)  # no new request can select it
        await self._wait_entered(adapter)
        if adapter.requests:
            log.info("an adapter is retired", version=str(adapter.version), requests=adapter.requests)
        await self._host.end_requests(lambda request: request.adapter is adapter)
        await self._host.remove(adapter)

    async def _wait_entered(self, adapter: Adapter) -> None:
        """Wait until no request is about to enter: the engine reads the adapter's files then, and they may be deleted after."""
        try:
            async with asyncio.timeout(self._deadline_s):
                while self._entering.get(adapter, 0):
                    self._entered.clear()
                    await self._entered.wait()
        except TimeoutError as error:
            raise EngineError("requests of an adapter did not reach the engine in time; restart the engine") from error
        self._entering.pop(adapter, None)

    def describe(self) -> Sequence[AdapterInfo]:
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


class AdapterCommands(ABC):
    """The methods of an engine that concern adapters."""

    _adapters: Adapters

    @abstractmethod
    def _changing(self) -> AbstractAsyncContextManager[object]:
        """Return the lock that is held while the engine changes."""

    @property
    def lora_limits(self) -> LoraLimits | None:
        """Return how many adapters the engine holds, and of which rank; None if it serves none."""
        return self._adapters.limits

    async def apply_adapter(self, staged: StagedAdapter) -> ApplyReport:
        """Use an adapter for new requests. Sampling is not paused, and the weights do not change.

        Raises:
            EngineError: if it does not fit; the version before keeps serving.
        """
        return await run_to_end(asyncio.ensure_future(self._apply_adapter(staged)))

    async def _apply_adapter(self, staged: StagedAdapter) -> ApplyReport:
        begun = time.perf_counter()
        async with self._changing():
            await self._adapters.serve(staged)
        return ApplyReport(staged.version, 0.0, time.perf_counter() - begun)

    async def load_named(self, name: str, staged: StagedAdapter) -> None:
        """Give an adapter a name that requests can use.

        Raises:
            AdaptersFullError: if no more adapters can have names.
            EngineError: if it does not fit.
        """
        async with self._changing():
            await self._adapters.name(name, staged)

    async def unload_named(self, name: str) -> bool:
        """Remove a name and end its requests. Return False if there was no such name."""
        async with self._changing():
            return await self._adapters.unname(name)

    def adapters(self) -> Sequence[AdapterInfo]:
        """Return the loaded adapters."""
        return self._adapters.describe()
