"""Metrics of a run: `summarise` for each applied batch, `build_report` for all steps together. Pure, except for reading a file.

About completions it says how long the better ones are, how many are equal, and how much they repeat. These measures need only token ids
and cost a few milliseconds for 128 completions of 2,000 tokens.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from orchestrator_svc.journal.facts import Reason
from orchestrator_svc.journal.records import SharedRecord
from sluice.tasks import Turn
from sluice.v1 import journal_pb2, tokens_pb2, trainer_pb2
from sluice.versions import Lineage, Version, sampled_tokens

EPOCH = "policy/epoch"

MEAN_TOKENS = "completion/mean_tokens"
"""A metric that each step has, and no evaluation."""

STALENESS_PREFIX = "staleness/tokens_at_"


_MOST_AGES = 64
"""Up to this age, ages without tokens are written as 0. A bound of thousands must not make thousands of curves."""


@dataclass(frozen=True)
class AppliedStep:
    """A batch that the trainer applied.

    Attributes:
        version: The version that resulted.
        trained: Trajectories that took part.
        dropped: Trajectories that took no part, by reason.
        records: Its trajectories, marked with their outcome.
        past: Whether it was applied while no orchestrator ran.
    """

    version: Version
    trained: int
    dropped: Mapping[str, int]
    metrics: Mapping[str, float]
    records: list[SharedRecord]
    past: bool


async def summarise(
    step: trainer_pb2.StepReport,
    applied: journal_pb2.BatchApplied,
    records: list[SharedRecord],
    lineage: Lineage,
    max_staleness: int,
    *,
    is_solved: Callable[[str, float], bool],
    past: bool = False,
) -> AppliedStep:
    """Return the metrics of an applied batch on data and staleness. Set outcome, reason and step of each record that can still be read.

    Tokens of a trained trajectory that are older than `max_staleness` were cut from the loss and are not counted.

    Args:
        step: The trainer's report.
        applied: The fact of the applied batch.
        records: The trajectories of the batch.
        lineage: Returns the number that a version counts as.
        max_staleness: Bound of the batch.
        is_solved: Returns whether an episode of an environment with a reward counts as solved.
        past: Whether it was applied while no orchestrator ran.
    """
    results = {result.trajectory_id: result for result in step.results}
    ages: Counter[int] = Counter()
    number_of = cache(lineage.number)  # many tokens, few versions
    turn = Turn()
    trajectories = [each.trajectory for each in records]
    lengths, shared = [], []
    for record, trajectory in zip(records, trajectories, strict=True):
        await turn.give_way()
        lengths.append(sampled_tokens(trajectory))
        shared.append(record.beginning.tokens if record.beginning else 0)
        result = results.get(trajectory.trajectory_id)
        own = record.own
        own.step = step.sequence_no
        own.outcome = result.outcome if result else tokens_pb2.TRAJECTORY_OUTCOME_DROPPED
        own.reason = result.reason if result else Reason.NOT_REPORTED
        if own.outcome != tokens_pb2.TRAJECTORY_OUTCOME_TRAINED:
            continue
        for age, tokens in token_ages(trajectory, number_of, step.sequence_no - 1):
            if age <= max_staleness:
                ages[age] += tokens
    metrics = _reward_metrics(records, is_solved) | _length_metrics(trajectories, lengths)
    metrics |= _age_metrics(ages, max_staleness) | lengths_by_reward(trajectories, lengths)
    metrics |= await asyncio.to_thread(lambda: text_metrics(completion_ids(trajectories, shared)))
    metrics |= mean_measures(record.own.metrics for record in records)
    tokens = sum(result.trained_tokens for result in step.results)
    if tokens or not applied.trained:  # otherwise the report was lost
        metrics["tokens/trained"] = float(tokens)
    for name, value in step.metrics.items():  # `weights/` names are shared with the replicas
        metrics[name if name.startswith("weights/") else f"trainer/{name}"] = value
    dropped = {reason: len(each.trajectory_ids) for reason, each in applied.dropped.items()}
    return AppliedStep(Version.from_proto(step.policy_version), len(applied.trained), dropped, metrics, records, past)


def mean_measures(measures: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each measure of environments, over the episodes that have it."""
    values: dict[str, list[float]] = {}
    for each in measures:
        for name, value in each.items():
            values.setdefault(f"environment/{name}", []).append(value)
    return {name: math.fsum(each) / len(each) for name, each in sorted(values.items())}


