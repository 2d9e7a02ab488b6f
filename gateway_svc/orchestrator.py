"""The orchestrator as a gateway sees it: calls to it, how long each is retried, and the sessions found there.

Every request makes the same three calls. On one shared stream each of them costs less CPU time than as a separate call. A call or answer
that is larger than a message travels in parts, and other calls get through between the parts. An orchestrator of v0.1.0 has no such
stream: it gets separate calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

import grpc
import structlog
from google.rpc.status_pb2 import Status

from sluice.backoff import Backoff
from sluice.clock import CLOCK, Clock
from sluice.limits import MAX_BATCH_BYTES, MAX_MESSAGE_BYTES
from sluice.rpc import SluiceError
from sluice.rpc.access import caller
from sluice.rpc.channel import REQUEST_ID
from sluice.rpc.parts import PartialMessages, split
from sluice.rpc.principals import ANYONE
from sluice.tasks import discard_outcome, settle
from sluice.v1 import common_pb2, episode_pb2, session_pb2, session_pb2_grpc

Stream: TypeAlias = "grpc.aio.StreamStreamCall[session_pb2.ExchangeRequest, session_pb2.ExchangeResponse]"


_BYTES_PER_S = 4 << 20
"""A large call gets one more second per this number of bytes."""

ON_BEHALF_OF = "on-behalf-of"
"""Metadata with the name of the principal for whom a gateway makes a call."""

OLD_S = 30.0
"""Seconds after which to try the stream again at an orchestrator that had none: it may have been upgraded."""

_OLD = "OLD_ORCHESTRATOR"
"""Reason of errors because the orchestrator has no such stream."""

SETTLED_BY = "settled-by"
"""Metadata with what lets a caller settle an episode: the name of a Credential, without its prefix."""

ORCHESTRATOR_S = 60.0
"""Seconds for which any call other than a request for samples waits for an unreachable orchestrator or replica."""

CALL_S = 10.0
"""Deadline of one call to the orchestrator in seconds."""

_LEAST_S = 0.1
"""Minimum deadline of one attempt in seconds."""

_AWAY = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
"""Codes of a call that did not reach the orchestrator, or got no answer."""

_TOO_MANY_CALLS = frozenset({"TOO_MANY_RPCS", "QUOTA_RATE", "QUOTA_IN_FLIGHT"})
"""Reasons with which a server refuses a call unread. Other reasons, such as NOTHING_ON_OFFER, answer the call, and go to the agent."""

Credential: TypeAlias = "common_pb2.Credential.ValueType"
"""What lets a caller settle an episode."""

_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")

log = structlog.get_logger(__name__)


def has_too_many_calls(error: SluiceError) -> bool:
    """Return whether the orchestrator accepts no calls at the moment."""
    return error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and error.reason in _TOO_MANY_CALLS


def has_no_room(error: SluiceError) -> bool:
    """Return whether the orchestrator has no room at the moment for a request, or for its recording."""
    return error.code is grpc.StatusCode.RESOURCE_EXHAUSTED


class Calls:
    """Makes calls to the orchestrator for principals. Retries each while the orchestrator is unreachable or full.

    Args:
        clock: Time of deadlines and pauses.
    """

    def __init__(self, clock: Clock = CLOCK) -> None:
        self._clock = clock

    async def call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Answer],
        request: _Request,
        principal: str,
        by: Credential = common_pb2.CREDENTIAL_UNSPECIFIED,
        *,
        answer_s: float = CALL_S,
        full_s: float | None = None,
    ) -> _Answer:
        """Call the orchestrator for a principal. Retry for `ORCHESTRATOR_S` while it is unreachable or full.

        Args:
            method: An idempotent method.
            request: Its request.
            principal: Whose call it is.
            by: The credential with which the caller settles an episode, if the call settles one.
            answer_s: Seconds for one answer.
            full_s: Seconds to retry for while the orchestrator is full, if these are fewer.

        Raises:
            SluiceError: what the orchestrator raised, or the last failure to reach it.
        """

        async def attempt(timeout_s: float) -> _Answer:
            try:
                return await method(request, metadata=metadata_for(principal, by), timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                raise SluiceError.from_rpc(error) from error

        return await self.patiently(attempt, ORCHESTRATOR_S, answer_s, full_s)

    async def patiently(
        self,
        attempt: Callable[[float], Awaitable[_Answer]],
        patience_s: float,
        answer_s: float = CALL_S,
        full_s: float | None = None,
        *,
        full: Callable[[SluiceError], bool] = has_too_many_calls,
    ) -> _Answer:
        """Make a call. Retry it for `patience_s` while the orchestrator is unreachable or full.

        Args:
            attempt: Makes the call once, with the given deadline in seconds.
            patience_s: Seconds to retry for.
            answer_s: Seconds for one answer.
            full_s: Seconds to retry for while the orchestrator is full, if these are fewer.
            full: Returns whether an error means that the orchestrator is full and the call may wait for room.

        Raises:
            SluiceError: of the last attempt.
        """
        until, backoff = self._clock() + patience_s, Backoff(first_s=0.1, longest_s=2.0)
        until_full = until if full_s is None else min(until, self._clock() + full_s)
        while True:
            left = until - self._clock()
            try:
                return await attempt(max(_LEAST_S, min(answer_s, left)))
            except SluiceError as error:
                pause_s = max(backoff.fail(), error.retry_after_s or 0.0)
                ends = until if error.code in _AWAY else until_full if full(error) else -math.inf
                if ends - self._clock() <= pause_s:
                    raise
                await self._clock.sleep(pause_s)


class Exchange:
    """BeginGeneration, RecordGeneration and GetGeneration on one stream, which is begun when it is needed.

    When the stream ends, calls without an answer fail as UNAVAILABLE, and may be retried at once. If the orchestrator has no such stream,
    calls are retried here as separate calls.

    Args:
        sessions: The orchestrator.
        clock: The time of the deadlines.
    """

    def __init__(self, sessions: session_pb2_grpc.SessionServiceAsyncStub, clock: Clock = CLOCK) -> None:
        self._sessions, self._clock = sessions, clock
        self._answers: dict[int, asyncio.Future[session_pb2.ExchangeResponse]] = {}
        self._unsent: deque[tuple[int, Iterator[session_pb2.ExchangeRequest]]] = deque()
        self._parts = PartialMessages(MAX_BATCH_BYTES)
        self._more = asyncio.Event()
        self._stream: asyncio.Task[None] | None = None
        self._last = 0
        self._old_until = -math.inf

    async def begin(
        self, request: session_pb2.BeginGenerationRequest, principal: str, timeout_s: float
    ) -> session_pb2.BeginGenerationResponse:
        """Call BeginGeneration for a principal.

        Raises:
            SluiceError: what the orchestrator raised; UNAVAILABLE if the stream ended; DEADLINE_EXCEEDED.
        """
        return (await self._call(session_pb2.ExchangeRequest(begin=request), principal, timeout_s)).begun

    async def record(
        self, request: session_pb2.RecordGenerationRequest, principal: str, timeout_s: float
    ) -> session_pb2.RecordGenerationResponse:
        """Call RecordGeneration for a principal, with the errors of `begin`. A large recording gets more time."""
        timeout_s += request.ByteSize() / _BYTES_PER_S
        return (await self._call(session_pb2.ExchangeRequest(record=request), principal, timeout_s)).recorded

    async def get(
        self, request: session_pb2.GetGenerationRequest, principal: str, timeout_s: float
    ) -> session_pb2.GetGenerationResponse:
        """Call GetGeneration for a principal, with the errors of `begin`."""
        return (await self._call(session_pb2.ExchangeRequest(get=request), principal, timeout_s)).got

    async def close(self) -> None:
        """End the stream."""
        if self._stream is not None:
            self._stream.cancel()
            await settle(self._stream)

    async def _call(
        self, request: session_pb2.ExchangeRequest, principal: str, timeout_s: float
    ) -> session_pb2.ExchangeResponse:
        if self._clock() >= self._old_until:
            try:
                return await self._on_stream(request, principal, timeout_s)
            except SluiceError as error:
                if error.reason != _OLD:
                    raise
                if self._clock() >= self._old_until:
                    log.warning(
                        "the orchestrator is older than this gateway, which makes each call by itself: upgrade it",
                        error=error.message,
                    )
                    self._old_until = self._clock() + OLD_S
        return await self._alone(request, principal, timeout_s)

    async def _alone(
        self, request: session_pb2.ExchangeRequest, principal: str, timeout_s: float
    ) -> session_pb2.ExchangeResponse:
        """Make a separate call, without the stream."""
        if (size := request.ByteSize()) > MAX_MESSAGE_BYTES:
            raise SluiceError.failed_precondition(
                _OLD,
                f"the orchestrator is older than this gateway, and takes no recording of {size} bytes: upgrade it, or sample fewer or"
                " shorter replies at a time",
            )
        answer, metadata = session_pb2.ExchangeResponse(), ((ON_BEHALF_OF, principal),)
        try:
            match request.WhichOneof("request"):
                case "begin":
                    begun = await self._sessions.BeginGeneration(request.begin, metadata=metadata, timeout=timeout_s)
                    answer.begun.CopyFrom(begun)
                case "record":
                    recorded = await self._sessions.RecordGeneration(
                        request.record, metadata=metadata, timeout=timeout_s
                    )
                    answer.recorded.CopyFrom(recorded)
                case "get":
                    got = await self._sessions.GetGeneration(request.get, metadata=metadata, timeout=timeout_s)
                    answer.got.CopyFrom(got)
        except grpc.aio.AioRpcError as error:
            raise SluiceError.from_rpc(error) from error
        return answer

    async def _on_stream(
        self, request: session_pb2.ExchangeRequest, principal: str, timeout_s: float
    ) -> session_pb2.ExchangeResponse:
        self._last += 1
        request.call, request.on_behalf_of = self._last, principal
        request.timeout.FromNanoseconds(int(timeout_s * 1e9))
        request.log_id, request.takes_parts = REQUEST_ID.get(), True
        answer: asyncio.Future[session_pb2.ExchangeResponse] = asyncio.get_running_loop().create_future()
        self._answers[request.call] = answer
        self._unsent.append((request.call, _messages(request)))
        self._more.set()
        if self._stream is None or self._stream.done():
            self._stream = asyncio.create_task(self._run(), name="exchange")
        try:
            answered = await self._answered(request.call, answer, timeout_s)
        except TimeoutError:
            raise SluiceError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "DEADLINE_EXCEEDED",
                f"the orchestrator did not answer within {timeout_s:.1f} s; is it up, and its disk well?",
            ) from None
        finally:
            del self._answers[request.call]
            self._parts.forget(request.call)
        if answered.error:
            raise SluiceError.from_status(Status.FromString(answered.error))
        return answered

    async def _answered(
        self, call: int, answer: asyncio.Future[session_pb2.ExchangeResponse], timeout_s: float
    ) -> session_pb2.ExchangeResponse:
        """Return the answer to a call. If it comes in parts, start the timeout again as long as parts arrive.

        Raises:
            TimeoutError: if none came in time.
        """
        while True:
            arrived = self._parts.arrived(call)
            try:
                async with self._clock.timeout(timeout_s):
                    return await asyncio.shield(answer)
            except TimeoutError:
                if self._parts.arrived(call) <= arrived:
                    raise

    def _joined(self, answered: session_pb2.ExchangeResponse) -> session_pb2.ExchangeResponse | None:
        """Return an answer if it is complete; None if parts of it are missing."""
        if answered.WhichOneof("answer") != "part":
            return answered
        try:
            whole = self._parts.add(answered.call, answered.part)
            return None if whole is None else session_pb2.ExchangeResponse.FromString(whole)
        except SluiceError as error:
            return session_pb2.ExchangeResponse(call=answered.call, error=error.to_status().SerializeToString())

    async def _run(self) -> None:
        """Send calls and receive answers until the stream ends. Then fail the calls without an answer."""
        stream: Stream = self._sessions.Exchange()
        sending = asyncio.create_task(self._send(stream), name="exchange: send")
        why = SluiceError.unavailable("STREAM_ENDED", "the orchestrator ended the stream of calls; make the call again")
        try:
            while isinstance(answered := await stream.read(), session_pb2.ExchangeResponse):
                answer = self._answers.get(answered.call)
                if answer is None or answer.done():  # its caller has left
                    continue
                if (whole := self._joined(answered)) is not None:
                    answer.set_result(whole)
        except grpc.aio.AioRpcError as error:
            why = _of_stream(error)
        finally:
            sending.cancel()
            stream.cancel()
            await settle(sending)
            self._unsent.clear()
            self._parts = PartialMessages(MAX_BATCH_BYTES)
            for each in self._answers.values():
                if not each.done():
                    each.set_exception(why)

    def _is_awaited(self, call: int) -> bool:
        """Return whether a call has no answer yet and somebody waits for it."""
        answer = self._answers.get(call)
        return answer is not None and not answer.done()

    async def _send(self, stream: Stream) -> None:
        """Send calls as they come, and the parts of large ones by turns. Ignore errors of the stream: its reader gets them, too."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                while self._unsent:
                    call, messages = self._unsent.popleft()
                    message = next(messages, None) if self._is_awaited(call) else None
                    if message is not None:
                        await stream.write(message)
                        self._unsent.append((call, messages))
                self._more.clear()
                await self._more.wait()


