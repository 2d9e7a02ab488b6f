"""Runs episodes of a training run from any program: lease tasks, talk to the policy, give rewards.

    async def play(episode: Episode) -> float:
        messages = [*episode.opening.messages, ChatMessage(role="user", content="Guess a number.")]
        reply = await episode.generate(messages)
        return score(reply.message.content)

    async with AgentClient("127.0.0.1:7105", run="my-run") as agent:
        await agent.run(play, at_a_time=16)

What an episode samples is recorded by the gateway, and trained when the episode was submitted. Messages that were sampled before keep
their exact tokens: send each reply back as it came. proto/sluice/v1/episode.proto has the calls, for other languages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

import grpc
from google.protobuf.duration_pb2 import Duration

from sluice.backoff import Backoff
from sluice.clock import CLOCK, Clock
from sluice.plain_data import plain_data
from sluice.rpc import ClientSecurity, SluiceError, connect
from sluice.v1 import episode_pb2, episode_pb2_grpc, tokens_pb2

if TYPE_CHECKING:  # an agent needs grpcio and protobuf alone
    from sluice.rpc.client_security import Security

RUN_ENDED = "RUN_ENDED"
"""Reason of a gateway whose run has no more episodes."""

RENEWALS = 3
"""How often a lease is renewed within its duration: two calls may be lost."""

WAIT_S = 30.0
"""Seconds that the gateway waits for an offer before it answers that there is none."""

PATIENCE_S = 60.0
"""Seconds that a call is repeated while no gateway answers."""

ANSWER_S = 120.0
"""Seconds that a lease may take, longer than a gateway holds it while the orchestrator restarts."""

RETURN_S = 1.0
"""Seconds to give back an episode that is not played to its end. A supervisor kills two seconds after the drain."""

_LEAST_PAUSE_S = 0.1

_SESSION_KEY = "session-key"
"""Metadata with a key of the episode that a call is about."""

_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reply:
    """One sampled message.

    Attributes:
        generation_id: Name of this generation, to give it a reward of its own.
        message: What the assistant says, with its tool calls. Send it back unchanged in the next request.
        finish_reason: Why sampling ended.
        tokens: Number of sampled tokens.
    """

    generation_id: str
    message: tokens_pb2.ChatMessage
    finish_reason: tokens_pb2.FinishReason.ValueType
    tokens: int


class Episode:
    """One attempt at a task.

    Attributes:
        task: The task: `task_id`, `environment` and `data`.
        opening: Messages to begin with, and tools, where the environment gives them.
        opened: Name, session key and base URLs, for clients of OpenAI's and Anthropic's libraries. The settling key is left out: only
            this object rewards and ends the episode.
        ended: Whether it was submitted or given up.
    """

    def __init__(
        self,
        stub: episode_pb2_grpc.EpisodeServiceAsyncStub,
        leased: episode_pb2.LeasedTask,
        opened: episode_pb2.OpenEpisodeResponse,
    ) -> None:
        self.task, self.opening, self.opened = leased.task, leased.opening, opened
        self.ended = False
        self._stub = stub
        self._settles = ((_SESSION_KEY, opened.settling_key),) if opened.settling_key else ()
        opened.ClearField("settling_key")

    @property
    def data(self) -> dict[str, Any]:
        """Return the data of the task. Whole numbers are ints, although they travel as floats."""
        data: dict[str, Any] = plain_data(self.task.data)
        return data

    async def generate(
        self,
        messages: Sequence[tokens_pb2.ChatMessage],
        tools: Sequence[tokens_pb2.Tool] = (),
        *,
        sampling: tokens_pb2.SamplingParams | None = None,
        timeout_s: float = 600.0,
    ) -> Reply:
        """Sample what the assistant says next.

        Args:
            messages: All messages so far.
            tools: Tools on offer.
            sampling: Where it differs from the run's; temperature, max_tokens and stops may be set.
            timeout_s: Seconds to wait, also while all replicas are busy or away.

        Raises:
            SluiceError: as EpisodeService.Generate.
        """
        request = episode_pb2.EpisodeServiceGenerateRequest(
            episode_id=self.opened.episode_id,
            request_id=uuid.uuid4().hex,
            conversation=tokens_pb2.Conversation(messages=messages, tools=tools),
            sampling=sampling,
        )
        answer = await _patiently(self._stub.Generate, request, timeout_s)
        made = answer.generations[0]
        return Reply(made.generation_id, made.message, made.sample.finish_reason, len(made.sample.token_ids))

    async def reward(self, value: float, *, generation_id: str | None = None, branch: str | None = None) -> None:
        """Record a reward: of the episode, of one generation, or of the branch that ends with a generation."""
        request = episode_pb2.RecordRewardRequest(episode_id=self.opened.episode_id, reward=value)
        if generation_id is not None:
            request.generation_id = generation_id
        if branch is not None:
            request.branch = branch
        await _patiently(self._stub.RecordReward, request, metadata=self._settles)

    async def submit(self, reward: float | None = None, *, truncated: bool = False) -> list[str]:
        """End the episode, and return the names of its trajectories. Without a reward the recorded one counts, or the environment scores."""
        request = episode_pb2.SubmitTrajectoryRequest(
            episode_id=self.opened.episode_id, reward=reward, truncated=truncated
        )
        answer = await _patiently(self._stub.SubmitTrajectory, request, metadata=self._settles)
        self.ended = True
        return list(answer.trajectory_ids)

    async def abandon(self, reason: str, *, requeue: bool = False) -> None:
        """Give the episode up. With `requeue` the gateway offers another attempt at its task."""
        request = episode_pb2.AbandonEpisodeRequest(
            episode_id=self.opened.episode_id, reason=reason[:128], requeue=requeue
        )
        await _patiently(self._stub.AbandonEpisode, request, metadata=self._settles)
        self.ended = True


class AgentClient:
    """Leases and plays episodes through a gateway.

    Args:
        target: Address of the gateway's gRPC port.
        run: Name of the run.
        security: Token of a principal with the role `agent`, and TLS: a `sluice.rpc.ClientSecurity`, or the settings of a process.
        patience_s: Seconds for which a request for a lease is retried while no gateway answers; by default `PATIENCE_S`.
        clock: The time of a drain.
    """

    def __init__(
        self,
        target: str,
        run: str,
        security: Security | None = None,
        *,
        patience_s: float | None = None,
        clock: Clock = CLOCK,
    ) -> None:
        self._channel = connect(target, security or ClientSecurity(), role="agent")
        self._stub = episode_pb2_grpc.EpisodeServiceStub(self._channel)
        self._run, self._patience_s, self._clock = run, patience_s, clock

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._channel.close()

    async def run(
        self,
        play: Callable[[Episode], Awaitable[float | None]],
        *,
        at_a_time: int = 8,
        stop: asyncio.Event | None = None,
        drain_s: float = 5.0,
    ) -> int:
        """Play episodes until the run has ended; return how many were played to their end. Episodes in progress then are dropped.

        Args:
            play: Plays one episode. Returns its reward, or None if it was recorded or the environment scores it. It may submit the
                episode or give it up itself. If it raises, the episode is given up.
            at_a_time: Episodes in progress at a time.
            stop: Once it is set, no more episodes are leased, and this returns when the episodes in progress have ended.
            drain_s: Seconds to wait for these. Episodes that have not ended by then are offered to other agents.

        Raises:
            SluiceError: if the gateway lends no episodes (wrong run, no permission), or does not answer for the client's patience.
        """
        ended, stop = 0, stop or asyncio.Event()
        leasing: set[int] = set()

        async def work(number: int) -> None:
            nonlocal ended
            while not stop.is_set():
                leasing.add(number)
                leased = await self._lease(stop)
                leasing.remove(number)
                if leased is None:
                    return
                async with self._renewed(leased):
                    played = await self._play(play, leased, stop)
                    ended += played  # not `ended += await ...`: other workers change it meanwhile

        workers = [asyncio.create_task(work(number), name=f"agent {number}") for number in range(at_a_time)]
        stopping = asyncio.create_task(stop.wait())
        try:
            # The first worker that ends either learned that the run has ended, or failed.
            done, _ = await asyncio.wait({*workers, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stopping in done:
                for number in leasing:
                    workers[number].cancel()
                with contextlib.suppress(TimeoutError):
                    async with self._clock.timeout(drain_s):
                        await asyncio.wait(workers)
            else:
                for worker in done:
                    worker.result()
        finally:
            for each in (stopping, *workers):
                each.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return ended

    async def _play(
        self, play: Callable[[Episode], Awaitable[float | None]], leased: episode_pb2.LeasedTask, stop: asyncio.Event
    ) -> int:
        request = episode_pb2.OpenEpisodeRequest(lease_id=leased.lease_id, request_id=uuid.uuid4().hex)
        episode: Episode | None = None
        try:
            episode = Episode(self._stub, leased, await _patiently(self._stub.OpenEpisode, request))
            reward = await play(episode)
            if not episode.ended:
                await episode.submit(reward)
        except asyncio.CancelledError:
            if episode is not None and stop.is_set():
                await self._give_back(episode)
            raise
        except Exception as error:  # noqa: BLE001 - the agent's own code may raise anything, and an episode may end while it is played
            log.warning("an episode of task %s is given up: %r", leased.task.task_id, error)
            if episode is not None:
                with contextlib.suppress(SluiceError):
                    await episode.abandon(repr(error))
            return 0
        return 1

    async def _give_back(self, episode: Episode) -> None:
        """Ask the gateway to offer the episode to others. Try for `RETURN_S` at most."""
        with contextlib.suppress(SluiceError, TimeoutError):
            async with asyncio.timeout(RETURN_S):
                await episode.abandon("its agent was stopped", requeue=True)

    async def _return_lease(self, request: episode_pb2.LeaseTasksRequest) -> None:
        """Give back the episode that a cancelled request may have leased: its answer may have been on the way."""
        request.wait.Clear()
        with contextlib.suppress(grpc.aio.AioRpcError):
            leased = (await self._stub.LeaseTasks(request, timeout=RETURN_S)).tasks[0]
            opening = episode_pb2.OpenEpisodeRequest(lease_id=leased.lease_id, request_id=uuid.uuid4().hex)
            opened = await self._stub.OpenEpisode(opening, timeout=RETURN_S)
            await self._give_back(Episode(self._stub, leased, opened))

    async def _lease(self, stop: asyncio.Event) -> episode_pb2.LeasedTask | None:
        """Lease one episode; None when the run has ended."""
        request = episode_pb2.LeaseTasksRequest(
            run=f"runs/{self._run}",
            request_id=uuid.uuid4().hex,  # repeating a request whose answer was lost returns the same lease
            max_tasks=1,
            max_episodes=1,
            wait=Duration(seconds=int(WAIT_S)),
        )
        while True:
            try:
                return (await _patiently(self._stub.LeaseTasks, request, self._patience_s, answer_s=ANSWER_S)).tasks[0]
            except SluiceError as error:
                if error.reason == RUN_ENDED:
                    return None
                if error.code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
            except asyncio.CancelledError:
                if stop.is_set():
                    await self._return_lease(request)
                raise

    @contextlib.asynccontextmanager
    async def _renewed(self, leased: episode_pb2.LeasedTask) -> AsyncIterator[None]:
        """Keep a lease while the block runs."""

        async def renew() -> None:
            request = episode_pb2.RenewLeaseRequest(lease_id=leased.lease_id)
            while True:
                await asyncio.sleep(leased.lease.ToNanoseconds() / 1e9 / RENEWALS)
                with contextlib.suppress(SluiceError):  # if the lease has ended, later calls for the episode say so
                    await _patiently(self._stub.RenewLease, request)

        renewing = asyncio.create_task(renew(), name=f"lease {leased.lease_id}")
        try:
            yield
        finally:
            renewing.cancel()
            await asyncio.wait({renewing})


async def _patiently(
    method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Answer],
    request: _Request,
    timeout_s: float | None = None,
    *,
    answer_s: float = 0.0,
    metadata: tuple[tuple[str, str], ...] = (),
) -> _Answer:
    """Make an idempotent call. Retry while no gateway answers or the gateway asks to wait.

    Args:
        method: The call.
        request: Its request.
        timeout_s: Seconds until the last attempt; by default `PATIENCE_S`.
        answer_s: Deadline of each attempt in seconds; by default the rest of `timeout_s`.
        metadata: Metadata of the call besides the token.

    Raises:
        SluiceError: the error of the gateway, or the last failure to reach a gateway.
    """
    loop, backoff = asyncio.get_running_loop(), Backoff(first_s=_LEAST_PAUSE_S, longest_s=2.0)
    timeout_s = PATIENCE_S if timeout_s is None else timeout_s
    until, unreached = loop.time() + timeout_s, None
    while True:
        try:
            timeout = answer_s or max(_LEAST_PAUSE_S, until - loop.time())
            return await method(request, timeout=timeout, metadata=metadata)
        except grpc.aio.AioRpcError as failure:
            error, pause_s = SluiceError.from_rpc(failure), backoff.fail()
            if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and error.retry_after_s is not None:
                pause_s = max(pause_s, error.retry_after_s)
            elif error.code is grpc.StatusCode.UNAVAILABLE:
                unreached = error
            else:
                late = unreached if error.code is grpc.StatusCode.DEADLINE_EXCEEDED else None
                raise _with_remedy(late or error, timeout_s) from failure
            if loop.time() + pause_s >= until:
                raise _with_remedy(error, timeout_s) from failure
            await asyncio.sleep(pause_s)


def _with_remedy(error: SluiceError, timeout_s: float) -> SluiceError:
    """Return the error. If the call did not reach a gateway, add what to check."""
    if error.reason != grpc.StatusCode.UNAVAILABLE.name:
        return error
    return SluiceError(
        error.code,
        error.reason,
        f"no gateway answered for {timeout_s:g} s ({error.message}): check that the run is alive, and that the address is the gRPC"
        " one of its gateway (gateway.server.port, not http_port)",
        retry_after_s=error.retry_after_s,
    )
