"""What the dialects need of the sessions of external agents. The gateway's core provides it; tests of the dialects do, too."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import AsyncGenerator
from typing import NamedTuple, Protocol

from sluice.openai.fields import ClientRequest
from sluice.openai.shown import Begun, Delta, Result
from sluice.rpc import SluiceError
from sluice.v1 import episode_pb2, session_pb2, tokens_pb2


class SessionRef(NamedTuple):
    """How a client names its session; at least one is set.

    Attributes:
        episode_id: The episode, from the path or the header `X-Session-ID`. Without a key it must belong to the `caller`.
        key: One of its keys: the session key to sample it, the settling key to reward, end or renew it.
    """

    episode_id: str
    key: str


class RequestIdentity(NamedTuple):
    """What makes two requests of a session the same.

    Attributes:
        digest: Digest of dialect, body, and the name that the client gives the request, if it does; xxh3-128, 16 bytes.
        is_retry: Whether the client says that it repeats an earlier request. It does not say so of one with a name, which is itself.
        retry: Which retry it is, from 1; 0 for a request with a name.
    """

    digest: bytes
    is_retry: bool
    retry: int = 0


class ServedModel(NamedTuple):
    """The model of the run.

    Attributes:
        name: Its name.
        max_model_len: Most tokens of prompt and continuation together.
    """

    name: str
    max_model_len: int


class Opened(NamedTuple):
    """An episode that was leased and opened."""

    task: episode_pb2.LeasedTask
    episode: episode_pb2.OpenEpisodeResponse


UNKNOWN_EPISODE = "UNKNOWN_EPISODE"
"""Reason of the error for a session that the caller cannot see."""

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


class Sessions(Protocol):
    """The sessions of one run.

    Every method raises SluiceError: NOT_FOUND for a session that the caller cannot see, PERMISSION_DENIED for the wrong one of its keys.
    """

    async def model(self) -> ServedModel:
        """Return the model that sessions sample from."""
        ...

    async def find(self, ref: SessionRef) -> session_pb2.FindSessionResponse:
        """Return an open session; FAILED_PRECONDITION with SESSION_ENDED if it ended."""
        ...

    async def find_ended(self, ref: SessionRef) -> session_pb2.FindSessionResponse:
        """Return a session that the caller, or the key, may settle; also after its end."""
        ...

    def generate(
        self, session: session_pb2.FindSessionResponse, request: ClientRequest, identity: RequestIdentity
    ) -> AsyncGenerator[Begun | Delta | Result, None]:
        """Sample and record.

        Waits while no replica may serve the request. Yields `Begun` when a replica has accepted the prompt, text as it comes if it is
        known to be part of the message, and the result at last, when it is in the journal. The client has the result when the next
        part is asked for; if the generator is closed before, the client left without it.
        """
        ...

    async def conversation(
        self, session: session_pb2.FindSessionResponse, generation_id: str
    ) -> tokens_pb2.Conversation:
        """Return the messages up to the end of a generation, the sampled one included."""
        ...

    async def count_tokens(
        self, session: session_pb2.FindSessionResponse, conversation: tokens_pb2.Conversation
    ) -> int:
        """Return how many tokens a conversation has as a prompt."""
        ...

    async def open(self, request_id: str, wait_s: float) -> Opened:
        """Lease and open one episode for the caller. Idempotent by the id, unless that is empty."""
        ...

    async def renew(self, ref: SessionRef) -> float:
        """Prolong the lease of a session, and return its seconds; FAILED_PRECONDITION with SESSION_ENDED if the lease ended."""
        ...

    async def reward(self, ref: SessionRef, request: episode_pb2.RecordRewardRequest) -> None:
        """Record a reward, also after the end of the session if its submission says so."""
        ...

    async def submit(
        self, ref: SessionRef, request: episode_pb2.SubmitTrajectoryRequest
    ) -> episode_pb2.SubmitTrajectoryResponse:
        """End a session. Idempotent."""
        ...

    async def abandon(self, ref: SessionRef, request: episode_pb2.AbandonEpisodeRequest) -> None:
        """Give a session up. Idempotent."""
        ...
