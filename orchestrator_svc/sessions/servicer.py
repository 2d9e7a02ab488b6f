# ruff: noqa: N802 - gRPC names the methods
"""Serves gateways: SessionService, and EpisodeService without its sampling calls.

An answer is sent when the journal has its content on disk. Calls that come together share one write.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import ParseDict

from orchestrator_svc.announcements import watch_replicas
from orchestrator_svc.journal.external import EndedSession, Lease, Session, parse_session_name
from orchestrator_svc.sessions.claims import Claimed, Recorded, Running
from orchestrator_svc.sessions.desk import OFFERS, Desk
from orchestrator_svc.sessions.exchange import answer_exchange, too_large
from orchestrator_svc.sessions.lending import RETRY_S, Credential
from sluice.limits import MAX_MESSAGE_BYTES
from sluice.rpc import SluiceError
from sluice.rpc.access import caller, is_local_peer, require_role
from sluice.sampling.pool import ReplicaPool
from sluice.template_arguments import arguments_text
from sluice.v1 import common_pb2, episode_pb2, episode_pb2_grpc, session_pb2, session_pb2_grpc

EPISODES = "sluice.v1.EpisodeService"

CACHEABLE_S = 60.0
"""Seconds for which gateways cache a session: its owner, and how it samples."""

ON_BEHALF_OF = "on-behalf-of"
"""Metadata of a gateway's call: the principal for whom the gateway calls."""

SETTLED_BY = "settled-by"
"""Metadata of a gateway's call that settles an episode: the name of the Credential that let its caller do so."""

_LONGEST_WAIT_S = 60.0
"""Most seconds that LeaseTasks waits, as the contract says."""

_LONGEST_JOIN_S = 30.0
"""Seconds that BeginGeneration waits for the same request at another gateway, if its caller has no deadline."""

_CREDENTIALS = frozenset(common_pb2.Credential.keys())
_UNKNOWN = common_pb2.CREDENTIAL_UNSPECIFIED

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

_Answer = TypeVar("_Answer", session_pb2.BeginGenerationResponse, session_pb2.GetGenerationResponse)


def principal_of(context: Context) -> str:
    """Return the principal for whom a gateway calls.

    Raises:
        SluiceError: PERMISSION_DENIED if the caller is not a gateway; INVALID_ARGUMENT if it does not name the principal.
    """
    require_role("gateway")
    for key, value in context.invocation_metadata() or ():
        if key == ON_BEHALF_OF and value:
            return value if isinstance(value, str) else value.decode()
    raise SluiceError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "ON_BEHALF_OF",
        f"the call of gateway {caller().name!r} lacks the metadata {ON_BEHALF_OF}: name the principal whose call it is",
    )


def credential_of(context: Context) -> Credential:
    """Return the credential that lets a gateway's caller settle an episode; unspecified if the gateway is too old to say."""
    for key, value in context.invocation_metadata() or ():
        if key == SETTLED_BY and isinstance(value, str):
            return common_pb2.Credential.Value(name) if (name := f"CREDENTIAL_{value}") in _CREDENTIALS else _UNKNOWN
    return _UNKNOWN


