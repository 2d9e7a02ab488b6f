"""The update path from what a receiver holds to a version: which forms to apply, in which order. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version

__all__ = ["PathError", "PathStep", "check_path", "direct_step"]


class PathError(Exception):
    """The steps do not lead to the version that is wanted."""


@dataclass(frozen=True, slots=True)
class PathStep:
    """One form to apply.

    Attributes:
        manifest: What to apply.
        files: Its shards as files of the service's host, by name; they may be of another host than this.
    """

    manifest: pb.Manifest
    files: Mapping[str, pb.LocalFile] = field(default_factory=dict)

    @property
    def is_delta(self) -> bool:
        """Whether it is based on the version before."""
        return self.manifest.kind == pb.VERSION_KIND_DELTA


def direct_step(announced: pb.Manifest, held: Version | None) -> PathStep | None:
    """Return the announced form if it is all that is needed to get to its version."""
    is_delta = announced.kind == pb.VERSION_KIND_DELTA
    if is_delta and (held is None or Version.from_proto(announced.base) != held):
        return None
    return PathStep(announced)


def check_path(steps: Sequence[PathStep], wanted: Version, held: Version | None) -> None:
    """Check that each step follows from the one before, the first from what is held, and the last is what is wanted.

    Raises:
        PathError: if not.
    """
    if not steps:
        raise PathError(f"the service named no way to version {wanted}")
    current = held
    for step in steps:
        version = Version.from_proto(step.manifest.version)
        if step.is_delta:
            base = Version.from_proto(step.manifest.base)
            if base != current:
                raise PathError(f"the delta to {version} is based on {base}, held is {current or 'nothing'}")
        elif step is not steps[0] or not _may_be_first(step, alone=len(steps) == 1):
            raise PathError(f"version {version} is not weights of the model, or a dense form behind others")
        current = version
    if current != wanted:
        raise PathError(f"the update path ends at version {current}, wanted was {wanted}")


def _may_be_first(step: PathStep, *, alone: bool) -> bool:
    """Whether a path may begin with it. An adapter stands alone: no delta is based on one."""
    return step.manifest.kind == pb.VERSION_KIND_ANCHOR or (step.manifest.kind == pb.VERSION_KIND_ADAPTER and alone)
