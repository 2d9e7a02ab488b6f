"""Rounds of requests: handed over together, in the order of their names, once nobody is at work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from simulated_clock import LIMIT_S

from sluice.sampling.lockstep import Lockstep


class Admin:
    """A replica's admin service that records its calls."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.resumed = asyncio.Event()

    async def Pause(self, request: Any, timeout: float) -> None:  # noqa: N802, ASYNC109
        assert request.ttl.ToTimedelta().total_seconds() > timeout
        self.told.append("pause")
        self.resumed.clear()

    async def Resume(self, request: Any, timeout: float) -> None:  # noqa: N802, ASYNC109
        self.told.append("resume")
        self.resumed.set()


class Pool:
    """One replica."""

    def __init__(self) -> None:
        self.admin = Admin()

    async def choose(self, _wanted: object) -> Pool:
        return self


class World:
    """Groups that make requests in rounds, and an engine that takes them."""

    def __init__(self) -> None:
        self.pool = Pool()
        self.still = asyncio.Event()
        self.lockstep = Lockstep(self.pool, self.still.set)  # type: ignore[arg-type]

    async def ask(self, name: str) -> None:
        place = await self.lockstep.turn(name)
        self.pool.admin.told.append(f"{name}={place}")
        self.lockstep.arrived(name)

    def group(self, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        async def run() -> None:
            await work()

        task = asyncio.create_task(run())
        self.lockstep.begin(task)
        return task

    async def until_ended(self, *groups: asyncio.Task[None]) -> list[str]:
        async with asyncio.timeout(LIMIT_S):
            while not all(each.done() for each in groups):
                self.lockstep.hand_over()
                self.still.clear()
                await asyncio.sleep(0)
        for each in groups:
            each.result()
        await asyncio.wait_for(self.pool.admin.resumed.wait(), LIMIT_S)
        return self.pool.admin.told


@pytest.mark.parametrize("slow_first", [True, False])
async def test_a_round_waits_for_everyone_and_is_sorted_by_name(slow_first: bool) -> None:
    world = World()

    async def prepared(name: str, turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        await world.ask(name)

    turns = (40, 3) if slow_first else (3, 40)
    told = await world.until_ended(
        world.group(lambda: prepared("g2", turns[0])), world.group(lambda: prepared("g1", turns[1]))
    )
    assert told == ["pause", "g1=0", "g2=1", "resume"]


async def test_episodes_side_by_side_advance_turn_by_turn() -> None:
    world = World()

    async def episode(name: str, turns: int, ended: Callable[[], None]) -> None:
        for turn in range(turns):
            await world.ask(f"{name}.{turn}")
        ended()

    async def group() -> None:
        with world.lockstep.side_by_side(2) as ended:
            await asyncio.gather(episode("a", 1, ended), episode("b", 3, ended))
        await asyncio.sleep(0)  # scoring: the group is at work although its episodes have ended
        assert world.pool.admin.told[-1] != "pause"
        await world.ask("scored")

    told = await world.until_ended(world.group(group))
    assert [each for each in told if "=" in each] == ["a.0=0", "b.0=1", "b.1=0", "b.2=0", "scored=0"]


async def test_a_request_that_is_given_up_holds_nobody_back() -> None:
    world = World()
    first = world.group(lambda: world.ask("a"))
    second = world.group(lambda: world.ask("b"))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await world.until_ended(second) == ["pause", "b=0", "resume"]


async def test_a_group_whose_episodes_are_cancelled_is_counted_out() -> None:
    world = World()

    async def group() -> None:
        async def episode(number: int, ended: Callable[[], None]) -> None:
            try:
                await world.ask(f"e{number}")
            finally:
                ended()

        with world.lockstep.side_by_side(3) as ended:
            await asyncio.gather(*(episode(number, ended) for number in range(3)))

    cancelled = world.group(group)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    other = world.group(lambda: world.ask("x"))
    assert await world.until_ended(other) == ["pause", "x=0", "resume"]
