"""Watches the engine and restarts it on the version that it served if it dies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

import structlog

from rollout_svc.engines.adapters import LoraEngine
from rollout_svc.engines.base import EngineError, InferenceEngine, UnfitVersionError
from sluice.rpc import SluiceError
from sluice.versions import Version
from weightsync.staged import ApplyError, ApplyReport, HeldVersions, StagedAdapter, StagedVersion, VersionRefusedError

CHECK_S = 0.25
"""Seconds between two checks of the engine; reading its status is cheap."""

BACKOFF_S = 1.0

log = structlog.get_logger()


class EngineSupervisor:
    """Restarts one engine whenever it dies. For the receiver of weights it is the engine (`weightsync.staged.Engine`).

    Args:
        engine: A started engine.
        restarts: Maximum number of restarts in a row.
        on_change: Called with True when the engine serves again, with False when it died.
    """

    def __init__(self, engine: InferenceEngine, restarts: int, on_change: Callable[[bool], object]) -> None:
        self.current = engine
        self.restarts = 0
        """Number of restarts."""
        self.failures = 0
        """Deaths and failed starts since it was last healthy."""
        self._allowed = restarts
        self._on_change = on_change
        self._recovering = False
        self._applied = asyncio.Event()  # set, and replaced, when another version serves

    @property
    def recovering(self) -> bool:
        """Return whether the engine died and has not been restarted yet."""
        return self._recovering

    @property
    def ready(self) -> InferenceEngine:
        """Return the engine if it can take requests.

        Raises:
            SluiceError: UNAVAILABLE while it restarts.
        """
        if self.held() is None:
            raise SluiceError.unavailable("ENGINE_RECOVERING", "the engine restarts; retry", BACKOFF_S)
        return self.current

    # --- weights --------------------------------------------------------------------------------------------------

    @property
    def serves_adapters(self) -> bool:
        """Return whether the engine serves LoRA adapters."""
        return isinstance(self.current, LoraEngine) and self.current.lora_limits is not None

    @property
    def lora(self) -> LoraEngine:
        """Return the engine if it serves adapters and can take requests.

        Raises:
            SluiceError: FAILED_PRECONDITION if it serves none; UNAVAILABLE while it restarts.
        """
        engine = self.ready
        if not isinstance(engine, LoraEngine) or engine.lora_limits is None:
            raise SluiceError.failed_precondition(
                "NO_ADAPTERS", "this replica serves no adapters: start it with rollout.lora.enabled = true"
            )
        return engine

    def held(self) -> HeldVersions | None:
        """Return what the engine holds; None while it restarts and cannot say."""
        return None if self._recovering else self.current.held()

    async def apply(self, staged: StagedVersion) -> ApplyReport:
        """Switch the engine to a staged version.

        Raises:
            VersionRefusedError: if it does not fit the model or the settings.
            ApplyError: if it does not serve.
        """
        with _apply_errors(staged.version):
            return await self._tell(self.ready.apply(staged))

    async def apply_adapter(self, staged: StagedAdapter) -> ApplyReport:
        """Let new requests run on an adapter.

        Raises:
            VersionRefusedError: if it does not fit the model or the settings.
            ApplyError: if it does not serve.
        """
        with _apply_errors(staged.version):
            return await self._tell(self.lora.apply_adapter(staged))

    async def _tell(self, applying: Awaitable[ApplyReport]) -> ApplyReport:
        try:
            return await applying
        finally:
            self._applied.set()
            self._applied = asyncio.Event()

    async def until_serving(self, version: Version, most_s: float) -> None:
        """Wait until the engine serves this version or a newer one, or so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                while self.current.status().version < version:
                    await self._applied.wait()

    # --- restarts -------------------------------------------------------------------------------------------------

    async def watch_forever(self, restart: Callable[[Callable[[], Awaitable[Version]]], Awaitable[Version]]) -> None:
        """Check the engine regularly and restart it when it died.

        Args:
            restart: Runs the given restart while no version is being applied.

        Raises:
            EngineError: if it died more often in a row than it may be restarted.
        """
        while True:
            await asyncio.sleep(CHECK_S)
            if self.current.held() is not None:
                self.failures = 0
                continue
            self.failures += 1
            if self.failures > self._allowed:
                raise EngineError(
                    f"the engine died {self.failures} times in a row; see the log above for the first cause"
                )
            self._recovering = True
            self._on_change(False)
            log.error("engine died; restarting it", attempt=self.failures)
            try:
                version = await restart(self.current.restart)
            except EngineError as error:
                log.error("engine did not restart", error=str(error))  # noqa: TRY400 - the message says it all
                version = self.current.status().version
                if self.current.held() is None:  # it may serve the base model if it could not load the version
                    await asyncio.sleep(BACKOFF_S * self.failures)
                    continue
            self.restarts += 1
            self._recovering = False
            self._on_change(True)
            log.info("engine serves again", version=str(version))


@contextmanager
def _apply_errors(version: Version) -> Iterator[None]:
    """Turn an engine's failure into the receiver's ApplyError."""
    try:
        yield
    except UnfitVersionError as error:
        raise VersionRefusedError(f"version {version} was not applied: {error}") from error
    except (EngineError, SluiceError) as error:
        raise ApplyError(f"version {version} was not applied: {error}") from error
