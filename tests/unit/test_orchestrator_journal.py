"""What a run remembers after its process was killed at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import random
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from run_facts import accept, applied, begin_epoch, covered, drawn, dropped, generated, made, record, unmade, wholes
from simulated_clock import LIMIT_S, SimulatedClock

from orchestrator_svc.journal import store
from orchestrator_svc.journal.episodes import JournaledEpisodes
from orchestrator_svc.journal.facts import LedgerError, Place, Reason, Redraw, Stage
from orchestrator_svc.journal.ledger import Batch, Ledger, folded
from orchestrator_svc.journal.segments import (
    Disk,
    JournalError,
    SegmentError,
    SegmentWriter,
    read_payload,
    segment_numbers,
    segment_path,
)
from orchestrator_svc.journal.store import GroupDamagedError, Journal, JournalLimits, read_facts
from sluice.v1 import journal_pb2 as pb
from sluice.v1 import rollout_pb2
from sluice.versions import BASE, Version

IDENTITY = {"run": "r", "seed": "0"}
AT_ONCE = JournalLimits(fsync_interval_s=0.0)


def open_journal(directory: Path, **settings) -> Journal:
    return Journal(directory, IDENTITY, **{"limits": AT_ONCE, **settings})


async def killed(journal: Journal) -> None:
    """Leave everything durable behind and nothing closed, as SIGKILL does."""
    await journal.durable()
    journal._thread.end()
    journal._connection.close()


def live(journal: Journal, stage: Stage) -> list[int]:
    return [number for number, group in journal.ledger.groups.items() if group.stage is stage]


def batches(found: list[Batch]) -> list[tuple[str, list[int]]]:
    return [(batch.batch_id, [group.number for group in batch.groups]) for batch in found]


async def test_a_reading_that_is_given_up_ends_at_the_next_fact_and_writes_nothing(tmp_path) -> None:
    journal = open_journal(tmp_path)
    for number in range(1, 4):
        journal.record_fact(pb.Fact(epoch_allotted=pb.EpochAllotted(epoch=number)))
    await journal.close()
    before, followed, given_up = list(read_facts(tmp_path)), [], threading.Event()

    def follow(fact: pb.Fact) -> None:
        followed.append(fact)
        given_up.set()

    with pytest.raises(JournalError, match="start the run again"):
        open_journal(tmp_path, follow=follow, given_up=given_up)
    assert len(followed) == 1
    assert list(read_facts(tmp_path)) == before
    again = open_journal(tmp_path)
    assert again.ledger.allotted == 3
    await again.close()


async def test_a_start_has_the_state_that_was_durable(tmp_path) -> None:
    journal = open_journal(tmp_path)
    begin_epoch(journal)
    for number in (1, 2, 3, 4):
        accept(journal, number, [Version(1, 0)])
    journal.record_fact(drawn(5))
    journal.record_fact(generated(journal, 5))
    journal.record_fact(made(journal, 1, 2))
    journal.record_fact(applied(journal, 1, STALE=["g2-1"], elapsed_s=12.5))
    journal.record_fact(made(journal, 3))
    journal.record_fact(dropped(4, Reason.STALE, redraw=True))
    await journal.durable()
    before = folded(read_facts(tmp_path))
    assert before == journal.ledger
    await killed(journal)
    again = open_journal(tmp_path)
    ledger = again.ledger
    assert (again.resumes, ledger.start, ledger.elapsed_s, ledger.applied) == (True, 2, 12.5, 1)
    assert (live(again, Stage.RUNNING), live(again, Stage.BATCHED)) == ([5], [3])
    assert (ledger.accepted, ledger.trained, ledger.dropped) == (8, 3, {"STALE": 3})
    assert ledger.redraws == [Redraw("letters", "task-3", 3, "STALE")]
    assert ledger.next_group == 6
    await again.close()


async def test_numbers_of_facts_go_on_over_restarts(tmp_path) -> None:
    journal = open_journal(tmp_path)
    journal.record_fact(drawn(1))
    assert await journal.durable() == 2
    await killed(journal)
    again = open_journal(tmp_path)
    assert again.ledger.last_seq == 3, "the process that started"
    again.record_fact(drawn(2))
    assert await again.durable() == 4
    await again.close()
    assert [seq for seq, _ in read_facts(tmp_path)] == [1, 2, 3, 4]


async def test_a_fact_that_does_not_follow_from_the_others_is_not_written(tmp_path) -> None:
    journal = open_journal(tmp_path)
    accept(journal, 1)
    journal.record_fact(made(journal, 1))
    for impossible in (drawn(1), dropped(1, "STALE"), dropped(9, "STALE"), made(journal), unmade(7)):
        with pytest.raises(LedgerError):
            journal.record_fact(impossible)
    with pytest.raises(LedgerError, match="kind"):
        journal.record_fact(pb.Fact())
    await journal.durable()
    assert folded(read_facts(tmp_path)) == journal.ledger
    await journal.close()


async def test_facts_can_be_read_while_the_run_is_alive(tmp_path) -> None:
    journal = open_journal(tmp_path)
    accept(journal, 1)
    await journal.durable()
    first = [fact.WhichOneof("kind") for _, fact in read_facts(tmp_path)]
    assert first == ["process_started", "task_drawn", "episodes_ended", "group_accepted"]
    accept(journal, 2)
    await journal.durable()
    assert len(list(read_facts(tmp_path))) == 7
    await journal.close()
    with pytest.raises(JournalError, match="does not exist"):
        list(read_facts(tmp_path / "nowhere"))


def test_a_journal_that_is_just_made_has_no_facts_yet(tmp_path) -> None:
    (tmp_path / "journal.sqlite").touch()
    assert list(read_facts(tmp_path)) == []


def test_a_file_system_on_which_sqlite_has_no_shared_memory_is_refused_with_the_remedy(tmp_path, monkeypatch) -> None:
    connect = sqlite3.connect

    def without_shared_memory(path: Path, **options) -> sqlite3.Connection:
        return connect(f"{path.as_uri()}?vfs=unix-dotfile", uri=True, **options)

    monkeypatch.setattr(sqlite3, "connect", without_shared_memory)
    with pytest.raises(JournalError, match=r"refuses SQLite's write-ahead log .*'delete'.*output_dir"):
        Journal(tmp_path, {})


async def test_an_unfinished_group_keeps_what_was_sampled_of_it_until_it_begins_again(tmp_path) -> None:
    journal = open_journal(tmp_path)
    journal.record_fact(drawn(1))
    journal.record_fact(generated(journal, 1, "kept"))
    await killed(journal)
    again = open_journal(tmp_path)
    group = again.ledger.groups[1]
    episodes = JournaledEpisodes(again, group)
    response = await episodes.generation(0, 0, range(2))
    assert response is not None
    assert response.samples[0].text == "kept"
    assert await episodes.generation(0, 1, range(2)) is None
    assert episodes.keep_turn(0, 0, 1, 0.5, b"digest")
    assert episodes.keep_turn(0, 0, 1, 0.5, b"digest")
    assert not episodes.keep_turn(0, 0, 1, 0.5, b"other"), "the environment answered otherwise before"
    again.record_fact(drawn(1, attempt=1))
    assert again.ledger.groups[1].generations == []
    assert JournaledEpisodes(again, again.ledger.groups[1]).attempt(0) == 1
    assert again.ledger.next_group == 2, "it keeps its number"
    await again.close()


async def test_a_damaged_generation_is_sampled_again(tmp_path) -> None:
    journal = open_journal(tmp_path)
    journal.record_fact(drawn(1))
    journal.record_fact(generated(journal, 1))
    await journal.durable()
    flip(tmp_path, journal.ledger.groups[1].generations[0].place)
    assert await JournaledEpisodes(journal, journal.ledger.groups[1]).generation(0, 0, range(2)) is None
    await journal.close()


async def test_accepted_trajectories_come_back_whole(tmp_path) -> None:
    journal = open_journal(tmp_path)
    versions = [Version(1, 4), Version(1, 5)]
    accept(journal, 7, versions)
    await killed(journal)
    again = open_journal(tmp_path)
    group = again.ledger.groups[7]
    assert (group.versions, group.position, group.task_id) == (tuple(versions), 6, "task-6")
    assert await wholes(again, group) == [record("g7-0"), record("g7-1")]
    await again.close()


async def test_a_trainer_that_returns_to_an_older_version_lacks_the_batches_after_it(tmp_path) -> None:
    journal = open_journal(tmp_path)
    begin_epoch(journal)
    for number in (1, 2, 3):
        accept(journal, number)
        journal.record_fact(made(journal, number))
    journal.record_fact(applied(journal, 1))
    journal.record_fact(applied(journal, 2, STALE=["g2-0"]))
    assert (journal.ledger.trained, journal.ledger.dropped) == (3, {"STALE": 1})
    await killed(journal)
    again = open_journal(tmp_path)
    begin_epoch(again, Version(1, 1))
    assert batches(again.ledger.to_send) == [("b2", [2]), ("b3", [3])]
    assert live(again, Stage.BATCHED) == [3, 2]
    assert (again.ledger.trained, again.ledger.dropped) == (2, {}), "the weights that trained it are gone"
    again.record_fact(applied(again, 2))
    assert (again.ledger.trained, again.ledger.accepted) == (4, 6)
    await again.close()


async def test_batches_that_the_weights_hold_and_nobody_reported_are_known(tmp_path) -> None:
    journal = open_journal(tmp_path)
    begin_epoch(journal)
    for number in (1, 2, 3):
        accept(journal, number)
        journal.record_fact(made(journal, number))
    begin_epoch(journal, Version(1, 2))
    assert batches(journal.ledger.unreported) == [("b1", [1]), ("b2", [2])]
    assert batches(journal.ledger.to_send) == [("b3", [3])]
    journal.record_fact(applied(journal, 1))
    journal.record_fact(applied(journal, 2))
    assert (journal.ledger.unreported, journal.ledger.applied, journal.ledger.next_batch) == ([], 2, 4)
    await journal.close()


async def test_a_batch_that_was_taken_apart_leaves_its_number_and_its_groups_free(tmp_path) -> None:
    journal = open_journal(tmp_path)
    begin_epoch(journal)
    for number in (1, 2):
        accept(journal, number)
        journal.record_fact(made(journal, number))
    with pytest.raises(LedgerError, match="not the last one"):
        journal.record_fact(unmade(1))
    journal.record_fact(unmade(2))
    assert live(journal, Stage.READY) == [2]
    journal.record_fact(made(journal, 2))
    assert batches(journal.ledger.to_send) == [("b1", [1]), ("b3", [2])]
    await journal.close()


async def test_a_stale_group_of_an_applied_batch_is_drawn_again_exactly_once(tmp_path) -> None:
    journal = open_journal(tmp_path)
    begin_epoch(journal)
    accept(journal, 1)
    journal.record_fact(made(journal, 1))
    journal.record_fact(applied(journal, 1, STALE=["g1-0", "g1-1"], redrawn=[1]))
    await killed(journal)
    again = open_journal(tmp_path)
    assert len(again.ledger.redraws) == 1
    again.record_fact(drawn(2, 0, redraw="STALE"))
    assert again.ledger.redraws == []
    begin_epoch(again, BASE)
    again.record_fact(applied(again, 1, STALE=["g1-0", "g1-1"], redrawn=[1]))
    assert again.ledger.redraws == [], "the trainer lost the batch and refused it again: its task is drawn already"
    await again.close()


async def test_what_was_generated_and_given_up_at_once_is_counted_by_name(tmp_path) -> None:
    journal = open_journal(tmp_path)
    journal.record_fact(drawn(1))
    lost = pb.EndedEpisode(episode=0, reason=Reason.MISSING_REWARD, untrainable=["g1-0"])
    journal.record_fact(pb.Fact(episodes_ended=pb.EpisodesEnded(group=1, episodes=[lost])))
    journal.record_fact(dropped(1, Reason.MISSING_REWARD))
    ledger = journal.ledger
    assert (ledger.accepted, ledger.dropped) == (1, {Reason.MISSING_REWARD: 1})
    assert (ledger.failed_groups, ledger.groups) == ({Reason.MISSING_REWARD: 1}, {})
    await journal.close()


async def test_every_epoch_is_new_even_if_the_trainer_never_answered(tmp_path) -> None:
    journal = open_journal(tmp_path)
    journal.record_fact(pb.Fact(epoch_allotted=pb.EpochAllotted(epoch=1)))
    await killed(journal)
    again = open_journal(tmp_path)
    assert (again.resumes, again.ledger.allotted, again.ledger.epoch) == (True, 1, 0)
    with pytest.raises(LedgerError):
        again.record_fact(pb.Fact(epoch_allotted=pb.EpochAllotted(epoch=1)))
    await again.close()


async def test_a_torn_end_behind_the_last_acknowledged_record_does_no_harm(tmp_path) -> None:
    journal = open_journal(tmp_path)
    accept(journal, 1)
    await killed(journal)
    with segment_path(tmp_path / "journal", 1).open("ab") as segment:
        segment.write(b"\x40\x00\x00\x00torn")
    again = open_journal(tmp_path)
    accept(again, 2)
    await killed(again)
    third = open_journal(tmp_path)
    assert await wholes(third, third.ledger.groups[1]) == [record("g1-0"), record("g1-1")]
    assert await wholes(third, third.ledger.groups[2]) == [record("g2-0"), record("g2-1")]
    await third.close()


def flip(directory: Path, place: Place) -> None:
    """Flip a bit of a payload, as a bad disk does."""
    path = segment_path(directory / "journal", place.segment)
    content = bytearray(path.read_bytes())
    content[place.offset + 9] ^= 1
    path.write_bytes(content)


async def test_a_damaged_payload_is_noticed(tmp_path) -> None:
    journal = open_journal(tmp_path)
    accept(journal, 1)
    await killed(journal)
    again = open_journal(tmp_path)
    flip(tmp_path, again.ledger.groups[1].trajectories[1].place)
    with pytest.raises(GroupDamagedError, match="damaged"):
        await again.trajectories(again.ledger.groups[1])
    await again.close()


async def test_a_payload_that_another_one_replaced_is_noticed(tmp_path) -> None:
    journal = open_journal(tmp_path)
    accept(journal, 1)
    await journal.durable()
    first, second = (each.place for each in journal.ledger.groups[1].trajectories)
    with pytest.raises(SegmentError, match="another one"):
        read_payload(tmp_path / "journal", Place(*first[:2], second.digest))
    await journal.close()


class DeadDisk(Disk):
    """Does not answer before `answers` is set."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()

    def commit(self, connection: sqlite3.Connection) -> None:
        self.answers.wait()
        super().commit(connection)


