"""Whether a replica makes progress. Pure: the caller passes the time.

A replica hangs if nothing arrives from it, or if its engine makes no step while it has work. A stopped process, a cut cable and
a dead host look the same: silence. A paused replica and one without work make no steps and do not hang.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sluice.v1 import rollout_pb2

_WORKING_STATES = {rollout_pb2.REPLICA_STATE_SERVING, rollout_pb2.REPLICA_STATE_DRAINING}
_WORKING_STAGES = {rollout_pb2.REQUEST_STAGE_QUEUED, rollout_pb2.REQUEST_STAGE_RUNNING}
"""A queued request waits for the engine's next steps: if there are none, the engine hangs as much as with a running one."""


class Loss(StrEnum):
    """Why a replica gets no work and its requests continue elsewhere."""

    DEAD = "dead"
    """Its connection was refused or broke."""
    SILENT = "silent"
    """Nothing arrived from it."""
    STALLED = "stalled"
    """It answers, but its engine makes no step."""


class ListeningClock:
    """Counts the seconds in which this process listened to others.

    While its own event loop stands still, messages wait unread. That time does not count as silence of the others.

    Args:
        tick_s: Seconds between two ticks.
        now: The time, in monotonic seconds.
    """

    def __init__(self, tick_s: float, now: float) -> None:
        self.now = 0.0
        self._most, self._last = 2 * tick_s, now

    def tick(self, now: float) -> float:
        """Add the time since the last tick, or two ticks if it is more. Return the seconds so far."""
        self.now += min(now - self._last, self._most)
        self._last = now
        return self.now


@dataclass(slots=True)
class ReplicaProgress:
    """What was last heard of one replica.

    Attributes:
        limit_s: Seconds without a message, or without a step while there is work, after which it hangs.
        heard_at: When the last message arrived.
        moved_at: When its engine last made a step, or was known to have nothing to do.
    """

    limit_s: float
    heard_at: float
    moved_at: float
    _steps: int = 0

    def polled(self, status: rollout_pb2.GetStatusResponse, now: float) -> None:
        """Note the answer to a status request."""
        has_work = status.state in _WORKING_STATES and status.running + status.queued > 0
        self._note(status.engine_steps, now, has_work=has_work)

    def received(self, chunk: rollout_pb2.StreamChunk, now: float) -> None:
        """Note a message of one of its streams; the first one of a stream says nothing about the engine."""
        if chunk.stage == rollout_pb2.REQUEST_STAGE_UNSPECIFIED:
            self.heard_at = now
            return
        self._note(chunk.engine_steps, now, has_work=chunk.stage in _WORKING_STAGES)

    def _note(self, steps: int, now: float, *, has_work: bool) -> None:
        self.heard_at = now
        # A replica that does not count its steps says 0: then only silence is a sign.
        if steps != self._steps or not has_work or not steps:
            self._steps, self.moved_at = steps, now

    def hang(self, now: float) -> Loss | None:
        """Return how it hangs; None if it does not."""
        if now - self.heard_at > self.limit_s:
            return Loss.SILENT
        return Loss.STALLED if now - self.moved_at > self.limit_s else None


@dataclass(slots=True)
class StreamProgress:
    """What was last heard of one stream. The replica may answer otherwise while this stream is stuck.

    Attributes:
        heard_at: When its last message arrived.
        paused_at: When its request was first found paused; None while it is not.
    """

    heard_at: float
    paused_at: float | None = None

    def received(self, stage: rollout_pb2.RequestStage.ValueType, now: float) -> None:
        """Note a message."""
        self.heard_at = now
        if stage != rollout_pb2.REQUEST_STAGE_PAUSED:
            self.paused_at = None
        elif self.paused_at is None:
            self.paused_at = now

    def why_stuck(self, now: float, progress_s: float, paused_s: float) -> str:
        """Return why it is better made at another replica; empty if it is not."""
        if now - self.heard_at > progress_s:
            return f"sent nothing for {progress_s:g} s"
        if self.paused_at is not None and now - self.paused_at > paused_s:
            return f"has been paused for {paused_s:g} s"
        return ""
