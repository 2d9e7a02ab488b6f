"""The receiver against a real service: follow, hold, target, breaks on the way, a service that comes and goes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
import torch
from held_ports import held_ports
from safetensors.torch import load_file
from simulated_clock import SimulatedClock
from weightsync_stack import (
    RUN,
    EngineDouble,
    Stack,
    equal_bits,
    eventually,
    following,
    make_chunk,
    running_stack,
    weights,
)

from sluice.clock import CLOCK, Clock
from sluice.config import SecurityConfig
from sluice.rpc import SluiceError, connect
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import BASE, Version
from weightsync.receive.pull import PullLimits
from weightsync.receiver import PolicyHeldError, PolicyMode, ReceiverOptions, WeightReceiver
from weightsync.staged import ApplyError, ApplyReport, StagedAdapter, StagedVersion

TIMEOUT_S = 60.0
LIMITS = PullLimits(idle_s=TIMEOUT_S, attempts=3, first_pause_s=0.01)


class Engine(EngineDouble):
    """Holds tensors; counts what it was asked.

    Attributes:
        gate: An apply ends when it is open.
        asked: Applies that began.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, torch.Tensor] = {}
        self.applied: list[Version] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = 0
        self.refuse = False
        self.falls_to_base = False

    async def apply(self, staged: StagedVersion) -> ApplyReport:
        self.asked += 1
        await self.gate.wait()
        if self.falls_to_base:
            self.version = BASE
        if self.refuse:
            raise ApplyError("the engine refuses")
        self.tensors = load_file(staged.path)
        assert {name: tuple(each.shape) for name, each in self.tensors.items()} == {
            name: each.shape for name, each in staged.tensors.items()
        }
        self.version = staged.version
        self.applied.append(staged.version)
        return ApplyReport(staged.version, 0.002, 0.001)


@asynccontextmanager
async def receiving(
    target: str, stage_dir: Path, engine: Engine, clock: Clock = CLOCK
) -> AsyncIterator[WeightReceiver]:
    async with connect(target, SecurityConfig()) as channel:
        receiver = WeightReceiver(
            channel,
            RUN,
            "replica-0",
            stage_dir,
            engine,
            options=ReceiverOptions(pull=LIMITS, apply_deadline_s=TIMEOUT_S),
            clock=clock,
        )
        async with following(receiver):
            yield receiver


@pytest_asyncio.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with running_stack(tmp_path / "out", keep=5) as running:
        yield running


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest.fixture
def stage_dir(tmp_path: Path) -> Path:
    return tmp_path / "shm"


def staged_files(stage_dir: Path) -> list[str]:
    """Names of all files, without the digests."""
    return sorted(re.sub(r"-[0-9a-f]{32}", "", path.name) for path in stage_dir.glob("*/*"))


async def push(stack: Stack, number: int) -> None:
    await stack.push(Version(1, number), weights(number), deadline_s=TIMEOUT_S)


async def test_each_version_arrives_bit_for_bit_and_is_reported(stack: Stack, stage_dir: Path) -> None:
    engine = Engine()
    async with receiving(stack.target, stage_dir, engine) as receiver:
        for number in (1, 2, 3):
            await push(stack, number)
            await eventually(lambda: receiver.status().serving.number == number)  # noqa: B023 - awaited in this round
            assert equal_bits(engine.tensors, weights(number))
        run = await stack.runs.open(f"runs/{RUN}")
        await eventually(lambda: run.ledger.replicas(0.0)["replica-0"].serving == Version(1, 3))
        status = receiver.status()
        assert status.last_update is not None
        assert status.last_update.version == Version(1, 3)
        assert (status.last_error, status.connected) == ("", True)
        await eventually(lambda: staged_files(stage_dir) == ["v1.3.safetensors"])  # a thread removes the others
    assert staged_files(stage_dir) == []


async def test_versions_that_were_overtaken_are_skipped(stack: Stack, stage_dir: Path) -> None:
    engine = Engine()
    engine.gate.clear()
    async with receiving(stack.target, stage_dir, engine) as receiver:
        await push(stack, 1)
        await eventually(lambda: receiver.status().staged_version == Version(1, 1))
        for number in (2, 3, 4):
            await push(stack, number)
        await eventually(lambda: receiver.status().newest == Version(1, 4))
        engine.gate.set()
        await eventually(lambda: engine.version == Version(1, 4))
    assert engine.applied == [Version(1, 1), Version(1, 4)]


