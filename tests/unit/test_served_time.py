"""What a group's deadline counts: the time in which a replica served it or its environment worked."""

from __future__ import annotations

import asyncio

import pytest
from simulated_clock import SimulatedClock

from sluice.sampling.served import OverdueError, Place, ServedDeadline, ServedTime, WaitingRequests, place_of
from sluice.v1 import rollout_pb2


def test_time_counts_while_nothing_is_asked_for_and_while_a_replica_serves() -> None:
    time = ServedTime(0.0)
    assert time.seconds(2.0) == 2.0, "the environment poses the task"
    time.move(None, Place.NOWHERE, 2.0)
    assert (time.counts, time.nowhere) == (False, True)
    time.move(Place.NOWHERE, Place.QUEUED, 10.0)
    assert (time.seconds(20.0), time.nowhere) == (2.0, False)
    time.move(Place.QUEUED, Place.SERVED, 20.0)
    time.move(None, Place.QUEUED, 21.0)
    assert time.counts, "one of two requests is served"
    time.move(Place.SERVED, None, 23.0)
    time.move(Place.QUEUED, None, 50.0)
    assert time.seconds(51.0) == 2.0 + 3.0 + 1.0
    time.move(None, Place.LIMITED, 51.0)
    assert (time.seconds(99.0), time.nowhere) == (6.0, False)


@pytest.mark.parametrize(
    ("stage", "place"),
    [
        (rollout_pb2.REQUEST_STAGE_UNSPECIFIED, Place.QUEUED),
        (rollout_pb2.REQUEST_STAGE_QUEUED, Place.QUEUED),
        (rollout_pb2.REQUEST_STAGE_PAUSED, Place.QUEUED),
        (rollout_pb2.REQUEST_STAGE_SWITCHING, Place.QUEUED),
        (rollout_pb2.REQUEST_STAGE_RUNNING, Place.SERVED),
    ],
)
def test_a_replica_says_whether_it_works_at_a_request(stage, place) -> None:
    assert place_of(rollout_pb2.StreamChunk(stage=stage)) is place


async def limited(deadline: ServedDeadline, work) -> None:
    async with deadline.limit():
        await work()


async def test_a_block_ends_when_it_was_served_for_too_long() -> None:
    clock = SimulatedClock()
    deadline = ServedDeadline(10.0, clock)

    async def work() -> None:
        with deadline.request() as at:
            await clock.sleep(100.0)
            at(Place.SERVED)
            await clock.sleep(6.0)
            at(Place.QUEUED)
            await clock.sleep(100.0)
            at(Place.SERVED)
            await clock.sleep(100.0)

    task = asyncio.create_task(limited(deadline, work))
    await clock.advance(209.0)
    assert not task.done()
    await clock.advance(2.0)
    with pytest.raises(OverdueError, match="10 s of work"):
        await task


async def test_each_part_has_a_deadline_of_its_own_and_the_whole_counts_none_of_their_time() -> None:
    clock = SimulatedClock()
    deadline = ServedDeadline(10.0, clock)
    replica_is_back = asyncio.Event()

    async def episode(own: Place, seconds: float) -> float:
        async with deadline.part() as part:
            with part.request() as at:
                at(own)
                await clock.sleep(seconds)
                if own is Place.NOWHERE:
                    await replica_is_back.wait()
        return clock()

    async def work() -> list[object]:
        places = (Place.SERVED, 9.0), (Place.SERVED, 11.0), (Place.NOWHERE, 50.0)
        return await asyncio.gather(*(episode(*each) for each in places), return_exceptions=True)

    async def whole() -> list[object]:
        async with deadline.limit():
            await clock.sleep(5.0)
            found = await work()
            await clock.sleep(4.0)
            return found

    began = clock()
    task = asyncio.create_task(whole())
    await clock.advance(30.0)
    assert deadline.nowhere
    await clock.advance(30.0)
    assert not task.done()
    replica_is_back.set()
    await clock.advance(4.0)
    done, late, waited = await task
    assert (done, waited) == (began + 14.0, began + 60.0)
    assert isinstance(late, OverdueError)
    assert (deadline.nowhere, clock.waits) == (False, 0)


async def test_a_timeout_of_the_block_itself_is_not_that_of_the_deadline() -> None:
    clock = SimulatedClock()
    deadline = ServedDeadline(10.0, clock)

    async def work() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError) as error:
        await limited(deadline, work)
    assert not isinstance(error.value, OverdueError)
    assert clock.waits == 0


async def test_a_block_without_a_limit_lasts_as_long_as_it_likes() -> None:
    clock = SimulatedClock()
    task = asyncio.create_task(limited(ServedDeadline(None, clock), lambda: clock.sleep(1e9)))
    await clock.advance(1e9)
    await task


async def test_deadlines_count_together_how_many_of_their_requests_wait_for_a_replica() -> None:
    clock, waiting = SimulatedClock(), WaitingRequests()
    one, other = (ServedDeadline(60.0, clock, waiting) for _ in range(2))
    with one.request() as first, other.request() as second:
        assert waiting.count == 2
        first(Place.QUEUED)
        async with other.part() as part:
            with part.request():
                assert (waiting.count, one.nowhere, other.nowhere) == (2, False, True)
            assert waiting.count == 1
        second(Place.SERVED)
        assert (waiting.count, other.nowhere) == (0, False)
        first(Place.NOWHERE)
        assert (waiting.count, one.nowhere) == (1, True)
    assert waiting.count == 0
