"""The journal of a run: what was drawn, accepted, batched and trained survives a SIGKILL at any moment.

Trajectories with their text are written to checksummed segment files, facts to SQLite tables that name the place of each
trajectory. Records are gathered for a few milliseconds and made durable together: segments first, then the tables, so that
the tables never name what is not there. `recovery` reads the tables at the next start.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import google_crc32c
import structlog
from google.protobuf.message import DecodeError

from orchestrator_svc.recovery import GroupDamagedError, JournalError, Recovery, read_tables
from orchestrator_svc.scheduler import Batch
from sluice.tasks import discard_outcome
from sluice.threads import SerialThread
from sluice.v1 import orchestrator_pb2
from sluice.versions import Version

log = structlog.get_logger(__name__)

_Answer = TypeVar("_Answer")

FORMAT = "1"

_DISK_S = 300.0
"""Seconds that the disk may take for the records that wait; a disk that needs longer is gone."""

_CLOSE_S = 30.0
"""Seconds that closing the files may take, once everything recorded is on disk."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS epochs (epoch INTEGER PRIMARY KEY, origin TEXT);
CREATE TABLE IF NOT EXISTS groups (
  number INTEGER PRIMARY KEY, position INTEGER NOT NULL, stage TEXT NOT NULL, versions TEXT NOT NULL DEFAULT '');
