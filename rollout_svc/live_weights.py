"""What the service asks an engine about its weights: whether it computes with a version, and what it reads of one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import structlog

from rollout_svc.engines.base import EngineError, InferenceEngine
from weightsync.staged import Selection, StagedVersion

__all__ = ["check_live", "selections_of"]

_SHARES = {"sample": 0.1, "full": 1.0}
"""Part of the tensors that is compared."""

log = structlog.get_logger()


@runtime_checkable
class ReadsParts(Protocol):
    """An engine with several processes, each of which reads only parts of a version."""

    async def read_plans(self) -> list[Selection]:
        """What each process reads of every tensor."""
        ...


async def check_live(engine: InferenceEngine, staged: StagedVersion, extent: Literal["off", "sample", "full"]) -> None:
    """Compare what an engine computes with, with the version that it was given last.

    Args:
        engine: The engine; it goes on sampling.
        staged: The version.
        extent: How much of it.

    Raises:
        EngineError: naming what differs. The engine's next `apply` of the version loads it anew.
    """
    if extent == "off":
        return
    begun = time.perf_counter()
    different = await engine.verify_weights(staged, _SHARES[extent])
    seconds = round(time.perf_counter() - begun, 4)
    if different:
        log.error("live weights differ", version=str(staged.version), tensors=len(different), first=different[0])
        raise EngineError(
            f"the engine does not compute with version {staged.version}: {different[:3]} ({len(different)}) differ from its"
            " files; if it happens again, look for failing memory"
        )
    log.info("live weights verified", version=str(staged.version), extent=extent, seconds=seconds)


async def selections_of(engine: InferenceEngine, wanted: Literal["auto", "off"]) -> Sequence[Selection]:
    """What the engine's processes read of a version; empty where that is not asked for or not known."""
    if wanted == "off" or not isinstance(engine, ReadsParts):
        return ()
    try:
        return await engine.read_plans()
    except EngineError as error:
        log.warning("pulling whole versions", reason=str(error))
        return ()
