"""Decide who samples which request of a session, and record the samples: claims, retries, and the tree of generations.

A state machine over the ledger, like `lending`. Claims are kept in memory only: they save work, and losing them loses nothing. A
repeated recording of a request has no effect, with or without a claim. `repeated` says which of two equal requests
repeats the other, `continued_sample` which sample a prompt continues.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from orchestrator_svc.config import ExternalConfig
from orchestrator_svc.journal.external import TOKEN_BYTES, RecordedRequest, Sample, Session
from orchestrator_svc.journal.store import Journal
from orchestrator_svc.sessions.lending import MAX_NAME, RETRY_S, Lending, check_name
from sluice.limits import MAX_TEMPERATURE, MIN_TEMPERATURE, may_train_at
from sluice.rpc import SluiceError
from sluice.v1 import journal_pb2 as pb
from sluice.v1 import session_pb2

MAX_CLAIM_S = 600.0
"""Most seconds that a claim lasts, as the contract says."""

LOST_S = 600.0
"""Seconds for which a request that ended without a reply is remembered, so that its retry is not taken for another request's retry."""

MOST_LOST = 1024
"""Most such requests in a session; beyond this number the oldest is forgotten."""

MOST_GIVEN = 4096
"""Most repeated requests of a session that the journal notes. Further ones get their reply, but who read it is not recorded."""

_DIGEST_BYTES = 16

TokenIds = NDArray[np.uint32]
"""Token ids, 1-D."""


class Claimed(NamedTuple):
    """The caller samples the request.

    Attributes:
        parent: Sample that the prompt continues, as far as that is known before rendering; None if it continues none.
        prefix: Index of the key that matched `parent`.
    """

    parent: Sample | None
    prefix: int


class Recorded(NamedTuple):
    """The request was answered before."""

    request: RecordedRequest


class Running(NamedTuple):
    """The request repeats one that is being sampled.

    Attributes:
        request_id: The request to wait for.
        until: Time in seconds at which its claim ends.
        gateway: Which gateway samples it.
    """

    request_id: str
    until: float
    gateway: str


class _Waiter(NamedTuple):
    """A request of another gateway that waits for the reply to a claimed one."""

    gateway: str
    until: float


@dataclass(slots=True)
class _Claim:
    gateway: str
    body_digest: bytes
    until: float
    samples: int
    least_bytes: int
    tokens: int
    retry: int
    unread: bool
    waiters: dict[str, _Waiter] = field(default_factory=dict)

    def is_read(self, now: float) -> bool:
        """Return whether a client waits for the reply, at this gateway or at another."""
        return not self.unread or any(each.until > now for each in self.waiters.values())


class _Lost(NamedTuple):
    """A request that ended without a reply, or whose reply went to an unmarked request. Its client may still retry it."""

    body_digest: bytes
    retry: int
    until: float


@dataclass(slots=True)
class _Requests:
    """The requests of an open session, as far as the ledger does not hold them.

    Attributes:
        claims: Requests that are being sampled, by name.
        lost: Requests that ended without a reply, by name.
        retries: For each recorded request that answered retries: the largest number among them.
    """

    claims: dict[str, _Claim] = field(default_factory=dict)
    lost: dict[str, _Lost] = field(default_factory=dict)
    retries: dict[str, int] = field(default_factory=dict)

    def expire(self, now: float) -> None:
        """End expired claims, and forget requests that were lost long ago."""
        for name in [name for name, each in self.claims.items() if each.until <= now]:
            self.lose(name, now)
        while self.lost and (len(self.lost) > MOST_LOST or next(iter(self.lost.values())).until <= now):
            del self.lost[next(iter(self.lost))]

    def lose(self, name: str, now: float) -> None:
        """End a claim without a recording."""
        if (claim := self.claims.pop(name, None)) is not None:
            self.note_lost(name, claim.body_digest, claim.retry, now)

    def note_lost(self, name: str, body_digest: bytes, retry: int, now: float) -> None:
        """Remember a request that ended without a reply; the dictionary is in the order in which they expire."""
        self.lost.pop(name, None)
        self.lost[name] = _Lost(body_digest, retry, now + LOST_S)


