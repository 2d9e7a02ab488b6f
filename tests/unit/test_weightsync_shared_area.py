"""One staged copy per host: who makes it, who may use it, who removes it. Locks are per open file, so one process can play many."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from simulated_clock import LIMIT_S, SimulatedClock

from sluice.versions import Version
from weightsync.receive.pull import PullLimits
from weightsync.receive.shared_area import BehindError, SharedArea, SharedCopy, StagedFiles, remove_stale
from weightsync.receive.version_file import StagingError

DIGEST = "0" * 32
WAIT_S = 30.0


class Threads(ThreadPoolExecutor):
    """Counts the work that it was given."""

    submitted = 0

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.submitted += 1
        return super().submit(work, *args, **kwargs)


def made(area: SharedArea, number: int = 1) -> SharedCopy:
    claim = area.claim(area.file(Version(1, number), DIGEST))
    assert claim is not None
    os.write(claim.descriptor, b"whole")
    return claim.publish()


def names(area: SharedArea) -> list[str]:
    return sorted(path.name for path in area.path.glob("*"))


def test_the_last_user_removes_the_file(tmp_path: Path) -> None:
    area = SharedArea(tmp_path, "run")
    first = made(area)
    second = area.attach(first.path)
    assert second is not None
    first.release()
    first.release()
    assert first.path.read_bytes() == b"whole"
    second.release()
    assert names(area) == []


def test_one_at_a_time_makes_a_file(tmp_path: Path) -> None:
    area, other = SharedArea(tmp_path, "run"), SharedArea(tmp_path, "run")
    path = area.file(Version(1, 1), DIGEST)
    claim = area.claim(path)
    assert claim is not None
    assert other.claim(path) is None
    assert other.attach(path) is None
    claim.abandon()
    assert names(area) == []
    again = other.claim(path)
    assert again is not None
    copy = again.publish()
    assert area.claim(path) is None
    copy.release()


def test_what_is_made_or_used_is_not_swept(tmp_path: Path) -> None:
    area = SharedArea(tmp_path, "run")
    copy = made(area)
    claim = area.claim(area.file(Version(1, 2), DIGEST))
    assert claim is not None
    assert remove_stale(tmp_path) == []
    assert area.others(claim.path) == [(copy.path, True)]
    staged = claim.publish()
    for each in (staged, copy):
        each.release()
    remove_stale(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_the_dead_left_is_swept(tmp_path: Path) -> None:
    directory = tmp_path / "sluice-run"
    directory.mkdir()
    for name in ("v1.1-a.safetensors", "v1.2-b.part", "v1.2-b.build"):
        (directory / name).write_bytes(b"left")
    assert remove_stale(tmp_path) == [directory / "v1.1-a.safetensors"]
    assert list(tmp_path.iterdir()) == []


def test_what_others_keep_there_is_left_alone(tmp_path: Path) -> None:
    for path in (tmp_path / "sluice-other" / "notes.txt", tmp_path / "elsewhere" / "v1.1-a.safetensors"):
        path.parent.mkdir()
        path.write_bytes(b"mine")
    SharedArea(tmp_path, "run")
    assert len(list(tmp_path.glob("*/*"))) == 2


def test_a_link_is_not_swept_and_nothing_is_written_or_removed_where_it_leads(tmp_path: Path) -> None:
    area, model = tmp_path / "shm", tmp_path / "model"
    for directory in (area, model):
        directory.mkdir()
    (model / "model.safetensors").write_bytes(b"precious")
    (area / "sluice-run.0").symlink_to(model)
    assert remove_stale(area) == []
    SharedArea(area, "run")
    assert [path.name for path in model.iterdir()] == ["model.safetensors"]


def test_a_staged_name_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    directory, model = tmp_path / "sluice-run", tmp_path / "model.safetensors"
    directory.mkdir()
    model.write_bytes(b"precious")
    (directory / "v1.1-a.safetensors").symlink_to(model)
    assert remove_stale(tmp_path) == []
    assert model.read_bytes() == b"precious"


def test_a_version_larger_than_the_memory_is_refused_with_the_numbers(tmp_path: Path) -> None:
    area = SharedArea(tmp_path, "run")
    with pytest.raises(StagingError, match=rf"needs {1 << 60}: .*shm_size"):
        area.check_room(1 << 60)
    area.check_room(1)


def test_a_directory_that_others_may_write_to_is_not_trusted(tmp_path: Path) -> None:
    area = SharedArea(tmp_path, "run")
    path = area.file(Version(1, 1), DIGEST)
    path.parent.mkdir()
    path.parent.chmod(0o777)
    path.write_bytes(b"planted")
    with pytest.raises(StagingError, match="belongs to another user"):
        area.attach(path)
    with pytest.raises(StagingError, match="belongs to another user"):
        area.claim(area.file(Version(1, 2), DIGEST))


def test_a_forked_child_keeps_no_file_in_memory(tmp_path: Path) -> None:
    area = SharedArea(tmp_path, "run")
    copy = made(area)
    child = os.fork()
    if child == 0:
        try:
            os.fstat(copy.descriptor)
        except OSError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert area.others(copy.path) == []
    assert copy.path.exists()  # the child took no lock with it
    copy.release()


async def test_a_third_copy_waits_until_one_is_let_go(tmp_path: Path) -> None:
    area, clock = SharedArea(tmp_path, "run"), SimulatedClock()
    old, current = made(area, 1), made(area, 2)
    built = asyncio.Event()

    async def build(descriptor: int) -> None:
        os.write(descriptor, b"third")
        built.set()

    with ThreadPoolExecutor(2) as threads:
        files = StagedFiles(area, threads, PullLimits(room_wait_s=WAIT_S), clock)
        waiting = asyncio.create_task(files.obtain(area.file(Version(1, 3), DIGEST), current.path, 5, build))
        await clock.until(lambda: clock.waits)  # it has looked, and waits for room
        assert len(names(area)) == 4, "the claim is two files"
        assert not built.is_set()
        old.release()
        await clock.advance(1.0)
        staged, _ = await waiting
    assert built.is_set()
    assert staged.path.read_bytes() == b"third"
    for copy in (staged, current):
        copy.release()


async def test_a_receiver_that_is_held_back_stops_the_others_no_longer_than_configured(tmp_path: Path) -> None:
    area, clock = SharedArea(tmp_path, "run"), SimulatedClock()
    held = [made(area, 1), made(area, 2)]
    built = asyncio.Event()

    async def build(descriptor: int) -> None:
        os.write(descriptor, b"third")
        built.set()

    with ThreadPoolExecutor(2) as threads:
        files = StagedFiles(area, threads, PullLimits(room_wait_s=WAIT_S), clock)
        waiting = asyncio.create_task(files.obtain(area.file(Version(1, 3), DIGEST), held[1].path, 5, build))
        await clock.until(lambda: clock.waits)
        await clock.advance(WAIT_S)
        await clock.until(lambda: clock.waits)
        assert not built.is_set()
        await clock.advance(1.0)
        staged, _ = await waiting
        staged.release()
        # Files that were waited for in vain are not waited for again.
        staged, _ = await files.obtain(area.file(Version(1, 4), DIGEST), held[1].path, 5, build)
    assert staged.path.exists()
    for copy in (staged, *held):
        copy.release()


async def test_a_process_that_does_not_finish_a_file_is_waited_for_no_longer_than_configured(tmp_path: Path) -> None:
    area, clock = SharedArea(tmp_path, "run"), SimulatedClock()
    path = area.file(Version(1, 1), DIGEST)
    claim = area.claim(path)
    assert claim is not None

    async def build(descriptor: int) -> None:
        raise AssertionError("another process makes it")

    with ThreadPoolExecutor(2) as threads:
        files = StagedFiles(area, threads, PullLimits(copy_wait_s=WAIT_S), clock)
        waiting = asyncio.create_task(files.obtain(path, None, 5, build))
        await clock.until(lambda: clock.waits)
        await clock.advance(WAIT_S)
        await clock.until(lambda: clock.waits)
        assert not waiting.done()
        await clock.advance(1.0)
        with pytest.raises(StagingError, match=f"did not finish {path} within {WAIT_S:g} s"):
            await waiting
    claim.abandon()
    assert names(area) == []


async def test_memory_that_runs_out_under_way_is_told_with_the_remedy(tmp_path: Path) -> None:
    area = SharedArea(tmp_path, "run")

    async def build(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with ThreadPoolExecutor(2) as threads:
        files = StagedFiles(area, threads, PullLimits())
        with pytest.raises(StagingError, match="shm_size"):
            await files.obtain(area.file(Version(1, 1), DIGEST), None, 5, build)
    assert names(area) == []


@pytest.mark.parametrize("other_builds", [False, True])
async def test_a_receiver_that_is_behind_is_told_what_to_take_first(tmp_path: Path, other_builds: bool) -> None:
    area = SharedArea(tmp_path, "run")
    old, current = made(area, 1), made(area, 2)
    wanted = area.file(Version(1, 3), DIGEST)
    claim = area.claim(wanted) if other_builds else None

    async def build(descriptor: int) -> None:
        raise AssertionError("no room")

    with ThreadPoolExecutor(2) as threads:
        files = StagedFiles(area, threads, PullLimits())
        with pytest.raises(BehindError) as caught:
            await files.obtain(wanted, old.path, 5, build)
    assert caught.value.version == Version(1, 2)
    if claim is not None:
        claim.abandon()
    for copy in (old, current):
        copy.release()
    assert names(area) == []


async def test_a_build_that_fails_leaves_nothing_and_the_next_one_succeeds(tmp_path: Path) -> None:
    area = SharedArea(tmp_path, "run")
    path = area.file(Version(1, 1), DIGEST)

    async def fail(descriptor: int) -> None:
        os.write(descriptor, b"half")
        raise StagingError("no")

    async def build(descriptor: int) -> int:
        return os.write(descriptor, b"whole")

    with ThreadPoolExecutor(2) as threads:
        files = StagedFiles(area, threads, PullLimits())
        with pytest.raises(StagingError):
            await files.obtain(path, None, 5, fail)
        assert names(area) == []
        copy, written = await files.obtain(path, None, 5, build)
        other, none = await files.obtain(path, None, 5, fail)
    assert (written, none, path.read_bytes()) == (5, None, b"whole")
    copy.release()
    other.release()


def test_a_claim_that_fails_leaves_the_file_to_the_next(tmp_path: Path) -> None:
    area = SharedArea(tmp_path, "run")
    path = area.file(Version(1, 1), DIGEST)
    in_the_way = path.with_name(path.name.removesuffix(".safetensors") + ".part")
    in_the_way.mkdir(parents=True)
    area.path.chmod(0o700)
    with pytest.raises(OSError, match="directory"):
        area.claim(path)
    in_the_way.rmdir()
    made(area).release()
    assert names(area) == []


def test_a_file_that_somebody_looks_at_can_be_used_a_moment_later(tmp_path: Path) -> None:
    copy = made(SharedArea(tmp_path, "run"))
    fcntl.flock(copy.descriptor, fcntl.LOCK_EX)
    pauses: list[float] = []

    def let_go(seconds: float) -> None:
        pauses.append(seconds)
        fcntl.flock(copy.descriptor, fcntl.LOCK_UN)

    area = SharedArea(tmp_path, "run", let_go)
    second = area.attach(copy.path)
    assert second is not None
    assert len(pauses) == 1
    second.release()
    copy.release()
    assert names(area) == []


def test_a_file_that_somebody_keeps_locked_is_named_after_some_attempts(tmp_path: Path) -> None:
    copy = made(SharedArea(tmp_path, "run"))
    fcntl.flock(copy.descriptor, fcntl.LOCK_EX)
    pauses: list[float] = []
    with pytest.raises(StagingError, match="cannot be locked"):
        SharedArea(tmp_path, "run", pauses.append).attach(copy.path)
    assert sum(pauses) == pytest.approx(1.0)
    copy.release()


@pytest.mark.parametrize("digest", ["../../elsewhere", "0/1", "", "a.b"])
def test_a_digest_that_could_lead_elsewhere_names_no_file(tmp_path: Path, digest: str) -> None:
    with pytest.raises(StagingError, match="not the digest"):
        SharedArea(tmp_path, "run").file(Version(1, 1), digest)


@pytest.mark.parametrize("or_newer", [True, False])
async def test_who_makes_a_version_that_others_are_past_takes_theirs_if_it_will_do(
    tmp_path: Path, or_newer: bool
) -> None:
    area, clock = SharedArea(tmp_path, "run"), SimulatedClock()
    path = area.file(Version(1, 2), DIGEST)
    old, newer = made(area, 1), made(area, 3)
    next_one = area.claim(area.file(Version(1, 4), DIGEST))
    assert next_one is not None

    async def build(descriptor: int) -> int:
        return os.write(descriptor, b"whole")

    with ThreadPoolExecutor(2) as threads:
        files = StagedFiles(area, threads, PullLimits(room_wait_s=WAIT_S), clock)
        if or_newer:
            with pytest.raises(BehindError) as caught:
                await files.obtain(path, old.path, 5, build, or_newer=True)
            assert caught.value.version == Version(1, 3)
            assert not path.exists()
        else:
            making = asyncio.create_task(files.obtain(path, old.path, 5, build, or_newer=False))
            await clock.until(lambda: clock.waits)
            await clock.advance(2 * WAIT_S)
            copy, _ = await making
            copy.release()
    next_one.abandon()
    for each in (old, newer):
        each.release()


async def test_a_caller_that_is_cancelled_leaves_no_lock_behind(tmp_path: Path) -> None:
    area, clock = SharedArea(tmp_path, "run"), SimulatedClock()
    first, busy = made(area), threading.Event()

    async def build(descriptor: int) -> None:
        raise AssertionError("the file is there")

    with Threads(1) as threads:
        threads.submit(busy.wait)
        files = StagedFiles(area, threads, PullLimits(), clock)
        obtaining = asyncio.create_task(files.obtain(first.path, None, 5, build))
        await clock.until(lambda: threads.submitted == 2)  # it is about to lock the file
        obtaining.cancel()
        await clock.advance(0)  # it has noticed
        busy.set()
        with pytest.raises(asyncio.CancelledError):
            await obtaining
    first.release()
    assert names(area) == []


async def test_a_file_that_was_released_is_made_anew_and_not_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that an engine could not load: found again, it would be tried for ever."""
    area, clock = SharedArea(tmp_path, "run"), SimulatedClock()
    path = area.file(Version(1, 1), DIGEST)
    release, may_release = SharedCopy.release, threading.Event()

    def late_release(copy: SharedCopy) -> None:
        assert may_release.wait(LIMIT_S)
        release(copy)

    def build(content: bytes) -> Callable[[int], Any]:
        async def write(descriptor: int) -> int:
            return os.write(descriptor, content)

        return write

    monkeypatch.setattr(SharedCopy, "release", late_release)
    with Threads(2) as threads:
        files = StagedFiles(area, threads, PullLimits(), clock)
        damaged, _ = await files.obtain(path, None, 5, build(b"damaged"))
        assert path.read_bytes() == b"damaged"
        files.release(damaged)
        before = threads.submitted
        obtaining = asyncio.create_task(files.obtain(path, None, 5, build(b"whole")))
        await clock.advance(0)
        assert threads.submitted == before, "it does not look for the file before that is removed"
        may_release.set()
        copy, written = await obtaining
        assert (written, path.read_bytes()) == (5, b"whole")
        files.release(copy)
    assert names(area) == []
