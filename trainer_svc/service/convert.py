"""Check the trajectories of a batch and convert them to training rows. Pure. Each fault names the trajectory's index and the field."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sluice.advantages import Advantages
from sluice.v1 import tokens_pb2, trainer_pb2
from sluice.versions import Version, VersionSpan
from trainer_svc.batch.rows import Sequence

MAX_TOKENS = 262_144
"""Most tokens of a trajectory; the limit is the contract's."""

MAX_NAME = 256
"""Most characters of an id, which reports repeat."""

LOGPROB_ROUNDING = 1e-3
"""Nats by which a log-probability may exceed 0: rounding of a low-precision softmax, no more."""

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Sample:
    """One converted trajectory.

    Attributes:
        sequence: Its training row; the advantages are zero where none were given.
        spans: Versions that sampled its trained tokens; starts are counted in trained tokens.
        trained_tokens: Number of trained tokens.
        has_advantages: Whether the trajectory carried advantages.
    """

    sequence: Sequence
    spans: tuple[VersionSpan, ...]
    trained_tokens: int
    has_advantages: bool


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
        on_stale: What happens to a trajectory with older tokens.
        estimator: Advantage estimator for trajectories without advantages, and for the survivors of a group that lost a
            member; or one that the update itself runs; or empty to keep the given advantages.
        samples: Its trajectories.
        estimated: What the estimator returns for the whole batch; None if it was not run yet.
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
    estimated: Advantages | None = None
    content_digest: str = ""
    sampler_dtype: str = ""


@dataclass(frozen=True, slots=True)
class Expectations:
    """What the trainer and the batch's header require of each trajectory.

    Attributes:
        vocabulary: Upper bound of token ids, exclusive.
        newest: Version of the weights that the batch is applied to, which no token can be newer than.
        has_estimator: Whether advantages may be absent, because the header names an estimator or the objective reads none.
        estimates: The estimator that the trainer runs; empty if it runs none.
        needs_reference: Whether trajectories must bring reference log-probabilities.
        needs_teacher: Whether they must bring a teacher's.
    """

    vocabulary: int
    newest: Version
    has_estimator: bool
    estimates: str = ""
    needs_reference: bool = False
    needs_teacher: bool = False


def convert(trajectories: Rows[tokens_pb2.Trajectory], expected: Expectations) -> tuple[list[Sample], dict[str, str]]:
    """Check and convert the trajectories of a batch.

    Returns:
        The samples in order, and what is wrong by field, such as ``trajectories[3].mask_runs``. Samples are complete
        only if nothing is wrong.
    """
    violations: dict[str, str] = {}
    samples: list[Sample] = []
    for index, trajectory in enumerate(trajectories):
        mask = _trained(trajectory)
        faults = dict(_faults(trajectory, mask, expected))
        if faults:
            violations |= {f"trajectories[{index}].{field}": fault for field, fault in faults.items()}
        else:
            samples.append(_sample(trajectory, mask))
    return samples, violations | _contradictions(trajectories)


def _trained(trajectory: tokens_pb2.Trajectory) -> Mask:
    """Return which tokens are trained; shorter than the trajectory if its runs are."""
    runs = np.array(trajectory.mask_runs, dtype=np.int64)
    if int(runs.sum()) > MAX_TOKENS:  # refused below; a hostile run length must not allocate memory first
        return np.zeros(0, dtype=np.bool_)
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs)


def _faults(trajectory: tokens_pb2.Trajectory, mask: Mask, expected: Expectations) -> Iterator[tuple[str, str]]:
    trained = int(mask.sum())
    yield from _faulty_names(trajectory)
    yield from _faulty_tokens(trajectory, mask, expected.vocabulary)
    yield from _faulty_lengths(trajectory, trained)
    yield from _faulty_values(trajectory)
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
    if not 0 < count <= MAX_TOKENS:
        yield "token_ids", f"has {count} tokens; give 1 to {MAX_TOKENS}"
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
        "logprobs": (trained,),
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
    if not (math.isfinite(trajectory.temperature) and trajectory.temperature > 0):
        yield "temperature", f"is {trajectory.temperature}; trained tokens need one above 0"
    if trajectory.HasField("reward") and not math.isfinite(trajectory.reward):
        yield "reward", f"is {trajectory.reward}; leave it unset where it is missing"
    if not np.isfinite(np.array(trajectory.advantages, dtype=np.float32)).all():
        yield "advantages", "hold a value that is not finite"
    if not np.isfinite(np.array(trajectory.token_rewards, dtype=np.float32)).all():
        yield "token_rewards", "hold a value that is not finite"
    if not all(math.isfinite(each.reward) for each in trajectory.turn_rewards):
        yield "turn_rewards", "hold a value that is not finite"
    for name in ("logprobs", "ref_logprobs", "teacher_logprobs"):
        if (np.array(getattr(trajectory, name), dtype=np.float32) > LOGPROB_ROUNDING).any():
            yield name, "hold a value above 0; give natural logarithms of probabilities"


