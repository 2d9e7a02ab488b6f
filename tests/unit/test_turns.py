"""Prompts of several tenants take turns by their size, and small ones never wait for large ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.turns import Rounds, Turns

QUANTUM = 64
LARGEST = 300
PUSHED = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, LARGEST)), max_size=80)


def popped(rounds: Rounds) -> list:
    found = []
    while (item := rounds.pop()) is not None:
        found.append(item)
    return found


@given(PUSHED)
def test_each_item_comes_once_and_those_of_a_tenant_in_their_order(pushed) -> None:
    rounds = Rounds(QUANTUM)
    for number, (tenant, size) in enumerate(pushed):
        rounds.push(tenant, size, (tenant, number))
    assert len(rounds) == len(pushed)
    found = popped(rounds)
    assert sorted(number for _, number in found) == list(range(len(pushed)))
    for tenant in "abcd":
        mine = [number for each, number in found if each == tenant]
        assert mine == sorted(mine)


@given(PUSHED)
def test_of_two_that_wait_neither_gets_much_ahead_of_the_other(pushed) -> None:
    rounds = Rounds(QUANTUM)
    left = Counter(tenant for tenant, _ in pushed)
    for tenant, size in pushed:
        rounds.push(tenant, size, (tenant, size))
    served = Counter(dict.fromkeys(left, 0))
    while (item := rounds.pop()) is not None:
        tenant, size = item
        served[tenant] += size
        left[tenant] -= 1
        waiting = [served[each] for each in left if left[each]]
        if waiting:
            assert max(waiting) - min(waiting) <= QUANTUM + LARGEST


@given(st.lists(st.integers(0, LARGEST), max_size=40), st.integers(0, QUANTUM))
def test_a_small_item_comes_within_one_round_whatever_another_tenant_has_waiting(sizes, small) -> None:
    rounds = Rounds(QUANTUM)
    for size in sizes:
        rounds.push("flood", size, size)
    ahead = [rounds.pop() for _ in range(len(sizes) // 2)]
    assert None not in ahead
    rounds.push("agent", small, "mine")
    before = 0
    while (item := rounds.pop()) != "mine":
        before += item
    assert before <= QUANTUM + LARGEST


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Work:
    """Pieces of work that end when a test says so."""

    def __init__(self, turns: Turns) -> None:
        self.turns, self.running, self.tasks, self._ends = turns, [], {}, {}

    def begin(self, name: str, tenant: str, size: int) -> None:
        self._ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._run(name, tenant, size))

    async def _run(self, name: str, tenant: str, size: int) -> None:
        async with self.turns.turn(tenant, size):
            self.running.append(name)
            try:
                await self._ends[name].wait()
            finally:
                self.running.remove(name)

    async def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()
            await self.tasks[name]
        await settle()


async def test_large_pieces_leave_places_for_small_ones() -> None:
    work = Work(Turns(places=4, large_places=2, large=100))
    for number in range(8):
        work.begin(f"large {number}", "flood", 1000)
    await settle()
    assert work.running == ["large 0", "large 1"]
    for number in range(3):
        work.begin(f"small {number}", "agent", 10)
    await settle()
    assert work.running == ["large 0", "large 1", "small 0", "small 1"]
    await work.end("large 0")
    assert work.running[-1] == "large 2", "small pieces do not take what belongs to the large ones"
    await work.end("small 0")
    assert work.running[-1] == "small 2"
    await work.end("small 1", "small 2", *(f"large {number}" for number in range(1, 8)))
    assert work.running == []


async def test_a_place_of_one_that_left_is_given_to_the_next() -> None:
    work = Work(Turns(places=1, large_places=1, large=100))
    for name in ("first", "waits", "last"):
        work.begin(name, "agent", 10)
    await settle()
    work.tasks["waits"].cancel()
    work.tasks["first"].cancel()
    for name in ("first", "waits"):
        with pytest.raises(asyncio.CancelledError):
            await work.tasks[name]
    await settle()
    assert work.running == ["last"]
    await work.end("last")


async def test_a_place_given_to_one_that_is_cancelled_then_is_not_lost() -> None:
    turns = Turns(places=1, large_places=1, large=100)
    entered = []

    async def take(name: str) -> None:
        async with turns.turn("agent", 10):
            entered.append(name)

    async with turns.turn("agent", 10):
        task = asyncio.create_task(take("cancelled"))
        await settle()
    task.cancel()  # its place was given a moment ago
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await take("next")
    assert entered == ["next"]
