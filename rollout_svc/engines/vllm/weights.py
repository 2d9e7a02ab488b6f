"""The weights of a running vLLM: the calls that change and compare them, their deadlines, and what happens when one fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from rollout_svc.engines.base import EngineError, EngineTimeoutError
from rollout_svc.engines.model_files import BaseModel
from rollout_svc.engines.vllm.requests import LoadRecorder
from sluice.clock import CLOCK, Clock
from sluice.tasks import first_ended
from sluice.versions import BASE, Version
from weightsync.staged import ApplyReport, StagedVersion

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

log = structlog.get_logger()

T = TypeVar("T")


ALIVE_CHECK_S = 0.1
"""Seconds between two checks of whether the engine is alive, during a call to it."""

PREPARE_CHECK_S = 0.002
"""Seconds between two checks of a build in the workers. Each check waits for the end of a step anyway."""

LAST_CHECK = 0.9
"""Part of the deadline after which a build is given up. The rest is for the reply to the last check, so that a slow build is
not taken for a hanging engine."""

COMPARE_S = 0.01
"""Seconds of comparison between two steps, in which at least one part of a tensor is compared."""

SAMPLE_S = 0.02
"""Seconds between two comparisons, in which the engine samples."""


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files of a version on disk or in shared memory, and the tensors that they must hold."""

    version: Version
    paths: tuple[Path, ...]
    names: Sequence[str]

    def arguments(self) -> dict[str, object]:
        """Return the arguments for the workers."""
        return {"paths": [str(path) for path in self.paths], "names": list(self.names)}


class HalfLoadedError(EngineError):
    """Loading failed after it had begun. The model may hold parts of two versions and must not sample."""


class StepTimeoutError(HalfLoadedError, EngineTimeoutError):
    """A call to the engine did not end by its deadline. It may still take effect later."""


class VllmWeights:
    """The weights of a running vLLM, and the switch to another version.

    Args:
        clear_cache: Whether to compute the keys and values of requests in progress again after a switch.
        double_buffer: Whether to build a version beside the one that samples, if the workers can.
        patch: Whether to load only the changed values on an accelerator, if the workers can.
        deadline_s: Seconds for each of the three steps of a switch: prepare; pause and load; go back if that fails.
        clock: Time of these deadlines.

    Attributes:
        base: The model on disk; set when the engine has started.
        version: The version that serves.
        staged: Its files; None for the base.
        suspect: Whether the live weights were found to differ from `version`, until the next switch.
        admit: Set unless a switch is in progress. New requests wait for it and are sampled by the next version.
    """

    def __init__(
        self, *, clear_cache: bool, double_buffer: bool, patch: bool, deadline_s: float, clock: Clock = CLOCK
    ) -> None:
        self.base: BaseModel | None = None
        self.version = BASE
        self.staged: StagedVersion | None = None
        self.suspect = False
        self.admit = asyncio.Event()
        self.admit.set()
        self._clear_cache = clear_cache
        self._double_buffer = double_buffer
        self._patch = patch
        self._deadline_s, self._clock = deadline_s, clock

    def files(self, staged: StagedVersion | None) -> WeightFiles:
        """Return the files of a staged version, or of the base model for None.

        Raises:
            UnfitVersionError: if the version does not fit the model.
        """
        if self.base is None:
            raise EngineError("the engine is not running; call start()")
        if staged is None:
            return WeightFiles(BASE, self.base.paths, tuple(sorted(self.base.in_files)))
        self.base.check(staged)
        return WeightFiles(staged.version, (staged.path,), tuple(self.base.shapes))

    async def switch(self, llm: AsyncLLM, recorder: LoadRecorder, files: WeightFiles, *, resume: bool) -> ApplyReport:
        """Prepare, pause, load, label and resume. Requests in progress continue.

        Raises:
            EngineError: if the version could not be loaded; the previous version keeps serving.
            HalfLoadedError: if the model is in an unknown state; sampling stays paused.
        """
        end = self._end()
        prepare_s = 0.0
        try:
            if self._double_buffer or self._patch:
                prepare_s = await prepare(llm, files, end, self._clock, patch=self._patch)
            else:
                await check(llm, files, end, self._clock)
        except HalfLoadedError:
            raise
        except EngineError as error:
            raise EngineError(f"{error}; version {self.version} keeps serving") from error
        self.admit.clear()
        if self._clear_cache:
            recorder.expect_recomputation()
        try:
            pause_s, copy_s = await self._pause_and_load(llm, files, resume=resume)
        finally:
            self.admit.set()
        return ApplyReport(files.version, pause_s, prepare_s + copy_s)

    async def _pause_and_load(self, llm: AsyncLLM, files: WeightFiles, *, resume: bool) -> tuple[float, float]:
        end = self._end()
        pause = llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=self._clear_cache)
        await step(llm, "pausing", pause, left(end, self._clock), self._clock)
        begun = time.perf_counter()  # the step in progress at the call has returned its tokens
        refused: EngineError | None = None
        try:
            copy_s = await self._load(llm, files, end)
        except StepTimeoutError:
            raise  # the call may still change the model: only a restart helps
        except HalfLoadedError as error:
            end, refused, copy_s = self._end(), error, 0.0
            await self._go_back(llm, end)
        except EngineError as error:
            end, refused, copy_s = self._end(), error, 0.0
        if resume:
            await step(llm, "resuming", llm.resume_generation(), left(end, self._clock), self._clock)
        if refused is not None:
            raise EngineError(f"{refused}; version {self.version} keeps serving") from refused
        self.version, self.suspect = files.version, False
        return time.perf_counter() - begun, copy_s

    async def _load(self, llm: AsyncLLM, files: WeightFiles, end: float) -> float:
        """Load a version. If it fails half-way and there is time, try once more.

        Raises:
            EngineError: if the files were refused at once; the model is untouched.
            HalfLoadedError: if the first attempt failed half-way and there was no successful second one: the model may hold parts of the
                version.
        """
        begun = self._clock()
        try:
            return await load(llm, files, end, self._clock)
        except StepTimeoutError:
            raise
        except HalfLoadedError as error:
            if left(end, self._clock) < self._clock() - begun:
                raise  # a second attempt beyond the deadline would leave no time to go back
            log.warning("update failed, trying again", version=str(files.version), error=str(error))
        try:
            return await load(llm, files, end, self._clock)
        except HalfLoadedError:
            raise
        except EngineError as error:
            raise HalfLoadedError(str(error)) from error

    async def _go_back(self, llm: AsyncLLM, end: float) -> None:
        try:
            await load(llm, self.files(self.staged), end, self._clock)
        except EngineError as error:
            raise HalfLoadedError(f"neither the new nor the old version could be loaded: {error}") from error

    def _end(self) -> float:
        return self._clock() + self._deadline_s


