"""Where the epochs of a run began: this decides how old a token is and which checkpoints may be removed. Pure.

A version belongs to an epoch, and each epoch began from some version of an older one, so that versions form a tree. The
staleness of a token is its distance in that tree from the weights that the batch is applied to. Within one line that is
`now - v`; for a version v that a restart at c retired it is `(v - c) + (now - c)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Self

from sluice.v1 import checkpoint_pb2
from sluice.v1.checkpoint_pb2 import CheckpointManifest
from sluice.versions import BASE, Version

__all__ = ["Lineage", "origin_of", "surplus"]


@dataclass(frozen=True, slots=True)
class Lineage:
    """The version from which each epoch began.

    An unknown epoch counts as begun from the base model, which never makes a token younger than it is.

    Attributes:
        origins: Version by epoch; always of an older epoch.
    """

    origins: Mapping[int, Version] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def newest_epoch(self) -> int:
        """The newest epoch; 0 before the first."""
        return max(self.origins, default=0)

    def begin(self, epoch: int, origin: Version) -> Self:
        """Return the lineage with one more epoch.

        Raises:
            ValueError: if the origin is not of an older epoch.
        """
        if origin.epoch >= epoch:
            raise ValueError(f"epoch {epoch} cannot begin from version {origin}, which is not older")
        return type(self)(MappingProxyType({**self.origins, epoch: origin}))

    def merged(self, other: Self) -> Self:
        """Return the epochs of both lineages; where they differ, those of `other`."""
        return type(self)(MappingProxyType({**self.origins, **other.origins}))

    def staleness(self, token: Version, now: Version) -> int:
        """Return the versions between the one that sampled a token and the one that is trained."""
        fork = self._fork(token, now)
        return (token.number - fork) + (now.number - fork)

    def is_retired(self, version: Version, now: Version) -> bool:
        """Return whether `now` does not build upon this version."""
        return self._fork(version, now) < version.number

    def _fork(self, one: Version, other: Version) -> int:
        """Return the number of the newest version that both build upon."""
        path = self._path(one)
        for epoch, number in self._path(other).items():
            if epoch in path:
                return min(number, path[epoch])
        return 0

    def _path(self, version: Version) -> dict[int, int]:
        """Return, newest first, each epoch on the way back to the base model and the number at which the way leaves it."""
        path = {}
        while version.epoch > 0:
            path[version.epoch] = version.number
            version = self.origins.get(version.epoch, BASE)
        path[0] = version.number
        return path

    def to_proto(self) -> checkpoint_pb2.EpochLineage:
        """Return the wire form."""
        return checkpoint_pb2.EpochLineage(
            origins=[
                checkpoint_pb2.EpochOrigin(epoch=epoch, restored_version=origin.to_proto())
                for epoch, origin in sorted(self.origins.items())
            ]
        )

    @classmethod
    def from_proto(cls, message: checkpoint_pb2.EpochLineage) -> Self:
        """Read the wire form."""
        return cls(
            MappingProxyType({each.epoch: Version.from_proto(each.restored_version) for each in message.origins})
        )


def surplus(
    complete: Sequence[CheckpointManifest], written: Version, known: Lineage, keep: int
) -> list[CheckpointManifest]:
    """Return the checkpoints to remove.

    The newest ones that the written version builds upon stay. Retired ones, which a rollback left behind, stay only while
    there are fewer of those than `keep`.

    Args:
        complete: All complete checkpoints, newest first.
        written: Version of the checkpoint that was just written.
        known: The epochs of the run.
        keep: How many stay.
    """
    return sorted(complete, key=lambda each: known.is_retired(origin_of(each), written))[keep:]


def origin_of(manifest: CheckpointManifest | None) -> Version:
    """Return the version that a checkpoint was written at; that of the base model for None."""
    return BASE if manifest is None else Version.from_proto(manifest.checkpoint.policy_version)
