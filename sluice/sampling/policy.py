"""Sampling from the policy in spite of failing replicas, for workflows and for a gateway's clients.

`PolicyEngine.agenerate` returns when all samples have ended, `PolicyEngine.stream` yields their tokens and text meanwhile.

Each request is a stream, so that the tokens of a replica that dies, hangs, drains or is evicted are not lost. The unfinished samples of
the request continue at other replicas from the tokens that arrived, all samples concurrently.

A call is retried until the caller's deadline only if waiting helps: the replica is unreachable, starting, draining or full. Any other
failure may be the request's own fault, so the number of tries is limited.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from typing import NamedTuple

import grpc
import structlog

from sluice.clock import Clock
from sluice.rpc import SluiceError
from sluice.sampling.config import ReplicasConfig
from sluice.sampling.generation import Failure, Generation, Part, bounded_id
from sluice.sampling.lockstep import Lockstep
from sluice.sampling.pool import ReplicaPool
from sluice.sampling.progress import Loss
from sluice.sampling.replica import REPLICA_LOST, REPLICA_STALLED, REPLICA_WAITS, Replica, is_broken
from sluice.sampling.served import Place, ServedDeadline, place_of
from sluice.tasks import discard_outcome
from sluice.v1 import rollout_pb2
from sluice.versions import BASE, Version

log = structlog.get_logger(__name__)

_ELSEWHERE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.DATA_LOSS,
}
"""Codes of failures that may not occur at another replica, or at the same one later."""

_RENDERING_BUSY = "RENDERING_BUSY"

_AWAY = {"DRAINING", "ENGINE_RECOVERING", _RENDERING_BUSY, REPLICA_LOST, REPLICA_STALLED, REPLICA_WAITS}
"""Reasons of UNAVAILABLE that say nothing about the request. It waits for a replica."""

_FAULTS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
"""Codes with which a server says that it failed at this request, if a reason other than the code's name comes with them."""

_MOST_FAULTS = 3
"""How often in a row replicas may fail at a request, without a new token, before the request fails. One or two replicas may be faulty
themselves; if three fail, the request is the likelier cause."""

_SHORTEST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 10.0
"""Seconds before the third try of a request that failed, doubled before each further try up to the longest pause, so that a fleet that fails
for a moment has time to recover. The second try is made at once, since another replica may be healthy."""

_FRUITLESS = 8
"""How often in a row samples may be interrupted, without a new token, before their request fails. More than `_MOST_FAULTS`, since the
request need not be the cause: engines die of other requests, and networks break."""

_BUSY_RETRY_S = 0.5

_MOST_SAID = 400
"""Maximum number of characters of each replica's error in the error of a request that failed at several replicas."""

_MOST_UNSENT = 64
"""Maximum number of tokens of one sample that a replica collects before it sends them, as the contract says."""

MOST_COALESCE_S = 60.0
"""Maximum seconds of tokens in one message, as the contract says."""

_MOST_MESSAGES_PER_S = 1000
"""Maximum number of messages per second of all streams together, sent because the time is up. Each costs the event loop about 0.14 ms."""

_SHORTEST_S = 1e-3
"""Minimum seconds over which a rate of tokens is measured."""

_RATE_WEIGHT = 0.1
"""Weight of the latest stream in the mean rate."""


