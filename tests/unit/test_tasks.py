"""Work that outlives the cancellation of its caller, and work that gives way to others on its event loop."""

import asyncio
import gc
from itertools import pairwise
from typing import Any

import pytest
from simulated_clock import SimulatedClock

from sluice import tasks
from sluice.tasks import Turn, discard_outcome, first_ended, run_to_end, settle


class Unheard:
    """Collects the event loop's reports of futures whose exception nobody retrieved."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.reports.append(context))


async def fail_when(told: asyncio.Event) -> None:
    await told.wait()
    raise ValueError("failed")


async def test_the_result_and_the_failure_of_work_reach_its_caller() -> None:
    loop = asyncio.get_running_loop()
    assert await run_to_end(loop.run_in_executor(None, lambda: 7)) == 7
    with pytest.raises(ZeroDivisionError):
        await run_to_end(loop.run_in_executor(None, lambda: 1 / 0))


async def test_a_cancelled_caller_stops_the_work_and_ends_after_it() -> None:
    unheard, told = Unheard(), asyncio.Event()
    work = asyncio.create_task(fail_when(told))
    caller = asyncio.create_task(run_to_end(work, on_cancel=told.set))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert work.done()
    assert not work.cancelled()
    del work, caller
    gc.collect()
    assert not unheard.reports


async def test_work_that_fails_after_the_wait_for_it_is_not_reported() -> None:
    unheard, told = Unheard(), asyncio.Event()
    work = asyncio.create_task(fail_when(told))
    assert not await settle(work, timeout_s=0)
    told.set()
    assert await settle(work)
    assert await settle()
    failed = asyncio.create_task(fail_when(told))
    discard_outcome(failed)
    await asyncio.wait({failed})
    del work, failed
    gc.collect()
    assert not unheard.reports


async def test_a_wait_ends_with_the_first_work_or_at_its_time_and_cancels_nothing() -> None:
    clock, told = SimulatedClock(), asyncio.Event()
    long, short = asyncio.create_task(asyncio.Event().wait()), asyncio.create_task(told.wait())
    waits = [
        asyncio.create_task(first_ended(long, short, timeout_s=5.0, clock=clock)),
        asyncio.create_task(first_ended(long, timeout_s=9.0, clock=clock)),
        asyncio.create_task(settle(long, timeout_s=9.0, clock=clock)),
    ]
    await clock.advance(4.9)
    told.set()
    await clock.advance(0.0)
    assert [wait.done() for wait in waits] == [True, False, False]
    await clock.advance(5.0)
    await asyncio.gather(*waits)
    assert not waits[-1].result()
    assert not long.done()
    long.cancel()
    await asyncio.wait([long])


class SimulatedClocks:
    """The time and the CPU time of the thread, for `sluice.tasks`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.cpu = 0.0
        monkeypatch.setattr(tasks.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(tasks.time, "thread_time", lambda: self.cpu)

    def work(self, cpu_ms: float, of_ms: float | None = None) -> None:
        """Use so much of the processor, of a longer time if others use it as well."""
        self.cpu += cpu_ms / 1000
        self.now += (of_ms or cpu_ms) / 1000


async def turns(clocks: SimulatedClocks, parts: int, others_ms: float, slower: int = 1) -> list[int]:
    """Return how many parts of half a millisecond a computation made in each turn beside others on its loop."""
    made, lengths = 0, list[int]()
    done = asyncio.Event()

    async def compute() -> None:
        nonlocal made
        turn = Turn()
        for _ in range(parts):
            clocks.work(0.5, 0.5 * slower)
            made += 1
            await turn.give_way()
        done.set()

    async def others() -> None:
        while not done.is_set():
            lengths.append(made)
            clocks.work(others_ms, others_ms * slower)
            await asyncio.sleep(0)

    await asyncio.gather(compute(), others())
    return [after - before for before, after in pairwise(lengths)]


@pytest.mark.parametrize("slower", [1, 10])
async def test_a_long_computation_gives_way_after_each_turn(monkeypatch: pytest.MonkeyPatch, slower: int) -> None:
    """A turn is two milliseconds of CPU time, also if other processes use the processor."""
    assert await turns(SimulatedClocks(monkeypatch), 16, 1.0, slower) == [4, 4, 4]


async def test_a_long_computation_gets_its_share_of_a_busy_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await turns(SimulatedClocks(monkeypatch), 200, 40.0))[:4] == [20, 20, 20, 20]