def token_ages(
    trajectory: tokens_pb2.Trajectory, number_of: Callable[[Version], int], consumed_at: int
) -> Iterator[tuple[int, int]]:
    """Yield staleness and number of tokens of each version span.

    Args:
        trajectory: The trajectory.
        number_of: Returns the number that a version counts as, such as `Lineage.number`.
        consumed_at: Number of the version whose weights consumed the tokens.
    """
    end = sampled_tokens(trajectory)
    for span in reversed(trajectory.version_spans):
        yield consumed_at - number_of(Version.from_proto(span.policy_version)), end - span.start
        end = span.start


def _reward_metrics(records: Sequence[SharedRecord], is_solved: Callable[[str, float], bool]) -> dict[str, float]:
    by_group: dict[str, list[float]] = {}
    unsolved: set[str] = set()
    for each in records:
        trajectory = each.trajectory
        if trajectory.HasField("reward"):
            by_group.setdefault(trajectory.group_id, []).append(trajectory.reward)
            if not is_solved(each.own.environment, trajectory.reward):
                unsolved.add(trajectory.group_id)
    degenerate = float(sum(len(set(values)) == 1 for values in by_group.values()))
    if not by_group:
        return {"groups/degenerate": degenerate}
    rewards = np.concatenate([*by_group.values()])
    low, median, high = percentiles(rewards, 10, 50, 90)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/max": float(rewards.max()),
        "reward/p10": low,
        "reward/p50": median,
        "reward/p90": high,
        "groups/degenerate": degenerate,
        "groups/all_zero": float(sum(not any(values) for values in by_group.values())),
        "groups/all_solved": float(len(by_group) - len(unsolved)),
        "groups/count": float(len(by_group)),
    }


def percentiles(values: Sequence[float] | npt.NDArray[np.float64], *percents: float) -> list[float]:
    """Return percentiles of at least one value, as `numpy.percentile` does, in a twentieth of its time."""
    last = len(values) - 1
    found: list[float] = np.interp([each / 100 * last for each in percents], range(last + 1), np.sort(values)).tolist()
    return found


def reward_by_environment(records: Sequence[SharedRecord], environments: Mapping[str, str]) -> dict[str, float]:
    """Return the mean reward of each environment's trajectories; `environments` are by group."""
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for each in records:
        if each.trajectory.HasField("reward"):
            rewards[environments[each.trajectory.group_id]].append(each.trajectory.reward)
    return {f"environments/{name}/reward_mean": math.fsum(own) / len(own) for name, own in rewards.items()}


def _length_metrics(trajectories: Sequence[tokens_pb2.Trajectory], lengths: Sequence[int]) -> dict[str, float]:
    truncated = sum(each.finish_reason == tokens_pb2.FINISH_REASON_LENGTH for each in trajectories)
    count = max(1, len(trajectories))
    return {
        "completion/mean_tokens": sum(lengths) / count,
        "completion/max_tokens": float(max(lengths, default=0)),
        "completion/truncated_share": truncated / count,
    }


def _age_metrics(ages: Mapping[int, int], max_staleness: int) -> dict[str, float]:
    """Return how old trained tokens were: the number for each age up to the bound, also if 0, so that a curve falls to 0."""
    tokens = sum(ages.values())
    counts = dict.fromkeys(range(min(max_staleness, _MOST_AGES) + 1), 0) | dict(ages)
    metrics = {f"{STALENESS_PREFIX}{age}": float(count) for age, count in sorted(counts.items())}
    if not tokens:
        return metrics
    return metrics | {
        "staleness/mean": math.fsum(age * count for age, count in ages.items()) / tokens,
        "staleness/max": float(max(ages)),
        "staleness/share_ge_1": sum(count for age, count in ages.items() if age >= 1) / tokens,
    }


TokenIds = npt.NDArray[np.uint32]
"""The sampled tokens of one completion, in order."""

