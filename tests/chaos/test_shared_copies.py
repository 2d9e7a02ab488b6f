"""Receivers of one host as real processes, killed while they make or use the copy that they share."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from weightsync_stack import RUN, Stack, eventually, running_stack

from sluice.versions import Version
from weightsync.publisher import WeightPublisher
from weightsync.receive.shared_area import remove_stale

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT_S = 300.0
"""Limit of what takes a receiver some seconds: it imports PyTorch."""

RECEIVER = """
import asyncio, contextlib, random, sys
from pathlib import Path
from safetensors.numpy import load_file
from sluice.config import SecurityConfig
from sluice.rpc import connect
from weightsync.receiver import ApplyReport, PullLimits, ReceiverOptions, WeightReceiver
from weightsync.receive.pull import VersionBuilder
from weightsync.staged import HeldVersions
from sluice.versions import BASE

target, run, replica, stage_dir, mode = sys.argv[1:]
build = VersionBuilder.build
random.seed(replica)

async def slow_build(self, target, base, descriptor):
    print("building", flush=True)
    if mode == "hang":
        await asyncio.Event().wait()
    return await build(self, target, base, descriptor)

VersionBuilder.build = slow_build

def with_content():
    count = 0
    for path in Path(stage_dir).glob("*/*"):
        with contextlib.suppress(FileNotFoundError):
            count += path.stat().st_size > 0
    return count

class Engine:
    serves_adapters, version = False, BASE

    def held(self):
        return HeldVersions(self.version, self.version)

    async def apply(self, staged):
        tensors = load_file(staged.path)
        if mode == "slow":
            await asyncio.sleep(random.random() / 4)
        self.version = staged.version
        print(f"applied {staged.version} {float(tensors['w'][0])} beside {with_content()}", flush=True)
        return ApplyReport(staged.version, 0.0, 0.0)

async def main():
    async with connect(target, SecurityConfig()) as channel:
        options = ReceiverOptions(local_files=False, pull=PullLimits(room_wait_s=3600, copy_wait_s=3600))
        await WeightReceiver(channel, run, replica, Path(stage_dir), Engine(), options=options).run_forever()

asyncio.run(main())
"""


@asynccontextmanager
async def receiver(stack: Stack, replica: str, stage_dir: Path, mode: str = "plain") -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RECEIVER, stack.target, RUN, replica, str(stage_dir), mode, stdout=PIPE
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def line_of(process: Process, wanted: str) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(LIMIT_S):
        while not (line := (await process.stdout.readline()).decode()).startswith(wanted):
            assert line, "the receiver ended"
    return line


@pytest_asyncio.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with running_stack(tmp_path / "out", keep=20) as running:
        yield running


def tensors(number: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((100_000,), float(number)), "fixed": torch.arange(50_000, dtype=torch.float32)}


async def push(publisher: WeightPublisher, number: int) -> None:
    await publisher.update(Version(1, number), tensors(number), deadline_s=LIMIT_S)


def staged(stage_dir: Path) -> list[str]:
    return sorted(path.name.split("-")[0] + path.suffix for path in stage_dir.glob("*/*"))


def with_content(stage_dir: Path) -> int:
    """Files that take memory at the same moment: those that have content, and are still there when all were looked at."""

    def inodes() -> set[int]:
        found = set()
        for path in stage_dir.glob("*/*"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                if status.st_size:
                    found.add(status.st_ino)
        return found

    return len(inodes() & inodes())


async def test_a_killed_builder_is_followed_by_another_process(stack: Stack, tmp_path: Path) -> None:
    stage_dir = tmp_path / "shm"
    publisher = WeightPublisher(stack.channel, RUN)
    await push(publisher, 1)
    async with receiver(stack, "builder", stage_dir, "hang") as builder:
        await line_of(builder, "building")
        async with receiver(stack, "other", stage_dir) as other:
            await eventually(
                lambda: other.pid is not None and staged(stage_dir) == ["v1.1.build", "v1.1.part"], LIMIT_S
            )
            builder.kill()
            await builder.wait()
            await line_of(other, "applied 1.1 1.0")
            assert staged(stage_dir) == ["v1.1.safetensors"]
    assert len(remove_stale(stage_dir)) == 1


async def test_a_killed_user_takes_no_file_from_the_others_and_leaves_none(stack: Stack, tmp_path: Path) -> None:
    stage_dir = tmp_path / "shm"
    publisher = WeightPublisher(stack.channel, RUN)
    await push(publisher, 1)
    async with receiver(stack, "first", stage_dir) as first, receiver(stack, "second", stage_dir) as second:
        for process in (first, second):
            await line_of(process, "applied 1.1 1.0")
        first.kill()
        await first.wait()
        assert staged(stage_dir) == ["v1.1.safetensors"]
        await push(publisher, 2)
        await line_of(second, "applied 1.2 2.0")
        await eventually(lambda: staged(stage_dir) == ["v1.2.safetensors"], LIMIT_S)


async def test_four_receivers_hold_a_base_and_one_staged_copy_however_fast_versions_come(
    stack: Stack, tmp_path: Path
) -> None:
    stage_dir = tmp_path / "shm"
    publisher = WeightPublisher(stack.channel, RUN)
    most, held = 0, set()

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, with_content(stage_dir))
            await asyncio.sleep(0.001)

    watching = asyncio.create_task(watch())
    async with contextlib.AsyncExitStack() as processes:
        replicas = [
            await processes.enter_async_context(receiver(stack, f"replica-{number}", stage_dir, "slow"))
            for number in range(4)
        ]
        first, *others = replicas
        await push(publisher, 1)
        for replica in replicas:
            await line_of(replica, "applied 1.1 1.0")
        for number in range(2, 16):  # as fast as one of them takes them; the others lag or lead
            await push(publisher, number)
            held.add((await line_of(first, f"applied 1.{number} {float(number)}")).split()[-1])
        for replica in others:
            held.add((await line_of(replica, "applied 1.15 15.0")).split()[-1])
    watching.cancel()
    await asyncio.wait({watching})
    assert held == {"2"}, "an engine that takes a version holds its base and the one that is staged"
    assert most <= 2