def _messages(request: session_pb2.ExchangeRequest) -> Iterator[session_pb2.ExchangeRequest]:
    """Yield the messages to send for a call: the call itself, or its parts."""
    if request.ByteSize() <= MAX_MESSAGE_BYTES:
        yield request
        return
    for index, part in enumerate(split(request.SerializeToString())):
        timeout = None if index else request.timeout
        yield session_pb2.ExchangeRequest(call=request.call, part=part, timeout=timeout)


def _of_stream(error: grpc.aio.AioRpcError) -> SluiceError:
    """Return why a stream ended. A broken connection may show as any code that gRPC itself sets: then the calls may be retried."""
    found = SluiceError.from_rpc(error)
    if found.code is grpc.StatusCode.UNIMPLEMENTED:
        return SluiceError(grpc.StatusCode.UNIMPLEMENTED, _OLD, found.message)
    if found.reason == found.code.name:
        return SluiceError.unavailable("STREAM_BROKE", f"the stream of calls broke: {found.message}")
    return found


def metadata_for(principal: str, by: Credential = common_pb2.CREDENTIAL_UNSPECIFIED) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call for a principal, with the credential by which the caller settles an episode, if any."""
    settled_by = ((SETTLED_BY, common_pb2.Credential.Name(by).removeprefix("CREDENTIAL_")),) if by else ()
    return ((ON_BEHALF_OF, principal), *settled_by)


# --- sessions ---------------------------------------------------------------------------------------------------


class SessionRef(NamedTuple):
    """How a client names its session; at least one is set.

    Attributes:
        episode_id: The episode, from the path or the header `X-Session-ID`. Without a key it must belong to the `caller`.
        key: One of its keys: the session key to sample, the settling key to reward, end or renew the session.
    """

    episode_id: str
    key: str


UNKNOWN_EPISODE = "UNKNOWN_EPISODE"
"""Reason of the error for a session that the caller cannot see."""

MOST_SESSIONS = 65_536
"""Maximum number of sessions to remember. Beyond it, the least recently used one is forgotten and must be looked up again."""

STRANGER_S = 10.0
"""Seconds for which an unknown session key is refused without asking the orchestrator again. If another gateway makes this key
meanwhile, it works only after that."""

MOST_STRANGERS = 16_384
"""Maximum number of unknown keys to remember. Beyond it, the oldest is forgotten."""


class Strangers:
    """Session keys that the orchestrator does not know. Pure: the caller passes the time, in seconds."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, tuple[float, str]] = OrderedDict()

    def check(self, key: str, now: float) -> None:
        """Refuse a key that was unknown a moment ago.

        Raises:
            SluiceError: NOT_FOUND with the message of that time.
        """
        until, message = self._known.get(_digest(key), (-math.inf, ""))
        if now < until:
            raise SluiceError.not_found(UNKNOWN_EPISODE, message)

    def note(self, key: str, message: str, now: float) -> None:
        """Remember an unknown key and the error that its caller got. A repeated call does not extend the time."""
        until, _ = self._known.get(_digest(key), (-math.inf, ""))
        if until <= now:
            self.forget(key)
            self._known[_digest(key)] = (now + STRANGER_S, message)
        while len(self._known) > MOST_STRANGERS:
            self._known.popitem(last=False)

    def forget(self, key: str) -> None:
        """Forget a key, because it opens a session from now on."""
        self._known.pop(_digest(key), None)


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(errors="surrogateescape"), digest_size=16).digest()


