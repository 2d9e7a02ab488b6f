"""A batch: check its trajectories, convert them to training rows, decide which tokens are trained, and answer for each trajectory.

Pure. A fault names the trajectory's index and the field. Staleness is judged when the batch arrives: batches are applied in
order, so it is known then that the batch will be applied to the version before its target.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sluice.advantages import BATCH_SCALES, Advantage, Episode, advantages_by_episode, joined
from sluice.digests import batch_digest
from sluice.limits import (
    FLOAT32_MAX,
    MAX_NAME,
    MAX_TEMPERATURE,
    MAX_TRAJECTORY_TOKENS,
    MIN_TEMPERATURE,
    may_train_at,
    within,
)
from sluice.rows_at_fault import rows_of
from sluice.v1 import tokens_pb2, trainer_pb2
from sluice.versions import Lineage, Version, VersionSpan, span_lengths
from trainer_svc.batch.rows import TrainingRow
from trainer_svc.objectives.config import ResolvedObjective
from trainer_svc.objectives.objective import among, keep_trainable, with_batch_facts

LOGPROB_ROUNDING = 1e-3
"""Nats by which a log-probability may exceed 0: enough for the rounding of a low-precision softmax."""

ABSENT, GIVEN, UNKNOWN = "are absent", "are given", "is not known:"
"""First words of faults that are caused by the settings of orchestrator or trainer, if every trajectory has them."""

MISSING_REWARD = "MISSING_REWARD"
NO_TRAINED_TOKENS = "NO_TRAINED_TOKENS"
MASKED = "MASKED"
"""The trajectory came without a token to train: only its reward is used, in its group's statistics."""
NON_FINITE_STEP = "NON_FINITE_STEP"
CRITIC_WARMUP = "CRITIC_WARMUP"
RETIRED_EPOCH = "RETIRED_EPOCH"
STALE = "STALE"