class Claims:
    """Decides who samples a request, and records what was sampled.

    Args:
        journal: The run's journal.
        lending: Knows the sessions.
        limits: Bounds.

    Attributes:
        away: Gateways whose connection is broken, but whose claims still hold.
    """

    def __init__(self, journal: Journal, lending: Lending, limits: ExternalConfig) -> None:
        self.away = set[str]()
        self._journal, self._lending, self._limits = journal, lending, limits
        self._requests: dict[str, _Requests] = {}

    def begin_generation(
        self, principal: str, request: session_pb2.BeginGenerationRequest, now: float, *, joined: str = ""
    ) -> Claimed | Recorded | Running:
        """Claim a request and return what it continues, or return what was recorded for it, or that another caller samples it.

        Args:
            principal: Whose session it is.
            request: The gateway's request. The same gateway may repeat it, which prolongs its claim.
            now: Seconds.
            joined: Request that the caller has waited for, as `Running` said.

        Raises:
            SluiceError: INVALID_ARGUMENT, NOT_FOUND, FAILED_PRECONDITION (the session ended), ALREADY_EXISTS (the name has another
                body), RESOURCE_EXHAUSTED; FAILED_PRECONDITION (SESSION_FULL) if the session has no room.
        """
        seconds = _check_begin(request)
        session = self._lending.open_session(principal, request.episode_id)
        self._lending.touch(session, now)
        own = session.requests.get(session.given.get(request.request_id, request.request_id))
        if own is not None:
            if own.body_digest != request.body_digest:
                raise _other_body(request.request_id)
            return self._given(session, own, request)
        if (found := session.requests.get(joined)) is not None:
            return self._given(session, found, request)
        known = self._known(session, now)
        claim = known.claims.get(request.request_id)
        if claim is not None and claim.body_digest != request.body_digest:
            raise _other_body(request.request_id)
        if claim is not None and claim.gateway != request.gateway:
            return Running(request.request_id, claim.until, claim.gateway)
        if claim is None and not request.held and (same := self._repeated(session, known, request, now, joined)):
            return same
        prompt = as_ids(request.token_ids.ids) if request.HasField("token_ids") else None
        continued = continued_sample(session, prompt, request.prefix_keys)
        if claim is None and request.held and len(session.given) >= MOST_GIVEN:
            return continued  # its reply may have been given without a note
        wanted = _Claim(
            request.gateway,
            request.body_digest,
            now + seconds,
            samples=max(1, request.samples),
            least_bytes=request.least_bytes,
            tokens=_least_tokens(session, request, continued.parent),
            retry=max(request.retry, 0 if claim is None else claim.retry),
            unread=request.unread,
            # Waiters of its own gateway wait there now; `unread` says whether there are any.
            waiters={} if claim is None else _without(claim.waiters, request.gateway),
        )
        if claim is None and not request.held:
            self._check_room(session, list(known.claims.values()), wanted)
        known.lost.pop(request.request_id, None)
        known.claims[request.request_id] = wanted
        self._touch(session, known, now)
        return continued

    def _repeated(
        self, session: Session, known: _Requests, request: session_pb2.BeginGenerationRequest, now: float, joined: str
    ) -> Recorded | Running | None:
        """Return what a new request repeats; None if it asks for another sample.

        Args:
            session: The session.
            known: Its requests.
            request: The new one.
            now: Seconds.
            joined: Request that its caller has waited for.
        """
        digest, name = request.body_digest, request.request_id
        alike = {each: claim for each, claim in known.claims.items() if claim.body_digest == digest}
        waited_for = next((each for each, claim in alike.items() if each == joined or name in claim.waiters), "")
        if not waited_for:
            earlier = self._earlier(session, known, request, alike, now)
            found = repeated(earlier, is_retry=request.is_retry, retry=request.retry)
            if found is None or found.state is RequestState.LOST:
                known.lost.pop(found.name if found else "", None)
                return None
            if not request.is_retry:
                known.note_lost(name, digest, found.retry, now)  # its own client may still retry it
            if found.state is RequestState.RECORDED:
                if request.retry > found.retry:
                    known.retries[found.name] = request.retry
                return self._given(session, session.requests[found.name], request)
            waited_for = found.name
        claim = alike[waited_for]
        claim.retry = max(claim.retry, request.retry)
        claim.waiters = {each: waiter for each, waiter in claim.waiters.items() if each != name and waiter.until > now}
        if not request.unread:
            claim.waiters[name] = _Waiter(request.gateway, now + _seconds(request))
        return Running(waited_for, claim.until, claim.gateway)

    def _earlier(
        self,
        session: Session,
        known: _Requests,
        request: session_pb2.BeginGenerationRequest,
        claims: Mapping[str, _Claim],
        now: float,
    ) -> list[Earlier]:
        """Return the earlier requests with the same body. `claims` are those that are being sampled."""
        digest, retries = request.body_digest, known.retries

        def doubt(claim: _Claim) -> int:
            return 2 if claim.gateway in self.away else int(claim.gateway != request.gateway)

        return [
            *(
                Earlier(name, RequestState.RECORDED, name not in session.undelivered, retries.get(name, 0))
                for name, each in session.requests.items()
                if each.body_digest == digest
            ),
            *(
                Earlier(name, RequestState.LOST, read=False, retry=each.retry)
                for name, each in known.lost.items()
                if each.body_digest == digest
            ),
            *(
                Earlier(name, RequestState.SAMPLED, each.is_read(now), each.retry, doubt(each))
                for name, each in claims.items()
            ),
        ]

    def _given(self, session: Session, reply: RecordedRequest, request: session_pb2.BeginGenerationRequest) -> Recorded:
        """Return the recorded reply. Record who gets it, or that its client has left, if the journal does not say so yet.

        A request that asks for its own reply by name may have got it before at another gateway, so it counts as a request of its own.
        """
        to = request.request_id
        if to == reply.request_id:
            to = f"{to}@{request.gateway}"
            if request.held and to not in session.given:
                to = ""
        is_known = not to or to in session.given
        if not is_known and len(session.given) >= MOST_GIVEN:
            return Recorded(reply)
        if not is_known or request.unread != ((to or reply.request_id) in session.left):
            fact = pb.SessionGenerationDelivered(
                group=session.group,
                episode=session.episode,
                attempt=session.attempt,
                request_id=reply.request_id,
                to=to,
                unread=request.unread,
            )
            self._journal.record_fact(pb.Fact(session_generation_delivered=fact))
        return Recorded(reply)

    def record_generation(
        self, principal: str, request: session_pb2.RecordGenerationRequest, now: float
    ) -> tuple[list[str], str]:
        """Record samples, and end their claim; return their names, and the sample that they continue.

        Raises:
            SluiceError: INVALID_ARGUMENT, NOT_FOUND, FAILED_PRECONDITION (the session ended), ALREADY_EXISTS (other tokens were
                recorded under this name); FAILED_PRECONDITION (SESSION_FULL) if more was recorded than any claim allowed.
        """
        made = request.generation
        _check_generation(made)
        session = self._lending.open_session(principal, request.episode_id)
        prompt = as_ids(made.response.prompt_token_ids)
        whole = [np.concatenate([prompt, as_ids(each.token_ids)]) for each in made.response.samples]
        digests = [ids_digest(each) for each in whole]
        known = session.requests.get(made.request_id)
        if known is None:
            if len(session.requests) >= self._limits.most_generations + self._limits.most_requests:
                raise _full(f"{len(session.requests)} requests are recorded in session {session.name}")
            parent = continued_sample(session, prompt, named=made.parent).parent
            made.parent = parent.generation_id if parent else ""
            self._check_size(session, made, session.branch_tokens_with(made.parent, map(len, whole)))
            fact = pb.SessionGenerationRecorded(
                group=session.group,
                episode=session.episode,
                attempt=session.attempt,
                request_id=made.request_id,
                parent=made.parent,
                body_digest=made.body_digest,
                samples=[
                    pb.SessionSample(key=key, tokens=len(ids), ids_digest=digest)
                    for key, ids, digest in zip(made.keys, whole, digests, strict=True)
                ],
                place=self._journal.keep(made),
                payload_bytes=made.ByteSize(),
                undelivered=request.undelivered,
            )
            self._journal.record_fact(pb.Fact(session_generation_recorded=fact))
            known = session.requests[made.request_id]
        others = self._known(session, now)
        others.lost.pop(made.request_id, None)
        claim = others.claims.pop(made.request_id, None)
        if claim is not None and claim.retry:
            others.retries[made.request_id] = claim.retry
        self._touch(session, others, now)
        if [each.ids_digest for each in known.samples] != digests or known.body_digest != made.body_digest:
            raise SluiceError.already_exists(
                "RECORDED_OTHERWISE",
                f"request {made.request_id!r} of session {session.name} was recorded with other tokens: call BeginGeneration, which"
                " returns them",
            )
        return [each.generation_id for each in known.samples], known.samples[0].parent

    def release(self, principal: str, request: session_pb2.ReleaseGenerationRequest, now: float) -> None:
        """End a claim of a gateway, if there is one, without a recording.

        Raises:
            SluiceError: NOT_FOUND, FAILED_PRECONDITION (the session ended).
        """
        session = self._lending.open_session(principal, request.episode_id)
        known = self._known(session, now)
        claim = known.claims.get(request.request_id)
        if claim is not None and claim.gateway == request.gateway:
            known.lose(request.request_id, now)
            self._touch(session, known, now)

    def end_all_of(self, gateway: str, now: float) -> list[str]:
        """End the claims and waiters of a gateway that was killed; return the names of the sessions that had a claim."""
        self.away.discard(gateway)
        ended = list[str]()
        for name in list(self._requests):
            session = self._lending.find(name)
            if not isinstance(session, Session) or session.submission is not None:
                continue
            known = self._known(session, now)
            held = [request_id for request_id, each in known.claims.items() if each.gateway == gateway]
            for request_id in held:
                known.lose(request_id, now)
            for each in known.claims.values():
                each.waiters = _without(each.waiters, gateway)
            if held:
                self._touch(session, known, now)
                ended.append(name)
        return ended

    def expire(self, now: float) -> None:
        """Forget expired claims, and claims of sessions that ended."""
        for name in list(self._requests):
            session = self._lending.find(name)
            if isinstance(session, Session) and session.submission is None:
                self._known(session, now)
            else:
                del self._requests[name]

    def _known(self, session: Session, now: float) -> _Requests:
        """Return the `_Requests` of an open session."""
        known = self._requests.setdefault(session.name, _Requests())
        known.expire(now)
        return known

    def _touch(self, session: Session, known: _Requests, now: float) -> None:
        """Keep a session from expiring as idle while its requests are in progress."""
        self._lending.touch(session, now, max((each.until for each in known.claims.values()), default=0.0))

    def _check_size(self, session: Session, made: session_pb2.RecordedGeneration, tokens: int) -> None:
        """Refuse a recording that is larger than a session, or larger than what requests in progress may add to a full session.

        Args:
            session: The session.
            made: The recording.
            tokens: Tokens of the branches, this recording included.

        Raises:
            SluiceError: FAILED_PRECONDITION (SESSION_FULL).
        """
        size, most = made.ByteSize(), self._limits.session_mb << 20
        if size > most:
            raise SluiceError.failed_precondition(
                "SESSION_FULL",
                f"the recording of request {made.request_id!r} has {size} bytes, more than the {most} that"
                " orchestrator.external.session_mb allows a session: raise it, or sample fewer or shorter replies at a time",
            )
        if session.payload_bytes + size > 2 * most:
            raise _full(
                f"session {session.name} has {session.payload_bytes} bytes, and {size} more are beyond what requests under way may add"
                f" to the {most} of orchestrator.external.session_mb"
            )
        if TOKEN_BYTES * tokens > 2 * self._limits.branches_mb << 20:
            raise _many_tokens(session, tokens, self._limits.branches_mb, "what requests under way may add to")

    def _check_room(self, session: Session, claims: Sequence[_Claim], wanted: _Claim) -> None:
        """Refuse one more request of a session that is at its limit.

        Raises:
            SluiceError: RESOURCE_EXHAUSTED if waiting helps, FAILED_PRECONDITION (SESSION_FULL) if not.
        """
        limits, under_way = self._limits, len(claims)
        if under_way >= limits.most_requests:
            raise SluiceError.resource_exhausted(
                "MOST_REQUESTS",
                f"{under_way} requests of session {session.name} are under way, the most that orchestrator.external.most_requests"
                " allows: wait for one of them",
                RETRY_S,
            )
        if len(session.requests) >= limits.most_generations:
            raise _full(
                f"{len(session.requests)} requests are recorded in session {session.name}, the most that"
                " orchestrator.external.most_generations allows"
            )
        had = len(session.samples) + sum(each.samples for each in claims)
        if had + wanted.samples > limits.most_branches:
            raise _full(
                f"session {session.name} has {had} samples, and {wanted.samples} more are beyond the {limits.most_branches} that"
                " orchestrator.external.most_branches allows"
            )
        most, size = limits.session_mb << 20, session.payload_bytes + sum(each.least_bytes for each in claims)
        if size >= most or size + wanted.least_bytes > most:
            raise _full(
                f"session {session.name} has {size} bytes recorded or under way, and {wanted.least_bytes} more or further ones are beyond"
                f" the {most} that orchestrator.external.session_mb allows"
            )
        tokens, room = session.branch_tokens + sum(each.tokens for each in claims), limits.branches_mb << 20
        if TOKEN_BYTES * tokens >= room or TOKEN_BYTES * (tokens + wanted.tokens) > room:
            raise _many_tokens(session, tokens + wanted.tokens, limits.branches_mb, "")


