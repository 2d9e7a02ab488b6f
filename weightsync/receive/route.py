"""The way from what a receiver holds to a version: which forms to apply, in which order. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version

__all__ = ["RouteError", "Step", "check_route", "direct_step"]


class RouteError(Exception):
    """The steps do not lead to the version."""


@dataclass(frozen=True, slots=True)
class Step:
    """One form on the way.

    Attributes:
        manifest: What to apply.
        files: Its shards as files of the service's host, by name; they may be of another host than this.
    """

    manifest: pb.Manifest
    files: Mapping[str, pb.LocalFile] = field(default_factory=dict)

    @property
    def is_delta(self) -> bool:
        """Whether it needs the version before."""
        return self.manifest.kind == pb.VERSION_KIND_DELTA


def direct_step(announced: pb.Manifest, held: Version | None) -> Step | None:
    """The announced form, where nothing else is needed to get to its version."""
    is_delta = announced.kind == pb.VERSION_KIND_DELTA
    if is_delta and (held is None or Version.from_proto(announced.base) != held):
        return None
    return Step(announced)


def check_route(steps: Sequence[Step], wanted: Version, held: Version | None) -> None:
    """Check that each step follows from the one before, the first from what is held, and the last is what is wanted.

    Raises:
        RouteError: if not.
    """
    if not steps:
        raise RouteError(f"no way to version {wanted} was given")
    current = held
    for step in steps:
        version = Version.from_proto(step.manifest.version)
        if step.is_delta:
            base = Version.from_proto(step.manifest.base)
            if base != current:
                raise RouteError(f"the delta to {version} is based on {base}, held is {current or 'nothing'}")
        elif step is not steps[0] or not _may_be_first(step, alone=len(steps) == 1):
            raise RouteError(f"version {version} is no weights of the model, or a dense form behind others")
        current = version
    if current != wanted:
        raise RouteError(f"the way ends at version {current}, wanted was {wanted}")


def _may_be_first(step: Step, *, alone: bool) -> bool:
    """An adapter is a way of its own: no delta is based on one."""
    return step.manifest.kind == pb.VERSION_KIND_ANCHOR or (step.manifest.kind == pb.VERSION_KIND_ADAPTER and alone)