class SessionServicer(session_pb2_grpc.SessionServiceServicer):
    """Serves SessionService.

    Args:
        desk: Has the sessions.
        pool: The replicas.
    """

    def __init__(self, desk: Desk, pool: ReplicaPool) -> None:
        self._desk, self._pool = desk, pool

    async def FindSession(
        self, request: session_pb2.FindSessionRequest, context: Context
    ) -> session_pb2.FindSessionResponse:
        """Find a session by its name or one of its keys."""
        lending, key = self._desk.lending, _UNKNOWN
        if request.WhichOneof("by") == "session_key":
            require_role("gateway")
            name, key = self._desk.session_of_key(request.session_key)
            found = lending.find(name) if name else None
            if found is None:
                raise SluiceError.not_found("UNKNOWN_EPISODE", "the session key opens no episode of this run")
        else:
            name = request.episode_id
            found = lending.known(principal_of(context), name)
        if request.ended:
            found = lending.settling(found.principal, name, key or credential_of(context))
        elif key == common_pb2.CREDENTIAL_SETTLING_KEY:
            raise SluiceError(
                grpc.StatusCode.PERMISSION_DENIED,
                "SAMPLING_KEY_REQUIRED",
                f"the settling key of {name} does not sample: give the agent the `session_key` (over HTTP `key`) of the same answer, and keep"
                " this one from it",
            )
        else:
            found = lending.open_session(found.principal, name)
        response = session_pb2.FindSessionResponse(episode_id=name, principal=found.principal, credential=key)
        response.cacheable.CopyFrom(_duration(CACHEABLE_S))
        if (place := parse_session_name(name)) is not None:
            response.group_id = f"g{place[0]}"
        if isinstance(found, Session):
            group = lending.group_of(found)
            posed = self._desk.posed(group)
            response.sampling.CopyFrom(posed.sampling)
            response.evaluation = posed.evaluation
            if posed.chat_template_kwargs:
                response.template_arguments_json = arguments_text(posed.chat_template_kwargs)
            response.lease_id = found.lease_id
            response.min_policy_version.CopyFrom(group.floor.to_proto())
        return response

    async def BeginGeneration(
        self, request: session_pb2.BeginGenerationRequest, context: Context
    ) -> session_pb2.BeginGenerationResponse:
        """Claim a request and return what it continues, or return what was recorded for it."""
        left = context.time_remaining()
        response = await self._begin(principal_of(context), request, _LONGEST_JOIN_S if left is None else left / 2)
        return _one_message(response)

    async def _begin(
        self, principal: str, request: session_pb2.BeginGenerationRequest, most_s: float
    ) -> session_pb2.BeginGenerationResponse:
        """Claim a request. If it repeats one that another gateway samples, wait for that, `most_s` seconds at most."""
        desk = self._desk
        until = desk.clock() + most_s
        joined = request.joins
        while True:
            now = desk.clock()
            answer = desk.claims.begin_generation(principal, request, now, joined=joined)
            if request.held:
                await desk.journal.durable()
                return session_pb2.BeginGenerationResponse()
            if not isinstance(answer, Running):
                break
            is_news = answer.gateway == request.gateway and answer.request_id not in (request.joins, request.request_id)
            if now >= until or is_news:
                return session_pb2.BeginGenerationResponse(running=answer.request_id)
            joined = answer.request_id
            seconds = max(0.0, min(until, answer.until) - now)
            await desk.waiting.until(parse_session_name(request.episode_id), seconds)
        session = desk.lending.open_session(principal, request.episode_id)
        if isinstance(answer, Recorded):
            await desk.journal.durable()
            return session_pb2.BeginGenerationResponse(recorded=await desk.generation(session, answer.request))
        return await self._continued(session, answer)

    async def _continued(self, session: Session, claimed: Claimed) -> session_pb2.BeginGenerationResponse:
        """Return the tokens that a claimed request continues."""
        response = session_pb2.BeginGenerationResponse()
        if claimed.parent is None:
            return response
        request_id, _, index = claimed.parent.generation_id.rpartition("/")
        try:
            made = await self._desk.generation(session, session.requests[request_id])
        except SluiceError:
            return response  # the gateway renders all of it, as a fork: only the tokens that the disk damaged are lost
        response.parent, response.prefix = claimed.parent.generation_id, claimed.prefix
        response.continues.ids.extend(made.response.prompt_token_ids)
        response.continues.ids.extend(made.response.samples[int(index)].token_ids)
        return response

    async def RecordGeneration(
        self, request: session_pb2.RecordGenerationRequest, context: Context
    ) -> session_pb2.RecordGenerationResponse:
        """Record what was sampled for a claimed request, and end the claim."""
        return await self._record(principal_of(context), request)

    async def _record(
        self, principal: str, request: session_pb2.RecordGenerationRequest
    ) -> session_pb2.RecordGenerationResponse:
        desk = self._desk
        await desk.journal.room_for(request.generation.ByteSize())
        generation_ids, parent = desk.claims.record_generation(principal, request, desk.clock())
        session = desk.lending.find(request.episode_id)
        await desk.journal.durable()
        if isinstance(session, Session):
            desk.remember(session, request.generation)
        return session_pb2.RecordGenerationResponse(generation_ids=generation_ids, parent=parent)

    async def Exchange(self, requests: AsyncIterator[session_pb2.ExchangeRequest], context: Context) -> None:  # type: ignore[override]  # writes to the context itself
        """Answer calls of `BeginGeneration`, `RecordGeneration` and `GetGeneration` that come on one stream."""
        require_role("gateway")
        most_bytes = self._desk.limits.session_mb << 20
        await answer_exchange(requests, context.write, self._begin, self._record, self._get, most_bytes=most_bytes)

    async def GetGeneration(
        self, request: session_pb2.GetGenerationRequest, context: Context
    ) -> session_pb2.GetGenerationResponse:
        """Return one generation of a session."""
        return _one_message(await self._get(principal_of(context), request))

    async def _get(
        self, principal: str, request: session_pb2.GetGenerationRequest
    ) -> session_pb2.GetGenerationResponse:
        session = self._desk.lending.known(principal, request.episode_id)
        request_id = request.generation_id.rpartition("/")[0]
        if isinstance(session, EndedSession) or request.generation_id not in session.samples:
            raise SluiceError.not_found(
                "UNKNOWN_GENERATION",
                f"episode {request.episode_id} has no generation {request.generation_id!r}, or its group has ended",
            )
        made = await self._desk.generation(session, session.requests[request_id])
        return session_pb2.GetGenerationResponse(generation=made)

    async def ReleaseGeneration(
        self, request: session_pb2.ReleaseGenerationRequest, context: Context
    ) -> session_pb2.ReleaseGenerationResponse:
        """End a claim without a recording."""
        self._desk.claims.release(principal_of(context), request, self._desk.clock())
        self._desk.waiting.wake(parse_session_name(request.episode_id))
        return session_pb2.ReleaseGenerationResponse()

    async def WatchReplicas(
        self, request: session_pb2.WatchReplicasRequest, context: Context
    ) -> AsyncIterator[session_pb2.WatchReplicasResponse]:
        """Stream the replicas of the run. The stream also shows that the gateway lives."""
        with self._desk.connected(request.gateway):
            async for listed in watch_replicas(self._pool, from_here=is_local_peer(context.peer())):
                yield listed