def as_ids(ids: Sequence[int]) -> TokenIds:
    """Return token ids as an array."""
    return np.array(ids, dtype=np.uint32)


def ids_digest(ids: TokenIds) -> bytes:
    """Return the xxh3-128 of token ids, 32 bits each, little-endian."""
    return xxhash.xxh3_128_digest(ids.astype("<u4", copy=False).tobytes())


def longest_prefix(samples: Iterable[Sample], ids: TokenIds) -> list[Sample]:
    """Return the samples whose tokens are the longest prefix of `ids`, in order. There are several if they have the same tokens."""
    by_length: dict[int, list[Sample]] = {}
    for each in samples:
        if each.tokens <= len(ids):
            by_length.setdefault(each.tokens, []).append(each)
    content = memoryview(ids.astype("<u4", copy=False).tobytes())
    digest, read, found = xxhash.xxh3_128(), 0, list[Sample]()
    for length in sorted(by_length):
        digest.update(content[4 * read : 4 * length])
        read = length
        value = digest.digest()
        if same := [each for each in by_length[length] if each.ids_digest == value]:
            found = same
    return found


def continued_sample(
    session: Session, prompt: TokenIds | None, keys: Sequence[bytes] = (), *, named: str = ""
) -> Claimed:
    """Return the sample that a prompt continues. Only this function decides on the parent of a generation.

    Args:
        session: Holds the samples.
        prompt: Token ids of the prompt. None: it is not rendered yet, and the keys decide.
        keys: Keys of the beginnings of the conversation, the longest first, as gateways make them.
        named: The sample to take if several have the same tokens; otherwise take the newest.
    """
    if prompt is not None:
        found = {each.generation_id: each for each in longest_prefix(session.samples.values(), prompt)}
        newest = next(reversed(found.values()), None)
        return Claimed(found.get(named, newest), 0)
    by_key: Mapping[bytes, Sample] = {each.key: each for each in session.samples.values() if each.key}
    for index, key in enumerate(keys):
        if (sample := by_key.get(key)) is not None:
            return Claimed(sample, index)
    return Claimed(None, 0)


