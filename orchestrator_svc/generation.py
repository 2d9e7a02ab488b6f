"""Generation through the pool: any replica that is new enough, another one when it fails, on from what was sampled."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import grpc
import structlog

from orchestrator_svc.replica import Replica
from orchestrator_svc.replicas import ReplicaPool
from orchestrator_svc.workflows import derived_seed
from sluice.rpc import SluiceError
from sluice.v1 import rollout_pb2, tokens_pb2
from sluice.versions import Version

__all__ = ["GenerationCounts", "PolicyEngine"]

log = structlog.get_logger(__name__)

_Answer = TypeVar("_Answer")

_ELSEWHERE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""What another replica, or this one after a rest, may do better."""

_INTERRUPTED = {
    tokens_pb2.FINISH_REASON_ABORT,
    tokens_pb2.FINISH_REASON_ERROR,
    tokens_pb2.FINISH_REASON_VERSION_RETIRED,
}
"""Ends that are not the policy's: the sample goes on from its tokens."""

_CONTINUATIONS = 8
"""How often one sample is continued before its group counts as failed."""

_BUSY_RETRY_S = 0.5


@dataclass
class GenerationCounts:
    """What was generated so far.

    Attributes:
        requests: Answered requests.
        spanning: Requests with a sample whose tokens carry more than one policy version.
        tokens: Sampled tokens.
        retried: Attempts that failed and went elsewhere.
        continued: Samples that were interrupted and continued.
    """

    requests: int = 0
    spanning: int = 0
    tokens: int = 0
    retried: int = 0
    continued: int = 0

    def of_policy(self) -> Counter[str]:
        """What the policy produced, by name."""
        return Counter(requests=self.requests, spanning=self.spanning, tokens=self.tokens)


