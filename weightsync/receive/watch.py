"""Watches a run for new versions, by a stream that is opened again whenever it breaks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import grpc
import structlog

from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import Version
from weightsync.backoff import Backoff

__all__ = ["VersionWatch"]

_SILENCE_S = 25.0
"""The contract promises a sign of life every 10 s; two and a half of them missing is a dead stream."""

_STREAM_S = 3600.0
"""A stream is renewed after this time, so that no call is without a deadline."""

log = structlog.get_logger(__name__)

_REMEDY = "start it, or see peers.weightsync (of a relay: weightsync.upstream) and the tokens and certificates"


class VersionWatch:
    """Watches one run.

    Args:
        stub: The service.
        run: ``runs/{run}``.
        replica: Name of the watching replica or relay.
        changed: Called after each announcement.
        hurry: Set when the stub leads elsewhere from now on: ends the pause between attempts. None: the stub never changes.
        backoff: The pauses between attempts; None takes those of `Backoff`.

    Attributes:
        newest: Manifest of the newest version that was announced.
        connected: Whether the stream is alive.
    """

    def __init__(
        self,
        stub: weightsync_pb2_grpc.WeightDeliveryServiceAsyncStub,
        run: str,
        replica: str,
        changed: Callable[[], None],
        *,
        hurry: asyncio.Event | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        self._backoff = backoff or Backoff()
        self.newest: pb.Manifest | None = None
        self.connected = False
        self._stub = stub
        self._run = run
        self._replica = replica
        self._changed = changed
        self._hurry = hurry or asyncio.Event()

    @property
    def newest_version(self) -> Version | None:
        """Return the newest version that was announced, None if there was none."""
        return None if self.newest is None else Version.from_proto(self.newest.version)

    async def run_forever(self) -> None:
        """Watch until cancelled, and open the stream again whenever it breaks."""
        backoff, told = self._backoff, False
        while True:
            try:
                await self._watch_once()
                reason = "the stream ended"
            except grpc.aio.AioRpcError as error:
                reason = str(SluiceError.from_rpc(error))
            except TimeoutError:
                reason = f"no sign of life for {_SILENCE_S:g} s"
            if self.connected:
                backoff.succeed()
                told = False
                if not self._hurry.is_set():
                    log.info("weight service lost, the version in service stays", reason=reason)
            elif backoff.at_longest and not told:
                told = True
                log.warning("no weight service answers, it is asked on", run=self._run, reason=reason, remedy=_REMEDY)
            self.connected = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff.fail()):
                    await self._hurry.wait()
                    backoff.succeed()
            self._hurry.clear()

    async def _watch_once(self) -> None:
        known = self.newest_version
        request = pb.WatchVersionsRequest(
            run=self._run, replica=self._replica, known=None if known is None else known.to_proto()
        )
        call = self._stub.WatchVersions(request, timeout=_STREAM_S)
        try:
            while True:
                async with asyncio.timeout(_SILENCE_S):
                    response = await call.read()
                if not isinstance(response, pb.WatchVersionsResponse):  # the end of the stream
                    return
                self.connected = True
                if response.HasField("manifest"):
                    self.newest = response.manifest
                    self._changed()
        finally:
            call.cancel()