class TokenStream:
    """The tokens and the text of one request as they become final: no failure of a replica takes them back.

    Iterate over it for messages as `RolloutService.GenerateStream` sends them: the first message has the opening; a message without deltas is
    a sign of life. Unread messages are merged, so that a slow reader gets fewer and larger ones.

    Args:
        generation: The request and its samples.
        coalesce_s: Seconds of tokens that a replica should put into one message; None: as the settings say.
        alive_s: Seconds without tokens after which to send a sign of life, even while no replica has the request.
        clock: The time.
    """

    def __init__(self, generation: Generation, coalesce_s: float | None, alive_s: float, clock: Clock) -> None:
        self.coalesce_s = coalesce_s
        self._generation, self._alive_s, self._clock = generation, alive_s, clock
        self._unread: list[rollout_pb2.SampleDelta] = []
        self._opened = False
        self._changed = asyncio.Event()
        self._ended: asyncio.Task[None] | None = None

    @property
    def response(self) -> rollout_pb2.GenerateResponse:
        """The answer so far. It is complete when the iteration has ended."""
        return self._generation.response

    @property
    def replicas(self) -> list[str]:
        """Addresses of the replicas that were asked, in order."""
        return self._generation.replicas

    def end(self, sampling: asyncio.Task[None]) -> None:
        """Note that the task that sampled has ended, with or without an error."""
        self._ended = sampling
        self._changed.set()

    def add(self, part: Part, model: rollout_pb2.GetModelResponse) -> None:
        """Collect what became final in the samples of a part, at a replica that serves `model`."""
        self._unread.extend(self._generation.final_deltas(part, model))
        if self._unread or (part.opened and not self._opened):
            self._changed.set()

    async def __aiter__(self) -> AsyncGenerator[rollout_pb2.GenerateStreamResponse, None]:
        while True:
            while (message := self._news()) is not None:
                yield message
            if self._ended is not None:
                self._ended.result()
                return
            with suppress(TimeoutError):
                async with self._clock.timeout(self._alive_s):
                    await self._changed.wait()
            if not self._changed.is_set():
                yield rollout_pb2.GenerateStreamResponse(chunk=rollout_pb2.StreamChunk())
            self._changed.clear()

    def _news(self) -> rollout_pb2.GenerateStreamResponse | None:
        """Return the next message to read; None if there is nothing to read."""
        response = self.response
        opens = not self._opened and bool(response.prompt_token_ids)
        if not opens and not self._unread:
            return None
        message = rollout_pb2.GenerateStreamResponse()
        message.chunk.SetInParent()
        message.chunk.deltas.extend(self._unread)
        self._unread.clear()
        if opens:
            self._opened = True
            message.opening.request_id, message.opening.continued = response.request_id, response.continued
            message.opening.prompt_token_ids.MergeFrom(response.prompt_token_ids)
            message.opening.tokenizer_digest = response.tokenizer_digest
        return message


class _Asked(NamedTuple):
    """A request in progress: its samples, the keys of its prefix, the stream that reads along, and the causes that were logged."""

    generation: Generation
    keys: Sequence[str]
    stream: TokenStream | None
    told: set[tuple[str, str]]


