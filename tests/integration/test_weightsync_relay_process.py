"""A relay as a process, killed while it pulls, commits and gives out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path

import pytest
import torch
from forked_programs import Forked, forked
from rank_programs import RankPrograms
from relay_stack import Engine, Node, push, running
from safetensors.torch import load_file
from weightsync_stack import RESOURCE, RUN, equal_bits, eventually

from sluice.config import SecurityConfig
from sluice.rpc import connect
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import Version

pytestmark = pytest.mark.slow


@cache
def model(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {f"layer.{index}": torch.randn(1 << 18, generator=random) for index in range(24)}


class RelayProcess:
    """`sluice weightsync --upstream`, always on the same port and directory."""

    def __init__(self, directory: Path, upstream: str, port: int, programs: RankPrograms) -> None:
        self._programs = programs
        self.target = f"127.0.0.1:{port}"
        self.directory = directory / "outputs" / RUN / "weights"
        self.log = directory / "relay.log"
        self.arguments = (
            *("--run", RUN, "--output-dir", str(directory / "outputs"), "--upstream", upstream),
            *("--server.port", str(port), "--server.drain-s", "0", "--min-free-bytes", "0"),
        )

    def start(self) -> contextlib.AbstractAsyncContextManager[Forked]:
        return forked(self._programs, "sluice.cli.main", "weightsync", *self.arguments, log=self.log)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Forked]:
        async with self.start() as process:
            async with connect(self.target, SecurityConfig()) as channel, asyncio.timeout(60):
                await channel.channel_ready()
            yield process

    def incoming_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.directory.glob(".incoming/*/*") if path.is_file())

    async def visible(self) -> dict[Version, str]:
        async with connect(self.target, SecurityConfig()) as channel:
            stub = weightsync_pb2_grpc.WeightSyncServiceStub(channel)
            response = await stub.ListVersions(pb.ListVersionsRequest(run=RESOURCE), timeout=30)
        return {Version.from_proto(manifest.version): manifest.digest for manifest in response.versions}


async def test_a_relay_killed_at_any_time_goes_on(
    tmp_path: Path, unused_tcp_port: int, rank_programs: RankPrograms
) -> None:
    engine = Engine("replica")
    async with running(Node(tmp_path / "root")) as root:
        relay = RelayProcess(tmp_path, root.target, unused_tcp_port, rank_programs)
        async with relay.running() as process:
            await push(root, Version(1, 1), model(1))
            await eventually(lambda: relay.incoming_bytes() > 1 << 20, 60)
            process.kill()  # while it pulls
            await process.wait()
        async with engine.receiving(relay.target, tmp_path / "shm"):
            async with relay.running() as process:
                await eventually(lambda: engine.version == Version(1, 1), 60)
                await push(root, Version(1, 2), model(2))
                await eventually((relay.directory / "v1.2").exists, 60)
                process.kill()  # as the version comes into sight
                await process.wait()
            async with relay.running():
                assert set(await relay.visible()) >= {Version(1, 1), Version(1, 2)}
                await eventually(lambda: engine.version == Version(1, 2), 60)
                await push(root, Version(1, 3), model(3))
                await eventually(lambda: engine.version == Version(1, 3), 60)
                run = await root.serving.runs.open(RESOURCE)
                ours = {version: each.manifest.digest for version, each in run.versions.items()}
                theirs = await relay.visible()
        assert theirs.items() <= ours.items()
    assert equal_bits(engine.tensors, model(3))
    assert equal_bits(load_file(relay.directory / "v1.3" / "model.safetensors"), model(3))
    assert relay.incoming_bytes() == 0


async def test_a_relay_that_is_its_own_upstream_says_so_and_ends(
    tmp_path: Path, unused_tcp_port: int, rank_programs: RankPrograms
) -> None:
    relay = RelayProcess(tmp_path, f"127.0.0.1:{unused_tcp_port}", unused_tcp_port, rank_programs)
    async with relay.start() as process, asyncio.timeout(60):
        assert await process.wait() == 2
    assert "takes its versions from this relay" in relay.log.read_text()
