"""Staged adapters: each replica has a directory that ends with the replica, even if a child that it forked lives on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import BASE, Version
from weightsync.receive.pull import PullCost
from weightsync.receive.shared_area import StagedAdapters
from weightsync.staged import HeldVersions

REPLICA = """
import asyncio, os, signal, sys
from pathlib import Path
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import BASE, Version
from weightsync.staged import HeldVersions
from concurrent.futures import ThreadPoolExecutor
from weightsync.receive.shared_area import StagedAdapters
from weightsync.receive.pull import PullCost

class Builder:
    async def build(self, target, held, descriptor):
        return PullCost()

async def load(manifest):
    async with stage.staged(manifest, lambda: HeldVersions(BASE, BASE, frozenset({Version(1, 1)}))):
        pass

stage = StagedAdapters(Path(sys.argv[1]), "run", Builder(), ThreadPoolExecutor(1))
manifest = pb.Manifest(version=Version(1, 1).to_proto(), kind=pb.VERSION_KIND_ADAPTER, digest="0" * 32)
asyncio.run(load(manifest))
if sys.argv[2] == "forks":
    child = os.fork()
    if not child:
        signal.pause()
    print(child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def replica(stage_dir: Path, mode: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", REPLICA, str(stage_dir), mode], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.slow
def test_what_a_killed_replica_left_is_removed_although_its_forked_child_lives(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", REPLICA, str(tmp_path), "forks"], stdout=subprocess.PIPE, text=True
    ) as killed:
        assert killed.stdout is not None
        child = int(killed.stdout.readline())
        try:
            killed.wait(timeout=60)
            (left,) = tmp_path.glob("sluice_adapters-*")
            other = replica(tmp_path, "ends")
            assert other.returncode == 0, other.stderr
            assert not left.exists()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_link_and_a_stranger_s_directory_are_left_alone(tmp_path: Path) -> None:
    stage_dir, target = tmp_path / "stage", tmp_path / "target"
    for path in (stage_dir, target):
        path.mkdir()
    (target / ".lock").touch()
    (target / "kept").touch()
    link = stage_dir / "sluice_adapters-run-1.0"
    link.symlink_to(target)
    assert replica(stage_dir, "ends").returncode == 0
    assert link.is_symlink()
    assert (target / "kept").exists()


class Builder:
    """Writes nothing; the only thread is busy from then on until `go_on`."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.go_on, self.built = threading.Event(), asyncio.Event()
        self._threads = threads

    async def build(self, manifest: pb.Manifest, held: object, descriptor: int) -> PullCost:
        self._threads.submit(self.go_on.wait, 60)
        self.built.set()
        return PullCost()


async def test_an_adapter_whose_caller_left_at_its_end_can_be_staged_again(tmp_path: Path) -> None:
    threads = ThreadPoolExecutor(1)
    builder = Builder(threads)
    stage = StagedAdapters(tmp_path, "run", builder, threads)
    manifest = pb.Manifest(version=Version(1, 1).to_proto(), kind=pb.VERSION_KIND_ADAPTER, digest="0" * 32)

    async def load() -> bool:
        async with stage.staged(manifest, lambda: HeldVersions(BASE, BASE, frozenset({Version(1, 1)}))) as (adapter, _):
            return (adapter.path / "adapter_config.json").is_file()

    leaving = asyncio.create_task(load())
    await builder.built.wait()
    await asyncio.sleep(0)  # its last work waits for the thread now
    leaving.cancel()
    builder.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert await load()
    stage.close()
