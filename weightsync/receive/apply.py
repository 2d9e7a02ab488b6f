"""Brings staged versions into the engine, one at a time, and back to the one before if that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from sluice.versions import Version
from weightsync.staged import ApplyReport, StagedAdapter, StagedVersion

__all__ = ["Applier", "ApplyError"]

log = structlog.get_logger(__name__)


class ApplyError(Exception):
    """The engine did not take the version."""


class Applier:
    """Owns what the engine serves.

    Once an apply has begun, the engine samples nothing until a whole version is in. So a failure is answered, each step
    within the deadline: the same version once more, then the version before from its staged file, then `recover`.

    Args:
        apply: Brings a staged version into the engine.
        recover: Brings the engine back to some version, and says which; None leaves it as it is.
        serving: The version that the engine serves at the start.
        deadline_s: Seconds for each step.
        failures: What `apply` and `recover` may raise.
        release: Called with a staged version that no engine needs any more; by default its file is removed.

    Attributes:
        serving: The version that the engine serves.
        weights: The version of its weights; another one where an adapter serves.
        current: Where the weights came from; None if they were not staged here.
        last_report: What the last successful apply cost.
    """

    def __init__(
        self,
        apply: Callable[[StagedVersion], Awaitable[ApplyReport]],
        recover: Callable[[], Awaitable[Version]] | None,
        serving: Version,
        deadline_s: float,
        failures: tuple[type[Exception], ...],
        *,
        release: Callable[[StagedVersion], None] | None = None,
    ) -> None:
        self.serving = self.weights = serving
        self.current: StagedVersion | None = None
        self.last_report: ApplyReport | None = None
        self._apply = apply
        self._recover = recover
        self._deadline_s = deadline_s
        self._failures = failures
        self._release = release or _remove
        self._adapter: StagedAdapter | None = None
        self._lock = asyncio.Lock()

    async def apply(self, staged: StagedVersion) -> ApplyReport:
        """Apply a version; its predecessor's file is removed when it serves.

        Raises:
            ApplyError: if it does not serve; `serving` says what does.
        """
        async with self._lock:
            try:
                report = await self._twice(staged)
            except ApplyError:
                await self._fall_back()
                raise
            previous, self.current = self.current, staged
            self.serving = self.weights = staged.version
            self.last_report = report
            if previous is not None and previous.path != staged.path:
                self._release(previous)
            return report

    async def apply_adapter(
        self, staged: StagedAdapter, apply: Callable[[StagedAdapter], Awaitable[ApplyReport]]
    ) -> ApplyReport:
        """Let an adapter serve beside the weights, which stay as they are; a failure leaves what served before.

        Raises:
            ApplyError: if it does not serve.
        """
        async with self._lock:
            report = await self._bounded(staged.version, apply(staged))
            self.serving = staged.version
            self._adapter = staged
            self.last_report = report
            return report

    async def run_exclusive(self, action: Callable[[], Awaitable[Version]]) -> Version:
        """Run what changes the engine by other means while no version is applied."""
        async with self._lock:
            self.serving = await action()
            if self._adapter is not None and self._adapter.version == self.serving:
                return self.serving  # an engine that was started again, on the weights and the adapter that it had
            self.weights = self.serving
            if self.current is not None and self.current.version != self.serving:
                self._drop_current()
            return self.serving

    async def _twice(self, staged: StagedVersion) -> ApplyReport:
        try:
            return await self._once(staged)
        except ApplyError as error:
            log.warning("apply failed, trying once more", version=str(staged.version), error=str(error))
        return await self._once(staged)

    async def _once(self, staged: StagedVersion) -> ApplyReport:
        return await self._bounded(staged.version, self._apply(staged))

    async def _bounded(self, version: Version, work: Awaitable[ApplyReport]) -> ApplyReport:
        try:
            async with asyncio.timeout(self._deadline_s):
                return await work
        except TimeoutError as error:
            raise ApplyError(f"version {version} was not applied within {self._deadline_s:g} s") from error
        except self._failures as error:
            raise ApplyError(f"version {version} was not applied: {error}") from error

    async def _fall_back(self) -> None:
        if self.current is not None:
            try:
                await self._once(self.current)
            except ApplyError as error:
                log.warning("the version before does not apply either", error=str(error))
            else:
                return
        if self._recover is None:
            return
        try:
            async with asyncio.timeout(self._deadline_s):
                self.serving = self.weights = await self._recover()
        except TimeoutError:
            log.exception("the engine did not come back in time", deadline_s=self._deadline_s)
        except self._failures:
            log.exception("the engine did not come back")
        else:
            self._drop_current()

    def _drop_current(self) -> None:
        dropped, self.current = self.current, None
        if dropped is not None:
            self._release(dropped)


def _remove(staged: StagedVersion) -> None:
    staged.path.unlink(missing_ok=True)
