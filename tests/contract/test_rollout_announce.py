"""A replica announces itself to an orchestrator that forgets, restarts and refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from simulated_clock import LIMIT_S, SimulatedClock

from rollout_svc import app
from rollout_svc.app import Announcer
from sluice.config import SecurityConfig, ServerConfig
from sluice.rpc import RpcServer, SluiceError
from sluice.rpc.drain import Drain
from sluice.v1 import orchestrator_pb2, orchestrator_pb2_grpc

LEASE_S = 30.0
WRONG_RUN = SluiceError.not_found("WRONG_RUN", "this orchestrator has runs/other")


@dataclass
class Orchestrator(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Keeps leases as the real one does, without a clock: it forgets when a test says so.

    Attributes:
        answers: Whether it answers registrations and replicas that leave; `asked` counts both.
    """

    known: dict[str, str] = field(default_factory=dict)
    registrations: int = 0
    refusals: int = 0
    beats: int = 0
    asked: int = 0
    left: list[str] = field(default_factory=list)
    failure: SluiceError | None = None
    answers: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.answers.set()

    async def RegisterReplica(self, request, context):  # noqa: N802 - gRPC's name
        if self.failure is not None:
            self.refusals += 1
            raise self.failure
        self.asked += 1
        await self.answers.wait()
        assert request.run == "runs/test"
        self.registrations += 1
        self.known[request.replica] = request.address
        answer = orchestrator_pb2.RegisterReplicaResponse()
        answer.lease.FromNanoseconds(int(LEASE_S * 1e9))
        return answer

    async def Heartbeat(self, request, context):  # noqa: N802 - gRPC's name
        if request.replica not in self.known:
            raise SluiceError.not_found("UNKNOWN_REPLICA", "call RegisterReplica")
        self.beats += 1
        if request.leaving:
            self.asked += 1
            await self.answers.wait()
            self.left.append(request.replica)
        answer = orchestrator_pb2.HeartbeatResponse()
        answer.lease.FromNanoseconds(int(LEASE_S * 1e9))
        return answer


@asynccontextmanager
async def serving(servicer: Orchestrator, address: str) -> AsyncIterator[None]:
    server = RpcServer("orchestrator", ServerConfig(host=address), SecurityConfig())
    server.add(
        orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server, servicer, "sluice.v1.OrchestratorService"
    )
    await server.start()
    try:
        yield
    finally:
        await server.stop(0)


@dataclass
class Announced:
    """A replica that announces itself, on simulated time."""

    clock: SimulatedClock
    drain: Drain
    announcer: Announcer
    running: asyncio.Task[None]

    async def until(self, condition) -> None:
        """Let time pass until a condition holds."""
        await self.clock.until(condition, step_s=1.0)


@asynccontextmanager
async def announcing(address: str) -> AsyncIterator[Announced]:
    """A replica that announces itself until the block ends, and then leaves."""
    clock = SimulatedClock()
    drain = Drain(clock)
    announcer = Announcer(
        address, SecurityConfig(), run="test", replica="one", address="replica.example:7103", clock=clock
    )
    running = asyncio.create_task(announcer.run(drain))
    yield Announced(clock, drain, announcer, running)
    drain.begin(0.0)
    async with asyncio.timeout(LIMIT_S):
        await running


@pytest.fixture
def address(tmp_path: Path) -> str:
    """A socket of its own: an orchestrator may come back to it."""
    return f"unix:{tmp_path}/orchestrator"


@pytest.fixture(autouse=True)
def calls_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "CALL_S", LIMIT_S)


async def test_a_replica_registers_renews_its_lease_and_says_that_it_leaves(address):
    orchestrator = Orchestrator()
    async with serving(orchestrator, address), announcing(address) as replica:
        await replica.until(lambda: orchestrator.beats >= 3)
        assert orchestrator.known == {"one": "replica.example:7103"}
        assert orchestrator.registrations == 1
        assert not orchestrator.left
        replica.drain.begin(60.0)
        await replica.clock.until(lambda: orchestrator.left == ["one"])


async def test_a_replica_beats_three_times_within_a_lease(address):
    orchestrator = Orchestrator()
    async with serving(orchestrator, address), announcing(address) as replica:
        await replica.clock.until(lambda: orchestrator.registrations == 1 and replica.clock.waits)
        for beats in range(1, 7):
            await replica.clock.advance(LEASE_S / 3)
            await replica.clock.until(lambda beats=beats: orchestrator.beats == beats and replica.clock.waits)


async def test_a_replica_that_was_forgotten_registers_again(address):
    orchestrator = Orchestrator()
    async with serving(orchestrator, address), announcing(address) as replica:
        await replica.until(lambda: orchestrator.beats >= 1)
        orchestrator.known.clear()
        await replica.until(lambda: orchestrator.registrations == 2)
        await replica.until(lambda: orchestrator.known == {"one": "replica.example:7103"})


@pytest.mark.slow
async def test_an_orchestrator_that_comes_later_and_comes_back_is_found(address):
    async with announcing(address) as replica:
        for _ in range(2):
            orchestrator = Orchestrator()
            async with serving(orchestrator, address):
                await replica.until(lambda orchestrator=orchestrator: orchestrator.beats >= 1)


async def test_a_refusal_is_asked_again_and_hinders_no_leaving(address):
    orchestrator = Orchestrator(failure=WRONG_RUN)
    async with serving(orchestrator, address):
        async with announcing(address) as replica:
            await replica.until(lambda: orchestrator.refusals >= 2)
            orchestrator.failure = None
            await replica.until(lambda: orchestrator.beats >= 1)
        orchestrator.failure, refusals = WRONG_RUN, orchestrator.refusals
        async with announcing(address) as replica:
            await replica.until(lambda: orchestrator.refusals > refusals)


@pytest.mark.slow
async def test_an_orchestrator_that_is_not_there_hinders_no_leaving(address):
    async with announcing(address) as replica:
        await replica.clock.until(lambda: replica.clock.waits)


@pytest.mark.parametrize("registered", [True, False])
async def test_a_replica_without_requests_ends_when_the_orchestrator_knows_that_it_leaves(address, registered):
    orchestrator = Orchestrator()
    async with serving(orchestrator, address), announcing(address) as replica:
        if registered:
            await replica.until(lambda: orchestrator.beats >= 1)
        orchestrator.answers.clear()
        await replica.clock.until(lambda: orchestrator.asked == 1)  # it is registered, or is being registered
        replica.drain.begin(0.0)
        leaving = asyncio.create_task(replica.announcer.left())
        await replica.clock.until(lambda: orchestrator.asked == 1 + registered)
        assert not leaving.done()
        orchestrator.answers.set()
        await replica.clock.until(leaving.done)
        assert orchestrator.left == ["one"]
        await replica.clock.until(replica.running.done)


async def test_a_replica_does_not_wait_long_for_an_orchestrator_that_hangs(address):
    orchestrator = Orchestrator()
    orchestrator.answers.clear()
    async with serving(orchestrator, address), announcing(address) as replica:
        await replica.clock.until(lambda: orchestrator.asked == 1)
        replica.drain.begin(0.0)
        leaving = asyncio.create_task(replica.announcer.left())
        await replica.clock.advance(app.LEAVE_S)
        await replica.clock.until(leaving.done)
        assert not replica.running.done()
        orchestrator.answers.set()
