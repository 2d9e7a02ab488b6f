"""The receiver on the cheaper ways to a version: deltas, chains, files of its host; and what it does when one fails."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
import torch
from prometheus_client import REGISTRY
from safetensors.torch import load_file
from weightsync_stack import RUN, EngineDouble, Stack, equal_bits, eventually, following, make_chunk, running_stack

from sluice.config import SecurityConfig
from sluice.rpc import connect
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import Version
from weightsync.publisher import WeightPublisher
from weightsync.receive.pull import PullLimits
from weightsync.receive.sources import UpdateTimings
from weightsync.receiver import PolicyMode, ReceiverOptions, WeightReceiver
from weightsync.staged import ApplyReport, StagedVersion

pytestmark = pytest.mark.slow

TIMEOUT_S = 60.0
LIMITS = PullLimits(idle_s=TIMEOUT_S, room_wait_s=TIMEOUT_S, attempts=3, first_pause_s=0.01)


def weights(number: int) -> dict[str, torch.Tensor]:
    """Weights of which one in a hundred moves from version to version, and one tensor never does."""
    random = torch.Generator().manual_seed(0)
    tensors = {
        "model.embed.weight": torch.randn(128, 96, generator=random).bfloat16(),
        "model.norm.weight": torch.randn(512, generator=random),
        "model.fixed": torch.randn(64, 8, generator=random).half(),
        "model.scalar": torch.tensor(1.0),
        "model.empty": torch.zeros(0, 4),
    }
    for step in range(1, number + 1):
        chosen = torch.rand(128, 96, generator=torch.Generator().manual_seed(step)) < 0.01
        embed = tensors["model.embed.weight"].view(torch.int16)
        embed[chosen] += 1
        tensors["model.norm.weight"][step] += 0.5
    return tensors


class Engine(EngineDouble):
    """Holds what it was told to load."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, torch.Tensor] = {}
        self.applied: list[Version] = []

    async def apply(self, staged: StagedVersion) -> ApplyReport:
        self.tensors = {name: tensor.clone() for name, tensor in load_file(staged.path).items()}
        assert staged.tensors.keys() == self.tensors.keys()
        self.applied.append(staged.version)
        self.version = staged.version
        return ApplyReport(staged.version, 0.002, 0.001)


@asynccontextmanager
async def receiving(
    target: str, stage_dir: Path, engine: Engine, *, local_files: bool = False, replica: str = "replica-0"
) -> AsyncIterator[WeightReceiver]:
    async with connect(target, SecurityConfig()) as channel:
        receiver = WeightReceiver(
            channel, RUN, replica, stage_dir, engine, options=ReceiverOptions(pull=LIMITS, local_files=local_files)
        )
        async with following(receiver):
            yield receiver


@pytest_asyncio.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with running_stack(tmp_path / "out", keep=20) as running:
        yield running


@pytest.fixture
def stage_dir(tmp_path: Path) -> Path:
    return tmp_path / "shm"


@pytest.fixture
def publisher(stack: Stack) -> WeightPublisher:
    return WeightPublisher(stack.channel, RUN, chunk_bytes=1000)


async def push(publisher: WeightPublisher, number: int) -> str:
    report = await publisher.update(Version(1, number), weights(number), deadline_s=TIMEOUT_S)
    return report.kind


def files(stage_dir: Path) -> list[str]:
    """Suffixes of all that is staged."""
    return sorted(path.suffix for path in stage_dir.glob("*/*"))


def fallbacks(way: str) -> float:
    return REGISTRY.get_sample_value("sluice_weights_fallbacks_total", {"way": way}) or 0.0


@pytest.mark.parametrize("local_files", [False, True])
async def test_deltas_arrive_bit_for_bit(
    stack: Stack, publisher: WeightPublisher, stage_dir: Path, local_files: bool
) -> None:
    engine = Engine()
    updates: list[UpdateTimings] = []
    async with receiving(stack.target, stage_dir, engine, local_files=local_files) as receiver:
        for number in range(1, 5):
            kind = await push(publisher, number)
            assert kind == ("anchor" if number == 1 else "delta")
            await eventually(lambda: engine.version == Version(1, number))  # noqa: B023 - awaited in this round
            assert equal_bits(engine.tensors, weights(number))
            await eventually(lambda: receiver.status().updates == number)  # noqa: B023
            last = receiver.status().last_update
            assert last is not None
            updates.append(last)
        await eventually(lambda: files(stage_dir) == [".safetensors"])
    dense = sum(tensor.nbytes for tensor in weights(1).values())
    for update in updates[1:]:
        assert 0 < (update.local_bytes if local_files else update.pulled_bytes) < dense / 2
        assert (update.pulled_bytes if local_files else update.local_bytes) == 0
    assert files(stage_dir) == []


