"""Switching the weights of a running vLLM: the sequence of calls, each with a deadline, and what to do when one fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rollout_svc.engines.base import EngineError
from rollout_svc.engines.vllm_types import Llm
from sluice.versions import Version

__all__ = ["HalfLoadedError", "WeightFiles", "load", "phase"]


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """A whole version on disk or in shared memory, and the tensors it must hold."""

    version: Version
    paths: tuple[Path, ...]
    names: Sequence[str]


class HalfLoadedError(EngineError):
    """Loading failed after it had begun: the model may hold parts of two versions and must not sample."""


@asynccontextmanager
async def phase(name: str, deadline_s: float) -> AsyncIterator[None]:
    """Bound one step of an update.

    Raises:
        HalfLoadedError: if it takes longer; the engine's state is then unknown.
    """
    try:
        async with asyncio.timeout(deadline_s):
            yield
    except TimeoutError as error:
        raise HalfLoadedError(f"{name} did not end within {deadline_s:.0f} s; restart the engine") from error


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
