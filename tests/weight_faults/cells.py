"""The matrix: at which phase of a version's way, and who is killed there."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weight_faults.points import Point

__all__ = ["ABSENT", "CELLS", "PROVED", "Cell"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One fault.

    Attributes:
        phase: Where on a version's way.
        victim: Who is killed: "trainer", "service", "relay" or "engine".
        point: The place in the code.
        at: The program whose code that is; the victim is killed when this one is there.
        relay: Whether the engine is fed by a relay.
        local_files: Whether processes hand each other files of the host.
        form: Which form the version has: "delta", or "anchor" for the first of a trainer's life.
    """

    phase: str
    victim: str
    point: Point
    at: str = ""
    relay: bool = False
    local_files: bool = False
    form: str = "delta"

    @property
    def id(self) -> str:
        """Name of the cell."""
        way = "-local" if self.local_files else ""
        return f"{self.victim}-{self.phase}{way}" + ("-anchor" if self.form == "anchor" else "")


_PUSH = Point("weightsync.service.upload:Upload.append", nth=3)
_DELTA_NAME, _DENSE_NAME = r"/\.deltas/v\d+\.\d+$", r"/weights/v\d+\.\d+$"
_COMMIT = Point("os:rename", match=_DELTA_NAME)
_COMMITTED = Point("os:rename", "after", match=_DELTA_NAME)
_WATCH = Point("weightsync.service.runs:Run.add_version", "after")
_SEND = Point("weightsync.service.servicer:_read_chunk", nth=3)
_PULL = Point("weightsync.format.chunks:read_pull_response", nth=3)
_STAGE = Point("weightsync.receive.version_file:PatchedFile._apply_slice", nth=3)
_STAGED = Point("weightsync.receive.shared_area:Claim.publish", "after")
_APPLY = Point("weight_faults.engine:copy_tensor", nth=3)
_REPORT = Point("weightsync.receiver:WeightReceiver._apply", "after")
_REPORTED = Point("weightsync.service.ledger:Ledger.report")

_TRAINER = (
    Cell("before_push", "trainer", Point("weightsync.publisher:WeightPublisher.encode")),
    Cell("diff", "trainer", Point("weightsync.codec.slices:encode", nth=3)),
    Cell("mid_push", "trainer", Point("weightsync.format.chunks:push_request", nth=3)),
    Cell("pushed", "trainer", Point("weightsync.service.servicer:WeightSyncServicer._receive", "after"), at="service"),
    Cell("commit", "trainer", _COMMIT, at="service"),
    Cell("committed", "trainer", Point("weightsync.publisher:WeightPublisher.publish", "after")),
    Cell("watch", "trainer", _WATCH, at="service"),
    Cell("pull", "trainer", _PULL, at="engine"),
    Cell("stage", "trainer", _STAGE, at="engine"),
    Cell("apply", "trainer", _APPLY, at="engine"),
    Cell("report", "trainer", _REPORT, at="engine"),
)
_SERVICE = (
    Cell("mid_push", "service", _PUSH),
    Cell("pushed", "service", Point("weightsync.service.upload:Upload.finish", "after")),
    Cell("commit", "service", _COMMIT),
    Cell("committed", "service", _COMMITTED),
    Cell("watch", "service", _WATCH),
    Cell("pull", "service", _SEND),
    Cell("stage", "service", _STAGE, at="engine"),
    Cell("apply", "service", _APPLY, at="engine"),
    Cell("report", "service", _REPORTED),
    Cell("mid_materialize", "service", Point("weightsync.service.dense:_advance_tensor", nth=3)),
    Cell("materialize", "service", Point("os:rename", match=_DENSE_NAME)),
    Cell("materialized", "service", Point("os:rename", "after", match=_DENSE_NAME)),
    Cell("remove", "service", Point("os:rename", match=r"/\.trash/v\d+\.\d+\.\d+$")),
    Cell("removed", "service", Point("os:rename", "after", match=r"/\.trash/v\d+\.\d+\.\d+$")),
)
_ENGINE = (
    Cell("push", "engine", _PUSH, at="service"),
    Cell("commit", "engine", _COMMIT, at="service"),
    Cell("watch", "engine", Point("weightsync.receiver:WeightReceiver._take")),
    Cell("pull", "engine", _PULL),
    Cell("stage", "engine", _STAGE),
    Cell("staged", "engine", _STAGED),
    Cell("apply", "engine", _APPLY),
    Cell("report", "engine", _REPORT),
    Cell("reported", "engine", _REPORTED, at="service"),
)
_RELAY = (
    Cell("push", "relay", _PUSH, at="service", relay=True),
    Cell("commit", "relay", _COMMIT, at="service", relay=True),
    Cell("watch", "relay", Point("weightsync.relay:Follower._try"), relay=True),
    Cell("fetch", "relay", _PUSH, relay=True),
    Cell("keep", "relay", _COMMIT, relay=True),
    Cell("kept", "relay", _COMMITTED, relay=True),
    Cell("announce", "relay", _WATCH, relay=True),
    Cell("pull", "relay", _SEND, relay=True),
    Cell("stage", "relay", _STAGE, at="engine", relay=True),
    Cell("apply", "relay", _APPLY, at="engine", relay=True),
    Cell("report", "relay", Point("weightsync.relay:Forwarder.put"), relay=True),
    Cell("materialize", "relay", Point("os:rename", match=_DENSE_NAME), relay=True),
    Cell("fetch", "service", _SEND, relay=True),
    Cell("keep", "service", _COMMIT, at="relay", relay=True),
    Cell("fetch", "engine", _PUSH, at="relay", relay=True),
    Cell("relayed_pull", "engine", _SEND, at="relay", relay=True),
)
_ANCHORS = (
    Cell("mid_push", "trainer", Point("weightsync.format.chunks:push_request", nth=40), form="anchor"),
    Cell("mid_push", "service", replace(_PUSH, nth=40), form="anchor"),
    Cell("commit", "service", replace(_COMMIT, match=_DENSE_NAME), form="anchor"),
    Cell("committed", "service", replace(_COMMITTED, match=_DENSE_NAME), form="anchor"),
    Cell("pull", "service", replace(_SEND, nth=40), form="anchor"),
    Cell("pull", "engine", replace(_PULL, nth=40), form="anchor"),
    Cell("stage", "engine", Point("weightsync.receive.version_file:DenseFile.finish"), form="anchor"),
    Cell("apply", "engine", _APPLY, form="anchor"),
    Cell("fetch", "relay", replace(_PUSH, nth=40), relay=True, form="anchor"),
    Cell("pull", "relay", replace(_SEND, nth=40), relay=True, form="anchor"),
)