def left(end: float, clock: Clock) -> float:
    """Return the seconds until a time of a clock."""
    return max(0.0, end - clock())


async def step(llm: AsyncLLM, name: str, work: Coroutine[Any, Any, T], deadline_s: float, clock: Clock = CLOCK) -> T:
    """Wait for one call to the engine until a deadline. Check that its process is alive, because otherwise the call never returns.

    Raises:
        HalfLoadedError: if it takes too long (StepTimeoutError), vLLM fails or its process dies; the engine's state is
            then unknown.
    """
    task = asyncio.create_task(work)
    end = clock() + deadline_s
    try:
        while not task.done() and clock() < end and not llm.errored:
            await first_ended(task, timeout_s=min(ALIVE_CHECK_S, left(end, clock)), clock=clock)
        if task.done():
            return task.result()
    except Exception as error:
        raise HalfLoadedError(f"{name} failed: {type(error).__name__}: {error}; restart the engine") from error
    finally:
        task.cancel()
    if llm.errored:
        raise HalfLoadedError(f"{name} failed: the engine's process died; restart the engine")
    raise StepTimeoutError(f"{name} did not end within {deadline_s:.1f} s; restart the engine")


async def check(llm: AsyncLLM, files: WeightFiles, end: float, clock: Clock) -> None:
    """Let every worker check the files before any worker changes its model. `prepare` does that, too.

    Raises:
        EngineError: if a worker refuses them; nothing has changed.
    """
    work = llm.collective_rpc("sluice_check", kwargs=files.arguments())
    replies = await step(llm, "checking the weights", work, left(end, clock), clock)
    refused = next((why for kind, why in replies if kind != "ok"), "")
    if refused:
        raise EngineError(f"version {files.version} was not loaded: {refused}")