@pytest.fixture
def dead_disk() -> Iterator[DeadDisk]:
    disk = DeadDisk()
    yield disk
    disk.answers.set()


async def test_a_group_is_not_taken_for_damaged_while_the_disk_does_not_answer(tmp_path, dead_disk) -> None:
    journal = open_journal(tmp_path)
    accept(journal, 1)
    await killed(journal)
    clock = SimulatedClock()
    again = open_journal(tmp_path, disk=dead_disk, clock=clock)
    dead_disk.answers.clear()
    again.record_fact(drawn(2))
    reading = asyncio.create_task(again.trajectories(again.ledger.groups[1]))
    await clock.advance(store._DISK_S)
    with pytest.raises(JournalError) as failed:
        await reading
    assert not isinstance(failed.value, GroupDamagedError)
    dead_disk.answers.set()
    await asyncio.gather(*filter(None, [again._flushing]))
    await again.close()


async def test_a_journal_on_a_dead_disk_is_given_up_in_time(tmp_path, dead_disk) -> None:
    clock = SimulatedClock()
    journal = open_journal(tmp_path, disk=dead_disk, clock=clock)
    dead_disk.answers.clear()
    journal.record_fact(drawn(1))
    closing = asyncio.create_task(journal.close())
    await clock.advance(store._DISK_S)
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(JournalError, match="did not take the journal's records"):
            await closing
    dead_disk.answers.set()
    await asyncio.gather(*filter(None, [journal._flushing]))
    journal._thread.end()
    journal._connection.close()


