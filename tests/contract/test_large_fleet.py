"""The choice of a replica in a fleet of more than are compared: as good as in a small one, and at a cost that does not grow with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from scripted_replica import until

from benchmarks.children import free_port
from benchmarks.simulated_services import Counting, Load, SimulatedReplica, serving
from sluice.config import SecurityConfig
from sluice.sampling.config import ConcurrencyConfig, ReplicasConfig
from sluice.sampling.pool import ReplicaPool
from sluice.versions import BASE, Version

REPLICAS = 80
SAMPLES = 16
DEADLINE_S = 120.0


@pytest.fixture
async def pool() -> AsyncIterator[ReplicaPool]:
    """So many replicas without work, behind one server."""
    port = free_port()
    targets = [f"127.2.0.{number + 1}:{port}" for number in range(REPLICAS)]
    replica, changed = SimulatedReplica("replica", Load(1.0, 0.0, 1)), asyncio.Event()
    concurrency = ConcurrencyConfig(most_samples=SAMPLES)
    async with serving(targets, lambda server: server.add_generic_rpc_handlers(replica.handlers()), Counting()):
        found = ReplicaPool(
            targets, SecurityConfig(), ReplicasConfig(), lambda _: changed.set(), concurrency=concurrency, group=SAMPLES
        )
        running = asyncio.create_task(found.run())
        async with asyncio.timeout(DEADLINE_S):
            while sum(not each.why_not() for each in found.replicas) < REPLICAS:
                changed.clear()
                await changed.wait()
        yield found
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


def picked(pool: ReplicaPool, *keys: str) -> str:
    replica = pool.pick(BASE, keys=keys)
    assert replica is not None
    return replica.target


async def test_replicas_with_as_much_to_do_are_chosen_in_turn(pool: ReplicaPool) -> None:
    assert {picked(pool) for _ in range(REPLICAS)} == {each.target for each in pool.replicas}


async def test_a_replica_with_more_to_do_is_passed_over(pool: ReplicaPool) -> None:
    busy = pool.replicas[:60]  # of 64 that follow each other, four have less to do
    for each in busy:
        each.in_flight += SAMPLES
    assert not {picked(pool) for _ in range(REPLICAS)} & {each.target for each in busy}


async def test_a_request_goes_to_the_replica_that_has_its_prefix_wherever_the_turn_is(pool: ReplicaPool) -> None:
    home = await pool.choose(BASE, keys=("episode",))
    assert {picked(pool, "episode") for _ in range(REPLICAS)} == {home.target}


async def test_the_last_replica_that_will_do_is_found(pool: ReplicaPool) -> None:
    only = pool.replicas[3]
    others = {each.target for each in pool.replicas if each is not only}
    avoiding = pool.pick(BASE, avoid=others)
    assert avoiding is not None
    assert avoiding.target == only.target, "it alone is not avoided"
    assert pool.pick(Version(1, 0)) is None, "no replica serves that version"
    only.version = Version(1, 0)
    newest = pool.pick(Version(1, 0))
    assert newest is not None
    assert newest.target == only.target


async def test_a_fleet_has_room_for_as_many_groups_as_its_replicas_are_given(pool: ReplicaPool) -> None:
    room = sum(each.limit.samples for each in pool.replicas) // SAMPLES
    async with asyncio.timeout(DEADLINE_S):
        # With a tick, which counts them; while a replica does not answer, there is less room.
        await until(lambda: pool.has_room(room - 1) and not pool.has_room(room))
