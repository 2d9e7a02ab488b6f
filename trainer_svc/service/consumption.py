"""What of a batch is trained at the moment it is taken: staleness per token, then advantages on the survivors. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import torch
from numpy.typing import NDArray

from sluice.advantages import TRAINER_ESTIMATORS, Advantages, Episode, estimate
from sluice.v1 import tokens_pb2, trainer_pb2
from sluice.versions import Version
from trainer_svc.batch.rows import Sequence
from trainer_svc.checkpoint.lineage import Lineage
from trainer_svc.service.convert import Sample
from trainer_svc.service.staleness import token_staleness

__all__ = ["Batch", "Consumption", "OnStale", "check_estimator", "consume"]

Ages = NDArray[np.int64]

MISSING_REWARD = "MISSING_REWARD"
NO_TRAINED_TOKENS = "NO_TRAINED_TOKENS"
NON_FINITE_STEP = "NON_FINITE_STEP"
CRITIC_WARMUP = "CRITIC_WARMUP"
RETIRED_EPOCH = "RETIRED_EPOCH"
STALE = "STALE"

HISTOGRAM_BINS = 16
"""Ages counted one by one; older tokens share the last bin, so that a report stays small."""


class OnStale(Enum):
    """What happens to a trajectory with tokens that are too old."""

    DROP = trainer_pb2.STALE_POLICY_DROP
    TRUNCATE = trainer_pb2.STALE_POLICY_TRUNCATE
    REQUEUE = trainer_pb2.STALE_POLICY_REQUEUE


@dataclass(frozen=True, slots=True)
class Batch:
    """An accepted batch.

    Attributes:
        batch_id: Its name.
        sequence_no: Its place in the order of batches.
        target: Version that applying it produces.
        max_staleness: Oldest token that may be trained, in versions.
        on_stale: What happens to a trajectory with older ones.
        estimator: Advantage estimator for trajectories without advantages, and for the survivors of a group that lost
            one; one of those that the update itself runs; or empty, which keeps what was given.
        samples: Its trajectories.
        content_digest: Digest of its trajectories as they arrived.
        sampler_dtype: Precision of the weights that sampled, such as ``bfloat16``; empty if it is not known.
    """

    batch_id: str
    sequence_no: int
    target: Version
    max_staleness: int
    on_stale: OnStale
    estimator: str
    samples: tuple[Sample, ...]
    content_digest: str = ""
    sampler_dtype: str = ""


@dataclass(frozen=True, slots=True)
class Fate:
    """What was decided about one trajectory.

    Attributes:
        sample: The trajectory.
        sequence: What of it is trained; None if nothing is.
        reason: Why nothing is; empty otherwise.
        oldest: Greatest staleness of its tokens, in versions.
        ages: Staleness of each token that enters the loss.
    """

    sample: Sample
    sequence: Sequence | None
    reason: str
    oldest: int
    ages: Ages


@dataclass(frozen=True, slots=True)
class Consumption:
    """A batch as it is trained.

    Attributes:
        sequences: Rows for the engine.
        fates: One per trajectory, in the batch's order.
        metrics: What the report says about data and staleness.
    """

    sequences: tuple[Sequence, ...]
    fates: tuple[Fate, ...]
    metrics: Mapping[str, float]

    def results(self, trained: NDArray[np.int64], *, critic_only: bool = False) -> list[trainer_pb2.TrajectoryResult]:
        """Return the answer per trajectory, in the batch's order.

        Args:
            trained: For each of `sequences` its tokens in the loss, and the applied optimizer steps that it was part of.
            critic_only: Whether these steps changed the critic alone.
        """
        rows = iter(trained.tolist())
        return [_result(fate, *((0, 0) if fate.reason else next(rows)), critic_only=critic_only) for fate in self.fates]


def consume(batch: Batch, now: Version, lineage: Lineage, trainable: Callable[[Sequence], torch.Tensor]) -> Consumption:
    """Decide what of a batch is trained by weights of version `now`.

    Args:
        batch: The batch.
        now: Version of the weights.
        lineage: The epochs of the run.
        trainable: Returns which loss tokens of a row its objective can train.
    """
    fates = [_judge(sample, batch, now, lineage, trainable) for sample in batch.samples]
    fates, groups = _give_advantages(fates, batch.estimator)
    metrics = _reward_metrics(batch.samples) | _staleness_metrics(fates) | _drop_metrics(fates)
    if groups is not None:
        metrics |= {"groups": float(groups.groups), "degenerate_groups": float(groups.degenerate_groups)}
    return Consumption(
        sequences=tuple(fate.sequence for fate in fates if fate.sequence is not None),
        fates=tuple(fates),
        metrics=metrics,
    )


def _judge(
    sample: Sample, batch: Batch, now: Version, lineage: Lineage, trainable: Callable[[Sequence], torch.Tensor]
) -> Fate:
    ages = token_staleness(sample.spans, sample.trained_tokens, lineage, now)
    oldest = int(ages.max(initial=0))
    fresh = ages <= batch.max_staleness
    sequence = sample.sequence
    usable = trainable(sequence)[sequence.loss_mask].numpy()
    if not fresh.all():
        if batch.on_stale is not OnStale.TRUNCATE or not fresh.any():
            return Fate(sample, None, _stale_reason(sample, now, lineage), oldest, ages[:0])
        mask = sequence.loss_mask.clone()
        mask[sequence.loss_mask] = torch.from_numpy(fresh)
        sequence = replace(sequence, loss_mask=mask)
    if not (fresh & usable).any():
        return Fate(sample, None, NO_TRAINED_TOKENS, oldest, ages[:0])
    return Fate(sample, sequence, "", oldest, ages[fresh & usable])


def _stale_reason(sample: Sample, now: Version, lineage: Lineage) -> str:
    retired = any(lineage.is_retired(span.version, now) for span in sample.spans)
    return RETIRED_EPOCH if retired else STALE


def _give_advantages(fates: list[Fate], estimator: str) -> tuple[list[Fate], Advantages | None]:
    """Estimate where none were given, and anew in groups that lost an episode to its age."""
    if not estimator:
        return fates, None
    if estimator in TRAINER_ESTIMATORS:
        return [_without_reward(fate) if _lacks_reward(fate.sequence) else fate for fate in fates], None
    lost = (STALE, RETIRED_EPOCH)
    shrunk = {fate.sample.sequence.group_id for fate in fates if fate.reason in lost}
    estimated = estimate(estimator, _episodes([fate.sample for fate in fates if fate.reason not in lost]))
    given: list[Fate] = []
    for fate in fates:
        sequence = fate.sequence
        if sequence is None or (fate.sample.has_advantages and sequence.group_id not in shrunk):
            given.append(fate)
            continue
        value = estimated.by_episode.get(sequence.episode_id)
        if value is not None:
            advantages = torch.where(sequence.loss_mask, value, 0.0)
            given.append(replace(fate, sequence=replace(sequence, advantages=advantages)))
        elif fate.sample.has_advantages:
            given.append(fate)
        else:
            given.append(_without_reward(fate))
    return given, estimated


def _lacks_reward(sequence: Sequence | None) -> bool:
    return sequence is not None and sequence.reward is None and sequence.token_rewards is None


def _without_reward(fate: Fate) -> Fate:
    return replace(fate, sequence=None, reason=MISSING_REWARD, ages=fate.ages[:0])


def _episodes(samples: Rows[Sample]) -> list[Episode]:
    """One entry per episode; the trained tokens of its trajectories add up."""
    tokens: Counter[str] = Counter()
    facts: dict[str, Sample] = {}
    for sample in samples:
        tokens[sample.sequence.episode_id] += sample.trained_tokens
        facts[sample.sequence.episode_id] = sample
    return [
        Episode(episode_id, sample.sequence.group_id, sample.reward, tokens[episode_id])
        for episode_id, sample in facts.items()
    ]


def check_estimator(estimator: str, samples: Rows[Sample]) -> None:
    """Try the estimator on a whole batch.

    Raises:
        ValueError: if there is no such estimator, or it cannot take these rewards.
    """
    if estimator not in TRAINER_ESTIMATORS:
        estimate(estimator, _episodes(samples))


def _reward_metrics(samples: Rows[Sample]) -> dict[str, float]:
    rewards = np.array([each.reward for each in _episodes(samples) if each.reward is not None])
    metrics = {
        "trajectories": float(len(samples)),
        "truncated_trajectories": float(sum(sample.truncated for sample in samples)),
        "missing_rewards": float(sum(each.reward is None for each in _episodes(samples))),
        "multi_version_trajectories": float(sum(len(sample.spans) > 1 for sample in samples)),
    }
    if rewards.size:
        metrics |= {"reward_mean": float(rewards.mean()), "reward_std": float(rewards.std())}
    return metrics


def _staleness_metrics(fates: Rows[Fate]) -> dict[str, float]:
    """The age histogram of the tokens that enter the loss."""
    ages = np.concatenate([fate.ages for fate in fates]) if fates else np.zeros(0, dtype=np.int64)
    if not ages.size:
        return {"staleness_max": 0.0}
    counts = np.bincount(np.minimum(ages, HISTOGRAM_BINS), minlength=1)
    return {
        "staleness_mean": float(ages.mean()),
        "staleness_max": float(ages.max()),
        "staleness_share_ge_1": float((ages >= 1).mean()),
    } | {f"staleness_tokens/{age}": float(count) for age, count in enumerate(counts)}


def _drop_metrics(fates: Rows[Fate]) -> dict[str, float]:
    """Trajectories and tokens that are not trained, by cause; cut tokens of trained trajectories are stale ones."""
    trajectories: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for fate in fates:
        if fate.sequence is None:
            trajectories[fate.reason] += 1
            tokens[fate.reason] += fate.sample.trained_tokens
        else:
            tokens[STALE] += fate.sample.trained_tokens - int(fate.sequence.loss_mask.sum())
    return {f"dropped_trajectories/{reason.lower()}": float(count) for reason, count in trajectories.items()} | {
        f"dropped_tokens/{reason.lower()}": float(count) for reason, count in tokens.items() if count
    }


def _result(fate: Fate, tokens: int, steps: int, *, critic_only: bool) -> trainer_pb2.TrajectoryResult:
    reason = fate.reason
    if not reason and not tokens:
        reason = NO_TRAINED_TOKENS
    elif not reason and not steps:
        reason = NON_FINITE_STEP
    elif not reason and critic_only:
        reason = CRITIC_WARMUP
    return trainer_pb2.TrajectoryResult(
        trajectory_id=fate.sample.sequence.trajectory_id,
        outcome=tokens_pb2.TRAJECTORY_OUTCOME_DROPPED if reason else tokens_pb2.TRAJECTORY_OUTCOME_TRAINED,
        reason=reason,
        max_staleness=fate.oldest,
        trained_tokens=0 if reason else tokens,
    )
