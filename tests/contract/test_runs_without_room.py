"""A disk that gets full pauses a run before any write fails, and the run goes on by itself: a real orchestrator between doubles."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from orchestrator_doubles import RolloutDouble
from simulated_clock import SimulatedClock
from test_orchestrator_run import DEADLINE_S, PATIENT, TICK_S, Scene, make_scene, trained

from orchestrator_svc.commands.audit_compare import audit
from orchestrator_svc.journal.store import read_facts
from orchestrator_svc.run import free_space
from orchestrator_svc.run.free_space import LOOK_S
from sluice.client import OrchestratorClient
from sluice.rpc import SluiceError
from sluice.v1 import orchestrator_pb2
from sluice.versions import Lineage

pytestmark = pytest.mark.slow

MIB = 1 << 20

LIMITS = {"start_s": 1e5, "lost_s": 1e5, "step_s": 1e6, "update_s": 1e6, "episode_s": 1e6, "generate_s": 1e6}
"""Deadlines of the run that simulated time which passes fast does not reach."""


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    """Doubles around a real orchestrator; at the end both sides agree on what became of every trajectory."""
    async with contextlib.AsyncExitStack() as stack:
        built = await make_scene(tmp_path, stack, [RolloutDouble()])
        yield built
        assert not audit(read_facts(built.run_dir), built.trainer.record, Lineage()).differences


async def until_run(
    client: OrchestratorClient, clock: SimulatedClock, condition: Callable[[orchestrator_pb2.Run], object]
) -> orchestrator_pb2.Run:
    """Let time pass until something holds of the run as GetRun gives it."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with contextlib.suppress(SluiceError):  # it may not be served yet
                if condition(run := await client.run("test")):
                    return run
            await clock.advance(LOOK_S / 4)
            await asyncio.sleep(0.001)


def is_paused(run: orchestrator_pb2.Run) -> bool:
    return run.state == orchestrator_pb2.RUN_STATE_PAUSED


async def test_a_run_waits_for_room_says_for_what_and_goes_on_by_itself(scene, monkeypatch) -> None:
    free = [100 * MIB]
    monkeypatch.setattr(free_space.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, free[0]))
    clock = SimulatedClock()
    scene.trainer.automatic = False
    events = scene.watch("state_changed")
    disk = {"min_free_mb": 50}
    task = scene.start(disk=disk, max_steps=8, deadlines=LIMITS, environment_processes=PATIENT, clock=clock)
    await clock.until(lambda: len(scene.trainer.waiting) == 2, step_s=TICK_S)
    free[0] = 40 * MIB
    async with scene.client() as client:
        run = await until_run(client, clock, is_paused)
        (waits_for,) = run.waits_for
        for part in (f"{scene.run_dir} has 40 MiB free", "50 MiB", "orchestrator.disk.min_free_mb", "sluice doctor"):
            assert part in waits_for
        scene.trainer.run_freely()
        await until_run(client, clock, lambda run: run.step == 2 and not run.running_episodes)
        calls = len(scene.replicas[0].calls)
        free[0] = 55 * MIB
        assert is_paused(await client.resume("test")), "room is not made by a command"
        await clock.advance(20 * LOOK_S)
        run = await client.run("test")
        assert (is_paused(run), run.step, len(scene.replicas[0].calls)) == (True, 2, calls), (
            "nothing is sampled or trained"
        )
        free[0] = 70 * MIB
    await clock.until(task.done, step_s=LOOK_S / 4)
    await task
    assert (scene.report()["state"], scene.report()["steps"]) == ("succeeded", 8)
    assert len(trained(scene)) == len(set(trained(scene))) == 32
    states = [each.state_changed for each in await events]
    names = [orchestrator_pb2.RunState.Name(each.state).removeprefix("RUN_STATE_") for each in states]
    assert names[-6:] == ["RUNNING", "PAUSED", "PAUSED", "RUNNING", "STOPPING", "SUCCEEDED"]
    assert "waits for room on a disk" in states[-5].message


async def test_an_operators_pause_outlasts_that_of_the_disk(scene, monkeypatch) -> None:
    free = [10 * MIB]
    monkeypatch.setattr(free_space.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, free[0]))
    clock = SimulatedClock()
    disk = {"min_free_mb": 50}
    task = scene.start(disk=disk, deadlines=LIMITS, environment_processes=PATIENT, clock=clock)
    async with scene.client() as client:
        await until_run(client, clock, lambda run: is_paused(run) and run.waits_for)
        assert not scene.replicas[0].calls, "a run that begins without room begins with a pause"
        await client.pause("test")
        free[0] = 100 * MIB
        await until_run(client, clock, lambda run: not run.waits_for)
        await clock.advance(20 * LOOK_S)
        assert is_paused(await client.run("test"))
        await client.resume("test")
    await clock.until(task.done, step_s=LOOK_S / 4)
    await task
    assert scene.report()["state"] == "succeeded"


async def test_a_run_that_is_stopped_without_room_ends(scene, monkeypatch) -> None:
    monkeypatch.setattr(free_space.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, MIB))
    clock = SimulatedClock()
    disk = {"min_free_mb": 50}
    task = scene.start(disk=disk, deadlines=LIMITS, environment_processes=PATIENT, clock=clock)
    async with scene.client() as client:
        await until_run(client, clock, is_paused)
        await client.stop("test")
    await clock.until(task.done, step_s=LOOK_S / 4)
    await task
    assert scene.report()["state"] == "stopped"


@contextlib.contextmanager
def small_disk(directory: Path, size_mib: int) -> Iterator[Path]:
    """A file system of its own, which only a privileged user may mount."""
    directory.mkdir()
    mount = shutil.which("mount")
    command = [mount or "", "-t", "tmpfs", "-o", f"size={size_mib}m", "none", str(directory)]
    if mount is None or os.geteuid() or subprocess.run(command, check=False, timeout=DEADLINE_S).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True, timeout=DEADLINE_S)


async def test_a_real_disk_that_fills_up_never_gets_full(tmp_path: Path) -> None:
    clock = SimulatedClock()
    with small_disk(tmp_path / "disk", 64) as disk:
        async with contextlib.AsyncExitStack() as stack:
            scene = await make_scene(disk, stack, [RolloutDouble()])
            settings = {"disk": {"min_free_mb": 32}, "max_steps": 1000, "deadlines": LIMITS}
            task = scene.start(**settings, environment_processes=PATIENT, clock=clock)
            async with scene.client() as client:
                await until_run(client, clock, lambda run: run.step >= 2)
                (disk / "another program's").write_bytes(bytes(40 * MIB))
                run = await until_run(client, clock, is_paused)
                assert f"{scene.run_dir} has " in run.waits_for[0]
                (disk / "another program's").unlink()
                await until_run(client, clock, lambda now: now.step > run.step + 5)
                await client.stop("test")
            await clock.until(task.done, step_s=LOOK_S / 4)
            await task
            assert not audit(read_facts(scene.run_dir), scene.trainer.record, Lineage()).differences