class EpisodeServicer(episode_pb2_grpc.EpisodeServiceServicer):
    """Serves EpisodeService to gateways, which sample themselves.

    Args:
        run: Name of the run.
        desk: Has the episodes.
        offers: Whether the run has external episodes at all.
    """

    def __init__(self, run: str, desk: Desk, *, offers: bool) -> None:
        self._run, self._desk, self._offers = run, desk, offers

    async def LeaseTasks(
        self, request: episode_pb2.LeaseTasksRequest, context: Context
    ) -> episode_pb2.LeaseTasksResponse:
        """Lease episodes, as soon as some are on offer."""
        principal, desk = principal_of(context), self._desk
        if request.run != f"runs/{self._run}":
            raise SluiceError.not_found(
                "WRONG_RUN",
                f"this orchestrator has runs/{self._run}, not {request.run or '(none)'}: check the name or the address",
            )
        if not self._offers:
            raise SluiceError.failed_precondition(
                "NO_EXTERNAL_EPISODES",
                'the run has no external episodes: set orchestrator.workflow = "external", for one environment at least',
            )
        wait_s = request.wait.ToNanoseconds() / 1e9  # a timedelta would overflow
        if not 0 <= wait_s <= _LONGEST_WAIT_S:
            raise SluiceError.invalid_argument("wait", f"is {wait_s:g} s; give 0 to {_LONGEST_WAIT_S:g} s")
        until = desk.clock() + wait_s
        while not (leases := desk.lending.lease(principal, request, now := desk.clock())):
            desk.missing.asked()
            if desk.ended:
                raise SluiceError.failed_precondition(
                    "RUN_ENDED", "the run has ended: nothing will be on offer any more"
                )
            if now >= until:
                raise SluiceError.resource_exhausted(
                    "NOTHING_ON_OFFER",
                    "no task is on offer: as many groups are under way as the staleness bound allows, or all are lent",
                    RETRY_S,
                )
            await desk.waiting.until(OFFERS, until - now)
        tasks = [self._leased(each, now) for each in leases]
        await desk.journal.durable()
        return episode_pb2.LeaseTasksResponse(tasks=tasks)

    def _leased(self, lease: Lease, now: float) -> episode_pb2.LeasedTask:
        group = self._desk.journal.ledger.groups[lease.group]
        posed, opening = self._desk.posed(group), self._desk.openings.get(lease.group)
        if opening is None:
            raise self._desk.starting(group)
        leased = episode_pb2.LeasedTask(
            task=episode_pb2.Task(task_id=posed.task.task_id, environment=group.environment),
            group_id=group.name,
            episodes=len(lease.lent),
            lease_id=lease.lease_id,
            lease=_duration(self._desk.lending.lease_left(lease, now)),
            evaluation=posed.evaluation,
            opening=opening,
        )
        ParseDict(json.loads(json.dumps(dict(posed.task.data))), leased.task.data)
        return leased

    async def RenewLease(
        self, request: episode_pb2.RenewLeaseRequest, context: Context
    ) -> episode_pb2.RenewLeaseResponse:
        """Prolong a lease."""
        lease = self._desk.lending.renew(principal_of(context), request.lease_id, self._desk.clock())
        return episode_pb2.RenewLeaseResponse(lease=_duration(lease.seconds))

    async def OpenEpisode(
        self, request: episode_pb2.OpenEpisodeRequest, context: Context
    ) -> episode_pb2.OpenEpisodeResponse:
        """Begin an episode of a lease; the gateway adds its own addresses."""
        desk = self._desk
        session = desk.lending.open(principal_of(context), request, desk.clock())
        response = episode_pb2.OpenEpisodeResponse(
            episode_id=session.name,
            sampling=desk.posed(desk.lending.group_of(session)).sampling,
            session_key=desk.session_key(session.name),
            settling_key=desk.settling_key(session.name),
            idle=_duration(desk.limits.idle_s),
        )
        await desk.journal.durable()
        return response

    async def RecordReward(
        self, request: episode_pb2.RecordRewardRequest, context: Context
    ) -> episode_pb2.RecordRewardResponse:
        """Record a reward."""
        self._desk.lending.reward(principal_of(context), request, self._desk.clock(), credential_of(context))
        await self._desk.journal.durable()
        return episode_pb2.RecordRewardResponse()

    async def SubmitTrajectory(
        self, request: episode_pb2.SubmitTrajectoryRequest, context: Context
    ) -> episode_pb2.SubmitTrajectoryResponse:
        """End an episode with what was sampled in it."""
        by = credential_of(context)
        trajectory_ids = self._desk.lending.submit(principal_of(context), request, self._desk.clock(), by)
        await self._desk.journal.durable()
        return episode_pb2.SubmitTrajectoryResponse(trajectory_ids=trajectory_ids)

    async def AbandonEpisode(
        self, request: episode_pb2.AbandonEpisodeRequest, context: Context
    ) -> episode_pb2.AbandonEpisodeResponse:
        """Give an episode up."""
        self._desk.lending.abandon(principal_of(context), request, credential_of(context))
        await self._desk.journal.durable()
        return episode_pb2.AbandonEpisodeResponse()


def _one_message(answer: _Answer) -> _Answer:
    """Return an answer that fits a message.

    Raises:
        SluiceError: FAILED_PRECONDITION.
    """
    if (size := answer.ByteSize()) > MAX_MESSAGE_BYTES:
        raise too_large(size, "call Exchange, which sends it in parts")
    return answer


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration
