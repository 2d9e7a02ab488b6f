"""Switching the weights of a running vLLM: the sequence of calls, each with a deadline, and what to do when one fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import structlog

from rollout_svc.engines.base import EngineError
from rollout_svc.engines.model_files import BaseModel
from rollout_svc.engines.vllm.types import Llm
from sluice.versions import BASE, Version
from weightsync.staged import ApplyReport, StagedVersion

__all__ = ["Difference", "HalfLoadedError", "WeightFiles", "Weights", "step", "verify"]

log = structlog.get_logger()

T = TypeVar("T")


DEATH_LOOK_S = 0.1
"""Time between two looks whether the engine still lives while a call to it is under way, in seconds."""

LOOK_S = 0.002
"""Time between two looks at a build in the workers, in seconds; each look waits for the end of a step anyway."""


PIECE_S = 0.01
"""Seconds that one look may keep the workers from sampling; at least one piece of a tensor is compared."""

BREATH_S = 0.02
"""Seconds between two looks, for the engine's steps."""


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """A version on disk or in shared memory, and the tensors it must hold."""

    version: Version
    paths: tuple[Path, ...]
    names: Sequence[str]

    def arguments(self) -> dict[str, object]:
        """What the workers are told of them."""
        return {"paths": [str(path) for path in self.paths], "names": list(self.names)}


class HalfLoadedError(EngineError):
    """Loading failed after it had begun: the model may hold parts of two versions and must not sample."""


class Weights:
    """Which weights a vLLM holds, and the switch to others.

    Args:
        clear_cache: Compute the keys and values of requests under way again after a switch.
        double_buffer: Build a version beside the one that samples, where the workers can.
        patch: On an accelerator, bring in only what differs from the version before, where the workers can.
        deadline_s: For each step of a switch.

    Attributes:
        base: The model on disk; set when the engine has started.
        version: What serves.
        staged: Where it came from; None for the base.
        suspect: The live weights were found to differ from those of `version`; a switch ends that.
        admit: Set unless a switch is under way; requests that come meanwhile belong to the next version.
    """

    def __init__(self, *, clear_cache: bool, double_buffer: bool, patch: bool, deadline_s: float) -> None:
        self.base: BaseModel | None = None
        self.version = BASE
        self.staged: StagedVersion | None = None
        self.suspect = False
        self.admit = asyncio.Event()
        self.admit.set()
        self._clear_cache = clear_cache
        self._double_buffer = double_buffer
        self._patch = patch
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
        """Prepare, pause, load, label, resume. Requests under way are kept.

        Raises:
            EngineError: if the version could not be loaded; the one before serves on.
            HalfLoadedError: if the model is in an unknown state; it was not resumed.
        """
        try:
            await check(llm, files, self._deadline_s)
            prepare_s = 0.0
            if self._double_buffer or self._patch:
                prepare_s = await prepare(llm, files, self._deadline_s, patch=self._patch)
        except HalfLoadedError:
            raise
        except EngineError as error:
            raise EngineError(f"{error}; version {self.version} serves on") from error
        self.admit.clear()
        try:
            pause_s, copy_s = await self._pause_and_load(llm, files, resume=resume)
        finally:
            self.admit.set()
        return ApplyReport(files.version, pause_s, prepare_s + copy_s)

    async def _pause_and_load(self, llm: Llm, files: WeightFiles, *, resume: bool) -> tuple[float, float]:
        pause = llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=self._clear_cache)
        await step(llm, "pausing", pause, self._deadline_s)
        begun = time.perf_counter()  # the step that was under way at the call still gave its tokens
        try:
            copy_s = await self._load_or_go_back(llm, files)
        except HalfLoadedError:
            raise
        except EngineError:
            await self._resume(llm, resume)
            raise
        await self._resume(llm, resume)
        return time.perf_counter() - begun, copy_s

    async def _resume(self, llm: Llm, wanted: bool) -> None:
        if wanted:
            await step(llm, "resuming", llm.resume_generation(), self._deadline_s)

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
        self.version, self.suspect = files.version, False
        return copy_s

    async def _go_back(self, llm: Llm) -> None:
        try:
            await load(llm, self.files(self.staged), self._deadline_s)
        except EngineError as error:
            raise HalfLoadedError(f"neither the new nor the old version could be loaded: {error}") from error


async def step(llm: Llm, name: str, work: Coroutine[Any, Any, T], deadline_s: float) -> T:
    """Bound one call to the engine. One that was under way when the engine's process died would never be answered.

    Raises:
        HalfLoadedError: if it takes too long, vLLM fails or its process dies; the engine's state is then unknown.
    """
    task = asyncio.create_task(work)
    end = time.monotonic() + deadline_s
    try:
        while not task.done() and time.monotonic() < end and not llm.errored:
            await asyncio.wait({task}, timeout=DEATH_LOOK_S)
        if task.done():
            return task.result()
    except Exception as error:
        raise HalfLoadedError(f"{name} failed: {type(error).__name__}: {error}; restart the engine") from error
    finally:
        task.cancel()
    why = "failed: the engine's process died" if llm.errored else f"did not end within {deadline_s:.0f} s"
    raise HalfLoadedError(f"{name} {why}; restart the engine")


