"""Switching the weights of a running vLLM: the sequence of calls, each with a deadline, and what to do when one fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from rollout_svc.engines.base import EngineError
from rollout_svc.engines.base_model import BaseModel
from rollout_svc.engines.vllm_types import Llm
from sluice.versions import BASE, Version
from weightsync.staged import ApplyReport, StagedVersion

__all__ = ["HalfLoadedError", "WeightFiles", "Weights", "load", "phase"]

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """A whole version on disk or in shared memory, and the tensors it must hold."""

    version: Version
    paths: tuple[Path, ...]
    names: Sequence[str]


class HalfLoadedError(EngineError):
    """Loading failed after it had begun: the model may hold parts of two versions and must not sample."""


class Weights:
    """Which weights a vLLM holds, and the switch to others.

    Args:
        clear_cache: Compute the keys and values of requests under way again after a switch.
        deadline_s: For each step of a switch.

    Attributes:
        base: The model on disk; set when the engine has started.
        version: What serves.
        staged: Where it came from; None for the base.
    """

    def __init__(self, *, clear_cache: bool, deadline_s: float) -> None:
        self.base: BaseModel | None = None
        self.version = BASE
        self.staged: StagedVersion | None = None
        self._clear_cache = clear_cache
        self._deadline_s = deadline_s

    def files(self, staged: StagedVersion | None) -> WeightFiles:
        """The files of a staged version, or of the base model for None.

        Raises:
            EngineError: if the version does not fit the model.
        """
        if self.base is None:
            raise EngineError("the engine is not running; call start()")
        names = tuple(self.base.shapes)
        if staged is None:
            return WeightFiles(BASE, self.base.paths, names)
        self.base.check(staged)
        return WeightFiles(staged.version, (staged.path,), names)

    async def switch(self, llm: Llm, files: WeightFiles, *, resume: bool) -> ApplyReport:
        """Pause, load, label, resume. Requests under way are kept.

        Raises:
            EngineError: if the version could not be loaded; the one before serves on.
            HalfLoadedError: if the model is in an unknown state; it was not resumed.
        """
        begun = time.perf_counter()
        async with phase("pausing", self._deadline_s):
            await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=self._clear_cache)
        try:
            copy_s = await self._load_or_go_back(llm, files)
        except HalfLoadedError:
            raise
        except EngineError:
            await self._resume(llm, resume)
            raise
        await self._resume(llm, resume)
        return ApplyReport(files.version, time.perf_counter() - begun, copy_s)

    async def _resume(self, llm: Llm, wanted: bool) -> None:
        if wanted:
            async with phase("resuming", self._deadline_s):
                await llm.resume_generation()

    async def _load_or_go_back(self, llm: Llm, files: WeightFiles) -> float:
        """Load a version; on failure once more, then what served before. Leaves the model whole or raises HalfLoadedError."""
        try:
            copy_s = await load(llm, files, self._deadline_s)
        except HalfLoadedError as first:
            log.warning("update failed, trying again", version=str(files.version), error=str(first))
            try:
                copy_s = await load(llm, files, self._deadline_s)
            except EngineError as second:
                await self._go_back(llm)
                raise EngineError(f"{second}; version {self.version} serves on") from second
        self.version = files.version
        return copy_s

    async def _go_back(self, llm: Llm) -> None:
        try:
            await load(llm, self.files(self.staged), self._deadline_s)
        except EngineError as error:
            raise HalfLoadedError(f"neither the new nor the old version could be loaded: {error}") from error


@asynccontextmanager
async def phase(name: str, deadline_s: float) -> AsyncIterator[None]:
    """Bound one step of an update.

    Raises:
        HalfLoadedError: if it takes longer or vLLM fails; the engine's state is then unknown.
    """
    try:
        async with asyncio.timeout(deadline_s):
            yield
    except TimeoutError as error:
        raise HalfLoadedError(f"{name} did not end within {deadline_s:.0f} s; restart the engine") from error
    except Exception as error:
        raise HalfLoadedError(f"{name} failed: {type(error).__name__}: {error}; restart the engine") from error


async def load(engine: Llm, files: WeightFiles, deadline_s: float) -> float:
    """Load a version into a paused engine and label it.

    Args:
        engine: vLLM's ``AsyncLLM``, paused so that no step runs.
        files: What to load.
        deadline_s: For each of the calls.

    Returns:
        Seconds that the copy took in the slowest worker that answers.

    Raises:
        EngineError: if the files were refused; the model is untouched.
        HalfLoadedError: if it failed later.
    """
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest  # noqa: PLC0415 - loaded by start()

    update = {"paths": [str(path) for path in files.paths], "names": list(files.names)}
    async with phase("opening the update", deadline_s):
        await engine.start_weight_update()
    async with phase("loading the weights", deadline_s):
        await engine.update_weights(WeightTransferUpdateRequest(update_info=update))
        answers = await engine.collective_rpc("sluice_status")
    error = next((answer for answer in answers if answer[0] != "ok"), None)
    async with phase("closing the update", deadline_s):
        await engine.finish_weight_update(None if error else str(files.version))
    if error is not None:
        refused = all(answer[0] in {"ok", "refused"} for answer in answers) and answers[0][0] == "refused"
        raise (EngineError if refused else HalfLoadedError)(f"version {files.version} was not loaded: {error[1]}")
    return max(float(answer[1]) for answer in answers)
