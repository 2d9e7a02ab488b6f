"""Whether a replica makes progress. Pure: the caller passes the time.

A replica hangs if nothing arrives from it, or if its engine makes no step while it has work. A stopped process, a cut cable and
a dead host look the same: silence. A paused replica and a replica without work make no steps and do not hang. A replica that switches to
other weights makes no steps either. That has a separate limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from sluice.v1 import rollout_pb2

_WORKING_STATES = {rollout_pb2.REPLICA_STATE_SERVING, rollout_pb2.REPLICA_STATE_DRAINING}
_WORKING_STAGES = {rollout_pb2.REQUEST_STAGE_QUEUED, rollout_pb2.REQUEST_STAGE_RUNNING}
"""Stages of requests that need steps of the engine. A queued request waits for the next step, so it counts as work, too."""


class Loss(StrEnum):
    """Why a replica gets no work and its requests continue elsewhere."""

    DEAD = "dead"
    """Its connection was refused or broke."""
    SILENT = "silent"
    """Nothing arrived from it."""
    STALLED = "stalled"
    """It answers, but its engine makes no step."""
    SWITCHING = "switching"
    """It answers, but does not finish a switch to other weights."""


class Patience(NamedTuple):
    """How long a replica and its streams may do nothing, in seconds.

    Attributes:
        progress_s: Without a message, or without a step of the engine while there is work.
        switch_s: Without a step while it switches to other weights.
        paused_s: While a request is paused.
    """

    progress_s: float
    switch_s: float
    paused_s: float


class ListeningClock:
    """Counts the seconds in which this process listened to others.

    While the event loop of this process is blocked, messages wait unread. That time does not count as silence of the others.

    Args:
        tick_s: Seconds between two ticks.
        now: Monotonic time in seconds.
    """

    def __init__(self, tick_s: float, now: float) -> None:
        self.now = 0.0
        self._most, self._last = 2 * tick_s, now

    def tick(self, now: float) -> float:
        """Add the time since the last tick, at most two ticks. Return the seconds so far."""
        self.now += min(now - self._last, self._most)
        self._last = now
        return self.now


@dataclass(slots=True)
class ReplicaProgress:
    """The latest signs of progress of one replica.

    Attributes:
        heard_at: When the last message arrived.
        moved_at: When its engine last made a step, or last had nothing to do.
        switching_at: Since when it has been switching to other weights without a step; None while it is not switching.
    """

    heard_at: float
    moved_at: float
    switching_at: float | None = None
    _steps: int = 0

    def polled(self, status: rollout_pb2.GetStatusResponse, now: float) -> None:
        """Note the answer to a status request."""
        state = status.engine_state or status.state
        has_work = state in _WORKING_STATES and status.running + status.queued > 0
        switches = state == rollout_pb2.REPLICA_STATE_SWITCHING
        self._note(status.engine_steps, now, has_work=has_work, switches=switches)

    def received(self, chunk: rollout_pb2.StreamChunk, now: float) -> None:
        """Note a message of one of its streams; the first one of a stream says nothing about the engine."""
        if chunk.stage == rollout_pb2.REQUEST_STAGE_UNSPECIFIED:
            self.heard_at = now
            return
        switches = chunk.stage == rollout_pb2.REQUEST_STAGE_SWITCHING
        self._note(chunk.engine_steps, now, has_work=chunk.stage in _WORKING_STAGES, switches=switches)

    def _note(self, steps: int, now: float, *, has_work: bool, switches: bool) -> None:
        self.heard_at = now
        if not switches:
            self.switching_at = None
        elif self.switching_at is None or steps != self._steps:
            self.switching_at = now
        # A replica that does not count its steps reports 0. Then only silence shows that it hangs.
        if steps != self._steps or not has_work or not steps:
            self._steps, self.moved_at = steps, now

    def hang(self, now: float, patience: Patience, step_s: float) -> Loss | None:
        """Return the way in which it hangs; None if it does not hang. One step of its engine may take `step_s`."""
        if now - self.heard_at > patience.progress_s:
            return Loss.SILENT
        if self.switching_at is not None and now - self.switching_at > patience.switch_s:
            return Loss.SWITCHING
        return Loss.STALLED if now - self.moved_at > step_s else None


@dataclass(slots=True)
class StreamProgress:
    """The latest signs of progress of one stream. It may be stuck while the replica answers other calls.

    Attributes:
        heard_at: When its last message arrived.
        stage: Stage of its request in that message.
        stage_at: Since when the request has been in this stage.
    """

    heard_at: float
    stage: rollout_pb2.RequestStage.ValueType = rollout_pb2.REQUEST_STAGE_UNSPECIFIED
    stage_at: float = 0.0

    def received(self, stage: rollout_pb2.RequestStage.ValueType, now: float) -> None:
        """Note a message."""
        self.heard_at = now
        if stage != self.stage:
            self.stage, self.stage_at = stage, now

    def silent(self, now: float, patience: Patience) -> bool:
        """Return whether the stream has been silent for too long."""
        return now - self.heard_at > patience.progress_s

    def waits(self, now: float, patience: Patience) -> bool:
        """Return whether it has waited so long for the end of a pause or a switch that another replica should take it."""
        waited_s = now - self.stage_at
        match self.stage:
            case rollout_pb2.REQUEST_STAGE_PAUSED:
                return waited_s > patience.paused_s
            case rollout_pb2.REQUEST_STAGE_SWITCHING:
                return waited_s > patience.switch_s
        return False
