"""Waits for a state of an engine. Its status is meant to be polled: it is read without a call to another process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

from rollout_svc.engines.base import InferenceEngine, Progress, Sample
from rollout_svc.engines.slots.engine import TransformersEngine

DEADLINE_S = 240.0


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


@contextlib.contextmanager
def first_tokens_only(engine: InferenceEngine) -> Iterator[None]:
    """Let a transformers engine sample the first tokens of each request and no more, so that none ends. Commands are done as ever."""
    assert isinstance(engine, TransformersEngine)
    loop = engine._running
    assert loop is not None
    step = loop.batch.step

    def admit_only(waiting, version):
        if len(waiting):
            return step(waiting, version)
        loop._wake.wait()
        loop._wake.clear()
        return []

    loop.batch.step = admit_only
    try:
        yield
    finally:
        loop.batch.step = step
        loop._wake.set()


def step_until_stopped(engine: InferenceEngine, tokens: int) -> threading.Event:
    """After `tokens` new tokens, let the next step of a transformers engine last until it is stopped. The event is set when the step begins."""
    assert isinstance(engine, TransformersEngine)
    loop = engine._running
    assert loop is not None
    step, target, begun = loop.batch.step, loop.batch.generated_tokens + tokens, threading.Event()

    def last(waiting, version):
        if loop.batch.generated_tokens >= target:
            begun.set()
            while not loop._stopping:
                time.sleep(0.001)
        return step(waiting, version)

    loop.batch.step = last
    return begun