async def four_applied(directory: Path, **settings) -> Journal:
    """A journal with four applied batches, each in a segment of its own."""
    journal = open_journal(directory, limits=JournalLimits(fsync_interval_s=0.0, segment_bytes=1), **settings)
    begin_epoch(journal)
    for number in (1, 2, 3, 4):
        accept(journal, number, count=1)
        journal.record_fact(made(journal, number))
        journal.record_fact(applied(journal, number))
    await journal.durable()
    return journal


async def test_payloads_live_until_the_checkpoint_before_the_last_covers_them_and_facts_for_ever(tmp_path) -> None:
    journal = await four_applied(tmp_path)
    journal.record_fact(covered(2))
    await journal.durable()
    assert segment_numbers(tmp_path / "journal") == [1, 2, 3, 4], "the trainer may return to the base model"
    journal.record_fact(covered(4))
    await journal.durable()
    assert segment_numbers(tmp_path / "journal") == [3, 4]
    assert journal.ledger.trained == 4
    facts = [fact.WhichOneof("kind") for _, fact in read_facts(tmp_path)]
    assert facts.count("episodes_ended") == 4
    await journal.close()


async def test_no_segment_is_deleted_by_a_transaction_that_fails(tmp_path) -> None:
    disk = FullDisk()
    journal = await four_applied(tmp_path, disk=disk)
    disk.full = True
    journal.record_fact(covered(2))
    journal.record_fact(covered(4))
    with pytest.raises(JournalError):
        await journal.durable()
    again = open_journal(tmp_path)
    for batch in again.ledger.applied_batches.values():
        (group,) = batch.groups
        assert await wholes(again, group) == [record(f"g{group.number}-0")]
    assert len(again.ledger.applied_batches) == 4
    await again.close()


