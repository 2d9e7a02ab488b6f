# ruff: noqa: N802 - gRPC names the methods
"""EpisodeService for agents: forwards leases and submissions to the orchestrator unchanged, and samples and records generations itself."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import xxhash

from gateway_svc.config import CaptureConfig
from gateway_svc.orchestrator import SessionRef
from gateway_svc.recording import RecordedSessions, RequestIdentity, settle_sampling
from gateway_svc.shared import Parts, paced
from sluice.openai.answers import Begun, Delta, Result
from sluice.openai.bodies import ClientRequest
from sluice.rpc import MAX_MESSAGE_BYTES, MAX_SAMPLES, SluiceError
from sluice.rpc.parts import PART_BYTES
from sluice.v1 import episode_pb2, episode_pb2_grpc, rollout_pb2

DIALECT = "grpc"

SESSION_KEY_METADATA = "session-key"
"""Metadata with the session key or the settling key of the episode that a call is about."""

_WRAPPING_BYTES = 16
"""Most bytes that the field of a result adds to a message of a stream."""

Context = grpc.aio.ServicerContext[Any, Any]


class EpisodeServicer(episode_pb2_grpc.EpisodeServiceServicer):
    """Serves agents.

    Args:
        sessions: Find, sample and record.
        capture: The settings.
    """

    def __init__(self, sessions: RecordedSessions, capture: CaptureConfig) -> None:
        self._sessions, self._capture = sessions, capture

    async def LeaseTasks(
        self, request: episode_pb2.LeaseTasksRequest, _context: Context
    ) -> episode_pb2.LeaseTasksResponse:
        """Lease episodes."""
        return await self._sessions.lease_tasks(request)

    async def RenewLease(
        self, request: episode_pb2.RenewLeaseRequest, context: Context
    ) -> episode_pb2.RenewLeaseResponse:
        """Prolong a lease."""
        return await self._sessions.renew_lease(request, _key_of(context))

    async def OpenEpisode(
        self, request: episode_pb2.OpenEpisodeRequest, _context: Context
    ) -> episode_pb2.OpenEpisodeResponse:
        """Open an episode."""
        return await self._sessions.open_episode(request)

    async def Generate(
        self, request: episode_pb2.EpisodeServiceGenerateRequest, context: Context
    ) -> episode_pb2.EpisodeServiceGenerateResponse:
        """Sample and record."""
        result = None
        async with contextlib.aclosing(await self._sample(request, context, stream=False)) as parts:
            async for part in parts:
                if isinstance(part, Result):
                    result = _one_message(part, request)  # by asking for the next part we say that the client has it
        if result is not None:
            return result
        raise SluiceError.unavailable("INTERRUPTED", "the reply broke off; send the same request again")

    async def GenerateStream(
        self, request: episode_pb2.EpisodeServiceGenerateStreamRequest, context: Context
    ) -> AsyncIterator[episode_pb2.EpisodeServiceGenerateStreamResponse]:
        """Sample and record, with the text meanwhile."""
        async with contextlib.aclosing(await self._sample(request.request, context, stream=True)) as parts:
            async for part in parts:
                for answer in _answers(part, request):
                    yield answer

    async def RecordReward(
        self, request: episode_pb2.RecordRewardRequest, context: Context
    ) -> episode_pb2.RecordRewardResponse:
        """Record a reward."""
        await self._sessions.reward(SessionRef(request.episode_id, _key_of(context)), request)
        return episode_pb2.RecordRewardResponse()

    async def SubmitTrajectory(
        self, request: episode_pb2.SubmitTrajectoryRequest, context: Context
    ) -> episode_pb2.SubmitTrajectoryResponse:
        """End an episode."""
        return await self._sessions.submit(SessionRef(request.episode_id, _key_of(context)), request)

    async def AbandonEpisode(
        self, request: episode_pb2.AbandonEpisodeRequest, context: Context
    ) -> episode_pb2.AbandonEpisodeResponse:
        """Give an episode up."""
        await self._sessions.abandon(SessionRef(request.episode_id, _key_of(context)), request)
        return episode_pb2.AbandonEpisodeResponse()

    async def _sample(
        self, request: episode_pb2.EpisodeServiceGenerateRequest, context: Context, *, stream: bool
    ) -> Parts:
        """Begin to sample. Return the parts of the reply, which end at the caller's deadline."""
        session = await self._sessions.find(SessionRef(request.episode_id, _key_of(context)))
        captured = _captured(request)
        captured.stream = stream
        settle_sampling(captured, "allow" if session.evaluation else self._capture.on_unsupported)
        # A request without a name is another sample each time; one with a name is its own repetition.
        content = request.SerializeToString(deterministic=True) + (b"" if request.request_id else uuid.uuid4().bytes)
        identity = RequestIdentity(xxhash.xxh3_128_digest(content), is_retry=bool(request.request_id))
        remaining_s = context.time_remaining()
        deadline_s = min(self._capture.deadlines.request_s, remaining_s or self._capture.deadlines.request_s)
        source = self._sessions.generate(session, captured, identity, request.request_id)
        return paced(source, self._capture.deadlines.keepalive_s, deadline_s)


