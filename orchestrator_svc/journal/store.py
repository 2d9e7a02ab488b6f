"""The journal on disk: every fact of a run survives a SIGKILL at any moment.

    journal.sqlite            table facts: seq, kind, grp, fact (a serialized Fact of journal.proto), only ever appended to
    journal/segment-*.bin     payloads (answers of replicas, trajectories) that facts name; deleted once a checkpoint covers them
    journal/snapshot.bin      the state after one of the facts (journal/snapshot.py)

`Journal.record_fact` applies a fact to the ledger and queues it; nothing else changes the ledger. Facts are gathered for a few milliseconds, or until somebody waits for them, and made durable together: payloads first, then the
facts in one transaction, so that no fact names a payload that is missing. The next start takes the state of the snapshot, and folds
the facts after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import structlog
import xxhash
from google.protobuf.message import DecodeError, Message
from prometheus_client import Metric

from orchestrator_svc.journal import DATABASE
from orchestrator_svc.journal.facts import Accepted, LedgerError, Part, Place
from orchestrator_svc.journal.ledger import Group, Ledger
from orchestrator_svc.journal.migration import FORMAT, migrate
from orchestrator_svc.journal.records import Encoded, SharedRecord, decoded, encode
from orchestrator_svc.journal.segments import Disk, JournalError, SegmentError, SegmentWriter, read_payload
from orchestrator_svc.journal.snapshot import Snapshots
from sluice.clock import CLOCK, Clock
from sluice.tasks import discard_outcome
from sluice.telemetry import gauge
from sluice.threads import SerialThread
from sluice.v1 import journal_pb2

log = structlog.get_logger(__name__)

_Payload = TypeVar("_Payload", bound=Message)
_Read = TypeVar("_Read")

_DISK_S = 300.0
"""Seconds that the disk may take to write the waiting facts. A disk that needs longer counts as gone."""

_SMALL_TOKENS = 1 << 14
"""Groups with up to so many token ids are encoded in a fraction of a millisecond: a thread would cost more."""

_CLOSE_S = 30.0
"""Seconds that closing the files may take, once everything recorded is on disk."""

_SNAPSHOT_S = 2.0
"""Seconds that `Journal.close` waits for a snapshot."""

_PAGE = 10_000
"""Facts read at a time: short transactions let a live run clean up its write-ahead log."""

# Rows are never deleted, so the file has no pages to give back: it needs no auto_vacuum. Only the migration deletes rows;
# it ends with a VACUUM.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS facts (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, grp INTEGER, fact BLOB NOT NULL);
"""

INSERT_FACT = "INSERT INTO facts (seq, kind, grp, fact) VALUES (?, ?, ?, ?)"
"""Takes what `fact_row` returns."""


class GroupDamagedError(JournalError):
    """A payload cannot be read any more; the rest of the journal can be used."""


def read_facts(run_dir: Path, after: int = 0) -> Iterator[tuple[int, journal_pb2.Fact]]:
    """Yield the facts of a run after number `after` in order, each with its number. This does not disturb a live run.

    `ledger.folded` turns them into the state of the run.

    Raises:
        JournalError: if there is no journal, or this release cannot read it.
    """
    path = run_dir / DATABASE
    if not path.exists():
        raise JournalError(f"{path} does not exist: name the directory of a run")
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if not tables:
                return  # a process is just making it
            if "facts" not in tables:
                raise JournalError(f"{path} was written by an older release: start the run once, which migrates it")
            yield from _stored_facts(connection, after)
    except (sqlite3.DatabaseError, DecodeError) as error:
        raise JournalError(f"{path} is not a readable journal ({error})") from error


def _stored_facts(connection: sqlite3.Connection, last: int = 0) -> Iterator[tuple[int, journal_pb2.Fact]]:
    """Yield the facts after number `last`."""
    parse = journal_pb2.Fact.FromString
    while rows := connection.execute(
        "SELECT seq, fact FROM facts WHERE seq > ? ORDER BY seq LIMIT ?", (last, _PAGE)
    ).fetchall():
        for seq, fact in rows:
            yield seq, parse(fact)
        last = rows[-1][0]