MOST_TOKENS = 4096
"""Tokens at the end of a completion that `repetition` looks at: a policy that loops continues to loop until it is cut off."""

NGRAM = 8
"""Tokens of an n-gram. Shorter ones repeat in ordinary prose and code; a loop repeats n-grams of any length."""

_FACTOR = np.uint64(0x9E37_79B9_7F4A_7C15)
"""Odd, so that multiplication modulo 2^64 keeps all bits (Knuth's multiplicative hash)."""

_TOGETHER = 1 << 16
"""Most tokens of completions whose n-grams are sorted together: few enough for a cache, and enough to make short completions cheap."""

_OWNER_BITS = np.uint64(48)
"""Bits of a key that are below the number of its completion."""


def completion_ids(trajectories: Sequence[tokens_pb2.Trajectory], shared: Sequence[int]) -> list[TokenIds]:
    """Return the sampled tokens of each trajectory, those of all its turns in order; empty where its mask has none.

    Args:
        trajectories: The trajectories.
        shared: For each trajectory the number of token ids that it shares with others and that its `token_ids` therefore lack. Shared ids that
            were sampled are left out of the result.
    """
    return [
        _sampled(np.array(each.token_ids, dtype=np.uint32), each.mask_runs, before)
        for each, before in zip(trajectories, shared, strict=True)
    ]


def _sampled(ids: TokenIds, mask_runs: Sequence[int], before: int) -> TokenIds:
    """Return the ids that the mask marks as sampled. `ids` begin after the first `before` tokens of the trajectory."""
    place, parts = -before, list[TokenIds]()
    for index, length in enumerate(mask_runs):
        if index % 2 and length:
            parts.append(ids[max(0, place) : max(0, place + length)])
        place += length
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint32), *parts])


def text_metrics(completions: Sequence[TokenIds]) -> dict[str, float]:
    """Return `completion/duplicate_share` and `completion/repetition` of a batch; nothing if it has no completion with tokens.

    Its time grows with all tokens: not for an event loop.
    """
    some = [each for each in completions if each.size]
    if not some:
        return {}
    return {"completion/duplicate_share": duplicate_share(some), "completion/repetition": repetition(some)}


def duplicate_share(completions: Sequence[TokenIds]) -> float:
    """Return the share of completions with the same tokens as another completion of the batch, in the same group or another."""
    counts = Counter(each.tobytes() for each in completions)
    return sum(count for count in counts.values() if count > 1) / max(1, len(completions))


def repetition(completions: Sequence[TokenIds]) -> float:
    """Return the mean share of a completion's n-grams that occurred in it before, 0 to 1.

    0: no n-gram of `NGRAM` tokens occurs twice. A completion shorter than that counts as 0.
    """
    ends = (each[-MOST_TOKENS:] for each in completions if each.size >= NGRAM)
    return sum(map(_repeated_shares, _parts(ends))) / max(1, len(completions))


def _parts(completions: Iterable[TokenIds]) -> Iterator[list[TokenIds]]:
    """Yield all completions in lists of `_TOGETHER` tokens at most."""
    part, tokens = list[TokenIds](), 0
    for each in completions:
        if part and tokens + each.size > _TOGETHER:
            yield part
            part, tokens = [], 0
        part.append(each)
        tokens += each.size
    if part:
        yield part


def _repeated_shares(completions: Sequence[TokenIds]) -> float:
    """Return the sum over some completions of the share of their n-grams that occurred before. All n-grams are sorted at once.

    Each has `NGRAM` tokens or more, and all together `_TOGETHER` or `MOST_TOKENS`.
    """
    sizes = np.array([each.size for each in completions])
    tokens = np.concatenate(completions).astype(np.uint64)
    ngrams = tokens.size - NGRAM + 1
    owners = np.repeat(np.arange(len(completions), dtype=np.uint64), sizes)
    hashes = np.zeros(ngrams, np.uint64)  # one for each n-gram: a polynomial of its tokens modulo 2^64
    for offset in range(NGRAM):
        hashes *= _FACTOR
        hashes += tokens[offset : offset + ngrams]
    hashes *= _FACTOR  # so that the last token, too, reaches the upper bits
    begins = owners[:ngrams]
    # 48 bits distinguish the 4,096 n-grams of a completion. The other bits say which completion it is.
    keys = (begins << _OWNER_BITS | hashes >> (np.uint64(64) - _OWNER_BITS))[begins == owners[tokens.size - ngrams :]]
    keys.sort()
    again = keys[1:][keys[1:] == keys[:-1]] >> _OWNER_BITS
    counts = np.bincount(again.astype(np.int64), minlength=len(completions))
    return float((counts / (sizes - NGRAM + 1)).sum())


