"""`sluice audit RUN`: recompute from a run's files that each accepted trajectory was trained exactly once, or dropped for a reason.

The files are only read, and the run may be alive. Exit code 0: both sides agree; 1: they differ, and the table says where; 2: a
file cannot be read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from rich.console import Console

from orchestrator_svc.commands.audit_compare import (
    CHECKPOINT,
    JOURNAL,
    PAYLOADS,
    RECORD,
    REPORT,
    AuditResult,
    Difference,
    audit,
)
from orchestrator_svc.commands.runs import find_run
from orchestrator_svc.commands.table import table_lines
from orchestrator_svc.journal import DATABASE
from orchestrator_svc.journal.facts import LedgerError, Place, place_of
from orchestrator_svc.journal.ledger import Ledger, folded
from orchestrator_svc.journal.segments import JournalError, SegmentError, read_payload, segment_numbers
from orchestrator_svc.journal.store import read_facts
from sluice.batch_record import RecordFile, read_record_file, record_directory, record_paths
from sluice.checkpoint_files import complete_checkpoints
from sluice.config import Command, ConfigError, Options
from sluice.progress import doing
from sluice.v1 import checkpoint_pb2, journal_pb2
from sluice.versions import Lineage, Version

_SHOWN = 20
"""Differences that are printed; `--json` has all."""

_READINGS = 3
"""How often the files are read while they differ. A live run may write between the reading of two files: such a difference is gone at the
next reading."""

Manifests = list[checkpoint_pb2.CheckpointManifest]


def run(argv: list[str]) -> int:
    """Audit a run, and print what became of its trajectories.

    Returns:
        0 if both sides agree, else 1.

    Raises:
        ConfigError: if there is no such run, or a file of it cannot be read.
    """
    parser = Options(prog="sluice audit", description=__doc__)
    parser.add_argument("run", help="name of the run, or its directory")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"), help="holds the runs (default: outputs)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, with all differences")
    arguments = parser.parse_args(argv)
    directory = find_run(arguments.run, arguments.output_dir)
    try:
        with doing(f"audit {directory}"):
            result = audit_run(directory)
    except (OSError, JournalError) as error:
        raise ConfigError(f"the files of {directory} cannot be audited: {error}") from error
    if arguments.json:
        sys.stdout.write(json.dumps(_as_json(directory, result), indent=2) + "\n")
    else:
        _print(directory, result)
    return 1 if result.differences else 0


def audit_run(directory: Path) -> AuditResult:
    """Audit the files of a run.

    Raises:
        JournalError: if the journal cannot be read.
        OSError: if another file cannot be read.
    """
    result = _read_once(directory)
    for _ in range(_READINGS - 1):
        if not result.differences:
            break
        again = _read_once(directory)
        result = replace(again, differences=tuple(each for each in again.differences if each in result.differences))
    return result


def _read_once(directory: Path) -> AuditResult:
    manifests = complete_checkpoints(directory / "checkpoints")
    lineage = _lineage(directory, manifests)
    record = _RecordReader(record_directory(directory))
    result = audit(read_facts(directory), record.batches(), lineage, manifests)  # the record is read after the facts
    until = result.facts
    more = [
        *record.damage(manifests),
        *_payload_damage(directory, takewhile(lambda each: each[0] <= until, read_facts(directory)), result),
    ]
    try:
        ledger = folded(takewhile(lambda each: each[0] <= until, read_facts(directory)))
    except LedgerError as error:
        more.append(Difference(JOURNAL, f"an orchestrator would not start from these facts: {error}"))
    else:
        more += [*_lost_samples(directory, ledger), *_count_differences(directory, ledger, result)]
    return replace(result, differences=(*result.differences, *more))


# Checkpoints and epochs.


def _lineage(directory: Path, manifests: Iterable[checkpoint_pb2.CheckpointManifest]) -> Lineage:
    """Return where each epoch began, according to the trainer's files.

    Raises:
        OSError: if its file is damaged.
    """
    messages = [manifest.lineage for manifest in manifests]
    path = directory / "trainer" / "epochs.binpb"
    if path.exists():
        try:
            messages.append(checkpoint_pb2.EpochLineage.FromString(path.read_bytes()))
        except DecodeError as error:
            raise OSError(f"{path} is damaged: {error}") from error
    origins = [origin for message in messages for origin in message.origins]
    return Lineage({each.epoch: Version.from_proto(each.restored_version) for each in origins})


# The trainer's record.


class _RecordReader:
    """Reads the files of the record when its batches are asked for, and keeps what it found wrong with them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: list[RecordFile] = []

    def batches(self) -> Iterator[checkpoint_pb2.BatchRecord]:
        """Yield all batches in order."""
        for path in record_paths(self._directory):
            file = read_record_file(path)
            self._files.append(replace(file, records=()))
            yield from file.records

    def damage(self, manifests: Manifests) -> Iterator[Difference]:
        """Yield what is wrong with the files themselves. A torn end of the last one is the trace of a crash, and not wrong."""
        files = {file.path.name: file for file in self._files}
        for number, name in enumerate(files, 1):
            if int(Path(name).stem) != number:
                yield Difference(RECORD, f"the file before {name} is missing")
                break
        for index, file in enumerate(self._files):
            for offset in file.damaged:
                yield Difference(RECORD, f"{file.path} is damaged at byte {offset}")
            if file.torn and index + 1 < len(self._files):
                yield Difference(
                    RECORD, f"{file.path} is torn at byte {file.whole_bytes}, although later files follow it"
                )
        for manifest in manifests:
            place = manifest.batch_record
            if not place.file:
                continue
            held = files.get(Path(place.file).name)
            if held is None or held.whole_bytes < place.size_bytes:
                problem = (
                    f"{manifest.checkpoint.name} names {place.size_bytes} bytes of {place.file}, which are not there"
                )
                yield Difference(CHECKPOINT, problem)


