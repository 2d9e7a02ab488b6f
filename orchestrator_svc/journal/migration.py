"""Journals of format 1: tables of groups, batches and counts, which become facts.

Format 1 counted trajectories without naming them and did not keep the task of a group. So groups and batches that a rollback can still
reach become facts of their own, with names from the payloads. The rest becomes one `HistoryImported`.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import structlog
from google.protobuf.message import DecodeError

from orchestrator_svc.journal.facts import Place
from orchestrator_svc.journal.segments import JournalError, SegmentError, read_payload
from sluice.v1 import journal_pb2 as pb
from sluice.v1 import orchestrator_pb2
from sluice.versions import Version

log = structlog.get_logger(__name__)

FORMAT = "2"

_FIRST_SEQ = 1 << 32
"""Number of the first migrated fact. Positions of format 1 began at 0 in each process, so every older checkpoint names one below."""

_OLD_TABLES = ("epochs", "groups", "trajectories", "batches", "batch_groups", "batch_drops", "counts")

_FACTS = """
CREATE TABLE facts (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, grp INTEGER, fact BLOB NOT NULL)
"""


def migrate(connection: sqlite3.Connection, path: Path, environment: str) -> None:
    """Turn a journal of format 1 into one of facts; do nothing to any other. A kill at any moment leaves the old one or the new one.

    A copy of the old file stays beside it, as ``journal.v1.sqlite``.

    Args:
        connection: The open database.
        path: Its file.
        environment: Name of the environment that all its tasks belong to.

    Raises:
        JournalError: if the copy cannot be written.
    """
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "groups" not in tables or "facts" in tables:
        return
    copy = path.with_name("journal.v1.sqlite")
    _back_up(connection, copy)
    facts = list(_facts(connection, path.parent / "journal", environment))
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(_FACTS)
    for seq, fact in enumerate(facts, _FIRST_SEQ):
        kind = fact.WhichOneof("kind") or ""
        group = getattr(getattr(fact, kind), "group", None)
        connection.execute("INSERT INTO facts VALUES (?, ?, ?, ?)", (seq, kind, group, fact.SerializeToString()))
    for table in _OLD_TABLES:
        connection.execute(f"DROP TABLE {table}")
    connection.execute("DELETE FROM meta")
    connection.execute("INSERT INTO meta VALUES ('format', ?)", (FORMAT,))
    connection.execute("COMMIT")
    connection.execute("VACUUM")  # gives the pages of the dropped tables back; facts alone never free any
    log.info("the journal was migrated to facts", facts=len(facts), copy_of_the_old_one=str(copy))


def _back_up(connection: sqlite3.Connection, copy: Path) -> None:
    """Copy the database, durably. An existing copy is from a migration that was interrupted: replace it."""
    unfinished = copy.with_suffix(".unfinished")
    try:
        unfinished.unlink(missing_ok=True)
        with contextlib.closing(sqlite3.connect(unfinished)) as target:
            connection.backup(target)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(copy)
    except (OSError, sqlite3.Error) as error:
        raise JournalError(
            f"cannot copy the journal of format 1 to {copy} before it is migrated: {error}; see to the disk, then start again"
        ) from error


def _facts(connection: sqlite3.Connection, segments: Path, environment: str) -> Iterator[pb.Fact]:
    run = connection.execute
    meta = dict(run("SELECT key, value FROM meta"))
    identity = {key: meta[key] for key in ("run", "seed", "environment", "split") if key in meta}
    yield pb.Fact(process_started=pb.ProcessStarted(start=int(meta.get("starts", "0")), identity=identity))
    for epoch, origin in run("SELECT epoch, origin FROM epochs ORDER BY epoch"):
        yield pb.Fact(epoch_allotted=pb.EpochAllotted(epoch=epoch))
        if origin is not None:
            yield pb.Fact(epoch_begun=pb.EpochBegun(epoch=epoch, origin=Version.parse(origin).to_proto()))
    named: dict[int, list[str]] = {}
    for number, position, stage, versions in run(
        "SELECT number, position, stage, versions FROM groups ORDER BY number"
    ):
        trajectories = _trajectories(connection, segments, number) if stage == "accepted" else {}
        task_id = next(filter(None, (task for _, task in trajectories.values())), "")
        drawn = pb.TaskDrawn(environment=environment, task_id=task_id, group=number, position=position)
        yield pb.Fact(task_drawn=drawn)
        if stage == "accepted":
            yield from _accepted(number, versions, trajectories)
            named[number] = list(trajectories)
    yield pb.Fact(history_imported=_history(connection, meta, environment, named))


def _trajectories(
    connection: sqlite3.Connection, segments: Path, number: int
) -> dict[str, tuple[pb.PayloadPlace, str]]:
    """Return place and task of a group's trajectories by name. The names come from the payloads."""
    found = {}
    rows = connection.execute(
        "SELECT ordinal, segment, offset FROM trajectories WHERE number = ? ORDER BY 1", (number,)
    )
    for ordinal, segment, offset in rows:
        place = Place(segment, offset, b"")
        name, task_id = f"g{number}-{ordinal}", ""
        with contextlib.suppress(SegmentError, DecodeError):  # the next reader counts the group as damaged
            trajectory = orchestrator_pb2.TrajectoryRecord.FromString(read_payload(segments, place)).trajectory
            name, task_id = trajectory.trajectory_id, trajectory.task_id
        found[name] = (place.to_proto(), task_id)
    return found


