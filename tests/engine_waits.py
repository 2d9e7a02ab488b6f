"""Waits for a state of an engine. Its status is meant to be polled: it is read without a call to another process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from rollout_svc.engines.base import InferenceEngine, Progress, Sample

DEADLINE_S = 60.0


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def until_tokens(engine: InferenceEngine, count: int) -> None:
    """Wait until the engine has sampled `count` more tokens."""
    target = engine.status().generated_tokens + count
    await until(lambda: engine.status().generated_tokens >= target)


async def parts_of(stream: AsyncIterator[Progress]) -> AsyncIterator[Sample]:
    """Yield the parts of a stream one by one."""
    async for progress in stream:
        for part in progress.parts:
            yield part
