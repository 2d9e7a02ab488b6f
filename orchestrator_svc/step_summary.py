"""What one applied batch says about data and staleness. Pure: records and results in, counts and metrics out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator_svc.staleness import Lineage
from sluice.v1 import orchestrator_pb2, tokens_pb2, trainer_pb2
from sluice.versions import Version, sampled_tokens, span_lengths, versions_of

__all__ = ["AppliedStep", "StepSummary", "summarise", "token_ages"]


@dataclass(frozen=True, slots=True)
class StepSummary:
    """One applied batch.

    Attributes:
        trained: Trajectories that took part.
        dropped: Those that did not, by reason.
        stale_groups: Groups of which a trajectory was too old.
        metrics: Scalars by name.
    """

    trained: int
    dropped: Mapping[str, int]
    stale_groups: frozenset[str]
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class AppliedStep:
    """A batch that the trainer applied.

    Attributes:
        version: The version that resulted.
        summary: Counts and metrics.
        records: Its trajectories, marked with their outcome.
        past: Whether it was applied while no orchestrator was there to see it.
    """

    version: Version
    summary: StepSummary
    records: list[orchestrator_pb2.TrajectoryRecord]
    past: bool = False


def token_ages(trajectory: tokens_pb2.Trajectory, lineage: Lineage, consumed_at: int) -> Iterator[tuple[int, int]]:
    """Yield staleness and number of tokens of each version span.

    Args:
        trajectory: Its spans count sampled tokens.
        lineage: Where the epochs began.
        consumed_at: Number of the version whose weights consumed the tokens.
    """
    lengths = span_lengths([span.start for span in trajectory.version_spans], sampled_tokens(trajectory))
    for version, tokens in zip(versions_of(trajectory), lengths, strict=True):
        yield consumed_at - lineage.number(version), tokens


def summarise(
    step: trainer_pb2.StepReport,
    records: Sequence[orchestrator_pb2.TrajectoryRecord],
    lineage: Lineage,
    max_staleness: int,
) -> StepSummary:
    """Mark each record with its outcome, and count.

    Args:
        step: The trainer's report.
        records: The batch's trajectories, without those that can no longer be read; outcome, reason and step are set.
        lineage: Where the epochs began.
        max_staleness: Bound; older tokens of a trained trajectory were cut from the loss and are not counted.
    """
    results = {result.trajectory_id: result for result in step.results}
    refused = [result for result in step.results if result.outcome != tokens_pb2.TRAJECTORY_OUTCOME_TRAINED]
    dropped = Counter(result.reason for result in refused)
    ages: Counter[int] = Counter()
    stale_groups: set[str] = set()
    for record in records:
        result = results.get(record.trajectory.trajectory_id)
        record.step = step.sequence_no
        record.outcome = result.outcome if result else tokens_pb2.TRAJECTORY_OUTCOME_DROPPED
        record.reason = result.reason if result else "NOT_REPORTED"
        if record.outcome != tokens_pb2.TRAJECTORY_OUTCOME_TRAINED:
            dropped[record.reason] += result is None
            if record.reason in {"STALE", "RETIRED_EPOCH"}:
                stale_groups.add(record.trajectory.group_id)
            continue
        for age, tokens in token_ages(record.trajectory, lineage, step.sequence_no - 1):
            if age <= max_staleness:
                ages[age] += tokens
    metrics = _reward_metrics(records) | _length_metrics(records) | _age_metrics(ages)
    metrics["tokens/trained"] = float(sum(result.trained_tokens for result in step.results))
    for name, value in step.metrics.items():  # `weights/` names are shared with the replicas
        metrics[name if name.startswith("weights/") else f"trainer/{name}"] = value
    return StepSummary(len(step.results) - len(refused), dict(+dropped), frozenset(stale_groups), metrics)


def _reward_metrics(records: Sequence[orchestrator_pb2.TrajectoryRecord]) -> dict[str, float]:
    rewards = np.array([each.trajectory.reward for each in records if each.trajectory.HasField("reward")])
    by_group: dict[str, list[float]] = {}
    for each in records:
        if each.trajectory.HasField("reward"):
            by_group.setdefault(each.trajectory.group_id, []).append(each.trajectory.reward)
    degenerate = sum(len(set(values)) == 1 for values in by_group.values())
    if not rewards.size:
        return {"groups/degenerate": float(degenerate)}
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/max": float(rewards.max()),
        "groups/degenerate": float(degenerate),
        "groups/count": float(len(by_group)),
    }


def _length_metrics(records: Sequence[orchestrator_pb2.TrajectoryRecord]) -> dict[str, float]:
    lengths = np.array([sampled_tokens(each.trajectory) for each in records] or [0])
    truncated = sum(each.trajectory.finish_reason == tokens_pb2.FINISH_REASON_LENGTH for each in records)
    return {
        "completion/mean_tokens": float(lengths.mean()),
        "completion/max_tokens": float(lengths.max()),
        "completion/truncated_share": truncated / max(1, len(records)),
    }


def _age_metrics(ages: Mapping[int, int]) -> dict[str, float]:
    tokens = sum(ages.values())
    if not tokens:
        return {}
    metrics = {
        "staleness/mean": math.fsum(age * count for age, count in ages.items()) / tokens,
        "staleness/max": float(max(ages)),
        "staleness/share_ge_1": sum(count for age, count in ages.items() if age >= 1) / tokens,
    }
    return metrics | {f"staleness/tokens_at_{age}": float(count) for age, count in sorted(ages.items())}