class PolicyEngine:
    """Samples from the policy through the pool.

    Args:
        run: Name of the run. Empty: replicas do not check it.
        deadline_s: Seconds for one request at one replica.
        only: Use only this replica, for an evaluation that is pinned to one version. It has separate counts.
        lockstep: Hands the requests of a deterministic run over in rounds. None: each request is made at once.
        deadline: Counts the time in which requests are served. None: it is not counted.

    Attributes:
        counts: Counts of this process: "requests" that were answered, answered requests with a sample of several policy versions
            ("spanning"), "tokens" sampled, failed attempts that were retried ("retried"), samples that "continued" from their
            tokens, tokens that were kept in this way ("tokens_kept"), and tokens that were sampled and thrown away
            ("tokens_lost"). The last count includes an estimate of the tokens that lost replicas had not sent yet.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        run: str,
        deadline_s: float,
        only: Replica | None = None,
        *,
        lockstep: Lockstep | None = None,
        deadline: ServedDeadline | None = None,
    ) -> None:
        self.pool, self.lockstep = pool, lockstep
        self._deadline = deadline
        self.counts: Counter[str] = pool.counts if only is None else Counter()
        self._run, self._deadline_s, self._only = run, deadline_s, only

    def pinned(self, replica: Replica) -> PolicyEngine:
        """Return the same engine restricted to one replica, with separate counts."""
        return PolicyEngine(self.pool, self._run, self._deadline_s, replica)

    def timed(self, deadline: ServedDeadline) -> PolicyEngine:
        """Return the same engine, whose requests report to `deadline` when they are served."""
        return PolicyEngine(
            self.pool, self._run, self._deadline_s, self._only, lockstep=self.lockstep, deadline=deadline
        )

    def _asking(self) -> AbstractContextManager[Callable[[Place], None]]:
        """Count a request as in progress in the block. The block reports the place of the request to the function that this returns."""
        return nullcontext(lambda _: None) if self._deadline is None else self._deadline.request()

    def scoring(self) -> AbstractContextManager[None]:
        """Count the time of the block as scoring, which has a separate time limit."""
        return nullcontext() if self._deadline is None else self._deadline.scoring()

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[PolicyEngine]:
        """Run one of several episodes of a group in the block, with the engine that this yields. It has a separate deadline.

        Without this, all episodes share one deadline, and if one is late, the finished ones are lost, too.

        Raises:
            OverdueError: if the episode is late. The others continue.
        """
        if self._deadline is None:
            yield self
            return
        async with self._deadline.part() as own:
            yield self.timed(own)

    def side_by_side(self, episodes: int) -> AbstractContextManager[Callable[[], None]]:
        """Note that a group runs this number of episodes concurrently in the block. Each calls the returned function when it ends."""
        return nullcontext(lambda: None) if self.lockstep is None else self.lockstep.side_by_side(episodes)

    async def agenerate(
        self, request: rollout_pb2.GenerateRequest, prefix_keys: Sequence[str] = (), replicas: list[str] | None = None
    ) -> rollout_pb2.GenerateResponse:
        """Sample all continuations of a prompt; the caller sets the deadline of the whole.

        Args:
            request: The request. It may not ask for log-probabilities of the prompt, which streams do not have.
            prefix_keys: Keys for the tokens that the prompt begins with, the most specific first, such as the names of its episode and
                its group. Requests with a common key go to the replica that has these tokens in its cache.
            replicas: List to which the addresses of the replicas that are asked are added.

        Raises:
            SluiceError: if the request itself is at fault, or if too many times in a row replicas failed at it or a sample was interrupted.
        """
        generation = self._generation(request, prefix_keys)
        generation.replicas = replicas if replicas is not None else []
        await self._sample(_Asked(generation, prefix_keys, None, set()))
        return generation.response

    @asynccontextmanager
    async def stream(
        self,
        request: rollout_pb2.GenerateRequest,
        prefix_keys: Sequence[str] = (),
        *,
        coalesce_s: float | None = 0.05,
        alive_s: float = 1.0,
    ) -> AsyncIterator[TokenStream]:
        """Sample like `agenerate`, while the block reads the tokens. Leaving the block ends the sampling.

        Args:
            request: As for `agenerate`. If it asks for text, deltas have text. If it asks for messages, the last delta of each sample has one.
            prefix_keys: As for `agenerate`.
            coalesce_s: Seconds of tokens in one message; more with thousands of requests in progress. None: as the settings say.
            alive_s: Seconds without tokens after which a message without deltas comes.

        Raises:
            SluiceError: as `agenerate`, raised by the iteration.
        """
        generation = self._generation(request, prefix_keys)
        stream = TokenStream(generation, coalesce_s, alive_s, self.pool.clock)
        sampling = asyncio.create_task(
            self._sample(_Asked(generation, prefix_keys, stream, set())), name="stream tokens"
        )
        discard_outcome(sampling)  # the reader may leave while it fails
        sampling.add_done_callback(stream.end)
        try:
            yield stream
        finally:
            sampling.cancel()
            await asyncio.wait({sampling})

    def _generation(self, request: rollout_pb2.GenerateRequest, prefix_keys: Sequence[str]) -> Generation:
        """Make a new request ready to be sent. Return its samples.

        Raises:
            SluiceError: if it asks for something that streams do not have.
        """
        if request.return_prompt_logprobs:
            raise SluiceError.invalid_argument(
                "return_prompt_logprobs", "streams have none: call Generate of a replica"
            )
        request.run = f"runs/{self._run}" if self._run else ""
        request.request_id = bounded_id(request.request_id)
        request.tenant = prefix_keys[0] if prefix_keys else ""
        return Generation(request)

    async def _sample(self, asked: _Asked) -> None:
        """Sample a request to its end, and count its tokens."""
        request = asked.generation.request
        if self.lockstep is not None:
            with self._asking() as at:
                at(Place.QUEUED)
                request.priority = await self.lockstep.turn(request.request_id)
        try:
            await self._finish(asked)
        finally:
            if self.lockstep is not None:
                self.lockstep.arrived(request.request_id)
        asked.generation.response.sample_time.GetCurrentTime()
        samples = asked.generation.response.samples
        self.counts["requests"] += 1
        self.counts["tokens"] += sum(len(sample.token_ids) for sample in samples)
        self.counts["spanning"] += any(len(sample.version_spans) > 1 for sample in samples)

    async def tokenize(self, request: rollout_pb2.TokenizeRequest) -> list[int]:
        """Return the token ids of text or messages, by the model's own tokenizer and template; the caller sets the deadline.

        Raises:
            SluiceError: if the text is at fault, or replicas failed at it too often.
        """
        told: set[tuple[str, str]] = set()
        tries, failures, avoid = 0, list[Failure](), ""
        while True:
            with self._asking():
                replica = self._only or await self.pool.choose(BASE, {avoid, *(each.target for each in failures)})
            call = replica.rollout.Tokenize(request, timeout=self._deadline_s)
            try:
                with replica.working(call, 0, streams=False):
                    return list((await call).token_ids)
            except SluiceError as error:
                await self._failed(replica, error, told, is_first=not failures)
                if not _waits(error):
                    tries += 1
                    if (failure := _failure_of(replica, error)) is not None:
                        failures.append(failure)
                    self._require_another_try(tries, failures, error)
                    await self._pause(tries)
            avoid = replica.target

    async def _finish(self, asked: _Asked) -> None:
        """Ask one replica for all samples, then others, concurrently, for the samples that are left."""
        if self._only is None:
            with self._asking() as at:
                at(Place.QUEUED)
                await self.pool.room()
        left = await self._attempt(asked, asked.generation.whole())
        under_way: set[asyncio.Task[list[Part]]] = set()
        try:
            while left or under_way:
                under_way |= {asyncio.create_task(self._attempt(asked, part)) for part in left}
                done, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                discard_outcome(*done)  # if several failed, only one error is raised
                left = [part for each in done for part in each.result()]
        finally:
            for each in under_way:
                each.cancel()
            if under_way:
                await asyncio.wait(under_way)
                discard_outcome(*under_way)

    async def _attempt(self, asked: _Asked, part: Part) -> list[Part]:
        """Ask one replica for samples. Return the parts that are left to ask for.

        Raises:
            SluiceError: if the request is at fault, or if too many times in a row replicas failed at it or its samples were interrupted.
        """
        with self._asking() as at:
            return await self._attempt_at(asked, part, at)

    async def _attempt_at(self, asked: _Asked, part: Part, at: Callable[[Place], None]) -> list[Part]:
        """Do what `_attempt` says, and report the place of the request to `at`."""
        wanted = Version.from_proto(part.request.min_policy_version)
        avoid = {part.avoid, *(each.target for each in part.failures)}
        replica = self._only or await self.pool.choose(wanted, avoid, asked.keys)
        if replica.target not in asked.generation.replicas:
            asked.generation.replicas.append(replica.target)
        at(Place.QUEUED)
        problem: SluiceError | None = None
        try:
            await self._receive(replica, part, asked.stream, at)
            replica.work_succeeded(part.newest_version)
        except SluiceError as error:
            problem = error
            at(Place.QUEUED)
            await self._failed(replica, error, asked.told, is_first=not part.failures)
        finally:
            self.pool.let_in()
        # A request that kills or hangs every replica that begins with it must not go through the whole fleet.
        lost = problem is not None and part.opened and _is_lost(problem)
        failed = problem is not None and not _waits(problem)
        left = asked.generation.rest(
            part,
            replica.model,
            replica.target,
            interrupted=problem is None or failed or lost,
            stalled=problem is not None and problem.reason == REPLICA_STALLED,
            failure=None if problem is None else _failure_of(replica, problem),
        )
        if asked.stream is not None:
            asked.stream.add(part, replica.model)
        if part.gained and replica.name not in asked.generation.response.replicas:
            asked.generation.response.replicas.append(replica.name)
        self.counts["tokens_lost"] += part.unusable
        self.counts["tokens_kept"] += part.kept
        self.counts["continued"] += sum(each.continues for each in left)
        for each in left:
            self._require_another_try(each.tries, each.failures, problem)
        if failed:
            await self._pause(max((each.tries for each in left), default=0))
        return left

    def _require_another_try(self, tries: int, failures: Sequence[Failure], problem: SluiceError | None) -> None:
        """Check that a request may be tried once more.

        Args:
            tries: Number of tries in a row that brought no token.
            failures: Errors of the replicas that failed at the request during these tries.
            problem: Error that ended the last try; None if its stream ended in order.

        Raises:
            SluiceError: if the request was tried too often.
        """
        if len(failures) >= _MOST_FAULTS and problem is not None:
            if len({each.target for each in failures}) > 1:
                self.pool.forgive(failures[0].target)  # only the first replica got a pause for its failure
            said = "; ".join(each.said for each in failures)
            raise SluiceError(
                problem.code,
                problem.reason,
                f"the request failed {len(failures)} times in a row: {said}. The request is the likely cause: look for it in the"
                " logs of these replicas, and change it or leave it out",
                retry_after_s=problem.retry_after_s,
                metadata=problem.metadata,
            )
        if tries >= _FRUITLESS:
            reason = f", the last time because: {problem}" if problem else ": look for the reason in the replicas' logs"
            raise SluiceError.aborted("INTERRUPTED", f"a sample was interrupted {_FRUITLESS} times in a row{reason}")

    async def _pause(self, tries: int) -> None:
        """Wait before a failed request is retried. After the first try, do not wait."""
        if tries > 1:
            await self.pool.clock.sleep(min(_LONGEST_PAUSE_S, _SHORTEST_PAUSE_S * 2.0 ** (tries - 2)))

    async def _receive(
        self, replica: Replica, part: Part, stream: TokenStream | None, at: Callable[[Place], None]
    ) -> None:
        """Receive the samples of one replica until its stream ends.

        Raises:
            SluiceError: if the stream ends with an error, breaks, or is given up.
        """
        # Lockstep waits for the first message of each stream, so many streams must not delay it.
        streams = self.pool.calls if self.lockstep is None else 0
        every_s = coalescing_s(self.pool.config, streams, None if stream is None else stream.coalesce_s)
        request = rollout_pb2.GenerateStreamRequest(request=part.request)
        request.coalesce.FromMilliseconds(int(every_s * 1000))
        call = replica.rollout.GenerateStream(request, timeout=self._deadline_s)
        began = heard = self.pool.clock()
        samples, name = len(part.samples), part.request.request_id
        try:
            with replica.working(call, samples, streams=True, stalls=part.stalls) as work:
                while isinstance(message := await call.read(), rollout_pb2.GenerateStreamResponse):
                    part.receive(message)
                    if stream is not None:
                        stream.add(part, replica.model)
                    replica.received(work, message.chunk)
                    if message.HasField("chunk"):
                        at(place_of(message.chunk))
                    if self.lockstep is not None and message.HasField("chunk"):
                        self.lockstep.arrived(name)
                    heard = self.pool.clock()
        except SluiceError as error:
            if _is_lost(error):
                rate = part.gained / samples / max(heard - began, _SHORTEST_S) if part.gained else self.pool.sample_rate
                unsent_s = min(self.pool.clock() - heard, every_s)
                waiting = sum(each.waiting for each in part.samples)
                self.counts["tokens_lost"] += round(min(_MOST_UNSENT, rate * unsent_s) * waiting)
            raise
        self.pool.sample_rate += _RATE_WEIGHT * (
            part.gained / samples / max(heard - began, _SHORTEST_S) - self.pool.sample_rate
        )

    async def _failed(
        self, replica: Replica, error: SluiceError, told: set[tuple[str, str]], *, is_first: bool
    ) -> None:
        """Note that a call failed. Return when it may be retried.

        Args:
            replica: The replica that answered.
            error: Its answer.
            told: Causes (replica and reason) already logged for this request; this cause is added.
            is_first: Whether no replica failed at the request before. If one did, the request is the likely cause, and the replica
                keeps its work.

        Raises:
            SluiceError: `error` itself, if it would be the same at other replicas.
        """
        if not _retryable(error):
            raise error
        self.counts["retried"] += 1
        # Warn once per failing replica, not once per request there; and once per cause for which a request waits.
        cause = (replica.target, error.reason)
        tell = log.debug if replica.why_not() or cause in told else log.warning
        told.add(cause)
        tell("request is repeated at another replica, or later", replica=replica.name, error=str(error))
        if is_broken(error):
            self.pool.evict(replica, Loss.DEAD)
        if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            self.pool.refused(replica)
        elif error.reason == _RENDERING_BUSY:
            pass  # the prompts of its tenant wait for each other: the replica is healthy
        elif replica.loss is None and (is_first or not _is_fault(error)):
            replica.work_failed(error)
        if (
            error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            or error.reason == _RENDERING_BUSY
            or self._only is not None
        ):
            await self.pool.clock.sleep(error.retry_after_s or _BUSY_RETRY_S)


def coalescing_s(config: ReplicasConfig, streams: int, wanted_s: float | None = None) -> float:
    """Return how many seconds of tokens a replica should put into one message while `streams` streams are in progress. Pure.

    The time grows with the number of streams, so that their messages leave the event loop time for other work. It is at most half of
    `progress_s`, because silence for `progress_s` must remain a sign of a stuck stream, and at most what the contract allows.

    Args:
        config: The settings.
        streams: Number of streams in progress.
        wanted_s: Seconds while there are few streams; None: `coalesce_s`.
    """
    least_s = config.coalesce_s if wanted_s is None else wanted_s
    return min(config.progress_s / 2, MOST_COALESCE_S, max(least_s, streams / _MOST_MESSAGES_PER_S))


def _is_lost(error: SluiceError) -> bool:
    """Return whether the replica died or hung."""
    return is_broken(error) or error.reason in (REPLICA_LOST, REPLICA_STALLED)


def _retryable(error: SluiceError) -> bool:
    return error.code in _ELSEWHERE or _waits(error)


def _waits(error: SluiceError) -> bool:
    """Return whether the call may be retried until its caller's deadline: the replica is unreachable, behind, or full."""
    match error.code:
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return True
        case grpc.StatusCode.UNAVAILABLE:
            return is_broken(error) or error.reason in _AWAY
        case grpc.StatusCode.FAILED_PRECONDITION:
            # A restarted replica serves an older version than it last reported. Try another one, or the same one later.
            return "VERSION" in error.reason
    return False


def _is_fault(error: SluiceError) -> bool:
    """Return whether a server failed at the request itself. Errors of gRPC or a proxy for a broken stream have no reason."""
    return error.code in _FAULTS and error.reason != error.code.name


def _failure_of(replica: Replica, error: SluiceError) -> Failure | None:
    """Return the failure of a replica at a request; None if the error has another cause."""
    return Failure(replica.target, f"{replica.name}: {str(error)[:_MOST_SAID]}") if _is_fault(error) else None
