"""`sluice audit` on the real files of a run, whole, torn by a kill, and altered by hand."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from run_facts import drawn
from run_on_disk import RunOnDisk, a_life, lived
from session_facts import generation, granted, opened, recorded
from simulated_run import EPISODES

from orchestrator_svc.commands.audit import _places, audit_run, run
from orchestrator_svc.commands.audit_compare import AuditResult
from orchestrator_svc.journal import DATABASE
from orchestrator_svc.journal.segments import segment_path
from orchestrator_svc.journal.store import Journal, JournalLimits
from sluice.batch_record import frame, read_record_file, record_directory, record_paths
from sluice.config import ConfigError
from sluice.digests import batch_digest
from sluice.v1 import checkpoint_pb2, journal_pb2


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run; copy it before anything is changed."""
    directory = tmp_path_factory.mktemp("runs") / "whole"
    lived(directory, a_life)
    return directory


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "outputs" / "copy"))


def test_the_files_of_a_run_are_exact(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([str(copy)]) == 0
    shown = capsys.readouterr().out
    assert "exact at version 2.4 (4 batches" in shown
    rows = {
        "accepted": 12 * EPISODES,
        "trained": 4 * (2 * EPISODES - 1),
        "dropped: NO_SIGNAL": EPISODES,
        "dropped: STALE": 4,
        "in flight": 3 * EPISODES,
        "rolled back": 2 * EPISODES,
        "of these trained again": 2 * EPISODES - 1,
    }
    for name, count in rows.items():
        assert any(name in line and f" {count} " in line for line in shown.splitlines()), name


def test_a_run_is_found_by_its_name_and_told_as_json(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["copy", "--output-dir", str(copy.parent), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["exact"], told["accepted"], told["version"], told["differences"]) == (True, 12 * EPISODES, "2.4", [])
    assert told["accepted"] == told["trained"] + sum(told["dropped"].values()) + told["in_flight"] + told["unheard"]


@pytest.mark.parametrize("lost", [1, 5, 30])
def test_a_frame_that_a_kill_tore_is_no_difference_while_nobody_heard_of_it(tmp_path: Path, lost: int) -> None:
    def live(run: RunOnDisk) -> None:
        run.trains(1)
        for event in (run.group_is_accepted, run.group_is_accepted, run.batch_is_made, run.trainer_applies):
            event()

    lived(tmp_path, live)
    assert audit_run(tmp_path).unheard == 2 * EPISODES
    (path,) = record_paths(record_directory(tmp_path))
    path.write_bytes(path.read_bytes()[:-lost])
    result = audit_run(tmp_path)
    assert (result.differences, result.unheard, result.in_flight) == ((), 0, 2 * EPISODES)


def test_a_live_run_is_exact_while_it_writes(tmp_path: Path) -> None:
    async def audited_while_it_lives() -> None:
        journal = Journal(tmp_path, {"run": "test"}, limits=JournalLimits(fsync_interval_s=0.0))
        living = RunOnDisk(directory=tmp_path, journal=journal)
        auditing: asyncio.Future[list[AuditResult]] | None = None
        while auditing is None or not auditing.done():
            for event in [*[living.group_is_accepted] * 2, living.batch_is_made]:
                event()
            await journal.durable()  # the trainer gets only batches that are on disk
            living.trainer_applies()
            living.orchestrator_hears()
            if living.heard == 20:
                audits = asyncio.to_thread(lambda: [audit_run(tmp_path) for _ in range(10)])
                auditing = asyncio.ensure_future(audits)
        results = await auditing
        await journal.close()
        assert [each.differences for each in results] == [()] * 10
        assert results[-1].batches > results[0].batches

    asyncio.run(audited_while_it_lives())


# The journal's side, altered by hand.


def facts_of(directory: Path) -> list[tuple[int, journal_pb2.Fact]]:
    with closing(sqlite3.connect(directory / DATABASE)) as connection:
        return [
            (seq, journal_pb2.Fact.FromString(fact)) for seq, fact in connection.execute("SELECT seq, fact FROM facts")
        ]


def first(directory: Path, kind: str, place: int = 0) -> tuple[int, journal_pb2.Fact]:
    return [each for each in facts_of(directory) if each[1].HasField(kind)][place]  # type: ignore[arg-type]


def execute(directory: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(directory / DATABASE)) as connection, connection:
        connection.execute(statement, values)


def differing(directory: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    """Audit a run that must differ; return the differences."""
    assert run([str(directory), "--json"]) == 1
    differences: list[dict[str, str]] = json.loads(capsys.readouterr().out)["differences"]
    assert run([str(directory)]) == 1
    assert "not exact" in capsys.readouterr().out
    return differences


KINDS = ["task_drawn", "episodes_ended", "group_accepted", "group_dropped", "batch_made", "batch_sent", "batch_applied"]


@pytest.mark.parametrize("kind", [*KINDS, "epoch_allotted", "epoch_begun", "checkpoint_covered"])
def test_a_row_that_was_deleted_is_missed(kind: str, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seq, _ = first(copy, kind)
    execute(copy, "DELETE FROM facts WHERE seq = ?", seq)
    assert any(f"fact {seq} is missing" in each["problem"] for each in differing(copy, capsys))


@pytest.mark.parametrize("kind", [each for each in KINDS if each != "batch_sent"])
def test_a_row_that_was_doubled_is_found(kind: str, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seq, _ = first(copy, kind)
    execute(copy, "INSERT INTO facts (kind, grp, fact) SELECT kind, grp, fact FROM facts WHERE seq = ?", seq)
    assert differing(copy, capsys)


def _other_digest(made: journal_pb2.BatchMade) -> str:
    made.trajectory_digests[0] = bytes(16)
    made.content_digest = batch_digest(made.trajectory_digests)
    return made.trajectory_ids[0]


def _one_less(made: journal_pb2.BatchMade) -> str:
    made.content_digest = batch_digest(made.trajectory_digests[1:])
    made.trajectory_digests.pop(0)
    return made.trajectory_ids.pop(0)


def _one_twice(made: journal_pb2.BatchMade) -> str:
    made.trajectory_ids.append(made.trajectory_ids[0])
    made.trajectory_digests.append(made.trajectory_digests[0])
    made.content_digest = batch_digest(made.trajectory_digests)
    return made.trajectory_ids[0]


@pytest.mark.parametrize("alter", [_other_digest, _one_less, _one_twice])
def test_a_batch_that_was_altered_in_the_journal_is_named(
    alter: Callable[[journal_pb2.BatchMade], str], copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seq, fact = first(copy, "batch_made", 1)
    name = alter(fact.batch_made)
    execute(copy, "UPDATE facts SET fact = ? WHERE seq = ?", fact.SerializeToString(), seq)
    found = differing(copy, capsys)
    assert any((each["trajectory"], each["batch"]) == (name, fact.batch_made.batch_id) for each in found), found


# The trainer's side, altered by hand.


def rewrite(directory: Path, change: Callable[[list[checkpoint_pb2.BatchRecord]], None]) -> None:
    (path,) = record_paths(record_directory(directory))
    records = list(read_record_file(path).records)
    change(records)
    path.write_bytes(b"".join(map(frame, records)))


@pytest.mark.parametrize("place", range(5))
def test_a_frame_that_was_deleted_is_missed(place: int, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone: list[checkpoint_pb2.BatchRecord] = []
    rewrite(copy, lambda records: gone.append(records.pop(place)))
    found = differing(copy, capsys)
    assert any((each["side"], each["batch"]) == ("record", gone[0].batch_id) for each in found), found


def test_a_frame_that_was_doubled_is_found(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(copy, lambda records: records.append(records[0]))
    assert any("recorded twice" in each["problem"] for each in differing(copy, capsys))


def test_a_frame_that_was_altered_with_its_checksum_is_named(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def alter(records: list[checkpoint_pb2.BatchRecord]) -> None:
        records[1].results[2].digest = bytes(16)
        records[1].content_digest = batch_digest(each.digest for each in records[1].results)

    rewrite(copy, alter)
    found = differing(copy, capsys)
    (path,) = record_paths(record_directory(copy))
    record = read_record_file(path).records[1]
    named = {"side": "record", "batch": record.batch_id, "trajectory": record.results[2].trajectory_id}
    assert any(each | named == each for each in found), found


def test_a_byte_that_was_changed_within_the_record_is_found(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = record_paths(record_directory(copy))
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)
    found = differing(copy, capsys)
    assert any("is damaged at byte 0" in each["problem"] for each in found), found


def test_a_record_that_ends_before_its_checkpoint_says_is_found(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(record_directory(copy))
    found = differing(copy, capsys)
    assert any(each["side"] == "checkpoint" and "which are not there" in each["problem"] for each in found), found


# Payloads, counts, files that cannot be read.


def test_bytes_of_a_segment_that_were_changed_are_found_with_their_trajectory(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, fact = first(copy, "episodes_ended", -1)
    altered = fact.episodes_ended.episodes[1].trajectories[0]
    path = segment_path(copy / "journal", altered.place.segment)
    content = bytearray(path.read_bytes())
    content[altered.place.offset + 10] ^= 1
    path.write_bytes(content)
    found = differing(copy, capsys)
    assert [(each["side"], each["trajectory"]) for each in found] == [("payloads", altered.trajectory_id)]


def test_a_segment_that_is_still_needed_may_not_be_gone_but_a_covered_one_may(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def live(run: RunOnDisk) -> None:
        run.trains(2)
        run.checkpoint_is_written()
        run.trains(2)
        run.checkpoint_is_written()
        run.group_is_accepted()

    lived(tmp_path, live, limits=JournalLimits(segment_bytes=64))
    _, oldest = first(tmp_path, "episodes_ended")
    gone = segment_path(tmp_path / "journal", oldest.episodes_ended.episodes[0].trajectories[0].place.segment)
    gone.unlink(missing_ok=True)
    assert not audit_run(tmp_path).differences
    _, newest = first(tmp_path, "episodes_ended", -1)
    needed = newest.episodes_ended.episodes[0].trajectories[0]
    segment_path(tmp_path / "journal", needed.place.segment).unlink()
    found = differing(tmp_path, capsys)
    assert {each["side"] for each in found} == {"payloads"}
    assert found[0]["trajectory"] == needed.trajectory_id


async def sampled_by_an_agent(directory: Path) -> Path:
    """Let an external agent sample twice; return the segment that has it."""
    journal = Journal(directory, {"run": "test"})
    for fact in (drawn(1), granted(1, 1, [0]), opened(1, 0)):
        journal.record_fact(fact)
    for request in ("a", "b"):
        journal.record_fact(recorded(journal, 1, 0, generation(request, [1, 2], [3])))
    await journal.close()
    _, fact = first(directory, "session_generation_recorded")
    return segment_path(directory / "journal", fact.session_generation_recorded.place.segment)


async def test_what_an_agent_sampled_is_compared_with_its_digest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    segment = await sampled_by_an_agent(tmp_path)
    assert not audit_run(tmp_path).differences
    _, fact = first(tmp_path, "session_generation_recorded", 1)
    content = bytearray(segment.read_bytes())
    content[fact.session_generation_recorded.place.offset + 10] ^= 1
    segment.write_bytes(content)
    assert [(each["side"], each["trajectory"]) for each in differing(tmp_path, capsys)] == [("payloads", "g1")]


async def test_what_an_agent_sampled_may_not_be_gone_while_its_group_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    segment = await sampled_by_an_agent(tmp_path)
    segment.unlink()
    (found,) = differing(tmp_path, capsys)
    assert (found["side"], found["trajectory"]) == ("payloads", "g1")
    assert found["problem"].endswith("which has it, is gone")


def test_every_payload_that_a_fact_can_name_is_compared() -> None:
    """The payloads are found through the contract, so that those of future facts are tested, too."""

    def facts(kind: Descriptor) -> Iterator[Message]:
        """Yield a message of a kind for each payload that it can name, in a segment of its own."""
        for field in kind.fields:
            if field.message_type is None or field.message_type.file.name != kind.file.name:
                continue
            inner = (
                [journal_pb2.PayloadPlace(segment=1)]
                if field.message_type.name == "PayloadPlace"
                else facts(field.message_type)
            )
            for each in inner:
                made = GetMessageClass(kind)()
                part = getattr(made, field.name)
                part.add().CopyFrom(each) if field.is_repeated else part.CopyFrom(each)
                yield made

    found = list(facts(journal_pb2.Fact.DESCRIPTOR))
    assert len(found) == 5
    for fact in found:
        assert [place.segment for _, place in _places(fact)] == [1], fact


def test_a_report_that_counts_otherwise_is_found(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = audit_run(copy)
    report = {
        "trajectories_accepted": result.accepted,
        "trajectories_trained": result.trained,
        "trajectories_dropped": {**result.dropped, "RUN_ENDED": result.in_flight},
    }
    (copy / "report.json").write_text(json.dumps(report))
    assert not audit_run(copy).differences
    report["trajectories_trained"] -= 1
    (copy / "report.json").write_text(json.dumps(report))
    assert [each["side"] for each in differing(copy, capsys)] == ["report"]


def test_what_is_no_run_or_cannot_be_read_is_told(tmp_path: Path, copy: Path) -> None:
    with pytest.raises(ConfigError, match=r"no journal\.sqlite in nothing"):
        run(["nothing", "--output-dir", str(tmp_path)])
    (copy / DATABASE).write_bytes(b"no database" * 100)
    with pytest.raises(ConfigError, match="not a readable journal"):
        run([str(copy)])
