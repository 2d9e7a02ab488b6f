"""One question, n answers: the whole group in one request, so that the replica shares the prompt among its samples."""

from __future__ import annotations

from orchestrator_svc.envs.base import SingleTurnEnvironment
from orchestrator_svc.workflows.base import (
    EpisodeData,
    EpisodeEngine,
    chat_messages,
    conversation,
    sampling_params,
)
from sluice.v1 import orchestrator_pb2, rollout_pb2, tokens_pb2

__all__ = ["SingleTurn"]


class SingleTurn:
    """Asks once and takes every sample as an episode; the environment scores them.

    Args:
        environment: Poses the messages.
    """

    def __init__(self, environment: SingleTurnEnvironment) -> None:
        self._environment = environment

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> list[orchestrator_pb2.TrajectoryRecord]:
        """Sample all episodes at once."""
        messages = self._environment.messages(data.task)
        response = await engine.agenerate(
            rollout_pb2.GenerateRequest(
                request_id=data.request_prefix,
                conversation=tokens_pb2.Conversation(messages=chat_messages(messages)),
                sampling=sampling_params(data, turn=0),
                n=data.episodes,
                min_policy_version=data.version.to_proto(),
                return_text=True,
            )
        )
        return [
            orchestrator_pb2.TrajectoryRecord(
                trajectory=_trajectory(data, response, sample), conversation=conversation(messages, sample.text)
            )
            for sample in response.samples
        ]


def _trajectory(
    data: EpisodeData, response: rollout_pb2.GenerateResponse, sample: rollout_pb2.GeneratedSample
) -> tokens_pb2.Trajectory:
    name = f"{data.group_id}-{sample.index}"
    return tokens_pb2.Trajectory(
        trajectory_id=name,
        task_id=data.task.task_id,
        group_id=data.group_id,
        episode_id=name,
        token_ids=[*response.prompt_token_ids, *sample.token_ids],
        mask_runs=[len(response.prompt_token_ids), len(sample.token_ids)],
        logprobs=sample.logprobs,
        version_spans=sample.version_spans,
        temperature=data.sampling.temperature,
        finish_reason=sample.finish_reason,
    )
