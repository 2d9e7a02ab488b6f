"""`sluice fork RUN/step_N NEW`: begin another run from a checkpoint; `sluice rl --resume-from` does it before it starts the services.

A checkpoint is a cut of its run. What belongs to the cut is copied, or linked where the file system can: the checkpoint, the
trainer's record up to the place that it names, the facts up to the position that it names, and the payloads of what these facts
leave unfinished. Batches and groups whose payloads a later checkpoint of the old run has covered are dropped, counted as
``FORKED``, and their tasks are drawn again. The old run is only read. The new directory gets its name when all of it is on
the disk, so that a power cut leaves no fork or a whole one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from google.protobuf import json_format

from orchestrator_svc.commands.runs import find_run
from orchestrator_svc.journal import DATABASE
from orchestrator_svc.journal.facts import LedgerError, Place, Stage
from orchestrator_svc.journal.ledger import Group, Ledger, folded
from orchestrator_svc.journal.segments import JournalError, segment_path
from orchestrator_svc.journal.store import INSERT_FACT, fact_row, read_facts
from sluice.batch_record import record_directory, record_paths
from sluice.checkpoint_files import MANIFEST, complete_checkpoints, damaged, read_manifest
from sluice.config import Command, ConfigError, Options
from sluice.host_files import remove_tree
from sluice.progress import doing
from sluice.v1 import checkpoint_pb2, journal_pb2
from sluice.versions import Version

FORKED = "FORKED"
"""Reason for dropping a group of the new run because the old run had already deleted its payloads."""

_METRICS = "metrics.jsonl"


def run(argv: list[str]) -> int:
    """Fork a run.

    Returns:
        0.

    Raises:
        ConfigError: if there is no such checkpoint, it is not whole, or the new run exists.
    """
    parser = Options(prog="sluice fork", description=__doc__)
    parser.add_argument("checkpoint", help="RUN/step_N, with the name of the run or its directory")
    parser.add_argument("new", help="name of the new run")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"), help="holds the runs (default: outputs)")
    arguments = parser.parse_args(argv)
    source, _, name = arguments.checkpoint.rstrip("/").rpartition("/")
    if not source or not name.startswith("step_"):
        raise ConfigError(f"{arguments.checkpoint!r} names no checkpoint: give RUN/step_N, such as quickstart/step_50")
    old = find_run(source.removesuffix("/checkpoints"), arguments.output_dir)
    try:
        with doing(f"fork {old}/{name}"):
            forked = fork(old, name, arguments.output_dir / arguments.new)
    except (OSError, sqlite3.Error, JournalError, LedgerError) as error:
        raise ConfigError(f"{old}/{name} cannot be forked: {error}") from error
    sys.stdout.write(
        f"{arguments.output_dir / arguments.new}: forked from {forked.origin} at step {forked.step};"
        f" {forked.kept} unfinished groups continue, {forked.dropped} are drawn again\n"
    )
    return 0


@dataclass(frozen=True, slots=True)
class Forked:
    """What a fork began with.

    Attributes:
        origin: Where it comes from, as `run/step_N@position`.
        step: Batches that its weights hold.
        kept: Unfinished groups of the cut that continue.
        dropped: Unfinished groups whose payloads were gone. Their tasks are drawn again.
    """

    origin: str
    step: int
    kept: int
    dropped: int


def fork(old: Path, checkpoint: str, new: Path) -> Forked:
    """Make the directory of a new run from a checkpoint of an old one.

    Raises:
        ConfigError: if the checkpoint is not whole, or the new run exists.
        JournalError: if the old journal cannot be read.
        OSError: if a file cannot be read or written; then only a hidden directory is left, which the next fork removes.
    """
    if (new / DATABASE).exists() or (new.exists() and any(path.name != ".lock" for path in new.iterdir())):
        raise ConfigError(f"{new} exists: choose another name with --run NAME")
    manifest = _whole(old / "checkpoints" / checkpoint)
    position = _position(old, manifest)
    building = new.with_name(f".{new.name}.forking")
    remove_tree(building)
    building.mkdir(parents=True)
    _copy_checkpoint(old, manifest, building, new.name)
    _copy_record(old, manifest, building)
    _copy_metrics(old, manifest, building)
    ledger = folded(_until(read_facts(old), position))
    linked = _link_segments(old, ledger, building)
    origin = f"{old.name}/{checkpoint}@{position}"
    step = manifest.checkpoint.policy_version.number
    facts, dropped = _beginning(ledger, new.name, origin, step, linked)
    _copy_facts(old, building, position, facts)
    if new.exists():
        remove_tree(new)  # holds at most the lock of a run that never began
    _make_durable(building)
    building.rename(new)
    _sync(new.parent)
    return Forked(origin, step, len(ledger.groups), dropped)


def _until(facts: Iterable[tuple[int, journal_pb2.Fact]], position: int) -> Iterator[tuple[int, journal_pb2.Fact]]:
    return takewhile(lambda each: each[0] <= position, facts)


def _make_durable(directory: Path) -> None:
    """Sync everything in a directory to the disk, each directory after its contents, so that it survives a power cut."""
    for parent, _, files in os.walk(directory, topdown=False):
        for name in files:
            _sync(Path(parent, name))
        _sync(Path(parent))


def _sync(path: Path) -> None:
    """Write a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# The trainer's part.


