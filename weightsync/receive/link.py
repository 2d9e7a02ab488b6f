"""The small messages between a receiver and the weight service: announcements of versions come in, reports go out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import grpc
import structlog

from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import Version
from weightsync.backoff import Backoff
from weightsync.metrics import (
    APPLY_SECONDS,
    PAUSE_SECONDS,
    PULL_SECONDS,
    PULLED_BYTES,
    STAGE_SECONDS,
    UPDATE_SECONDS,
)
from weightsync.receive.pull import PullCost

__all__ = ["Reporter", "UpdateTimings", "VersionWatch", "observe_update"]

_SILENCE_S = 25.0
"""Silence in seconds after which a stream counts as dead; the contract promises a heartbeat every 10 s."""

_STREAM_S = 3600.0
"""Deadline of one stream in seconds; it is opened again after that."""

_NO_RUN_S = 0.5
"""Seconds between two questions about a run that nothing was pushed to: the first version is taken this much later at most."""

_REMEDY = "start it, or see peers.weightsync (of a relay: weightsync.upstream) and the tokens and certificates"

_REPORT_DEADLINE_S = 10.0
_SHARE_OF_LEASE = 1 / 3
"""A lease is renewed after a third of it, so that one lost report does not end it."""

log = structlog.get_logger(__name__)


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
        connected: Whether the service answers: the stream is alive, or nothing was pushed to the run yet.
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
        self._warned = False
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
        """Watch until cancelled, and open the stream again whenever it breaks.

        A run that nothing was pushed to is one without a version yet: the service is there, and is asked again soon.
        """
        while True:
            try:
                await self._watch_once()
                pause_s = self._lost("the stream ended")
            except grpc.aio.AioRpcError as error:
                failure = SluiceError.from_rpc(error)
                pause_s = self._no_version() if failure.reason == "NO_SUCH_RUN" else self._lost(str(failure))
            except TimeoutError:
                pause_s = self._lost(f"no sign of life for {_SILENCE_S:g} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._hurry.wait()
                    self._backoff.succeed()
            self._hurry.clear()

    def _no_version(self) -> float:
        """Note that the service answers and knows no such run yet. Return the pause before the next attempt, in seconds."""
        if not self.connected:
            log.info("weight service reached; waiting for the trainer's first version", run=self._run)
        self._backoff.succeed()
        self._warned, self.connected = False, True
        return _NO_RUN_S

    def _lost(self, reason: str) -> float:
        """Note that the stream ended or did not begin. Return the pause before the next attempt, in seconds."""
        if self.connected:
            self._backoff.succeed()
            self._warned = False
            if not self._hurry.is_set():
                log.info("weight service unreachable; the version in service stays", reason=reason)
        elif self._backoff.at_longest and not self._warned:
            self._warned = True
            log.warning("weight service unreachable; retrying", run=self._run, reason=reason, remedy=_REMEDY)
        self.connected = False
        return self._backoff.fail()

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


@dataclass(frozen=True, slots=True)
class UpdateTimings:
    """The cost of one update.

    Attributes:
        version: The version that serves now.
        pulled_bytes: Bytes that came over sockets; none where another process of the host had staged the version.
        local_bytes: Bytes that were read from files of this host in their place.
        pull_s: Seconds from the decision to take it to the last byte; the engine generates meanwhile.
        stage_s: Seconds from the last byte to a verified file in shared memory; the engine generates meanwhile.
        pause_s: Seconds during which no token was sampled.
        apply_s: Seconds of the copy alone.
        total_s: Seconds from the decision to service.
    """

    version: Version
    pulled_bytes: int = 0
    local_bytes: int = 0
    pull_s: float = 0.0
    stage_s: float = 0.0
    pause_s: float = 0.0
    apply_s: float = 0.0
    total_s: float = 0.0

    @classmethod
    def of_pull(cls, version: Version, cost: PullCost, started: float) -> UpdateTimings:
        """Return the timings of a version that was just pulled and staged, begun at `time.perf_counter` `started`."""
        return cls(
            version,
            pulled_bytes=cost.pulled_bytes,
            local_bytes=cost.local_bytes,
            pull_s=cost.last_byte_at - started,
            stage_s=time.perf_counter() - cost.last_byte_at,
        )

    def to_proto(self) -> pb.UpdateTimings:
        """Return the message of the contract."""
        message = pb.UpdateTimings(pulled_bytes=self.pulled_bytes)
        parts = {"pull": self.pull_s, "stage": self.stage_s, "pause": self.pause_s, "apply": self.apply_s}
        for name, seconds in {**parts, "total": self.total_s}.items():
            getattr(message, name).FromNanoseconds(int(seconds * 1e9))
        return message

    def for_log(self) -> dict[str, str | int | float]:
        """Return the fields of a log line."""
        numbers = {name: round(value, 4) for name, value in asdict(self).items() if name != "version"}
        return {"version": str(self.version), **numbers}


def observe_update(timings: UpdateTimings) -> None:
    """Count an update in the metrics."""
    PULL_SECONDS.observe(timings.pull_s)
    STAGE_SECONDS.observe(timings.stage_s)
    PAUSE_SECONDS.observe(timings.pause_s)
    APPLY_SECONDS.observe(timings.apply_s)
    UPDATE_SECONDS.observe(timings.total_s)
    PULLED_BYTES.labels("socket").inc(timings.pulled_bytes)
    PULLED_BYTES.labels("file").inc(timings.local_bytes)


@dataclass(frozen=True, slots=True)
class _Report:
    phase: pb.ReplicaPhase.ValueType
    version: Version | None
    error: str = ""
    timings: UpdateTimings | None = None


class Reporter:
    """Reports for one replica. Only the last report matters: the next one replaces a report that was not sent yet.

    Args:
        stub: The service.
        run: ``runs/{run}``.
        replica: The replica's name.
        serving: Returns the version that the engine serves.
    """

    def __init__(
        self,
        stub: weightsync_pb2_grpc.WeightDeliveryServiceAsyncStub,
        run: str,
        replica: str,
        serving: Callable[[], Version],
    ) -> None:
        self._stub = stub
        self._run = run
        self._replica = replica
        self._serving = serving
        self._last = _Report(pb.REPLICA_PHASE_SERVING, None)
        self._news = asyncio.Event()
        self._renew_s = 10.0

    def tell(
        self,
        phase: pb.ReplicaPhase.ValueType,
        version: Version | None = None,
        error: str = "",
        timings: UpdateTimings | None = None,
    ) -> None:
        """Report soon, without waiting. The version is the one that the phase is about; None stands for the one that serves."""
        self._last = _Report(phase, version, error, timings)
        self._news.set()

    async def run_forever(self) -> None:
        """Send reports until cancelled; one that cannot be sent is sent again at the next renewal."""
        while True:
            self._news.clear()
            try:
                await self._send(self._last)
            except grpc.aio.AioRpcError as error:
                log.debug("report not sent", code=error.code().name)
            try:
                async with asyncio.timeout(self._renew_s):
                    await self._news.wait()
            except TimeoutError:
                continue

    async def _send(self, report: _Report) -> None:
        serving = self._serving()
        request = pb.ReportVersionRequest(
            run=self._run,
            replica=self._replica,
            version=(report.version or serving).to_proto(),
            phase=report.phase,
            error=report.error,
            serving=serving.to_proto(),
        )
        if report.timings is not None:
            request.timings.CopyFrom(report.timings.to_proto())
            request.stage_time.FromNanoseconds(int((report.timings.pull_s + report.timings.stage_s) * 1e9))
            request.pause_time.CopyFrom(request.timings.pause)
        response = await self._stub.ReportVersion(request, timeout=_REPORT_DEADLINE_S)
        self._renew_s = max(0.1, response.lease.ToTimedelta().total_seconds() * _SHARE_OF_LEASE)
