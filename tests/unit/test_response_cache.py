"""A repeat of a request_id gets the answer of the first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest

from rollout_svc.responses import ResponseCache
from sluice.rpc import SluiceError
from sluice.v1 import rollout_pb2

Answer = rollout_pb2.GenerateResponse


class Sampler:
    """Samples when it is let, and counts."""

    def __init__(self) -> None:
        self.begun, self.cancelled = 0, 0
        self.let = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> AsyncGenerator[Answer, None]:
        self.begun += 1
        number = self.begun
        try:
            await self.let.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        yield Answer(request_id=str(number))


async def once(answers: ResponseCache, name: str, content: bytes, sampler: Sampler) -> Answer:
    """The one message of an answer."""
    [answer] = [each async for each in answers.once("Generate", name, content, sampler)]
    return answer


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
    first = await once(answers, "a", b"x", sampler)
    assert await once(answers, "a", b"x", sampler) is first
    assert sampler.begun == 1


async def test_concurrent_repeats_are_sampled_once(sampler):
    answers = repeats()
    callers = [await started(once(answers, "a", b"x", sampler)) for _ in range(3)]
    sampler.let.set()
    assert {(await caller).request_id for caller in callers} == {"1"}
    assert sampler.begun == 1


async def test_another_request_under_the_same_id_is_refused_during_and_after(sampler):
    answers = repeats()
    caller = await started(once(answers, "a", b"x", sampler))
    for _ in range(2):
        with pytest.raises(SluiceError, match="REQUEST_ID_REUSED"):
            await once(answers, "a", b"y", sampler)
        sampler.let.set()
        await caller


async def test_each_method_has_its_own_ids(sampler):
    answers = repeats()
    sampler.let.set()
    assert (await once(answers, "a", b"x", sampler)).request_id == "1"
    assert [each.request_id async for each in answers.once("Other", "a", b"y", sampler)] == ["2"]


async def test_sampling_goes_on_while_one_caller_still_waits(sampler):
    answers = repeats()
    first, second = [await started(once(answers, "a", b"x", sampler)) for _ in range(2)]
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not sampler.cancelled
    sampler.let.set()
    assert (await second).request_id == "1"


async def test_sampling_ends_when_nobody_waits_any_longer(sampler):
    answers = repeats()
    callers = [await started(once(answers, "a", b"x", sampler)) for _ in range(2)]
    for caller in callers:
        caller.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    again = await started(once(answers, "a", b"x", sampler))
    assert (sampler.begun, sampler.cancelled) == (2, 1)
    sampler.let.set()
    assert (await again).request_id == "2"


async def test_a_failure_reaches_every_caller_and_is_not_kept(sampler):
    answers = repeats()
    sampler.error = SluiceError.unavailable("ENGINE_FAILED", "it died; retry")
    callers = [await started(once(answers, "a", b"x", sampler)) for _ in range(2)]
    sampler.let.set()
    for caller in callers:
        with pytest.raises(SluiceError, match="ENGINE_FAILED"):
            await caller
    sampler.error = None
    assert (await once(answers, "a", b"x", sampler)).request_id == "2"


async def test_an_answer_is_kept_for_its_time_only(sampler):
    clock = Clock()
    answers = repeats(clock)
    sampler.let.set()
    await once(answers, "a", b"x", sampler)
    clock.now = 9.9
    assert (await once(answers, "a", b"x", sampler)).request_id == "1"
    clock.now = 10.0
    assert (await once(answers, "a", b"other", sampler)).request_id == "2"


async def test_the_oldest_answers_give_way(sampler):
    answers = repeats(most=2)
    sampler.let.set()
    for name in ("a", "b", "c"):
        await once(answers, name, b"x", sampler)
    assert (await once(answers, "c", b"x", sampler)).request_id == "3"
    assert (await once(answers, "a", b"x", sampler)).request_id == "4"


async def test_answers_give_way_by_size_as_well(sampler):
    size = Answer(request_id="1").ByteSize()
    answers = repeats(most_bytes=2 * size)
    sampler.let.set()
    for name in ("a", "b", "c"):
        await once(answers, name, b"x", sampler)
    assert (await once(answers, "b", b"x", sampler)).request_id == "2"
    assert (await once(answers, "a", b"x", sampler)).request_id == "4"


async def test_an_answer_beyond_the_size_is_given_and_not_kept(sampler):
    answers = repeats(most_bytes=1)
    sampler.let.set()
    assert (await once(answers, "a", b"x", sampler)).request_id == "1"
    assert (await once(answers, "a", b"x", sampler)).request_id == "2"


class Stream:
    """Yields the answers that are put into its queue."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Answer | None] = asyncio.Queue()
        self.closed = False

    async def __call__(self) -> AsyncGenerator[Answer, None]:
        try:
            while (message := await self.queue.get()) is not None:
                yield message
        finally:
            self.closed = True


def is_sign(message: Answer) -> bool:
    return not message.request_id


def reader(answers: ResponseCache, stream: Stream) -> AsyncGenerator[Answer, None]:
    return answers.once("GenerateStream", "a", b"x", stream, passing=is_sign)


async def test_a_later_reader_of_a_stream_begins_at_its_beginning():
    answers, stream = repeats(), Stream()
    for name in "123":
        stream.queue.put_nowait(Answer(request_id=name))
    first = reader(answers, stream)
    assert (await anext(first)).request_id == "1"
    second = reader(answers, stream)
    assert [(await anext(second)).request_id for _ in range(3)] == ["1", "2", "3"]
    stream.queue.put_nowait(None)
    assert [each.request_id async for each in first] == ["2", "3"]
    assert [each async for each in second] == []
    assert [each.request_id async for each in reader(answers, Stream())] == ["1", "2", "3"]


async def test_signs_of_life_are_given_to_those_who_wait_and_not_kept():
    answers, stream = repeats(), Stream()
    first = reader(answers, stream)
    for _ in range(3):
        waiting = asyncio.ensure_future(anext(first))
        await asyncio.sleep(0)
        stream.queue.put_nowait(Answer())
        assert is_sign(await waiting)
    stream.queue.put_nowait(Answer(request_id="1"))
    stream.queue.put_nowait(None)
    assert [each.request_id async for each in first] == ["1"]
    assert [each.request_id async for each in reader(answers, stream)] == ["1"]


async def test_a_stream_that_all_readers_left_is_closed_and_leaves_nothing():
    answers, stream = repeats(), Stream()
    first, second = reader(answers, stream), reader(answers, stream)
    stream.queue.put_nowait(Answer(request_id="1"))
    assert await anext(first) == await anext(second)
    await first.aclose()
    assert not stream.closed
    await second.aclose()
    for _ in range(3):
        await asyncio.sleep(0)
    assert stream.closed
    again = Stream()
    again.queue.put_nowait(Answer(request_id="2"))
    assert (await anext(reader(answers, again))).request_id == "2"
