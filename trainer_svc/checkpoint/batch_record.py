"""The record of applied batches: the outcome of every trajectory, in append-only files.

    trainer/batches/00000001.record    frames of length, CRC-32 and a serialized BatchRecord (checkpoint.proto)

A batch is appended when it is applied, before anyone learns of it. A checkpoint syncs the files and notes where they end, so
that the record of every batch that its weights hold is on disk when the checkpoint is. After a restart the record answers
what became of those batches; an audit reads it as a whole. Batches that a restart rolled back stay in the record, under
the version of the epoch that applied them.
"""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path

import structlog
import xxhash
from google.protobuf.message import DecodeError

from sluice.rpc import SluiceError
from sluice.v1 import checkpoint_pb2, tokens_pb2
from sluice.versions import Lineage, Version

FILE_BYTES = 16 << 20
"""Size at which a new file is begun: some hundred batches of 512 trajectories."""

KEPT_FILES = 64
"""Files that stay, 1 GiB in all; the oldest is removed first, so that no run fills the disk."""

KEPT_REPORTS = 1024
"""Batches whose outcome WatchSteps reports, as the contract says; the record holds at least as many."""

_FRAME = struct.Struct("<II")
_LENGTH = struct.Struct("<Q")

log = structlog.get_logger(__name__)


def content_digest(trajectories: Iterable[tokens_pb2.Trajectory]) -> str:
    """Return the digest of a batch's trajectories, as `BatchRecord.content_digest` defines it."""
    digest = xxhash.xxh3_128()
    for trajectory in trajectories:
        content = trajectory.SerializeToString(deterministic=True)
        digest.update(_LENGTH.pack(len(content)))
        digest.update(content)
    return digest.hexdigest()


class BatchRecordFiles:
    """Append batches, and find the batches that some weights contain. Every method blocks.

    Args:
        directory: Holds the files; made when the first batch is appended.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file: FileIO | None = None

    def append(self, record: checkpoint_pb2.BatchRecord) -> None:
        """Append one batch. It survives a kill of this process, and after the next `sync` also a power failure.

        Raises:
            SluiceError: RESOURCE_EXHAUSTED if the disk is full or not writable.
        """
        content = record.SerializeToString()
        frame = _FRAME.pack(len(content), zlib.crc32(content)) + content
        try:
            written = self._open().write(frame)
            fault = None if written == len(frame) else OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            fault = error
        if fault is not None:
            self.close()  # the next append cuts a torn frame off
            raise SluiceError.resource_exhausted(
                "BATCH_RECORD_NOT_WRITTEN",
                f"batch {record.batch_id!r} could not be recorded as applied ({fault}): free space below {self.directory}, then"
                " begin a newer epoch",
                retry_after_s=10.0,
            ) from fault

    def sync(self) -> checkpoint_pb2.BatchRecordPosition | None:
        """Make everything appended so far survive a power failure.

        Returns:
            Where the record ends; None if nothing was ever appended.

        Raises:
            OSError: if the disk refuses.
        """
        if self._file is not None:
            os.fsync(self._file.fileno())
        paths = self._paths()
        if not paths:
            return None
        return checkpoint_pb2.BatchRecordPosition(
            file=f"{self.directory.name}/{paths[-1].name}", size_bytes=paths[-1].stat().st_size
        )

    def held_by(self, version: Version, lineage: Lineage, most: int) -> list[checkpoint_pb2.BatchRecord]:
        """Return the newest batches, at most `most`, that the weights of a version contain: oldest first, without a gap.

        Raises:
            SluiceError: UNAVAILABLE if a file cannot be read.
        """
        found: dict[int, checkpoint_pb2.BatchRecord] = {}
        oldest_wanted = max(1, version.number - most + 1)
        for path in reversed(self._paths()):
            try:
                records = list(read_records(path))
            except OSError as error:
                raise SluiceError.unavailable(
                    "BATCH_RECORD_UNREADABLE",
                    f"the record of applied batches, which may not be damaged, cannot be read ({error}): check the disk and"
                    " the limit of open files, then begin the epoch again",
                    retry_after_s=10.0,
                ) from error
            for record in records:
                applied = Version.from_proto(record.policy_version)
                if oldest_wanted <= applied.number <= version.number and not lineage.is_retired(applied, version):
                    found[applied.number] = record
            if oldest_wanted in found:
                break
        held = []
        number = version.number
        while number in found:
            held.append(found[number])
            number -= 1
        return held[::-1]

    def close(self) -> None:
        """Close the file that is open for appending."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> FileIO:
        """Return the file to append to. Cut off a torn frame at its end; begin a new file when it is full."""
        if self._file is None:
            paths = self._paths()
            if paths:
                whole = max((end for end, _ in _frames(paths[-1])), default=0)
                if whole < paths[-1].stat().st_size:
                    log.warning(
                        "cutting off the end of a batch record that a crash tore", path=str(paths[-1]), at=whole
                    )
                    os.truncate(paths[-1], whole)
                self._file = FileIO(paths[-1], "a")
        if self._file is None or self._file.tell() >= FILE_BYTES:
            self._file = self._next_file()
        return self._file

    def _next_file(self) -> FileIO:
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
        self.directory.mkdir(parents=True, exist_ok=True)
        paths = self._paths()
        number = int(paths[-1].stem) + 1 if paths else 1
        opened = FileIO(self.directory / f"{number:08d}.record", "x")
        for surplus in paths[: len(paths) + 1 - KEPT_FILES]:
            surplus.unlink(missing_ok=True)
        return opened

    def _paths(self) -> list[Path]:
        return sorted(self.directory.glob("*.record"))


def read_records(path: Path) -> Iterator[checkpoint_pb2.BatchRecord]:
    """Yield the batches of one file in order, up to the first frame that is torn or damaged."""
    return (record for _, record in _frames(path))


def _frames(path: Path) -> Iterator[tuple[int, checkpoint_pb2.BatchRecord]]:
    """Yield each whole batch of a file and the offset at which its frame ends."""
    with path.open("rb") as file:
        while len(header := file.read(_FRAME.size)) == _FRAME.size:
            length, checksum = _FRAME.unpack(header)
            content = file.read(length)
            if not length or len(content) < length or zlib.crc32(content) != checksum:
                return
            try:
                record = checkpoint_pb2.BatchRecord.FromString(content)
            except DecodeError:
                return
            yield file.tell(), record
