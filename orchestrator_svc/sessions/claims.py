"""Who samples which request of a session, and what was sampled: claims, retries, and the tree of generations.

A state machine over the ledger, as `lending`. Claims are kept in memory alone: they save work, and nothing is lost with them. A
request that is recorded twice is recorded once, with or without a claim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from orchestrator_svc.config import ExternalConfig
from orchestrator_svc.journal.external import TOKEN_BYTES, RecordedRequest, Sample, Session
from orchestrator_svc.journal.store import Journal
from orchestrator_svc.sessions.lending import MAX_NAME, Lending, check_name
from sluice.limits import MAX_TEMPERATURE, MIN_TEMPERATURE, may_train_at
from sluice.rpc import SluiceError
from sluice.v1 import journal_pb2 as pb
from sluice.v1 import session_pb2

MAX_CLAIM_S = 600.0
"""Seconds that a claim lasts at most, as the contract says."""

_DIGEST_BYTES = 16

TokenIds = NDArray[np.uint32]
"""Token ids, 1-D."""


class Claimed(NamedTuple):
    """The caller samples the request.

    Attributes:
        parent: Sample that the prompt continues, as far as it is known before it is rendered; None if it continues none.
        prefix: Index of the key that found it.
    """

    parent: Sample | None
    prefix: int


class Recorded(NamedTuple):
    """The request was answered before."""

    request: RecordedRequest


class Running(NamedTuple):
    """Another caller samples the same request.

    Attributes:
        request_id: The request to wait for.
        until: Seconds until which it is claimed.
    """

    request_id: str
    until: float


@dataclass(frozen=True, slots=True)
class _Claim:
    gateway: str
    body_digest: bytes
    until: float
    samples: int
    least_bytes: int
    tokens: int


class Claims:
    """Decides who samples a request, and records what was sampled.

    Args:
        journal: The run's journal.
        lending: Knows the sessions.
        limits: Bounds.
    """

    def __init__(self, journal: Journal, lending: Lending, limits: ExternalConfig) -> None:
        self._journal, self._lending, self._limits = journal, lending, limits
        self._claims: dict[str, dict[str, _Claim]] = {}

    def begin(
        self, principal: str, request: session_pb2.BeginGenerationRequest, now: float, *, joined: str = ""
    ) -> Claimed | Recorded | Running:
        """Say what a request continues, and claim it; or what was recorded for it; or that another caller samples it.

        Args:
            principal: Whose session it is.
            request: What the gateway asks. The same gateway may repeat it, which prolongs its claim.
            now: Seconds.
            joined: Request that the caller has waited for, as `Running` said.

        Raises:
            SluiceError: INVALID_ARGUMENT, NOT_FOUND, FAILED_PRECONDITION (the session ended), ALREADY_EXISTS (the name has another
                body), RESOURCE_EXHAUSTED; FAILED_PRECONDITION (SESSION_FULL) if the session has no room.
        """
        seconds = _check_begin(request)
        session = self._lending.open_session(principal, request.episode_id)
        self._lending.touch(session, now)
        own = session.requests.get(request.request_id)
        if own is not None:
            if own.body_digest != request.body_digest:
                raise _other_body(request.request_id)
            return self._given(session, own)
        if (found := session.requests.get(joined)) is not None:
            return self._given(session, found)
        claims = self._live(session, now)
        claim = claims.get(request.request_id)
        if claim is not None and claim.body_digest != request.body_digest:
            raise _other_body(request.request_id)
        if claim is not None and claim.gateway != request.gateway:
            return Running(request.request_id, claim.until)
        if claim is None:
            if other := next((each for each in claims.items() if each[1].body_digest == request.body_digest), None):
                return Running(other[0], other[1].until)
            same = (each for each in reversed(session.requests.values()) if each.body_digest == request.body_digest)
            found = next(same, None)
            if found is not None and (request.is_retry or found.request_id in session.undelivered):
                return self._given(session, found)
        known = _known_prefix(session, request)
        wanted = _Claim(
            request.gateway,
            request.body_digest,
            now + seconds,
            samples=max(1, request.samples),
            least_bytes=request.least_bytes,
            tokens=_least_tokens(session, request, known.parent),
        )
        if claim is None:
            self._check_room(session, list(claims.values()), wanted)
        claims[request.request_id] = wanted
        self._claims[session.name] = claims
        self._lending.touch(session, now, max(each.until for each in claims.values()))
        return known

    def _given(self, session: Session, request: RecordedRequest) -> Recorded:
        """Return what was recorded: a client is about to have it, which is a fact if it was not given to any before."""
        if request.request_id in session.undelivered:
            fact = pb.SessionGenerationDelivered(
                group=session.group, episode=session.episode, attempt=session.attempt, request_id=request.request_id
            )
            self._journal.record(pb.Fact(session_generation_delivered=fact))
        return Recorded(request)

    def record(self, principal: str, request: session_pb2.RecordGenerationRequest, now: float) -> tuple[list[str], str]:
        """Record what was sampled, and end its claim; return the names of the samples, and what they continue.

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
            made.parent = _parent(session, prompt, made.parent)
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
            self._journal.record(pb.Fact(session_generation_recorded=fact))
            known = session.requests[made.request_id]
        elif [each.ids_digest for each in known.samples] != digests or known.body_digest != made.body_digest:
            raise SluiceError.already_exists(
                "RECORDED_OTHERWISE",
                f"request {made.request_id!r} of session {session.name} was recorded with other tokens: call BeginGeneration, which"
                " returns them",
            )
        self._end(session, made.request_id, now)
        return [each.generation_id for each in known.samples], known.samples[0].parent

    def release(self, principal: str, request: session_pb2.ReleaseGenerationRequest, now: float) -> None:
        """End a claim of a gateway without a recording; there may be none.

        Raises:
            SluiceError: NOT_FOUND, FAILED_PRECONDITION (the session ended).
        """
        session = self._lending.open_session(principal, request.episode_id)
        claim = self._claims.get(session.name, {}).get(request.request_id)
        if claim is not None and claim.gateway == request.gateway:
            self._end(session, request.request_id, now)

    def end_all_of(self, gateway: str, now: float) -> list[str]:
        """End the claims of a gateway that was killed; return the names of the sessions that had one."""
        held = {
            name: [request_id for request_id, each in claims.items() if each.gateway == gateway]
            for name, claims in self._claims.items()
        }
        for name, request_ids in held.items():
            session = self._lending.find(name)
            if isinstance(session, Session) and session.submission is None:
                for request_id in request_ids:
                    self._end(session, request_id, now)
        return [name for name, request_ids in held.items() if request_ids]

    def expire(self, now: float) -> None:
        """Forget claims whose time is over, and those of sessions that ended."""
        for name in list(self._claims):
            session = self._lending.find(name)
            live = self._live(session, now) if isinstance(session, Session) and session.submission is None else {}
            if live:
                self._claims[name] = live
            else:
                del self._claims[name]

    def _live(self, session: Session, now: float) -> dict[str, _Claim]:
        claims = self._claims.get(session.name, {})
        return {request_id: each for request_id, each in claims.items() if each.until > now}

    def _end(self, session: Session, request_id: str, now: float) -> None:
        claims = self._live(session, now)
        claims.pop(request_id, None)
        if claims:
            self._claims[session.name] = claims
        else:
            self._claims.pop(session.name, None)
        self._lending.touch(session, now, max((each.until for each in claims.values()), default=0.0))

    def _check_size(self, session: Session, made: session_pb2.RecordedGeneration, tokens: int) -> None:
        """Refuse a recording that is larger than a session, or than what requests under way may add to a full one.

        Args:
            session: The session.
            made: The recording.
            tokens: Tokens of the branches with it.

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
        """Refuse one more request of a session that has as much as it may have.

        Raises:
            SluiceError: RESOURCE_EXHAUSTED if waiting helps, FAILED_PRECONDITION (SESSION_FULL) if not.
        """
        limits, under_way = self._limits, len(claims)
        if under_way >= limits.most_requests:
            raise SluiceError.resource_exhausted(
                "MOST_REQUESTS",
                f"{under_way} requests of session {session.name} are under way, the most that orchestrator.external.most_requests"
                " allows: wait for one of them",
                limits.retry_s,
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
    """Return the samples whose tokens are the longest prefix of these; several if they have the same tokens, in order."""
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


def _parent(session: Session, prompt: TokenIds, claimed: str) -> str:
    """Return the sample that a prompt continues: of several with the same tokens the one that the gateway names, else the newest."""
    names = [each.generation_id for each in longest_prefix(session.samples.values(), prompt)]
    return claimed if claimed in names else names[-1] if names else ""


def _known_prefix(session: Session, request: session_pb2.BeginGenerationRequest) -> Claimed:
    if request.HasField("token_ids"):
        found = longest_prefix(session.samples.values(), as_ids(request.token_ids.ids))
        return Claimed(found[-1] if found else None, 0)
    by_key: Mapping[bytes, Sample] = {each.key: each for each in session.samples.values() if each.key}
    for index, key in enumerate(request.prefix_keys):
        if (sample := by_key.get(key)) is not None:
            return Claimed(sample, index)
    return Claimed(None, 0)


def _least_tokens(session: Session, request: session_pb2.BeginGenerationRequest, parent: Sample | None) -> int:
    """Return how many tokens a request adds to the branches at least: a prompt that is not rendered yet may have any number more."""
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
    seconds = request.claim.seconds + request.claim.nanos / 1e9
    if not 0 < seconds <= MAX_CLAIM_S:
        raise SluiceError.invalid_argument("claim", f"is {seconds:g} s; give more than 0 and at most {MAX_CLAIM_S:g} s")
    return seconds


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
