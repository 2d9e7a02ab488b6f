"""New weights on their way to weight sync, in the background: one push in flight, one version waiting behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from time import monotonic

import grpc
import structlog
import torch

from sluice.rpc import SluiceError
from sluice.versions import Version
from weightsync.publisher import PushReport, WeightPublisher

__all__ = ["Publication"]

RETRIED = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""Failures of a push that another attempt may cure; a refused version stays refused."""

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0
"""Pauses between attempts double from the first to the longest."""

log = structlog.get_logger(__name__)


class Publication:
    """Publishes the versions of one epoch in order.

    Args:
        publisher: Pushes one version.
        deadline_s: Seconds for one version, retries included.
    """

    def __init__(self, publisher: WeightPublisher, deadline_s: float) -> None:
        self._publisher = publisher
        self._deadline_s = deadline_s
        self._waiting: tuple[Version, Mapping[str, torch.Tensor]] | None = None
        self._offered = asyncio.Event()
        self._free = asyncio.Event()
        self._free.set()
        self.published: Version | None = None
        self.last_push: PushReport | None = None

    def offer(self, version: Version, weights: Mapping[str, torch.Tensor]) -> None:
        """Publish a version as soon as the push before it has ended.

        Raises:
            RuntimeError: if a version waits already; await `room` first.
        """
        if self._waiting is not None:
            raise RuntimeError(f"version {self._waiting[0]} still waits to be published")
        self._waiting = (version, weights)
        self._free.clear()
        self._offered.set()

    async def room(self) -> None:
        """Return when no version waits. `run` ends the wait by its deadline, if need be with an error."""
        await self._free.wait()

    async def run(self) -> None:
        """Publish what is offered, until cancelled.

        Raises:
            SluiceError: if a version cannot be published in time.
        """
        while True:
            await self._offered.wait()
            self._offered.clear()
            await self._publish_offered()

    async def _publish_offered(self) -> None:
        """Apart from `run`, so that nothing holds a copy of the weights while it waits for the next ones."""
        if self._waiting is not None:
            offered, self._waiting = self._waiting, None
            self._free.set()
            await self.publish(*offered)

    async def publish(self, version: Version, weights: Mapping[str, torch.Tensor]) -> None:
        """Push one version, again and again until the deadline.

        Raises:
            SluiceError: what the last attempt failed with.
        """
        deadline = monotonic() + self._deadline_s
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                self.last_push = await self._publisher.push(version, weights, deadline_s=deadline - monotonic())
            except SluiceError as error:
                if error.code not in RETRIED or monotonic() + pause_s >= deadline:
                    raise _unpublished(version, error, self._deadline_s) from error
                log.warning("push failed, retrying", version=str(version), error=str(error), pause_s=pause_s)
            else:
                self.published = version
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _unpublished(version: Version, error: SluiceError, deadline_s: float) -> SluiceError:
    return SluiceError(
        error.code,
        error.reason,
        f"version {version} could not be published within {deadline_s:g} s: {error.message}"
        " (is weightsync up at peers.weightsync?)",
    )