def lengths_by_reward(trajectories: Iterable[tokens_pb2.Trajectory], lengths: Iterable[int]) -> dict[str, float]:
    """Return the mean tokens of completions above the mean reward of their group, and of the others of these groups.

    Training makes the completions above the mean likelier, whatever the scale of the rewards. If these are longer step after step, the
    policy learns length. Groups with equal rewards say nothing about that and are left out. Without any other group there is no metric.

    Args:
        trajectories: The trajectories.
        lengths: Sampled tokens of each.
    """
    groups: dict[str, list[tuple[float, int]]] = {}
    for each, length in zip(trajectories, lengths, strict=True):
        if each.HasField("reward"):
            groups.setdefault(each.group_id, []).append((each.reward, length))
    by_side: Mapping[bool, list[int]] = {True: [], False: []}
    for own in groups.values():
        rewards = [reward for reward, _ in own]
        if min(rewards) < max(rewards):
            mean = fmean(rewards)
            for reward, tokens in own:
                by_side[reward > mean].append(tokens)
    if not by_side[True] or not by_side[False]:
        return {}
    return {
        "completion/mean_tokens_rewarded": fmean(by_side[True]),
        "completion/mean_tokens_unrewarded": fmean(by_side[False]),
    }


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """Return metrics by step; for a step that was trained again after a rollback, the latest ones."""
    steps: dict[int, dict[str, float]] = {}
    with path.open(encoding="utf-8") as lines:
        for step, values in read_rows(lines):
            if "reward/mean" in values:
                steps[step] = {**_evaluations(steps.get(step, {})), **values}
            else:
                steps.setdefault(step, {}).update(values)
    return steps


def read_rows(lines: Iterable[str]) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield step and values of each line of ``metrics.jsonl``, without a last line that is incomplete."""
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # the torn last line of a process that was killed
        yield int(row.pop("step")), {name: value for name, value in row.items() if value is not None}


def build_report(steps: Mapping[int, Mapping[str, float]], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report of a run, folded from the metrics of its steps, so that it also covers earlier processes of the run.

    `facts` are values that the metrics do not hold: run, seed, state, steps, wall_s, counts of trajectories.
    """
    trained = {step: values for step, values in sorted(steps.items()) if 0 < step <= int(facts["steps"])}
    ages: Counter[int] = Counter()
    for values in trained.values():
        for name, tokens in values.items():
            if name.startswith(STALENESS_PREFIX):
                ages[int(name.removeprefix(STALENESS_PREFIX))] += round(tokens)
    tokens = sum(ages.values())

    def mean(name: str) -> float | None:
        found = [values[name] for values in trained.values() if name in values]
        return sum(found) / len(found) if found else None

    return {
        **facts,
        "tokens_trained": round(sum(values.get("tokens/trained", 0.0) for values in trained.values())),
        "max_staleness_seen": max((age for age, count in ages.items() if count), default=0),
        "staleness_share_ge_1": sum(count for age, count in ages.items() if age >= 1) / tokens if tokens else 0.0,
        "staleness_tokens": {str(age): count for age, count in sorted(ages.items()) if count},
        "mismatch_kl_mean": mean("trainer/mismatch_kl"),
        "step_s_mean": mean("time/step_s"),
        "trainer_idle_share": mean("load/trainer_idle"),
        "rollout_idle_share": mean("load/rollout_idle"),
        "dispatch_blocked_share": mean("load/dispatch_blocked"),
        "reward_curve": [[step, values["reward/mean"]] for step, values in trained.items() if "reward/mean" in values],
        "evaluations": [
            {"step": step, **_evaluations(values)} for step, values in sorted(steps.items()) if _evaluations(values)
        ],
    }


def _evaluations(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if name.startswith("eval/")}
