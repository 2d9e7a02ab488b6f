"""The matrix: at which phase of a version's way, and who is killed there."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.faults.points import Point

__all__ = ["CELLS", "Cell"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One fault.

    Attributes:
        phase: Where on a version's way.
        victim: Who is killed: "trainer", "service", "relay" or "engine".
        point: The place in the code.
        at: The program whose code that is; the victim is killed when this one is there.
        relay: Whether the engine is fed by a relay.
        form: Which form the version has: "delta", or "anchor" for the first of a trainer's life.
    """

    phase: str
    victim: str
    point: Point
    at: str = ""
    relay: bool = False
    form: str = "delta"

    @property
    def id(self) -> str:
        """Name of the cell."""
        return f"{self.victim}-{self.phase}" + ("-anchor" if self.form == "anchor" else "")


_PUSH = Point("weightsync.incoming:IncomingShard.write", nth=4)
_COMMIT = Point("os:rename", match=r"/v\d+\.\d+$")
_COMMITTED = Point("os:rename", "after", match=r"/v\d+\.\d+$")
_WATCH = Point("weightsync.runs:Run.publish", "after")
_PULL = Point("weightsync.chunks:check_chunk", nth=4)
_STAGE = Point("weightsync.staging:StagingFile.finish")
_APPLY = Point("benchmarks.faults.engine:copy_tensor", nth=3)
_REPORT = Point("weightsync.apply:Applier.apply", "after")
_REPORTED = Point("weightsync.ledger:Ledger.report")

CELLS = (
    Cell("before_push", "trainer", Point("weightsync.publisher:WeightPublisher.push")),
    Cell("mid_push", "trainer", Point("weightsync.chunks:fill_chunk", nth=4)),
    Cell("pushed", "trainer", Point("weightsync.push:receive_shard", "after"), at="service"),
    Cell("commit", "trainer", _COMMIT, at="service"),
    Cell("committed", "trainer", Point("weightsync.publisher:WeightPublisher.push", "after")),
    Cell("watch", "trainer", _WATCH, at="service"),
    Cell("pull", "trainer", _PULL, at="engine"),
    Cell("stage", "trainer", _STAGE, at="engine"),
    Cell("apply", "trainer", _APPLY, at="engine"),
    Cell("report", "trainer", _REPORT, at="engine"),
    Cell("mid_push", "service", _PUSH),
    Cell("stored", "service", Point("weightsync.incoming:IncomingShard.finish", "after")),
    Cell("commit", "service", _COMMIT),
    Cell("committed", "service", _COMMITTED),
    Cell("watch", "service", _WATCH),
    Cell("pull", "service", Point("weightsync.chunks:fill_chunk", nth=4)),
    Cell("stage", "service", _STAGE, at="engine"),
    Cell("apply", "service", _APPLY, at="engine"),
    Cell("report", "service", _REPORTED),
    Cell("push", "engine", _PUSH, at="service"),
    Cell("commit", "engine", _COMMIT, at="service"),
    Cell("watch", "engine", Point("weightsync.receiver:WeightReceiver._take")),
    Cell("pull", "engine", _PULL),
    Cell("stage", "engine", _STAGE),
    Cell("staged", "engine", Point("weightsync.apply:Applier.apply")),
    Cell("apply", "engine", _APPLY),
    Cell("report", "engine", _REPORT),
    Cell("reported", "engine", _REPORTED, at="service"),
)
"""Every phase of every program."""
