"""One group from a task to scored trajectories: generate, score, filter."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from orchestrator_svc.config import FilterConfig, OrchestratorConfig
from orchestrator_svc.envs.base import Task
from orchestrator_svc.envs.scoring import Scorer
from orchestrator_svc.scheduler import Reason
from orchestrator_svc.step_summary import sampled_tokens
from orchestrator_svc.workflows import EpisodeData, EpisodeEngine, RolloutWorkflow, Sampling
from sluice.v1 import orchestrator_pb2
from sluice.versions import Version

__all__ = ["EpisodeRunner", "ScoredGroup", "score_records"]


@dataclass
class ScoredGroup:
    """What a group's episodes came to.

    Attributes:
        records: Trajectories that may be trained; empty if none may.
        rewards: Rewards of all episodes; NaN marks a missing one.
        dropped: Trajectories that may not be trained, by reason.
    """

    records: list[orchestrator_pb2.TrajectoryRecord] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)


class EpisodeRunner:
    """Runs groups.

    Args:
        workflow: How an episode runs.
        engine: What it samples from.
        scorer: Scores completions that come without a reward; None where the environment rewards turns by itself.
        config: Settings of the orchestrator.
        seed: Seed of the run.
    """

    def __init__(
        self,
        workflow: RolloutWorkflow,
        engine: EpisodeEngine,
        scorer: Scorer | None,
        config: OrchestratorConfig,
        seed: int,
    ) -> None:
        self._workflow, self._engine, self._scorer = workflow, engine, scorer
        self._config, self._seed = config, seed

    async def run(self, task: Task, group_id: str, version: Version, request_prefix: str) -> ScoredGroup:
        """Run and score one group; the caller sets the deadline.

        Raises:
            SluiceError: if the group as a whole could not be run.
        """
        data = EpisodeData(
            task=task,
            group_id=group_id,
            episodes=self._config.group_size,
            sampling=Sampling(
                temperature=self._config.sampling.temperature,
                max_tokens=self._config.sampling.max_tokens,
                stop=tuple(self._config.sampling.stop),
                ignore_eos=self._config.sampling.ignore_eos,
                seeded=self._config.sampling.seeded,
            ),
            version=version,
            request_prefix=request_prefix,
            seed=self._seed,
        )
        records = await self._workflow.arun_episode(self._engine, data)
        await score_records(self._scorer, task, records)
        return sift(records, self._config.filter)


async def score_records(scorer: Scorer | None, task: Task, records: list[orchestrator_pb2.TrajectoryRecord]) -> None:
    """Set the reward of the records that have none; where scoring fails it stays missing."""
    unscored = [each for each in records if not each.trajectory.HasField("reward")]
    if scorer is None or not unscored:
        return
    answers = [each.conversation.messages[-1].content for each in unscored]
    for record, reward in zip(unscored, await scorer.score(task, answers), strict=True):
        if reward is not None:
            record.trajectory.reward = reward


def sift(records: list[orchestrator_pb2.TrajectoryRecord], rules: FilterConfig) -> ScoredGroup:
    """Part what may be trained from what may not."""
    group = ScoredGroup(
        rewards=[each.trajectory.reward if each.trajectory.HasField("reward") else float("nan") for each in records]
    )
    for record in records:
        if not record.trajectory.HasField("reward"):
            group.dropped[Reason.MISSING_REWARD] += 1
        elif not sampled_tokens(record.trajectory):
            group.dropped[Reason.NO_TOKENS] += 1
        else:
            group.records.append(record)
    rewards = [each.trajectory.reward for each in group.records]
    if rewards and _filtered(rewards, rules):
        group.dropped[Reason.FILTERED] += len(group.records)
        group.records = []
    return group


def _filtered(rewards: list[float], rules: FilterConfig) -> bool:
    mean = sum(rewards) / len(rewards)
    return (
        (rules.drop_degenerate and len(set(rewards)) == 1)
        or (rules.min_reward_mean is not None and mean < rules.min_reward_mean)
        or (rules.max_reward_mean is not None and mean > rules.max_reward_mean)
    )
