"""The journal of a run: what was drawn, accepted, batched and trained survives a SIGKILL at any moment.

Payloads (trajectories with their text) are written to checksummed segments, facts to an SQLite index that names the payloads.
Records are gathered for a few milliseconds and made durable together: segments first, then the index, so that the index
never names what is not there. `durable` returns when everything recorded before is on disk.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import structlog
from google.protobuf.message import DecodeError

from orchestrator_svc.journal_index import DrawnTask, JournalError, JournalIndex, Recovery
from orchestrator_svc.scheduler import Batch
from orchestrator_svc.segments import SegmentError, SegmentWriter, read_record
from sluice.v1 import orchestrator_pb2
from sluice.versions import Version

__all__ = ["DrawnTask", "Journal", "JournalError", "LiveTrajectories", "Recovery"]

log = structlog.get_logger(__name__)

Record = Callable[[JournalIndex, SegmentWriter], None]
_Answer = TypeVar("_Answer")


class Journal:
    """The journal of one run; use it from one event loop, `close` it at the end.

    Args:
        run_dir: The run's directory: ``journal.sqlite`` and ``journal/`` lie in it.
        identity: What must not change between two starts, such as run, seed and environment.
        fsync_interval_s: Seconds that records are gathered before they are made durable.
        segment_bytes: Size of a segment.
        queue_records: Records that may wait; more are an error.

    Attributes:
        start: How many processes have opened this journal so far, this one included. Names that another service
            remembers, such as request ids, carry it: a task that is drawn again then gets new ones.

    Raises:
        JournalError: if the journal belongs to something else or cannot be read.
    """

    def __init__(
        self,
        run_dir: Path,
        identity: Mapping[str, str],
        *,
        fsync_interval_s: float = 0.005,
        segment_bytes: int = 64 << 20,
        queue_records: int = 100_000,
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._directory = run_dir / "journal"
        self._index = JournalIndex(run_dir / "journal.sqlite")
        self._index.identify(identity)
        self.start = self._index.count_start()
        self._segments = SegmentWriter(self._directory, segment_bytes)
        self._interval_s, self._queue_records = fsync_interval_s, queue_records
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._waiting: list[Record] = []
        self._flushing: asyncio.Task[None] | None = None
        self._failure: JournalError | None = None
        self._checkpoints: list[int] = []
        self._delete_segments = False
        self._delete_unneeded_segments()  # those that a killed process left between its commit and their deletion
        self.resumes = self._index.has_run()
        self.position = 0

    # Recording. These methods return at once; what they record is on disk after `durable`.

    def draw(self, number: int, position: int, next_position: int) -> None:
        """Record that a task was drawn for a group; the next new task comes from `next_position` of the stream."""

        def record(index: JournalIndex, _segments: SegmentWriter) -> None:
            index.draw(number, position)
            index.raise_meta("next_group", number + 1)  # an older group may be drawn again
            index.set_meta("next_position", str(next_position))

        self._record(record)

    def accept(
        self, number: int, versions: Iterable[Version], records: Sequence[orchestrator_pb2.TrajectoryRecord]
    ) -> None:
        """Record a scored group; `records` are the trajectories that may be trained."""
        known = list(versions)

        def record(index: JournalIndex, segments: SegmentWriter) -> None:
            index.accept(number, known, [segments.append(each.SerializeToString()) for each in records])

        self._record(record)

    def drop(self, number: int, reason: str, *, was_accepted: int) -> None:
        """Record that a group in no batch was given up; `was_accepted` counts its trajectories, 0 if it never had any."""

        def record(index: JournalIndex, _segments: SegmentWriter) -> None:
            index.drop_group(number)
            index.count("dropped" if was_accepted else "failed", reason, was_accepted or 1)

        self._record(record)

    def drop_trajectories(self, reason: str, count: int) -> None:
        """Record trajectories that were generated and given up at once."""

        def record(index: JournalIndex, _segments: SegmentWriter) -> None:
            index.count("accepted", "", count)
            index.count("dropped", reason, count)

        self._record(record)

    def generated(self, counts: Mapping[str, int]) -> None:
        """Record so many more requests, tokens and requests that span versions, by name."""
        more = dict(counts)

        def record(index: JournalIndex, _segments: SegmentWriter) -> None:
            for name, amount in more.items():
                index.count("generated", name, amount)

        self._record(record)

    def make_batch(self, batch: Batch) -> None:
        """Record a batch that was made."""
        self._record(lambda index, _: index.make_batch(batch))

    def apply_batch(self, sequence_no: int, trained: int, dropped: Mapping[str, int], elapsed_s: float) -> None:
        """Record a batch that was applied."""
        counts = dict(dropped)

        def record(index: JournalIndex, _segments: SegmentWriter) -> None:
            index.apply_batch(sequence_no, trained, counts)
            index.set_meta("elapsed_s", f"{elapsed_s:.3f}")

        self._record(record)

    def open_epoch(self, epoch: int, origin: Version, kept: Iterable[int]) -> None:
        """Record that the trainer began an epoch from version `origin`; of the later batches keep only `kept`."""
        batches = list(kept)
        self._checkpoints = [origin.number]
        self._record(lambda index, _: index.open_epoch(epoch, origin, batches))

    def keep_batches(self, after: int, kept: Iterable[int]) -> None:
        """Of the batches after number `after` keep only `kept`: the groups of the others are in no batch again."""
        batches = list(kept)
        self._record(lambda index, _: index.keep_batches(after, batches))

    def cover(self, number: int) -> None:
        """Record a complete checkpoint at version `number`: what the one before it holds is no longer needed."""
        if self._checkpoints[-1:] == [number]:
            return  # the same checkpoint again, such as the periodic one and the final one of the last step
        self._checkpoints.append(number)
        if len(self._checkpoints) < 2:
            return
        previous = self._checkpoints[-2]

        def record(index: JournalIndex, _segments: SegmentWriter) -> None:
            index.prune(previous)
            self._delete_segments = True

        self._record(record)

    # Waiting and reading.

    async def durable(self) -> None:
        """Return when everything recorded so far is on disk.

        Raises:
            JournalError: if it cannot be written, now or at any time before.
        """
        while self._flushing is not None and self._failure is None:
            await asyncio.wait({self._flushing})
        if self._failure is not None:
            raise self._failure

    async def allot_epoch(self) -> int:
        """Allot the next epoch, durably."""
        return await self._ask(_allot)

    async def recover(self) -> Recovery:
        """Read what earlier processes of the run left behind."""
        return await self._ask(lambda index: index.recover())

    async def read_group(self, number: int) -> list[orchestrator_pb2.TrajectoryRecord]:
        """Return the trajectories of a group.

        Raises:
            JournalError: if one of them is damaged.
        """
        return await self._ask(lambda index: _read(index, self._directory, number))

    async def close(self) -> None:
        """Write what waits and close the files."""
        try:
            await self.durable()
        finally:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
            self._thread.shutdown()

    def _close(self) -> None:
        self._segments.close()
        self._index.connection.close()

    async def _ask(self, question: Callable[[JournalIndex], _Answer]) -> _Answer:
        await self.durable()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, question, self._index)
        except sqlite3.Error as error:
            raise JournalError(f"cannot read the journal in {self._directory.parent}: {error}") from error

    def _record(self, record: Record) -> None:
        if self._failure is not None:
            raise self._failure
        if len(self._waiting) >= self._queue_records:
            raise JournalError(
                f"{len(self._waiting)} records wait to be written, the most that orchestrator.journal.queue_records allows:"
                " the disk is too slow"
            )
        self._waiting.append(record)
        self.position += 1
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().create_task(self._flush(), name="journal")

    async def _flush(self) -> None:
        """Write until nothing waits; whatever arrives during one write travels in the next."""
        try:
            while self._waiting:
                await asyncio.sleep(self._interval_s)
                records, self._waiting = self._waiting, []
                await asyncio.get_running_loop().run_in_executor(self._thread, self._commit, records)
        except BaseException as error:
            # Whatever the error is, these records are lost: nothing after them may be called durable.
            self._failure = JournalError(
                f"cannot write the journal in {self._directory.parent}: {type(error).__name__}: {error};"
                " see to the disk, then start the run again: it continues from what was written before"
            )
            log.error("the journal failed", error=repr(error))  # noqa: TRY400 - `durable` raises it
            if not isinstance(error, Exception):
                raise
        finally:
            self._flushing = None

    def _commit(self, records: Sequence[Record]) -> None:
        connection = self._index.connection
        self._delete_segments = False
        connection.execute("BEGIN IMMEDIATE")
        try:
            for record in records:
                record(self._index, self._segments)
            self._segments.sync()
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        if self._delete_segments:
            self._delete_unneeded_segments()

    def _delete_unneeded_segments(self) -> None:
        """Delete the segments that the committed index no longer names; one that stays is tried again at the next start."""
        try:
            self._segments.delete_below(self._index.oldest_segment() or self._segments.number)
        except OSError as error:
            log.warning("cannot delete an old segment of the journal", error=str(error))


class LiveTrajectories:
    """The trajectories of live groups: in memory, or read from the journal after a restart.

    Args:
        journal: Where they are read.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._records: dict[int, list[orchestrator_pb2.TrajectoryRecord]] = {}

    def keep(self, group: int, records: list[orchestrator_pb2.TrajectoryRecord]) -> None:
        """Keep the trajectories of a group in memory until `forget`."""
        self._records[group] = records

    async def get(self, group: int) -> list[orchestrator_pb2.TrajectoryRecord]:
        """Return the trajectories of a group.

        Raises:
            JournalError: if the journal cannot read them.
        """
        if group not in self._records:
            self._records[group] = await self._journal.read_group(group)
        return self._records[group]

    def forget(self, group: int) -> None:
        """Release the trajectories of a group that is no longer live."""
        self._records.pop(group, None)


def _allot(index: JournalIndex) -> int:
    return index.allot_epoch()


def _read(index: JournalIndex, directory: Path, number: int) -> list[orchestrator_pb2.TrajectoryRecord]:
    try:
        records = [
            orchestrator_pb2.TrajectoryRecord.FromString(read_record(directory, location))
            for location in index.locations(number)
        ]
    except (SegmentError, DecodeError) as error:
        raise JournalError(f"group {number} of the journal cannot be read: {error}") from error
    if not records:
        raise JournalError(f"group {number} of the journal has no trajectories")
    return records
