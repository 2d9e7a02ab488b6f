"""An environment on a server of EnvironmentService, at any address and in any language: `grpc://HOST:PORT`.

It is an environment like any other, with coroutine methods. So its calls are made in a process of the run, which enforces their
deadlines. While the server is unreachable, a call is retried until its deadline. A restarted server has lost its episodes: they are
opened again with the same seed, and the same steps are repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Sequence
from typing import Any, TypeVar

import grpc

from sluice.backoff import Backoff
from sluice.clock import CLOCK, Clock
from sluice.config import SecurityConfig
from sluice.environments.base import Message, Score, Task, Turn
from sluice.environments.stored_tasks import StoredTasks
from sluice.environments.wire import chat_messages, plain_messages, plain_tools, task_message, task_of
from sluice.errors import ConfigError
from sluice.rpc import SluiceError, connect
from sluice.v1 import environment_pb2, environment_pb2_grpc, tokens_pb2

SCORE = "score"
"""Feature of a server that has Score."""

DESCRIBE_S = 30.0
"""Seconds for the server to describe its environment."""

CALL_S = 3600.0
"""Maximum seconds of a call. The settings of the run's environment processes have shorter limits."""

CLOSE_S = 5.0
"""Seconds to tell the server that an episode has ended."""

_PAGE_TASKS = 1000

_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")


def connect_environment(address: str, **security: Any) -> RemoteEnvironment:  # noqa: ANN401 - as the settings have it
    """Return the environment on a server.

    Args:
        address: Host and port.
        security: As `[security]`, such as `token_file` or `tls_ca`.

    Raises:
        ConfigError: if no server answers, or its environment can neither be stepped nor scored.
    """
    settings = SecurityConfig.model_validate(security)
    described = asyncio.run(describe(address, settings))
    single, multi = SCORE in described.features, described.multi_turn
    if not (single or multi):
        raise ConfigError(
            f"the environment {described.environment!r} of {address} is neither multi_turn nor has it the feature {SCORE!r}: Describe must"
            " name one of them"
        )
    kind = _Both if single and multi else RemoteQuestions if single else RemoteEpisodes
    return kind(address, settings, described)


async def describe(address: str, security: SecurityConfig, clock: Clock = CLOCK) -> environment_pb2.DescribeResponse:
    """Return a server's description of its environment.

    Raises:
        ConfigError: if it does not answer within `DESCRIBE_S`, or refuses.
    """
    async with contextlib.AsyncExitStack() as stack:
        channel = connect(address, security, role="dispatcher")
        stack.push_async_callback(channel.close)
        method = environment_pb2_grpc.EnvironmentServiceStub(channel).Describe
        try:
            async with clock.timeout(DESCRIBE_S):
                return await _patiently(method, environment_pb2.DescribeRequest())
        except (SluiceError, TimeoutError) as error:
            problem = error.message if isinstance(error, SluiceError) else f"no answer within {DESCRIBE_S:g} s"
            raise ConfigError(
                f"the environment server {address} cannot be used: {problem}; check that it runs there, and the address"
            ) from error


class RemoteEnvironment:
    """The tasks of a server.

    Args:
        address: Host and port.
        security: Security settings to reach it.
        described: Its description of its environment.

    Attributes:
        scoring_s: Maximum seconds that it takes to score one completion; 0 without such a limit.
        scores_together: Whether it scores the completions of a group at the same time.
    """

    def __init__(self, address: str, security: SecurityConfig, described: environment_pb2.DescribeResponse) -> None:
        self.name = described.environment
        self.scoring_s, self.scores_together = described.scoring_s, described.scores_together
        self._address, self._security = address, security
        self._connected: environment_pb2_grpc.EnvironmentServiceAsyncStub | None = None

    @property
    def _stub(self) -> environment_pb2_grpc.EnvironmentServiceAsyncStub:
        if self._connected is None:  # a channel belongs to the event loop in which it was made
            channel = connect(self._address, self._security, role="dispatcher")
            self._connected = environment_pb2_grpc.EnvironmentServiceStub(channel)
        return self._connected

    async def tasks(self, split: str, seed: int) -> Sequence[Task]:
        """Return the tasks of a split."""
        request = environment_pb2.ListTasksRequest(split=split, seed=seed, page_size=_PAGE_TASKS)
        found = StoredTasks()
        while True:
            page = await _patiently(self._stub.ListTasks, request)
            for each in page.tasks:
                found.append(task_of(each))
            if not page.next_page_token:
                return found
            if page.next_page_token == request.page_token or not page.tasks:
                raise ValueError(f"ListTasks of {self._address} does not go on after {len(found)} tasks")
            request.page_token = page.next_page_token

    async def _reset(self, task: Task, seed: int) -> RemoteEpisode:
        request = environment_pb2.ResetRequest(episode_id=uuid.uuid4().hex, task=task_message(task), seed=seed)
        return RemoteEpisode(self._stub, request, await _patiently(self._stub.Reset, request))