async def test_the_number_of_a_deleted_segment_is_not_used_again(tmp_path) -> None:
    """A fact names its payload by that number for ever."""
    for number in (1, 2):
        journal = open_journal(tmp_path)
        accept(journal, number)
        (first, _) = journal.ledger.groups[number].trajectories
        assert first.place.segment == number
        journal.record_fact(dropped(number, Reason.STALE))
        await journal.close()
        await open_journal(tmp_path).close()
        assert not segment_numbers(tmp_path / "journal"), "nobody needs it any more"


async def test_a_segment_that_a_killed_process_left_behind_is_removed_at_the_next_start(tmp_path) -> None:
    journal = await four_applied(tmp_path)
    left = segment_path(tmp_path / "journal", 1).read_bytes()
    journal.record_fact(covered(2))
    journal.record_fact(covered(4))
    await killed(journal)
    segment_path(tmp_path / "journal", 1).write_bytes(left)
    again = open_journal(tmp_path)
    assert segment_numbers(tmp_path / "journal") == [3, 4]
    (group,) = again.ledger.applied_batches[3].groups
    assert await wholes(again, group) == [record("g3-0")]
    await again.close()


async def test_two_checkpoints_at_one_version_leave_the_one_before_them_usable(tmp_path) -> None:
    journal = await four_applied(tmp_path)
    for version in (2, 4, 4):
        journal.record_fact(covered(version))
    begin_epoch(journal, Version(1, 2))
    assert [batch.sequence_no for batch in journal.ledger.to_send] == [3, 4]
    await journal.close()


