"""Batches on disk: a record of the batches that were applied, and notes of batches that ran out of memory.

The record has the outcome of every trajectory, in append-only files (format: `sluice.batch_record`). A batch is appended when it is
applied, and is on disk before the trainer reports it. A checkpoint notes where the files end. After a restart the record tells the
outcome of the batches that the weights hold. `sluice audit` reads the whole record and compares it with the orchestrator's journal.
Nothing is ever removed: a trajectory takes about 37 bytes. Batches that a restart rolled back stay, under the version of the epoch
that applied them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

import grpc
import structlog
from google.protobuf.message import DecodeError

from sluice.batch_record import frame, read_record_file, record_paths
from sluice.rows_at_fault import ROWS, ranges, rows_of
from sluice.rpc import SluiceError
from sluice.v1 import checkpoint_pb2
from sluice.v1.checkpoint_pb2 import MemoryShortage
from sluice.versions import Lineage, Version
from trainer_svc.batch.rows import TrainingRow, tokens_to_forward
from trainer_svc.checkpoint.saver import sync_directory, write_durably
from trainer_svc.engine.out_of_memory import MemoryShortError

FILE_BYTES = 16 << 20
"""Size at which a new file is started: some hundred batches of 512 trajectories."""

KEPT_REPORTS = 1024
"""Number of newest batches whose outcome WatchSteps can report, as the contract says."""

log = structlog.get_logger(__name__)


class BatchRecordFiles:
    """Append batches, and find the batches that some weights contain. Every method blocks.

    Args:
        directory: Directory of the files; created when the first batch is appended.
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
            self.close()  # the next append removes a torn frame
            raise SluiceError.resource_exhausted(
                "BATCH_RECORD_NOT_WRITTEN",
                f"batch {record.batch_id!r} could not be recorded as applied ({fault}): free space below {self.directory}, then"
                " begin a newer epoch",
                retry_after_s=10.0,
            ) from fault

    def position(self) -> checkpoint_pb2.BatchRecordPosition | None:
        """Remove a torn frame, then return where the record ends; None if nothing was ever appended.

        Raises:
            OSError: if reading or writing fails.
        """
        if not record_paths(self.directory):
            return None
        file = self._open()
        return checkpoint_pb2.BatchRecordPosition(
            file=f"{self.directory.name}/{Path(os.fsdecode(file.name)).name}", size_bytes=file.tell()
        )

    def held_by(self, version: Version, lineage: Lineage, most: int) -> list[checkpoint_pb2.BatchRecord]:
        """Return the newest batches that the weights of a version contain, at most `most`: oldest first, without a gap.

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
        """Return the file to append to. Remove a torn frame at its end; start a new file if it is full."""
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


# Batches that ran out of memory and cannot be repeated at once, because other ranks wait in a collective of the failed pass, or an
# optimizer has already changed some of the weights.
#
#     first time                      the epoch ends (several ranks restart); the next epoch trains the batch with half the token budget
#     again, with half the budget     the next epoch refuses the batch: the rows that do not fit alone, or the whole batch if none is at fault
#
# The next epoch begins from weights before the batch. Each rank notes a shortage in a file, because its process may end next.


class MemoryShortages:
    """The batches that ran out of memory and are not applied yet. Every method blocks.

    Args:
        directory: Directory of the files, shared by all ranks.
        rank: Rank of this process.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._own = directory / f"out_of_memory.{rank}.binpb"
        self._found: dict[str, MemoryShortage] = {}

    def read(self) -> None:
        """Read what all ranks noted, at the start of an epoch."""
        self._found = {}
        for path in self._directory.glob("out_of_memory.*.binpb"):
            try:
                read = MemoryShortage.FromString(path.read_bytes())
            except DecodeError:
                log.warning("a file is damaged and is ignored", path=str(path))
                continue
            self._found[read.batch_id] = max(read, self._found.get(read.batch_id, read), key=_weight)

    def note(self, batch_id: str, error: MemoryShortError) -> None:
        """Note that a batch ran out of memory, before the epoch or the process ends.

        Raises:
            OSError: if the file cannot be written.
        """
        noted = MemoryShortage(
            batch_id=batch_id,
            at_half=error.at_half,
            row_tokens=error.row_tokens,
            problem=f"batch {batch_id!r}: {error}",
        )
        what = "the next epoch refuses it" if error.at_half else "the next epoch trains it with half the token budget"
        log.error("a batch ran out of memory", batch=batch_id, then=what, error=str(error))
        self._directory.mkdir(parents=True, exist_ok=True)
        write_durably(self._own, noted.SerializeToString())

    def halves(self, batch_id: str) -> bool:
        """Return whether a batch has to be trained with half the token budget."""
        return batch_id in self._found

    def applied(self, batch_id: str) -> None:
        """Forget a batch that was trained."""
        if batch_id in self._found:
            self._forget()

    def check(self, batch_id: str, rows: Sequence[TrainingRow | None]) -> None:
        """Refuse a batch that did not fit with half the token budget, and forget it: if it is sent again, it gets another try.

        Args:
            batch_id: The batch.
            rows: The training row of each of its trajectories; None for a trajectory that is not trained.

        Raises:
            SluiceError: INVALID_ARGUMENT if some rows are too long, with their places; FAILED_PRECONDITION if no row is at fault.
        """
        found = self._found.get(batch_id)
        if found is None or not found.at_half:
            return
        sizes = {place: len(tokens_to_forward(row)) for place, row in enumerate(rows) if row is not None}
        too_long = {place: size for place, size in sizes.items() if 0 < found.row_tokens <= size}
        if found.row_tokens and not too_long:
            return  # the rows that were too long have been dropped as stale
        self._forget()
        if not too_long:
            raise SluiceError.failed_precondition("OUT_OF_MEMORY", found.problem)
        violations = {
            f"trajectories[{place}].token_ids": f"make a row of {size} tokens, but one of {found.row_tokens} alone does not fit"
            for place, size in too_long.items()
        }
        raise SluiceError(
            grpc.StatusCode.INVALID_ARGUMENT,
            "OUT_OF_MEMORY",
            f"rows of {found.row_tokens} tokens or more do not fit in memory, {len(too_long)} of this batch; {found.problem}, or"
            " sample shorter sequences (rollout.max_model_len)",
            violations=violations,
            metadata={ROWS: ranges(rows_of(violations))},
        )

    def _forget(self) -> None:
        self._found = {}
        for path in self._directory.glob("out_of_memory.*.binpb"):
            path.unlink(missing_ok=True)


def _weight(note: MemoryShortage) -> tuple[bool, bool, int]:
    """Order the ranks' notes on one batch: a second failure counts more than a first, and a shorter row that does not fit more than a longer one."""
    return note.at_half, note.row_tokens > 0, -note.row_tokens