def _least_tokens(session: Session, request: session_pb2.BeginGenerationRequest, parent: Sample | None) -> int:
    """Return the least number of tokens that a request adds to the branches. A prompt that is not rendered yet may have any number more."""
    prompt = max(len(request.token_ids.ids), parent.tokens if parent else 0)
    name = parent.generation_id if parent else ""
    return max(0, session.branch_tokens_with(name, [prompt] * max(1, request.samples)) - session.branch_tokens)


def _check_begin(request: session_pb2.BeginGenerationRequest) -> float:
    """Refuse a malformed request; return the seconds of its claim.

    Raises:
        SluiceError: INVALID_ARGUMENT.
    """
    check_name("request_id", request.request_id)
    check_name("gateway", request.gateway)
    if len(request.body_digest) != _DIGEST_BYTES:
        raise SluiceError.invalid_argument("body_digest", f"has {len(request.body_digest)} bytes; give 16")
    if any(len(each) != _DIGEST_BYTES for each in request.prefix_keys):
        raise SluiceError.invalid_argument("prefix_keys", "have other than 16 bytes each")
    seconds = _seconds(request)
    if not 0 < seconds <= MAX_CLAIM_S:
        raise SluiceError.invalid_argument("claim", f"is {seconds:g} s; give more than 0 and at most {MAX_CLAIM_S:g} s")
    return seconds