@dataclass
class _Waiting:
    """What the next write makes durable."""

    facts: list[tuple[int, journal_pb2.Fact]] = field(default_factory=list)
    payloads: list[tuple[Place, bytes]] = field(default_factory=list)
    payload_bytes: int = 0
    unneeded_below: int | None = None
    deletes: bool = False
    since: float = 0.0
    """When the first fact came, on the journal's clock."""


class KeptTrajectories(NamedTuple):
    """Where the trajectories of a group lie, for the fact of its end.

    Attributes:
        beginnings: For `EpisodesEnded.beginnings`.
        trajectories: One for each record, in order.
    """

    beginnings: Sequence[journal_pb2.RecordPart]
    trajectories: Sequence[journal_pb2.AcceptedTrajectory]


@dataclass(frozen=True, slots=True)
class JournalLimits:
    """When the journal writes, and how much may wait.

    Attributes:
        fsync_interval_s: Seconds that facts are gathered before they are made durable, unless somebody waits for them.
        segment_bytes: Size at which a new segment is begun.
        queue_records: Facts that may wait; more are an error.
        queue_bytes: Size of the payloads that may wait; more is an error.
    """

    fsync_interval_s: float = 0.025
    segment_bytes: int = 64 << 20
    queue_records: int = 100_000
    queue_bytes: int = 512 << 20