def _faulty_spans(spans: Rows[tokens_pb2.VersionSpan], trained: int, newest: Version) -> Iterator[tuple[str, str]]:
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
        yield "advantages", f"are given, but this trainer computes {expected.estimates}; leave them empty"
    if not trajectory.advantages and not expected.has_estimator and not expected.estimates:
        yield "advantages", "are absent; send them, or name header.advantage_estimator"
    if expected.estimates == "process" and not trajectory.token_rewards and not trajectory.turn_rewards:
        yield "turn_rewards", "are absent, and token_rewards too; the estimator process needs one of them"
    if expected.needs_reference and not trajectory.ref_logprobs:
        yield (
            "ref_logprobs",
            "are absent, but the objective has a KL term; send them, set trainer.reference.model, or objective.kl_coef to 0",
        )
    if expected.needs_teacher and not trajectory.teacher_logprobs:
        yield (
            "teacher_logprobs",
            "are absent, but the objective follows a teacher; send them, or set trainer.teacher.model",
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


def _sample(trajectory: tokens_pb2.Trajectory, mask: Mask) -> Sample:
    places = np.flatnonzero(mask)
    spans = tuple(VersionSpan.from_proto(span) for span in trajectory.version_spans)
    if not places.size:
        spans = ()
    sequence = Sequence(
        input_ids=torch.from_numpy(np.array(trajectory.token_ids, dtype=np.int64)),
        loss_mask=torch.from_numpy(mask),
        behaviour_logprobs=_spread(trajectory.logprobs, places, len(mask), np.nan),
        advantages=_spread(trajectory.advantages, places, len(mask), 0.0),
        reference_logprobs=_column(trajectory.ref_logprobs, places, len(mask)),
        teacher_logprobs=_column(trajectory.teacher_logprobs, places, len(mask)),
        token_rewards=_token_rewards(trajectory, places, len(mask)),
        versions=tuple(VersionSpan(int(places[span.start]), span.version) for span in spans),
        reward=_reward(trajectory),
        truncated=trajectory.finish_reason == tokens_pb2.FINISH_REASON_LENGTH,
        temperature=trajectory.temperature,
        group_id=trajectory.group_id,
        episode_id=trajectory.episode_id,
        trajectory_id=trajectory.trajectory_id,
    )
    return Sample(
        sequence=sequence, spans=spans, trained_tokens=len(places), has_advantages=len(trajectory.advantages) > 0
    )


def _column(values: Any, places: NDArray[np.int64], length: int) -> torch.Tensor | None:  # noqa: ANN401  a protobuf container
    """Return an optional column of log-probabilities; None if the trajectory does not have it."""
    return _spread(values, places, length, np.nan) if len(values) else None


def _token_rewards(trajectory: tokens_pb2.Trajectory, places: NDArray[np.int64], length: int) -> torch.Tensor | None:
    """Return the reward at each trained token; None if the environment rewards the episode as a whole.

    A turn's reward goes to its last trained token. The rest of the episode's reward goes to the last token of all.
    """
    if len(trajectory.token_rewards):
        return _spread(trajectory.token_rewards, places, length, 0.0)
    if not trajectory.turn_rewards or not places.size:
        return None
    rewards = np.zeros(len(places), dtype=np.float64)
    ends = np.cumsum(np.array(trajectory.turn_runs or [len(places)], dtype=np.int64)) - 1
    for each in trajectory.turn_rewards:
        rewards[max(0, int(ends[each.turn]))] += each.reward
    if trajectory.HasField("reward"):
        rewards[-1] += trajectory.reward - math.fsum(each.reward for each in trajectory.turn_rewards)
    return _spread(rewards, places, length, 0.0)


def _spread(values: Any, places: NDArray[np.int64], length: int, elsewhere: float) -> torch.Tensor:  # noqa: ANN401  a protobuf container
    """Spread values over the trained tokens, one for each or one for all. The other tokens get `elsewhere`."""
    row = np.full(length, elsewhere, dtype=np.float32)
    if len(values):
        row[places] = np.array(values, dtype=np.float32)
    return torch.from_numpy(row)