async def test_a_trainer_that_returns_further_than_the_payloads_reach_is_refused(tmp_path) -> None:
    journal = await four_applied(tmp_path)
    journal.record_fact(covered(2))
    journal.record_fact(covered(4))
    journal.ledger.check_reach(2)
    with pytest.raises(LedgerError, match="no longer holds batch 2"):
        journal.ledger.check_reach(1)
    await journal.close()


async def test_a_journal_of_another_run_is_refused(tmp_path) -> None:
    await open_journal(tmp_path).close()
    with pytest.raises(JournalError, match="seed = '0', now it is '1'"):
        Journal(tmp_path, {**IDENTITY, "seed": "1"})


async def test_a_file_that_is_no_journal_is_refused(tmp_path) -> None:
    (tmp_path / "journal.sqlite").write_bytes(b"x" * 4096)
    with pytest.raises(JournalError, match="move it away"):
        open_journal(tmp_path)
    with pytest.raises(JournalError, match="not a readable journal"):
        list(read_facts(tmp_path))


async def test_a_journal_of_a_newer_release_is_refused(tmp_path) -> None:
    await open_journal(tmp_path).close()
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.sqlite")) as database:
        database.execute("UPDATE meta SET value = '3' WHERE key = 'format'")
        database.commit()
    with pytest.raises(JournalError, match="format 3"):
        open_journal(tmp_path)


