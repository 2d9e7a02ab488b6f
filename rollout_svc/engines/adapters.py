"""The adapters of one engine: loading, choosing, taking away; the same rules for every engine.

Each load has a name and a number of its own, for caches are keyed by them: an adapter that was replaced in place would go on
serving what the one before had written.
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
    """A request under way, as far as adapters matter."""

    adapter: Adapter | None
    adapter_name: str


class AdapterHost(Protocol):
    """What an engine does for its adapters."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The base model's tensors."""
        ...

    @property
    def version(self) -> Version:
        """The version of its weights."""
        ...

    async def add(self, adapter: Adapter) -> None:
        """Bring an adapter in. Raises EngineError; then it is not there."""
        ...

    async def remove(self, adapter: Adapter) -> None:
        """Let go of an adapter that no request runs on."""
        ...

    async def end_requests(self, which: Callable[[RequestInProgress], bool]) -> None:
        """End some requests with `FinishReason.VERSION_RETIRED`."""
        ...


class Adapters:
    """The adapters of one engine. Changes come one at a time: the engine's command lock is held around them.

    Args:
        host: The engine.
        limits: What it holds; None for none.
        deadline_s: How long requests may take to enter the engine.

    Attributes:
        ready: Set unless the policy is on its way to another version; requests that come meanwhile wait for that one, so
            that what continues a retired request does not begin on the version that goes next.
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
        """Begin with an engine that holds none; `load_anew` brings back what the one before had."""
        self._slots, self._before = self._fresh(), self._slots
        self._entering.clear()

    async def load_anew(self) -> None:
        """Bring back what is still wanted of what the engine that died had held, as far as it fits the weights.

        Raises:
            EngineError: if one cannot be loaded.
        """
        before, self._before = self._before, self._fresh()
        for each in before.loaded:
            names = [name for name, adapter in before.named.items() if adapter is each]
            if not names and each is not before.current:
                continue
            if each.staged.base != self._host.version or not each.staged.path.is_dir():
                log.warning("an adapter was lost with the engine", version=str(each.version))
                continue
            adapter = await self._load(each.staged)
            self._slots.named |= dict.fromkeys(names, adapter)
            if each is before.current:
                self._slots.current = adapter

    # --- requests -------------------------------------------------------------------------------------------------

    @property
    def version(self) -> Version | None:
        """The version that serves the policy; None for the weights alone."""
        return None if self._slots.current is None else self._slots.current.version

    @contextmanager
    def entering(self, name: str) -> Iterator[Adapter | None]:
        """Choose what a request runs on, and hold it while the ``with`` block hands the request over; then `left` counts it out.

        Raises:
            UnknownAdapterError: if nothing has that name.
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
        """Count a request that ended."""
        if adapter is not None:
            adapter.requests -= 1

    # --- changes --------------------------------------------------------------------------------------------------

    async def serve(self, staged: StagedAdapter) -> None:
        """Let new requests without a name run on an adapter.

        Raises:
            EngineError: if it does not fit or cannot be loaded.
        """
        self.ready.clear()
        try:
            self._slots.current = await self._load(staged)
        finally:
            self.ready.set()

    def serve_weights(self) -> None:
        """Let new requests without a name run on the weights alone."""
        self._slots.current = None

    async def name(self, name: str, staged: StagedAdapter) -> None:
        """Give an adapter a name; requests under way by that name finish where they are.

        Raises:
            AdaptersFullError: if names hold as many as they may.
            EngineError: if it does not fit or cannot be loaded.
        """
        if self.limits is not None:
            self._slots.check_name(name)
        self._slots.named[name] = await self._load(staged)

    async def unname(self, name: str) -> bool:
        """Take a name away and end the requests that came by it. False if there was no such name."""
        adapter = self._slots.named.pop(name, None)
        if adapter is None:
            return False
        await self._wait_entered(adapter)
        await self._host.end_requests(lambda asked: asked.adapter is adapter and asked.adapter_name == name)
        return True

    async def retire_others(self, base: Version) -> None:
        """Take away what does not belong to these weights, which are about to come."""
        for adapter in self._slots.of_other_bases(base):
            await self._retire(adapter)

    async def _load(self, staged: StagedAdapter) -> Adapter:
        """Bring an adapter in, unless it is there; the oldest that nobody needs makes room."""
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
        except BaseException:  # a caller who left, too: whether the engine holds it is not known then
            self._slots.remove(adapter)
            raise
        return adapter

    async def _retire(self, adapter: Adapter) -> None:
        """Take an adapter away; its requests end with the tokens so far."""
        self._slots.remove(adapter)  # nothing new enters
        await self._wait_entered(adapter)
        if adapter.requests:
            log.info("an adapter is retired", version=str(adapter.version), requests=adapter.requests)
        await self._host.end_requests(lambda asked: asked.adapter is adapter)
        await self._host.remove(adapter)

    async def _wait_entered(self, adapter: Adapter) -> None:
        """Until no request is on its way in: an engine would look for the adapter's files when they may be gone."""
        try:
            async with asyncio.timeout(self._deadline_s):
                while self._entering.get(adapter, 0):
                    self._entered.clear()
                    await self._entered.wait()
        except TimeoutError as error:
            raise EngineError("requests of an adapter did not reach the engine in time; restart the engine") from error
        self._entering.pop(adapter, None)

    def describe(self) -> Sequence[AdapterInfo]:
        """What is loaded."""
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
    """The adapter half of an `InferenceEngine`."""

    _adapters: Adapters

    @abstractmethod
    def _changing(self) -> AbstractAsyncContextManager[object]:
        """Entered while something of the engine changes: one change at a time."""

    @property
    def lora_limits(self) -> LoraLimits | None:
        """How many adapters it holds and of which rank; None where it serves none."""
        return self._adapters.limits

    async def apply_adapter(self, staged: StagedAdapter) -> ApplyReport:
        """Let new requests run on an adapter; nothing is paused and the weights are not touched.

        Raises:
            EngineError: if it does not fit; what served before serves on.
        """
        return await run_to_end(asyncio.ensure_future(self._apply_adapter(staged)))

    async def _apply_adapter(self, staged: StagedAdapter) -> ApplyReport:
        begun = time.perf_counter()
        async with self._changing():
            await self._adapters.serve(staged)
        return ApplyReport(staged.version, 0.0, time.perf_counter() - begun)

    async def load_named(self, name: str, staged: StagedAdapter) -> None:
        """Give an adapter a name for requests.

        Raises:
            AdaptersFullError: if names hold as many as they may.
            EngineError: if it does not fit.
        """
        async with self._changing():
            await self._adapters.name(name, staged)

    async def unload_named(self, name: str) -> bool:
        """Take a name away and end its requests. False if there was no such name."""
        async with self._changing():
            return await self._adapters.unname(name)

    def adapters(self) -> Sequence[AdapterInfo]:
        """What it holds."""
        return self._adapters.describe()