async def check(llm: Llm, files: WeightFiles, deadline_s: float) -> None:
    """Ask every worker whether the files hold what it reads, before any of them touches its model.

    Raises:
        EngineError: if one refuses; nothing has changed.
    """
    work = llm.collective_rpc("sluice_check", kwargs=files.arguments())
    refused = next((why for kind, why in await step(llm, "checking the weights", work, deadline_s) if kind != "ok"), "")
    if refused:
        raise EngineError(f"version {files.version} was not loaded: {refused}")


async def prepare(llm: Llm, files: WeightFiles, deadline_s: float, *, patch: bool) -> float:
    """Let the workers build a version while they sample, where they can; `load` then has little left to do.

    Returns:
        Seconds that it took in the slowest worker; 0 where it is not supported or failed, and `load` does it all.

    Raises:
        EngineError: if the files were refused; nothing has changed.
    """
    name = "preparing the weights"
    arguments = files.arguments() | {"patch": patch}
    answers = await step(llm, name, llm.collective_rpc("sluice_prepare", kwargs=arguments), deadline_s)
    end = time.monotonic() + deadline_s
    while all(kind in {"ok", "pending"} for kind, _ in answers):
        answers = await step(llm, name, llm.collective_rpc("sluice_prepared"), deadline_s)
        if all(kind == "ok" for kind, _ in answers):
            return max(float(seconds) for _, seconds in answers)
        if time.monotonic() > end:
            raise EngineError(f"version {files.version} was not prepared within {deadline_s:.0f} s")
        await asyncio.sleep(LOOK_S)
    kind, why = next(answer for answer in answers if answer[0] not in {"ok", "pending"})
    if kind == "refused":
        raise EngineError(f"version {files.version} was not loaded: {why}")
    if kind == "err":
        log.warning("preparing a version failed, loading it while paused", version=str(files.version), error=why)
    return 0.0


async def load(llm: Llm, files: WeightFiles, deadline_s: float) -> float:
    """Load a version into a paused engine and label it.

    Args:
        llm: vLLM's ``AsyncLLM``, paused so that no step runs.
        files: What to load.
        deadline_s: For each of the calls.

    Returns:
        Seconds that the copy took in the slowest worker that answers.

    Raises:
        EngineError: if the files were refused; the model is untouched.
        HalfLoadedError: if it failed later.
    """
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest  # noqa: PLC0415 - loaded by start()

    request = WeightTransferUpdateRequest(update_info=files.arguments())
    await step(llm, "opening the update", llm.start_weight_update(), deadline_s)
    await step(llm, "loading the weights", llm.update_weights(request), deadline_s)
    answers = await step(llm, "asking for the outcome", llm.collective_rpc("sluice_status"), deadline_s)
    error = next((answer for answer in answers if answer[0] != "ok"), None)
    label = None if error else str(files.version)
    await step(llm, "closing the update", llm.finish_weight_update(label), deadline_s)
    if error is not None:
        refused = all(kind == "refused" for kind, _ in answers)  # by some alone: the others have loaded it
        raise (EngineError if refused else HalfLoadedError)(f"version {files.version} was not loaded: {error[1]}")
    return max(float(answer[1]) for answer in answers)


@dataclass(frozen=True, slots=True)
class Difference:
    """What a comparison found.

    Attributes:
        tensors: Tensors of the version whose live values differ, sorted.
        unchecked: Tensors whose live form is not known, such as quantised ones, sorted.
    """

    tensors: list[str]
    unchecked: list[str]


async def verify(llm: Llm, files: WeightFiles, share: float, deadline_s: float) -> Difference:
    """Compare the live weights of every worker with a version's files.

    With several engines behind one front end (data parallel) only those of the first are known: vLLM gives no other's answer.

    Args:
        llm: vLLM's ``AsyncLLM``, sampling or not.
        files: The version.
        share: Part of the model's tensors to look at, above 0; 1 for all. Which ones depends on the version.
        deadline_s: For all of it.

    Raises:
        EngineError: if a worker cannot compare, or it takes too long.
        HalfLoadedError: if the engine does not answer.
    """
    name, end = "comparing the weights", time.monotonic() + deadline_s
    seed = files.version.epoch * 1_000_003 + files.version.number
    begin = llm.collective_rpc("sluice_verify", kwargs=files.arguments() | {"share": share, "seed": seed})
    answers = await step(llm, name, begin, deadline_s)
    while all(kind in {"ok", "pending"} for kind, _ in answers):
        await asyncio.sleep(BREATH_S)
        look = llm.collective_rpc("sluice_verified", kwargs={"budget_s": PIECE_S})
        answers = await step(llm, name, look, deadline_s)
        if all(kind == "ok" for kind, _ in answers):
            break
        if time.monotonic() > end:
            raise EngineError(f"version {files.version} could not be compared within {deadline_s:.0f} s; take a sample")
    failed = next((str(value) for kind, value in answers if kind != "ok"), "")
    if failed:
        raise EngineError(f"version {files.version} could not be compared with the live weights: {failed}")
    different, unchecked = (sorted({name for _, found in answers for name in found[part]}) for part in (0, 1))
    return Difference(different, unchecked)
