"""The record of applied batches: the outcome of every trajectory, in append-only files (`sluice.batch_record` has their form).

A batch is appended when it is applied, and on disk before anyone learns of it. A checkpoint notes where the files end. After a
restart the record answers what became of the batches that the weights hold; `sluice audit` reads it as a whole and compares
it with the orchestrator's journal. Nothing is ever removed: a trajectory takes about 37 bytes. Batches that a restart rolled
back stay, under the version of the epoch that applied them.
"""

from __future__ import annotations

import errno
import os
from io import FileIO
from pathlib import Path

import structlog

from sluice.batch_record import frame, read_record_file, record_paths
from sluice.rpc import SluiceError
from sluice.v1 import checkpoint_pb2
from sluice.versions import Lineage, Version
from trainer_svc.checkpoint.saver import sync_directory

FILE_BYTES = 16 << 20
"""Size at which a new file is begun: some hundred batches of 512 trajectories."""

KEPT_REPORTS = 1024
"""Batches whose outcome WatchSteps reports, as the contract says."""

log = structlog.get_logger(__name__)


class BatchRecordFiles:
    """Append batches, and find the batches that some weights contain. Every method blocks.

    Args:
        directory: Holds the files; made when the first batch is appended.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file: FileIO | None = None

    def append(self, record: checkpoint_pb2.BatchRecord) -> None:
        """Append one batch; on return it survives a power failure.

        Raises:
            SluiceError: RESOURCE_EXHAUSTED if the disk is full or not writable.
        """
        content = frame(record)
        fault: OSError | None = None
        try:
            file = self._open()
            if file.write(content) != len(content):
                fault = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            else:
                os.fdatasync(file.fileno())
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

    def position(self) -> checkpoint_pb2.BatchRecordPosition | None:
        """Return where the record ends, and cut a torn frame off first; None if nothing was ever appended.

        Raises:
            OSError: if the disk refuses.
        """
        if not record_paths(self.directory):
            return None
        file = self._open()
        return checkpoint_pb2.BatchRecordPosition(
            file=f"{self.directory.name}/{Path(os.fsdecode(file.name)).name}", size_bytes=file.tell()
        )

    def held_by(self, version: Version, lineage: Lineage, most: int) -> list[checkpoint_pb2.BatchRecord]:
        """Return the newest batches, at most `most`, that the weights of a version contain: oldest first, without a gap.

        Raises:
            SluiceError: UNAVAILABLE if a file cannot be read.
        """
        found: dict[int, checkpoint_pb2.BatchRecord] = {}
        oldest_wanted = max(1, version.number - most + 1)
        for path in reversed(record_paths(self.directory)):
            try:
                records = read_record_file(path).records
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
            paths = record_paths(self.directory)
            if paths:
                newest = read_record_file(paths[-1])
                if newest.torn:
                    log.warning(
                        "cutting off the end of a batch record that a crash tore",
                        path=str(newest.path),
                        at=newest.whole_bytes,
                    )
                    os.truncate(newest.path, newest.whole_bytes)
                self._file = FileIO(newest.path, "a")
        if self._file is None or self._file.tell() >= FILE_BYTES:
            self._file = self._next_file()
        return self._file

    def _next_file(self) -> FileIO:
        self.close()
        self.directory.mkdir(parents=True, exist_ok=True)
        paths = record_paths(self.directory)
        number = int(paths[-1].stem) + 1 if paths else 1
        opened = FileIO(self.directory / f"{number:08d}.record", "x")
        for directory in (self.directory, self.directory.parent) if number == 1 else (self.directory,):
            sync_directory(directory)
        return opened
