"""An engine in small: live tensors into which staged versions are copied in place, and which say what they are."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import torch
from safetensors import safe_open

from sluice.versions import BASE
from weight_faults.versions import digest, tensors_of
from weightsync.staged import ApplyError, ApplyReport, HeldVersions, StagedAdapter, StagedVersion

__all__ = ["Engine", "copy_tensor"]


def copy_tensor(target: torch.Tensor, source: torch.Tensor) -> None:
    """One step of an apply; a process can be killed between two of them."""
    target.copy_(source)


class Engine:
    """Starts with the base model. Between the begin of an apply and its success it answers nothing, as it would sample nothing."""

    def __init__(self) -> None:
        self._live = tensors_of(BASE)
        self._version = BASE
        self._paused = False
        self.serves_adapters = False

    def held(self) -> HeldVersions | None:
        """Return the version that answers; None between the begin of an apply and its success."""
        return None if self._paused else HeldVersions(self._version, self._version)

    async def apply_adapter(self, staged: StagedAdapter) -> ApplyReport:
        """Refuse: no cell pushes adapters."""
        raise ApplyError(f"{staged.version} is an adapter")

    async def apply(self, staged: StagedVersion) -> ApplyReport:
        """Copy a staged file over the live tensors."""
        begun = time.perf_counter()
        self._paused = True
        await asyncio.to_thread(self._copy, staged)
        self._version = staged.version
        self._paused = False
        seconds = time.perf_counter() - begun
        return ApplyReport(staged.version, seconds, seconds)

    def _copy(self, staged: StagedVersion) -> None:
        with safe_open(staged.path, framework="pt") as file:
            if set(file.keys()) != set(self._live):
                raise ApplyError("the staged file does not hold the tensors of the model")
            for name, live in self._live.items():
                copy_tensor(live, file.get_tensor(name))

    async def probe(self) -> dict[str, Any]:
        """What a request would be answered with: the version, and the digest of the bits that answer."""
        if self._paused:
            return {"paused": True}
        return {"version": str(self._version), "digest": digest(self._live)}
