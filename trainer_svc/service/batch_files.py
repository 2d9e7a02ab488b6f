"""Accepted batches on disk, as they came over the wire.

The orchestrator's journal is what a run resumes from. These files are for people: a step that went wrong can be looked at
and replayed. They stay until a checkpoint covers them, and never more than a fixed number of them.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from pathlib import Path

from google.protobuf import proto

from sluice.v1.trainer_pb2 import SubmitBatchRequest
from sluice.versions import Version
from trainer_svc.checkpoint.durable import write_durably

__all__ = ["BatchFiles", "read_batch"]

KEPT = 64
"""Most files; a run without checkpoints must not fill the disk."""


class BatchFiles:
    """One file per accepted batch: its messages, each behind its length.

    Args:
        directory: Holds the files; made when the first one is written.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, target: Version, messages: Iterable[SubmitBatchRequest]) -> Path:
        """Write a batch; on return it is on disk.

        Raises:
            OSError: if the disk is full or not writable.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        for message in messages:
            proto.serialize_length_prefixed(message, content)
        path = self.directory / f"{target.epoch:06d}.{target.number:010d}.binpb"
        write_durably(path, content.getvalue())
        for surplus in self._paths()[:-KEPT]:
            surplus.unlink(missing_ok=True)
        return path

    def remove_covered(self, checkpoint: Version) -> None:
        """Remove the batches that a checkpoint of this version holds, and those of older epochs, which are sent again."""
        for path in self._paths():
            epoch, number, _ = path.name.split(".")
            if int(epoch) < checkpoint.epoch or int(number) <= checkpoint.number:
                path.unlink(missing_ok=True)

    def _paths(self) -> list[Path]:
        return sorted(self.directory.glob("*.binpb"))


def read_batch(path: Path) -> Iterator[SubmitBatchRequest]:
    """The messages of a batch's file: its header, then its trajectories."""
    content = io.BytesIO(path.read_bytes())
    while (message := proto.parse_length_prefixed(SubmitBatchRequest, content)) is not None:
        yield message