class FullDisk(Disk):
    """Takes no commit while it is full."""

    def __init__(self) -> None:
        self.full = False

    def commit(self, connection: sqlite3.Connection) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().commit(connection)


async def test_any_failure_of_a_write_fails_all_who_wait_and_everything_after_it(tmp_path) -> None:
    disk = FullDisk()
    journal = open_journal(tmp_path, disk=disk)
    disk.full = True
    journal.record_fact(drawn(1))
    outcomes = await asyncio.gather(journal.durable(), journal.durable(), return_exceptions=True)
    assert [type(each) for each in outcomes] == [JournalError, JournalError]
    disk.full = False
    with pytest.raises(JournalError, match="cannot write the journal"):
        await journal.durable()
    with pytest.raises(JournalError, match="cannot write the journal"):
        journal.record_fact(drawn(2))
    assert [fact.WhichOneof("kind") for _, fact in read_facts(tmp_path)] == ["process_started"]


async def test_durable_does_not_wait_for_what_is_recorded_after_the_call(tmp_path) -> None:
    journal = open_journal(tmp_path, limits=JournalLimits(fsync_interval_s=0.0, queue_records=1 << 30))

    async def record_for_ever() -> None:
        for number in itertools.count(2):
            journal.record_fact(drawn(number))
            await asyncio.sleep(0)

    journal.record_fact(drawn(1))
    recording = asyncio.create_task(record_for_ever())
    try:
        async with asyncio.timeout(LIMIT_S):
            await journal.durable()
        assert not recording.done(), "durable returned while records kept coming"
    finally:
        recording.cancel()
    assert 1 in folded(read_facts(tmp_path)).groups
    await journal.close()


async def test_who_waits_for_records_ends_their_gathering(tmp_path) -> None:
    journal = Journal(tmp_path, IDENTITY, limits=JournalLimits(fsync_interval_s=3600.0))
    async with asyncio.timeout(LIMIT_S):
        for number in range(1, 4):  # also facts that are recorded during a write
            journal.record_fact(drawn(number))
            waiting = asyncio.create_task(journal.durable())
            await asyncio.sleep(0)
            journal.record_fact(drawn(100 + number))
            await asyncio.gather(waiting, journal.durable())
    assert folded(read_facts(tmp_path)) == journal.ledger
    await journal.close()


async def test_records_whose_write_was_cancelled_are_not_called_durable(tmp_path) -> None:
    journal = Journal(tmp_path, IDENTITY, limits=JournalLimits(fsync_interval_s=3600.0))
    journal.record_fact(drawn(1))
    waiting = asyncio.create_task(journal.durable())
    (writing,) = [task for task in asyncio.all_tasks() if task.get_name() == "journal"]
    await asyncio.sleep(0)
    writing.cancel()
    with pytest.raises(JournalError):
        await waiting
    with pytest.raises(JournalError):
        await journal.durable()