# Payloads and counts.


def _payload_damage(
    directory: Path, facts: Iterable[tuple[int, journal_pb2.Fact]], result: AuditResult
) -> Iterator[Difference]:
    """Yield the payloads that differ from what the facts say. Payloads of batches that a checkpoint covers may be gone."""
    segments = directory / "journal"
    existing = set(segment_numbers(segments))
    for _, fact in facts:
        for name, place in _places(fact):
            if place.segment in existing:
                try:
                    read_payload(segments, Place.from_proto(place))
                except SegmentError as error:
                    yield Difference(PAYLOADS, str(error), trajectory=name)
            elif fact.HasField("episodes_ended") and fact.episodes_ended.group in result.groups_in_flight:
                yield Difference(PAYLOADS, _gone(place.segment), trajectory=name)


def _gone(segment: int) -> str:
    return f"segment {segment}, which has it, is gone"


def _lost_samples(directory: Path, ledger: Ledger) -> Iterator[Difference]:
    """Yield the running groups whose samples are gone."""
    existing = set(segment_numbers(directory / "journal"))
    for group in ledger.groups.values():
        for segment in sorted({place.segment for place in group.sampled} - existing):
            yield Difference(PAYLOADS, _gone(segment), trajectory=group.name)


def _places(fact: journal_pb2.Fact) -> Iterator[tuple[str, journal_pb2.PayloadPlace]]:
    """Yield each payload that a fact names, with its trajectory, or with its group if it belongs to no single trajectory."""
    for recorded in ("generation_recorded", "session_generation_recorded"):
        if fact.HasField(recorded):
            sampled = getattr(fact, recorded)
            yield f"g{sampled.group}", sampled.place
    for part in fact.episodes_ended.beginnings:
        yield f"g{fact.episodes_ended.group}", part.place
    for episode in fact.episodes_ended.episodes:
        for each in episode.trajectories:
            yield each.trajectory_id, place_of(each)


def _count_differences(directory: Path, ledger: Ledger, result: AuditResult) -> Iterator[Difference]:
    """Compare the counts with those that the orchestrator and its report show."""
    # The ledger does not know the outcome of a batch that the trainer has not reported, or of an epoch that only the trainer knows.
    if ledger.lineage.newest_epoch == result.version.epoch:
        shown = (ledger.accepted, ledger.trained, dict(ledger.dropped))
        if shown != (result.accepted, result.trained, dict(result.dropped)):
            yield Difference(JOURNAL, f"the orchestrator counts {_counts(*shown)}; its facts say {_of(result)}")
    path = directory / "report.json"
    newest = max(
        (directory / name).stat().st_mtime for name in (DATABASE, f"{DATABASE}-wal") if (directory / name).exists()
    )
    if not path.exists() or path.stat().st_mtime < newest:
        return  # the run went on after its last report
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    dropped = dict(report["trajectories_dropped"])
    dropped.pop("RUN_ENDED", None)  # groups that still waited for a batch at the end of the run
    shown = (report["trajectories_accepted"], report["trajectories_trained"], dropped)
    if shown != (result.accepted, result.trained, dict(result.dropped)):
        yield Difference(REPORT, f"report.json says {_counts(*shown)}; the facts say {_of(result)}")


def _of(result: AuditResult) -> str:
    return _counts(result.accepted, result.trained, dict(result.dropped))


def _counts(accepted: int, trained: int, dropped: dict[str, int]) -> str:
    return f"{accepted} accepted, {trained} trained, dropped {dropped or 'none'}"


# Output.


def _as_json(directory: Path, result: AuditResult) -> dict[str, Any]:
    groups = sorted(result.groups_in_flight)
    return (
        {"run": str(directory), "exact": not result.differences}
        | asdict(result)
        | {"version": str(result.version), "groups_in_flight": groups}
    )


def _print(directory: Path, result: AuditResult) -> None:
    rows: list[tuple[str, int]] = [("accepted", result.accepted), ("trained", result.trained)]
    rows += [(f"dropped: {reason}", count) for reason, count in result.dropped.items()]
    rows.append(("in flight", result.in_flight))
    if result.unheard_batches:
        rows.append((f"applied, not heard of yet ({len(result.unheard_batches)} batches)", result.unheard))
    rows.append(("rolled back", result.rolled_back))
    rows.append(("of these trained again", result.trained_again))
    console = Console()
    state = "not exact" if result.differences else "exact"
    console.print(
        f"{directory}: {state} at version {result.version} ({result.batches} batches, {result.facts:,} facts)",
        style="bold red" if result.differences else "bold green",
        highlight=False,
        soft_wrap=True,
    )
    for line in table_lines([(name, f"{count:,}") for name, count in rows], numbers={1}, boxed=True):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    if result.counted_batches:
        console.print(
            f"{result.counted_batches} batches are from before the journal kept facts: compared by count alone"
        )
    for each in result.differences[:_SHOWN]:
        where = ", ".join(
            f"{kind} {name}" for kind, name in (("batch", each.batch), ("trajectory", each.trajectory)) if name
        )
        console.print(
            f"{each.side}: {where}{': ' if where else ''}{each.problem}", highlight=False, soft_wrap=True, markup=False
        )
    if (more := len(result.differences) - _SHOWN) > 0:
        console.print(f"and {more} more; --json lists all")


COMMAND = Command("audit", "prove that every accepted trajectory was trained exactly once", run)
