"""New weights on their way to weight sync, in the background: one version at a time, repeated until its deadline."""

from __future__ import annotations

import asyncio
from time import monotonic

import grpc
import structlog

from sluice.rpc import SluiceError
from sluice.versions import Version
from trainer_svc.service.policy_publisher import Offer, PolicyPublisher
from weightsync.publisher import PushReport

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

    One version is on its way at a time, since the publisher's copy of the weights holds one: the next is encoded when
    `idle` returned. Training goes on meanwhile.

    Args:
        publisher: Takes versions out of the policy.
        deadline_s: Seconds for one version, retries included.
    """

    def __init__(self, publisher: PolicyPublisher, deadline_s: float) -> None:
        self.publisher = publisher
        self._deadline_s = deadline_s
        self._offered: asyncio.Queue[Offer] = asyncio.Queue(maxsize=1)
        self._idle = asyncio.Event()
        self._idle.set()
        self.published: Version | None = None
        self.last_push: PushReport | None = None

    def offer(self, offered: Offer) -> None:
        """Publish a version in the background.

        Raises:
            RuntimeError: if another one is on its way; await `idle` first.
        """
        if not self._idle.is_set():
            raise RuntimeError(f"version {offered.version} was offered while another is published")
        self._idle.clear()
        self._offered.put_nowait(offered)

    async def idle(self) -> None:
        """Return when no version is on its way. `run` ends the wait by its deadline, if need be with an error."""
        await self._idle.wait()

    async def run(self) -> None:
        """Publish what is offered, until cancelled.

        Raises:
            SluiceError: if a version cannot be published in time.
        """
        while True:
            await self.publish(await self._offered.get())
            self._idle.set()

    async def publish(self, offered: Offer) -> None:
        """Push one version, again and again until the deadline.

        Raises:
            SluiceError: what the last attempt failed with.
        """
        deadline = monotonic() + self._deadline_s
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                self.last_push = await offered.push(deadline_s=deadline - monotonic())
            except SluiceError as error:
                if error.code not in RETRIED or monotonic() + pause_s >= deadline:
                    raise _unpublished(offered.version, error, self._deadline_s) from error
                log.warning("push failed, retrying", version=str(offered.version), error=str(error), pause_s=pause_s)
            else:
                self.published = offered.version
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
