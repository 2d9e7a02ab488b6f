# ruff: noqa: N802 - gRPC names the methods
"""Serves EnvironmentService with an environment that runs in processes of its own.

Reset is idempotent by the episode, Step by the episode and its turn: a repeated call gets the same answer. Idle episodes are closed after
a while.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, TypeAlias

import grpc
import structlog
from prometheus_client import Metric

from envserver_svc.config import EnvServerConfig
from sluice.clock import CLOCK, Clock
from sluice.environments.base import Task
from sluice.environments.episode import OpenEpisode, ReplayDiffersError
from sluice.environments.processes import EnvironmentProcesses
from sluice.environments.remote import SCORE
from sluice.environments.wire import chat_messages, plain_message, task_message, task_of, tool_messages
from sluice.paging import page_start
from sluice.rpc import SluiceError
from sluice.rpc.drain import Drain
from sluice.telemetry import counter, gauge
from sluice.v1 import environment_pb2, environment_pb2_grpc

PAGE_TASKS = 1000
"""Most tasks of a page."""

MOST_CONVERSATIONS = 256
"""Conversations of one Score, as the contract says."""

_LISTINGS = 8
"""Lists of tasks that are remembered, by split and seed."""

_RETRY_S = 1.0

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Served:
    """An open episode. Its calls are answered one after the other."""

    opened: OpenEpisode
    closing: contextlib.AsyncExitStack
    response: environment_pb2.ResetResponse
    used: float
    answers: list[environment_pb2.StepResponse] = field(default_factory=list)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class EnvironmentServicer(environment_pb2_grpc.EnvironmentServiceServicer):
    """Serves one environment.

    Args:
        processes: The processes that run it.
        config: The settings.
        clock: Measures how long episodes are idle.
        drain: Whether the service drains; then it begins no episode.
    """

    def __init__(
        self, processes: EnvironmentProcesses, config: EnvServerConfig, clock: Clock = CLOCK, drain: Drain | None = None
    ) -> None:
        self._processes, self._config, self._clock = processes, config, clock
        self._drain = drain or Drain(clock)
        self._episodes: dict[str, _Served] = {}
        self._opening: dict[str, asyncio.Task[_Served]] = {}
        self._listings: OrderedDict[tuple[str, int], Sequence[Task]] = OrderedDict()

    @property
    def open_episodes(self) -> int:
        """Return how many episodes are open, or about to be."""
        return len(self._episodes) + len(self._opening)

    async def run(self) -> None:
        """Close idle episodes until cancelled; then close all."""
        try:
            while True:
                await self._clock.sleep(self._config.idle_s / 4)
                before = self._clock() - self._config.idle_s
                idle = [name for name, each in self._episodes.items() if each.used < before and not each.lock.locked()]
                for name in idle:
                    log.info("an idle episode is closed", episode=name, idle_s=self._config.idle_s)
                    await self._close(name)
        finally:
            for name in [*self._episodes]:
                await self._close(name)

    def scrape(self) -> Iterator[Metric]:
        """Yield Prometheus metrics about open episodes and failures."""
        yield gauge("sluice_environment_episodes", "Episodes that are open.", float(len(self._episodes)))
        most = float(self._config.most_episodes)
        yield gauge("sluice_environment_max_episodes", "Most episodes that may be open.", most)
        failures = {reason: float(count) for reason, count in self._processes.failures.items()}
        yield counter(
            "sluice_environment_failures", "Calls of the environment that failed, by reason.", failures, "reason"
        )
        ended = {reason: float(count) for reason, count in self._processes.processes_ended.items()}
        yield counter("sluice_environment_processes_ended", "Processes that were replaced, by reason.", ended, "reason")

    async def Describe(
        self, request: environment_pb2.DescribeRequest, context: Context
    ) -> environment_pb2.DescribeResponse:
        """Describe the environment."""
        return environment_pb2.DescribeResponse(
            environment=self._processes.name,
            version=version("sluice"),
            multi_turn=self._processes.multi_turn,
            max_episodes=self._config.most_episodes,
            features=[SCORE] if self._processes.single_turn else [],
            scoring_s=self._processes.scoring.each_s,
            scores_together=self._processes.scoring.together,
        )

    async def ListTasks(
        self, request: environment_pb2.ListTasksRequest, context: Context
    ) -> environment_pb2.ListTasksResponse:
        """List a page of tasks."""
        start = page_start(request.page_token, "ListTasks") or 0
        listing = (request.split, request.seed)
        if listing not in self._listings:
            self._listings[listing] = await self._processes.tasks(*listing)
            while len(self._listings) > _LISTINGS:
                self._listings.popitem(last=False)
        tasks = self._listings[listing]
        self._listings.move_to_end(listing)
        end = start + min(request.page_size or PAGE_TASKS, PAGE_TASKS)
        token = str(end) if end < len(tasks) else ""
        return environment_pb2.ListTasksResponse(tasks=map(task_message, tasks[start:end]), next_page_token=token)

    async def Reset(self, request: environment_pb2.ResetRequest, context: Context) -> environment_pb2.ResetResponse:
        """Begin an episode."""
        if not request.episode_id:
            raise SluiceError.invalid_argument("episode_id", "is empty: choose a name that is unique within the run")
        if not self._processes.multi_turn:
            messages = await self._processes.messages(task_of(request.task))
            return environment_pb2.ResetResponse(messages=chat_messages(messages))
        name = request.episode_id
        if (served := self._episodes.get(name)) is not None:
            return served.response
        opening = self._opening.get(name)
        if opening is None:
            if self._drain.begun.is_set():
                message = "this environment server ends, and begins no episode; open it at another one, or at this one when it is back"
                raise SluiceError.unavailable("DRAINING", message, _RETRY_S)
            if self.open_episodes >= self._config.most_episodes:
                raise SluiceError.resource_exhausted(
                    "TOO_MANY_EPISODES",
                    f"{self._config.most_episodes} episodes are open (envserver.most_episodes): close some, or retry after the delay",
                    _RETRY_S,
                )
            opening = self._opening[name] = asyncio.create_task(self._open(request), name=f"open {name}")
            opening.add_done_callback(lambda _: self._opening.pop(name, None))
        return (await asyncio.shield(opening)).response

    async def _open(self, request: environment_pb2.ResetRequest) -> _Served:
        async with contextlib.AsyncExitStack() as stack:
            opened = await stack.enter_async_context(self._processes.episode(task_of(request.task), request.seed))
            response = environment_pb2.ResetResponse(
                messages=chat_messages(opened.messages), tools=tool_messages(opened.tools)
            )
            served = _Served(opened, stack.pop_all(), response, self._clock())
        self._episodes[request.episode_id] = served
        return served

    async def Step(self, request: environment_pb2.StepRequest, context: Context) -> environment_pb2.StepResponse:
        """Take a turn."""
        served = self._episodes.get(request.episode_id)
        if served is None:
            raise SluiceError.not_found(
                "UNKNOWN_EPISODE",
                f"no episode {request.episode_id!r} is open: it was closed, or idle for {self._config.idle_s:g} s, or the server was"
                " started again; Reset opens it anew",
            )
        async with served.lock:
            served.used = self._clock()
            if request.turn < len(served.answers):
                return served.answers[request.turn]
            if request.turn > len(served.answers) or served.opened.done:
                due = "it has ended" if served.opened.done else f"turn {len(served.answers)} is due"
                raise SluiceError.failed_precondition(
                    "WRONG_TURN", f"this is turn {request.turn} of the episode: {due}"
                )
            try:
                said = plain_message(request.message)
                turn = await served.opened.step(said if served.opened.tools else said["content"], last=request.last)
            except ReplayDiffersError as error:
                raise SluiceError.aborted("REPLAY_DIFFERS", str(error)) from error
            answer = environment_pb2.StepResponse(
                messages=chat_messages(turn.messages),
                reward=turn.reward,
                done=turn.done,
                truncated=turn.truncated,
                metrics=turn.metrics,
            )
            served.answers.append(answer)
            served.used = self._clock()
            return answer

    async def Score(self, request: environment_pb2.ScoreRequest, context: Context) -> environment_pb2.ScoreResponse:
        """Score conversations by what the assistant says last in each."""
        if not self._processes.single_turn:
            raise SluiceError.failed_precondition("NO_SCORE", "this environment scores in Step: call Reset, then Step")
        if len(request.conversations) > MOST_CONVERSATIONS:
            raise SluiceError.invalid_argument(
                "conversations", f"has {len(request.conversations)}; send {MOST_CONVERSATIONS} at most"
            )
        completions = []
        for number, conversation in enumerate(request.conversations):
            if not conversation.messages or conversation.messages[-1].role != "assistant":
                raise SluiceError.invalid_argument(
                    f"conversations[{number}]", "does not end with a message of the assistant"
                )
            completions.append(conversation.messages[-1].content)
        scores = await self._processes.judge(task_of(request.task), completions)
        return environment_pb2.ScoreResponse(
            scores=[environment_pb2.Score(reward=each.reward, metrics=each.metrics) for each in scores]
        )

    async def CloseEpisode(
        self, request: environment_pb2.CloseEpisodeRequest, context: Context
    ) -> environment_pb2.CloseEpisodeResponse:
        """End an episode."""
        await self._close(request.episode_id)
        return environment_pb2.CloseEpisodeResponse()

    async def _close(self, name: str) -> None:
        served = self._episodes.pop(name, None)
        if served is not None:
            async with served.lock:
                await served.closing.aclose()