CREATE INDEX IF NOT EXISTS groups_by_stage ON groups (stage);
CREATE TABLE IF NOT EXISTS trajectories (
  number INTEGER NOT NULL, ordinal INTEGER NOT NULL, segment INTEGER NOT NULL, offset INTEGER NOT NULL,
  PRIMARY KEY (number, ordinal)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS batches (
  sequence_no INTEGER PRIMARY KEY, batch_id TEXT NOT NULL, applied INTEGER NOT NULL DEFAULT 0,
  trained INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS batch_groups (
  sequence_no INTEGER NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (sequence_no, number)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS batch_drops (
  sequence_no INTEGER NOT NULL, reason TEXT NOT NULL, trajectories INTEGER NOT NULL,
  PRIMARY KEY (sequence_no, reason)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counts (
  kind TEXT NOT NULL, reason TEXT NOT NULL, amount INTEGER NOT NULL, PRIMARY KEY (kind, reason)) WITHOUT ROWID;
"""

_SET = "INSERT OR REPLACE INTO meta VALUES (?, ?)"
_RAISE = (
    "INSERT INTO meta VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value"
    " WHERE CAST(value AS INTEGER) < CAST(excluded.value AS INTEGER)"
)
_COUNT = "INSERT INTO counts VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET amount = amount + excluded.amount"


class Journal:
    """The journal of one run; use it from one event loop, `close` it at the end.

    Args:
        run_dir: The run's directory: ``journal.sqlite`` and ``journal/`` lie in it.
        identity: What must not change between two starts, such as run, seed and environment.
        fsync_interval_s: Seconds that records are gathered before they are made durable.
        queue_records: Records that may wait; more are an error.

    Attributes:
        start: Number of processes that have opened this journal, this one included. Names that another service remembers,
            such as request ids, carry it: a task that is drawn again then gets new ones.
        resumes: Whether an earlier process began the run.
        position: Number of records of this process.

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
        self._connection = _open_tables(run_dir / "journal.sqlite", identity)
        self._run = self._connection.execute  # in the journal's thread only, but for this constructor
        self._run(_RAISE, ("starts", "0"))
        self._run("UPDATE meta SET value = CAST(CAST(value AS INTEGER) + 1 AS TEXT) WHERE key = 'starts'")
        self.start = int(self._run("SELECT value FROM meta WHERE key = 'starts'").fetchone()[0])
        self.resumes = bool(self._run("SELECT EXISTS (SELECT 1 FROM epochs)").fetchone()[0])
        self.position = 0
        self._segments = SegmentWriter(self._directory, segment_bytes)
        self._interval_s, self._queue_records = fsync_interval_s, queue_records
        self._thread = SerialThread("journal")
        self._waiting: list[Callable[[], object]] = []
        self._flushing: asyncio.Task[None] | None = None
        self._written = 0
        self._progress = asyncio.Event()
        self._failure: JournalError | None = None
        self._live: dict[int, list[orchestrator_pb2.TrajectoryRecord]] = {}
        self._checkpoints: list[int] = []
        self._pruned = False
        self._delete_unneeded_segments()  # those that a killed process left between its commit and their deletion

    # Recording. These methods return at once; what they record is on disk after `durable`.

    def draw(self, number: int, position: int, next_position: int) -> None:
        """Record that a task was drawn for a group; the next new task comes from `next_position` of the stream."""

        def record() -> None:
            self._run("INSERT OR REPLACE INTO groups VALUES (?, ?, 'drawn', '')", (number, position))
            self._run(_RAISE, ("next_group", str(number + 1)))  # an older group may be drawn again
            self._run(_SET, ("next_position", str(next_position)))

        self._record(record)

    def accept(
        self, number: int, versions: Iterable[Version], records: list[orchestrator_pb2.TrajectoryRecord]
    ) -> None:
        """Record a scored group; `records` are the trajectories that may be trained."""
        text = ",".join(map(str, versions))
        self._live[number] = records

        def record() -> None:
            places = [self._segments.append(each.SerializeToString()) for each in records]
            self._run("UPDATE groups SET stage = 'accepted', versions = ? WHERE number = ?", (text, number))
            self._connection.executemany(
                "INSERT OR REPLACE INTO trajectories VALUES (?, ?, ?, ?)",
                [(number, ordinal, *place) for ordinal, place in enumerate(places)],
            )
            self._run(_COUNT, ("accepted", "", len(places)))

        self._record(record)

    def drop(self, number: int, reason: str, *, was_accepted: int) -> None:
        """Record that a group in no batch was given up; `was_accepted` counts its trajectories, 0 if it never had any."""
        self._live.pop(number, None)

        def record() -> None:
            self._run("DELETE FROM groups WHERE number = ?", (number,))
            self._run("DELETE FROM trajectories WHERE number = ?", (number,))
            self._run(_COUNT, ("dropped" if was_accepted else "failed", reason, was_accepted or 1))

        self._record(record)

    def drop_trajectories(self, reason: str, count: int) -> None:
        """Record trajectories that were generated and given up at once."""
        rows = [("accepted", "", count), ("dropped", reason, count)]
        self._record(lambda: self._connection.executemany(_COUNT, rows))

    def generated(self, counts: Mapping[str, int]) -> None:
        """Record what was generated since the last call, as `PolicyEngine.counts` names it."""
        rows = [("generated", name, amount) for name, amount in counts.items()]
        self._record(lambda: self._connection.executemany(_COUNT, rows))

    def make_batch(self, batch: Batch) -> None:
        """Record a batch that was made."""

        def record() -> None:
            number = batch.sequence_no
            self._run("INSERT INTO batches (sequence_no, batch_id) VALUES (?, ?)", (number, batch.batch_id))
            self._connection.executemany("INSERT INTO batch_groups VALUES (?, ?)", [(number, g) for g in batch.groups])

        self._record(record)

    def apply_batch(self, batch: Batch, trained: int, dropped: Mapping[str, int], elapsed_s: float) -> None:
        """Record a batch that was applied `elapsed_s` seconds after the start of the run; release its trajectories."""
        number, drops = batch.sequence_no, [(batch.sequence_no, reason, count) for reason, count in dropped.items()]
        for group in batch.groups:
            self._live.pop(group, None)

        def record() -> None:
            self._run("UPDATE batches SET applied = 1, trained = ? WHERE sequence_no = ?", (trained, number))
            self._connection.executemany("INSERT OR REPLACE INTO batch_drops VALUES (?, ?, ?)", drops)
            self._run(_SET, ("elapsed_s", f"{elapsed_s:.3f}"))

        self._record(record)

    def open_epoch(self, epoch: int, origin: Version, kept: Iterable[int]) -> None:
        """Record that the trainer began an epoch from version `origin`; of the later batches keep only `kept`."""
        self._checkpoints = [origin.number]

        def record() -> None:
            self._run("UPDATE epochs SET origin = ? WHERE epoch = ?", (str(origin), epoch))
            self._run("UPDATE batches SET applied = 0, trained = 0 WHERE sequence_no > ?", (origin.number,))
            self._run("DELETE FROM batch_drops WHERE sequence_no > ?", (origin.number,))

        self._record(record)
        self.keep_batches(origin.number, kept)

    def keep_batches(self, after: int, kept: Iterable[int]) -> None:
        """Of the batches after number `after` keep only `kept`: the groups of the others are in no batch again."""
        keep = set(kept)

        def record() -> None:
            rows = self._run("SELECT sequence_no FROM batches WHERE sequence_no > ?", (after,)).fetchall()
            gone = [row for row in rows if row[0] not in keep]
            self._connection.executemany("DELETE FROM batches WHERE sequence_no = ?", gone)
            self._connection.executemany("DELETE FROM batch_groups WHERE sequence_no = ?", gone)

        self._record(record)

    def cover(self, number: int) -> None:
        """Record a complete checkpoint at version `number`: what the one before it holds is no longer needed."""
        if self._checkpoints[-1:] == [number]:
            return  # the same checkpoint again, such as the periodic one and the final one of the last step
        self._checkpoints.append(number)
        if len(self._checkpoints) < 2:
            return
        covered = (self._checkpoints[-2],)

        def record() -> None:
            inside = "number IN (SELECT number FROM batch_groups WHERE sequence_no <= ?)"
            self._run(f"DELETE FROM trajectories WHERE {inside}", covered)  # noqa: S608 - a constant
            self._run(f"DELETE FROM groups WHERE {inside}", covered)  # noqa: S608 - a constant
            self._run("DELETE FROM batch_groups WHERE sequence_no <= ?", covered)
            self._pruned = True

        self._record(record)

    # Waiting and reading.

    async def durable(self) -> None:
        """Return when everything recorded before this call is on disk.

        Raises:
            JournalError: if it cannot be written, now or at any time before.
        """
        wanted = self.position
        try:
            async with asyncio.timeout(_DISK_S):
                while self._written < wanted and self._failure is None:
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError as error:
            raise JournalError(
                f"the disk of {self._directory.parent} did not take the journal's records within {_DISK_S:g} s: see to the"
                " disk, then start the run again: it continues from what was written before"
            ) from error
        if self._failure is not None:
            raise self._failure

    async def allot_epoch(self) -> int:
        """Allot the next epoch, durably."""

        def allot() -> int:
            epoch = int(self._run("SELECT COALESCE(MAX(epoch), 0) + 1 FROM epochs").fetchone()[0])
            self._run("INSERT INTO epochs (epoch) VALUES (?)", (epoch,))
            return epoch

        return await self._ask(allot)

    async def recover(self) -> Recovery:
        """Read what earlier processes of the run left behind."""
        return await self._ask(lambda: read_tables(self._connection))

    async def trajectories(self, number: int) -> list[orchestrator_pb2.TrajectoryRecord]:
        """Return the trajectories of a live group; they stay in memory until it is dropped or applied.

        Raises:
            GroupDamagedError: if a restart made it necessary to read them, and one is damaged.
            JournalError: if nothing can be read now.
        """
        if number not in self._live:
            self._live[number] = await self.read_group(number)
        return self._live[number]

    async def read_group(self, number: int) -> list[orchestrator_pb2.TrajectoryRecord]:
        """Read the trajectories of a group from disk, with the errors of `trajectories`."""

        def read() -> list[orchestrator_pb2.TrajectoryRecord]:
            rows = self._run("SELECT segment, offset FROM trajectories WHERE number = ? ORDER BY ordinal", (number,))
            records = []
            for row in rows.fetchall():
                try:
                    payload = read_record(self._directory, Location(*row))
                    records.append(orchestrator_pb2.TrajectoryRecord.FromString(payload))
                except (SegmentError, DecodeError) as error:
                    raise GroupDamagedError(f"group {number} of the journal cannot be read: {error}") from error
            if not records:
                raise GroupDamagedError(f"group {number} of the journal has no trajectories")
            return records

        return await self._ask(read)

    async def close(self) -> None:
        """Write what waits and close the files; those of a disk that does not answer are left open.

        Raises:
            JournalError: if what waits cannot be written.
        """

        def close() -> None:
            self._segments.close()
            self._connection.close()

        try:
            await self.durable()
        finally:
            # Where `durable` fails or is cancelled the thread may hang in a write, and nothing is gained by waiting for it.
            closing = self._thread.submit(close)
            self._thread.end()
            discard_outcome(closing)
        await asyncio.wait({closing}, timeout=_CLOSE_S)
        if not closing.done():
            log.warning("the disk does not let the journal close; its files stay open", path=str(self._directory))

    async def _ask(self, question: Callable[[], _Answer]) -> _Answer:
        await self.durable()
        try:
            return await self._thread.submit(question)
        except sqlite3.Error as error:
            raise JournalError(f"cannot read the journal in {self._directory.parent}: {error}") from error

    def _record(self, record: Callable[[], object]) -> None:
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
                await self._thread.submit(self._commit, records)
                self._written += len(records)
                self._progress.set()
        except BaseException as error:
            # Whatever the error is, these records are lost: nothing after them may be called durable.
            self._failure = JournalError(
                f"cannot write the journal in {self._directory.parent}: {type(error).__name__}: {error};"
                " see to the disk, then start the run again: it continues from what was written before"
            )
            if not isinstance(error, Exception):
                raise
            log.error("the journal failed", error=repr(error))  # noqa: TRY400 - `durable` raises it
        finally:
            self._flushing = None
            self._progress.set()

    def _commit(self, records: Sequence[Callable[[], object]]) -> None:
        self._pruned = False
        self._run("BEGIN IMMEDIATE")
        try:
            for record in records:
                record()
            self._segments.sync()
            self._run("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._run("ROLLBACK")
            raise
        if self._pruned:
            self._delete_unneeded_segments()

    def _delete_unneeded_segments(self) -> None:
        """Delete the segments that the committed tables no longer name; one that stays is tried again at the next start."""
        oldest = self._run("SELECT MIN(segment) FROM trajectories").fetchone()[0]
        try:
            self._segments.delete_below(self._segments.number if oldest is None else oldest)
        except OSError as error:
            log.warning("cannot delete an old segment of the journal", error=str(error))


def _open_tables(path: Path, identity: Mapping[str, str]) -> sqlite3.Connection:
    """Open the tables and record whose journal this is, or check it.

    Raises:
        JournalError: if it belongs to something else or cannot be read.
    """
    try:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.executescript(_SCHEMA)
    except sqlite3.DatabaseError as error:
        raise JournalError(f"{path} is not a readable journal ({error}): move it away to start a new run") from error
    known = dict(connection.execute("SELECT key, value FROM meta"))
    wanted = {"format": FORMAT, **identity}
    for key, value in wanted.items():
        if known.setdefault(key, value) != value:
            connection.close()
            raise JournalError(
                f"the journal of this run was written with {key} = {known[key]!r}, now it is {value!r}:"
                " change it back, or begin a new run (--run NAME)"
            )
    connection.executemany(_SET, wanted.items())
    return connection


# Segments: append-only files. Each begins with a magic number; a record is its length and CRC-32C (little-endian, 32 bits each),
# then the bytes. Only records that the tables name were acknowledged: what follows the last of them was torn by a crash.

MAGIC = b"SLUICEJ1"
_HEADER = struct.Struct("<II")


class SegmentError(Exception):
    """A record is not what was written: the file is damaged or missing."""


class Location(NamedTuple):
    """Where a record lies: number of the segment, offset of its header in bytes."""

    segment: int
    offset: int


def segment_path(directory: Path, number: int) -> Path:
    """Return the file of a segment."""
    return directory / f"segment-{number:08d}.bin"


def segment_numbers(directory: Path) -> list[int]:
    """Return the numbers of the segments that exist, ascending."""
    return sorted(int(path.stem.removeprefix("segment-")) for path in directory.glob("segment-*.bin"))


def read_record(directory: Path, location: Location) -> bytes:
    """Return the bytes of one record.

    Raises:
        SegmentError: if the record is torn, damaged or gone.
        JournalError: if the disk or the system does not let it be read.
    """
    path = segment_path(directory, location.segment)
    try:
        with path.open("rb") as file:
            file.seek(location.offset)
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                raise SegmentError(f"{path} ends before the record at {location.offset}")
            length, checksum = _HEADER.unpack(header)
            payload = file.read(length)
    except FileNotFoundError as error:
        raise SegmentError(f"{path} is gone") from error
    except OSError as error:
        raise JournalError(
            f"cannot read {path}, which may not be damaged: {error.strerror}; check the disk and the limit of open files"
        ) from error
    if len(payload) < length or google_crc32c.value(payload) != checksum:
        raise SegmentError(f"the record at {location.offset} of {path} is damaged")
    return payload


class SegmentWriter:
    """Appends records; use it from one thread.

    Args:
        directory: Where the segments lie; made if absent.
        max_bytes: Size after which a new segment is begun.

    Attributes:
        number: Number of the segment that is written to, or of the last one before it.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._max_bytes = directory, max_bytes
        # Never append behind a torn end: each start begins a file of its own.
        self.number = max(segment_numbers(directory), default=0)
        self._file: BinaryIO | None = None
        self._size = 0
        self._dirty = False

    def append(self, payload: bytes) -> Location:
        """Write one record, which is durable after `sync`, and return where it lies."""
        if self._file is None or self._size >= self._max_bytes:
            self.close()
            self.number += 1
            self._file = segment_path(self._directory, self.number).open("xb")
            self._file.write(MAGIC)
            self._size = len(MAGIC)
            _sync_directory(self._directory)
        location = Location(self.number, self._size)
        self._file.write(_HEADER.pack(len(payload), google_crc32c.value(payload)))
        self._file.write(payload)
        self._size += _HEADER.size + len(payload)
        self._dirty = True
        return location

    def sync(self) -> None:
        """Make everything appended durable."""
        if self._file is not None and self._dirty:
            self._file.flush()
            os.fdatasync(self._file.fileno())
            self._dirty = False

    def close(self) -> None:
        """Sync and close."""
        if self._file is not None:
            self.sync()
            self._file.close()
            self._file = None

    def delete_below(self, number: int) -> None:
        """Delete the segments below a number."""
        for each in segment_numbers(self._directory):
            if each < number and each != self.number:
                segment_path(self._directory, each).unlink(missing_ok=True)


def _sync_directory(directory: Path) -> None:
    """Make the name of a new file durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