class PolicyEngine:
    """What workflows sample from.

    Args:
        pool: The replicas.
        run: Name of the run; empty leaves it unchecked.
        deadline_s: Seconds for one request at one replica.
        only: Restrict everything to this replica, for a pinned evaluation.
    """

    def __init__(self, pool: ReplicaPool, run: str, deadline_s: float, only: Replica | None = None) -> None:
        self.counts = GenerationCounts()
        self._pool, self._run, self._deadline_s, self._only = pool, run, deadline_s, only

    def pinned(self, replica: Replica) -> PolicyEngine:
        """The same engine restricted to one replica, with counts of its own."""
        return PolicyEngine(self._pool, self._run, self._deadline_s, replica)

    async def agenerate(self, request: rollout_pb2.GenerateRequest) -> rollout_pb2.GenerateResponse:
        """Sample all continuations of a prompt; the caller sets the deadline of the whole.

        Raises:
            SluiceError: if the request itself is at fault, or a sample was interrupted again and again.
        """
        request.run = f"runs/{self._run}" if self._run else ""
        response = await self._anywhere(request, request.n or 1, self._generate_at(request))
        for sample in response.samples:
            await self._continue(request, response.prompt_token_ids, sample)
        self.counts.requests += 1
        self.counts.tokens += sum(len(sample.token_ids) for sample in response.samples)
        self.counts.spanning += any(len(sample.version_spans) > 1 for sample in response.samples)
        return response

    async def tokenize(self, request: rollout_pb2.TokenizeRequest) -> list[int]:
        """Token ids of text or messages, by the model's own tokenizer and template."""

        async def call(replica: Replica) -> rollout_pb2.TokenizeResponse:
            answer: rollout_pb2.TokenizeResponse = await replica.rollout.Tokenize(request, timeout=self._deadline_s)
            return answer

        answer = await self._anywhere(rollout_pb2.GenerateRequest(), 0, call)
        return list(answer.token_ids)

    def _generate_at(
        self, request: rollout_pb2.GenerateRequest
    ) -> Callable[[Replica], Awaitable[rollout_pb2.GenerateResponse]]:
        async def call(replica: Replica) -> rollout_pb2.GenerateResponse:
            answer: rollout_pb2.GenerateResponse = await replica.rollout.Generate(request, timeout=self._deadline_s)
            replica.work_succeeded(newest_version(answer.samples))
            return answer

        return call

    async def _anywhere(
        self, request: rollout_pb2.GenerateRequest, samples: int, call: Callable[[Replica], Awaitable[_Answer]]
    ) -> _Answer:
        """Make a call at one replica after the other until one answers."""
        wanted = Version.from_proto(request.min_policy_version)
        avoid: frozenset[str] = frozenset()
        while True:
            replica = self._only or await self._pool.choose(wanted, avoid)
            try:
                return await self._pool.call(replica, samples, call)
            except SluiceError as failure:
                if not _retryable(failure):
                    raise
                error = failure
            self.counts.retried += 1
            # One line for a replica that fails, not one for each of its requests.
            tell = log.debug if replica.why_not() else log.warning
            tell("generation goes elsewhere", replica=replica.name, error=str(error))
            avoid = frozenset({replica.target})
            if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED or self._only is not None:
                await asyncio.sleep(error.retry_after_s or _BUSY_RETRY_S)
            else:
                replica.work_failed(error)

    async def _continue(
        self, request: rollout_pb2.GenerateRequest, prompt: Iterable[int], sample: rollout_pb2.GeneratedSample
    ) -> None:
        """Sample on, in place, while the sample's end was not the policy's."""
        prompt_ids = list(prompt)
        for _ in range(_CONTINUATIONS):
            if sample.finish_reason not in _INTERRUPTED:
                return
            self.counts.continued += 1
            more = rollout_pb2.GenerateRequest()
            more.CopyFrom(request)
            more.n = 1
            more.request_id = (
                f"{request.request_id}/{sample.index}+{len(sample.token_ids)}" if request.request_id else ""
            )
            more.token_ids.ids[:] = [*prompt_ids, *sample.token_ids]
            if request.sampling.HasField("seed"):
                # The samples of one request share its seed and differ by their index, which a request of one loses.
                more.sampling.seed = derived_seed(request.sampling.seed, sample.index, len(sample.token_ids))
            if request.sampling.HasField("max_tokens"):
                more.sampling.max_tokens = request.sampling.max_tokens - len(sample.token_ids)
                if more.sampling.max_tokens < 1:
                    sample.finish_reason = tokens_pb2.FINISH_REASON_LENGTH
                    return
            answer = await self._anywhere(more, 1, self._generate_at(more))
            append_sample(sample, answer.samples[0])
        raise SluiceError.aborted(
            "INTERRUPTED", f"a sample was interrupted {_CONTINUATIONS} times; is a replica failing?"
        )


def append_sample(sample: rollout_pb2.GeneratedSample, more: rollout_pb2.GeneratedSample) -> None:
    """Append the tokens of a continuation, with their log-probabilities and versions."""
    base = len(sample.token_ids)
    for span in more.version_spans:
        if not sample.version_spans or sample.version_spans[-1].policy_version != span.policy_version:
            sample.version_spans.add(start=base + span.start, policy_version=span.policy_version)
    sample.token_ids.extend(more.token_ids)
    sample.logprobs.extend(more.logprobs)
    sample.text += more.text
    sample.finish_reason = more.finish_reason
    sample.stop_string = more.stop_string


def newest_version(samples: Iterable[rollout_pb2.GeneratedSample]) -> Version:
    """The newest version among the tokens of some samples; (0, 0) if there are none."""
    versions = [Version.from_proto(s.policy_version) for sample in samples for s in sample.version_spans]
    return max(versions, default=Version(0, 0))


def _retryable(error: SluiceError) -> bool:
    if error.code in _ELSEWHERE or error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return True
    # A replica that restarted is on an older version than it last said; another one, or it later, will do.
    return error.code is grpc.StatusCode.FAILED_PRECONDITION and "VERSION" in error.reason
