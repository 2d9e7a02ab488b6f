"""Rounds of requests, so that runs with the same seed sample the same tokens.

An engine's arithmetic depends on which requests it computes together. In a deterministic run the requests of all episodes are held back
until every episode has ended or waits for a request, and no further group may start. Then sampling is paused, the requests are handed
over with priorities in the order of their names, and when the engine has all of them, sampling resumes.

`Lockstep` counts how many are at work: each group from its start to its end, or each of its episodes instead while they run side by
side. While its request is held back, a group or episode is not at work.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import grpc
import structlog
from google.protobuf.duration_pb2 import Duration

from sluice.sampling.pool import ReplicaPool
from sluice.sampling.replica import Replica
from sluice.v1 import rollout_pb2
from sluice.versions import BASE

log = structlog.get_logger(__name__)

_OWNER = "lockstep"

_HAND_OVER_S = 60.0
"""Seconds for the requests of one round to reach the engine. After that, sampling resumes with those that have."""


class Lockstep:
    """Holds requests back, and hands them over in rounds.

    Args:
        on_still: Called when no group or episode is at work, because `hand_over` may be due.
    """

    def __init__(self, pool: ReplicaPool, on_still: Callable[[], None]) -> None:
        self._pool, self._on_still = pool, on_still
        self._at_work = 0
        self._held: dict[str, asyncio.Future[int]] = {}
        self._outside: set[str] = set()
        self._all_inside = asyncio.Event()
        self._round: asyncio.Task[None] | None = None

    def begin(self, group: asyncio.Task[None]) -> None:
        """Count a group as at work until its task ends."""
        self._at_work += 1
        group.add_done_callback(lambda _: self._stop_working())

    @contextlib.contextmanager
    def side_by_side(self, episodes: int) -> Iterator[Callable[[], None]]:
        """Count the episodes of a group instead of the group while the block runs. Each episode calls the yielded function when it ends."""
        left = episodes
        self._at_work += episodes - 1

        def ended() -> None:
            nonlocal left
            left -= 1
            if left > 0:  # after the last episode the group itself is at work again
                self._stop_working()

        try:
            yield ended
        finally:
            if left > 0:
                self._at_work -= left - 1
            left = 0

    async def turn(self, name: str) -> int:
        """Wait until a request may be handed over; return its place in the round."""
        released: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._held[name] = released
        self._stop_working()
        try:
            return await released
        except asyncio.CancelledError:
            if self._held.pop(name, None) is not None:
                self._at_work += 1  # the episode that made the request is at work until it ends
            self.arrived(name)
            raise

    def arrived(self, name: str) -> None:
        """Note that the engine has a request, or will never have it."""
        self._outside.discard(name)
        if not self._outside:
            self._all_inside.set()

    def hand_over(self) -> None:
        """Begin a round if nothing is at work. Call it only when no group may start before a running group has ended."""
        if self._at_work or not self._held or (self._round is not None and not self._round.done()):
            return
        held, self._held = self._held, {}
        self._at_work += len(held)
        self._outside = set(held)
        self._all_inside.clear()
        self._round = asyncio.create_task(self._hand_over(held), name="lockstep")

    def _stop_working(self) -> None:
        self._at_work -= 1
        if not self._at_work:
            self._on_still()

    async def _hand_over(self, held: dict[str, asyncio.Future[int]]) -> None:
        replica: Replica | None = None
        try:
            async with asyncio.timeout(_HAND_OVER_S):
                replica = await self._pool.choose(BASE)
                ttl = Duration()
                ttl.FromMilliseconds(int(2000 * _HAND_OVER_S))
                request = rollout_pb2.PauseRequest(mode=rollout_pb2.PAUSE_MODE_KEEP, owner=_OWNER, ttl=ttl)
                await replica.admin.Pause(request, timeout=_HAND_OVER_S)
                self._release(held)
                await self._all_inside.wait()
        except (TimeoutError, grpc.aio.AioRpcError) as error:
            log.warning("a round of requests was not sampled together; this run cannot be repeated", error=repr(error))
        finally:
            self._release(held)
            if replica is not None:
                resume = rollout_pb2.ResumeRequest(owner=_OWNER)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await replica.admin.Resume(resume, timeout=_HAND_OVER_S)

    @staticmethod
    def _release(held: dict[str, asyncio.Future[int]]) -> None:
        for place, name in enumerate(sorted(held)):
            if not held[name].done():
                held[name].set_result(place)