class Recorder(weightsync_pb2_grpc.WeightDeliveryServiceServicer):
    """Stands in front of a service, remembers what it was asked, and lets tests spoil the answers."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.pulls: list[pb.PullWeightsRequest] = []
        self.reports: list[pb.ReportVersionRequest] = []
        self.spoil: Callable[[pb.PullWeightsRequest, pb.Chunk], grpc.StatusCode | None] = lambda *_: None
        self.mislead: Callable[[pb.GetUpdatePathResponse], None] = lambda _: None

    async def WatchVersions(self, request, context):  # noqa: N802
        async for response in self.stack.delivery.WatchVersions(request, timeout=TIMEOUT_S):
            yield response

    async def GetUpdatePath(self, request, context):  # noqa: N802
        try:
            async for response in self.stack.delivery.GetUpdatePath(request, timeout=TIMEOUT_S):
                self.mislead(response)
                yield response
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details())

    async def ReportVersion(self, request, context):  # noqa: N802
        self.reports.append(request)
        return await self.stack.delivery.ReportVersion(request, timeout=TIMEOUT_S)

    async def PullWeights(self, request, context):  # noqa: N802
        self.pulls.append(request)
        try:
            async for response in self.stack.delivery.PullWeights(request, timeout=TIMEOUT_S):
                data, begin = response.chunk.data, response.chunk.offset
                for offset in range(0, len(data), 500):
                    chunk = make_chunk(begin + offset, data[offset : offset + 500])
                    code = self.spoil(request, chunk)
                    if code is not None:
                        await context.abort(code, "spoiled")
                    yield pb.PullWeightsResponse(chunk=chunk)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details())

    def delta_pulls(self) -> list[pb.PullWeightsRequest]:
        return [request for request in self.pulls if request.HasField("base")]


@asynccontextmanager
async def in_front(stack: Stack) -> AsyncIterator[tuple[Recorder, str]]:
    recorder, server = Recorder(stack), grpc.aio.server()
    weightsync_pb2_grpc.add_WeightDeliveryServiceServicer_to_server(recorder, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield recorder, f"127.0.0.1:{port}"
    await server.stop(0)


async def test_the_service_is_told_what_an_update_cost(
    stack: Stack, publisher: WeightPublisher, stage_dir: Path
) -> None:
    engine = Engine()
    async with in_front(stack) as (recorder, target), receiving(target, stage_dir, engine):
        await push(publisher, 1)
        await eventually(
            lambda: any(
                report.phase == pb.REPLICA_PHASE_SERVING and report.version.number for report in recorder.reports
            )
        )
    timings = recorder.reports[-1].timings
    assert timings.pulled_bytes == sum(request.length for request in recorder.pulls)
    assert timings.pause.ToNanoseconds() == 2_000_000
    assert timings.apply.ToNanoseconds() == 1_000_000
    parts = (timings.pull, timings.stage)
    assert all(part.ToNanoseconds() > 0 for part in parts)
    assert timings.total.ToNanoseconds() >= sum(part.ToNanoseconds() for part in parts)


@pytest.mark.parametrize("local_files", [False, True])
async def test_versions_that_were_missed_come_as_a_chain(
    stack: Stack, publisher: WeightPublisher, stage_dir: Path, local_files: bool
) -> None:
    engine = Engine()
    async with receiving(stack.target, stage_dir, engine, local_files=local_files) as receiver:
        await push(publisher, 1)
        await eventually(lambda: engine.version == Version(1, 1))
        receiver.set_policy(PolicyMode.HOLD, owner="test", ttl_s=3600)
        for number in range(2, 7):
            await push(publisher, number)
        await eventually(lambda: receiver.status().newest == Version(1, 6))
        receiver.set_policy(PolicyMode.FOLLOW, owner="test")
        await eventually(lambda: engine.version == Version(1, 6))
    assert engine.applied == [Version(1, 1), Version(1, 6)]
    assert equal_bits(engine.tensors, weights(6))


@pytest.mark.parametrize("local_files", [False, True])
async def test_a_late_joiner_and_one_that_goes_back_arrive(
    stack: Stack, publisher: WeightPublisher, stage_dir: Path, local_files: bool
) -> None:
    for number in range(1, 6):
        await push(publisher, number)
    engine = Engine()
    async with receiving(stack.target, stage_dir, engine, local_files=local_files) as receiver:
        await eventually(lambda: engine.version == Version(1, 5))
        assert equal_bits(engine.tensors, weights(5))
        receiver.set_policy(PolicyMode.TARGET, Version(1, 3), owner="test", ttl_s=3600)
        await eventually(lambda: engine.version == Version(1, 3))
        assert equal_bits(engine.tensors, weights(3))


async def test_a_broken_pull_of_a_delta_goes_on_from_the_last_good_chunk(
    stack: Stack, publisher: WeightPublisher, stage_dir: Path
) -> None:
    engine = Engine()
    async with in_front(stack) as (recorder, target), receiving(target, stage_dir, engine):
        await push(publisher, 1)
        await eventually(lambda: engine.version == Version(1, 1))

        def break_once(request: pb.PullWeightsRequest, chunk: pb.Chunk) -> grpc.StatusCode | None:
            first = len(recorder.delta_pulls()) == 1 and chunk.offset >= 500
            return grpc.StatusCode.UNAVAILABLE if first else None

        recorder.spoil = break_once
        before = fallbacks("dense")
        await push(publisher, 2)
        await eventually(lambda: engine.version == Version(1, 2))
    assert [request.offset for request in recorder.delta_pulls()] == [0, 500]
    assert equal_bits(engine.tensors, weights(2))
    assert fallbacks("dense") == before


def swap_a_bit(_: pb.PullWeightsRequest, chunk: pb.Chunk) -> None:
    chunk.CopyFrom(make_chunk(chunk.offset, bytes([chunk.data[0] ^ 1]) + chunk.data[1:]))


def refuse(_: pb.PullWeightsRequest, chunk: pb.Chunk) -> grpc.StatusCode:
    return grpc.StatusCode.FAILED_PRECONDITION


def lose(_: pb.PullWeightsRequest, chunk: pb.Chunk) -> grpc.StatusCode:
    return grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("spoil", [swap_a_bit, refuse, lose])
async def test_a_delta_that_fails_is_replaced_by_the_dense_form(
    stack: Stack,
    publisher: WeightPublisher,
    stage_dir: Path,
    spoil: Callable[[pb.PullWeightsRequest, pb.Chunk], grpc.StatusCode | None],
) -> None:
    engine = Engine()
    async with in_front(stack) as (recorder, target), receiving(target, stage_dir, engine):
        await push(publisher, 1)
        await eventually(lambda: engine.version == Version(1, 1))
        recorder.spoil = lambda request, chunk: spoil(request, chunk) if request.HasField("base") else None
        before = fallbacks("dense")
        await push(publisher, 2)
        await eventually(lambda: engine.version == Version(1, 2))
        assert equal_bits(engine.tensors, weights(2))
        assert fallbacks("dense") > before


@pytest.mark.parametrize("local_files", [True, False])
async def test_a_local_file_is_read_only_if_it_is_the_named_one(
    stack: Stack, publisher: WeightPublisher, stage_dir: Path, local_files: bool
) -> None:
    async with in_front(stack) as (recorder, target):
        engine = Engine()
        async with receiving(target, stage_dir, engine, local_files=local_files) as receiver:
            await push(publisher, 1)
            await eventually(lambda: engine.version == Version(1, 1))
            await push(publisher, 2)
            await eventually(lambda: engine.version == Version(1, 2))
            await eventually(lambda: receiver.status().updates == 2)
    assert bool(recorder.pulls) is not local_files
    assert equal_bits(engine.tensors, weights(2))


async def test_a_damaged_local_file_is_followed_by_sockets(
    stack: Stack, publisher: WeightPublisher, stage_dir: Path, tmp_path: Path
) -> None:
    engine = Engine()
    other = tmp_path / "other"

    def mislead(response: pb.GetUpdatePathResponse) -> None:
        for file in response.files:
            data = bytearray(Path(file.path).read_bytes())
            data[-1] ^= 1
            other.write_bytes(data)
            file.path, file.inode, file.device = str(other), other.stat().st_ino, other.stat().st_dev

    async with in_front(stack) as (recorder, target):
        recorder.mislead = mislead
        await push(publisher, 1)
        async with receiving(target, stage_dir, engine, local_files=True):
            await eventually(lambda: engine.version == Version(1, 1))
    assert equal_bits(engine.tensors, weights(1))
    assert recorder.pulls


async def test_receivers_of_a_host_pull_a_version_once(
    stack: Stack, publisher: WeightPublisher, stage_dir: Path
) -> None:
    engines = [Engine() for _ in range(4)]
    most = 0
    async with in_front(stack) as (recorder, target), contextlib.AsyncExitStack() as receivers:
        for number, engine in enumerate(engines):
            await receivers.enter_async_context(receiving(target, stage_dir, engine, replica=f"replica-{number}"))
        for number in range(1, 5):
            await push(publisher, number)

            def arrived() -> bool:
                nonlocal most
                most = max(most, len([each for each in files(stage_dir) if each != ".build"]))
                return all(engine.version == Version(1, number) for engine in engines)  # noqa: B023

            await eventually(arrived)
        assert all(equal_bits(engine.tensors, weights(4)) for engine in engines)
    assert len({(each.version.number, each.shard, each.offset) for each in recorder.pulls}) == len(recorder.pulls)
    assert most <= 2
    assert files(stage_dir) == []


async def test_without_room_the_old_version_serves_on_and_the_report_says_what_to_do(
    stack: Stack, publisher: WeightPublisher, stage_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine()
    async with receiving(stack.target, stage_dir, engine) as receiver:
        await push(publisher, 1)
        await eventually(lambda: engine.version == Version(1, 1))
        full = os.statvfs_result((4096, 4096, 100, 3, 3, 10, 5, 5, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda _: full)
        await push(publisher, 2)
        await eventually(lambda: "shm_size" in receiver.status().last_error)
        assert f"{3 * 4096} bytes free" in receiver.status().last_error
        assert (receiver.status().serving, engine.version) == (Version(1, 1), Version(1, 1))
        monkeypatch.undo()
        await push(publisher, 3)
        await eventually(lambda: engine.version == Version(1, 3))
    assert equal_bits(engine.tensors, weights(3))
