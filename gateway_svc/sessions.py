"""Sessions of the run as clients name them, and what the orchestrator says of each: asked once for all who ask at a time."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from gateway_svc.exchange import Calls, Credential
from sluice.clock import CLOCK, Clock
from sluice.rpc import SluiceError
from sluice.rpc.access import caller
from sluice.rpc.principals import ANYONE
from sluice.tasks import discard_outcome, settle
from sluice.v1 import common_pb2, session_pb2, session_pb2_grpc


class SessionRef(NamedTuple):
    """How a client names its session; at least one is set.

    Attributes:
        episode_id: The episode, from the path or the header `X-Session-ID`. Without a key it must belong to the `caller`.
        key: One of its keys: the session key to sample it, the settling key to reward, end or renew it.
    """

    episode_id: str
    key: str


UNKNOWN_EPISODE = "UNKNOWN_EPISODE"
"""Reason of the error for a session that the caller cannot see."""

MOST_SESSIONS = 65_536
"""Sessions that are remembered; beyond them the least recently used one is looked up again."""

STRANGER_S = 10.0
"""Seconds for which a session key that opened nothing is refused without asking again. One that another gateway has made meanwhile
works after that."""

MOST_STRANGERS = 16_384
"""Such keys that are remembered; beyond them the oldest is forgotten."""


class Strangers:
    """Session keys that open nothing. Pure: the caller passes the time, in seconds."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, tuple[float, str]] = OrderedDict()

    def check(self, key: str, now: float) -> None:
        """Refuse a key that opened nothing a moment ago.

        Raises:
            SluiceError: NOT_FOUND with the message that it got then.
        """
        until, message = self._known.get(_digest(key), (-math.inf, ""))
        if now < until:
            raise SluiceError.not_found(UNKNOWN_EPISODE, message)

    def note(self, key: str, message: str, now: float) -> None:
        """Remember a key that opens nothing, and what its caller was told; the first time counts."""
        until, _ = self._known.get(_digest(key), (-math.inf, ""))
        if until <= now:
            self.forget(key)
            self._known[_digest(key)] = (now + STRANGER_S, message)
        while len(self._known) > MOST_STRANGERS:
            self._known.popitem(last=False)

    def forget(self, key: str) -> None:
        """Forget a key that opens a session from now on."""
        self._known.pop(_digest(key), None)


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(errors="surrogateescape"), digest_size=16).digest()


@dataclass
class _Asking:
    """A question for a session.

    Attributes:
        task: Asks.
        waiting: How many wait for the answer. When the last one has left, nobody asks any more.
    """

    task: asyncio.Task[session_pb2.FindSessionResponse]
    waiting: int = 0


class FoundSessions:
    """Finds sessions at the orchestrator, and remembers them for as long as it says.

    Args:
        sessions: The orchestrator.
        calls: Makes the calls.
        clock: Their time.

    Attributes:
        strangers: Session keys that open nothing.
    """

    def __init__(self, sessions: session_pb2_grpc.SessionServiceAsyncStub, calls: Calls, clock: Clock = CLOCK) -> None:
        self._sessions, self._calls, self._clock = sessions, calls, clock
        self.strangers = Strangers()
        self._asking: dict[tuple[str, str, bool], _Asking] = {}
        self._found: OrderedDict[tuple[str, str, str, bool], tuple[float, session_pb2.FindSessionResponse]] = (
            OrderedDict()
        )

    async def close(self) -> None:
        """Ask no more."""
        tasks = [each.task for each in self._asking.values()]
        for task in tasks:
            task.cancel()
        await settle(*tasks)

    async def find(self, ref: SessionRef, *, ended: bool) -> session_pb2.FindSessionResponse:
        """Return a session that the caller, or the key, may sample; with `ended` one that they may settle, also after its end.

        Raises:
            SluiceError: NOT_FOUND; FAILED_PRECONDITION with SESSION_ENDED if it ended; PERMISSION_DENIED for the wrong key.
        """
        who = caller().name
        place = (ref.episode_id, ref.key, "" if ref.key else who, ended)
        kept = self._found.get(place)
        if kept is not None and kept[0] > self._clock():
            self._found.move_to_end(place)
            return kept[1]
        found = await self._ask(ref, who, ended=ended)
        if ref.episode_id and found.episode_id != ref.episode_id:
            raise SluiceError.not_found(
                UNKNOWN_EPISODE,
                f"the session key does not open {ref.episode_id!r}: send the key of that session, or leave its name out",
            )
        now = self._clock()
        self._found[place] = (now + found.cacheable.ToNanoseconds() / 1e9, found)
        while len(self._found) > MOST_SESSIONS or next(iter(self._found.values()))[0] < now:
            self._found.popitem(last=False)
        return found

    def forget(self, episode_id: str) -> None:
        """Forget what is known of a session that ended."""
        for place in [place for place, (_, each) in self._found.items() if each.episode_id == episode_id]:
            del self._found[place]

    async def _ask(self, ref: SessionRef, who: str, *, ended: bool) -> session_pb2.FindSessionResponse:
        """Ask the orchestrator for a session: once for all who ask for it meanwhile, and not again soon for a key that opens none."""
        place = (ref.key, "", ended) if ref.key else (ref.episode_id, who, ended)
        if ref.key:
            self.strangers.check(ref.key, self._clock())
        asking = self._asking.get(place)
        if asking is None:
            request = session_pb2.FindSessionRequest(ended=ended)
            if ref.key:
                request.session_key = ref.key
            else:
                request.episode_id = ref.episode_id
            by = own_credential() if ended else common_pb2.CREDENTIAL_UNSPECIFIED
            task = asyncio.create_task(self._calls.call(self._sessions.FindSession, request, who, by))
            discard_outcome(task)
            asking = self._asking[place] = _Asking(task)
        asking.waiting += 1
        try:
            return await asyncio.shield(asking.task)
        except SluiceError as error:
            if ref.key and error.reason == UNKNOWN_EPISODE:
                self.strangers.note(ref.key, error.message, self._clock())
            raise
        finally:
            asking.waiting -= 1
            if not asking.waiting:
                asking.task.cancel()
                if self._asking.get(place) is asking:
                    del self._asking[place]


def own_credential() -> Credential:
    """Return what a caller without a session key has shown: nothing, in a run without principals."""
    return common_pb2.CREDENTIAL_NONE if caller() is ANYONE else common_pb2.CREDENTIAL_PRINCIPAL
