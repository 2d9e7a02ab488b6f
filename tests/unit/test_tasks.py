"""Work that outlives the cancellation of its caller, and work that gives way to others on its event loop."""

import asyncio
import gc
from typing import Any

import pytest

from sluice import tasks
from sluice.tasks import Turn, discard_outcome, run_to_end, settle


class Unheard:
    """What the event loop reports of futures whose failure nobody took."""

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


async def test_a_long_computation_gives_way_after_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part takes half a millisecond of a simulated clock, and a turn two milliseconds."""
    now, order = 0.0, list[str]()
    monkeypatch.setattr(tasks.time, "monotonic", lambda: now)

    async def compute() -> None:
        nonlocal now
        turn = Turn()
        for part in range(12):
            order.append(str(part))
            now += 0.0005
            await turn.give_way()

    async def others() -> None:
        for _ in range(3):
            order.append("other")
            await asyncio.sleep(0)

    await asyncio.gather(compute(), others())
    assert order == [*"0123", "other", *"4567", "other", *"89", "10", "11", "other"]