async def test_hold_keeps_a_version_and_follow_takes_the_newest(stack: Stack, stage_dir: Path) -> None:
    engine = Engine()
    async with receiving(stack.target, stage_dir, engine) as receiver:
        await push(stack, 1)
        await eventually(lambda: engine.version == Version(1, 1))
        receiver.set_policy(PolicyMode.HOLD, owner="eval", ttl_s=3600)
        await push(stack, 2)
        await eventually(lambda: receiver.status().newest == Version(1, 2))
        with pytest.raises(PolicyHeldError):
            await receiver.update_to(None, TIMEOUT_S)
        assert engine.applied == [Version(1, 1)]
        receiver.set_policy(PolicyMode.FOLLOW, owner="eval")
        await eventually(lambda: engine.version == Version(1, 2))


async def test_a_hold_ends_by_itself(stack: Stack, stage_dir: Path, clock: SimulatedClock) -> None:
    engine = Engine()
    async with receiving(stack.target, stage_dir, engine, clock) as receiver:
        receiver.set_policy(PolicyMode.HOLD, owner="eval", ttl_s=20)
        await push(stack, 1)
        await eventually(lambda: receiver.status().newest == Version(1, 1))
        await clock.advance(19)
        assert receiver.status().policy.mode is PolicyMode.HOLD
        assert engine.version == BASE
        await clock.advance(1)
        await eventually(lambda: engine.version == Version(1, 1))


async def test_a_target_goes_back_and_stays(stack: Stack, stage_dir: Path) -> None:
    engine = Engine()
    async with receiving(stack.target, stage_dir, engine) as receiver:
        for number in (1, 2):
            await push(stack, number)
        await eventually(lambda: engine.version == Version(1, 2))
        receiver.set_policy(PolicyMode.TARGET, Version(1, 1), owner="eval", ttl_s=3600)
        await eventually(lambda: engine.version == Version(1, 1))
        assert equal_bits(engine.tensors, weights(1))
        await eventually(lambda: staged_files(stage_dir) == ["v1.1.safetensors"])  # a thread removes the other one


async def test_a_commanded_update_answers_when_it_serves(stack: Stack, stage_dir: Path) -> None:
    engine = Engine()
    async with receiving(stack.target, stage_dir, engine) as receiver:
        await push(stack, 1)
        report = await receiver.update_to(None, TIMEOUT_S)
        assert report.version == engine.version == Version(1, 1)
        again = await receiver.update_to(Version(1, 1), TIMEOUT_S)
        assert again.pause_s == 0
        with pytest.raises(SluiceError) as caught:
            await receiver.update_to(Version(9, 9), TIMEOUT_S)
        assert caught.value.code is grpc.StatusCode.NOT_FOUND
        assert engine.version == Version(1, 1)


async def test_a_commanded_update_fails_at_its_deadline_and_the_old_version_serves(
    stack: Stack, stage_dir: Path, clock: SimulatedClock
) -> None:
    engine = Engine()
    async with receiving(stack.target, stage_dir, engine, clock) as receiver:
        engine.gate.clear()
        await push(stack, 1)
        update = asyncio.create_task(receiver.update_to(Version(1, 1), 10))
        await eventually(lambda: engine.asked == 1)
        await clock.advance(9)
        assert not update.done()
        await clock.advance(1)
        with pytest.raises(SluiceError) as caught:
            await update
        assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert receiver.status().serving == BASE


async def test_an_engine_that_refuses_is_reported_and_the_next_version_taken(stack: Stack, stage_dir: Path) -> None:
    engine = Engine()
    engine.refuse = True
    async with receiving(stack.target, stage_dir, engine) as receiver:
        await push(stack, 1)
        await eventually(lambda: "refuses" in receiver.status().last_error)
        run = await stack.runs.open(f"runs/{RUN}")
        await eventually(lambda: "refuses" in run.ledger.replicas(0.0)["replica-0"].error)
        assert receiver.status().serving == BASE
        engine.refuse = False
        await push(stack, 2)
        await eventually(lambda: engine.version == Version(1, 2))
        await eventually(lambda: receiver.status().last_error == "")
        await eventually(lambda: staged_files(stage_dir) == ["v1.2.safetensors"])