@dataclass
class _Asking:
    """A lookup of a session at the orchestrator that is in progress.

    Attributes:
        task: Asks the orchestrator.
        waiting: Number of callers that wait for the answer. When the last one leaves, the lookup is cancelled.
    """

    task: asyncio.Task[session_pb2.FindSessionResponse]
    waiting: int = 0


class FoundSessions:
    """Finds sessions at the orchestrator, and remembers them for as long as the orchestrator says.

    Args:
        sessions: The orchestrator.
        calls: Makes the calls.
        clock: Time of the lookups.

    Attributes:
        strangers: Session keys that the orchestrator does not know.
    """

    def __init__(self, sessions: session_pb2_grpc.SessionServiceAsyncStub, calls: Calls, clock: Clock = CLOCK) -> None:
        self._sessions, self._calls, self._clock = sessions, calls, clock
        self.strangers = Strangers()
        self._asking: dict[tuple[str, str, bool], _Asking] = {}
        self._found: OrderedDict[tuple[str, str, str, bool], tuple[float, session_pb2.FindSessionResponse]] = (
            OrderedDict()
        )

    async def close(self) -> None:
        """Cancel the lookups in progress."""
        tasks = [each.task for each in self._asking.values()]
        for task in tasks:
            task.cancel()
        await settle(*tasks)

    async def find(self, ref: SessionRef, *, ended: bool) -> session_pb2.FindSessionResponse:
        """Return a session that the caller, or the key, may sample. With `ended`: one that they may settle, even after its end.

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
        """Forget a session, because it ended."""
        for place in [place for place, (_, each) in self._found.items() if each.episode_id == episode_id]:
            del self._found[place]

    async def _ask(self, ref: SessionRef, who: str, *, ended: bool) -> session_pb2.FindSessionResponse:
        """Ask the orchestrator for a session. Share the answer among callers that ask for it meanwhile, and remember an unknown key."""
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


class ServedModel(NamedTuple):
    """The model of the run.

    Attributes:
        name: Its name.
        max_model_len: Maximum number of tokens of prompt and continuation together.
    """

    name: str
    max_model_len: int


class Opened(NamedTuple):
    """An episode that was leased and opened."""

    task: episode_pb2.LeasedTask
    episode: episode_pb2.OpenEpisodeResponse


def own_credential() -> Credential:
    """Return the credential of a caller without a session key: none in a run without principals."""
    return common_pb2.CREDENTIAL_NONE if caller() is ANYONE else common_pb2.CREDENTIAL_PRINCIPAL
