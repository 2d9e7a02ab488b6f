"""The weight service as a process, killed at each step of a version's way; no version is ever half there."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from forked_programs import Forked, forked
from held_ports import held_ports
from rank_programs import RankPrograms
from safetensors.torch import load_file
from weightsync_stack import RESOURCE, RUN, EngineDouble, equal_bits, eventually, following

from sluice.config import SecurityConfig
from sluice.rpc import connect
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import BASE, Version
from weightsync.publisher import WeightPublisher
from weightsync.receive.shared_area import remove_stale
from weightsync.receiver import ReceiverOptions, WeightReceiver
from weightsync.staged import ApplyReport, StagedVersion

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MEGABYTES, PULLED = 12, 48
"""Of a version; the larger one is pulled by a thread of this process that nothing holds up."""

LIMIT_S = 300.0
"""Limit of what takes a process some seconds: it imports PyTorch."""

RECEIVER = """
import asyncio, sys
from pathlib import Path
from sluice.config import SecurityConfig
from sluice.rpc import connect
from sluice.versions import BASE
from weightsync.receiver import WeightReceiver
from weightsync.staged import HeldVersions

class Engine:
    serves_adapters = False

    def held(self):
        return HeldVersions(BASE, BASE)

    async def apply(self, staged):
        print("staged", flush=True)
        await asyncio.Event().wait()

async def main():
    async with connect(sys.argv[1], SecurityConfig()) as channel:
        await WeightReceiver(channel, sys.argv[2], "doomed", Path(sys.argv[3]), Engine()).run_forever()

asyncio.run(main())
"""


@cache
def weights(seed: int, megabytes: int = MEGABYTES) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {f"layer.{index}": torch.randn(1 << 18, generator=random) for index in range(megabytes)}


class Service:
    """The program, always on the same port and directory."""

    def __init__(self, directory: Path, port: int, programs: RankPrograms) -> None:
        self._programs = programs
        self.target = f"127.0.0.1:{port}"
        self.directory = directory / "outputs" / RUN / "weights"
        self.file = directory / "run.toml"
        self.log = directory / "weightsync.log"
        self.file.write_text(f"""
            run = "{RUN}"
            output_dir = "{directory / "outputs"}"
            [weightsync]
            server = {{ port = {port}, drain_s = 0 }}
            min_free_bytes = 0
            """)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Forked]:
        words = ("weightsync", "@", str(self.file))
        async with forked(self._programs, "sluice.cli.main", *words, log=self.log) as process:
            async with connect(self.target, SecurityConfig()) as channel, asyncio.timeout(LIMIT_S):
                await channel.channel_ready()
            yield process

    def incoming_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.directory.glob(".incoming/*/*") if path.is_file())

    async def visible(self) -> list[Version]:
        async with connect(self.target, SecurityConfig()) as channel:
            stub = weightsync_pb2_grpc.WeightSyncServiceStub(channel)
            response = await stub.ListVersions(pb.ListVersionsRequest(run=RESOURCE), timeout=LIMIT_S)
        return [Version.from_proto(manifest.version) for manifest in response.versions]


@asynccontextmanager
async def program(*arguments: str, log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=log.open("ab"),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def publishing(service: Service, chunk_bytes: int = 1 << 20) -> AsyncIterator[WeightPublisher]:
    async with connect(service.target, SecurityConfig()) as channel:
        yield WeightPublisher(channel, RUN, chunk_bytes=chunk_bytes)


class Engine(EngineDouble):
    """Keeps the tensors that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, torch.Tensor] = {}

    async def apply(self, staged: StagedVersion) -> ApplyReport:
        self.tensors = load_file(staged.path)
        self.version = staged.version
        return ApplyReport(staged.version, 0.0, 0.0)


@asynccontextmanager
async def receiving(service: Service, stage_dir: Path, engine: Engine) -> AsyncIterator[WeightReceiver]:
    async with connect(service.target, SecurityConfig()) as channel:
        receiver = WeightReceiver(
            channel, RUN, "replica", stage_dir, engine, options=ReceiverOptions(local_files=False)
        )
        async with following(receiver):
            yield receiver


@pytest.fixture
def service(tmp_path: Path, rank_programs: RankPrograms) -> Iterator[Service]:
    with held_ports(1) as (port,):
        yield Service(tmp_path, port, rank_programs)


