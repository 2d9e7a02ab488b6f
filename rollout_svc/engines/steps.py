"""The steps of an engine, and the stream of a request, which decides when to give the tokens sampled since the last message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

from rollout_svc.engines.base import Pace, Progress, Sample, Stage

ALIVE_S = 1.0
"""Seconds without a message after which a stream gives one without tokens, so that its caller knows that the request is alive. Longer if
the stream gives its tokens less often."""

LEAST_S = 0.001
"""Minimum seconds between two messages of a stream; an engine step takes longer."""


LONGEST_LOOK = 64
"""Maximum number of steps between two calls of a watching function. Within this time, `Steps` forgets a request that has ended."""


class Steps:
    """Counts the steps of an engine, and calls functions that watch its streams after some steps. Used by one thread at a time.

    A sample gets one token in a step. So a stream that wants to know when one of its samples has 64 new tokens is checked once
    in 64 steps, and not after each token.
    """

    def __init__(self) -> None:
        self.count = 0
        """Steps since the start. It stands still when the engine hangs."""
        self._looks: dict[int, list[Callable[[], int]]] = {}

    def watch(self, steps: int, look: Callable[[], int]) -> None:
        """Call `look` after `steps` steps, at most `LONGEST_LOOK`. It returns the steps until its next call, or 0 to stop."""
        steps = min(steps, LONGEST_LOOK)
        self._looks.setdefault(self.count + steps, []).append(look)

    def advance(self) -> None:
        """Count one step."""
        self.count += 1
        for look in self._looks.pop(self.count, ()):
            steps = look()
            if steps:
                self.watch(steps, look)


class StreamedRequest(Protocol):
    """A request in progress whose tokens are read while it is sampled."""

    @property
    def ended(self) -> bool:
        """Return whether all of its samples have ended. Then `wait` returns at once."""

    async def wait(self, seconds: float) -> None:
        """Wait for `seconds`, until all samples have ended, or until the engine's `Steps` wake it. Raise the engine's error."""

    def new_tokens(self) -> int:
        """Return the number of new tokens of the sample that has the most."""

    def parts(self) -> list[Sample]:
        """Return the new tokens of each sample that has new tokens, or that has ended since the last call."""


async def awaiting_weights(gates: Sequence[asyncio.Event], steps: Steps) -> AsyncGenerator[Progress, None]:
    """Yield a sign of life every `ALIVE_S` while a new request waits for other weights, until all gates are open."""
    while not all(gate.is_set() for gate in gates):
        try:
            async with asyncio.timeout(ALIVE_S):
                for gate in gates:
                    await gate.wait()
        except TimeoutError:
            yield Progress([], Stage.SWITCHING, steps.count)


async def paced(
    request: StreamedRequest, pace: Pace, steps: Steps, stage: Callable[[], Stage]
) -> AsyncGenerator[Progress, None]:
    """Yield the progress of a request until all of its samples have ended.

    Args:
        request: The request; the engine's `Steps` watch its `new_tokens`.
        pace: When to give its new tokens.
        steps: Steps of its engine.
        stage: Returns its stage.
    """
    clock = asyncio.get_running_loop().time
    period = max(pace.seconds, LEAST_S)
    quiet = max(period, ALIVE_S)
    give_at, alive_at = clock() + period, clock() + quiet
    ended = False
    while not ended:
        await request.wait(max(0.0, min(give_at, alive_at) - clock()))
        now, ended = clock(), request.ended  # read before the tokens: no token follows once `ended` is set
        due = ended or now >= give_at or request.new_tokens() >= pace.tokens
        parts = request.parts() if due else []
        if due:
            give_at = now + period
        if parts or now >= alive_at:
            alive_at = now + quiet
            yield Progress(parts, stage(), steps.count)
