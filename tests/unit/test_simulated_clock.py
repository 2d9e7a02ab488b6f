"""The simulated clock wakes those who wait on it as the real one would, and only when a test moves it."""

from __future__ import annotations

import asyncio

import pytest
from simulated_clock import SimulatedClock


async def test_sleepers_wake_in_the_order_of_their_times() -> None:
    clock, seen = SimulatedClock(0.0), []

    async def sleeper(seconds: float) -> None:
        await clock.sleep(seconds)
        seen.append((seconds, clock()))

    sleepers = [asyncio.create_task(sleeper(seconds)) for seconds in (3, 1, 2)]
    await clock.advance(0.5)
    assert seen == []
    await clock.advance(2)
    assert seen == [(1, 1.0), (2, 2.0)]
    await clock.advance(10)
    await asyncio.gather(*sleepers)
    assert seen[-1] == (3, 3.0)
    assert clock() == 12.5
    assert clock.waits == 0


async def test_a_loop_that_sleeps_runs_once_a_period() -> None:
    clock, ticks = SimulatedClock(0.0), []

    async def loop() -> None:
        while True:
            await clock.sleep(1.0)
            ticks.append(clock())

    looping = asyncio.create_task(loop())
    await clock.advance(5.5)
    assert ticks == [1, 2, 3, 4, 5]
    looping.cancel()
    await asyncio.wait([looping])
    assert clock.waits == 0


async def test_a_timeout_ends_its_body_at_its_time_only() -> None:
    clock = SimulatedClock()

    async def limited() -> None:
        async with clock.timeout(5.0):
            await asyncio.Event().wait()

    waiting = asyncio.create_task(limited())
    await clock.advance(4.9)
    assert not waiting.done()
    await clock.advance(0.2)
    with pytest.raises(TimeoutError):
        await waiting


async def test_a_timeout_of_no_time_ends_its_body_at_once() -> None:
    with pytest.raises(TimeoutError):
        async with SimulatedClock().timeout(0.0):
            await asyncio.Event().wait()


async def test_a_body_that_is_done_in_time_is_not_ended() -> None:
    clock = SimulatedClock()
    async with clock.timeout(1.0) as limit:
        await asyncio.sleep(0)
    await clock.advance(2.0)
    assert not limit.expired()
    async with clock.timeout(None):
        await clock.advance(1e9)


async def test_a_cancelled_sleep_is_forgotten() -> None:
    clock = SimulatedClock()
    sleeping = asyncio.create_task(clock.sleep(1.0))
    await clock.advance(0.0)
    sleeping.cancel()
    await asyncio.wait([sleeping])
    assert sleeping.cancelled()
    assert clock.waits == 0
    await clock.advance(2.0)


async def test_a_callback_comes_at_its_time_unless_it_is_cancelled() -> None:
    clock, seen = SimulatedClock(0.0), []
    clock.call_later(2.0, lambda: seen.append(clock()))
    cancelled = clock.call_later(1.0, lambda: seen.append("cancelled"))
    cancelled.cancel()
    assert clock.waits == 1
    await clock.advance(1.9)
    assert seen == []
    await clock.advance(0.2)
    assert seen == [2.0]


async def test_until_moves_time_if_it_is_asked_to() -> None:
    clock = SimulatedClock(0.0)
    sleeping = asyncio.create_task(clock.sleep(7.0))
    await clock.until(sleeping.done, step_s=1.0)
    assert 7.0 <= clock() <= 8.0


async def test_a_timeout_of_nothing_ends_its_body_at_once() -> None:
    with pytest.raises(TimeoutError):
        async with SimulatedClock().timeout(0.0):
            await asyncio.Event().wait()
