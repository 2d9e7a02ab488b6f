"""Types that facts use: where a payload lies, why something was not trained, where a group stands, and other parts of the state."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from sluice.v1 import journal_pb2 as pb
from sluice.versions import Version


class LedgerError(Exception):
    """A fact does not follow from those before it, or the ledger cannot go back as far as asked."""


class Place(NamedTuple):
    """Where a payload lies: number of the segment, offset of its record in bytes, xxh3-128 (16 bytes; empty: not known)."""

    segment: int
    offset: int
    digest: bytes

    @classmethod
    def from_proto(cls, message: pb.PayloadPlace) -> Place:
        """Read the form that facts have."""
        return cls(message.segment, message.offset, message.digest)

    def to_proto(self) -> pb.PayloadPlace:
        """Write the form that facts have."""
        return pb.PayloadPlace(segment=self.segment, offset=self.offset, digest=self.digest)


class Reason:
    """Why a trajectory or a group was not trained; the trainer's reports bring further reasons."""

    STALE = "STALE"
    MISSING_REWARD = "MISSING_REWARD"
    NO_TOKENS = "NO_TOKENS"
    NO_SIGNAL = "NO_SIGNAL"
    NO_AGENT = "NO_AGENT"
    OVERLONG = "OVERLONG"
    EPISODE_FAILED = "EPISODE_FAILED"
    EPISODE_DEADLINE = "EPISODE_DEADLINE"
    REQUEST_REFUSED = "REQUEST_REFUSED"
    TASK_CHANGED = "TASK_CHANGED"
    JOURNAL_DAMAGED = "JOURNAL_DAMAGED"
    REPORT_LOST = "REPORT_LOST"
    NOT_REPORTED = "NOT_REPORTED"
    RUN_ENDED = "RUN_ENDED"
    QUARANTINED = "QUARANTINED"
    TOO_LONG = "TOO_LONG"
    REWARD_TOO_LARGE = "REWARD_TOO_LARGE"
    REWARDS_UNFIT = "REWARDS_UNFIT"
    BATCH_TOO_LARGE = "BATCH_TOO_LARGE"
    TRAINER_REFUSES = "TRAINER_REFUSES"


class Stage(enum.Enum):
    """Where a live group stands."""

    RUNNING = "running"
    READY = "ready"
    BATCHED = "batched"


class Accepted(NamedTuple):
    """A trajectory that may be trained.

    Attributes:
        place: Where its record lies, or the last part of it.
        after: The part that comes before, as an index of `Group.beginnings` from 1; 0: none.
    """

    trajectory_id: str
    place: Place
    after: int


class Part(NamedTuple):
    """A beginning that records of a group share: where it lies, and the part that it follows, as in `Accepted`."""

    place: Place
    after: int


class Generation(NamedTuple):
    """A replica's answer that was kept; `episodes` are the episodes of its samples."""

    attempt: int
    turn: int
    episodes: tuple[int, ...]
    place: Place


class EndedTurn(NamedTuple):
    """What an environment answered to a turn; `digest` is the digest of its messages."""

    reward: float | None
    digest: bytes


def place_of(accepted: pb.AcceptedTrajectory) -> pb.PayloadPlace:
    """Return where the record of a trajectory lies, or the last part of it."""
    return accepted.rest.place if accepted.HasField("rest") else accepted.place


@dataclass(slots=True)
class SetAside:
    """What was set aside for one reason.

    Attributes:
        trajectories: How many.
        problem: What was wrong with the last of them, and what to do about it.
    """

    trajectories: int
    problem: str


class Redraw(NamedTuple):
    """A task that has to be drawn again."""

    environment: str
    task_id: str
    position: int
    reason: str


class Checkpoint(NamedTuple):
    """A checkpoint that is complete: its name, its version, and the last fact that belongs to it."""

    name: str
    version: Version
    position: int


class Outcome(NamedTuple):
    """What became of the trajectories of a batch that was applied."""

    trained: int
    dropped: Mapping[str, int]