def _seconds(request: session_pb2.BeginGenerationRequest) -> float:
    """Return the seconds of a claim."""
    return request.claim.seconds + request.claim.nanos / 1e9


def _without(waiters: Mapping[str, _Waiter], gateway: str) -> dict[str, _Waiter]:
    """Return the waiters without those of a gateway."""
    return {name: each for name, each in waiters.items() if each.gateway != gateway}


def _check_generation(made: session_pb2.RecordedGeneration) -> None:
    """Refuse a generation that could not be trained or found again.

    Raises:
        SluiceError: INVALID_ARGUMENT.
    """
    check_name("generation.request_id", made.request_id)
    if len(made.body_digest) != _DIGEST_BYTES:
        raise SluiceError.invalid_argument("generation.body_digest", f"has {len(made.body_digest)} bytes; give 16")
    samples = made.response.samples
    if not samples or not made.response.prompt_token_ids:
        raise SluiceError.invalid_argument("generation.response", "has no samples, or no token ids of the prompt")
    if len(made.keys) != len(samples) or any(len(each) not in (0, _DIGEST_BYTES) for each in made.keys):
        raise SluiceError.invalid_argument(
            "generation.keys", f"are {len(made.keys)} for {len(samples)} samples, or have other than 16 bytes each"
        )
    if not made.not_trained and not may_train_at(made.temperature):
        raise SluiceError.invalid_argument(
            "generation.temperature",
            f"is {made.temperature:g}; trained tokens need one from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}",
        )
    if len(made.not_trained) > MAX_NAME:
        raise SluiceError.invalid_argument("generation.not_trained", f"has more than {MAX_NAME} characters")
    for index, sample in enumerate(samples):
        field, tokens = f"generation.response.samples[{index}]", len(sample.token_ids)
        starts = [each.start for each in sample.version_spans]
        if len(sample.logprobs) != tokens or not np.isfinite(np.array(sample.logprobs)).all():
            raise SluiceError.invalid_argument(f"{field}.logprobs", "are not one finite number per token")
        if starts != sorted(set(starts)) or starts[:1] != [0][:tokens] or (starts and starts[-1] >= tokens):
            raise SluiceError.invalid_argument(f"{field}.version_spans", "do not give each token one version")


