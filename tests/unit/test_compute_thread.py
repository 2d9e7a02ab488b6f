"""The thread that computes, and callers that do not wait for it."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest

from trainer_svc.service.compute_thread import ComputeThread


async def test_an_error_that_meets_the_cancellation_of_its_caller_is_no_error_of_the_loop() -> None:
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context))
    compute = ComputeThread()
    begun, go, later = threading.Event(), threading.Event(), threading.Event()

    def fail() -> None:
        begun.set()
        go.wait(60)
        raise KeyError("abandoned")

    task = asyncio.create_task(compute.run(fail, deadline_s=60.0, what="a step"))
    await asyncio.to_thread(begun.wait, 60)
    next_job = asyncio.create_task(compute.run(later.set, deadline_s=60.0, what="the next one"))
    await asyncio.sleep(0)
    go.set()
    assert later.wait(60), "the loop stands still until the error is on its way"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await next_job
    del task
    gc.collect()
    assert told == []
    assert await compute.stop(60.0)
