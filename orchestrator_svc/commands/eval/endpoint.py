"""Evaluates a model behind an OpenAI-compatible endpoint: it gets messages and tools, and no tokens are known."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from orchestrator_svc.run.workflows import EpisodeData
from sluice.chat_endpoint import ChatEndpoint
from sluice.config import ConfigError
from sluice.environments.base import Message
from sluice.environments.processes import EnvironmentProcesses
from sluice.environments.wire import chat_messages, tool_messages
from sluice.sampling.policy import PolicyEngine
from sluice.v1 import orchestrator_pb2, tokens_pb2

log = structlog.get_logger(__name__)

_KEPT = ("role", "content", "tool_calls", "reasoning", "reasoning_content")


class EndpointWorkflow:
    """Plays the episodes of a group with an endpoint.

    Args:
        environment: Poses, answers and scores.
        endpoint: The model.
        max_turns: Most answers of an episode.

    Attributes:
        tokens: Tokens that the endpoint says it sampled.

    Raises:
        ConfigError: if the environment leaves its episodes to agents.
    """

    def __init__(self, environment: EnvironmentProcesses, endpoint: ChatEndpoint, max_turns: int) -> None:
        if not (environment.single_turn or environment.multi_turn):
            raise ConfigError(
                f"environment {environment.name} leaves its episodes to agents: an endpoint cannot play them; give model or address"
            )
        self._environment, self._endpoint, self._max_turns = environment, endpoint, max_turns
        self.tokens = 0

    async def arun_episode(self, engine: PolicyEngine, data: EpisodeData) -> list[orchestrator_pb2.TrajectoryRecord]:
        """Play all episodes; the engine is not used.

        Raises:
            Exception: what the last episode raised, if all fail.
        """
        play = self._turns if self._environment.multi_turn else self._question
        outcomes = await asyncio.gather(*(play(data, index) for index in range(data.episodes)), return_exceptions=True)
        records = []
        failure: Exception | None = None
        for index, outcome in enumerate(outcomes):
            if isinstance(outcome, Exception):
                log.warning("episode failed", task=data.task.task_id, episode=index, error=str(outcome))
                failure = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                records.append(outcome)
        if failure is not None and not records:
            raise failure
        return records

    async def _question(self, data: EpisodeData, index: int) -> orchestrator_pb2.TrajectoryRecord:
        messages = await self._environment.messages(data.task)
        said, finish = await self._ask(messages, (), data)
        (score,) = await self._environment.judge(data.task, [said["content"]])
        record = _record(data, index, [*messages, said], (), finish)
        if score.reward is not None:
            record.trajectory.reward = score.reward
        record.metrics.update(score.metrics)
        return record

    async def _turns(self, data: EpisodeData, index: int) -> orchestrator_pb2.TrajectoryRecord:
        rewards: list[float] = []
        metrics: dict[str, float] = {}
        async with self._environment.episode(data.task, data.seed + index) as episode:
            messages, tools = list(episode.messages), episode.tools
            for _ in range(self._max_turns):
                said, finish = await self._ask(messages, episode.tools, data)
                turn = await episode.step(said if episode.tools else said["content"])
                messages += [said, *turn.messages]
                metrics |= turn.metrics
                if turn.reward is not None:
                    rewards.append(turn.reward)
                if turn.done:
                    finish = "length" if turn.truncated else finish
                    break
            else:
                finish = "length"
        record = _record(data, index, messages, tools, finish)
        if rewards:
            record.trajectory.reward = sum(rewards)
        record.metrics.update(metrics)
        return record

    async def _ask(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], data: EpisodeData
    ) -> tuple[Message, str]:
        sampling = data.sampling
        options: dict[str, Any] = {
            "temperature": sampling.temperature,
            "max_tokens": data.task.max_tokens or sampling.max_tokens,
        }
        if sampling.chat_template_kwargs:
            options["chat_template_kwargs"] = dict(sampling.chat_template_kwargs)
        if sampling.stop:
            options["stop"] = list(sampling.stop)
        choice = await self._endpoint.ask(messages, tools, **options)
        self.tokens += int((choice.get("usage") or {}).get("completion_tokens") or 0)
        said = {name: choice["message"][name] for name in _KEPT if choice["message"].get(name)}
        return {"role": "assistant", "content": "", **said}, str(choice.get("finish_reason"))


def _record(
    data: EpisodeData, index: int, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], finish: str
) -> orchestrator_pb2.TrajectoryRecord:
    name = f"{data.group_id}-{index}"
    record = orchestrator_pb2.TrajectoryRecord()
    record.trajectory.trajectory_id = record.trajectory.episode_id = name
    length = finish == "length"
    record.trajectory.finish_reason = tokens_pb2.FINISH_REASON_LENGTH if length else tokens_pb2.FINISH_REASON_STOP
    record.conversation.messages.extend(chat_messages(messages))
    record.conversation.tools.extend(tool_messages(tools))
    return record
