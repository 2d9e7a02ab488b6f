"""When a stream gives its tokens: after its period, with enough of them, at the end, and nothing but a sign in between."""

from __future__ import annotations

import asyncio

from rollout_svc.engines.base import FinishReason, Pace, Progress, Sample, Stage
from rollout_svc.engines.steps import ALIVE_S, Steps, paced


def test_a_look_comes_after_the_steps_that_it_asked_for():
    steps, looked = Steps(), []

    def look() -> int:
        looked.append(steps.count)
        return {3: 4, 7: 1}.get(steps.count, 0)

    steps.watch(3, look)
    for _ in range(20):
        steps.advance()
    assert looked == [3, 7, 8]
    assert steps.count == 20


def test_a_far_look_comes_in_between_so_that_an_ended_request_is_forgotten():
    steps, looked = Steps(), []

    def look() -> int:
        looked.append(steps.count)
        return 10**9 if len(looked) < 2 else 0

    steps.watch(10**9, look)
    for _ in range(500):
        steps.advance()
    assert looked == [64, 128]


class Request:
    """One sample, which gets its tokens when the test says so."""

    def __init__(self) -> None:
        self.ended, self.tokens, self.given = False, 0, 0
        self.ready = asyncio.Event()

    async def wait(self, seconds: float) -> None:
        if self.ended:
            return
        await self.ready.wait()
        self.ready.clear()

    def new_tokens(self) -> int:
        return self.tokens - self.given

    def parts(self) -> list[Sample]:
        new, offset, self.given = self.new_tokens(), self.given, self.tokens
        reason = FinishReason.LENGTH if self.ended else None
        return [Sample(0, [1] * new, [0.0] * new, [], reason, offset=offset)] if new or self.ended else []


class Clock:
    """A loop whose time the test sets."""

    def __init__(self, monkeypatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now, raising=False)


class Stream:
    """A stream at a pace, driven by a clock."""

    def __init__(self, monkeypatch, pace: Pace) -> None:
        self.request, self.clock = Request(), Clock(monkeypatch)
        self.given: list[Progress] = []
        self._task = asyncio.create_task(self._read(pace))

    async def _read(self, pace: Pace) -> None:
        async for progress in paced(self.request, pace, Steps(), lambda: Stage.RUNNING):
            self.given.append(progress)

    async def wake(self, after_s: float = 0.0, tokens: int = 0, *, end: bool = False) -> list[int]:
        """Let time pass and tokens come; return the numbers of tokens of the messages that follow."""
        before = len(self.given)
        await asyncio.sleep(0)
        self.clock.now += after_s
        self.request.tokens += tokens
        self.request.ended = end
        self.request.ready.set()
        for _ in range(4):
            await asyncio.sleep(0)
        return [sum(len(part.token_ids) for part in each.parts) for each in self.given[before:]]


async def test_tokens_wait_for_the_period(monkeypatch):
    stream = Stream(monkeypatch, Pace(seconds=0.5))
    assert await stream.wake(0.2, tokens=3) == []
    assert await stream.wake(0.3, tokens=1) == [4]
    assert await stream.wake(0.4, tokens=1) == []
    assert await stream.wake(0.0, end=True) == [1]


async def test_enough_tokens_end_the_period(monkeypatch):
    stream = Stream(monkeypatch, Pace(seconds=30.0, tokens=8))
    assert await stream.wake(0.0, tokens=8) == [8]
    assert await stream.wake(0.0, tokens=7) == []
    assert await stream.wake(0.0, tokens=1) == [8]
    assert await stream.wake(0.0, end=True) == [0]


async def test_a_sign_of_life_comes_after_a_second(monkeypatch):
    stream = Stream(monkeypatch, Pace(seconds=0.4))
    assert await stream.wake(0.4) == []
    assert await stream.wake(0.5) == []
    assert await stream.wake(0.1) == [0]
    assert not stream.given[0].parts
    assert await stream.wake(0.4, tokens=2) == [2]
    assert await stream.wake(end=True) == [0]


async def test_a_longer_period_brings_no_signs_of_life_in_between(monkeypatch):
    stream = Stream(monkeypatch, Pace(seconds=2.5))
    assert await stream.wake(ALIVE_S, tokens=2) == []
    assert await stream.wake(ALIVE_S) == []
    assert await stream.wake(0.5) == [2]
    assert await stream.wake(2.0) == []
    assert await stream.wake(0.5) == [0]
    assert not stream.given[1].parts
    assert await stream.wake(end=True) == [0]
    assert stream.given[-1].parts[0].finish_reason is FinishReason.LENGTH


async def test_tokens_of_an_end_that_comes_while_the_reader_is_busy_are_given(monkeypatch):
    request = Request()
    Clock(monkeypatch)
    stream = paced(request, Pace(seconds=30.0, tokens=2), Steps(), lambda: Stage.RUNNING)
    request.tokens = 2
    request.ready.set()
    await anext(stream)
    request.tokens, request.ended = 5, True
    assert [len(part.token_ids) async for progress in stream for part in progress.parts] == [3]
