"""Keeps an engine running: notices its death, starts it again on the version it served, and says so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, runtime_checkable

import structlog

from rollout_svc.engines.base import EngineError, InferenceEngine
from sluice.rpc import SluiceError
from sluice.versions import Version

__all__ = ["EngineSupervisor"]

LOOK_S = 0.25
"""Time between two looks at the engine, in seconds; reading its status is cheap."""

BACKOFF_S = 1.0

log = structlog.get_logger()


@runtime_checkable
class Restartable(Protocol):
    """An engine with processes of its own, which can die without us."""

    async def restart(self) -> Version:
        """Build the engine anew on the version last applied, or on the base."""
        ...


class EngineSupervisor:
    """One engine, watched.

    Args:
        engine: A started engine.
        restarts: Times in a row that it is started again.
        on_change: Called with whether the engine serves.
    """

    def __init__(self, engine: InferenceEngine, restarts: int, on_change: Callable[[bool], object]) -> None:
        self.current = engine
        self.restarts = 0
        """Times that it was started again."""
        self.failures = 0
        """Deaths and failed starts since it was last seen alive."""
        self._allowed = restarts
        self._on_change = on_change
        self._recovering = False

    @property
    def recovering(self) -> bool:
        """Whether the engine is dead and not back yet."""
        return self._recovering

    @property
    def serving(self) -> InferenceEngine:
        """The engine, if it can take requests.

        Raises:
            SluiceError: UNAVAILABLE while it is started again.
        """
        if self._recovering or not self.current.status().healthy:
            raise SluiceError.unavailable("ENGINE_RECOVERING", "the engine is being started again; retry", BACKOFF_S)
        return self.current

    async def watch_forever(self, restart: Callable[[Callable[[], Awaitable[Version]]], Awaitable[Version]]) -> None:
        """Look at the engine and start it again when it died.

        Args:
            restart: Runs the restart that it is given while no version is applied.

        Raises:
            EngineError: if it died more often in a row than allowed.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            if self.current.status().healthy:
                self.failures = 0
                continue
            self.failures += 1
            if self.failures > self._allowed or not isinstance(self.current, Restartable):
                raise EngineError(
                    f"the engine died {self.failures} times in a row; see the log above for the first cause"
                )
            self._recovering = True
            self._on_change(False)
            log.error("engine died, starting it again", attempt=self.failures)
            try:
                version = await restart(self.current.restart)
            except EngineError as error:
                log.error("engine did not start", error=str(error))  # noqa: TRY400 - the message says it all
                version = self.current.status().version
                if not self.current.status().healthy:  # it may serve the base where it could not load what it served
                    await asyncio.sleep(BACKOFF_S * self.failures)
                    continue
            self.restarts += 1
            self._recovering = False
            self._on_change(True)
            log.info("engine serves again", version=str(version))
