"""Requests wait in line at a gateway while its replicas have as many samples as they are given at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from scripted_replica import ScriptedReplica, Timeline, connected, until
from simulated_clock import SimulatedClock
from test_replica_failover import DEADLINE_S, SETTINGS, replica

from sluice.config import SecurityConfig
from sluice.sampling.config import ConcurrencyConfig, ReplicasConfig
from sluice.sampling.policy import PolicyEngine
from sluice.sampling.pool import ReplicaPool
from sluice.v1 import rollout_pb2


@dataclass
class Scene:
    """Replicas that are given two samples each, and what was asked of them."""

    pool: ReplicaPool
    engine: PolicyEngine
    time: Timeline
    calls: dict[str, asyncio.Task[rollout_pb2.GenerateResponse]] = field(default_factory=dict)

    def ask(self, *names: str, tokens: int = 6) -> None:
        for name in names:
            request = rollout_pb2.GenerateRequest(request_id=name, text="x", sampling={"max_tokens": tokens})
            self.calls[name] = asyncio.create_task(self.engine.agenerate(request))


@contextlib.asynccontextmanager
async def gateway(*replicas: ScriptedReplica) -> AsyncIterator[Scene]:
    async with contextlib.AsyncExitStack() as stack:
        served = [await stack.enter_async_context(connected(each)) for each in replicas]
        concurrency, clock = ConcurrencyConfig(most_samples=2), SimulatedClock()
        pool = ReplicaPool(
            [target for target, _ in served],
            SecurityConfig(),
            ReplicasConfig(**SETTINGS),
            lambda _: None,
            concurrency=concurrency,
            holds_back=True,
            clock=clock,
        )
        time = Timeline(clock, pool, [(each, cable) for each, (_, cable) in zip(replicas, served, strict=True)])
        polling = asyncio.create_task(pool.run())
        scene = Scene(pool, PolicyEngine(pool, "test", 600.0), time)
        try:
            async with asyncio.timeout(DEADLINE_S):
                yield scene
        finally:
            tasks = {polling, *scene.calls.values()}
            for each in tasks:
                each.cancel()
            await asyncio.wait(tasks)


NAMES = [f"r{number:02}" for number in range(12)]


async def test_requests_begin_in_the_order_in_which_they_came_and_no_more_at_a_time_than_may() -> None:
    one, two = replica("one"), replica("two")
    async with gateway(one, two) as scene:
        scene.ask(*NAMES)  # before any replica is known
        await until(lambda: one.open == two.open == 2)
        for call in scene.calls.values():
            await scene.time.result(call)
        assert (one.most_open, two.most_open) == (2, 2)
        for each in (one, two):
            begun = [request.request_id for request in each.requests]
            assert begun == sorted(begun)
        assert sorted(request.request_id for request in [*one.requests, *two.requests]) == NAMES


async def test_a_request_whose_client_leaves_holds_no_place() -> None:
    only = replica("only")
    async with gateway(only) as scene:
        scene.ask(*NAMES[:2])
        await until(lambda: only.open == 2)
        scene.ask(*NAMES[2:])
        await asyncio.sleep(0)
        for name in (*NAMES[:3], *NAMES[4:]):  # those under way, and all but one of those in line
            scene.calls[name].cancel()
        await scene.time.result(scene.calls[NAMES[3]])
        assert [request.request_id for request in only.requests] == [*NAMES[:2], NAMES[3]]
        scene.ask("later")
        await scene.time.result(scene.calls["later"])


async def test_what_a_lost_replica_had_goes_before_the_line() -> None:
    one, two = replica("one"), replica("two")
    async with gateway(one, two) as scene:
        scene.ask(*NAMES, tokens=60)
        await until(lambda: one.open == two.open == 2)
        begun = {request.request_id for request in one.requests}
        one.state, one.aborts_after = rollout_pb2.REPLICA_STATE_DRAINING, 0
        await scene.time.until(lambda: two.open >= 4)
        assert begun <= {request.request_id.partition("/")[0] for request in two.requests[:6]}


async def test_an_orchestrator_is_not_held_back() -> None:
    only = replica("only")
    async with gateway(only) as scene:
        scene.pool._holds_back = False
        scene.ask(*NAMES)
        await until(lambda: only.open == len(NAMES))
