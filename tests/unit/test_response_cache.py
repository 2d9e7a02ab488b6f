"""A repeat of a request_id gets the answer of the first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rollout_svc.servicer import ResponseCache
from sluice.rpc import SluiceError
from sluice.v1 import rollout_pb2

Answer = rollout_pb2.GenerateResponse


class Sampler:
    """Samples when it is let, and counts."""

    def __init__(self) -> None:
        self.begun, self.cancelled = 0, 0
        self.let = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> Answer:
        self.begun += 1
        number = self.begun
        try:
            await self.let.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return Answer(request_id=str(number))


@pytest.fixture
async def sampler():
    return Sampler()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def repeats(clock: Callable[[], float] | None = None, most: int = 100, most_bytes: int = 1 << 20) -> ResponseCache:
    return ResponseCache(10.0, most, most_bytes, clock or Clock())


async def started(waiting: Awaitable[Answer]) -> asyncio.Task[Answer]:
    """A caller that got as far as it can without an answer."""
    task = asyncio.ensure_future(waiting)
    for _ in range(3):
        await asyncio.sleep(0)
    return task


async def test_a_repeat_after_the_end_is_not_sampled_again(sampler):
    answers = repeats()
    sampler.let.set()
    first = await answers.once("a", b"x", sampler)
    assert await answers.once("a", b"x", sampler) is first
    assert sampler.begun == 1


async def test_concurrent_repeats_are_sampled_once(sampler):
    answers = repeats()
    callers = [await started(answers.once("a", b"x", sampler)) for _ in range(3)]
    sampler.let.set()
    assert {(await caller).request_id for caller in callers} == {"1"}
    assert sampler.begun == 1


async def test_another_request_under_the_same_id_is_refused_during_and_after(sampler):
    answers = repeats()
    caller = await started(answers.once("a", b"x", sampler))
    for _ in range(2):
        with pytest.raises(SluiceError, match="REQUEST_ID_REUSED"):
            await answers.once("a", b"y", sampler)
        sampler.let.set()
        await caller


async def test_sampling_goes_on_while_one_caller_still_waits(sampler):
    answers = repeats()
    first, second = [await started(answers.once("a", b"x", sampler)) for _ in range(2)]
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not sampler.cancelled
    sampler.let.set()
    assert (await second).request_id == "1"


async def test_sampling_ends_when_nobody_waits_any_longer(sampler):
    answers = repeats()
    callers = [await started(answers.once("a", b"x", sampler)) for _ in range(2)]
    for caller in callers:
        caller.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    again = await started(answers.once("a", b"x", sampler))
    assert (sampler.begun, sampler.cancelled) == (2, 1)
    sampler.let.set()
    assert (await again).request_id == "2"


async def test_a_failure_reaches_every_caller_and_is_not_kept(sampler):
    answers = repeats()
    sampler.error = SluiceError.unavailable("ENGINE_FAILED", "it died; retry")
    callers = [await started(answers.once("a", b"x", sampler)) for _ in range(2)]
    sampler.let.set()
    for caller in callers:
        with pytest.raises(SluiceError, match="ENGINE_FAILED"):
            await caller
    sampler.error = None
    assert (await answers.once("a", b"x", sampler)).request_id == "2"


async def test_an_answer_is_kept_for_its_time_only(sampler):
    clock = Clock()
    answers = repeats(clock)
    sampler.let.set()
    await answers.once("a", b"x", sampler)
    clock.now = 9.9
    assert (await answers.once("a", b"x", sampler)).request_id == "1"
    clock.now = 10.0
    assert (await answers.once("a", b"other", sampler)).request_id == "2"


async def test_the_oldest_answers_give_way(sampler):
    answers = repeats(most=2)
    sampler.let.set()
    for name in ("a", "b", "c"):
        await answers.once(name, b"x", sampler)
    assert (await answers.once("c", b"x", sampler)).request_id == "3"
    assert (await answers.once("a", b"x", sampler)).request_id == "4"


async def test_answers_give_way_by_size_as_well(sampler):
    size = Answer(request_id="1").ByteSize()
    answers = repeats(most_bytes=2 * size)
    sampler.let.set()
    for name in ("a", "b", "c"):
        await answers.once(name, b"x", sampler)
    assert (await answers.once("b", b"x", sampler)).request_id == "2"
    assert (await answers.once("a", b"x", sampler)).request_id == "4"


async def test_an_answer_beyond_the_size_is_given_and_not_kept(sampler):
    answers = repeats(most_bytes=1)
    sampler.let.set()
    assert (await answers.once("a", b"x", sampler)).request_id == "1"
    assert (await answers.once("a", b"x", sampler)).request_id == "2"
