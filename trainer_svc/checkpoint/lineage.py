"""Where the epochs of a run began: what decides how old a token is and which checkpoints the weights build upon.

A version belongs to an epoch, and each epoch began from some version of an older one, so that versions form a tree. The
staleness of a token is its distance in that tree from the weights that the batch is applied to. Within one line that is
`now - v`; for a version v that a restart at c retired it is `(v - c) + (now - c)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Self

from google.protobuf.message import DecodeError

from sluice.rpc import SluiceError
from sluice.v1 import checkpoint_pb2
from sluice.versions import BASE, Version
from trainer_svc.checkpoint.manifest import write_durably

__all__ = ["Lineage", "from_proto", "read", "to_proto", "write"]


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
        """The newest known epoch; 0 if there is none."""
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


def read(path: Path) -> Lineage:
    """Read the lineage of a run; empty for a new run, which has no file.

    Raises:
        SluiceError: DATA_LOSS if the file is damaged.
    """
    if not path.exists():
        return Lineage()
    try:
        return from_proto(checkpoint_pb2.EpochLineage.FromString(path.read_bytes()))
    except DecodeError as error:
        raise SluiceError.data_loss(
            "LINEAGE_DAMAGED",
            f"{path} cannot be read: remove it; the checkpoints know the epochs that they build upon",
        ) from error


def write(path: Path, lineage: Lineage) -> None:
    """Write the lineage of a run; on return it is on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, to_proto(lineage).SerializeToString())


def to_proto(lineage: Lineage) -> checkpoint_pb2.EpochLineage:
    """Return the wire form."""
    return checkpoint_pb2.EpochLineage(
        origins=[
            checkpoint_pb2.EpochOrigin(epoch=epoch, restored_version=origin.to_proto())
            for epoch, origin in sorted(lineage.origins.items())
        ]
    )


def from_proto(message: checkpoint_pb2.EpochLineage) -> Lineage:
    """Read the wire form."""
    origins = {each.epoch: Version.from_proto(each.restored_version) for each in message.origins}
    return Lineage(MappingProxyType(origins))
