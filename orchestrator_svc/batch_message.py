"""A batch as the trainer gets it: trajectories with advantages, and the header that announces them."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator_svc.config import NO_ADVANTAGE, OrchestratorConfig
from orchestrator_svc.scheduler import Batch
from orchestrator_svc.step_summary import sampled_tokens
from sluice.advantages import TRAINER_ESTIMATORS, Episode, estimate
from sluice.v1 import orchestrator_pb2, trainer_pb2
from sluice.versions import Version

__all__ = ["batch_header", "give_advantages"]

_STALE_POLICIES = {
    "drop": trainer_pb2.STALE_POLICY_DROP,
    "truncate": trainer_pb2.STALE_POLICY_TRUNCATE,
    "requeue": trainer_pb2.STALE_POLICY_REQUEUE,
}


def batch_header(
    batch: Batch,
    *,
    run: str,
    epoch: int,
    trajectories: int,
    max_staleness: int,
    tokenizer_digest: str,
    sampler_dtype: str,
    config: OrchestratorConfig,
) -> trainer_pb2.BatchHeader:
    """The header of a batch."""
    return trainer_pb2.BatchHeader(
        run=f"runs/{run}",
        batch_id=batch.batch_id,
        sequence_no=batch.sequence_no,
        target_version=Version(epoch, batch.sequence_no).to_proto(),
        max_staleness=max_staleness,
        on_stale=_STALE_POLICIES[config.on_stale],
        trajectory_count=trajectories,
        tokenizer_digest=tokenizer_digest,
        sampler_dtype=sampler_dtype,
        advantage_estimator="" if config.advantage == NO_ADVANTAGE else config.advantage,
    )


def give_advantages(estimator: str, records: Sequence[orchestrator_pb2.TrajectoryRecord]) -> None:
    """Set the advantage of each trajectory within its group, one reward per episode; none where the trainer estimates.

    Raises:
        ValueError: if the estimator cannot take these rewards.
    """
    if estimator == NO_ADVANTAGE or estimator in TRAINER_ESTIMATORS:
        for record in records:
            del record.trajectory.advantages[:]
        return
    episodes: dict[str, Episode] = {}
    for record in records:
        trajectory = record.trajectory
        before = episodes.get(trajectory.episode_id)
        tokens = sampled_tokens(trajectory) + (before.sampled_tokens if before else 0)
        reward = trajectory.reward if trajectory.HasField("reward") else None
        episodes[trajectory.episode_id] = Episode(trajectory.episode_id, trajectory.group_id, reward, tokens)
    advantages = estimate(estimator, list(episodes.values()))
    for record in records:
        value = advantages.by_episode.get(record.trajectory.episode_id)
        record.trajectory.advantages[:] = [] if value is None else [value]