class RemoteQuestions(RemoteEnvironment):
    """A server whose environment poses one question and scores answers."""

    async def messages(self, task: Task) -> Sequence[Message]:
        """Return the conversation up to the assistant's answer."""
        opened = await self._reset(task, 0)
        await opened.close()
        return opened.messages

    async def score(self, task: Task, completion: str) -> Score:
        """Return the score of one completion."""
        (score,) = await self.score_batch(task, [completion])
        return score

    async def score_batch(self, task: Task, completions: Sequence[str]) -> list[Score]:
        """Return the scores of completions of a task."""
        request = environment_pb2.ScoreRequest(task=task_message(task))
        for completion in completions:
            request.conversations.add().messages.add(role="assistant", content=completion)
        scores = (await _patiently(self._stub.Score, request)).scores
        if len(scores) != len(completions):
            raise ValueError(f"Score of {self._address} gave {len(scores)} scores for {len(completions)} conversations")
        return [Score(each.reward if each.HasField("reward") else None, dict(each.metrics)) for each in scores]


class RemoteEpisodes(RemoteEnvironment):
    """A server whose environment opens episodes of several turns."""

    async def reset(self, task: Task, seed: int) -> RemoteEpisode:
        """Begin an episode."""
        return await self._reset(task, seed)


class _Both(RemoteQuestions, RemoteEpisodes):
    """A server whose environment both poses questions and opens episodes."""


class RemoteEpisode:
    """An open episode of a server.

    Args:
        stub: The server.
        request: The request that opened it.
        opened: The server's answer to that request.

    Attributes:
        messages: Messages to begin with.
        tools: Functions that the assistant may call.
    """

    def __init__(
        self,
        stub: environment_pb2_grpc.EnvironmentServiceAsyncStub,
        request: environment_pb2.ResetRequest,
        opened: environment_pb2.ResetResponse,
    ) -> None:
        self.messages, self.tools = plain_messages(opened.messages), plain_tools(opened.tools)
        self._stub, self._request, self._opened = stub, request, opened
        self._steps: list[tuple[environment_pb2.StepRequest, environment_pb2.StepResponse]] = []

    async def step(self, completion: str | Message, last: bool = False) -> Turn:
        """Take the assistant's turn: its text, or its message if there are tools; `last` if the run takes no further turn."""
        said = {"role": "assistant", "content": completion} if isinstance(completion, str) else completion
        request = environment_pb2.StepRequest(
            episode_id=self._request.episode_id,
            turn=len(self._steps),
            message=chat_messages([said])[0],
            finish_reason=tokens_pb2.FINISH_REASON_STOP,
            last=last,
        )
        try:
            answer = await _patiently(self._stub.Step, request)
        except SluiceError as error:
            if error.code is not grpc.StatusCode.NOT_FOUND:
                raise
            await self._open_again()
            answer = await _patiently(self._stub.Step, request)
        self._steps.append((request, answer))
        return Turn(
            messages=plain_messages(answer.messages),
            reward=answer.reward if answer.HasField("reward") else None,
            done=answer.done,
            truncated=answer.truncated,
            metrics=dict(answer.metrics),
        )

    async def _open_again(self) -> None:
        """Replay the episode on a server that has lost it.

        Raises:
            ValueError: if its answers differ from the earlier ones.
        """
        same = await _patiently(self._stub.Reset, self._request) == self._opened
        for request, answer in self._steps:
            same = same and await _patiently(self._stub.Step, request) == answer
        if not same:
            raise ValueError(
                "the server has lost the episode, and answered otherwise when it was opened again: an episode can only be continued"
                " if its seed and the completions determine it"
            )

    async def close(self) -> None:
        """Tell the server that the episode has ended. If that fails, the server ends it after its idle time."""
        with contextlib.suppress(SluiceError, grpc.aio.AioRpcError):
            request = environment_pb2.CloseEpisodeRequest(episode_id=self._request.episode_id)
            await self._stub.CloseEpisode(request, timeout=CLOSE_S)


async def _patiently(method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Answer], request: _Request) -> _Answer:
    """Retry an idempotent call while the server is unreachable or asks to wait. The caller cancels this at its deadline."""
    backoff = Backoff(first_s=0.1, longest_s=2.0)
    while True:
        try:
            return await method(request, timeout=CALL_S)
        except grpc.aio.AioRpcError as failure:
            error, pause_s = SluiceError.from_rpc(failure), backoff.fail()
            if error.code not in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED}:
                raise error from failure
            await asyncio.sleep(max(pause_s, error.retry_after_s or 0.0))
