"""A start takes the state of a snapshot and reads the facts after it; one that does not fit is as good as none."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_facts import ENVIRONMENT, accept, drawn

from orchestrator_svc.config import EnvironmentConfig
from orchestrator_svc.journal import DATABASE, snapshot, store
from orchestrator_svc.journal.ledger import Group, folded
from orchestrator_svc.journal.segments import JournalError
from orchestrator_svc.journal.snapshot import FILE, Snapshots
from orchestrator_svc.journal.store import Journal, JournalLimits, read_facts
from orchestrator_svc.run.curriculum import Curriculum
from orchestrator_svc.run.setting_aside import SetAsideShare
from sluice.environments.base import Task
from sluice.v1 import journal_pb2 as pb
from sluice.versions import BASE

SETTINGS = ("one", "two")


class Counted:
    """Counts the facts that this process read. Its state counts the facts of all processes."""

    def __init__(self) -> None:
        self.read = self.all = 0

    def apply(self, fact: pb.Fact) -> None:
        self.read += 1
        self.all += 1

    def state(self) -> int:
        return self.all

    def restore(self, state: int) -> None:
        self.all = state


@pytest.fixture(autouse=True)
def the_end_waits_for_a_slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run gives a snapshot up at its end after two seconds; a test must have it, however slow its machine is."""
    monkeypatch.setattr(store, "_SNAPSHOT_S", 60.0)


def opened(run_dir: Path, *, least: int = 10, settings: tuple[str, ...] = SETTINGS) -> tuple[Journal, Counted]:
    counted = Counted()
    journal = Journal(
        run_dir,
        {"run": "r"},
        limits=JournalLimits(fsync_interval_s=0.0),
        follow=counted.apply,
        snapshots=Snapshots((counted,), settings, least_facts=least),
    )
    assert journal.ledger == folded(read_facts(run_dir))
    return journal, counted


def last_of(run_dir: Path) -> int:
    return max(seq for seq, _ in read_facts(run_dir))


async def some_run(run_dir: Path, groups: int = 8) -> None:
    """Accept some groups, and end in order."""
    journal, _ = opened(run_dir)
    for number in range(journal.ledger.next_group, journal.ledger.next_group + groups):
        accept(journal, number)
    await journal.close()


async def test_a_start_reads_what_came_after_the_snapshot_alone(tmp_path) -> None:
    await some_run(tmp_path)
    before = last_of(tmp_path)
    journal, counted = opened(tmp_path)
    assert (counted.read, counted.all) == (1, before + 1)  # its own start
    await journal.close()
    assert len(journal.ledger.groups) == 8


async def test_curriculum_and_set_aside_share_are_part_of_it(tmp_path) -> None:
    settings = EnvironmentConfig(name=ENVIRONMENT, environment="m:E", pools={"enabled": True})
    read = 0

    def start() -> tuple[Journal, Curriculum, SetAsideShare]:
        curriculum = Curriculum([(settings, [Task(f"task-{number}") for number in range(9)])], seed=1)
        share = SetAsideShare(0.05, 4)

        def follow(fact: pb.Fact) -> None:
            nonlocal read
            read += 1
            curriculum.apply_fact(fact)
            share.apply_fact(fact)

        snapshots = Snapshots((curriculum, share), (), least_facts=1)
        return Journal(tmp_path, {"run": "r"}, follow=follow, snapshots=snapshots), curriculum, share

    journal, curriculum, share = start()
    for number in range(1, 9):
        accept(journal, number)
    journal.record_fact(
        pb.Fact(trajectories_set_aside=pb.TrajectoriesSetAside(group=3, reason="TOO_LONG", trajectory_ids=["g3-0"]))
    )
    await journal.close()
    read = 0
    again, same_curriculum, same_share = start()
    assert read == 1
    assert same_curriculum.noted() == curriculum.noted()
    assert same_curriculum.choose_task(0.0) == curriculum.choose_task(0.0)
    assert same_share.state() == share.state()
    assert share.state()[1] == 1
    await again.close()


async def test_few_facts_are_read_again_rather_than_written_twice(tmp_path) -> None:
    await some_run(tmp_path)
    written = (tmp_path / "journal" / FILE).read_bytes()
    for starts in (1, 2, 3):
        journal, counted = opened(tmp_path)
        assert counted.read == starts
        await journal.close()
    assert (tmp_path / "journal" / FILE).read_bytes() == written


async def test_a_start_after_a_kill_writes_a_snapshot_of_what_it_reads(tmp_path) -> None:
    journal, _ = opened(tmp_path)
    for number in range(1, 9):
        journal.record_fact(drawn(number))
    await journal.durable()
    journal._thread.end()
    journal._connection.close()
    assert not (tmp_path / "journal" / FILE).exists()
    first, counted = opened(tmp_path, least=5)
    assert counted.read == 10
    await first.close()
    second, counted = opened(tmp_path, least=5)
    assert counted.read == 2  # the starts of both
    await second.close()


async def test_nothing_is_recorded_in_a_journal_that_closes(tmp_path) -> None:
    journal, _ = opened(tmp_path)
    for number in range(1, 9):
        accept(journal, number)
    closing = asyncio.ensure_future(journal.close())
    await asyncio.wait({closing})
    with pytest.raises(JournalError, match="the journal is closed"):
        journal.record_fact(drawn(9))
    again, _ = opened(tmp_path)  # which compares the state with the facts
    assert 9 not in again.ledger.groups
    await again.close()


async def test_a_start_that_is_refused_keeps_the_snapshot(tmp_path) -> None:
    await some_run(tmp_path)
    written = (tmp_path / "journal" / FILE).read_bytes()
    with pytest.raises(JournalError, match="was written with run"):
        Journal(tmp_path, {"run": "another"}, snapshots=Snapshots((Counted(),), ("other",), least_facts=1))
    assert (tmp_path / "journal" / FILE).read_bytes() == written


