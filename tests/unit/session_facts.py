"""The facts of external episodes, in few words."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash
from google.protobuf.duration_pb2 import Duration

from orchestrator_svc.journal.store import Journal
from sluice.v1 import episode_pb2, rollout_pb2, session_pb2, tokens_pb2
from sluice.v1 import journal_pb2 as pb
from sluice.versions import BASE, Version


def digest(ids: Sequence[int]) -> bytes:
    return xxhash.xxh3_128_digest(b"".join(each.to_bytes(4, "little") for each in ids))


def granted(group: int, number: int, episodes: Sequence[int], principal: str = "ann", request: str = "") -> pb.Fact:
    return pb.Fact(
        lease_granted=pb.LeaseGranted(
            group=group,
            lease_id=f"g{group}-lease-{number}",
            principal=principal,
            request_id=request or f"lease-{number}",
            episodes=episodes,
            lease=Duration(seconds=60),
        )
    )


def lease_ended(group: int, number: int) -> pb.Fact:
    return pb.Fact(lease_ended=pb.LeaseEnded(group=group, lease_id=f"g{group}-lease-{number}", reason="EXPIRED"))


def opened(group: int, episode: int, attempt: int = 0, lease: int = 1) -> pb.Fact:
    return pb.Fact(
        episode_opened=pb.EpisodeOpened(
            group=group,
            episode=episode,
            attempt=attempt,
            lease_id=f"g{group}-lease-{lease}",
            request_id=f"open-{episode}-{attempt}",
        )
    )


def generation(
    request: str,
    prompt: Sequence[int],
    *replies: Sequence[int],
    parent: str = "",
    version: Version = BASE,
    temperature: float = 1.0,
    not_trained: str = "",
) -> session_pb2.RecordedGeneration:
    """Return the recording of one request's samples. A token's log-probability identifies the token, and a reply's key its ids."""
    response = rollout_pb2.GenerateResponse(request_id=request, prompt_token_ids=prompt)
    for index, reply in enumerate(replies):
        response.samples.add(
            index=index,
            token_ids=reply,
            logprobs=[-each / 1000 for each in reply],
            version_spans=[tokens_pb2.VersionSpan(start=0, policy_version=version.to_proto())],
            finish_reason=tokens_pb2.FINISH_REASON_STOP,
            text=" ".join(map(str, reply)),
        )
    return session_pb2.RecordedGeneration(
        request_id=request,
        response=response,
        parent=parent,
        keys=[digest([*prompt, *reply]) for reply in replies],
        body_digest=digest([len(prompt), *prompt]),
        temperature=temperature,
        not_trained=not_trained,
        conversation=tokens_pb2.Conversation(
            messages=[tokens_pb2.ChatMessage(role="user", content=" ".join(map(str, prompt)))]
        ),
    )


def recorded(
    journal: Journal,
    group: int,
    episode: int,
    made: session_pb2.RecordedGeneration,
    attempt: int = 0,
    *,
    undelivered: bool = False,
) -> pb.Fact:
    prompt = list(made.response.prompt_token_ids)
    samples = [
        pb.SessionSample(
            key=key, tokens=len(prompt) + len(each.token_ids), ids_digest=digest([*prompt, *each.token_ids])
        )
        for key, each in zip(made.keys, made.response.samples, strict=True)
    ]
    fact = pb.SessionGenerationRecorded(
        group=group,
        episode=episode,
        attempt=attempt,
        request_id=made.request_id,
        parent=made.parent,
        body_digest=made.body_digest,
        samples=samples,
        place=journal.keep(made),
        payload_bytes=made.ByteSize(),
        undelivered=undelivered,
    )
    return pb.Fact(session_generation_recorded=fact)


def delivered(group: int, episode: int, request: str) -> pb.Fact:
    fact = pb.SessionGenerationDelivered(group=group, episode=episode, request_id=request)
    return pb.Fact(session_generation_delivered=fact)


def rewarded(group: int, episode: int, reward: float, attempt: int = 0, **target: str) -> pb.Fact:
    fact = pb.RewardRecorded(group=group, episode=episode, attempt=attempt, reward=reward, **target)
    return pb.Fact(reward_recorded=fact)


def submitted(
    group: int, episode: int, attempt: int = 0, branches: Sequence[Sequence[str]] = (), **fields: object
) -> pb.Fact:
    named = [episode_pb2.Branch(generation_ids=each) for each in branches]
    fact = pb.EpisodeSubmitted(group=group, episode=episode, attempt=attempt, branches=named, **fields)
    return pb.Fact(episode_submitted=fact)


def given_up(group: int, episode: int, attempt: int = 0, *, requeue: bool = True, reason: str = "IDLE") -> pb.Fact:
    return pb.Fact(
        episode_given_up=pb.EpisodeGivenUp(
            group=group, episode=episode, attempt=attempt, reason=reason, requeue=requeue
        )
    )
