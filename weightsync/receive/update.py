"""What a receiver is asked, and what it tells about itself."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass

from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.metrics import (
    APPLY_SECONDS,
    PAUSE_SECONDS,
    PULL_SECONDS,
    PULLED_BYTES,
    STAGE_SECONDS,
    UPDATE_SECONDS,
)
from weightsync.receive.policy import Policy
from weightsync.staged import ApplyReport

__all__ = ["ReceiverStatus", "UpdateRequest", "UpdateTimings", "observe_update"]


@dataclass(frozen=True, slots=True)
class UpdateTimings:
    """What one update cost.

    Attributes:
        version: The version that serves now.
        pulled_bytes: Bytes that came over sockets; none where another process of the host had staged the version.
        local_bytes: Bytes that were read from files of this host in their place.
        pull_s: Seconds from the decision to take it to the last byte; tokens were produced meanwhile.
        stage_s: Seconds from the last byte to a verified file in shared memory; tokens were produced meanwhile.
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

    def to_proto(self) -> pb.UpdateTimings:
        """The wire form."""
        message = pb.UpdateTimings(pulled_bytes=self.pulled_bytes)
        parts = {"pull": self.pull_s, "stage": self.stage_s, "pause": self.pause_s, "apply": self.apply_s}
        for name, seconds in {**parts, "total": self.total_s}.items():
            getattr(message, name).FromNanoseconds(int(seconds * 1e9))
        return message

    def for_log(self) -> dict[str, str | int | float]:
        """Fields of a log line."""
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
class ReceiverStatus:
    """Where a replica stands.

    Attributes:
        serving: Version that the engine serves.
        staged_version: Version that is staged and not applied yet.
        newest: Newest version that was announced.
        connected: Whether the weight service answers.
        policy: The policy in force.
        last_error: Last failure, empty if the last update succeeded.
        last_report: What the last apply cost.
        last_update: What the last whole update cost.
    """

    serving: Version
    staged_version: Version | None
    newest: Version | None
    connected: bool
    policy: Policy
    last_error: str
    last_report: ApplyReport | None
    last_update: UpdateTimings | None


class UpdateRequest:
    """A command to take a version; its caller may leave at any time.

    Args:
        version: Which one; None means the newest.
    """

    def __init__(self, version: Version | None) -> None:
        self.version = version
        self.done: asyncio.Future[ApplyReport] = asyncio.get_running_loop().create_future()

    def succeed(self, report: ApplyReport) -> None:
        """Answer the caller, if it is still there."""
        if not self.done.done():
            self.done.set_result(report)

    def fail(self, error: SluiceError) -> None:
        """Answer the caller, if it is still there."""
        if not self.done.done():
            self.done.set_exception(error)
