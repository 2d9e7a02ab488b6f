"""What an engine does with adapters when it is told to: the same for every engine."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from rollout_svc.engines.adapters import Adapters
from rollout_svc.engines.lora import AdapterInfo, LoraLimits
from rollout_svc.engines.undisturbed import undisturbed
from weightsync.staged import ApplyReport, StagedAdapter

__all__ = ["AdapterCommands"]


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
        return await undisturbed(self._apply_adapter(staged))

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
