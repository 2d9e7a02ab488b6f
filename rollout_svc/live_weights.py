"""Asks an engine whether it computes with a version."""

from __future__ import annotations

import time
from typing import Literal

import structlog

from rollout_svc.engines.base import EngineError, InferenceEngine
from weightsync.staged import StagedVersion

__all__ = ["check_live"]

_SHARES = {"sample": 0.1, "full": 1.0}
"""Part of the tensors that is compared."""

log = structlog.get_logger()


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