async def test_a_start_that_is_given_up_while_it_writes_the_snapshot_records_nothing(tmp_path, monkeypatch) -> None:
    await some_run(tmp_path)
    (tmp_path / "journal" / FILE).unlink()
    before, given_up, write = last_of(tmp_path), threading.Event(), Snapshots.write

    def slow(*arguments: object) -> None:
        given_up.set()
        write(*arguments)

    monkeypatch.setattr(Snapshots, "write", slow)
    with pytest.raises(JournalError, match="was given up"):
        Journal(tmp_path, {"run": "r"}, snapshots=Snapshots((), (), least_facts=1), given_up=given_up)
    assert last_of(tmp_path) == before


async def test_a_state_that_no_snapshot_holds_ends_no_run(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Counted, "state", lambda counted: Path())
    await some_run(tmp_path)
    assert not list((tmp_path / "journal").glob("*snapshot*"))


async def test_a_large_state_is_written_less_often(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Counted, "state", lambda counted: list(range(10_000)))
    monkeypatch.setattr(Counted, "restore", lambda counted, state: None)
    await some_run(tmp_path)
    written = (tmp_path / "journal" / FILE).read_bytes()
    await some_run(tmp_path)
    assert (tmp_path / "journal" / FILE).read_bytes() == written


def damaged(run_dir: Path) -> None:
    path = run_dir / "journal" / FILE
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def torn(run_dir: Path) -> None:
    path = run_dir / "journal" / FILE
    path.write_bytes(path.read_bytes()[:-1])


def empty(run_dir: Path) -> None:
    (run_dir / "journal" / FILE).write_bytes(b"")


def of_another_journal(run_dir: Path) -> None:
    with sqlite3.connect(run_dir / DATABASE) as connection:
        last = connection.execute("SELECT max(seq) FROM facts").fetchone()[0]
        other = pb.Fact.FromString(connection.execute("SELECT fact FROM facts WHERE seq = ?", (last,)).fetchone()[0])
        other.time.FromSeconds(1)
        connection.execute("UPDATE facts SET fact = ? WHERE seq = ?", (other.SerializeToString(), last))


def of_facts_that_are_gone(run_dir: Path) -> None:
    with sqlite3.connect(run_dir / DATABASE) as connection:
        connection.execute("DELETE FROM facts WHERE seq = (SELECT max(seq) FROM facts)")


@pytest.mark.parametrize("change", [damaged, torn, empty, of_another_journal, of_facts_that_are_gone])
async def test_a_snapshot_that_does_not_fit_is_as_good_as_none(tmp_path, change: Callable[[Path], None]) -> None:
    await some_run(tmp_path)
    change(tmp_path)
    count = len(list(read_facts(tmp_path)))
    journal, counted = opened(tmp_path)
    assert (counted.read, counted.all) == (count + 1, count + 1)
    await journal.close()


@pytest.mark.parametrize("settings", [(), ("one",), ("onetwo",), ("two", "one")])
async def test_a_snapshot_of_other_settings_is_not_used(tmp_path, settings: tuple[str, ...]) -> None:
    await some_run(tmp_path)
    count = last_of(tmp_path)
    journal, counted = opened(tmp_path, settings=settings)
    assert counted.read == count + 1
    await journal.close()


async def test_a_snapshot_of_other_code_is_not_used(tmp_path, monkeypatch) -> None:
    await some_run(tmp_path)
    count = last_of(tmp_path)
    monkeypatch.setattr(snapshot, "version", lambda package: "another")
    journal, counted = opened(tmp_path)
    assert counted.read == count + 1
    await journal.close()


def test_a_snapshot_holds_values_of_the_ledger_and_no_others() -> None:
    with pytest.raises(TypeError, match=r"no snapshot holds a pathlib.\w*Path"):
        snapshot._Writer(pb.Snapshot()).add([Path()])


@pytest.mark.slow
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
        lambda values: (
            st.lists(values)
            | st.lists(values).map(tuple)
            | st.dictionaries(st.text(), values)
            | st.sets(st.integers(0, 99), max_size=1)  # the text of larger ones depends on how they were made
            | st.dictionaries(st.integers(0, 9), st.integers(1, 9)).map(Counter)
        ),
    )
)
def test_values_come_back_as_they_are(value: object) -> None:
    written = pb.Snapshot()
    snapshot._Writer(written).add(value)
    read = pb.Snapshot.FromString(written.SerializeToString())
    assert repr(snapshot._Reader(read.kinds).values(read.values)) == repr(value)  # NaN equals nothing


def test_what_two_objects_share_is_shared_again() -> None:
    group = Group(1, "e", "t", 0, 0, 2, 0, BASE, (BASE,), 0)
    written = pb.Snapshot()
    snapshot._Writer(written).add(({1: group}, [group]))
    groups, listed = snapshot._Reader(written.kinds).values(written.values)
    assert groups[1] is listed[0]
    assert groups[1] == group


async def test_a_disk_that_takes_no_snapshot_ends_no_run(tmp_path) -> None:
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / f".{FILE}").mkdir()
    await some_run(tmp_path)
    assert not (tmp_path / "journal" / FILE).exists()


async def test_runs_grow_on_snapshots_of_snapshots(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(snapshot, "_VALUES_PER_FACT", 1 << 30)  # small states are large beside few facts
    for starts in (1, 2, 3):
        await some_run(tmp_path)
        journal, counted = opened(tmp_path)
        assert counted.read == 1
        assert counted.all == last_of(tmp_path)
        assert len(journal.ledger.groups) == 8 * starts
        await journal.close()
