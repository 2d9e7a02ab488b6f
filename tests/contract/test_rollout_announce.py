"""A replica announces itself to an orchestrator that forgets, restarts and refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from benchmarks.children import free_port
from rollout_svc import announce
from rollout_svc.announce import Announcer
from rollout_svc.drain import Drain
from sluice.config import SecurityConfig, ServerConfig
from sluice.rpc import RpcServer, SluiceError
from sluice.v1 import orchestrator_pb2, orchestrator_pb2_grpc

DEADLINE_S = 20.0


@dataclass
class Orchestrator(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Keeps leases as the real one does, without a clock: it forgets when a test says so."""

    lease_s: float = 0.06
    known: dict[str, str] = field(default_factory=dict)
    registrations: int = 0
    beats: int = 0
    left: list[str] = field(default_factory=list)
    failure: SluiceError | None = None
    slow_s: float = 0.0

    async def RegisterReplica(self, request, context):  # noqa: N802 - gRPC's name
        if self.failure is not None:
            raise self.failure
        await asyncio.sleep(self.slow_s)
        assert request.run == "runs/test"
        self.registrations += 1
        self.known[request.replica] = request.address
        answer = orchestrator_pb2.RegisterReplicaResponse()
        answer.lease.FromNanoseconds(int(self.lease_s * 1e9))
        return answer

    async def Heartbeat(self, request, context):  # noqa: N802 - gRPC's name
        if request.replica not in self.known:
            raise SluiceError.not_found("UNKNOWN_REPLICA", "call RegisterReplica")
        self.beats += 1
        if request.leaving:
            await asyncio.sleep(self.slow_s)
            self.left.append(request.replica)
        answer = orchestrator_pb2.HeartbeatResponse()
        answer.lease.FromNanoseconds(int(self.lease_s * 1e9))
        return answer


@asynccontextmanager
async def serving(servicer: Orchestrator, port: int) -> AsyncIterator[None]:
    server = RpcServer("orchestrator", ServerConfig(port=port), SecurityConfig())
    server.add(
        orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server, servicer, "sluice.v1.OrchestratorService"
    )
    await server.start()
    try:
        yield
    finally:
        await server.stop(0)


@asynccontextmanager
async def announcing(port: int) -> AsyncIterator[Drain]:
    """A replica that announces itself until the block ends, and then leaves."""
    drain = Drain()
    announcer = Announcer(
        f"127.0.0.1:{port}", SecurityConfig(), run="test", replica="one", address="replica.example:7103"
    )
    task = asyncio.create_task(announcer.run(drain))
    yield drain
    drain.begin(0.0)
    async with asyncio.timeout(DEADLINE_S):
        await task


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - the other side of a socket brings it about
            await asyncio.sleep(0.005)


@pytest.fixture
def port() -> int:
    return free_port()


async def test_a_replica_registers_renews_its_lease_and_says_that_it_leaves(port):
    orchestrator = Orchestrator()
    async with serving(orchestrator, port), announcing(port) as drain:
        await until(lambda: orchestrator.beats >= 3)
        assert orchestrator.known == {"one": "replica.example:7103"}
        assert orchestrator.registrations == 1
        assert not orchestrator.left
        drain.begin(60.0)
        await until(lambda: orchestrator.left == ["one"])


async def test_a_replica_that_was_forgotten_registers_again(port):
    orchestrator = Orchestrator()
    async with serving(orchestrator, port), announcing(port):
        await until(lambda: orchestrator.beats >= 1)
        orchestrator.known.clear()
        await until(lambda: orchestrator.registrations == 2)
        await until(lambda: orchestrator.known == {"one": "replica.example:7103"})


async def test_an_orchestrator_that_comes_later_and_comes_back_is_found(port):
    async with announcing(port):
        for _ in range(2):
            orchestrator = Orchestrator()
            async with serving(orchestrator, port):
                await until(lambda orchestrator=orchestrator: orchestrator.beats >= 1)


async def test_a_refusal_is_asked_again_and_hinders_no_leaving(port, monkeypatch):
    monkeypatch.setattr(announce, "LONGEST_PAUSE_S", 0.1)
    orchestrator = Orchestrator(failure=SluiceError.not_found("WRONG_RUN", "this orchestrator has runs/other"))
    async with serving(orchestrator, port):
        async with announcing(port):
            await asyncio.sleep(0)
            orchestrator.failure = None
            await until(lambda: orchestrator.beats >= 1)
        orchestrator.failure = SluiceError.not_found("WRONG_RUN", "this orchestrator has runs/other")
        async with announcing(free_port()):
            pass


def announcer(port: int) -> Announcer:
    return Announcer(f"127.0.0.1:{port}", SecurityConfig(), run="test", replica="one", address="replica.example:7103")


@pytest.mark.parametrize("registered", [True, False])
async def test_a_replica_without_requests_ends_when_the_orchestrator_knows_that_it_leaves(port, registered):
    orchestrator, drain, announcing = Orchestrator(slow_s=0.2), Drain(), announcer(port)
    async with serving(orchestrator, port), asyncio.timeout(DEADLINE_S):
        task = asyncio.create_task(announcing.run(drain))
        if registered:
            await until(lambda: orchestrator.beats >= 1)
        else:
            await asyncio.sleep(0.1)  # it is being registered
        drain.begin(0.0)
        await announcing.left()
        assert orchestrator.left == ["one"]
        await task


async def test_a_replica_does_not_wait_long_for_an_orchestrator_that_hangs(port, monkeypatch):
    monkeypatch.setattr(announce, "LEAVE_S", 0.1)
    orchestrator, drain, announcing = Orchestrator(slow_s=DEADLINE_S), Drain(), announcer(port)
    async with serving(orchestrator, port), asyncio.timeout(DEADLINE_S):
        task = asyncio.create_task(announcing.run(drain))
        await asyncio.sleep(0)
        drain.begin(0.0)
        await announcing.left()
        assert not task.done()
        task.cancel()
        await asyncio.wait({task})
