"""Sessions. Each reply is in the journal before its last part is sent.

A request is claimed at the orchestrator, which says which generation it continues. Then it is sampled at a replica, and recorded at the
orchestrator. While the orchestrator or all replicas are unreachable, requests wait until their deadline. A gateway keeps no state that
another gateway would need.

A captured endpoint serves clients that cannot be changed. Some sampling settings would give log-probabilities of another distribution than
the policy's; `capture.on_unsupported` says what to do with requests that set them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import grpc
import structlog
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from gateway_svc.canonical import ConversationKeys, conversation_keys, extended_key
from gateway_svc.config import CaptureConfig
from gateway_svc.orchestrator import (
    CALL_S,
    ORCHESTRATOR_S,
    Calls,
    Credential,
    Exchange,
    FoundSessions,
    Opened,
    ServedModel,
    SessionRef,
    has_no_room,
    metadata_for,
    own_credential,
)
from gateway_svc.shared import Joined, SharedSampling
from sluice.clock import CLOCK, Clock
from sluice.limits import MAX_TEMPERATURE, MIN_TEMPERATURE, may_train_at
from sluice.openai.answers import Begun, Delta, Result, TextDeltas, visible_message
from sluice.openai.bodies import ClientRequest, fault
from sluice.rpc import SluiceError
from sluice.rpc.access import caller
from sluice.sampling.generation import bounded_id
from sluice.sampling.policy import PolicyEngine
from sluice.tasks import settle
from sluice.template_arguments import set_template_arguments, template_arguments
from sluice.v1 import episode_pb2, episode_pb2_grpc, rollout_pb2, session_pb2, session_pb2_grpc, tokens_pb2
from sluice.versions import BASE

UNKNOWN_LEASE = "UNKNOWN_LEASE"
"""Reason with which the orchestrator refuses a lease that has ended."""

CLAIM_S = 30.0
"""Seconds that a claim lasts. If a gateway dies, another one can sample its requests after this time."""

RELEASE_S = 1.0
"""Deadline of the call that ends a claim early."""

EVALUATION = "EVALUATION"
"""Reason why generations of an evaluation are not trained."""

TEXT_COALESCE_S = 0.05
"""Seconds of text that one event of a stream collects."""

RECORDED_OTHERWISE = "RECORDED_OTHERWISE"
"""Reason with which the orchestrator refuses a second recording under one name: another gateway was faster."""

Unsupported: TypeAlias = Literal["override", "reject", "not_trained", "allow"]
"""What to do with sampling settings that may not be trained. `allow` is for evaluations, which are not trained."""

NEUTRAL: Mapping[str, Any] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "ignore_eos": False,
}
"""For each field that a trained request may not set: the value with which the engine's log-probabilities are the policy's."""

log = structlog.get_logger(__name__)


class RequestIdentity(NamedTuple):
    """Identity of a request: two requests of a session with the same digest are the same.

    Attributes:
        digest: Digest of dialect, body, and the name that the client gives the request, if it does; xxh3-128, 16 bytes.
        is_retry: Whether the request may repeat an earlier one: the client marks it as a retry, or gives it a name.
        retry: Which retry it is, from 1; 0 for a request with a name.
    """

    digest: bytes
    is_retry: bool
    retry: int = 0


@dataclass
class _Run:
    """A request that this gateway is sampling, or that repeats one.

    Attributes:
        begin: The call that claims it at the orchestrator.
        sampling: The parts of its reply, and who reads them.
        known: Whether the orchestrator knows it: it was claimed there, and no end without a reply was reported.
        said: What this gateway reported last to the orchestrator: whether the request has no reader here.
        saying: Lock for the calls that report this, which must arrive in order.
    """

    begin: session_pb2.BeginGenerationRequest
    sampling: SharedSampling = field(init=False)
    known: bool = False
    said: bool = False
    saying: asyncio.Lock = field(default_factory=asyncio.Lock)


class RecordedSessions:
    """Finds sessions, samples for them, and records what was sampled.

    Every method about a session raises SluiceError: NOT_FOUND if the caller cannot see it, PERMISSION_DENIED for the wrong one of its keys.

    Args:
        channel: To the orchestrator.
        engine: Samples.
        config: The settings.
        run: Name of the run.
        base_url: Returns the URL of the HTTP port for clients, without a path.
        name: Name of this gateway, unique among running gateways.
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
        self._calls = Calls(clock)
        self._exchange = Exchange(self._sessions, clock)
        self._found = FoundSessions(self._sessions, self._calls, clock)
        self._engine, self._config, self._run = engine, config, run
        self._base_url, self._name = base_url, name
        self._running: dict[tuple[str, bytes], dict[str, _Run]] = {}
        self._telling: set[asyncio.Task[None]] = set()
        self._ends = False
        self._leasing: set[asyncio.Task[episode_pb2.LeaseTasksResponse]] = set()
        self._closed = False

    async def close(self) -> None:
        """End all sampling, and give its claims back."""
        self._closed = True
        sampling = [each.sampling.task for runs in self._running.values() for each in runs.values()]
        tasks = [*sampling, *self._telling]
        for task in tasks:
            task.cancel()
        await settle(*tasks)
        await self._found.close()
        await self._exchange.close()

    # The run.

    async def model(self) -> ServedModel:
        """Return the model that sessions sample from."""
        async with self._clock.timeout(ORCHESTRATOR_S):
            model = (await self._engine.pool.choose(BASE, "")).model
        return ServedModel(model.model, model.max_model_len)

    # Sessions.

    async def find(self, ref: SessionRef) -> session_pb2.FindSessionResponse:
        """Return a session that is open.

        Raises:
            SluiceError: NOT_FOUND; FAILED_PRECONDITION with SESSION_ENDED if it ended.
        """
        return await self._found.find(ref, ended=False)

    async def find_ended(self, ref: SessionRef) -> session_pb2.FindSessionResponse:
        """Return a session that the caller, or the key, may settle; also after its end.

        Raises:
            SluiceError: NOT_FOUND, PERMISSION_DENIED.
        """
        return await self._found.find(ref, ended=True)

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
        """Lease an episode, as `lease_tasks` does, but stop waiting when this gateway ends."""
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
        """End the HTTP requests that wait for an episode on offer. The gRPC server ends its own waiting requests."""
        self._ends = True  # open connections still bring requests for a moment
        for each in self._leasing:
            each.cancel()

    async def lease_tasks(self, request: episode_pb2.LeaseTasksRequest) -> episode_pb2.LeaseTasksResponse:
        """Lease episodes for the caller, waiting as long as the request says."""
        wait_s = request.wait.ToNanoseconds() / 1e9
        return await self._calls.call(
            self._episodes.LeaseTasks, request, caller().name, answer_s=wait_s + CALL_S, full_s=wait_s
        )

    async def renew_lease(
        self, request: episode_pb2.RenewLeaseRequest, key: str = ""
    ) -> episode_pb2.RenewLeaseResponse:
        """Prolong a lease of the caller. If a settling key was sent, prolong the lease of its session."""
        who = caller().name
        if key:
            found = await self.find_ended(SessionRef("", key))
            if found.lease_id != request.lease_id:
                message = f"the lease {request.lease_id!r} is not that of the key's episode, or has ended"
                raise SluiceError.not_found(UNKNOWN_LEASE, message)
            who = found.principal
        return await self._calls.call(self._episodes.RenewLease, request, who)

    async def open_episode(self, request: episode_pb2.OpenEpisodeRequest) -> episode_pb2.OpenEpisodeResponse:
        """Open an episode for the caller. The answer has this gateway's URLs."""
        opened = await self._calls.call(self._episodes.OpenEpisode, request, caller().name)
        if not opened.settling_key:  # an orchestrator of v0.1.0 has one key for both
            opened.settling_key = opened.session_key
        self._found.strangers.forget(opened.session_key)
        opened.anthropic_base_url = f"{self._base_url().rstrip('/')}/sessions/{opened.episode_id}"
        opened.openai_base_url = f"{opened.anthropic_base_url}/v1"
        return opened

    async def reward(self, ref: SessionRef, request: episode_pb2.RecordRewardRequest) -> None:
        """Record a reward. After the end of the session this works only if its submission said that a reward follows."""
        who, by = await self._settler(ref)
        await self._calls.call(self._episodes.RecordReward, request, who, by)

    async def submit(
        self, ref: SessionRef, request: episode_pb2.SubmitTrajectoryRequest
    ) -> episode_pb2.SubmitTrajectoryResponse:
        """End a session."""
        who, by = await self._settler(ref)
        answer = await self._calls.call(self._episodes.SubmitTrajectory, request, who, by)
        self._found.forget(request.episode_id)
        return answer

    async def abandon(self, ref: SessionRef, request: episode_pb2.AbandonEpisodeRequest) -> None:
        """Give a session up."""
        who, by = await self._settler(ref)
        await self._calls.call(self._episodes.AbandonEpisode, request, who, by)
        self._found.forget(request.episode_id)

    async def renew(self, ref: SessionRef) -> float:
        """Prolong the lease of a session, even if it has ended and waits for its reward. Return the seconds of the lease."""
        found = await self.find_ended(ref)
        try:
            if found.lease_id:
                request = episode_pb2.RenewLeaseRequest(lease_id=found.lease_id)
                renewed = await self._calls.call(self._episodes.RenewLease, request, found.principal)
                return renewed.lease.ToNanoseconds() / 1e9
        except SluiceError as error:
            if error.reason != UNKNOWN_LEASE:
                raise
        raise SluiceError.failed_precondition(
            "SESSION_ENDED", f"the lease of {ref.episode_id} has ended, or its group has: open another session"
        )

    async def _settler(self, ref: SessionRef) -> tuple[str, Credential]:
        """Return the owner of the session, and the credential with which the caller settles it: its identity, or the key that was sent.

        Raises:
            SluiceError: NOT_FOUND; PERMISSION_DENIED if the key does not settle it.
        """
        if not ref.key:
            return caller().name, own_credential()
        found = await self.find_ended(ref)
        return found.principal, found.credential

    # Generations.

    async def conversation(
        self, session: session_pb2.FindSessionResponse, generation_id: str
    ) -> tokens_pb2.Conversation:
        """Return the messages up to the end of a generation, the sampled one included."""
        request = session_pb2.GetGenerationRequest(episode_id=session.episode_id, generation_id=generation_id)
        found = await self._calls.patiently(
            lambda timeout_s: self._exchange.get(request, session.principal, timeout_s), ORCHESTRATOR_S
        )
        conversation = tokens_pb2.Conversation()
        conversation.CopyFrom(found.generation.conversation)
        sample = found.generation.response.samples[int(generation_id.rpartition("/")[2])]
        conversation.messages.append(visible_message(sample, generation_id))
        return conversation

    async def count_tokens(
        self, session: session_pb2.FindSessionResponse, conversation: tokens_pb2.Conversation
    ) -> int:
        """Return the number of tokens of a conversation that is rendered as a prompt."""
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
        """Sample and record, or give the reply to the request that this one repeats.

        Waits while no replica may serve the request. Yields `Begun` when a replica has accepted the prompt, text as soon as it is known to be
        part of the message, and the result when it is in the journal. By asking for the next part after the result, the caller says that the
        client has it. By closing the generator before, it says that the client left without it.

        Args:
            session: The session of the request.
            request: What to sample.
            identity: Identifies repetitions of the request.
            request_id: Its name; chosen here if it is empty.

        Raises:
            SluiceError: as EpisodeService.Generate.
        """
        # Agents choose names that are unique within their episode; replicas and the run need names that are unique in the run.
        name = bounded_id(f"{session.episode_id}/{request_id or uuid.uuid4().hex}")
        alike = self._running.get((session.episode_id, identity.digest), {})
        run = alike.get(name)
        if run is not None and run.sampling.ending:
            await asyncio.wait({run.sampling.task})  # it gives its claim back first
            run = None
        if run is None:
            # An orchestrator that was restarted must first learn of the requests that this one may repeat.
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
        claimed, shown = True, False  # assume a claim until the orchestrator has answered
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
                        texts = TextDeltas(wanted.sampling.stop, of_messages=wanted.return_message)
                        async for message in stream:
                            if message.HasField("opening"):
                                yield Begun(begin.request_id, len(message.opening.prompt_token_ids))
                            for delta in texts.of(message.chunk):
                                shown = True
                                yield delta
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
                async with run.saying:  # no report on it may arrive after its release
                    await self._release(session, begin.request_id)
        if shown and kept is not generation:
            raise SluiceError.aborted(
                RECORDED_OTHERWISE,
                "another gateway was faster, and the recorded reply is not the one that this stream began with; send the same request"
                " again, marked as a retry, to get it",
            )
        yield _result(kept)

    async def _begin(self, who: str, run: _Run, until: float) -> session_pb2.BeginGenerationResponse | SharedSampling:
        """Claim a request. If a reply is recorded for it, or for a request that it repeats, get that. Wait while another gateway samples it.

        Returns:
            The orchestrator's answer, or the sampling in this gateway that the request repeats.
        """
        request = run.begin

        async def attempt(timeout_s: float) -> session_pb2.BeginGenerationResponse:
            request.unread = run.sampling.unread
            return await self._exchange.begin(request, who, timeout_s)

        while True:
            begun = await self._calls.patiently(attempt, until - self._clock(), full=has_no_room)
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
        """Start a task that tells the orchestrator whether a client waits for a reply, if that differs from the last report."""
        if run.known and run.said != run.sampling.unread and not self._closed:
            self._telling.add(telling := asyncio.create_task(self._say(run, who), name="say who reads"))
            telling.add_done_callback(self._telling.discard)

    async def _say(self, run: _Run, who: str, *, again: bool = False) -> None:
        """Tell the orchestrator that this gateway is sampling a request, and whether a client waits for the reply.

        Args:
            run: The request.
            who: Principal of the session.
            again: Report even if nothing has changed since the last report.
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
            await self._calls.patiently(attempt, CLAIM_S, full=has_no_room)
        except SluiceError as error:
            # The result can still be recorded: the claim only keeps other gateways from doing the same work. If the session has ended,
            # nothing needs to be reported.
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
        """Record what was sampled. Return the record under this name: that of another gateway, if it recorded first.

        Retry while the orchestrator is away or full.
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
            answer = await self._calls.patiently(attempt, until - self._clock(), full=has_no_room)
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
        """Let another gateway sample the request at once. If the call fails, the claim expires by itself."""
        request = session_pb2.ReleaseGenerationRequest(
            episode_id=session.episode_id, request_id=request_id, gateway=self._name
        )
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            await self._sessions.ReleaseGeneration(request, metadata=metadata_for(session.principal), timeout=RELEASE_S)

    @contextlib.contextmanager
    def _claimed(self, who: str, run: _Run) -> Iterator[None]:
        """Renew a claim while the block runs."""
        renewing: asyncio.Task[None] | None = None

        async def renew() -> None:
            while True:
                await self._say(run, who, again=True)
                await self._clock.sleep(CLAIM_S / 3)

        def begin() -> None:
            nonlocal renewing
            renewing = asyncio.create_task(renew(), name=f"claim {run.begin.request_id}")

        timer = self._clock.call_later(CLAIM_S / 3, begin)  # most requests end before they need a task for it
        try:
            yield
        finally:
            timer.cancel()
            if renewing is not None:
                renewing.cancel()

    def _completed(
        self, session: session_pb2.FindSessionResponse, request: ClientRequest
    ) -> rollout_pb2.GenerateRequest:
        """Return the request to a replica. Where the client set no sampling or template arguments, use the session's."""
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