def _other_body(request_id: str) -> SluiceError:
    return SluiceError.already_exists(
        "OTHER_BODY", f"request {request_id!r} was begun with another body: give each request a name of its own"
    )


def _many_tokens(session: Session, tokens: int, most_mb: int, beyond: str) -> SluiceError:
    """Return the error of a session whose branches are too large together."""
    return SluiceError.failed_precondition(
        "SESSION_FULL",
        f"the branches of session {session.name} would have {tokens} tokens, their prompts in each of them: in a batch that is"
        f" {TOKEN_BYTES * tokens >> 20} MiB, beyond {beyond + ' ' if beyond else ''}the {most_mb} of orchestrator.external.branches_mb."
        " Ask for fewer samples (n) or shorter prompts, raise that setting, or submit the episode and open another one",
    )


def _full(problem: str) -> SluiceError:
    """Return the error of a session that can sample no more; waiting does not help."""
    return SluiceError.failed_precondition("SESSION_FULL", f"{problem}: submit it, and open another episode")


class RequestState(Enum):
    """What became of a request."""

    SAMPLED = "is being sampled"
    RECORDED = "its reply is in the journal"
    LOST = "ended without a reply"


class Earlier(NamedTuple):
    """An earlier request of the session with the same body.

    Attributes:
        name: Its name.
        state: What became of it.
        read: Whether a client is reading or has read its reply, as far as its gateways know.
        retry: The largest number among the retries that it answers; 0 if it was sent once.
        doubt: For a request that is being sampled: how likely it is that its client left unnoticed. 2 if its gateway is gone; 1 if its
            gateway is not the one of the new request, so that a notice may still be on its way.
    """

    name: str
    state: RequestState
    read: bool
    retry: int = 0
    doubt: int = 0