def _whole(directory: Path) -> checkpoint_pb2.CheckpointManifest:
    """Read the manifest of a checkpoint and verify all files.

    Raises:
        ConfigError: if it is not whole.
    """
    manifest = read_manifest(directory / MANIFEST)
    if manifest is None:
        known = ", ".join(each.checkpoint.name for each in complete_checkpoints(directory.parent))
        raise ConfigError(f"{directory} is no complete checkpoint: choose one of {known or 'none'}")
    if damage := damaged(manifest.files, directory):
        raise ConfigError(damage)
    return manifest


def _copy_checkpoint(old: Path, manifest: checkpoint_pb2.CheckpointManifest, building: Path, run_name: str) -> None:
    name = manifest.checkpoint.name
    source, target = old / "checkpoints" / name, building / "checkpoints" / name
    for file in manifest.files:
        _link(source / file.path, target / file.path)
    copy = checkpoint_pb2.CheckpointManifest()
    copy.CopyFrom(manifest)
    copy.run = f"runs/{run_name}"
    (target / MANIFEST).write_text(json_format.MessageToJson(copy, preserving_proto_field_name=True), encoding="utf-8")


def _copy_record(old: Path, manifest: checkpoint_pb2.CheckpointManifest, building: Path) -> None:
    """Copy the record up to the place that the manifest names. Do not link it: the trainer of the new run appends to it."""
    place = manifest.batch_record
    last = Path(place.file).name
    for path in record_paths(record_directory(old)):
        if path.name > last:
            break
        target = record_directory(building) / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        if path.name == last:
            os.truncate(target, place.size_bytes)


def _copy_metrics(old: Path, manifest: checkpoint_pb2.CheckpointManifest, building: Path) -> None:
    """Copy the metrics of the steps that the weights hold, so that a plot of the new run begins where the old one did."""
    path = old / _METRICS
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        step = manifest.checkpoint.policy_version.number
        with (building / _METRICS).open("w", encoding="utf-8") as file:
            file.writelines(line for line in lines if line.endswith("\n") and _step_of(line) <= step)


def _step_of(line: str) -> int:
    return int(json.loads(line)["step"])


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(source)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


# The orchestrator's part.


def _position(old: Path, manifest: checkpoint_pb2.CheckpointManifest) -> int:
    """Return the last fact that belongs to the cut.

    Raises:
        ConfigError: if the journal ends before that fact.
    """
    position, last, applied, made = manifest.checkpoint.journal_position, 0, 0, 0
    version = Version.from_proto(manifest.checkpoint.policy_version)
    for seq, fact in read_facts(old):
        last = seq
        if fact.HasField("batch_made") and fact.batch_made.batch_id == manifest.checkpoint.last_batch_id:
            made = seq
        if fact.HasField("batch_applied") and Version.from_proto(fact.batch_applied.policy_version) == version:
            applied = seq
    # A checkpoint by the trainer's own schedule names no position. Its cut is where the orchestrator learned of its last batch.
    # A checkpoint that had to wait for the one before it may hold a batch that was made after its position was named.
    position = max(position, made) if position else applied
    name = manifest.checkpoint.name
    if not position:
        raise ConfigError(f"checkpoint {name} names no position of the journal, and its last batch is not in it")
    if position > last:
        raise ConfigError(
            f"checkpoint {name} names fact {position}, but the journal ends at fact {last}: choose an older checkpoint, or put"
            " the newer journal back"
        )
    return position


