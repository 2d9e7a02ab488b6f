"""Several turns with an environment that answers. Sampled ids are kept: what follows is appended, never re-encoded."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import structlog

from orchestrator_svc.envs.base import Episode, Message, MultiTurnEnvironment
from orchestrator_svc.envs.calls import EnvironmentCalls
from orchestrator_svc.workflows.base import EpisodeData, EpisodeEngine, chat_messages, sampling_params
from sluice.rpc import SluiceError
from sluice.v1 import orchestrator_pb2, rollout_pb2, tokens_pb2

__all__ = ["MultiTurn"]

log = structlog.get_logger(__name__)


class MultiTurn:
    """Runs the episodes of a group side by side, turn by turn.

    Args:
        environment: Opens episodes and answers turns.
        max_turns: Most assistant turns; an episode that needs more is truncated.
        calls: Runs the environment's code, each call with a deadline.
    """

    def __init__(self, environment: MultiTurnEnvironment, max_turns: int, calls: EnvironmentCalls) -> None:
        self._environment, self._max_turns, self._calls = environment, max_turns, calls

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> list[orchestrator_pb2.TrajectoryRecord]:
        """Run all episodes; those that fail are left out."""
        outcomes = await asyncio.gather(
            *(self._attempt(engine, data, index) for index in range(data.episodes)), return_exceptions=True
        )
        records = []
        for index, outcome in enumerate(outcomes):
            if isinstance(outcome, BaseException):
                if not isinstance(outcome, Exception):
                    raise outcome
                log.warning("episode failed", group=data.group_id, episode=index, error=repr(outcome))
            else:
                records.append(outcome)
        if not records:
            raise SluiceError.aborted("EPISODES_FAILED", f"every episode of group {data.group_id} failed; see the log")
        return records

    async def _attempt(self, engine: EpisodeEngine, data: EpisodeData, index: int) -> orchestrator_pb2.TrajectoryRecord:
        episode = await self._calls.run(self._environment.reset, data.task, data.seed + index)
        transcript = _Transcript(data, index)
        await transcript.hear(engine, list(episode.messages))
        for turn in range(self._max_turns):
            text = await transcript.speak(engine, turn)
            if await self._answered(engine, transcript, episode, text, turn):
                break
        return transcript.record()

    async def _answered(
        self, engine: EpisodeEngine, transcript: _Transcript, episode: Episode, text: str, turn: int
    ) -> bool:
        """Let the environment answer; returns whether the episode has ended."""
        answer = await self._calls.run(episode.step, text)
        if answer.reward is not None:
            transcript.rewards.append(tokens_pb2.TurnReward(turn=turn, reward=answer.reward))
        cut_off = transcript.finish_reason == tokens_pb2.FINISH_REASON_LENGTH
        if answer.done or cut_off or turn == self._max_turns - 1:
            if answer.truncated or not answer.done:
                transcript.finish_reason = tokens_pb2.FINISH_REASON_LENGTH
            return True
        await transcript.hear(engine, list(answer.messages))
        return False


@dataclass
class _Transcript:
    """One episode's tokens and messages as they grow."""

    data: EpisodeData
    index: int
    ids: list[int] = field(default_factory=list)
    mask_runs: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tokens_pb2.VersionSpan] = field(default_factory=list)
    turn_runs: list[int] = field(default_factory=list)
    rewards: list[tokens_pb2.TurnReward] = field(default_factory=list)
    messages: list[tokens_pb2.ChatMessage] = field(default_factory=list)
    finish_reason: tokens_pb2.FinishReason.ValueType = tokens_pb2.FINISH_REASON_UNSPECIFIED

    async def hear(self, engine: EpisodeEngine, messages: list[Message]) -> None:
        """Append what the environment says, up to where the assistant begins."""
        new = chat_messages(messages)
        request = rollout_pb2.TokenizeRequest(
            conversation=tokens_pb2.Conversation(messages=new), add_generation_prompt=True
        )
        if self.ids:
            request.continues.ids.extend(self.ids)
        ids = await engine.tokenize(request)
        if ids[: len(self.ids)] != self.ids:
            raise SluiceError.data_loss("NOT_APPENDED", "Tokenize changed ids that it was told to continue")
        self.mask_runs.append(len(ids) - len(self.ids))
        self.ids = ids
        self.messages.extend(new)

    async def speak(self, engine: EpisodeEngine, turn: int) -> str:
        """Sample one turn and append it."""
        response = await engine.agenerate(
            rollout_pb2.GenerateRequest(
                request_id=f"{self.data.request_prefix}/{self.index}.{turn}" if self.data.request_prefix else "",
                token_ids=tokens_pb2.TokenIds(ids=self.ids),
                sampling=sampling_params(self.data, turn, self.index),
                n=1,
                min_policy_version=self.data.version.to_proto(),
                return_text=True,
            )
        )
        sample = response.samples[0]
        base = len(self.logprobs)
        for span in sample.version_spans:
            if not self.spans or self.spans[-1].policy_version != span.policy_version:
                self.spans.append(tokens_pb2.VersionSpan(start=base + span.start, policy_version=span.policy_version))
        self.ids.extend(sample.token_ids)
        self.mask_runs.append(len(sample.token_ids))
        self.turn_runs.append(len(sample.token_ids))
        self.logprobs.extend(sample.logprobs)
        self.finish_reason = sample.finish_reason
        self.messages.append(tokens_pb2.ChatMessage(role="assistant", content=sample.text))
        return sample.text

    def record(self) -> orchestrator_pb2.TrajectoryRecord:
        """The trajectory; its reward is the sum of its turns' rewards, missing if no turn had one."""
        name = f"{self.data.group_id}-{self.index}"
        return orchestrator_pb2.TrajectoryRecord(
            trajectory=tokens_pb2.Trajectory(
                trajectory_id=name,
                task_id=self.data.task.task_id,
                group_id=self.data.group_id,
                episode_id=name,
                token_ids=self.ids,
                mask_runs=self.mask_runs,
                logprobs=self.logprobs,
                version_spans=self.spans,
                temperature=self.data.sampling.temperature,
                finish_reason=self.finish_reason,
                reward=sum(each.reward for each in self.rewards) if self.rewards else None,
                turn_rewards=self.rewards,
                turn_runs=self.turn_runs,
            ),
            conversation=tokens_pb2.Conversation(messages=self.messages),
        )