class Journal:
    """The journal of one run; use it from one event loop, `close` it at the end.

    Args:
        run_dir: The run's directory: ``journal.sqlite`` and ``journal/`` lie in it.
        identity: What must not change between two starts, such as run and seed.
        environment: Name for the only environment of an older journal, which did not record the name.
        software_version: Release of the program, for people to read.
        limits: When the journal writes, and how much may wait.
        follow: Gets every fact after the ledger has applied it. Facts of earlier processes come first, from the snapshot on.
        snapshots: Reads and writes the snapshot of the ledger and of the followers with a state. None: a start reads all facts.
        given_up: Set by another thread to stop the constructor's reading, because the journal is no longer wanted.
        disk: Does the writing.
        clock: Times the waits for the disk.

    Attributes:
        ledger: The state of the run. Only `record` changes it.
        resumes: Whether an earlier process began the run.
        kept_bytes: Size of all payloads so far: of those that were on disk at the start, and of those that `keep` took.

    Raises:
        JournalError: if the journal belongs to something else, cannot be read or was given up.
    """

    def __init__(
        self,
        run_dir: Path,
        identity: Mapping[str, str],
        *,
        environment: str = "",
        software_version: str = "",
        limits: JournalLimits | None = None,
        follow: Callable[[journal_pb2.Fact], None] | None = None,
        snapshots: Snapshots | None = None,
        given_up: threading.Event | None = None,
        disk: Disk | None = None,
        clock: Clock = CLOCK,
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._directory = run_dir / "journal"
        self._follow, self._snapshots = follow, snapshots
        self._given_up = given_up or threading.Event()
        self._disk, self._clock = disk or Disk(), clock
        self._connection = _open(run_dir / DATABASE, environment)
        self._run = self._connection.execute  # in the journal's thread only, but for this constructor
        self._limits = limits or JournalLimits()
        self._waiting = _Waiting()
        self._durable_seq = self._taken_seq = 0
        self._writing_since: float | None = None
        self._awaited = asyncio.Event()  # set if somebody waits for facts that no write has taken
        self._flushing: asyncio.Task[None] | None = None
        self._progress = asyncio.Event()
        self._failure: JournalError | None = None
        self._in_memory: dict[int, list[SharedRecord]] = {}
        self.ledger = self._fold()
        self._segments = SegmentWriter(
            self._directory, self._limits.segment_bytes, self._disk, after=self.ledger.last_segment
        )
        self.resumes = self.ledger.allotted > 0
        self.kept_bytes = sum(path.stat().st_size for path in self._directory.glob("segment-*.bin"))
        self._begin(identity, software_version)
        self._thread, self._encoder = SerialThread("journal"), SerialThread("encoder")

    def _fold(self) -> Ledger:
        ledger, self._snapshot_seq = Ledger(), 0
        collects = gc.isenabled()
        gc.disable()  # a million facts make no cycles, and searching for cycles takes a third of the time
        try:
            if self._snapshots is not None and (found := self._snapshots.read(self._directory, self._fact_at)):
                self._snapshot_seq, ledger = found
            for seq, fact in _stored_facts(self._connection, self._snapshot_seq):
                ledger.apply_fact(seq, fact)
                if self._follow is not None:
                    self._follow(fact)
                if self._given_up.is_set():
                    break
            # If a row after the last fact was lost, its number must not be given to another fact.
            highest = self._run("SELECT seq FROM sqlite_sequence WHERE name = 'facts'").fetchone()
        except (LedgerError, DecodeError, sqlite3.DatabaseError) as error:
            self._connection.close()
            raise JournalError(
                f"{self._directory.parent / DATABASE} is damaged behind fact {ledger.last_seq} ({error}): put a copy of the"
                " file back, or begin a new run (--run NAME)"
            ) from error
        finally:
            if collects:
                gc.enable()
        self._stop_if_given_up()
        self._last_read = ledger.last_seq
        ledger.last_seq = max(ledger.last_seq, highest[0] if highest else 0)
        return ledger

    def _stop_if_given_up(self) -> None:
        if self._given_up.is_set():
            self._connection.close()
            raise JournalError(
                f"reading {self._directory.parent / DATABASE} was given up: start the run again to continue it"
            )

    def _fact_at(self, seq: int) -> bytes | None:
        """Return a serialized fact; None if there is none of this number."""
        row = self._run("SELECT fact FROM facts WHERE seq = ?", (seq,)).fetchone()
        return None if row is None else row[0]

    def _due_snapshot(self, seq: int) -> Callable[[], None] | None:
        """Return a function that writes a snapshot of the state after fact `seq`; None if too few facts came after the last one."""
        snapshots = self._snapshots
        if snapshots is None or not snapshots.is_due(seq - self._snapshot_seq):
            return None
        fact = self._fact_at(seq)
        return None if fact is None else partial(snapshots.write, self._directory, seq, fact, self.ledger)

    def _begin(self, identity: Mapping[str, str], software_version: str) -> None:
        """Check that the journal belongs to this run, and record the start of this process before its number is used in a name."""
        for key, value in identity.items():
            known = self.ledger.identity.get(key, value)
            if known != value:
                self._connection.close()
                raise JournalError(
                    f"the journal of this run was written with {key} = {known!r}, now it is {value!r}:"
                    " change it back, or begin a new run (--run NAME)"
                )
        if (snapshot := self._due_snapshot(self._last_read)) is not None:
            snapshot()
            self._snapshot_seq = self._last_read
            self._stop_if_given_up()
        started = journal_pb2.ProcessStarted(
            start=self.ledger.start + 1, software_version=software_version, identity=identity
        )
        self._apply(journal_pb2.Fact(process_started=started))
        self._commit(self._take_waiting(delete=True))
        self._durable_seq = self.ledger.last_seq

    def recorded(self, kind: str) -> Iterator[journal_pb2.Fact]:
        """Yield the facts of one kind that earlier processes recorded, in order.

        Raises:
            JournalError: if the journal cannot be read.
        """
        path = self._directory.parent / DATABASE
        try:
            with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
                for (fact,) in connection.execute("SELECT fact FROM facts WHERE kind = ? ORDER BY seq", (kind,)):
                    yield journal_pb2.Fact.FromString(fact)
        except (sqlite3.DatabaseError, DecodeError) as error:
            raise JournalError(f"{path} is not a readable journal ({error})") from error

    # Recording. These methods return at once; what they record is on disk after `durable`.

    def record_fact(self, fact: journal_pb2.Fact) -> None:
        """Apply a fact to the ledger, and write it. Facts that are recorded without waiting in between become durable together.

        Raises:
            LedgerError: if it does not follow from the facts before it; nothing is recorded then.
            JournalError: if an earlier one could not be written, or the disk is too slow.
        """
        if self._failure is not None:
            raise self._failure
        if len(self._waiting.facts) >= self._limits.queue_records:
            raise JournalError(
                f"{len(self._waiting.facts)} facts wait to be written, the most that may: the disk is too slow"
            )
        self._apply(fact)
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().create_task(self._flush(), name="journal")

    def _apply(self, fact: journal_pb2.Fact) -> None:
        seq = self.ledger.last_seq + 1
        if not self._waiting.facts:
            self._waiting.since = self._clock()
        fact.time.GetCurrentTime()
        self.ledger.apply_fact(seq, fact)
        if self._follow is not None:
            self._follow(fact)
        self._waiting.facts.append((seq, fact))
        kind = fact.WhichOneof("kind")
        if kind == "group_dropped":
            self._in_memory.pop(fact.group_dropped.group, None)
        elif kind == "trajectories_set_aside":
            self._forget(fact.trajectories_set_aside)
        elif kind == "batch_applied":
            for group in self.ledger.applied_batches[fact.batch_applied.sequence_no].groups:
                self._in_memory.pop(group.number, None)
        elif kind == "checkpoint_covered":
            self._waiting.deletes = True

    def scrape(self) -> Iterator[Metric]:
        """Yield Prometheus metrics: how far the disk is behind, and how much is kept on it."""
        behind = self.ledger.last_seq - self._durable_seq
        since = self._waiting.since if self._writing_since is None else self._writing_since
        lag_s = self._clock() - since if behind else 0.0
        yield gauge(
            "sluice_run_journal_lag_seconds", "Age of the oldest fact that is not on disk; 0 if all are.", lag_s
        )
        yield gauge("sluice_run_journal_behind", "Facts that are not on disk yet.", float(behind))
        yield gauge("sluice_run_journal_bytes", "Bytes of payloads that the journal keeps.", float(self.kept_bytes))

    def _forget(self, fact: journal_pb2.TrajectoriesSetAside) -> None:
        """Drop from memory the trajectories of a group that were set aside."""
        group, gone = self.ledger.groups.get(fact.group), set(fact.trajectory_ids)
        records = self._in_memory.pop(fact.group, None)
        if group is not None and records is not None:
            self._in_memory[fact.group] = [each for each in records if each.trajectory.trajectory_id not in gone]

    async def room_for(self, size: int) -> None:
        """Wait until the queue has room for a payload of `size` bytes from outside. Half of the queue is reserved for the run itself.

        Raises:
            JournalError: if what waits cannot be written.
        """
        while self._waiting.payload_bytes and self._waiting.payload_bytes + size > self._limits.queue_bytes // 2:
            await self.durable()

    def keep(self, payload: Message) -> journal_pb2.PayloadPlace:
        """Write a payload, and return its place for the fact that names it. Record that fact before the next `await`.

        Raises:
            JournalError: if the disk is too slow.
        """
        content = payload.SerializeToString()
        return self._keep(content, xxhash.xxh3_128_digest(content))

    def _keep(self, content: bytes, digest: bytes) -> journal_pb2.PayloadPlace:
        if self._waiting.payload_bytes + len(content) > self._limits.queue_bytes:
            raise JournalError(
                f"payloads of {self._waiting.payload_bytes >> 20} MiB wait to be written, and orchestrator.journal.queue_mb"
                f" allows {self._limits.queue_bytes >> 20}: the disk is too slow"
            )
        place = self._segments.place(content, digest)
        self._waiting.payloads.append((place, content))
        self._waiting.payload_bytes += len(content)
        self.kept_bytes += len(content)
        return place.to_proto()

    async def encoded(self, records: Sequence[SharedRecord]) -> Encoded:
        """Return the payloads of a group's trajectories, made in a thread unless they are small."""
        if sum(len(record.trajectory.token_ids) for record in records) <= _SMALL_TOKENS:
            return encode(records)
        return await self._encoder.submit(encode, records)

    def keep_trajectories(self, number: int, encoded: Encoded) -> KeptTrajectories:
        """Write the trajectories of a group as `keep` does; they also stay in memory until it is dropped or applied."""
        self._in_memory[number] = list(encoded.records)
        beginnings = [
            journal_pb2.RecordPart(place=self._keep(each.payload, each.digest), after=each.after)
            for each in encoded.beginnings
        ]
        trajectories = []
        for record, each in zip(encoded.records, encoded.rests, strict=True):
            accepted = journal_pb2.AcceptedTrajectory(trajectory_id=record.trajectory.trajectory_id)
            place = self._keep(each.payload, each.digest)
            if each.after:
                accepted.rest.CopyFrom(journal_pb2.RecordPart(place=place, after=each.after))
            else:
                accepted.place.CopyFrom(place)
            trajectories.append(accepted)
        return KeptTrajectories(beginnings, trajectories)

    # Waiting and reading.

    async def durable(self) -> int:
        """Write at once, wait until everything recorded before this call is on disk, and return the number of the last fact.

        Raises:
            JournalError: if it cannot be written, now or at any time before.
        """
        wanted = self.ledger.last_seq
        try:
            async with self._clock.timeout(_DISK_S):
                while self._durable_seq < wanted and self._failure is None:
                    if self._taken_seq < wanted:
                        self._awaited.set()
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError as error:
            raise JournalError(
                f"the disk of {self._directory.parent} did not take the journal's records within {_DISK_S:g} s: see to the"
                " disk, then start the run again: it continues from what was written before"
            ) from error
        if self._failure is not None:
            raise self._failure
        return wanted

    async def trajectories(self, group: Group) -> list[SharedRecord]:
        """Return the trajectories of a group that is in the ledger. Those of a live group stay in memory.

        Raises:
            GroupDamagedError: if they must be read from disk after a restart, and one is damaged.
            JournalError: if nothing can be read now.
        """
        if group.number not in self._in_memory:
            if not group.size:
                raise GroupDamagedError(f"group {group.number} of the journal has no trajectories")
            records = await self._read(lambda: self._records(group))
            if group.number not in self.ledger.groups:
                return records
            self._in_memory[group.number] = records
        return self._in_memory[group.number]

    async def read(self, places: Sequence[Place], kind: type[_Payload]) -> list[_Payload]:
        """Read payloads, with the errors of `trajectories`."""
        return await self._read(lambda: [kind.FromString(read_payload(self._directory, place)) for place in places])

    async def _read(self, read: Callable[[], list[_Read]]) -> list[_Read]:
        await self.durable()

        def guarded() -> list[_Read]:
            try:
                return read()
            except (SegmentError, DecodeError) as error:
                raise GroupDamagedError(f"a payload of the journal cannot be read: {error}") from error

        return await self._thread.submit(guarded)

    def _records(self, group: Group) -> list[SharedRecord]:
        """Read the records of a group. Blocks."""

        def payloads(parts: Iterable[Part | Accepted]) -> Iterator[tuple[bytes, int]]:
            return ((read_payload(self._directory, each.place), each.after) for each in parts)

        return list(decoded(payloads(group.beginnings), payloads(group.trajectories)))

    async def close(self) -> None:
        """Write what waits and close the files. Leave them open if the disk does not answer.

        Raises:
            JournalError: if what waits cannot be written.
        """
        snapshot: Callable[[], None] | None = None

        def close() -> None:
            nonlocal snapshot
            try:
                if self._durable_seq == self.ledger.last_seq:
                    snapshot = self._due_snapshot(self._durable_seq)
            finally:
                self._segments.close()
                self._connection.close()

        def write_snapshot() -> None:
            if snapshot is not None:
                snapshot()

        self._encoder.end()
        try:
            await self.durable()
        finally:
            self._failure = self._failure or JournalError("the journal is closed: start the run again to continue it")
            # If `durable` fails or is cancelled, the thread may hang in a write: do not wait for it.
            closing, writing = self._thread.submit(close), self._thread.submit(write_snapshot)
            self._thread.end()
            discard_outcome(closing)
            discard_outcome(writing)
        try:
            async with self._clock.timeout(_CLOSE_S):
                await asyncio.wait({closing})
        except TimeoutError:
            log.warning("the disk does not let the journal close; its files stay open", path=str(self._directory))
        with contextlib.suppress(TimeoutError):  # then the next start reads more facts
            async with self._clock.timeout(_SNAPSHOT_S):
                await asyncio.wait({writing})

    # Writing.

    async def _flush(self) -> None:
        """Write until nothing waits. What arrives during one write goes into the next."""
        try:
            while self._waiting.facts:
                with contextlib.suppress(TimeoutError):
                    async with self._clock.timeout(self._limits.fsync_interval_s):
                        await self._awaited.wait()
                work = self._take_waiting(delete=self._waiting.deletes)
                self._taken_seq, self._writing_since = work.facts[-1][0], work.since
                self._awaited.clear()
                await self._thread.submit(self._commit, work)
                self._durable_seq, self._writing_since = work.facts[-1][0], None
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

    def _take_waiting(self, *, delete: bool) -> _Waiting:
        work, self._waiting = self._waiting, _Waiting()
        work.deletes = delete
        if delete:
            work.unneeded_below = self.ledger.first_needed_segment()
        return work

    def _commit(self, work: _Waiting) -> None:
        self._segments.write(work.payloads)
        self._run("BEGIN IMMEDIATE")
        try:
            self._connection.executemany(INSERT_FACT, map(fact_row, work.facts))
            self._disk.commit(self._connection)
        except BaseException:
            if self._connection.in_transaction:
                self._run("ROLLBACK")
            raise
        if work.deletes:
            # A segment that is left, because this process is killed or the disk refuses, is deleted at the next start.
            try:
                self._segments.delete_below(work.unneeded_below)
            except OSError as error:
                log.warning("cannot delete an old segment of the journal", error=str(error))


def fact_row(numbered: tuple[int, journal_pb2.Fact]) -> tuple[int, str, int | None, bytes]:
    """Return the row of the table that a fact becomes."""
    seq, fact = numbered
    kind = fact.WhichOneof("kind") or ""
    return seq, kind, getattr(getattr(fact, kind), "group", None), fact.SerializeToString()


def _open(path: Path, environment: str) -> sqlite3.Connection:
    """Open the database, and migrate it if an older release wrote it.

    Raises:
        JournalError: if it is not a journal, or a newer release wrote it.
    """
    try:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            connection.close()
            raise JournalError(
                f"the file system of {path} refuses SQLite's write-ahead log (it answered {mode!r}): put the run's directory"
                " (output_dir) on a local disk, or on a network file system with shared memory and locks"
            )
        connection.execute("PRAGMA synchronous = FULL")
        migrate(connection, path, environment)
        connection.executescript(_SCHEMA)
        connection.execute("INSERT OR IGNORE INTO meta VALUES ('format', ?)", (FORMAT,))
        (found,) = connection.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
    except sqlite3.DatabaseError as error:
        raise JournalError(f"{path} is not a readable journal ({error}): move it away to start a new run") from error
    if found != FORMAT:
        connection.close()
        raise JournalError(f"{path} has format {found}, this release writes {FORMAT}: use the release that wrote it")
    return connection
