"""One sampling for all requests with the same body: who reads it, how long it outlives them, and when it is too late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import grpc
import pytest
from simulated_clock import SimulatedClock

from gateway_svc.shared import Part, SharedSampling, paced
from sluice.openai.answers import Begun
from sluice.rpc import SluiceError

DEADLINE_S, LINGER_S, KEEPALIVE_S = 3600.0, 60.0, 5.0


class Source:
    """Yields one part, then a second one when the test says so."""

    def __init__(self) -> None:
        self.more = asyncio.Event()
        self.ended = asyncio.Event()

    async def parts(self) -> AsyncGenerator[Part, None]:
        try:
            yield Begun("one", 1)
            await self.more.wait()
            yield Begun("two", 2)
        finally:
            self.ended.set()


async def read(shared: SharedSampling) -> list[str]:
    return [part.request_id async for part in shared.read() if isinstance(part, Begun)]


async def left(reader: asyncio.Task[list[str]]) -> None:
    reader.cancel()
    await asyncio.wait({reader})


async def test_each_reader_gets_all_parts_from_the_beginning() -> None:
    source, clock = Source(), SimulatedClock()
    shared = SharedSampling(source.parts(), DEADLINE_S, lambda: LINGER_S, clock)
    early = asyncio.create_task(read(shared))
    await clock.advance(1.0)
    late = asyncio.create_task(read(shared))
    await clock.advance(1.0)
    assert shared.readers == 2
    source.more.set()
    assert await early == await late == ["one", "two"]
    assert shared.readers == 0


async def test_it_continues_for_its_time_without_a_reader() -> None:
    source, clock = Source(), SimulatedClock()
    shared = SharedSampling(source.parts(), DEADLINE_S, lambda: LINGER_S, clock)
    reader = asyncio.create_task(read(shared))
    await clock.advance(1.0)
    await left(reader)
    await clock.advance(LINGER_S - 1)
    assert not source.ended.is_set()
    await clock.advance(2.0)
    assert source.ended.is_set()
    assert shared.task.cancelled()


async def test_whoever_comes_in_that_time_keeps_it() -> None:
    source, clock = Source(), SimulatedClock()
    shared = SharedSampling(source.parts(), DEADLINE_S, lambda: LINGER_S, clock)
    for _ in range(3):
        reader = asyncio.create_task(read(shared))
        await clock.advance(LINGER_S * 2)
        await left(reader)
        await clock.advance(LINGER_S - 1)
    reader = asyncio.create_task(read(shared))
    await clock.advance(1.0)
    source.more.set()
    assert await reader == ["one", "two"]
    await clock.advance(0.0)
    assert clock.waits == 0


async def test_nothing_waits_on_after_an_end_without_a_reader() -> None:
    source, clock = Source(), SimulatedClock()
    shared = SharedSampling(source.parts(), DEADLINE_S, lambda: LINGER_S, clock)
    reader = asyncio.create_task(read(shared))
    await clock.advance(1.0)
    await left(reader)
    source.more.set()
    await clock.advance(0.0)
    assert shared.task.done()
    assert clock.waits == 0


async def test_beyond_its_deadline_it_is_too_late() -> None:
    source, clock = Source(), SimulatedClock()
    shared = SharedSampling(source.parts(), DEADLINE_S, lambda: LINGER_S, clock)
    reader = asyncio.create_task(read(shared))
    await clock.advance(DEADLINE_S - 1)
    assert not reader.done()
    await clock.advance(2.0)
    with pytest.raises(SluiceError) as caught:
        await reader
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "REQUEST_DEADLINE")
    assert source.ended.is_set()


async def test_a_paced_source_shows_signs_of_life_until_its_deadline() -> None:
    source, clock, seen = Source(), SimulatedClock(), list[Begun | None]()

    async def read_paced() -> None:
        async for part in paced(source.parts(), KEEPALIVE_S, 4 * KEEPALIVE_S, clock):
            assert part is None or isinstance(part, Begun)
            seen.append(part)

    reading = asyncio.create_task(read_paced())
    await clock.advance(KEEPALIVE_S - 1)
    assert seen == [Begun("one", 1)]
    await clock.advance(2 * KEEPALIVE_S)
    assert seen[1:] == [None, None]
    source.more.set()
    await clock.advance(0.0)
    assert seen[3:] == [Begun("two", 2)]
    await clock.advance(2 * KEEPALIVE_S)
    with pytest.raises(SluiceError, match=r"capture\.deadlines\.request_s"):
        await reading
    assert source.ended.is_set()