async def test_a_trainer_killed_while_it_pushes_leaves_the_old_version(
    service: Service, tmp_path: Path, rank_programs: RankPrograms
) -> None:
    async with service.running(), publishing(service) as publisher:
        await publisher.update(Version(1, 1), weights(1), deadline_s=LIMIT_S)
        words = (service.target, RUN, str(MEGABYTES))
        async with forked(rank_programs, "doomed_pusher", *words, log=tmp_path / "pusher.log") as pusher:
            await eventually(lambda: service.incoming_bytes() > 1 << 20, LIMIT_S)
            pusher.kill()
            await pusher.wait()
        assert await service.visible() == [Version(1, 1)]
        await publisher.update(Version(1, 2), weights(2), deadline_s=LIMIT_S)
        assert await service.visible() == [Version(1, 2), Version(1, 1)]
        assert equal_bits(load_file(service.directory / "v1.2" / "model.safetensors"), weights(2))


async def test_a_service_killed_during_a_push_takes_the_same_push_after_its_restart(service: Service) -> None:
    async with service.running() as first:
        async with publishing(service) as publisher:
            await publisher.update(Version(1, 1), weights(1), deadline_s=LIMIT_S)
        async with publishing(service, chunk_bytes=4096) as publisher:
            push = asyncio.create_task(publisher.update(Version(1, 2), weights(2), deadline_s=LIMIT_S))
            await eventually(lambda: service.incoming_bytes() > 1 << 20, LIMIT_S)
            first.kill()
            await first.wait()
            assert not push.done()
            async with service.running():
                report = await push
                assert not report.duplicate
                assert await service.visible() == [Version(1, 2), Version(1, 1)]
    assert equal_bits(load_file(service.directory / "v1.2" / "model.safetensors"), weights(2))
    assert equal_bits(load_file(service.directory / "v1.1" / "model.safetensors"), weights(1))


async def test_a_service_killed_during_a_pull_gives_the_rest_after_its_restart(
    service: Service, tmp_path: Path
) -> None:
    engine, stage_dir = Engine(), tmp_path / "shm"

    def staging_bytes() -> int:
        return sum(path.stat().st_blocks * 512 for path in stage_dir.glob("*/*.part"))

    async with service.running() as first:
        async with publishing(service) as publisher:
            await publisher.update(Version(1, 1), weights(1, PULLED), deadline_s=LIMIT_S)
        async with receiving(service, stage_dir, engine):
            await eventually(lambda: staging_bytes() > 0, LIMIT_S)
            first.kill()
            await first.wait()
            assert engine.version == BASE
            async with service.running():
                await eventually(lambda: engine.version == Version(1, 1), LIMIT_S)
    assert equal_bits(engine.tensors, weights(1, PULLED))


async def test_a_replica_without_a_service_serves_on_and_catches_up(service: Service, tmp_path: Path) -> None:
    engine = Engine()
    async with service.running() as first, receiving(service, tmp_path / "shm", engine) as receiver:
        async with publishing(service) as publisher:
            await publisher.update(Version(1, 1), weights(1), deadline_s=LIMIT_S)
            await eventually(lambda: engine.version == Version(1, 1), LIMIT_S)
        first.kill()
        await first.wait()
        await eventually(lambda: not receiver.status().connected, LIMIT_S)
        assert receiver.status().serving == Version(1, 1)
        async with service.running(), publishing(service) as publisher:
            await publisher.update(Version(2, 0), weights(2), deadline_s=LIMIT_S)
            await eventually(lambda: engine.version == Version(2, 0), LIMIT_S)
    assert equal_bits(engine.tensors, weights(2))


async def test_what_a_killed_replica_had_staged_is_removed(service: Service, tmp_path: Path) -> None:
    stage_dir = tmp_path / "shm"
    async with service.running(), publishing(service) as publisher:
        await publisher.update(Version(1, 1), weights(1), deadline_s=LIMIT_S)
        arguments = ("-c", RECEIVER, service.target, RUN, str(stage_dir))
        async with program(*arguments, log=tmp_path / "receiver.log") as replica:
            assert replica.stdout is not None
            async with asyncio.timeout(LIMIT_S):
                assert await replica.stdout.readline() == b"staged\n"
            assert remove_stale(stage_dir) == []
            replica.kill()
            await replica.wait()
        assert len(remove_stale(stage_dir)) == 1
        assert not list(stage_dir.glob("*"))


async def test_the_service_ends_when_it_is_told_to(service: Service) -> None:
    async with service.running() as process:
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(LIMIT_S):
            assert await process.wait() == 0