def settle_sampling(request: ClientRequest, unsupported: Unsupported) -> None:
    """Remove sampling settings that may not be trained, refuse them, or mark the request as not trained; see `capture.on_unsupported`.

    Raise a priority below 0 to 0: with it, the request would overtake other sessions and the run's own episodes.

    Raises:
        SluiceError: INVALID_ARGUMENT if the settings say `reject`.
    """
    if request.generate.priority < 0:
        request.note("overridden", "priority")
        request.generate.priority = 0
    sampling = request.generate.sampling
    for name, neutral in NEUTRAL.items():
        if getattr(sampling, name) == neutral:
            sampling.ClearField(name)  # type: ignore[arg-type]  # a name of a field
    present = {each.name for each, _ in sampling.ListFields()}
    changing = [name for name in (*NEUTRAL, "logit_bias") if name in present]
    if (
        "temperature" in present
        and 0 <= sampling.temperature < MAX_TEMPERATURE
        and not may_train_at(sampling.temperature)
    ):
        changing.append("temperature")
    if unsupported == "allow":
        return
    for name in changing:
        if unsupported == "reject":
            why = "changes the distribution that tokens are sampled from, so that they could not be trained"
            if name == "temperature":
                why = f"is {sampling.temperature:g}, and trained tokens need at least {MIN_TEMPERATURE:g}"
            raise fault(name, f"{why}: leave it out, or let capture.on_unsupported be override or not_trained")
        if unsupported == "override":
            request.note("overridden", name)
            sampling.ClearField(name)  # type: ignore[arg-type]
        else:
            request.note("not_trained", name)
            request.not_trained = request.not_trained or name.upper()


def _result(recorded: session_pb2.RecordedGeneration) -> Result:
    """Return the result that the client gets for a recorded request."""
    result = Result(parent=recorded.parent, prompt_token_ids=recorded.response.prompt_token_ids)
    for index, sample in enumerate(recorded.response.samples):
        name = f"{recorded.request_id}/{index}"
        result.generations.add(generation_id=name, message=visible_message(sample, name), sample=sample)
    return result


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration


def _add_arguments(conversation: tokens_pb2.Conversation, session: session_pb2.FindSessionResponse) -> None:
    """Add the template arguments of a session's environment to a conversation. Those that the conversation sets itself stay.

    Raises:
        SluiceError: INVALID_ARGUMENT if the conversation's template arguments are not a JSON object.
    """
    if not session.template_arguments_json:
        return
    try:
        own = template_arguments(conversation)
    except ValueError as error:
        raise SluiceError.invalid_argument("conversation.template_arguments", str(error)) from error
    set_template_arguments(conversation, json.loads(session.template_arguments_json) | own)
