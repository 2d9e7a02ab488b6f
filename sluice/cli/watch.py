"""Follows a run through OrchestratorService, across restarts of its server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from sluice.cli.progress import RunProgress
from sluice.client import OrchestratorClient
from sluice.config import SecurityConfig
from sluice.rpc import SluiceError

__all__ = ["follow_run"]

_AGAIN_S = 0.5
"""Pause before the next attempt at a server that is not there, in seconds; the supervisor bounds how long that lasts."""


async def follow_run(
    target: str, security: SecurityConfig, run: str, progress: RunProgress, on_step: Callable[[], None]
) -> None:
    """Keep `progress` up to date until the run has ended.

    Args:
        target: Address of the orchestrator.
        security: Tokens and TLS.
        run: Name of the run.
        progress: Written to.
        on_step: Called after each new step.
    """
    while not progress.ended:
        async with OrchestratorClient(target, security) as orchestrator:
            with contextlib.suppress(SluiceError):
                progress.describe(await orchestrator.run(run))
                async for answer in orchestrator.watch(run):
                    if progress.apply(answer.event):
                        on_step()
        await asyncio.sleep(_AGAIN_S)
