"""Sessions whose every reply is in the journal before its end is sent.

A request is claimed at the orchestrator, which says what it continues, sampled at a replica, and recorded at the orchestrator. While the
orchestrator or all replicas are away, requests wait for them until their deadline. Nothing is kept here that another gateway lacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import grpc
import structlog
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from gateway_svc.canonical import ConversationKeys, conversation_keys, extended_key
from gateway_svc.config import CaptureConfig
from gateway_svc.exchange import ON_BEHALF_OF, Exchange
from gateway_svc.sessions import UNKNOWN_EPISODE, Opened, RequestIdentity, ServedModel, SessionRef, Strangers
from gateway_svc.shared import Joined, SharedSampling
from sluice.backoff import Backoff
from sluice.clock import CLOCK, Clock
from sluice.openai.fields import ClientRequest
from sluice.openai.shown import Begun, Delta, Result, TextDeltas, visible_message
from sluice.rpc import SluiceError
from sluice.rpc.access import caller
from sluice.rpc.principals import ANYONE
from sluice.sampling.generation import bounded_id
from sluice.sampling.policy import PolicyEngine, TokenStream
from sluice.tasks import discard_outcome, settle
from sluice.template_arguments import set_template_arguments, template_arguments
from sluice.v1 import common_pb2, episode_pb2, episode_pb2_grpc, rollout_pb2, session_pb2, session_pb2_grpc, tokens_pb2
from sluice.versions import BASE

UNKNOWN_LEASE = "UNKNOWN_LEASE"
"""Reason of the orchestrator for a lease that has ended."""

SETTLED_BY = "settled-by"
"""Metadata with what lets a caller settle an episode: the name of a Credential, without its prefix."""

CLAIM_S = 30.0
"""Seconds that a claim lasts: after so long another gateway samples a request whose gateway died."""

CALL_S = 10.0
"""Deadline of one call of the orchestrator in seconds."""

RELEASE_S = 1.0
"""Deadline of the call that ends a claim early."""

EVALUATION = "EVALUATION"
"""Why nothing of an evaluation may be trained."""

TEXT_COALESCE_S = 0.05
"""Seconds of text in one event of a stream."""

_LEAST_S = 0.1
"""Least seconds for one try."""

_AWAY = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
"""Codes of a call that did not reach the orchestrator, or got no answer."""

_TOO_MANY_CALLS = frozenset({"TOO_MANY_RPCS", "QUOTA_RATE", "QUOTA_IN_FLIGHT"})
"""Reasons of a server that has not looked at a call. Others, such as NOTHING_ON_OFFER, are answers to it, and for the agent."""

RECORDED_OTHERWISE = "RECORDED_OTHERWISE"
"""Reason of the orchestrator for a second recording under one name: another gateway was faster."""

MOST_SESSIONS = 65_536
"""Sessions that are remembered; beyond them the least recently used one is looked up again."""

Credential: TypeAlias = "common_pb2.Credential.ValueType"
"""What lets a caller settle an episode."""

_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")

log = structlog.get_logger(__name__)


def _has_too_many_calls(error: SluiceError) -> bool:
    """Return whether the orchestrator takes no call at the moment."""
    return error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and error.reason in _TOO_MANY_CALLS


def _has_no_room(error: SluiceError) -> bool:
    """Return whether the orchestrator has no room at the moment for a request, or for its recording."""
    return error.code is grpc.StatusCode.RESOURCE_EXHAUSTED


@dataclass
class _Run:
    """A request that is sampled here, or whose reply is.

    Attributes:
        begin: What the orchestrator is asked for it.
        sampling: Its parts, and who reads them.
        known: Whether the orchestrator was asked for it, and has not been told that it ended without a reply.
        said: What the orchestrator was told last: whether nobody reads it here.
        saying: Lock of the calls that tell it, which must arrive in their order.
    """

    begin: session_pb2.BeginGenerationRequest
    sampling: SharedSampling = field(init=False)
    known: bool = False
    said: bool = False
    saying: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass
class _Asking:
    """A question for a session.

    Attributes:
        task: Asks.
        waiting: How many wait for the answer. When the last one has left, nobody asks any more.
    """

    task: asyncio.Task[session_pb2.FindSessionResponse]
    waiting: int = 0


class RecordedSessions:
    """Finds sessions, samples for them, and records what was sampled; what `gateway_svc.sessions.Sessions` asks for.

    Args:
        channel: To the orchestrator.
        engine: Samples.
        config: The settings.
        run: Name of the run.
        base_url: Returns where clients reach the HTTP port, without a path.
        name: This gateway, unique among those that run.
        clock: The time of all waits.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        engine: PolicyEngine,
        config: CaptureConfig,
        *,
        run: str,
        base_url: Callable[[], str],
        name: str,
        clock: Clock = CLOCK,
    ) -> None:
        self._episodes = episode_pb2_grpc.EpisodeServiceStub(channel)
        self._sessions = session_pb2_grpc.SessionServiceStub(channel)
        self._clock = clock
        self._exchange = Exchange(self._sessions, clock)
        self._engine, self._config, self._run = engine, config, run
        self._base_url, self._name = base_url, name
        self._running: dict[tuple[str, bytes], dict[str, _Run]] = {}
        self._telling: set[asyncio.Task[None]] = set()
        self._ends = False
        self._leasing: set[asyncio.Task[episode_pb2.LeaseTasksResponse]] = set()
        self._closed = False
        self._strangers = Strangers()
        self._asking: dict[tuple[str, str, bool], _Asking] = {}
        self._found: OrderedDict[tuple[str, str, str, bool], tuple[float, session_pb2.FindSessionResponse]] = (
            OrderedDict()
        )

    async def close(self) -> None:
        """End all sampling; its claims are given back."""
        self._closed = True
        sampling = [each.sampling.task for runs in self._running.values() for each in runs.values()]
        tasks = [*sampling, *(each.task for each in self._asking.values()), *self._telling]
        for task in tasks:
            task.cancel()
        await settle(*tasks)
        await self._exchange.close()

    # The run.

    async def model(self) -> ServedModel:
        """Return the model that sessions sample from."""
        async with self._clock.timeout(self._config.deadlines.orchestrator_s):
            model = (await self._engine.pool.choose(BASE, "")).model
        return ServedModel(model.model, model.max_model_len)

    # Sessions.

    async def find(self, ref: SessionRef) -> session_pb2.FindSessionResponse:
        """Return an open session.

        Raises:
            SluiceError: NOT_FOUND; FAILED_PRECONDITION with SESSION_ENDED if it ended.
        """
        return await self._find(ref, ended=False)

    async def find_ended(self, ref: SessionRef) -> session_pb2.FindSessionResponse:
        """Return a session that the caller, or the key, may settle; also after its end.

        Raises:
            SluiceError: NOT_FOUND, PERMISSION_DENIED.
        """
        return await self._find(ref, ended=True)

    async def _find(self, ref: SessionRef, *, ended: bool) -> session_pb2.FindSessionResponse:
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

    async def open(self, request_id: str, wait_s: float) -> Opened:
        """Lease and open one episode for the caller. Idempotent by the id, unless that is empty."""
        name = request_id or uuid.uuid4().hex
        lease = episode_pb2.LeaseTasksRequest(
            run=f"runs/{self._run}", request_id=name, max_tasks=1, max_episodes=1, wait=_duration(wait_s)
        )
        task = (await self._lease_until_the_end(lease)).tasks[0]
        opened = await self.open_episode(episode_pb2.OpenEpisodeRequest(lease_id=task.lease_id, request_id=name))
        return Opened(task, opened)

    async def _lease_until_the_end(self, request: episode_pb2.LeaseTasksRequest) -> episode_pb2.LeaseTasksResponse:
        """Lease an episode, as `lease_tasks`, but wait for none once this gateway ends."""
        leasing = asyncio.create_task(self.lease_tasks(request), name="lease")
        self._leasing.add(leasing)
        if self._ends:
            leasing.cancel()
        try:
            await asyncio.wait({leasing})
            if leasing.cancelled():
                raise SluiceError.unavailable(
                    "DRAINING", "this gateway ends; send the same request to another one", 0.5
                )
            return leasing.result()
        finally:
            self._leasing.discard(leasing)
            leasing.cancel()

    def end_waits(self) -> None:
        """End the requests over HTTP that wait for an episode on offer. The gRPC server ends its own."""
        self._ends = True  # open connections still bring requests for a moment
        for each in self._leasing:
            each.cancel()

    async def lease_tasks(self, request: episode_pb2.LeaseTasksRequest) -> episode_pb2.LeaseTasksResponse:
        """Lease episodes for the caller, waiting as long as the request says."""
        wait_s = request.wait.ToNanoseconds() / 1e9
        return await self._call(
            self._episodes.LeaseTasks, request, caller().name, answer_s=wait_s + CALL_S, full_s=wait_s
        )

    async def renew_lease(
        self, request: episode_pb2.RenewLeaseRequest, key: str = ""
    ) -> episode_pb2.RenewLeaseResponse:
        """Prolong a lease of the caller, or that of the session whose settling key was sent."""
        who = caller().name
        if key:
            found = await self.find_ended(SessionRef("", key))
            if found.lease_id != request.lease_id:
                message = f"the lease {request.lease_id!r} is not that of the key's episode, or has ended"
                raise SluiceError.not_found(UNKNOWN_LEASE, message)
            who = found.principal
        return await self._call(self._episodes.RenewLease, request, who)

    async def open_episode(self, request: episode_pb2.OpenEpisodeRequest) -> episode_pb2.OpenEpisodeResponse:
        """Open an episode for the caller; the answer names this gateway's URLs."""
        opened = await self._call(self._episodes.OpenEpisode, request, caller().name)
        if not opened.settling_key:  # an orchestrator of v0.1.0 has one key for both
            opened.settling_key = opened.session_key
        self._strangers.forget(opened.session_key)
        opened.anthropic_base_url = f"{self._base_url().rstrip('/')}/sessions/{opened.episode_id}"
        opened.openai_base_url = f"{opened.anthropic_base_url}/v1"
        return opened

    async def reward(self, ref: SessionRef, request: episode_pb2.RecordRewardRequest) -> None:
        """Record a reward, also after the end of the session if its submission says so."""
        who, by = await self._settler(ref)
        await self._call(self._episodes.RecordReward, request, who, by)

    async def submit(
        self, ref: SessionRef, request: episode_pb2.SubmitTrajectoryRequest
    ) -> episode_pb2.SubmitTrajectoryResponse:
        """End a session."""
        who, by = await self._settler(ref)
        answer = await self._call(self._episodes.SubmitTrajectory, request, who, by)
        self._forget(request.episode_id)
        return answer

    async def abandon(self, ref: SessionRef, request: episode_pb2.AbandonEpisodeRequest) -> None:
        """Give a session up."""
        who, by = await self._settler(ref)
        await self._call(self._episodes.AbandonEpisode, request, who, by)
        self._forget(request.episode_id)

    async def renew(self, ref: SessionRef) -> float:
        """Prolong the lease of a session, also of one whose reward follows, and return its seconds."""
        found = await self.find_ended(ref)
        try:
            if found.lease_id:
                request = episode_pb2.RenewLeaseRequest(lease_id=found.lease_id)
                renewed = await self._call(self._episodes.RenewLease, request, found.principal)
                return renewed.lease.ToNanoseconds() / 1e9
        except SluiceError as error:
            if error.reason != UNKNOWN_LEASE:
                raise
        raise SluiceError.failed_precondition(
            "SESSION_ENDED", f"the lease of {ref.episode_id} has ended, or its group has: open another session"
        )

    async def _settler(self, ref: SessionRef) -> tuple[str, Credential]:
        """Return whose session it is, and what lets the caller settle it: it is the caller's, or that of the key that was sent.

        Raises:
            SluiceError: NOT_FOUND; PERMISSION_DENIED if the key does not settle it.
        """
        if not ref.key:
            return caller().name, _own_credential()
        found = await self.find_ended(ref)
        return found.principal, found.credential

    async def _ask(self, ref: SessionRef, who: str, *, ended: bool) -> session_pb2.FindSessionResponse:
        """Ask the orchestrator for a session: once for all who ask for it meanwhile, and not again soon for a key that opens none."""
        place = (ref.key, "", ended) if ref.key else (ref.episode_id, who, ended)
        if ref.key:
            self._strangers.check(ref.key, self._clock())
        asking = self._asking.get(place)
        if asking is None:
            request = session_pb2.FindSessionRequest(ended=ended)
            if ref.key:
                request.session_key = ref.key
            else:
                request.episode_id = ref.episode_id
            by = _own_credential() if ended else common_pb2.CREDENTIAL_UNSPECIFIED
            task = asyncio.create_task(self._call(self._sessions.FindSession, request, who, by))
            discard_outcome(task)
            asking = self._asking[place] = _Asking(task)
        asking.waiting += 1
        try:
            return await asyncio.shield(asking.task)
        except SluiceError as error:
            if ref.key and error.reason == UNKNOWN_EPISODE:
                self._strangers.note(ref.key, error.message, self._clock())
            raise
        finally:
            asking.waiting -= 1
            if not asking.waiting:
                asking.task.cancel()
                if self._asking.get(place) is asking:
                    del self._asking[place]

    def _forget(self, episode_id: str) -> None:
        for place in [place for place, (_, each) in self._found.items() if each.episode_id == episode_id]:
            del self._found[place]

    # Generations.

    async def conversation(
        self, session: session_pb2.FindSessionResponse, generation_id: str
    ) -> tokens_pb2.Conversation:
        """Return the messages up to the end of a generation, the sampled one included."""
        request = session_pb2.GetGenerationRequest(episode_id=session.episode_id, generation_id=generation_id)
        found = await self._patiently(
            lambda timeout_s: self._exchange.get(request, session.principal, timeout_s),
            self._config.deadlines.orchestrator_s,
        )
        conversation = tokens_pb2.Conversation()
        conversation.CopyFrom(found.generation.conversation)
        sample = found.generation.response.samples[int(generation_id.rpartition("/")[2])]
        conversation.messages.append(visible_message(sample, generation_id))
        return conversation

    async def count_tokens(
        self, session: session_pb2.FindSessionResponse, conversation: tokens_pb2.Conversation
    ) -> int:
        """Return how many tokens a conversation has as a prompt."""
        request = rollout_pb2.TokenizeRequest(
            conversation=conversation, add_generation_prompt=True, tenant=session.episode_id
        )
        _add_arguments(request.conversation, session)
        return len(await self._engine.tokenize(request))

    async def generate(
        self,
        session: session_pb2.FindSessionResponse,
        request: ClientRequest,
        identity: RequestIdentity,
        request_id: str = "",
    ) -> AsyncGenerator[Begun | Delta | Result, None]:
        """Sample and record, or give the reply to the request that this one repeats. The last part is the result.

        Args:
            session: Whose request it is.
            request: What to sample.
            identity: What makes it the same as another one.
            request_id: Its name; chosen here if it is empty.

        Raises:
            SluiceError: as EpisodeService.Generate.
        """
        # Agents choose names that are unique within their episode; replicas and the run need more.
        name = bounded_id(f"{session.episode_id}/{request_id or uuid.uuid4().hex}")
        alike = self._running.get((session.episode_id, identity.digest), {})
        run = alike.get(name)
        if run is not None and run.sampling.ending:
            await asyncio.wait({run.sampling.task})  # it gives its claim back
            run = None
        if run is None:
            # What it may repeat, an orchestrator that was restarted learns first.
            repeatable = [each for each in alike.values() if each.known and (identity.is_retry or each.sampling.unread)]
            await asyncio.gather(*(self._say(each, session.principal, again=True) for each in repeatable))
            run = self._run_of(session, request, identity, name)
        sampling: SharedSampling | None = run.sampling
        while sampling is not None:
            async with contextlib.aclosing(sampling.read()) as parts:
                sampling = None
                async for part in parts:
                    if isinstance(part, Joined):
                        sampling = part.other
                        break
                    yield part

    def _run_of(
        self, session: session_pb2.FindSessionResponse, request: ClientRequest, identity: RequestIdentity, name: str
    ) -> _Run:
        """Begin to sample a request, unless the orchestrator says that it repeats another one."""
        place, deadlines = (session.episode_id, identity.digest), self._config.deadlines
        keys = conversation_keys(request.generate.conversation)
        begin = session_pb2.BeginGenerationRequest(
            episode_id=session.episode_id,
            request_id=name,
            gateway=self._name,
            body_digest=identity.digest,
            is_retry=identity.is_retry,
            retry=identity.retry,
            prefix_keys=[each.key for each in keys.prefixes],
            claim=_duration(CLAIM_S),
            samples=request.generate.n,
            least_bytes=request.generate.conversation.ByteSize() + request.generate.token_ids.ByteSize(),
        )
        if request.generate.WhichOneof("prompt") == "token_ids":
            begin.token_ids.CopyFrom(request.generate.token_ids)

        def forget(_: asyncio.Task[None]) -> None:
            runs = self._running.get(place, {})
            if runs.get(name) is run:
                del runs[name]
                if not runs:
                    del self._running[place]

        run = self._running.setdefault(place, {})[name] = _Run(begin)
        run.sampling = SharedSampling(
            self._sample(session, request, keys, run),
            deadlines.request_s,
            lambda: deadlines.linger_s if run.known else 0.0,
            self._clock,
            functools.partial(self._say_soon, run, session.principal),
        )
        run.sampling.task.add_done_callback(forget)
        return run

    async def _sample(
        self, session: session_pb2.FindSessionResponse, request: ClientRequest, keys: ConversationKeys, run: _Run
    ) -> AsyncGenerator[Begun | Delta | Result | Joined, None]:
        """Claim, sample and record."""
        until, begin = self._clock() + self._config.deadlines.request_s, run.begin
        begin_time = Timestamp()
        begin_time.GetCurrentTime()
        claimed, shown = True, False  # perhaps not claimed, until the orchestrator has answered
        try:
            begun = await self._begin(session.principal, run, until)
            if isinstance(begun, SharedSampling) or begun.HasField("recorded"):
                claimed = False
                yield Joined(begun) if isinstance(begun, SharedSampling) else _result(begun.recorded)
                return
            wanted = self._completed(session, request)
            wanted.request_id = begin.request_id
            if begun.parent and not begin.HasField("token_ids"):
                wanted.continues.token_ids.extend(begun.continues.ids)
                wanted.continues.messages = keys.prefixes[begun.prefix].messages
                wanted.continues.only_as_rendered = self._config.history == "template"
            with self._claimed(session.principal, run):
                places, replicas = [session.episode_id, session.group_id], list[str]()
                if request.stream:
                    async with self._engine.stream(wanted, places, coalesce_s=TEXT_COALESCE_S) as stream:
                        async for part in _parts(stream, wanted):
                            shown = shown or isinstance(part, Delta)
                            yield part
                        response, replicas = stream.response, stream.replicas
                else:
                    response = await self._engine.agenerate(wanted, places, replicas)
                generation = session_pb2.RecordedGeneration(
                    request_id=begin.request_id,
                    response=response,
                    parent=begun.parent,
                    keys=[
                        extended_key(keys.whole, visible_message(each, f"{begin.request_id}/{index}"))
                        if request.generate.HasField("conversation")
                        else b""
                        for index, each in enumerate(response.samples)
                    ],
                    body_digest=begin.body_digest,
                    temperature=wanted.sampling.temperature,
                    not_trained=request.not_trained or (EVALUATION if session.evaluation else ""),
                    conversation=request.generate.conversation,
                    dialect=request.dialect,
                    gateway=self._name,
                    replicas=replicas,
                    begin_time=begin_time,
                )
                kept = await self._recorded(session, generation, run, until)
            claimed = False
        finally:
            if claimed:
                run.known = False
                async with run.saying:  # nothing that is said of it may arrive after this
                    await self._release(session, begin.request_id)
        if shown and kept is not generation:
            raise SluiceError.aborted(
                RECORDED_OTHERWISE,
                "another gateway was faster, and the recorded reply is not the one that this stream began with; send the same request"
                " again, marked as a retry, to get it",
            )
        yield _result(kept)

    async def _begin(self, who: str, run: _Run, until: float) -> session_pb2.BeginGenerationResponse | SharedSampling:
        """Claim a request, or get the reply that was recorded for it or for what it repeats; wait while that is sampled elsewhere.

        Returns:
            The orchestrator's answer, or the sampling here that the request repeats.
        """
        request = run.begin

        async def attempt(timeout_s: float) -> session_pb2.BeginGenerationResponse:
            request.unread = run.sampling.unread
            return await self._exchange.begin(request, who, timeout_s)

        while True:
            begun = await self._patiently(attempt, until - self._clock(), full=_has_no_room)
            if not begun.running:
                request.ClearField("joins")
                run.known, run.said = True, request.unread
                self._say_soon(run, who)
                return begun
            other = self._running.get((request.episode_id, request.body_digest), {}).get(begun.running)
            if other is not None and other is not run and not other.sampling.ending:
                return other.sampling
            request.joins = begun.running

    def _say_soon(self, run: _Run, who: str) -> None:
        """Tell the orchestrator whether a client waits for a reply, if it believes otherwise."""
        if run.known and run.said != run.sampling.unread and not self._closed:
            self._telling.add(telling := asyncio.create_task(self._say(run, who), name="say who reads"))
            telling.add_done_callback(self._telling.discard)

    async def _say(self, run: _Run, who: str, *, again: bool = False) -> None:
        """Tell the orchestrator that this gateway has a request, and whether a client waits for the reply.

        Args:
            run: The request.
            who: Whose session it is.
            again: Also if it is known.
        """
        held = session_pb2.BeginGenerationRequest()
        held.CopyFrom(run.begin)
        held.held = True

        async def attempt(timeout_s: float) -> None:
            async with run.saying:
                if run.known and (again or run.said != run.sampling.unread):
                    held.unread = run.sampling.unread
                    await self._exchange.begin(held, who, timeout_s)
                    run.said = held.unread

        try:
            await self._patiently(attempt, CLAIM_S, full=_has_no_room)
        except SluiceError as error:
            # What was sampled may still be recorded: the claim only keeps others from doing the same work. A session that has
            # ended asks for nothing any more.
            log.debug("the orchestrator was not told who reads", request=held.request_id, error=str(error))
            return
        self._say_soon(run, who)

    async def _recorded(
        self,
        session: session_pb2.FindSessionResponse,
        generation: session_pb2.RecordedGeneration,
        run: _Run,
        until: float,
    ) -> session_pb2.RecordedGeneration:
        """Record what was sampled; return what is recorded under its name, which another gateway may have done before.

        It is tried again while the orchestrator is away or full.
        """
        request = session_pb2.RecordGenerationRequest(
            episode_id=session.episode_id, gateway=self._name, generation=generation
        )

        async def attempt(timeout_s: float) -> session_pb2.RecordGenerationResponse:
            async with run.saying:  # not between attempts, so that the claim is renewed meanwhile
                request.undelivered = run.sampling.unread
                answer = await self._exchange.record(request, session.principal, timeout_s)
                run.said = request.undelivered
            return answer

        try:
            answer = await self._patiently(attempt, until - self._clock(), full=_has_no_room)
        except SluiceError as error:
            if error.reason != RECORDED_OTHERWISE:
                raise
            begun = await self._begin(session.principal, run, until)
            if isinstance(begun, SharedSampling) or not begun.HasField("recorded"):
                raise
            return begun.recorded
        generation.parent = answer.parent
        self._say_soon(run, session.principal)
        return generation

    async def _release(self, session: session_pb2.FindSessionResponse, request_id: str) -> None:
        """Let another gateway sample the request at once; if that fails, the claim ends by itself."""
        request = session_pb2.ReleaseGenerationRequest(
            episode_id=session.episode_id, request_id=request_id, gateway=self._name
        )
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            await self._sessions.ReleaseGeneration(request, metadata=_for(session.principal), timeout=RELEASE_S)

    @contextlib.contextmanager
    def _claimed(self, who: str, run: _Run) -> Iterator[None]:
        """Keep a claim while the block runs."""
        renewing: asyncio.Task[None] | None = None

        async def renew() -> None:
            while True:
                await self._say(run, who, again=True)
                await self._clock.sleep(CLAIM_S / 3)

        def begin() -> None:
            nonlocal renewing
            renewing = asyncio.create_task(renew(), name=f"claim {run.begin.request_id}")

        timer = self._clock.call_later(CLAIM_S / 3, begin)  # most requests need no task for it
        try:
            yield
        finally:
            timer.cancel()
            if renewing is not None:
                renewing.cancel()

    def _completed(
        self, session: session_pb2.FindSessionResponse, request: ClientRequest
    ) -> rollout_pb2.GenerateRequest:
        """Return the request to a replica: the session's sampling and template arguments where the client set none."""
        wanted = rollout_pb2.GenerateRequest()
        wanted.CopyFrom(request.generate)
        wanted.sampling.CopyFrom(session.sampling)
        wanted.sampling.MergeFrom(request.generate.sampling)
        if not wanted.sampling.HasField("temperature"):
            wanted.sampling.temperature = 1.0
        wanted.min_policy_version.CopyFrom(session.min_policy_version)
        wanted.return_text = True
        wanted.return_message = wanted.HasField("conversation")
        if wanted.return_message:
            _add_arguments(wanted.conversation, session)
        return wanted

    async def _call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Answer],
        request: _Request,
        principal: str,
        by: Credential = common_pb2.CREDENTIAL_UNSPECIFIED,
        *,
        answer_s: float = CALL_S,
        full_s: float | None = None,
    ) -> _Answer:
        """Call the orchestrator for a principal, again and again while it is away or full, for `capture.deadlines.orchestrator_s`.

        Args:
            method: What to call; it is idempotent.
            request: With what.
            principal: Whose call it is.
            by: What lets the caller settle an episode, if that is what the call does.
            answer_s: Seconds for one answer.
            full_s: Seconds to repeat it for while the orchestrator is full, where these are fewer.

        Raises:
            SluiceError: what the orchestrator raised, or the last failure to reach it.
        """

        async def attempt(timeout_s: float) -> _Answer:
            try:
                return await method(request, metadata=_for(principal, by), timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                raise SluiceError.from_rpc(error) from error

        return await self._patiently(attempt, self._config.deadlines.orchestrator_s, answer_s, full_s)

    async def _patiently(
        self,
        attempt: Callable[[float], Awaitable[_Answer]],
        patience_s: float,
        answer_s: float = CALL_S,
        full_s: float | None = None,
        *,
        full: Callable[[SluiceError], bool] = _has_too_many_calls,
    ) -> _Answer:
        """Make a call again and again for so many seconds while the orchestrator is away, or full.

        Args:
            attempt: Makes it once, with its deadline in seconds.
            patience_s: Seconds to try for.
            answer_s: Seconds for one answer.
            full_s: Seconds to try for while the orchestrator is full, where these are fewer.
            full: Says whether an error means that it is full, and that the call may wait for it.

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


async def _parts(stream: TokenStream, wanted: rollout_pb2.GenerateRequest) -> AsyncGenerator[Begun | Delta, None]:
    """Yield what a client may see while its request is sampled: its beginning, and what is known of each message or text."""
    texts = TextDeltas(wanted.sampling.stop, of_messages=wanted.return_message)
    async for message in stream:
        if message.HasField("opening"):
            yield Begun(wanted.request_id, len(message.opening.prompt_token_ids))
        for delta in texts.of(message.chunk):
            yield delta


def _result(recorded: session_pb2.RecordedGeneration) -> Result:
    """Return what the client gets of a recorded request."""
    result = Result(parent=recorded.parent, prompt_token_ids=recorded.response.prompt_token_ids)
    for index, sample in enumerate(recorded.response.samples):
        name = f"{recorded.request_id}/{index}"
        result.generations.add(generation_id=name, message=visible_message(sample, name), sample=sample)
    return result


def _for(principal: str, by: Credential = common_pb2.CREDENTIAL_UNSPECIFIED) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call for a principal, and what lets the caller settle an episode."""
    settled_by = ((SETTLED_BY, common_pb2.Credential.Name(by).removeprefix("CREDENTIAL_")),) if by else ()
    return ((ON_BEHALF_OF, principal), *settled_by)


def _own_credential() -> Credential:
    """Return what a caller without a session key has shown: nothing, in a run without principals."""
    return common_pb2.CREDENTIAL_NONE if caller() is ANYONE else common_pb2.CREDENTIAL_PRINCIPAL


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration


def _add_arguments(conversation: tokens_pb2.Conversation, session: session_pb2.FindSessionResponse) -> None:
    """Add the template arguments of a session's environment to a conversation, which may set others itself.

    Raises:
        SluiceError: INVALID_ARGUMENT if those of the conversation are not a JSON object.
    """
    if not session.template_arguments_json:
        return
    try:
        own = template_arguments(conversation)
    except ValueError as error:
        raise SluiceError.invalid_argument("conversation.template_arguments", str(error)) from error
    set_template_arguments(conversation, json.loads(session.template_arguments_json) | own)