_HAND_OVER = Point("weightsync.service.upload:Upload.copy")
_READ_LOCAL = Point("weightsync.receive.pull:read_local")
_LOCAL = (
    Cell("push", "trainer", _HAND_OVER, at="service", local_files=True),
    Cell("pushed", "trainer", Point("weightsync.publisher:WeightPublisher.publish", "after"), local_files=True),
    Cell("push", "service", _HAND_OVER, local_files=True),
    Cell("pull", "service", _READ_LOCAL, at="engine", local_files=True),
    Cell("pull", "engine", _READ_LOCAL, local_files=True),
    Cell("push", "trainer", _HAND_OVER, at="service", local_files=True, form="anchor"),
    Cell("push", "service", _HAND_OVER, local_files=True, form="anchor"),
    Cell("pull", "engine", replace(_READ_LOCAL, when="after"), local_files=True, form="anchor"),
)

CELLS = _TRAINER + _SERVICE + _ENGINE + _RELAY + _ANCHORS + _LOCAL
"""Every phase of every program: deltas, and the longer transfers of anchors."""

PROVED = frozenset(
    {
        *("trainer-before_push", "trainer-diff", "trainer-pushed", "trainer-report"),
        *("trainer-mid_push-anchor", "trainer-push-local", "trainer-pushed-local"),
        *("service-pushed", "service-commit", "service-fetch", "service-report", "service-remove", "service-removed"),
        *("service-mid_materialize", "service-materialize", "service-committed-anchor", "service-pull-local"),
        *("engine-watch", "engine-pull", "engine-staged", "engine-apply", "engine-stage-anchor"),
        *("engine-pull-local-anchor",),
        *("relay-watch", "relay-fetch", "relay-kept", "relay-announce", "relay-stage", "relay-report"),
    }
)
"""Ids of the cells that every run of the tests plays: each point once, and each victim, way and form.
`make test-soak` plays the others."""

_ONLY_TRAINER = "nothing of the version has left the trainer yet: to the others the moment is any other"
_ONLY_SERVICE = "nobody waits for the background work of a service, and nobody takes part in it: see watch"

ABSENT = {
    **{
        (phase, victim): _ONLY_TRAINER for phase in ("before_push", "diff") for victim in ("service", "relay", "engine")
    },
    **{(phase, victim): _ONLY_SERVICE for phase in ("materialize", "remove") for victim in ("trainer", "engine")},
    ("fetch", "trainer"): "a relay takes versions after their commit: as pull",
    ("keep", "trainer"): "as fetch",
    ("keep", "engine"): "a relay's commit does not know its engines: as fetch",
    ("remove", "relay"): "the same code as in the service, which has the cell",
}
"""Cells that are not in the matrix, by phase and victim, and why."""
