"""What a receiver is asked, and what it tells about itself."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass

from sluice.rpc import SluiceError
from sluice.versions import Version
from weightsync.policy import Policy
from weightsync.staged import ApplyReport

__all__ = ["ReceiverStatus", "UpdateRequest", "UpdateTimings"]


@dataclass(frozen=True, slots=True)
class UpdateTimings:
    """What one update cost.

    Attributes:
        version: The version that serves now.
        size_bytes: Bytes that were pulled.
        stage_s: Seconds from the decision to take it to its being verified and staged; tokens were produced meanwhile.
        pause_s: Seconds during which no token was sampled.
        apply_s: Seconds of the copy alone.
        total_s: Seconds from the decision to service.
    """

    version: Version
    size_bytes: int
    stage_s: float
    pause_s: float
    apply_s: float
    total_s: float

    def for_log(self) -> dict[str, str | int | float]:
        """Fields of a log line."""
        numbers = {name: round(value, 4) for name, value in asdict(self).items() if name != "version"}
        return {"version": str(self.version), **numbers}


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