async def test_records_beyond_the_bound_are_refused(tmp_path) -> None:
    journal = Journal(tmp_path, IDENTITY, limits=JournalLimits(fsync_interval_s=3600.0, queue_records=2))
    journal.record_fact(drawn(1))
    journal.record_fact(drawn(2))
    with pytest.raises(JournalError, match="too slow"):
        journal.record_fact(drawn(3))
    assert journal._flushing is not None
    journal._flushing.cancel()
    await asyncio.wait({journal._flushing})


async def test_payloads_beyond_the_bound_are_refused(tmp_path) -> None:
    journal = Journal(tmp_path, IDENTITY, limits=JournalLimits(fsync_interval_s=3600.0, queue_bytes=1000))
    journal.record_fact(drawn(1))
    journal.keep(record("g1-0"))
    with pytest.raises(JournalError, match="queue_mb"):
        journal.keep(record("g1-1", "long" * 300))
    assert journal._flushing is not None
    journal._flushing.cancel()
    await asyncio.wait({journal._flushing})


async def test_a_payload_from_outside_waits_until_half_of_the_queue_is_free(tmp_path) -> None:
    limits = JournalLimits(fsync_interval_s=0.0, queue_bytes=4000)
    disk = DeadDisk()
    journal = Journal(tmp_path, IDENTITY, limits=limits, disk=disk)
    disk.answers.clear()
    journal.record_fact(drawn(1))
    journal.keep(record("g1-0", "long" * 100))
    await journal.room_for(1000)
    waiting = asyncio.create_task(journal.room_for(2000))
    await asyncio.sleep(0)
    assert not waiting.done()
    disk.answers.set()
    async with asyncio.timeout(LIMIT_S):
        await waiting
    await journal.room_for(4000)
    await journal.close()


async def test_many_writers_share_one_commit_and_all_become_durable(tmp_path) -> None:
    journal = open_journal(tmp_path)

    async def group(number: int) -> None:
        accept(journal, number)
        await journal.durable()

    await asyncio.gather(*(group(number) for number in range(1, 101)))
    assert folded(read_facts(tmp_path)) == journal.ledger
    assert journal.ledger.count(Stage.READY) == 100
    await journal.close()


def placed(writer: SegmentWriter, payload: bytes) -> Place:
    return writer.place(payload, xxhash.xxh3_128_digest(payload))


