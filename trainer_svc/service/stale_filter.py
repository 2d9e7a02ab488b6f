"""Decide which trajectories of a batch are trained: staleness per token, then advantages of those that stay. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from sluice.advantages import TRAINER_ESTIMATORS, Advantages, Episode, estimate
from sluice.v1 import tokens_pb2, trainer_pb2
from sluice.versions import Lineage, Version, VersionSpan, span_lengths
from trainer_svc.batch.rows import Sequence
from trainer_svc.service.convert import Batch, OnStale, Sample

Ages = NDArray[np.int64]

MISSING_REWARD = "MISSING_REWARD"
NO_TRAINED_TOKENS = "NO_TRAINED_TOKENS"
NON_FINITE_STEP = "NON_FINITE_STEP"
CRITIC_WARMUP = "CRITIC_WARMUP"
RETIRED_EPOCH = "RETIRED_EPOCH"
STALE = "STALE"

HISTOGRAM_BINS = 16
"""Ages counted one by one. Older tokens share the last bin, so that a report stays small."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about one trajectory.

    Attributes:
        sample: The trajectory.
        sequence: Its training row; None if it is dropped.
        reason: Why it is dropped; empty otherwise.
        oldest: Greatest staleness of its tokens, in versions.
        ages: Staleness of each token that enters the loss.
    """

    sample: Sample
    sequence: Sequence | None
    reason: str
    oldest: int
    ages: Ages


@dataclass(frozen=True, slots=True)
class FilteredBatch:
    """A batch after the stale filter.

    Its metrics, for the step's report:

        trajectories, truncated_trajectories, missing_rewards    of the batch as it came
        multi_version_trajectories                               whose tokens were sampled by several versions
        reward_mean, reward_std                                  over episodes with a reward
        groups, degenerate_groups                                when the trainer estimated advantages
        staleness_mean, staleness_max, staleness_share_ge_1      over the tokens that enter the loss, in versions
        staleness_tokens/<age>                                   tokens of this age; the last bin also counts older ones
        dropped_trajectories/<reason>, dropped_tokens/<reason>   not trained, by cause

    Attributes:
        sequences: Rows to train on.
        decisions: One per trajectory, in the batch's order.
        metrics: What was decided, in numbers.
    """

    sequences: tuple[Sequence, ...]
    decisions: tuple[Decision, ...]
    metrics: Mapping[str, float]

    def results(self, trained: NDArray[np.int64], *, critic_only: bool = False) -> list[trainer_pb2.TrajectoryResult]:
        """Return the answer per trajectory, in the batch's order.

        Args:
            trained: For each of `sequences` its tokens in the loss, and the applied optimizer steps that it was part of.
            critic_only: Whether these steps changed the critic alone.
        """
        rows = iter(trained.tolist())
        return [
            _result(decision, *((0, 0) if decision.reason else next(rows)), critic_only=critic_only)
            for decision in self.decisions
        ]


def filter_stale(
    batch: Batch, now: Version, lineage: Lineage, trainable: Callable[[Sequence], torch.Tensor]
) -> FilteredBatch:
    """Decide which tokens of a batch the weights of version `now` are trained on.

    Args:
        batch: The batch.
        now: Version of the weights.
        lineage: The epochs of the run.
        trainable: Returns which loss tokens of a row its objective can train.
    """
    decisions = [_judge(sample, batch, now, lineage, trainable) for sample in batch.samples]
    metrics = _reward_metrics(batch.samples)
    if batch.estimator in TRAINER_ESTIMATORS:
        decisions = [_without_reward(each) if _lacks_reward(each.sequence) else each for each in decisions]
    elif batch.estimator:
        lost = {each.sample.sequence.group_id for each in decisions if each.reason in (STALE, RETIRED_EPOCH)}
        estimated = batch.estimated
        if lost or estimated is None:
            left = [each.sample for each in decisions if each.reason not in (STALE, RETIRED_EPOCH)]
            estimated = estimate_advantages(batch.estimator, left)
        decisions = [_with_advantages(each, estimated.by_episode, lost) for each in decisions]
        metrics |= {"groups": float(estimated.groups), "degenerate_groups": float(estimated.degenerate_groups)}
    return FilteredBatch(
        sequences=tuple(decision.sequence for decision in decisions if decision.sequence is not None),
        decisions=tuple(decisions),
        metrics=metrics | _staleness_metrics(decisions) | _drop_metrics(decisions),
    )


def _judge(
    sample: Sample, batch: Batch, now: Version, lineage: Lineage, trainable: Callable[[Sequence], torch.Tensor]
) -> Decision:
    ages = token_staleness(sample.spans, sample.trained_tokens, lineage, now)
    oldest = int(ages.max(initial=0))
    fresh = ages <= batch.max_staleness
    sequence = sample.sequence
    usable = trainable(sequence)[sequence.loss_mask].numpy()
    if not fresh.all():
        if batch.on_stale is not OnStale.TRUNCATE or not fresh.any():
            return Decision(sample, None, _stale_reason(sample, now, lineage), oldest, ages[:0])
        mask = sequence.loss_mask.clone()
        mask[sequence.loss_mask] = torch.from_numpy(fresh)
        sequence = replace(sequence, loss_mask=mask)
    if not (fresh & usable).any():
        return Decision(sample, None, NO_TRAINED_TOKENS, oldest, ages[:0])
    return Decision(sample, sequence, "", oldest, ages[fresh & usable])


def _stale_reason(sample: Sample, now: Version, lineage: Lineage) -> str:
    retired = any(lineage.is_retired(span.version, now) for span in sample.spans)
    return RETIRED_EPOCH if retired else STALE


def _with_advantages(decision: Decision, by_episode: Mapping[str, float], shrunk: set[str]) -> Decision:
    """Add the advantages that are missing, and replace those of a group that lost an episode to staleness."""
    sequence = decision.sequence
    if sequence is None or (decision.sample.has_advantages and sequence.group_id not in shrunk):
        return decision
    value = by_episode.get(sequence.episode_id)
    if value is None:
        return decision if decision.sample.has_advantages else _without_reward(decision)
    return replace(decision, sequence=replace(sequence, advantages=torch.where(sequence.loss_mask, value, 0.0)))


def _lacks_reward(sequence: Sequence | None) -> bool:
    return sequence is not None and sequence.reward is None and sequence.token_rewards is None


def _without_reward(decision: Decision) -> Decision:
    return replace(decision, sequence=None, reason=MISSING_REWARD, ages=decision.ages[:0])


def _episodes(samples: Rows[Sample]) -> list[Episode]:
    """Return one entry per episode, with the trained tokens of all its trajectories."""
    tokens: Counter[str] = Counter()
    facts: dict[str, Sample] = {}
    for sample in samples:
        tokens[sample.sequence.episode_id] += sample.trained_tokens
        facts[sample.sequence.episode_id] = sample
    return [
        Episode(episode_id, sample.sequence.group_id, sample.sequence.reward, tokens[episode_id])
        for episode_id, sample in facts.items()
    ]


def estimate_advantages(estimator: str, samples: Rows[Sample]) -> Advantages:
    """Estimate the advantages of trajectories from their episodes' rewards.

    Raises:
        ValueError: if the estimator cannot take these rewards.
    """
    return estimate(estimator, _episodes(samples))


def _reward_metrics(samples: Rows[Sample]) -> dict[str, float]:
    """Describe the batch as it arrived; a reward counts once per episode."""
    rewards = [each.reward for each in _episodes(samples)]
    given = np.array([reward for reward in rewards if reward is not None])
    metrics = {
        "trajectories": float(len(samples)),
        "truncated_trajectories": float(sum(sample.sequence.truncated for sample in samples)),
        "missing_rewards": float(len(rewards) - len(given)),
        "multi_version_trajectories": float(sum(len(sample.spans) > 1 for sample in samples)),
    }
    if given.size:
        metrics |= {"reward_mean": float(given.mean()), "reward_std": float(given.std())}
    return metrics


def _staleness_metrics(decisions: Rows[Decision]) -> dict[str, float]:
    """Return the age histogram of the tokens that enter the loss."""
    ages = np.concatenate([decision.ages for decision in decisions]) if decisions else np.zeros(0, dtype=np.int64)
    if not ages.size:
        return {"staleness_max": 0.0}
    counts = np.bincount(np.minimum(ages, HISTOGRAM_BINS), minlength=1)
    return {
        "staleness_mean": float(ages.mean()),
        "staleness_max": float(ages.max()),
        "staleness_share_ge_1": float((ages >= 1).mean()),
    } | {f"staleness_tokens/{age}": float(count) for age, count in enumerate(counts)}


def _drop_metrics(decisions: Rows[Decision]) -> dict[str, float]:
    """Count the trajectories and tokens that are not trained, by cause. Tokens cut from a trained trajectory are stale."""
    trajectories: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for decision in decisions:
        if decision.sequence is None:
            trajectories[decision.reason] += 1
            tokens[decision.reason] += decision.sample.trained_tokens
        else:
            tokens[STALE] += decision.sample.trained_tokens - int(decision.sequence.loss_mask.sum())
    return {f"dropped_trajectories/{reason.lower()}": float(count) for reason, count in trajectories.items()} | {
        f"dropped_tokens/{reason.lower()}": float(count) for reason, count in tokens.items() if count
    }


def _result(decision: Decision, tokens: int, steps: int, *, critic_only: bool) -> trainer_pb2.TrajectoryResult:
    reason = decision.reason
    if not reason and not tokens:
        reason = NO_TRAINED_TOKENS
    elif not reason and not steps:
        reason = NON_FINITE_STEP
    elif not reason and critic_only:
        reason = CRITIC_WARMUP
    return trainer_pb2.TrajectoryResult(
        trajectory_id=decision.sample.sequence.trajectory_id,
        outcome=tokens_pb2.TRAJECTORY_OUTCOME_DROPPED if reason else tokens_pb2.TRAJECTORY_OUTCOME_TRAINED,
        reason=reason,
        max_staleness=decision.oldest,
        trained_tokens=0 if reason else tokens,
    )


def token_staleness(spans: Rows[VersionSpan], trained_tokens: int, lineage: Lineage, now: Version) -> NDArray[np.int64]:
    """Return the staleness of each trained token.

    Args:
        spans: Versions of the trained tokens; starts are counted in trained tokens, the first one is 0.
        trained_tokens: Their number.
        lineage: Where the epochs began.
        now: Version of the weights that the batch is applied to.
    """
    if trained_tokens == 0:
        return np.zeros(0, dtype=np.int64)
    ages = np.array([lineage.staleness(span.version, now) for span in spans], dtype=np.int64)
    return np.repeat(ages, span_lengths([span.start for span in spans], trained_tokens))