Ages = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Sample:
    """One converted trajectory.

    Attributes:
        sequence: The training row; its advantages are zero if none were given.
        spans: Versions that sampled the trained tokens; starts are counted in trained tokens.
        branch_offsets: At each trained token, the reward of its branches minus the episode's reward; None if no branch has a reward.
    """

    sequence: TrainingRow
    spans: tuple[VersionSpan, ...]
    trained_tokens: int
    has_advantages: bool
    branch_offsets: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about one trajectory.

    Attributes:
        sequence: The training row; None if it is dropped.
        reason: Why it is dropped; empty otherwise.
        oldest: Greatest staleness of its tokens, in versions.
        ages: Staleness of each token that enters the loss.
        lost: Number of its trained tokens that do not enter the loss, by cause.
    """

    sample: Sample
    sequence: TrainingRow | None
    reason: str
    oldest: int
    ages: Ages
    lost: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Batch:
    """An accepted batch.

    `metrics` are part of the step's report. They leave out facts that the orchestrator reports (rewards, groups, lengths, staleness):

        trajectories, missing_rewards                            counts in the batch as it arrived
        multi_version_trajectories                               trajectories whose tokens were sampled by several versions
        dropped_trajectories/<reason>, dropped_tokens/<reason>   not trained, by cause

    Attributes:
        digests: Digest of each of its trajectories as it arrived, in order.
        sequences: Rows to train on, with the columns that depend on the whole batch.
        decisions: One per trajectory, in the batch's order.
    """

    header: trainer_pb2.BatchHeader
    digests: tuple[bytes, ...]
    sequences: tuple[TrainingRow, ...]
    decisions: tuple[Decision, ...]
    metrics: Mapping[str, float]

    @property
    def target(self) -> Version:
        """Version that the batch produces when it is applied."""
        return Version.from_proto(self.header.target_version)

    @property
    def oldest(self) -> int:
        """Greatest staleness of a token that enters the loss, in versions; 0 if there is none."""
        return max((int(each.ages.max(initial=0)) for each in self.decisions), default=0)

    @property
    def content_digest(self) -> str:
        """Digest of its trajectories as they arrived."""
        return batch_digest(self.digests)

    def results(self, trained: NDArray[np.int64], *, critic_only: bool = False) -> list[trainer_pb2.TrajectoryResult]:
        """Return the answer per trajectory, in the batch's order.

        Args:
            trained: For each of `sequences` the number of its tokens in the loss, and of applied optimizer steps that it was part of.
            critic_only: Whether these steps changed only the critic.
        """
        rows = iter(trained.tolist())
        return [
            _result(decision, digest, *((0, 0) if decision.reason else next(rows)), critic_only=critic_only)
            for decision, digest in zip(self.decisions, self.digests, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Expectations:
    """What the trainer and the batch's header require of each trajectory.

    Attributes:
        vocabulary: Upper bound of token ids, exclusive.
        newest: Version of the weights to which the batch is applied. No token can be newer.
        has_estimator: Whether advantages may be absent, because the header names an estimator or the objective reads no advantages.
        estimates: The estimator that the trainer runs; empty if it runs none.
        needs_reference: Whether trajectories must bring log-probabilities of the reference.
        needs_teacher: Whether trajectories must bring log-probabilities of the teacher.
    """

    vocabulary: int
    newest: Version
    has_estimator: bool
    estimates: str = ""
    needs_reference: bool = False
    needs_teacher: bool = False


def convert(
    trajectories: Sequence[tokens_pb2.Trajectory],
    expected: Expectations,
    named: Mapping[str, Expectations] = MappingProxyType({}),
) -> tuple[list[Sample], dict[str, str]]:
    """Check and convert the trajectories of a batch.

    Args:
        trajectories: The batch.
        expected: Requirements for trajectories that name no objective.
        named: Requirements for trajectories that name an objective, by that name.

    Returns:
        The samples in order, and the faults by field, such as ``trajectories[3].mask_runs``. The samples are complete only if
        there are no faults.
    """
    violations: dict[str, str] = {}
    samples: list[Sample] = []
    for index, trajectory in enumerate(trajectories):
        mask = _trained(trajectory)
        needed = named.get(trajectory.objective) if trajectory.objective else expected
        if needed is None:
            known = ", ".join(named) or "none"
            faults = {"objective": f"{UNKNOWN} {trajectory.objective!r}; trainer.objectives has {known}; add it there"}
        else:
            faults = dict(_faults(trajectory, mask, needed))
        if faults:
            violations |= {f"trajectories[{index}].{field}": fault for field, fault in faults.items()}
        else:
            samples.append(_sample(trajectory, mask, process=needed is not None and needed.estimates == "process"))
    return samples, violations | _contradictions(trajectories)


def of_settings(violations: Mapping[str, str], trajectories: Sequence[tokens_pb2.Trajectory]) -> bool:
    """Return whether every trajectory with tokens to train has a fault that settings cause, so that no other batch would fit either."""
    rows = rows_of(field for field, fault in violations.items() if fault.startswith((ABSENT, GIVEN, UNKNOWN)))
    return bool(rows) and len(rows) >= sum(len(each.mask_runs) > 1 for each in trajectories)


def _trained(trajectory: tokens_pb2.Trajectory) -> Mask:
    """Return which tokens are trained. The mask is shorter than the trajectory if `mask_runs` do not cover it."""
    runs = np.array(trajectory.mask_runs, dtype=np.int64)
    if int(runs.sum()) > MAX_TRAJECTORY_TOKENS:  # refused below; a hostile run length must not allocate memory first
        return np.zeros(0, dtype=np.bool_)
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs)


def _faults(trajectory: tokens_pb2.Trajectory, mask: Mask, expected: Expectations) -> Iterator[tuple[str, str]]:
    trained = int(mask.sum())
    yield from _faulty_names(trajectory)
    yield from _faulty_tokens(trajectory, mask, expected.vocabulary)
    yield from _faulty_lengths(trajectory, trained)
    yield from _faulty_values(trajectory)
    yield from _faulty_branch_rewards(trajectory)
    if trained:
        yield from _faulty_spans(trajectory.version_spans, trained, expected.newest)
        yield from _missing(trajectory, expected)


def _faulty_names(trajectory: tokens_pb2.Trajectory) -> Iterator[tuple[str, str]]:
    for name in ("trajectory_id", "group_id", "episode_id"):
        length = len(getattr(trajectory, name))
        if not 0 < length <= MAX_NAME:
            yield name, f"has {length} characters; give 1 to {MAX_NAME}"
    if trajectory.adapter:
        yield (
            "adapter",
            "names an adapter that is served beside the policy and is not trained; leave it empty for samples of the policy",
        )


def _faulty_tokens(trajectory: tokens_pb2.Trajectory, mask: Mask, vocabulary: int) -> Iterator[tuple[str, str]]:
    count = len(trajectory.token_ids)
    if not 0 < count <= MAX_TRAJECTORY_TOKENS:
        yield "token_ids", f"has {count} tokens; give 1 to {MAX_TRAJECTORY_TOKENS}"
        return
    largest = int(np.array(trajectory.token_ids, dtype=np.int64).max())
    if largest >= vocabulary:
        yield "token_ids", f"holds {largest}, but the model's vocabulary has {vocabulary} tokens"
    if len(mask) != count:
        yield "mask_runs", f"add up to {sum(trajectory.mask_runs)}, but there are {count} tokens"
    elif mask[0]:
        yield "mask_runs", "train the first token, which nothing predicts; begin with a run that is not trained"


def _faulty_lengths(trajectory: tokens_pb2.Trajectory, trained: int) -> Iterator[tuple[str, str]]:
    allowed = {
        "logprobs": (0, trained),
        "advantages": (0, 1, trained),
        "token_rewards": (0, trained),
        "ref_logprobs": (0, trained),
        "teacher_logprobs": (0, trained),
    }
    for name, lengths in allowed.items():
        length = len(getattr(trajectory, name))
        if length not in lengths:
            yield (
                name,
                f"has {length} values; give {' or '.join(map(str, sorted(set(lengths))))}, as {trained} tokens are trained",
            )
    if trajectory.turn_runs and sum(trajectory.turn_runs) != trained:
        yield "turn_runs", f"add up to {sum(trajectory.turn_runs)}, but {trained} tokens are trained"
    turns = len(trajectory.turn_runs) or 1
    if any(each.turn >= turns for each in trajectory.turn_rewards):
        yield (
            "turn_rewards",
            f"name turn {max(each.turn for each in trajectory.turn_rewards)}; there are {turns}, from 0",
        )


def _faulty_values(trajectory: tokens_pb2.Trajectory) -> Iterator[tuple[str, str]]:
    if not may_train_at(trajectory.temperature):
        yield (
            "temperature",
            f"is {trajectory.temperature:g}; trained tokens need one from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}",
        )
    if trajectory.HasField("reward") and not within(trajectory.reward, FLOAT32_MAX):
        yield "reward", f"is {trajectory.reward}, no number of float32; leave it unset where it is missing"
    if not np.isfinite(np.array(trajectory.advantages, dtype=np.float32)).all():
        yield "advantages", "hold a value that is not finite"
    if not np.isfinite(np.array(trajectory.token_rewards, dtype=np.float32)).all():
        yield "token_rewards", "hold a value that is not finite"
    if not all(within(each.reward, FLOAT32_MAX) for each in trajectory.turn_rewards):
        yield "turn_rewards", "hold a value that is no number of float32"
    for name in ("logprobs", "ref_logprobs", "teacher_logprobs"):
        values = np.array(getattr(trajectory, name), dtype=np.float32)
        if not np.isfinite(values).all():
            yield name, "hold a value that is not finite; leave them empty where none is known"
        elif (values > LOGPROB_ROUNDING).any():
            yield name, "hold a value above 0; give natural logarithms of probabilities"


def _faulty_branch_rewards(trajectory: tokens_pb2.Trajectory) -> Iterator[tuple[str, str]]:
    rewards, turns = trajectory.branch_rewards, len(trajectory.turn_runs)
    if rewards and len(rewards) != turns:
        yield "branch_rewards", f"has {len(rewards)} values, but turn_runs has {turns}; give one per turn"
    if not all(within(each, FLOAT32_MAX) for each in rewards):
        yield "branch_rewards", "hold a value that is no number of float32"
    if rewards and not trajectory.HasField("reward"):
        yield "reward", "is missing, although its branches have rewards"


def _faulty_spans(spans: Sequence[tokens_pb2.VersionSpan], trained: int, newest: Version) -> Iterator[tuple[str, str]]:
    starts = [span.start for span in spans]
    if not starts or starts[0] != 0:
        yield "version_spans", "say nothing about the first trained token; give a span with start 0"
        return
    if starts != sorted(set(starts)) or starts[-1] >= trained:
        yield (
            "version_spans",
            f"have starts {starts[:8]}; they must increase and stay below {trained}, the trained tokens",
        )
    for span in spans:
        if not span.HasField("policy_version"):
            yield "version_spans", "lack a policy_version; tokens without one cannot be trained"
            return
        version = Version.from_proto(span.policy_version)
        if (version.epoch == newest.epoch and version > newest) or version.epoch > newest.epoch:
            yield "version_spans", f"name version {version}, which does not exist before {newest} is trained further"
            return
        if version.epoch == 0 and version.number > 0:
            yield "version_spans", f"name version {version}; epoch 0 is the base model, whose number is 0"
            return


def _missing(trajectory: tokens_pb2.Trajectory, expected: Expectations) -> Iterator[tuple[str, str]]:
    if trajectory.advantages and expected.estimates:
        yield "advantages", f"{GIVEN}, but this trainer computes {expected.estimates}; leave them empty"
    if not trajectory.advantages and not expected.has_estimator and not expected.estimates:
        yield "advantages", f"{ABSENT}; send them, or name header.advantage_estimator"
    if expected.estimates == "process" and not trajectory.token_rewards and not trajectory.turn_rewards:
        yield "turn_rewards", f"{ABSENT}, and token_rewards too; the estimator process needs one of them"
    if expected.needs_reference and not trajectory.ref_logprobs:
        yield (
            "ref_logprobs",
            f"{ABSENT}, but the objective has a KL term; send them, set trainer.reference.model, or objective.kl_coef to 0",
        )
    if expected.needs_teacher and not trajectory.teacher_logprobs:
        yield (
            "teacher_logprobs",
            f"{ABSENT}, but the objective follows a teacher; send them, or set trainer.teacher.model",
        )


def _contradictions(trajectories: Iterable[tokens_pb2.Trajectory]) -> dict[str, str]:
    """Return the faults of trajectories that contradict others of the batch."""
    violations: dict[str, str] = {}
    names: set[str] = set()
    episodes: dict[str, tuple[str, float | None]] = {}
    for index, trajectory in enumerate(trajectories):
        if trajectory.trajectory_id in names:
            violations[f"trajectories[{index}].trajectory_id"] = (
                f"{trajectory.trajectory_id!r} occurs twice in the batch; give each trajectory its own id"
            )
        names.add(trajectory.trajectory_id)
        facts = (trajectory.group_id, _reward(trajectory))
        if episodes.setdefault(trajectory.episode_id, facts) != facts:
            violations[f"trajectories[{index}].episode_id"] = (
                f"{trajectory.episode_id!r} occurs with another group or reward; an episode has one of each"
            )
    return violations


def _reward(trajectory: tokens_pb2.Trajectory) -> float | None:
    return trajectory.reward if trajectory.HasField("reward") else None


def _sample(trajectory: tokens_pb2.Trajectory, mask: Mask, *, process: bool) -> Sample:
    places = np.flatnonzero(mask)
    spans = tuple(VersionSpan.from_proto(span) for span in trajectory.version_spans)
    if not places.size:
        spans = ()
    sequence = TrainingRow(
        input_ids=torch.from_numpy(np.array(trajectory.token_ids, dtype=np.int64)),
        loss_mask=torch.from_numpy(mask),
        behaviour_logprobs=_spread(trajectory.logprobs, places, len(mask), np.nan),
        advantages=_spread(trajectory.advantages, places, len(mask), 0.0),
        reference_logprobs=_column(trajectory.ref_logprobs, places, len(mask)),
        teacher_logprobs=_column(trajectory.teacher_logprobs, places, len(mask)),
        token_rewards=_token_rewards(trajectory, places, len(mask), process=process),
        versions=tuple(VersionSpan(int(places[span.start]), span.version) for span in spans),
        reward=_reward(trajectory),
        truncated=trajectory.finish_reason == tokens_pb2.FINISH_REASON_LENGTH,
        temperature=trajectory.temperature,
        group_id=trajectory.group_id,
        episode_id=trajectory.episode_id,
        trajectory_id=trajectory.trajectory_id,
        objective=trajectory.objective,
    )
    offsets = None
    if trajectory.branch_rewards and trajectory.HasField("reward"):
        by_turn = np.array(trajectory.branch_rewards) - trajectory.reward
        offsets = _spread(np.repeat(by_turn, trajectory.turn_runs), places, len(mask), 0.0)
    return Sample(
        sequence=sequence,
        spans=spans,
        trained_tokens=len(places),
        has_advantages=len(trajectory.advantages) > 0,
        branch_offsets=offsets,
    )


def _column(values: Any, places: NDArray[np.int64], length: int) -> torch.Tensor | None:  # noqa: ANN401  a protobuf container
    """Return an optional column of log-probabilities; None if the trajectory does not have it."""
    return _spread(values, places, length, np.nan) if len(values) else None


def _token_rewards(
    trajectory: tokens_pb2.Trajectory, places: NDArray[np.int64], length: int, *, process: bool
) -> torch.Tensor | None:
    """Return the reward at each trained token; None if the environment rewards the episode as a whole.

    A turn's reward goes to its last trained token. The rest of the episode's reward goes to the trajectory's last trained token.

    If branches have rewards of their own, the rewards from a turn on add up to the reward of the branches that pass it. A turn's tokens
    lead to more branches than the next turn's, so the difference between the two sums goes to the turn's last token. The estimator
    `process` does not add up rewards, so branch rewards are ignored for it.
    """
    of_branches = [] if process else trajectory.branch_rewards
    if not (trajectory.token_rewards or trajectory.turn_rewards or of_branches) or not places.size:
        return None
    ends = np.cumsum(np.array(trajectory.turn_runs or [len(places)], dtype=np.int64)) - 1
    rewards = np.zeros(len(places), dtype=np.float64)
    if trajectory.token_rewards:
        rewards += trajectory.token_rewards
    else:
        for each in trajectory.turn_rewards:
            rewards[max(0, int(ends[each.turn]))] += each.reward
        if trajectory.HasField("reward"):
            rewards[-1] += trajectory.reward - math.fsum(each.reward for each in trajectory.turn_rewards)
    if of_branches:
        beyond = np.array(of_branches) - trajectory.reward
        np.add.at(rewards, np.maximum(ends, 0), beyond - np.append(beyond[1:], 0.0))
    return _spread(rewards, places, length, 0.0)


def _spread(values: Any, places: NDArray[np.int64], length: int, elsewhere: float) -> torch.Tensor:  # noqa: ANN401  a protobuf container
    """Write values to the trained tokens: one value per token, or one for all. The other tokens get `elsewhere`."""
    row = np.full(length, elsewhere, dtype=np.float32)
    if len(values):
        row[places] = np.array(values, dtype=np.float32)
    return torch.from_numpy(row)


# Staleness and advantages.


def applied_to(header: trainer_pb2.BatchHeader) -> Version:
    """Return the version of the weights to which a batch is applied: the one before its target, since batches are applied in order."""
    return Version(header.target_version.epoch, header.target_version.number - 1)


def judge(
    samples: Sequence[Sample],
    header: trainer_pb2.BatchHeader,
    lineage: Lineage,
    objective: ResolvedObjective,
    digests: Sequence[bytes],
    *,
    named: Mapping[str, ResolvedObjective] = MappingProxyType({}),
) -> Batch:
    """Decide which tokens of a batch are trained, and estimate the advantages that are missing.

    Args:
        samples: The batch's trajectories.
        header: The batch's header.
        lineage: The epochs of the run.
        objective: The objective for trajectories that name none.
        digests: Digest of each trajectory as it arrived.
        named: The objectives for trajectories that name one, by name.

    Raises:
        ValueError: if the estimator cannot take these rewards.
    """
    now = applied_to(header)
    objectives = {"": objective, **named}
    decisions = [_judge(each, header, now, lineage, objectives[each.sequence.objective]) for each in samples]
    if objective.runs_estimator:
        decisions = [_without_reward(each) if _lacks_reward(each.sequence) else each for each in decisions]
    elif header.advantage_estimator or header.estimated_groups:
        decisions = _estimated(decisions, _estimators(header, samples))
    rows = [decision.sequence for decision in decisions if decision.sequence is not None]
    facts = {
        name: partial(with_batch_facts, objective=each, staleness=partial(lineage.staleness, now=now))
        for name, each in objectives.items()
    }
    for name, work in facts.items():
        rows = among(rows, [name], work)
    return Batch(
        header=header,
        digests=tuple(digests),
        sequences=tuple(rows),
        decisions=tuple(decisions),
        metrics=_batch_metrics(samples) | _drop_metrics(decisions),
    )


def _judge(
    sample: Sample, header: trainer_pb2.BatchHeader, now: Version, lineage: Lineage, objective: ResolvedObjective
) -> Decision:
    ages = token_staleness(sample.spans, sample.trained_tokens, lineage, now)
    oldest = int(ages.max(initial=0))
    fresh = ages <= header.max_staleness
    row = sample.sequence
    if not fresh.all():
        if header.on_stale != trainer_pb2.STALE_POLICY_TRUNCATE or not fresh.any():
            retired = any(lineage.is_retired(span.version, now) for span in sample.spans)
            return _dropped(sample, RETIRED_EPOCH if retired else STALE, oldest)
        mask = row.loss_mask.clone()
        mask[row.loss_mask] = torch.from_numpy(fresh)
        row = replace(row, loss_mask=mask)
    (kept,), lost = keep_trainable([row], objective)
    if not kept.loss_tokens:
        return _dropped(sample, NO_TRAINED_TOKENS if sample.trained_tokens else MASKED, oldest)
    if stale := len(ages) - int(fresh.sum()):
        lost |= {STALE: stale}
    return Decision(sample, kept, "", oldest, ages[kept.loss_mask.numpy()[sample.sequence.loss_mask.numpy()]], lost)


def _dropped(sample: Sample, reason: str, oldest: int) -> Decision:
    return Decision(sample, None, reason, oldest, np.zeros(0, np.int64), {reason: sample.trained_tokens})


def _is_late(decision: Decision) -> bool:
    return decision.reason in (STALE, RETIRED_EPOCH)


def _estimators(header: trainer_pb2.BatchHeader, samples: Sequence[Sample]) -> dict[str, tuple[int, str]]:
    """Return, for each group, a number that the groups share with which it is estimated, and the estimator of these groups.

    Raises:
        ValueError: if the header names only some groups of the batch, or a group twice.
    """
    named: dict[str, tuple[int, str]] = {}
    for number, each in enumerate(header.estimated_groups):
        for group in each.group_ids:
            if group in named:
                raise ValueError(
                    f"estimated_groups names group {group!r} twice: name it in one entry, with those that it is estimated with"
                )
            named[group] = (number, each.advantage_estimator)
    groups = {each.sequence.group_id for each in samples}
    if header.estimated_groups and (unnamed := groups - named.keys()):
        raise ValueError(
            f"estimated_groups leaves out group {min(unnamed)!r}: name an estimator for each group, or for none"
        )
    return named or dict.fromkeys(groups, (0, header.advantage_estimator))


def _estimated(decisions: Sequence[Decision], estimators: Mapping[str, tuple[int, str]]) -> list[Decision]:
    """Estimate missing advantages, and estimate again the advantages of groups that lost an episode to staleness.

    If the estimator scales by the whole batch, all groups that it estimates together are estimated again.
    """
    values: dict[str, Advantage] = {}
    again: set[str] = set()
    for together in sorted(set(estimators.values())):
        members = [each for each in decisions if estimators[each.sample.sequence.group_id] == together]
        fresh = [each.sample for each in members if not _is_late(each)]
        shrunk = {each.sample.sequence.group_id for each in members if _is_late(each)}
        if shrunk or not all(sample.has_advantages for sample in fresh):
            _, estimator = together
            branched = any(sample.branch_offsets is not None for sample in fresh)
            values |= advantages_by_episode(estimator, map(_episode, fresh), branched=branched)
            scaled = shrunk and estimator in BATCH_SCALES
            again |= {each.sequence.group_id for each in fresh} if scaled else shrunk
    return [_with_advantages(each, values, again) for each in decisions]


def _with_advantages(decision: Decision, by_episode: Mapping[str, Advantage], again: set[str]) -> Decision:
    """Add missing advantages, and replace the advantages of groups that are estimated again."""
    sequence = decision.sequence
    if sequence is None or (decision.sample.has_advantages and sequence.group_id not in again):
        return decision
    found = by_episode.get(sequence.episode_id)
    if found is None:
        return decision if decision.sample.has_advantages else _without_reward(decision)
    offsets = decision.sample.branch_offsets
    advantages = torch.full_like(sequence.advantages, found.value) if offsets is None else found.at(offsets)
    return replace(decision, sequence=replace(sequence, advantages=torch.where(sequence.loss_mask, advantages, 0.0)))


def _lacks_reward(sequence: TrainingRow | None) -> bool:
    return sequence is not None and sequence.reward is None and sequence.token_rewards is None


def _without_reward(decision: Decision) -> Decision:
    return _dropped(decision.sample, MISSING_REWARD, decision.oldest)


def _episode(sample: Sample) -> Episode:
    sequence = sample.sequence
    return Episode(sequence.episode_id, sequence.group_id, sequence.reward, sample.trained_tokens)


def _batch_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Describe the batch as it arrived; a missing reward counts once per episode."""
    return {
        "trajectories": float(len(samples)),
        "missing_rewards": float(sum(each.reward is None for each in joined(map(_episode, samples)))),
        "multi_version_trajectories": float(sum(len(sample.spans) > 1 for sample in samples)),
    }


