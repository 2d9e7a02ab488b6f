"""The journal's index: SQLite tables, the statements that write them, and what a start reads from them."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator_svc.scheduler import Accounting, Batch, Group, Stage
from orchestrator_svc.segments import Location
from sluice.versions import Version

__all__ = ["DrawnTask", "JournalError", "JournalIndex", "Recovery"]

FORMAT = "1"

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


class JournalError(Exception):
    """The journal cannot be used; the message says what to do."""


@dataclass(frozen=True, slots=True)
class DrawnTask:
    """A task that was drawn for a group, which has no trajectories yet; group number 0: it has no group yet."""

    number: int
    position: int


@dataclass
class Recovery:
    """What earlier processes of a run left behind.

    Attributes:
        epochs: Epochs that trainers began, with the version each began from, ascending.
        drawn: Tasks to draw again.
        ready: Groups that are in no batch.
        batches: Batches that were made and not pruned, with their groups, ascending; applied ones included.
        next_group: Number of the next group.
        next_position: Next place in the stream of tasks.
        accounting: Counts so far.
        generated: Requests, tokens and requests that span versions of earlier processes, by name.
        elapsed_s: Seconds that earlier processes of the run lasted.
    """

    epochs: list[tuple[int, Version]] = field(default_factory=list)
    drawn: list[DrawnTask] = field(default_factory=list)
    ready: list[Group] = field(default_factory=list)
    batches: list[tuple[Batch, list[Group]]] = field(default_factory=list)
    next_group: int = 1
    next_position: int = 0
    accounting: Accounting = field(default_factory=Accounting)
    generated: Counter[str] = field(default_factory=Counter)
    elapsed_s: float = 0.0

    @property
    def present_epoch(self) -> int:
        """The epoch that a trainer began last; 0 if none did."""
        return self.epochs[-1][0] if self.epochs else 0

    @property
    def applied(self) -> int:
        """The last batch that is known to be applied in the present epoch."""
        origin = self.epochs[-1][1].number if self.epochs else 0
        return max([origin, *self.accounting.applied_batches()])

    def unreported(self, number: int) -> list[tuple[Batch, list[Group]]]:
        """Return the batches that weights at version `number` hold although nothing here says what became of them."""
        applied = set(self.accounting.applied_batches())
        return [pair for pair in self.batches if pair[0].sequence_no <= number and pair[0].sequence_no not in applied]

    def after(self, number: int) -> list[tuple[Batch, list[Group]]]:
        """Return the batches that weights at version `number` lack.

        Raises:
            JournalError: if the first of them was pruned.
        """
        lacking = [pair for pair in self.batches if pair[0].sequence_no > number]
        pruned = not lacking or lacking[0][0].sequence_no != number + 1
        if pruned and max(self.accounting.applied_batches(), default=0) > number:
            raise JournalError(
                f"the trainer restored version {number}, but the journal no longer holds batch {number + 1}:"
                " put the newer checkpoint back, or begin a new run (--run NAME)"
            )
        return lacking


class JournalIndex:
    """The tables; use them from one thread, and write inside a transaction of the caller."""

    def __init__(self, path: Path) -> None:
        try:
            self.connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self.connection.execute("PRAGMA journal_mode = WAL")
            self.connection.execute("PRAGMA synchronous = FULL")
            self.connection.executescript(_SCHEMA)
        except sqlite3.DatabaseError as error:
            raise JournalError(
                f"{path} is not a readable journal ({error}): move it away to start a new run"
            ) from error

    def identify(self, identity: Mapping[str, str]) -> None:
        """Record whose journal this is, or check it.

        Raises:
            JournalError: if it belongs to something else.
        """
        wanted = {"format": FORMAT, **identity}
        known = dict(self.connection.execute("SELECT key, value FROM meta"))
        for key, value in wanted.items():
            if known.setdefault(key, value) != value:
                raise JournalError(
                    f"the journal of this run was written with {key} = {known[key]!r}, now it is {value!r}:"
                    " change it back, or begin a new run (--run NAME)"
                )
        for key, value in wanted.items():
            self.set_meta(key, value)

    def count_start(self) -> int:
        """Count one more start of the orchestrator; return the number of starts, this one included."""
        self.connection.execute(
            "INSERT INTO meta VALUES ('starts', '1')"
            " ON CONFLICT DO UPDATE SET value = CAST(CAST(value AS INTEGER) + 1 AS TEXT)"
        )
        return int(self.connection.execute("SELECT value FROM meta WHERE key = 'starts'").fetchone()[0])

    def set_meta(self, key: str, value: str) -> None:
        """Write one value of the table `meta`."""
        self.connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def raise_meta(self, key: str, value: int) -> None:
        """Write one number of the table `meta`, unless it holds a greater one."""
        held = self.connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        if held is None or int(held[0]) < value:
            self.set_meta(key, str(value))

    def has_run(self) -> bool:
        """Return whether a run began with this journal."""
        return bool(self.connection.execute("SELECT EXISTS (SELECT 1 FROM epochs)").fetchone()[0])

    def allot_epoch(self) -> int:
        """Allot the next epoch."""
        epoch = int(self.connection.execute("SELECT COALESCE(MAX(epoch), 0) + 1 FROM epochs").fetchone()[0])
        self.connection.execute("INSERT INTO epochs (epoch) VALUES (?)", (epoch,))
        return epoch

    def open_epoch(self, epoch: int, origin: Version, kept: Iterable[int]) -> None:
        """Record that the trainer began an epoch from version `origin`; of the batches after it keep only `kept`."""
        run, restored = self.connection.execute, origin.number
        run("UPDATE epochs SET origin = ? WHERE epoch = ?", (str(origin), epoch))
        run("UPDATE batches SET applied = 0, trained = 0 WHERE sequence_no > ?", (restored,))
        run("DELETE FROM batch_drops WHERE sequence_no > ?", (restored,))
        self.keep_batches(restored, kept)

    def keep_batches(self, after: int, kept: Iterable[int]) -> None:
        """Of the batches after number `after` keep only `kept`: the groups of the others are in no batch again."""
        run = self.connection.execute
        later = [row[0] for row in run("SELECT sequence_no FROM batches WHERE sequence_no > ?", (after,))]
        for sequence_no in set(later) - set(kept):
            run("DELETE FROM batches WHERE sequence_no = ?", (sequence_no,))
            run("DELETE FROM batch_groups WHERE sequence_no = ?", (sequence_no,))

    def draw(self, number: int, position: int) -> None:
        """Record that a task was drawn, or drawn again."""
        self.connection.execute("INSERT OR REPLACE INTO groups VALUES (?, ?, 'drawn', '')", (number, position))

    def accept(self, number: int, versions: Iterable[Version], locations: list[Location]) -> None:
        """Record where the accepted trajectories of a group lie."""
        text = ",".join(str(version) for version in versions)
        self.connection.execute("UPDATE groups SET stage = 'accepted', versions = ? WHERE number = ?", (text, number))
        self.connection.executemany(
            "INSERT OR REPLACE INTO trajectories VALUES (?, ?, ?, ?)",
            [(number, ordinal, each.segment, each.offset) for ordinal, each in enumerate(locations)],
        )
        self.count("accepted", "", len(locations))

    def drop_group(self, number: int) -> None:
        """Forget a group."""
        self.connection.execute("DELETE FROM groups WHERE number = ?", (number,))
        self.connection.execute("DELETE FROM trajectories WHERE number = ?", (number,))

    def count(self, kind: str, reason: str, amount: int) -> None:
        """Add to a count."""
        self.connection.execute(
            "INSERT INTO counts VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET amount = amount + excluded.amount",
            (kind, reason, amount),
        )

    def make_batch(self, batch: Batch) -> None:
        """Record a batch that was made."""
        self.connection.execute(
            "INSERT INTO batches (sequence_no, batch_id) VALUES (?, ?)", (batch.sequence_no, batch.batch_id)
        )
        self.connection.executemany(
            "INSERT INTO batch_groups VALUES (?, ?)", [(batch.sequence_no, each) for each in batch.groups]
        )

    def apply_batch(self, sequence_no: int, trained: int, dropped: Mapping[str, int]) -> None:
        """Record a batch that was applied."""
        self.connection.execute(
            "UPDATE batches SET applied = 1, trained = ? WHERE sequence_no = ?", (trained, sequence_no)
        )
        self.connection.executemany(
            "INSERT OR REPLACE INTO batch_drops VALUES (?, ?, ?)",
            [(sequence_no, reason, amount) for reason, amount in dropped.items()],
        )

    def prune(self, covered: int) -> None:
        """Forget the trajectories of batches up to `covered`."""
        run = self.connection.execute
        inside = "SELECT number FROM batch_groups WHERE sequence_no <= ?"
        run(f"DELETE FROM trajectories WHERE number IN ({inside})", (covered,))  # noqa: S608 - a constant
        run(f"DELETE FROM groups WHERE number IN ({inside})", (covered,))  # noqa: S608 - a constant
        run("DELETE FROM batch_groups WHERE sequence_no <= ?", (covered,))

    def oldest_segment(self) -> int:
        """Return the number of the oldest segment that holds a trajectory; 0 if none does."""
        return int(self.connection.execute("SELECT COALESCE(MIN(segment), 0) FROM trajectories").fetchone()[0])

    def locations(self, number: int) -> list[Location]:
        """Return where the trajectories of a group lie, in order."""
        rows = self.connection.execute(
            "SELECT segment, offset FROM trajectories WHERE number = ? ORDER BY ordinal", (number,)
        )
        return [Location(segment, offset) for segment, offset in rows]

    def recover(self) -> Recovery:
        """Read what earlier processes of the run left behind."""
        run = self.connection.execute
        meta = dict(run("SELECT key, value FROM meta"))
        groups = self._groups()
        members: dict[int, list[int]] = {}
        for sequence_no, number in run("SELECT sequence_no, number FROM batch_groups ORDER BY number"):
            members.setdefault(sequence_no, []).append(number)
        # A group that is gone was damaged: `Batch.groups` still names it, which shows that the batch is not whole.
        batches = [
            (
                Batch(sequence_no, batch_id, tuple(members[sequence_no])),
                [groups[each] for each in members[sequence_no] if each in groups],
            )
            for sequence_no, batch_id in run("SELECT sequence_no, batch_id FROM batches ORDER BY sequence_no")
            if sequence_no in members
        ]
        batched = {number for numbers in members.values() for number in numbers}
        return Recovery(
            epochs=[
                (epoch, Version.parse(origin))
                for epoch, origin in run("SELECT epoch, origin FROM epochs WHERE origin IS NOT NULL ORDER BY epoch")
            ],
            drawn=[
                DrawnTask(number, position)
                for number, position in run("SELECT number, position FROM groups WHERE stage = 'drawn' ORDER BY number")
            ],
            ready=[group for number, group in groups.items() if number not in batched],
            batches=batches,
            next_group=int(meta.get("next_group", "1")),
            next_position=int(meta.get("next_position", "0")),
            accounting=self._accounting(),
            generated=Counter(dict(run("SELECT reason, amount FROM counts WHERE kind = 'generated'"))),
            elapsed_s=float(meta.get("elapsed_s", "0")),
        )

    def _groups(self) -> dict[int, Group]:
        sizes = dict(self.connection.execute("SELECT number, COUNT(*) FROM trajectories GROUP BY number"))
        rows = self.connection.execute(
            "SELECT number, position, versions FROM groups WHERE stage = 'accepted' ORDER BY number"
        )
        return {
            number: Group(number, position, _versions(versions), Stage.READY, sizes.get(number, 0))
            for number, position, versions in rows
        }

    def _accounting(self) -> Accounting:
        accounting = Accounting()
        for kind, reason, amount in self.connection.execute("SELECT kind, reason, amount FROM counts"):
            match kind:
                case "accepted":
                    accounting.accept(amount)
                case "dropped":
                    accounting.drop(reason, amount)
                case "failed":
                    accounting.failed_groups[reason] += amount
                case _:
                    pass
        drops: dict[int, Counter[str]] = {}
        for sequence_no, reason, amount in self.connection.execute("SELECT * FROM batch_drops"):
            drops.setdefault(sequence_no, Counter())[reason] = amount
        for sequence_no, trained in self.connection.execute(
            "SELECT sequence_no, trained FROM batches WHERE applied = 1"
        ):
            accounting.apply(sequence_no, trained, drops.get(sequence_no, {}))
        return accounting


def _versions(text: str) -> tuple[Version, ...]:
    return tuple(Version.parse(part) for part in text.split(",") if part)
