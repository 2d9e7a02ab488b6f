# ruff: noqa: N802 - gRPC names the methods
"""A gateway samples at the replicas that the orchestrator lists, and sends them no token that opens anything else."""

from __future__ import annotations

import asyncio
import contextlib
import operator
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
import pytest
from orchestrator_doubles import serve_rollout, served
from scripted_replica import ScriptedReplica, until
from simulated_clock import SimulatedClock
from test_replica_failover import DEADLINE_S, SETTINGS, TOKENS, assert_whole

from orchestrator_svc import announcements as announced
from orchestrator_svc.announcements import Announcements, watch_replicas
from orchestrator_svc.config import FoundReplicasConfig
from sluice.config import SecurityConfig
from sluice.rpc import SluiceError, connect
from sluice.rpc.access import caller, is_local_peer
from sluice.rpc.principals import add_token
from sluice.sampling.config import ReplicasConfig
from sluice.sampling.listed import follow_list
from sluice.sampling.policy import PolicyEngine
from sluice.sampling.pool import ReplicaPool
from sluice.v1 import rollout_pb2, session_pb2_grpc
from sluice.versions import BASE


@dataclass
class Watchful(ScriptedReplica):
    """A replica that notes who calls it."""

    callers: set[str] = field(default_factory=set)

    async def GenerateStream(self, request, context):
        self.callers.add(caller().name)
        async for message in super().GenerateStream(request, context):
            yield message

    async def GetStatus(self, request, context):
        self.callers.add(caller().name)
        return await super().GetStatus(request, context)


@dataclass
class Sessions(session_pb2_grpc.SessionServiceServicer):
    """The part of the orchestrator that lists replicas."""

    pool: ReplicaPool
    sent: int = 0

    async def WatchReplicas(self, request, context):
        async for listed in watch_replicas(self.pool, from_here=is_local_peer(context.peer())):
            self.sent += 1
            yield listed


@contextlib.asynccontextmanager
async def doing(*work) -> AsyncIterator[None]:
    tasks = {asyncio.create_task(each) for each in work}
    try:
        yield
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.wait(tasks)


def generate(engine: PolicyEngine) -> asyncio.Task[rollout_pb2.GenerateResponse]:
    request = rollout_pb2.GenerateRequest(text="x", n=4, sampling={"max_tokens": TOKENS, "seed": 5}, return_text=True)
    return asyncio.create_task(engine.agenerate(request))


async def test_a_gateway_follows_the_list_and_outlives_the_orchestrator(tmp_path) -> None:
    file = tmp_path / "principals.toml"
    for name, role in (("door", "gateway"), ("to-replicas", "dispatcher")):
        (tmp_path / name).write_text(add_token(file, name, role))
    theirs = SecurityConfig(principals_file=file)
    ours = SecurityConfig(token_file=tmp_path / "door", dispatcher_token_file=tmp_path / "to-replicas")
    first, second = Watchful("first", pace_s=0.0), Watchful("second", pace_s=0.0)
    settings, clock = {**SETTINGS, "poll_s": 1.0}, SimulatedClock()
    config = FoundReplicasConfig(lease_s=6000.0, **settings)
    known = ReplicaPool([], ours, config, lambda _: None, clock=clock)
    announcements, sessions = Announcements(known, config), Sessions(known)
    pool = ReplicaPool([], ours, ReplicasConfig(**settings), lambda _: None, clock=clock)
    engine = PolicyEngine(pool, "test", 600.0)
    name = "sluice.v1.SessionService"
    register = (session_pb2_grpc.add_SessionServiceServicer_to_server, sessions, name)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(DEADLINE_S))
        one, two = [await stack.enter_async_context(serve_rollout(each, theirs)) for each in (first, second)]
        orchestrator = await stack.enter_async_context(contextlib.AsyncExitStack())
        target = await orchestrator.enter_async_context(served(register, security=theirs))
        channel = await stack.enter_async_context(connect(target, ours, role="gateway"))
        stub = session_pb2_grpc.SessionServiceStub(channel)
        await stack.enter_async_context(doing(known.run(), announcements.run(), pool.run(), follow_list(pool, stub)))

        announcements.register("first", one, from_here=True)
        assert_whole(await generate(engine))  # it waits for the list
        announcements.register("second", two, from_here=True)
        await until(lambda: sum(not each.why_not() for each in pool.replicas) == 2)
        announcements.leave("first")
        await until(
            lambda: any("no longer listed" in each.why_not() for each in pool.replicas) or len(pool.replicas) == 1
        )
        assert pool.pick(BASE).name == "second"

        def heard() -> list[float]:
            return [each.progress.heard_at for each in (*known.replicas, *pool.replicas) if each.name == "second"]

        await until(lambda: len(heard()) == 2)
        sent = sessions.sent
        for _ in range(6):
            before = heard()
            await clock.advance(settings["poll_s"])
            await until(lambda before=before: all(map(operator.gt, heard(), before)))
        assert sessions.sent == sent, "the list is sent when it changes, not whenever a replica is polled"
        await clock.advance(announced.AGAIN_S)
        await until(lambda: sessions.sent == sent + 1)
        await orchestrator.aclose()
        assert_whole(await generate(engine))
        assert pool.pick(BASE).name == "second"
        assert first.callers | second.callers == {"to-replicas"}

        async with connect(one, ours, role="gateway") as direct:
            call = direct.unary_unary("/sluice.v1.RolloutAdminService/Pause")(b"", timeout=10)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert SluiceError.from_rpc(refused.value).reason == "ROLE_REQUIRED"


async def test_a_gateway_of_another_machine_is_not_sent_to_its_own_ports() -> None:
    only = ScriptedReplica("only")
    async with serve_rollout(only) as target, asyncio.timeout(DEADLINE_S):
        pool = ReplicaPool([target], SecurityConfig(), ReplicasConfig(**SETTINGS), lambda _: None)
        async with doing(pool.run()):
            await until(lambda: pool.replicas and pool.replicas[0].seen)
            (mine,) = (await anext(watch_replicas(pool, from_here=True))).replicas
            (theirs,) = (await anext(watch_replicas(pool, from_here=False))).replicas
            assert (mine.replica, mine.address, mine.usable, mine.reason) == ("only", target, True, "")
            assert not theirs.usable
            assert "rollout.advertise" in theirs.reason
