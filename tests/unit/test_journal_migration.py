"""A journal that an older release wrote becomes one of facts, and nothing that it knew is lost."""

from __future__ import annotations

import base64
import contextlib
import json
import sqlite3
from pathlib import Path

import pytest

from orchestrator_svc.commands.audit_compare import audit
from orchestrator_svc.journal import migration
from orchestrator_svc.journal.facts import Redraw, Stage
from orchestrator_svc.journal.ledger import folded
from orchestrator_svc.journal.segments import JournalError, segment_numbers
from orchestrator_svc.journal.store import GroupDamagedError, Journal, JournalLimits, read_facts
from sluice.v1 import journal_pb2 as pb
from sluice.versions import BASE, Version

IDENTITY = {"run": "r", "seed": "0", "environment": "letters_env.py:Letters", "split": "train"}

OLD = json.loads((Path(__file__).parent / "journal_v1.json").read_text())
"""Rows that the old class Journal wrote: groups 1 to 3 in two applied batches, the first covered by a checkpoint; 4 in a third batch
that is made; 5 accepted; 6 drawn; 7 dropped as stale; 8 failed."""


@pytest.fixture
def run_dir(tmp_path) -> Path:
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.sqlite")) as database:
        database.executescript("\n".join(OLD["sql"]))
    (tmp_path / "journal").mkdir()
    for name, content in OLD["segments"].items():
        (tmp_path / "journal" / name).write_bytes(base64.b64decode(content))
    return tmp_path


def open_journal(run_dir: Path) -> Journal:
    return Journal(run_dir, IDENTITY, environment="letters", limits=JournalLimits(fsync_interval_s=0.0))


async def test_a_journal_of_format_1_goes_on_where_it_stopped(run_dir) -> None:
    journal = open_journal(run_dir)
    ledger = journal.ledger
    stages = {number: group.stage for number, group in ledger.groups.items()}
    assert stages == {4: Stage.BATCHED, 5: Stage.READY, 6: Stage.RUNNING}
    assert (ledger.accepted, ledger.trained) == (15, 5)
    assert ledger.dropped == {"STALE": 3, "MISSING_REWARD": 3}
    assert ledger.failed_groups == {"EPISODE_FAILED": 1}
    assert (ledger.epoch, ledger.applied, ledger.next_batch, ledger.start) == (1, 2, 4, 2)
    assert (ledger.next_group, ledger.elapsed_s) == (9, 2.5)
    imported = [fact.history_imported for _, fact in read_facts(run_dir) if fact.HasField("history_imported")]
    assert [(each.environment, each.next_position) for each in imported] == [("letters", 8)], "for the curriculum"
    assert ledger.generated == {"tokens": 100, "requests": 7}
    group = ledger.groups[5]
    assert (group.environment, group.task_id, group.position, group.versions) == (
        "letters",
        "task-4",
        4,
        (Version(1, 2),),
    )
    names = [each.trajectory.trajectory_id for each in await journal.trajectories(group)]
    assert names == ["g5-0", "g5-1"]
    assert journal.resumes
    await journal.close()


async def test_a_trainer_that_lost_a_batch_of_the_old_journal_gets_it_again(run_dir) -> None:
    journal = open_journal(run_dir)
    journal.ledger.check_reach(1)
    journal.record_fact(pb.Fact(epoch_allotted=pb.EpochAllotted(epoch=2)))
    journal.record_fact(pb.Fact(epoch_begun=pb.EpochBegun(epoch=2, origin=Version(1, 1).to_proto())))
    assert [batch.batch_id for batch in journal.ledger.to_send] == ["batch-2-epoch-1", "batch-3-epoch-1"]
    assert journal.ledger.trained == 2
    with pytest.raises(Exception, match="no longer holds batch 1"):
        journal.ledger.check_reach(BASE.number)
    await journal.close()


async def test_an_audit_counts_what_a_journal_of_format_1_only_counted(run_dir) -> None:
    journal = open_journal(run_dir)
    ledger = journal.ledger
    result = audit(read_facts(run_dir), [], ledger.lineage)
    assert not result.differences
    assert (result.accepted, result.trained, result.dropped) == (ledger.accepted, ledger.trained, ledger.dropped)
    assert (result.counted_batches, result.groups_in_flight) == (2, {4, 5})
    journal.record_fact(pb.Fact(epoch_allotted=pb.EpochAllotted(epoch=2)))
    journal.record_fact(pb.Fact(epoch_begun=pb.EpochBegun(epoch=2, origin=Version(1, 1).to_proto())))
    await journal.durable()
    result = audit(read_facts(run_dir), [], ledger.lineage)
    assert not result.differences
    assert (result.trained, result.counted_batches) == (ledger.trained, 1)
    await journal.close()


async def test_the_old_file_stays_beside_the_new_one(run_dir) -> None:
    await open_journal(run_dir).close()
    with contextlib.closing(sqlite3.connect(run_dir / "journal.v1.sqlite")) as copy:
        assert "\n".join(copy.iterdump()) == "\n".join(OLD["sql"])
    with contextlib.closing(sqlite3.connect(run_dir / "journal.sqlite")) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        assert tables == {"meta", "facts", "sqlite_sequence"}
        assert database.execute("PRAGMA freelist_count").fetchone() == (0,), (
            "the pages of the old tables are given back"
        )
    again = open_journal(run_dir)
    assert again.ledger == folded(read_facts(run_dir))
    assert again.ledger.start == 3
    await again.close()


async def test_facts_of_a_migrated_journal_come_behind_every_position_that_an_older_checkpoint_names(run_dir) -> None:
    journal = open_journal(run_dir)
    assert min(seq for seq, _ in read_facts(run_dir)) > 1_000_000_000
    await journal.close()


class KilledError(Exception):
    """The process died."""


async def test_a_migration_that_is_killed_leaves_the_old_journal_and_is_made_again(run_dir, monkeypatch) -> None:
    def killed(*_: object) -> None:
        raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(migration, "_history", killed)
        with pytest.raises(KilledError):
            open_journal(run_dir)
    with pytest.raises(JournalError, match="older release"):
        list(read_facts(run_dir))
    journal = open_journal(run_dir)
    assert journal.ledger.accepted == 15
    await journal.close()


async def test_a_group_of_the_old_journal_that_the_disk_damaged_is_noticed(run_dir) -> None:
    for number in segment_numbers(run_dir / "journal"):
        path = run_dir / "journal" / f"segment-{number:08d}.bin"
        path.write_bytes(path.read_bytes()[:12])
    journal = open_journal(run_dir)
    with pytest.raises(GroupDamagedError):
        await journal.trajectories(journal.ledger.groups[5])
    journal.record_fact(pb.Fact(group_dropped=pb.GroupDropped(group=5, reason="JOURNAL_DAMAGED", redraw=True)))
    assert [(each.environment, each.position) for each in journal.ledger.redraws] == [("letters", 4)]
    assert isinstance(journal.ledger.redraws[0], Redraw)
    await journal.close()
