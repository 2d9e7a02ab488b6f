"""Where the epochs of a run began, kept on disk so that a restart knows which versions it retires."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

from google.protobuf.message import DecodeError

from sluice.rpc import SluiceError
from sluice.v1.checkpoint_pb2 import EpochLineage, EpochOrigin
from sluice.versions import Version
from trainer_svc.checkpoint.durable import write_durably
from trainer_svc.service.staleness import Lineage

__all__ = ["LineageFile", "from_proto", "to_proto"]


class LineageFile:
    """The lineage of one run in one small protobuf file.

    Args:
        path: The file; its directory is made when it is first written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Lineage:
        """The lineage as written; empty for a new run.

        Raises:
            SluiceError: DATA_LOSS if the file is damaged.
        """
        if not self.path.exists():
            return Lineage()
        try:
            return from_proto(EpochLineage.FromString(self.path.read_bytes()))
        except DecodeError as error:
            raise SluiceError.data_loss(
                "LINEAGE_DAMAGED",
                f"{self.path} cannot be read: remove it; the checkpoints know the epochs that they build upon",
            ) from error

    def write(self, lineage: Lineage) -> None:
        """Replace the file; on return it is on disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(self.path, to_proto(lineage).SerializeToString())


def to_proto(lineage: Lineage) -> EpochLineage:
    """The wire form."""
    return EpochLineage(
        origins=[
            EpochOrigin(epoch=epoch, restored_version=origin.to_proto())
            for epoch, origin in sorted(lineage.origins.items())
        ]
    )


def from_proto(message: EpochLineage) -> Lineage:
    """Read the wire form."""
    origins = {each.epoch: Version.from_proto(each.restored_version) for each in message.origins}
    return Lineage(MappingProxyType(origins))