def _key_of(context: Context) -> str:
    """Return the key of its session that a call shows; empty if it shows none."""
    for key, value in context.invocation_metadata() or ():
        if key == SESSION_KEY_METADATA and isinstance(value, str):
            return value
    return ""


def _answers(
    part: Begun | Delta | Result | None, request: episode_pb2.EpisodeServiceGenerateStreamRequest
) -> Iterator[episode_pb2.EpisodeServiceGenerateStreamResponse]:
    """Yield the messages to send for a part of a reply: one, or several if a result is too large for one."""
    if request.takes_parts and isinstance(part, Result) and not _fits(part):
        whole = memoryview(part.SerializeToString())
        for start in range(0, len(whole), PART_BYTES):
            content = bytes(whole[start : start + PART_BYTES])
            yield episode_pb2.EpisodeServiceGenerateStreamResponse(result_part=content)
        return
    answer = episode_pb2.EpisodeServiceGenerateStreamResponse()
    if isinstance(part, Result):
        answer.result.CopyFrom(_one_message(part, request.request))
    elif isinstance(part, Delta):
        answer.deltas.add(index=part.index, text=part.content, reasoning=part.reasoning)
    yield answer


def _fits(result: Result) -> bool:
    """Return whether a result fits a message."""
    return result.ByteSize() + _WRAPPING_BYTES <= MAX_MESSAGE_BYTES


def _one_message(result: Result, request: episode_pb2.EpisodeServiceGenerateRequest) -> Result:
    """Return a result that fits a message.

    Raises:
        SluiceError: FAILED_PRECONDITION.
    """
    if _fits(result):
        return result
    again = "repeat the request" if request.request_id else "give requests a request_id, and send them"
    raise SluiceError.failed_precondition(
        "MESSAGE_TOO_LARGE",
        f"message_bytes: the reply is recorded, but has {result.ByteSize()} bytes, and the contracts allow {MAX_MESSAGE_BYTES}: {again}"
        " with GenerateStream and takes_parts; or ask for fewer or shorter samples, or over HTTP",
    )


def _captured(request: episode_pb2.EpisodeServiceGenerateRequest) -> ClientRequest:
    """Return a request to this port as a request to the sessions.

    Raises:
        SluiceError: INVALID_ARGUMENT without a prompt, or with too many samples.
    """
    captured = ClientRequest(DIALECT, "", rollout_pb2.GenerateRequest())
    generate = captured.generate
    match request.WhichOneof("prompt"):
        case "conversation":
            generate.conversation.CopyFrom(request.conversation)
        case "token_ids":
            generate.token_ids.CopyFrom(request.token_ids)
        case _:
            raise SluiceError.invalid_argument("prompt", "set conversation or token_ids")
    generate.sampling.CopyFrom(request.sampling)
    generate.n = request.n if request.HasField("n") else 1
    if not 1 <= generate.n <= MAX_SAMPLES:
        raise SluiceError.invalid_argument("n", f"must be between 1 and {MAX_SAMPLES}, not {generate.n}")
    return captured