async def test_other_changes_of_the_engine_are_followed_by_the_newest(stack: Stack, stage_dir: Path) -> None:
    engine = Engine()

    async def reload_base() -> Version:
        engine.version = BASE
        return BASE

    async with receiving(stack.target, stage_dir, engine) as receiver:
        await push(stack, 1)
        await eventually(lambda: engine.version == Version(1, 1))
        receiver.set_policy(PolicyMode.HOLD, owner="operator", ttl_s=3600)
        assert await receiver.run_exclusive(reload_base) == BASE
        receiver.set_policy(PolicyMode.FOLLOW, owner="operator")
        await eventually(lambda: engine.version == Version(1, 1))


async def test_an_engine_that_fell_back_to_the_base_is_brought_to_the_newest_version(
    stack: Stack, stage_dir: Path
) -> None:
    engine = Engine()
    async with receiving(stack.target, stage_dir, engine) as receiver:
        await push(stack, 1)
        await eventually(lambda: engine.version == Version(1, 1))
        engine.refuse = engine.falls_to_base = True
        await push(stack, 2)
        await eventually(lambda: "refuses" in receiver.status().last_error)
        run = await stack.runs.open(f"runs/{RUN}")
        await eventually(lambda: run.ledger.replicas(0.0)["replica-0"].serving == BASE)
        receiver.set_policy(PolicyMode.TARGET, Version(1, 1), owner="eval", ttl_s=3600)
        engine.refuse = engine.falls_to_base = False
        await eventually(lambda: engine.version == Version(1, 1))
        assert equal_bits(engine.tensors, weights(1))
        await eventually(lambda: staged_files(stage_dir) == ["v1.1.safetensors"])  # a thread removes the other one


async def test_an_engine_that_takes_too_long_is_asked_what_it_serves(
    stack: Stack, stage_dir: Path, clock: SimulatedClock
) -> None:
    engine = Engine()
    engine.gate.clear()
    async with receiving(stack.target, stage_dir, engine, clock) as receiver:
        await push(stack, 1)
        await eventually(lambda: engine.asked == 1)
        await clock.advance(TIMEOUT_S)
        await eventually(lambda: "not applied within 60 s" in receiver.status().last_error)
        assert receiver.status().serving == BASE
        engine.version = Version(1, 1)  # the apply went on and came to its end
        report = await receiver.update_to(Version(1, 1), TIMEOUT_S)
        assert (report.version, engine.applied) == (Version(1, 1), [])
        await eventually(lambda: receiver.status().staged_version is None)
        assert staged_files(stage_dir) == ["v1.1.safetensors"]


async def test_nothing_is_decided_while_the_engine_is_started_again(stack: Stack, stage_dir: Path) -> None:
    engine, back = Engine(), asyncio.Event()

    async def restart() -> None:
        engine.version = BASE
        await back.wait()
        engine.version = Version(1, 1)

    async with receiving(stack.target, stage_dir, engine) as receiver:
        await push(stack, 1)
        await eventually(lambda: engine.version == Version(1, 1))
        restarting = asyncio.create_task(receiver.run_exclusive(restart))
        await eventually(lambda: engine.version == BASE)
        update = asyncio.create_task(receiver.update_to(Version(1, 1), TIMEOUT_S))
        back.set()
        await asyncio.gather(restarting, update)
        assert engine.applied == [Version(1, 1)]
        assert staged_files(stage_dir) == ["v1.1.safetensors"]


@pytest.fixture
def port() -> Iterator[int]:
    with held_ports(1) as (held,):
        yield held


async def test_a_service_that_is_lost_is_found_again(tmp_path: Path, stage_dir: Path, port: int) -> None:
    engine = Engine()
    async with receiving(f"127.0.0.1:{port}", stage_dir, engine) as receiver:
        async with running_stack(tmp_path, port=port) as stack:
            await push(stack, 1)
            await eventually(lambda: engine.version == Version(1, 1))
        await eventually(lambda: not receiver.status().connected)
        assert receiver.status().serving == Version(1, 1)
        async with running_stack(tmp_path, port=port) as stack:
            await push(stack, 2)
            await eventually(lambda: engine.version == Version(1, 2))
            assert equal_bits(engine.tensors, weights(2))


class Unreliable(weightsync_pb2_grpc.WeightDeliveryServiceServicer):
    """Stands in front of a service and spoils its pulls."""

    def __init__(self, stack: Stack, spoil: Callable[[int, pb.PullWeightsResponse], Awaitable[bool]]) -> None:
        self.stack = stack
        self.spoil = spoil
        self.offsets: list[int] = []

    async def WatchVersions(self, request, context):  # noqa: N802
        async for response in self.stack.delivery.WatchVersions(request, timeout=TIMEOUT_S):
            yield response

    async def ReportVersion(self, request, context):  # noqa: N802
        return await self.stack.delivery.ReportVersion(request, timeout=TIMEOUT_S)

    async def PullWeights(self, request, context):  # noqa: N802
        self.offsets.append(request.offset)
        stream = len(self.offsets)
        data = await self.stack.pull(Version.from_proto(request.version), request.shard, request.offset)
        for begin in range(0, len(data), 1000):
            response = pb.PullWeightsResponse(chunk=make_chunk(request.offset + begin, data[begin : begin + 1000]))
            if await self.spoil(stream, response):
                await context.abort(grpc.StatusCode.UNAVAILABLE, "spoiled")
            yield response


@asynccontextmanager
async def in_front(unreliable: Unreliable) -> AsyncIterator[str]:
    server = grpc.aio.server()
    weightsync_pb2_grpc.add_WeightDeliveryServiceServicer_to_server(unreliable, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


async def test_a_broken_pull_goes_on_from_the_last_good_chunk(stack: Stack, stage_dir: Path) -> None:
    async def break_at_2000(stream: int, response: pb.PullWeightsResponse) -> bool:
        return stream == 1 and response.chunk.offset >= 2000

    engine, unreliable = Engine(), Unreliable(stack, break_at_2000)
    await push(stack, 1)
    async with in_front(unreliable) as target, receiving(target, stage_dir, engine):
        await eventually(lambda: engine.version == Version(1, 1))
    assert unreliable.offsets == [0, 2000]
    assert equal_bits(engine.tensors, weights(1))


async def test_a_damaged_chunk_is_never_applied_but_pulled_anew(stack: Stack, stage_dir: Path) -> None:
    async def flip(stream: int, response: pb.PullWeightsResponse) -> bool:
        if stream == 1 and response.chunk.offset == 3000:
            response.chunk.data = bytes([response.chunk.data[0] ^ 1]) + response.chunk.data[1:]
        return False

    engine, unreliable = Engine(), Unreliable(stack, flip)
    await push(stack, 1)
    async with in_front(unreliable) as target, receiving(target, stage_dir, engine):
        await eventually(lambda: engine.version == Version(1, 1))
    assert unreliable.offsets == [0, 3000]
    assert equal_bits(engine.tensors, weights(1))


@pytest.mark.slow
async def test_bytes_changed_under_a_right_checksum_are_never_applied(stack: Stack, stage_dir: Path) -> None:
    async def swap(stream: int, response: pb.PullWeightsResponse) -> bool:
        if stream == 1 and response.chunk.offset == 3000:
            changed = bytes([response.chunk.data[0] ^ 1]) + response.chunk.data[1:]
            response.chunk.CopyFrom(make_chunk(3000, changed))
        return False

    engine, unreliable = Engine(), Unreliable(stack, swap)
    await push(stack, 1)
    async with in_front(unreliable) as target, receiving(target, stage_dir, engine):
        await eventually(lambda: engine.version == Version(1, 1))
    assert unreliable.offsets == [0, 0]
    assert equal_bits(engine.tensors, weights(1))


async def test_an_adapter_that_does_not_come_in_time_is_given_up(
    stack: Stack, stage_dir: Path, clock: SimulatedClock
) -> None:
    async def use(staged: StagedAdapter) -> ApplyReport:
        raise AssertionError(f"{staged.version} came")

    await push(stack, 1)
    engine = Engine()
    engine.gate.clear()
    async with receiving(stack.target, stage_dir, engine, clock) as receiver:
        await eventually(
            lambda: engine.asked == 1
        )  # until this apply ends, nobody knows what an adapter could belong to
        loading = asyncio.create_task(receiver.with_adapter(Version(1, 1), use, deadline_s=10))
        await clock.advance(10)
        with pytest.raises(SluiceError, match="not loaded within 10 s") as caught:
            await loading
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