def test_a_record_that_is_cut_off_is_told_apart_from_a_whole_one(tmp_path) -> None:
    writer = SegmentWriter(tmp_path, 1 << 20, Disk(), after=0)
    first, second = placed(writer, b"one"), placed(writer, b"two")
    writer.write([(first, b"one"), (second, b"two")])
    writer.close()
    assert read_payload(tmp_path, first) == b"one"
    path = segment_path(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SegmentError, match="damaged"):
        read_payload(tmp_path, second)


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE])
def test_a_disk_that_fails_damages_no_record(tmp_path, monkeypatch, code) -> None:
    writer = SegmentWriter(tmp_path, 1 << 20, Disk(), after=0)
    place = placed(writer, b"one")
    writer.write([(place, b"one")])
    writer.close()

    def fails(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", fails)
        with pytest.raises(JournalError, match="which may not be damaged") as failed:
            read_payload(tmp_path, place)
    assert not isinstance(failed.value, GroupDamagedError)
    segment_path(tmp_path, 1).unlink()
    with pytest.raises(SegmentError, match="is gone"):
        read_payload(tmp_path, place)


async def test_the_memory_of_a_run_is_bounded_by_what_a_rollback_can_reach(tmp_path) -> None:
    journal = open_journal(tmp_path)
    begin_epoch(journal)
    for number in range(1, 61):
        accept(journal, number, [Version(1, number - 1)])
        journal.record_fact(made(journal, number))
        journal.record_fact(applied(journal, number, STALE=[f"g{number}-1"]))
        journal.record_fact(
            pb.Fact(evaluation_recorded=pb.EvaluationRecorded(evaluation={"environment": f"e{number}"}))
        )
        if number % 10 == 0:
            journal.record_fact(covered(number))
    await killed(journal)
    again = open_journal(tmp_path)
    assert again.ledger == folded(read_facts(tmp_path))
    for ledger in (journal.ledger, again.ledger):
        assert (ledger.trained, ledger.dropped, ledger.applied) == (60, {"STALE": 60}, 60)
        assert sorted(ledger._outcomes) == sorted(ledger.applied_batches) == list(range(51, 61))
        assert len(ledger.checkpoints) == 2
        assert len(ledger._numbers) <= 10
        assert len(ledger.groups) == len(ledger._order) == 0
    known = [each.evaluation_recorded.evaluation.environment for each in again.recorded("evaluation_recorded")]
    assert known == [f"e{number}" for number in range(1, 61)]
    again.ledger.check_reach(50)
    with pytest.raises(LedgerError, match="no longer holds batch 50"):
        again.ledger.check_reach(49)
    begin_epoch(again, Version(1, 50))
    assert (again.ledger.trained, again.ledger.dropped) == (50, {"STALE": 50})
    assert len(again.ledger.batches) == 10
    await again.close()


async def test_a_trainer_cannot_return_behind_what_is_covered_even_if_nothing_came_after_it(tmp_path) -> None:
    journal = open_journal(tmp_path)
    begin_epoch(journal)
    for number in (1, 2):
        accept(journal, number)
        journal.record_fact(made(journal, number))
        journal.record_fact(applied(journal, number))
    for number in (1, 2):
        journal.record_fact(covered(number))
    begin_epoch(journal, Version(1, 1))
    journal.record_fact(covered(2, epoch=2))
    with pytest.raises(LedgerError):
        journal.ledger.check_reach(0)
    await journal.close()


async def test_a_task_that_will_not_be_drawn_again_is_counted_and_owed_no_more(tmp_path) -> None:
    journal = open_journal(tmp_path)
    for number in (1, 2):
        accept(journal, number)
        journal.record_fact(dropped(number, Reason.STALE, redraw=True))
    given_up = pb.Fact(
        redraw_dropped=pb.RedrawDropped(
            environment="letters", task_id="task-0", position=0, redraw_reason="STALE", reason=Reason.QUARANTINED
        )
    )
    journal.record_fact(given_up)
    with pytest.raises(LedgerError, match="had not to be drawn again"):
        journal.record_fact(given_up)
    await killed(journal)
    again = open_journal(tmp_path)
    assert again.ledger.redraws == [Redraw("letters", "task-1", 1, "STALE")]
    assert again.ledger.redraws_dropped == {"QUARANTINED": 1}
    await again.close()


async def test_the_replicas_that_are_held_are_known_after_a_kill(tmp_path) -> None:
    journal = open_journal(tmp_path)
    hold, follow = rollout_pb2.WEIGHT_POLICY_MODE_HOLD, rollout_pb2.WEIGHT_POLICY_MODE_FOLLOW
    for replica, mode in (("a", hold), ("b", hold), ("a", follow)):
        noted = pb.WeightPolicyNoted(replica=replica, mode=mode, owner="evaluation")
        journal.record_fact(pb.Fact(weight_policy_noted=noted))
    await killed(journal)
    again = open_journal(tmp_path)
    assert list(again.ledger.weight_policies) == ["b"]
    await again.close()


def test_the_number_of_older_groups_is_known_whatever_the_order_in_which_groups_came_and_went() -> None:
    ledger, rng = Ledger(), random.Random(1)
    for seq in range(1, 400):
        if ledger.groups and rng.random() < 0.4:
            fact = dropped(rng.choice(list(ledger.groups)), "EPISODE_FAILED")
        else:
            fact = drawn(ledger.next_group)
        ledger.apply_fact(seq, fact)
        asked = rng.randrange(ledger.next_group + 1)
        assert ledger.older(asked) == sum(number < asked for number in ledger.groups)


def test_a_fact_about_something_that_no_fact_has_named_is_a_damaged_journal():
    with pytest.raises(LedgerError, match=r"batch_unmade.*damaged"):
        folded([(1, unmade(0))])