def _accepted(number: int, versions: str, trajectories: dict[str, tuple[pb.PayloadPlace, str]]) -> Iterator[pb.Fact]:
    ended = [
        pb.EndedEpisode(episode=episode, trajectories=[pb.AcceptedTrajectory(trajectory_id=name, place=place)])
        for episode, (name, (place, _)) in enumerate(trajectories.items())
    ]
    yield pb.Fact(episodes_ended=pb.EpisodesEnded(group=number, episodes=ended))
    sampled = [Version.parse(part).to_proto() for part in versions.split(",") if part]
    yield pb.Fact(group_accepted=pb.GroupAccepted(group=number, policy_versions=sampled))


def _history(
    connection: sqlite3.Connection, meta: dict[str, str], environment: str, named: dict[int, list[str]]
) -> pb.HistoryImported:
    history = pb.HistoryImported(
        next_group=int(meta.get("next_group", "1")),
        environment=environment,
        next_position=int(meta.get("next_position", "0")),
        elapsed_s=float(meta.get("elapsed_s", "0")),
    )
    for kind, reason, amount in connection.execute("SELECT kind, reason, amount FROM counts"):
        if kind == "accepted":
            history.accepted = amount - sum(map(len, named.values()))
        elif kind == "dropped":
            history.dropped[reason] = amount
        elif kind == "failed":
            history.failed_groups[reason] = amount
        elif kind == "generated":
            history.generated[reason] = amount
    history.batches.extend(_batches(connection, named))
    return history


def _batches(connection: sqlite3.Connection, named: dict[int, list[str]]) -> Iterator[pb.ImportedBatch]:
    members: dict[int, list[int]] = {}
    for sequence_no, number in connection.execute("SELECT sequence_no, number FROM batch_groups ORDER BY number"):
        members.setdefault(sequence_no, []).append(number)
    drops: dict[int, dict[str, int]] = {}
    for sequence_no, reason, amount in connection.execute("SELECT sequence_no, reason, trajectories FROM batch_drops"):
        drops.setdefault(sequence_no, {})[reason] = amount
    rows = connection.execute("SELECT sequence_no, batch_id, applied, trained FROM batches ORDER BY sequence_no")
    for sequence_no, batch_id, applied, trained in rows.fetchall():
        groups = [number for number in members.get(sequence_no, []) if number in named]
        if not applied and len(groups) < len(members.get(sequence_no, [])):
            return  # a damaged group was dropped from it: its other groups, and those of later batches, go into new batches
        yield pb.ImportedBatch(
            sequence_no=sequence_no,
            batch_id=batch_id,
            groups=groups,
            trajectory_ids=[each for number in groups for each in named[number]],
            applied=bool(applied),
            trained=trained,
            dropped=drops.get(sequence_no, {}),
        )
