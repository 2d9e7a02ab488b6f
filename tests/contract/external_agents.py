"""An agent that plays external episodes through the orchestrator's own port, as a gateway passes its calls on."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
import xxhash
from google.protobuf.duration_pb2 import Duration

from sluice.config import SecurityConfig
from sluice.rpc import connect
from sluice.v1 import episode_pb2, episode_pb2_grpc, rollout_pb2, session_pb2, session_pb2_grpc, tokens_pb2

PATIENCE_S = 240.0
_TOKENS = itertools.count(1000)


def digest(ids) -> bytes:
    return xxhash.xxh3_128_digest(b"".join(each.to_bytes(4, "little") for each in ids))


@dataclass
class Played:
    """An episode as its agent remembers it: what it was told."""

    name: str
    lease: str
    sampled: list[int] = field(default_factory=list)
    trajectory_ids: list[str] = field(default_factory=list)


@dataclass
class Gateway:
    """Passes on the calls of one principal, and repeats those that find no orchestrator."""

    sessions: session_pb2_grpc.SessionServiceAsyncStub
    episodes: episode_pb2_grpc.EpisodeServiceAsyncStub
    run: str = "runs/test"
    principal: str = "ann"
    name: str = "east"
    numbers: itertools.count = field(default_factory=itertools.count)

    async def call(self, method: str, request, **metadata: str):
        """Return the answer; wait for an orchestrator that is restarting."""
        stub = self.sessions if hasattr(self.sessions, method) else self.episodes
        sent = tuple({"on-behalf-of": self.principal, **metadata}.items())
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    return await getattr(stub, method)(request, metadata=sent, timeout=PATIENCE_S, wait_for_ready=True)
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
                await asyncio.sleep(0.05)

    async def lease(self, request_id: str = "", **fields) -> list[episode_pb2.LeasedTask]:
        request = episode_pb2.LeaseTasksRequest(
            run=self.run, request_id=request_id or f"lease-{self.name}-{next(self.numbers)}", max_tasks=1, **fields
        )
        request.wait.CopyFrom(Duration(seconds=60))
        return list((await self.call("LeaseTasks", request)).tasks)

    async def open(self, lease: str, request_id: str = "") -> episode_pb2.OpenEpisodeResponse:
        name = request_id or f"open-{self.name}-{next(self.numbers)}"
        return await self.call("OpenEpisode", episode_pb2.OpenEpisodeRequest(lease_id=lease, request_id=name))

    async def turn(self, session: str, history: list[int], version, *, samples: int = 1) -> list[list[int]]:
        """Sample one turn as a gateway does: begin, sample, record; return the token ids of each sample, prompt included."""
        name = f"{session}/{self.name}-{next(self.numbers)}"
        begin = session_pb2.BeginGenerationRequest(
            episode_id=session,
            request_id=name,
            gateway=self.name,
            body_digest=digest([len(history), next(_TOKENS)]),
            prefix_keys=[digest(history)] if history else [],
        )
        begin.claim.CopyFrom(Duration(seconds=60))
        begun = await self.call("BeginGeneration", begin)
        assert list(begun.continues.ids) == history
        prompt = [*history, next(_TOKENS)]
        replies = [[next(_TOKENS), next(_TOKENS)] for _ in range(samples)]
        response = rollout_pb2.GenerateResponse(request_id=name, prompt_token_ids=prompt)
        for index, reply in enumerate(replies):
            response.samples.add(
                index=index,
                token_ids=reply,
                logprobs=[-0.5] * len(reply),
                version_spans=[tokens_pb2.VersionSpan(start=0, policy_version=version.to_proto())],
                finish_reason=tokens_pb2.FINISH_REASON_STOP,
                text="ab" if index == 0 else "bb",
            )
        made = session_pb2.RecordedGeneration(
            request_id=name,
            response=response,
            keys=[digest([*prompt, *reply]) for reply in replies],
            body_digest=begin.body_digest,
            temperature=1.0,
            conversation=tokens_pb2.Conversation(messages=[tokens_pb2.ChatMessage(role="user", content="abc")]),
            dialect="openai.chat",
        )
        record = session_pb2.RecordGenerationRequest(episode_id=session, gateway=self.name, generation=made)
        first = await self.call("RecordGeneration", record)
        assert first == await self.call("RecordGeneration", record)
        assert first.parent == begun.parent
        return [[*prompt, *reply] for reply in replies]

    async def submit(self, session: str, **fields) -> list[str]:
        request = episode_pb2.SubmitTrajectoryRequest(episode_id=session, **fields)
        return list((await self.call("SubmitTrajectory", request)).trajectory_ids)

    async def reward(self, session: str, reward: float, **target: str) -> None:
        await self.call("RecordReward", episode_pb2.RecordRewardRequest(episode_id=session, reward=reward, **target))


@contextlib.asynccontextmanager
async def gateway(
    target: str, principal: str = "ann", security: SecurityConfig | None = None
) -> AsyncIterator[Gateway]:
    async with connect(target, security or SecurityConfig(), role="gateway") as channel:
        yield Gateway(
            session_pb2_grpc.SessionServiceStub(channel),
            episode_pb2_grpc.EpisodeServiceStub(channel),
            principal=principal,
        )
