"""What a run remembers after its process was killed at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from orchestrator_svc import journal as journal_module
from orchestrator_svc.config import OrchestratorConfig
from orchestrator_svc.dispatch import TaskStream, readable_groups
from orchestrator_svc.envs.base import Task
from orchestrator_svc.journal import Journal, SegmentError, SegmentWriter, read_record, segment_numbers, segment_path
from orchestrator_svc.recovery import GroupDamagedError, JournalError
from orchestrator_svc.scheduler import Batch, DrawnTask, Reason
from orchestrator_svc.training import Training
from sluice.v1 import orchestrator_pb2, tokens_pb2
from sluice.versions import BASE, Version

IDENTITY = {"run": "r", "seed": "0"}
FIRST = Version(1, 0)


def open_journal(directory: Path, **settings) -> Journal:
    return Journal(directory, IDENTITY, fsync_interval_s=0.0, **settings)


def record(name: str, text: str = "hello") -> orchestrator_pb2.TrajectoryRecord:
    return orchestrator_pb2.TrajectoryRecord(
        trajectory=tokens_pb2.Trajectory(trajectory_id=name, token_ids=[1, 2, 3], mask_runs=[1, 2], reward=0.5),
        conversation=tokens_pb2.Conversation(messages=[tokens_pb2.ChatMessage(role="assistant", content=text)]),
    )


def accept(journal: Journal, number: int, versions=(FIRST,), count: int = 2) -> None:
    journal.draw(number, number - 1, number)
    journal.accept(number, versions, [record(f"g{number}-{index}") for index in range(count)])


async def killed(journal: Journal) -> None:
    """Leave everything durable behind and nothing closed, as SIGKILL does."""
    await journal.durable()
    journal._thread.end()
    journal._connection.close()


async def test_drawn_tasks_without_trajectories_are_drawn_again(tmp_path) -> None:
    journal = open_journal(tmp_path)
    journal.draw(1, 0, 1)
    journal.draw(2, 1, 2)
    accept(journal, 3)
    await killed(journal)
    recovery = await open_journal(tmp_path).recover()
    assert recovery.drawn == [DrawnTask(1, 0), DrawnTask(2, 1)]
    assert [group.number for group in recovery.ready] == [3]
    assert (recovery.next_group, recovery.next_position) == (4, 3)


async def test_an_older_group_that_is_drawn_again_gives_no_number_away_twice(tmp_path) -> None:
    journal = open_journal(tmp_path)
    for number in (1, 2, 3):
        journal.draw(number, number - 1, number)
    await killed(journal)
    again = open_journal(tmp_path)
    again.draw(1, 0, 3)
    await killed(again)
    assert (await open_journal(tmp_path).recover()).next_group == 4


async def test_accepted_trajectories_come_back_whole(tmp_path) -> None:
    journal = open_journal(tmp_path)
    versions = [Version(1, 4), Version(1, 5)]
    accept(journal, 7, versions)
    await killed(journal)
    again = open_journal(tmp_path)
    (group,) = (await again.recover()).ready
    assert (group.versions, group.trajectories, group.position) == (tuple(versions), 2, 6)
    assert await again.read_group(7) == [record("g7-0"), record("g7-1")]


async def test_batches_that_the_weights_lack_are_known_with_their_groups(tmp_path) -> None:
    journal = open_journal(tmp_path)
    epoch = await journal.allot_epoch()
    journal.open_epoch(epoch, BASE, [])
    for number in (1, 2, 3):
        accept(journal, number)
        journal.make_batch(Batch(number, f"b{number}", (number,)))
    journal.apply_batch(Batch(1, "b1", (1,)), 1, {"STALE": 1}, 12.5)
    journal.apply_batch(Batch(2, "b2", (2,)), 2, {}, 20.0)
    await killed(journal)
    recovery = await open_journal(tmp_path).recover()
    assert [batch.batch_id for batch, _ in recovery.after(1)] == ["b2", "b3"]
    assert [[group.number for group in groups] for _, groups in recovery.after(1)] == [[2], [3]]
    assert recovery.accounting.trained == 3
    assert recovery.accounting.dropped == {"STALE": 1}
    assert recovery.accounting.accepted == 6
    assert recovery.elapsed_s == 20.0
    assert recovery.epochs == [(1, BASE)]


async def test_a_batch_that_was_taken_apart_is_gone_and_its_number_free(tmp_path) -> None:
    journal = open_journal(tmp_path)
    for number in (1, 2):
        accept(journal, number)
        journal.make_batch(Batch(number, f"b{number}", (number,)))
    journal.apply_batch(Batch(1, "b1", (1,)), 2, {}, 1.0)
    journal.open_epoch(await journal.allot_epoch(), BASE, kept=[1])
    journal.make_batch(Batch(2, "another", (2,)))
    await killed(journal)
    recovery = await open_journal(tmp_path).recover()
    assert [batch.batch_id for batch, _ in recovery.after(0)] == ["b1", "another"]
    assert recovery.accounting.trained == 0, "the weights that trained it are gone"


async def test_every_epoch_is_new_even_if_the_trainer_never_answered(tmp_path) -> None:
    journal = open_journal(tmp_path)
    assert await journal.allot_epoch() == 1
    await killed(journal)
    again = open_journal(tmp_path)
    assert await again.allot_epoch() == 2
    assert again.resumes


async def test_every_process_that_opens_the_journal_has_a_number_of_its_own(tmp_path) -> None:
    journal = open_journal(tmp_path)
    await killed(journal)
    again = open_journal(tmp_path)
    assert (journal.start, again.start) == (1, 2)
    await again.close()


async def test_dropped_groups_are_counted_and_forgotten(tmp_path) -> None:
    journal = open_journal(tmp_path)
    accept(journal, 1)
    journal.drop(1, Reason.STALE, was_accepted=2)
    journal.draw(2, 1, 2)
    journal.drop(2, Reason.EPISODE_FAILED, was_accepted=0)
    journal.drop_trajectories(Reason.MISSING_REWARD, 3)
    await killed(journal)
    recovery = await open_journal(tmp_path).recover()
    assert (recovery.drawn, recovery.ready) == ([], [])
    assert recovery.accounting.dropped == {Reason.STALE: 2, Reason.MISSING_REWARD: 3}
    assert recovery.accounting.failed_groups == {Reason.EPISODE_FAILED: 1}
    assert recovery.accounting.accepted == 5


async def test_a_torn_end_behind_the_last_acknowledged_record_does_no_harm(tmp_path) -> None:
    journal = open_journal(tmp_path)
    accept(journal, 1)
    await killed(journal)
    with segment_path(tmp_path / "journal", 1).open("ab") as segment:
        segment.write(b"\x40\x00\x00\x00torn")
    again = open_journal(tmp_path)
    accept(again, 2)
    await again.durable()
    assert await again.read_group(1) == [record("g1-0"), record("g1-1")]
    assert await again.read_group(2) == [record("g2-0"), record("g2-1")]
    await again.close()


async def test_a_damaged_record_is_noticed(tmp_path) -> None:
    journal = open_journal(tmp_path)
    accept(journal, 1)
    await journal.durable()
    path = segment_path(tmp_path / "journal", 1)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(GroupDamagedError, match="damaged"):
        await journal.read_group(1)
    with pytest.raises(GroupDamagedError, match="no trajectories"):
        await journal.read_group(2)


@pytest.fixture
def dead_disk(monkeypatch) -> Iterator[threading.Event]:
    """A record that waits for this event hangs as a disk that does not answer; the journal soon gives it up."""
    answer = threading.Event()
    monkeypatch.setattr(journal_module, "_DISK_S", 0.05)
    monkeypatch.setattr(journal_module, "_CLOSE_S", 0.05)
    yield answer
    answer.set()


@pytest.mark.parametrize("fault", ["disk", "tables"])
async def test_a_group_is_not_taken_for_damaged_while_nothing_can_be_read(tmp_path, dead_disk, fault) -> None:
    journal = open_journal(tmp_path)
    accept(journal, 1)
    await killed(journal)
    again = open_journal(tmp_path)
    recovery = await again.recover()
    if fault == "disk":
        again._record(dead_disk.wait)
    else:
        again._connection.close()
    tasks = TaskStream([Task("only")], seed=0)
    with pytest.raises(JournalError):
        await readable_groups(recovery.ready, again, recovery.accounting, tasks)
    assert recovery.accounting.dropped == {}
    training = Training(
        config=OrchestratorConfig(environment="any"),
        scheduler=Mock(),
        journal=again,
        status=Mock(),
        trainer=Mock(),
        pool=Mock(),
        tasks=tasks,
        changed=asyncio.Event(),
    )
    with pytest.raises(JournalError):
        await training._readable_records(Batch(1, "b1", (1,)))
    dead_disk.set()
    await asyncio.gather(*filter(None, [again._flushing]))
    await again.close()


async def test_a_journal_on_a_dead_disk_is_given_up_in_time(tmp_path, dead_disk) -> None:
    journal = open_journal(tmp_path)
    journal._record(dead_disk.wait)
    async with asyncio.timeout(5.0):
        with pytest.raises(JournalError, match="did not take the journal's records"):
            await journal.close()
    dead_disk.set()
    await asyncio.gather(*filter(None, [journal._flushing]))
    journal._thread.end()
    journal._connection.close()


async def test_a_batch_that_names_a_group_which_is_gone_comes_back_with_the_others(tmp_path) -> None:
    journal = open_journal(tmp_path)
    for number in (1, 2):
        accept(journal, number)
    journal.make_batch(Batch(1, "b1", (1, 2)))
    journal.drop(1, Reason.JOURNAL_DAMAGED, was_accepted=2)
    await killed(journal)
    recovery = await open_journal(tmp_path).recover()
    assert [[group.number for group in groups] for _, groups in recovery.after(0)] == [[2]]
    assert recovery.accounting.dropped == {Reason.JOURNAL_DAMAGED: 2}


async def test_a_batch_that_does_not_go_on_leaves_its_number_and_its_groups_free(tmp_path) -> None:
    journal = open_journal(tmp_path)
    journal.open_epoch(await journal.allot_epoch(), BASE, [])
    for number in (1, 2):
        accept(journal, number)
        journal.make_batch(Batch(number, f"b{number}", (number,)))
    journal.keep_batches(after=0, kept=[1])
    assert [group.number for group in (await journal.recover()).ready] == [2]
    journal.make_batch(Batch(2, "another", (2,)))
    await killed(journal)
    recovery = await open_journal(tmp_path).recover()
    assert [batch.batch_id for batch, _ in recovery.after(0)] == ["b1", "another"]


async def test_segments_live_until_the_checkpoint_before_the_last_covers_them(tmp_path) -> None:
    journal = open_journal(tmp_path, segment_bytes=1)
    journal.open_epoch(await journal.allot_epoch(), BASE, [])
    for number in (1, 2, 3, 4):
        accept(journal, number, count=1)
        journal.make_batch(Batch(number, f"b{number}", (number,)))
        journal.apply_batch(Batch(number, f"b{number}", (number,)), 1, {}, 1.0)
    journal.cover(2)
    await journal.durable()
    assert segment_numbers(tmp_path / "journal") == [1, 2, 3, 4]
    journal.cover(4)
    await journal.durable()
    assert segment_numbers(tmp_path / "journal") == [3, 4]
    recovery = await journal.recover()
    assert [batch.sequence_no for batch, _ in recovery.after(2)] == [3, 4]
    assert recovery.accounting.trained == 4
    with pytest.raises(JournalError, match="no longer holds batch 2"):
        recovery.after(1)


async def four_applied(directory: Path) -> Journal:
    """A journal with four applied batches, each in a segment of its own."""
    journal = open_journal(directory, segment_bytes=1)
    journal.open_epoch(await journal.allot_epoch(), BASE, [])
    for number in (1, 2, 3, 4):
        accept(journal, number, count=1)
        journal.make_batch(Batch(number, f"b{number}", (number,)))
        journal.apply_batch(Batch(number, f"b{number}", (number,)), 1, {}, 1.0)
    await journal.durable()
    return journal


async def test_no_segment_is_deleted_by_a_transaction_that_fails(tmp_path) -> None:
    journal = await four_applied(tmp_path)
    journal.cover(2)
    journal.cover(4)
    journal.generated(TOO_LARGE)
    with pytest.raises(JournalError):
        await journal.durable()
    again = open_journal(tmp_path)
    for number in (1, 2, 3, 4):
        assert await again.read_group(number) == [record(f"g{number}-0")]


async def test_a_segment_that_a_killed_process_left_behind_is_removed_at_the_next_start(tmp_path) -> None:
    journal = await four_applied(tmp_path)
    left = segment_path(tmp_path / "journal", 1).read_bytes()
    journal.cover(2)
    journal.cover(4)
    await killed(journal)
    segment_path(tmp_path / "journal", 1).write_bytes(left)
    again = open_journal(tmp_path)
    assert segment_numbers(tmp_path / "journal") == [3, 4]
    assert await again.read_group(3) == [record("g3-0")]


async def test_two_checkpoints_at_one_version_leave_the_one_before_them_usable(tmp_path) -> None:
    journal = await four_applied(tmp_path)
    for version in (2, 4, 4):
        journal.cover(version)
    assert [batch.sequence_no for batch, _ in (await journal.recover()).after(2)] == [3, 4]


async def test_a_journal_of_another_run_is_refused(tmp_path) -> None:
    await open_journal(tmp_path).close()
    with pytest.raises(JournalError, match="seed = '0', now it is '1'"):
        Journal(tmp_path, {**IDENTITY, "seed": "1"})


async def test_a_file_that_is_no_journal_is_refused(tmp_path) -> None:
    (tmp_path / "journal.sqlite").write_bytes(b"x" * 4096)
    with pytest.raises(JournalError, match="move it away"):
        open_journal(tmp_path)


async def test_what_cannot_be_written_fails_whoever_waits_for_it(tmp_path) -> None:
    journal = open_journal(tmp_path)
    journal.make_batch(Batch(1, "b1", (1,)))
    journal.make_batch(Batch(1, "b1", (1,)))
    with pytest.raises(JournalError, match="cannot write the journal"):
        await journal.durable()
    with pytest.raises(JournalError):
        journal.draw(1, 0, 1)


TOO_LARGE = {"tokens": 1 << 70}
"""A count that SQLite cannot store: the error is neither an OSError nor one of sqlite3."""


async def test_any_failure_of_a_write_fails_all_who_wait_and_everything_after_it(tmp_path) -> None:
    journal = open_journal(tmp_path)
    journal.generated(TOO_LARGE)
    outcomes = await asyncio.gather(journal.durable(), journal.durable(), return_exceptions=True)
    assert [type(each) for each in outcomes] == [JournalError, JournalError]
    with pytest.raises(JournalError, match="cannot write the journal"):
        await journal.durable()
    with pytest.raises(JournalError, match="cannot write the journal"):
        journal.draw(1, 0, 1)
    with pytest.raises(JournalError, match="cannot write the journal"):
        await journal.recover()


async def test_durable_does_not_wait_for_what_is_recorded_after_the_call(tmp_path) -> None:
    journal = open_journal(tmp_path)

    async def record_for_ever() -> None:
        for number in range(2, 50_000):
            journal.draw(number, number, number)
            await asyncio.sleep(0)

    journal.draw(1, 0, 1)
    recording = asyncio.create_task(record_for_ever())
    try:
        async with asyncio.timeout(5.0):
            await journal.durable()
        assert not recording.done(), "durable returned while records kept coming"
    finally:
        recording.cancel()
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.sqlite")) as tables:
        assert tables.execute("SELECT 1 FROM groups WHERE number = 1").fetchone()
    await journal.close()


async def test_records_whose_write_was_cancelled_are_not_called_durable(tmp_path) -> None:
    journal = Journal(tmp_path, IDENTITY, fsync_interval_s=3600.0)
    journal.draw(1, 0, 1)
    waiting = asyncio.create_task(journal.durable())
    (writing,) = [task for task in asyncio.all_tasks() if task.get_name() == "journal"]
    await asyncio.sleep(0)
    writing.cancel()
    with pytest.raises(JournalError):
        await waiting
    with pytest.raises(JournalError):
        await journal.durable()


async def test_records_beyond_the_bound_are_refused(tmp_path) -> None:
    journal = Journal(tmp_path, IDENTITY, fsync_interval_s=3600.0, queue_records=2)
    journal.draw(1, 0, 1)
    journal.draw(2, 1, 2)
    with pytest.raises(JournalError, match="too slow"):
        journal.draw(3, 2, 3)
    assert journal._flushing is not None
    journal._flushing.cancel()
    await asyncio.wait({journal._flushing})


async def test_many_writers_share_one_commit_and_all_become_durable(tmp_path) -> None:
    journal = open_journal(tmp_path)

    async def group(number: int) -> None:
        accept(journal, number)
        await journal.durable()

    await asyncio.gather(*(group(number) for number in range(1, 101)))
    assert len((await journal.recover()).ready) == 100
    await journal.close()


def test_a_record_that_is_cut_off_is_told_apart_from_a_whole_one(tmp_path) -> None:
    writer = SegmentWriter(tmp_path, 1 << 20)
    first, second = writer.append(b"one"), writer.append(b"two")
    writer.close()
    assert read_record(tmp_path, first) == b"one"
    path = segment_path(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SegmentError, match="damaged"):
        read_record(tmp_path, second)


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE])
def test_a_disk_that_fails_damages_no_record(tmp_path, monkeypatch, code) -> None:
    writer = SegmentWriter(tmp_path, 1 << 20)
    location = writer.append(b"one")
    writer.close()

    def fails(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", fails)
        with pytest.raises(JournalError, match="which may not be damaged") as failed:
            read_record(tmp_path, location)
    assert not isinstance(failed.value, GroupDamagedError)
    segment_path(tmp_path, 1).unlink()
    with pytest.raises(SegmentError, match="is gone"):
        read_record(tmp_path, location)