def repeated(earlier: Sequence[Earlier], *, is_retry: bool, retry: int) -> Earlier | None:
    """Return the request that a new one repeats; None if the new one asks for another sample.

    Best of n and self-consistency send the same body several times, and want a sample for each. A client whose connection broke sends the body
    again, and wants the reply that it missed: most clients mark such a retry, some do not. A reply that nobody has read must not be trained
    beside the one that was read.

    A reply without a reader goes to the next request, marked or not. A marked request also repeats one that was lost. Otherwise it repeats one
    whose connection may be broken unnoticed, or whose reply may have been lost after it was sent; among these, one that has not yet
    answered a retry with this number, so that n requests that fail together and are retried together stay n. If none is left, the marked
    request still gets a recorded reply, since a client may count wrongly.

    Args:
        earlier: The earlier requests with the same body, oldest first.
        is_retry: Whether the client marks the new one as a retry.
        retry: Number of the retry. 0 if it has none: then all requests with this body count as one.
    """
    newest = earlier[::-1]
    unread = [each for each in newest if not each.read and each.state is not RequestState.LOST]
    retried = sorted(newest, key=lambda each: -each.retry) if is_retry else []
    fits = [each for each in retried if not retry or each.retry < retry]
    sampled = sorted((each for each in fits if each.state is RequestState.SAMPLED), key=lambda each: -each.doubt)
    in_order = [
        *(each for each in unread if each.state is RequestState.RECORDED),
        *unread,
        *(each for each in (*fits, *retried) if each.state is RequestState.LOST and retry),
        *sampled,
        *(each for each in (*fits, *retried) if each.state is RequestState.RECORDED),
    ]
    return in_order[0] if in_order else None