async def prepare(llm: AsyncLLM, files: WeightFiles, end: float, clock: Clock, *, patch: bool) -> float:
    """Let the workers build a version while they sample, if they can. Then `load` has little to do.

    Returns:
        Seconds that the slowest worker took. 0 if it failed or is not supported; then `load` does all the work.

    Raises:
        EngineError: if the files were refused; nothing has changed.
    """
    name = "preparing the weights"
    arguments = files.arguments() | {"patch": patch}
    last_check = clock() + LAST_CHECK * left(end, clock)
    replies = await step(llm, name, llm.collective_rpc("sluice_prepare", kwargs=arguments), left(end, clock), clock)
    while all(kind in {"ok", "pending"} for kind, _ in replies):
        if clock() > last_check:
            raise EngineError(f"version {files.version} was not prepared in time; raise rollout.deadlines.apply_s")
        replies = await step(llm, name, llm.collective_rpc("sluice_prepared"), left(end, clock), clock)
        if all(kind == "ok" for kind, _ in replies):
            return max(float(seconds) for _, seconds in replies)
        await clock.sleep(PREPARE_CHECK_S)
    why = dict(replies)
    if "refused" in why:
        raise EngineError(f"version {files.version} was not loaded: {why['refused']}")
    if "err" in why:
        log.warning("preparing a version failed, loading it while paused", version=str(files.version), error=why["err"])
    return 0.0


async def load(llm: AsyncLLM, files: WeightFiles, end: float, clock: Clock) -> float:
    """Load a version into a paused engine and label it.

    Args:
        llm: vLLM's ``AsyncLLM``, paused so that no step runs.
        files: The version to load.
        end: Time by which all calls must have ended.
        clock: Clock of that time.

    Returns:
        Seconds of the copy in the slowest worker that replies.

    Raises:
        EngineError: if the files were refused; the model is untouched.
        HalfLoadedError: if it failed later.
    """
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest  # noqa: PLC0415 - loaded by start()

    request = WeightTransferUpdateRequest(update_info=files.arguments())
    await step(llm, "opening the update", llm.start_weight_update(), left(end, clock), clock)
    await step(llm, "loading the weights", llm.update_weights(request), left(end, clock), clock)
    replies = await step(llm, "asking for the outcome", llm.collective_rpc("sluice_status"), left(end, clock), clock)
    error = next((reply for reply in replies if reply[0] != "ok"), None)
    label = None if error else str(files.version)
    await step(llm, "closing the update", llm.finish_weight_update(label), left(end, clock), clock)
    if error is not None:
        refused = all(kind == "refused" for kind, _ in replies)  # if only some refused, the others have loaded it
        raise (EngineError if refused else HalfLoadedError)(f"version {files.version} was not loaded: {error[1]}")
    return max(float(reply[1]) for reply in replies)


@dataclass(frozen=True, slots=True)
class Difference:
    """Result of a comparison.

    Attributes:
        tensors: Names of the tensors whose live values differ.
        unchecked: Names of tensors whose form in the engine is unknown, such as quantised ones, by kind of layer.
    """

    tensors: list[str]
    unchecked: Mapping[str, list[str]]


async def verify(llm: AsyncLLM, files: WeightFiles, share: float, deadline_s: float) -> Difference:
    """Compare the live weights of every worker with a version's files.

    With several engines behind one front end (data parallel), only the first one's workers count: vLLM returns no other replies.

    Args:
        llm: vLLM's ``AsyncLLM``, sampling or not.
        files: The version.
        share: Fraction of the tensors to compare, above 0; 1 for all. Which ones depends on the version.
        deadline_s: Deadline of the whole comparison, in seconds.

    Raises:
        EngineError: if a worker cannot compare; EngineTimeoutError if the deadline passes.
        HalfLoadedError: if the engine does not reply.
    """
    name, end = "comparing the weights", time.monotonic() + deadline_s
    seed = files.version.epoch * 1_000_003 + files.version.number
    begin = llm.collective_rpc("sluice_verify", kwargs=files.arguments() | {"share": share, "seed": seed})
    replies = await step(llm, name, begin, deadline_s)
    while all(kind in {"ok", "pending"} for kind, _ in replies):
        await asyncio.sleep(SAMPLE_S)
        look = llm.collective_rpc("sluice_verified", kwargs={"budget_s": COMPARE_S})
        replies = await step(llm, name, look, deadline_s)
        if all(kind == "ok" for kind, _ in replies):
            break
        if time.monotonic() > end:
            raise EngineTimeoutError(
                f"version {files.version} could not be compared within {deadline_s:.0f} s; compare a fraction of them"
            )
    failed = next((str(value) for kind, value in replies if kind != "ok"), "")
    if failed:
        raise EngineError(f"version {files.version} could not be compared with the live weights: {failed}")
    found = [value for _, value in replies]
    different = sorted({name for tensors, _ in found for name in tensors})
    kinds = sorted({kind for _, unchecked in found for kind in unchecked})
    return Difference(
        different,
        {kind: sorted({name for _, unchecked in found for name in unchecked.get(kind, ())}) for kind in kinds},
    )
