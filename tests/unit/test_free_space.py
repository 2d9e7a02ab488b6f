"""When a run waits for room on a disk, when it goes on, and what it tells people meanwhile."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from simulated_clock import SimulatedClock

from orchestrator_svc.run.free_space import RESUME_FACTOR, DiskWatch, FreeSpace, Room, measure

MIB = 1 << 20
RUN, WEIGHTS = Path("outputs/run"), Path("/fast/weights")


def test_a_run_waits_below_the_bound_and_goes_on_when_a_quarter_more_is_free() -> None:
    space = FreeSpace(100 * MIB)
    changes = [space.look({RUN: size * MIB}) for size in (200, 100, 99, 40, 100, 124, 125, 101, 99)]
    assert changes == [False, False, True, False, False, False, True, False, True]


def test_people_are_told_the_directory_what_is_free_the_bound_and_the_remedy() -> None:
    space = FreeSpace(100 * MIB)
    space.look({RUN: 40 * MIB + 1, WEIGHTS: 1000 * MIB})
    for part in ("outputs/run has 40 MiB free", "100 MiB", "orchestrator.disk.min_free_mb", "sluice doctor", "125 MiB"):
        assert part in space.short
    assert str(WEIGHTS) not in space.short
    space.look({RUN: 41 * MIB, WEIGHTS: 7 * MIB})
    assert "outputs/run has 41 MiB free and /fast/weights has 7 MiB free" in space.short
    space.look({RUN: 200 * MIB, WEIGHTS: 200 * MIB})
    assert space.short == ""


def test_a_bound_of_zero_never_pauses() -> None:
    assert not FreeSpace(0).look({RUN: 0})


def test_what_does_not_answer_stays_as_it_was_and_what_is_gone_is_forgotten() -> None:
    space = FreeSpace(100 * MIB)
    assert not space.look({RUN: None})
    assert space.look({RUN: 200 * MIB, WEIGHTS: 1})
    assert not space.look({RUN: 200 * MIB, WEIGHTS: None})
    assert space.short
    assert space.look({RUN: 200 * MIB})


@given(st.lists(st.dictionaries(st.sampled_from([RUN, WEIGHTS]), st.none() | st.integers(0, 200), max_size=2)))
def test_it_pauses_only_below_the_bound_and_goes_on_only_with_more(looks: list[dict[Path, int | None]]) -> None:
    space, least = FreeSpace(100), 100
    for free in looks:
        waited, changed = bool(space.short), space.look(free)
        sizes = [size for size in free.values() if size is not None]
        assert bool(space.short) == (waited != changed)
        if any(size < least for size in sizes):
            assert space.short
        if changed and not waited:
            assert any(size < least for size in sizes)
        if all(size is not None and size >= RESUME_FACTOR * least for size in free.values()):
            assert not space.short


async def test_directories_of_one_file_system_are_named_once_and_those_that_are_not_there_left_out(
    tmp_path: Path,
) -> None:
    asked = {RUN: Room(1, 40), WEIGHTS: Room(2, 50), Path("same"): Room(1, 40)}

    def ask(directory: Path) -> Room:
        if directory not in asked:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return asked[directory]

    changed = asyncio.Event()
    with DiskWatch([RUN, Path("same"), Path("gone"), WEIGHTS], FreeSpace(45), changed, ask=ask) as disks:
        await disks.look()
        assert changed.is_set()
        assert "outputs/run has" in disks.space.short
        assert "same" not in disks.space.short
        changed.clear()
        await disks.look()
        assert not changed.is_set()
        asked[RUN] = Room(1, 100)
        await disks.look()
        assert (changed.is_set(), disks.space.short) == (True, "")


async def test_a_file_system_that_hangs_or_fails_holds_nothing_up_and_is_told_once() -> None:
    clock, answer, fails = SimulatedClock(), threading.Event(), [True]

    def ask(directory: Path) -> Room:
        answer.wait()
        if fails:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return Room(1, 7)

    with (
        DiskWatch([RUN], FreeSpace(10), asyncio.Event(), clock=clock, ask=ask) as disks,
        structlog.testing.capture_logs() as logged,
    ):
        for _ in range(3):
            looking = asyncio.create_task(disks.look())
            await clock.until(looking.done, step_s=10.0)
        answer.set()
        await disks.look()
        assert disks.space.short == ""
        assert [each["event"] for each in logged] == ["a disk does not say how much room it has; the run goes on"]
        fails.clear()
        await disks.look()
        assert "outputs/run has" in disks.space.short


def test_a_real_file_system_answers(tmp_path: Path) -> None:
    room = measure(tmp_path)
    assert (room.device, room.free_bytes > 0) == (tmp_path.stat().st_dev, True)
    with pytest.raises(FileNotFoundError):
        measure(tmp_path / "gone")
