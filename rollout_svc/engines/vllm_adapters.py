"""LoRA adapters in a running vLLM: loading, choosing, taking away.

Each version gets a name and a number of its own, for vLLM's prefix cache is keyed by them; one that was replaced in place would
go on serving what the one before had written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import structlog

from rollout_svc.engines.adapter_slots import Adapter, AdapterSlots
from rollout_svc.engines.base import EngineError
from rollout_svc.engines.lora import AdapterInfo, LoraLimits, check_adapter
from rollout_svc.engines.vllm_spans import TrackedRequest
from rollout_svc.engines.vllm_types import Llm
from rollout_svc.engines.vllm_weights import HalfLoadedError, Weights, step
from sluice.versions import Version
from weightsync.staged import StagedAdapter

__all__ = ["Adapters"]

log = structlog.get_logger()


class Adapters:
    """The adapters of one vLLM. Changes come one at a time: the engine's command lock is held around them.

    Args:
        weights: What they are beside.
        live: The requests under way.
        deadline_s: For each step of a change.
    """

    def __init__(self, weights: Weights, live: Callable[[], Iterable[TrackedRequest]], deadline_s: float) -> None:
        self.limits: LoraLimits | None = None
        self.slots = AdapterSlots(0)
        self._before = AdapterSlots(0)
        self._weights = weights
        self._live = live
        self._deadline_s = deadline_s
        self._entering: dict[Adapter, int] = {}
        self._entered = asyncio.Event()

    def begin(self, limits: LoraLimits | None) -> None:
        """Begin with an engine that holds none; `load_anew` brings back what the one before had."""
        self.limits, self._before = limits, self.slots
        self.slots = AdapterSlots(limits.max_loras if limits else 0)
        self._entering.clear()

    async def load_anew(self, llm: Llm) -> None:
        """Bring back what is still wanted of what the engine that died had held, as far as it fits the weights.

        Raises:
            EngineError: if a worker refuses it.
        """
        before, self._before = self._before, AdapterSlots(0)
        for each in before.loaded:
            names = [name for name, adapter in before.named.items() if adapter is each]
            if not names and each is not before.current:
                continue
            if each.staged.base != self._weights.version or not each.staged.path.is_dir():
                log.warning("an adapter was lost with the engine", version=str(each.version))
                continue
            adapter = await self.load(llm, each.staged)
            self.slots.named |= dict.fromkeys(names, adapter)
            if each is before.current:
                self.slots.current = adapter

    @property
    def version(self) -> Version | None:
        """The version that serves the policy; None for the weights alone."""
        return None if self.slots.current is None else self.slots.current.version

    @contextmanager
    def entering(self, name: str) -> Iterator[Adapter | None]:
        """Choose what a request runs on, and hold it while the ``with`` block hands the request over; then `left` counts it out.

        Raises:
            UnknownAdapterError: if nothing has that name.
        """
        adapter = self.slots.choose(name)
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

    async def load(self, llm: Llm, staged: StagedAdapter) -> Adapter:
        """Bring an adapter in, unless it is there; the oldest that nobody needs makes room.

        Raises:
            EngineError: if it does not fit, or a worker refuses it.
            HalfLoadedError: if the engine failed.
        """
        check_adapter(staged, self._weights.base.shapes if self._weights.base else {}, self.limits)
        if staged.base != self._weights.version:
            raise EngineError(
                f"adapter {staged.version} belongs to version {staged.base}, the weights are {self._weights.version}: "
                "update to its base first"
            )
        found = self.slots.find(staged)
        if found is not None:
            return found
        for each in self.slots.leaving():
            await self.retire(llm, each)
        adapter = self.slots.add(staged)
        arguments = {"label": adapter.label, "number": adapter.number, "path": str(staged.path)}
        try:
            answers = await step(
                llm, "loading an adapter", llm.collective_rpc("sluice_add_adapter", kwargs=arguments), self._deadline_s
            )
        except EngineError:
            self.slots.remove(adapter)
            raise
        why = next((answer[1] for answer in answers if answer[0] != "ok"), None)
        if why is not None:
            self.slots.remove(adapter)
            await step(llm, "unloading an adapter", llm.remove_lora(adapter.number), self._deadline_s)
            raise EngineError(f"adapter {staged.version} was not loaded: {why}; what served before serves on")
        return adapter

    async def retire(self, llm: Llm, adapter: Adapter) -> None:
        """Take an adapter away; its requests end with the tokens so far."""
        adapter.retired = True
        if self.slots.current is adapter:
            self.slots.current = None
        self.slots.named = {name: each for name, each in self.slots.named.items() if each is not adapter}
        await self._wait_entered(adapter)
        await self.end_requests(llm, lambda tracked: tracked.adapter is adapter)
        await step(llm, "unloading an adapter", llm.remove_lora(adapter.number), self._deadline_s)
        self.slots.remove(adapter)

    async def unname(self, llm: Llm, name: str) -> bool:
        """Take a name away and end the requests that came by it. False if there was no such name."""
        adapter = self.slots.named.pop(name, None)
        if adapter is None:
            return False
        await self._wait_entered(adapter)
        await self.end_requests(llm, lambda tracked: tracked.adapter is adapter and tracked.adapter_name == name)
        return True

    def left(self, tracked: TrackedRequest) -> None:
        """Count a request that ended."""
        if tracked.adapter is not None:
            tracked.adapter.requests -= 1

    async def end_requests(self, llm: Llm, which: Callable[[TrackedRequest], bool]) -> None:
        """End some requests as retired."""
        ending = [tracked for tracked in self._live() if which(tracked)]
        for tracked in ending:
            tracked.retired = True
            await llm.abort(tracked.internal_id, internal=True)
        if ending:
            log.info("requests of a retired adapter end", requests=len(ending))

    async def _wait_entered(self, adapter: Adapter) -> None:
        """Until no request is on its way in: vLLM would look for the adapter's files when they may be gone."""
        try:
            async with asyncio.timeout(self._deadline_s):
                while self._entering.get(adapter, 0):
                    self._entered.clear()
                    await self._entered.wait()
        except TimeoutError as error:
            raise HalfLoadedError(
                "requests of an adapter did not reach the engine in time; restart the engine"
            ) from error
        self._entering.pop(adapter, None)

    def describe(self) -> Sequence[AdapterInfo]:
        """What is loaded."""
        slots = self.slots
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


def lora_request(adapter: Adapter) -> object:
    """What vLLM knows an adapter by, a ``LoRARequest``."""
    from vllm.lora.request import LoRARequest  # noqa: PLC0415 - vLLM is loaded by start()

    return LoRARequest(adapter.label, adapter.number, str(adapter.staged.path))