def _link_segments(old: Path, ledger: Ledger, building: Path) -> set[int]:
    """Link the segments with payloads of unfinished groups; return the numbers of those that there are."""
    linked = set()
    for number in {place.segment for group in ledger.groups.values() for place in _places(group)}:
        with contextlib.suppress(FileNotFoundError):  # a later checkpoint of the old run covered it
            _link(segment_path(old / "journal", number), segment_path(building / "journal", number))
            linked.add(number)
    return linked


def _places(group: Group) -> Iterator[Place]:
    yield from (each.place for each in group.beginnings)
    yield from (each.place for each in group.trajectories)
    yield from group.sampled


def _beginning(
    ledger: Ledger, run_name: str, origin: str, step: int, linked: set[int]
) -> tuple[list[tuple[int, journal_pb2.Fact]], int]:
    """Return the facts to add to the copied ones, and how many groups they drop.

    A group that waits for its training and whose payloads are gone is dropped. If it is in a batch, that batch and all later ones are
    unmade first. A group that was running is sampled again by the next start; that needs no fact.
    """
    facts: list[tuple[int, journal_pb2.Fact]] = []

    def note(fact: journal_pb2.Fact) -> None:
        fact.time.GetCurrentTime()
        facts.append((ledger.last_seq + 1, fact))
        ledger.apply_fact(*facts[-1])

    identity = {**ledger.identity, "run": run_name}
    started = journal_pb2.ProcessStarted(start=ledger.start + 1, identity=identity, forked_from=origin)
    note(journal_pb2.Fact(process_started=started))
    held = {group.number for number, batch in ledger.batches.items() if number <= step for group in batch.groups}
    gone = [
        group
        for group in ledger.groups.values()
        if group.stage is not Stage.RUNNING
        and group.number not in held
        and not linked.issuperset(place.segment for place in _places(group))
    ]
    lost = {group.number for group in gone}
    broken = min(
        (number for number, batch in ledger.batches.items() if any(each.number in lost for each in batch.groups)),
        default=None,
    )
    if broken is not None:
        for number in [each for each in reversed(ledger.batches) if each >= broken]:
            unmade = journal_pb2.BatchUnmade(sequence_no=number, reason="the run was forked without its payloads")
            note(journal_pb2.Fact(batch_unmade=unmade))
    for group in gone:
        dropped = journal_pb2.GroupDropped(
            group=group.number, reason=FORKED, trajectories=len(group.trajectories), redraw=True
        )
        note(journal_pb2.Fact(group_dropped=dropped))
    return facts, len(gone)


def _copy_facts(old: Path, building: Path, position: int, more: Iterable[tuple[int, journal_pb2.Fact]]) -> None:
    """Write the new journal: the facts of the old one up to a position, and some more."""
    with contextlib.closing(sqlite3.connect(building / DATABASE, uri=True, isolation_level=None)) as new:
        new.execute("PRAGMA synchronous = FULL")
        new.execute("ATTACH ? AS old", (f"{(old / DATABASE).absolute().as_uri()}?mode=ro",))
        new.execute("BEGIN")
        for (statement,) in new.execute(
            "SELECT sql FROM old.sqlite_master WHERE type = 'table' AND name IN ('meta', 'facts')"
        ).fetchall():
            new.execute(statement)
        new.execute("INSERT INTO main.meta SELECT * FROM old.meta")
        new.execute("INSERT INTO main.facts SELECT * FROM old.facts WHERE seq <= ?", (position,))
        new.executemany(INSERT_FACT, map(fact_row, more))
        new.execute("COMMIT")


COMMAND = Command("fork", "begin another run from a checkpoint of a run", run)