def _drop_metrics(decisions: Sequence[Decision]) -> dict[str, float]:
    """Count the trajectories and tokens that are not trained, by cause."""
    trajectories = Counter(each.reason.lower() for each in decisions if each.reason)
    tokens: Counter[str] = Counter()
    for decision in decisions:
        tokens.update(decision.lost)
    return {f"dropped_trajectories/{reason}": float(count) for reason, count in trajectories.items()} | {
        f"dropped_tokens/{cause.lower()}": float(count) for cause, count in tokens.items() if count
    }


def _result(
    decision: Decision, digest: bytes, tokens: int, steps: int, *, critic_only: bool
) -> trainer_pb2.TrajectoryResult:
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
        digest=digest,
    )


def token_staleness(
    spans: Sequence[VersionSpan], trained_tokens: int, lineage: Lineage, now: Version
) -> NDArray[np.int64]:
    """Return the staleness of each trained token.

    Args:
        spans: Versions of the trained tokens. Starts are counted in trained tokens; the first is 0.
        trained_tokens: Number of trained tokens.
        lineage: The epochs of the run.
        now: Version of the weights to which the batch is applied.
    """
    if trained_tokens == 0:
        return np.zeros(0, dtype=np.int64)
    ages = np.array([lineage.staleness(span.version, now) for span in spans], dtype=np.int64)
    return np.repeat(ages, span_lengths([span.start for span in spans], trained_tokens))
