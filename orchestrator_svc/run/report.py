"""What a run leaves for people: the metrics of every step, every trajectory, and ``report.json``.

`summarise` computes what one applied batch says of data and staleness, `RunReporter` adds rates and counts and shows them,
`Recorder` writes the files. `build_report` folds the metrics of all steps into the report.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import structlog
from google.protobuf.timestamp_pb2 import Timestamp

from orchestrator_svc.config import OrchestratorConfig
from orchestrator_svc.journal.ledger import Ledger, Reason, Stage
from orchestrator_svc.journal.records import Each, SharedRecord
from orchestrator_svc.run.completions import completion_ids, lengths_by_reward, text_metrics
from orchestrator_svc.run.side_files import DroppedFile, EventFile, dropped_row
from orchestrator_svc.run.status import RunStatus
from orchestrator_svc.run.trajectory_files import TrajectoryFiles
from sluice.config import CommonConfig
from sluice.environments.processes import EnvironmentProcesses
from sluice.host_files import write_whole
from sluice.sampling.policy import PolicyEngine
from sluice.sampling.pool import evictions
from sluice.tasks import Turn, discard_outcome
from sluice.telemetry import MetricsWriter
from sluice.tensorboard_log import shows_samples, spread
from sluice.threads import SerialThread
from sluice.v1 import journal_pb2, orchestrator_pb2, tokens_pb2, trainer_pb2
from sluice.versions import ENDLESS, Lineage, Version, sampled_tokens

log = structlog.get_logger(__name__)

_WAITING = 16
"""Writes that may wait; then the run waits for the disk."""

_DISK_S = 300.0
"""Seconds that the disk may take for one of them; a disk that needs longer is gone."""

_MOST_BESIDE_BYTES = 64 << 20
"""Size of all that may wait to be written and that the run does not wait for; one larger trajectory may."""

_EPOCH = "policy/epoch"

_ALWAYS = "completion/mean_tokens"
"""A metric that each step has, and no evaluation."""

_STALENESS_PREFIX = "staleness/tokens_at_"

_MOST_AGES = 64
"""Ages up to which no tokens are written as 0: a bound of thousands must not make as many curves."""

NOT_TRAINED = "not_trained/"
"""Begins the counters of sampled tokens of external agents that may not be trained; the reason follows."""


@dataclass(frozen=True)
class AppliedStep:
    """A batch that the trainer applied.

    Attributes:
        version: The version that resulted.
        trained: Trajectories that took part.
        dropped: Those that did not, by reason.
        records: Its trajectories, marked with their outcome.
        past: Whether it was applied while no orchestrator was there to see it.
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
    """Return what an applied batch says of data and staleness; set outcome, reason and step of each record that can still be read.

    Tokens of a trained trajectory that are older than `max_staleness` were cut from the loss and are not counted.

    Args:
        step: The trainer's report.
        applied: The fact of it.
        records: The trajectories of the batch.
        lineage: Says what number a version counts as.
        max_staleness: Bound of the batch.
        is_solved: Says of an environment and a reward whether the episode counts as solved.
        past: Whether no orchestrator saw it being applied.
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
        for age, tokens in _token_ages(trajectory, number_of, step.sequence_no - 1):
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


def _token_ages(
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
    low, median, high = _percentiles(rewards, 10, 50, 90)
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


def _percentiles(values: Sequence[float] | npt.NDArray[np.float64], *percents: float) -> list[float]:
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
    """Return how old trained tokens were; of each age up to the bound how many, so that a curve falls to 0 where there are none."""
    tokens = sum(ages.values())
    counts = dict.fromkeys(range(min(max_staleness, _MOST_AGES) + 1), 0) | dict(ages)
    metrics = {f"{_STALENESS_PREFIX}{age}": float(count) for age, count in sorted(counts.items())}
    if not tokens:
        return metrics
    return metrics | {
        "staleness/mean": math.fsum(age * count for age, count in ages.items()) / tokens,
        "staleness/max": float(max(ages)),
        "staleness/share_ge_1": sum(count for age, count in ages.items() if age >= 1) / tokens,
    }


class RunReporter:
    """Shows and records the steps and evaluations of a run, and writes its report."""

    def __init__(
        self,
        common: CommonConfig,
        config: OrchestratorConfig,
        ledger: Ledger,
        status: RunStatus,
        recorder: Recorder,
        *,
        engine: PolicyEngine,
        environments: Mapping[str, EnvironmentProcesses],
    ) -> None:
        self._common, self._config, self._ledger, self._status = common, config, ledger, status
        self._recorder, self._engine, self._environments = recorder, engine, environments
        self._generated_before = ledger.generated.copy()
        self._last_step = time.monotonic()
        self._counted: Counter[str] = Counter()
        self._failed_before = self._failed_calls()
        self._shares = status.shares()

    async def step(self, step: AppliedStep) -> None:
        """Show and record an applied batch."""
        version, metrics = step.version, {**step.metrics, _EPOCH: float(step.version.epoch)}
        if not step.past:
            metrics |= self._since_last_step() | self._engine.pool.update_metrics(version)
        turn = Turn()
        for record in step.records:
            self._status.history.add(record)
            await turn.give_way()
        self._status.step_finished(version, metrics)
        await self._recorder.step(version.number, metrics, step.records, self._ledger.lineage)
        shown = {name: round(metrics[name], 4) for name in ("reward/mean", "staleness/mean") if name in metrics}
        log.info("step", version=str(version), trained=step.trained, dropped=dict(step.dropped), **shown)

    def _since_last_step(self) -> dict[str, float]:
        """Return rates and counts of the time since the last applied batch."""
        now, counts = time.monotonic(), self._engine.counts.copy()
        more, self._counted = counts - self._counted, counts
        idle, blocked, rollout_idle = (share.take(now) for share in self._shares)
        elapsed, self._last_step = now - self._last_step, now
        failed, before = self._failed_calls(), self._failed_before
        self._failed_before = failed
        scoring = [seconds for each in self._environments.values() for seconds in each.take_scoring_s()]
        return {
            "environment/failed_calls": float(failed - before),
            **({"environment/score_seconds_p95": _percentiles(scoring, 95)[0]} if scoring else {}),
            "time/step_s": elapsed,
            "tokens/generated": float(more["tokens"]),
            "tokens/generated_per_s": more["tokens"] / elapsed if elapsed > 0 else 0.0,
            "requests/count": float(more["requests"]),
            "requests/spanning": float(more["spanning"]),
            "rollout/retried": float(more["retried"]),
            "rollout/continued": float(more["continued"]),
            "rollout/evicted": float(sum(evictions(more).values())),
            "rollout/tokens_kept": float(more["tokens_kept"]),
            "rollout/tokens_lost": float(more["tokens_lost"]),
            "load/trainer_idle": idle,
            "load/dispatch_blocked": blocked,
            "load/rollout_idle": rollout_idle,
            "orchestrator/loop_lag_p99_ms": self._status.loop_lag.take_p99_s() * 1e3,
        }

    def _failed_calls(self) -> int:
        """Return the calls of environments that failed so far."""
        return sum(each.failed_calls for each in self._environments.values())

    async def steps(self) -> Mapping[int, int]:
        """Return the last epoch in which each step was recorded, by this process and earlier ones."""
        return await self._recorder.steps()

    async def evaluation(self, version: Version, environment: str, metrics: Mapping[str, float]) -> None:
        """Show and record an evaluation on one environment."""
        self._status.evaluation_finished(version, environment, metrics)
        prefix = "eval" if len(self._environments) == 1 else f"eval/{environment}"
        await self._recorder.scalars(version.number, {f"{prefix}/{name}": value for name, value in metrics.items()})
        shown = {name: round(value, 4) for name, value in metrics.items()}
        log.info("evaluation", version=str(version), environment=environment, **shown)

    async def report(self, state: str, facts: Mapping[str, Any]) -> None:
        """Write the report.

        Args:
            state: "succeeded", "stopped" or "failed".
            facts: What neither the metrics nor the counts of this class hold.
        """
        ledger = self._ledger
        dropped = ledger.dropped
        generated = self._generated_before + self._engine.counts
        if state == "succeeded":
            # Nothing will train them; a continued run would.
            left = sum(each.size for each in ledger.groups.values() if each.stage is not Stage.RUNNING)
            dropped[Reason.RUN_ENDED] += left
        report = await self._recorder.report(
            {
                "run": self._common.run,
                "state": state,
                "error": self._status.error,
                "seed": self._common.seed,
                "model": self._common.model,
                "chat_template": None if self._common.chat_template is None else str(self._common.chat_template),
                "chat_template_kwargs": self._common.chat_template_kwargs,
                "environment": ", ".join(each.environment for each in self._config.mix),
                "steps": ledger.applied,
                "epochs": ledger.epoch,
                "wall_s": round(self._status.elapsed_s, 3),
                "max_staleness": self._common.max_staleness,
                "trajectories_accepted": ledger.accepted,
                "trajectories_trained": ledger.trained,
                "trajectories_dropped": {reason: count for reason, count in dropped.items() if count},
                "set_aside": {
                    reason: {"trajectories": each.trajectories, "problem": each.problem}
                    for reason, each in ledger.set_aside.items()
                },
                "refused": [
                    {"principal": each.principal, "task_id": each.task_id, "reason": each.reason, "count": each.count}
                    for each in self._status.refusals.describe()
                ],
                "groups_failed": dict(ledger.failed_groups),
                "episodes_lost": dict(ledger.lost_episodes),
                "redraws_dropped": dict(ledger.redraws_dropped),
                "tokens_generated": generated["tokens"],
                "requests": generated["requests"],
                "requests_spanning_versions": generated["spanning"],
                "generation_retries": generated["retried"],
                "samples_continued": generated["continued"],
                "replicas_evicted": evictions(generated),
                "tokens_kept": generated["tokens_kept"],
                "tokens_lost": generated["tokens_lost"],
                "tokens_lost_share": generated["tokens_lost"] / max(1, generated["tokens"] + generated["tokens_lost"]),
                "sessions_ended": dict(ledger.session_ends),
                "tokens_not_trained": {
                    name.removeprefix(NOT_TRAINED): count
                    for name, count in generated.items()
                    if name.startswith(NOT_TRAINED)
                },
                "changed_settings": [
                    {
                        "key": each.key,
                        "old": each.old_value,
                        "new": each.new_value,
                        "principal": each.principal,
                        "from_batch": each.from_sequence_no,
                    }
                    for each in ledger.setting_changes
                ],
                "environments": [
                    {
                        **environment_row(each),
                        "failed_calls": dict(self._environments[each.name].failures),
                        "processes_ended": dict(self._environments[each.name].processes_ended),
                    }
                    for each in self._status.environments()
                ],
                "findings": [each.as_json() for each in self._status.watch.findings],
                **facts,
            }
        )
        log.info("report", state=state, steps=report["steps"], wall_s=report["wall_s"])


def environment_row(environment: orchestrator_pb2.RunEnvironment) -> dict[str, Any]:
    """Return an environment as the report has it, under the names of `RunEnvironment`."""
    numbers = ("groups", "groups_accepted", "groups_refilled", "groups_failed", "quarantined_count")
    return {
        "name": environment.name,
        "wanted_share": round(environment.wanted_share, 6),
        **{name: getattr(environment, name) for name in numbers},
        "groups_passed_on": round(environment.groups_passed_on, 3),
        "pools": dict(environment.pools),
        "groups_by_pool": dict(environment.groups_by_pool),
        "overlong": dict(environment.overlong),
        "quarantined": [
            {"task_id": each.task_id, "failures": each.failures, "problem": each.problem}
            for each in environment.quarantined
        ],
    }


class Dropped(NamedTuple):
    """A trajectory that never reached a batch, and why, as a reason of GetRun."""

    record: SharedRecord
    reason: str


class Recorder:
    """Writes files in a thread while the run continues.

    The run waits for a disk that is far behind with its metrics and trajectories, and ends if it fails. It never waits for what is written
    beside them, events and what was dropped: what a slow or broken disk does not take is left out, and the log says so.

    Args:
        run_dir: The run's directory.
        texts: Takes the trajectories of each step; None if they are not written.
        dropped: Takes those that never reached a batch; None if they are not written.
        with_tokens: Trajectories of a step that are written with their tokens: those of as many groups as there are.
        settings: The run's settings, some of which TensorBoard shows.
    """

    def __init__(
        self,
        run_dir: Path,
        texts: TrajectoryFiles | None,
        dropped: DroppedFile | None = None,
        *,
        with_tokens: int = 0,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._run_dir, self._texts, self._settings, self._with_tokens = run_dir, texts, settings, with_tokens
        self._dropped, self._events = dropped, EventFile(run_dir)
        self._beside_bytes = self._left_out = 0
        self._is_closed = False
        self._thread = SerialThread("recorder")
        self._writer: MetricsWriter | None = None
        self._waiting: deque[asyncio.Future[Any]] = deque()

    async def step(
        self, step: int, metrics: Mapping[str, float], records: Sequence[SharedRecord], lineage: Lineage
    ) -> None:
        """Record one applied batch; return before it is written, unless the disk is far behind.

        Raises:
            OSError: if an earlier write failed.
        """

        def write() -> None:
            self._metrics().write(step, metrics)
            if self._texts is not None:
                number_of = cache(lineage.number)  # many trajectories, few versions
                chosen, whole = _spread(records, self._with_tokens), Each(records, SharedRecord.whole)
                rows = (
                    _line(trajectory_row(each, number_of, with_tokens=place in chosen))
                    for place, each in enumerate(whole)
                )
                self._texts.write(step, rows)
                if records and shows_samples(step):
                    rewards = [_reward(each) for each in records]
                    self._metrics().samples(
                        step, [trajectory_row(whole[place], number_of) for place in spread(rewards)]
                    )

        await self._soon(write)

    def dropped(self, lost: Sequence[Dropped]) -> None:
        """Write trajectories that never reached a batch. Returns at once; nothing may change them afterwards."""
        file = self._dropped
        if file is None or not lost:
            return

        def write() -> None:
            file.write(dropped_row(trajectory_row(each.record.whole(), _no_number), each.reason) for each in lost)

        self._beside(write, sum(each.record.trajectory_bytes + each.record.text_bytes for each in lost))

    def event(self, event: orchestrator_pb2.RunEvent) -> None:
        """Write an event. Returns at once."""
        if self._events.takes(event):
            self._beside(lambda: self._events.write(event), event.ByteSize())

    def _beside(self, write: Callable[[], None], size: int) -> None:
        """Write what the run does not wait for, unless too much of it waits already."""
        if self._is_closed:
            return
        if self._beside_bytes and self._beside_bytes + size > _MOST_BESIDE_BYTES:
            self._leave_out(f"{self._beside_bytes:,} bytes wait for the disk")
            return
        self._beside_bytes += size
        self._thread.submit(write).add_done_callback(partial(self._written_beside, size))

    def _written_beside(self, size: int, writing: asyncio.Future[None]) -> None:
        self._beside_bytes -= size
        if writing.cancelled():
            return
        if (error := writing.exception()) is not None:
            self._leave_out(str(error))
        elif self._left_out:
            log.warning("events and dropped trajectories are written again", left_out=self._left_out)
            self._left_out = 0

    def _leave_out(self, why: str) -> None:
        self._left_out += 1
        if self._left_out == 1:
            log.error(
                "events, or rows of dropped trajectories, are left out until the disk takes them; the run continues",
                path=str(self._run_dir),
                error=why,
            )

    async def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record scalars of an evaluation."""
        await self._soon(lambda: self._metrics().write(step, metrics))

    async def steps(self) -> Mapping[int, int]:
        """Return the last epoch in which each step was recorded, by this process and earlier ones."""
        path = self._run_dir / "metrics.jsonl"

        def read() -> dict[int, int]:
            if not path.exists():
                return {}
            with path.open(encoding="utf-8") as lines:  # earlier releases noted no epoch, and recorded each step
                return {step: int(values.get(_EPOCH, ENDLESS)) for step, values in _rows(lines) if _ALWAYS in values}

        await self._drain(0)
        return await self._thread.submit(read)

    async def report(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Write ``report.json`` from all steps recorded so far and some facts of the run; return it."""

        def write() -> dict[str, Any]:
            self._metrics().flush()
            report = build_report(read_metrics(self._run_dir / "metrics.jsonl"), facts)
            write_whole(self._run_dir / "report.json", json.dumps(report, indent=2) + "\n")
            return report

        await self._drain(0)
        written = self._thread.submit(write)
        self._waiting.append(written)
        await self._drain(0)
        return written.result()

    async def close(self) -> None:
        """Write what waits and close the files."""

        def close() -> None:
            if self._writer is not None:
                self._writer.close()

        self._waiting.append(self._thread.submit(close))
        self._is_closed = True
        self._thread.end()
        try:
            await self._drain(0)
        finally:
            discard_outcome(*self._waiting)

    def _metrics(self) -> MetricsWriter:
        if self._writer is None:
            self._writer = MetricsWriter(self._run_dir, self._settings)
        return self._writer

    async def _soon(self, write: Callable[[], None]) -> None:
        self._waiting.append(self._thread.submit(write))
        await self._drain(_WAITING)

    async def _drain(self, left: int) -> None:
        """Wait until at most `left` writes wait, and raise what a finished one raised.

        Cancelling a caller cancels no write: the next caller raises its failure.

        Raises:
            OSError: if a write failed, or the disk does not answer.
        """
        while len(self._waiting) > left or (self._waiting and self._waiting[0].done()):
            first = self._waiting[0]
            done, _ = await asyncio.wait({first}, timeout=_DISK_S)
            if not done:
                raise TimeoutError(
                    f"the disk of {self._run_dir} did not take the run's files within {_DISK_S:g} s: check the disk, then start"
                    " the run again: it continues"
                )
            if self._waiting and self._waiting[0] is first:  # another caller may have taken it meanwhile
                self._waiting.popleft().result()


def _reward(record: SharedRecord) -> float | None:
    return record.trajectory.reward if record.trajectory.HasField("reward") else None


def _no_number(version: Version) -> int:
    """Return the number that a version counts as for a trajectory without a step: nobody asks for its staleness."""
    raise ValueError(f"a trajectory of version {version} has no step")


def _spread(records: Sequence[SharedRecord], count: int) -> Collection[int]:
    """Return the places of so many trajectories: the first of each group, then the second of each, and so on."""
    if not count:
        return ()
    seen: Counter[str] = Counter()
    ranks = []
    for each in records:
        ranks.append(seen[each.trajectory.group_id])
        seen[each.trajectory.group_id] += 1
    return set(sorted(range(len(records)), key=lambda place: ranks[place])[:count])


_encode = json.JSONEncoder(ensure_ascii=False, check_circular=False).encode
"""`json.dumps` would make an encoder for each of the rows."""


def _line(row: Mapping[str, Any]) -> str:
    return _encode(row) + "\n"


def trajectory_row(
    record: orchestrator_pb2.TrajectoryRecord, number_of: Callable[[Version], int], *, with_tokens: bool = False
) -> dict[str, Any]:
    """Return a trajectory for people: text, reward and its parts, advantage, who sampled it when, its outcome.

    Times are seconds since 1970. `environment`, `replica` and the times are None where an earlier release, or a workflow of the user, did
    not note them; `turn_rewards` is there only if the environment gave some, as pairs of turn and reward.

    Args:
        record: The trajectory.
        number_of: Returns the number that a version counts as, such as `Lineage.number`.
        with_tokens: Whether to add `token_ids`, prompt first, the `mask_runs` that say which of them were sampled to be trained, and
            their `logprobs`, those of the sampler: the trainer reports none of single tokens.
    """
    trajectory = record.trajectory
    messages = record.conversation.messages
    ages = [age for age, _ in _token_ages(trajectory, number_of, record.step - 1)] if record.step else []
    turn_rewards = [[each.turn, each.reward] for each in trajectory.turn_rewards]
    return {
        "step": record.step,
        "trajectory_id": trajectory.trajectory_id,
        "group_id": trajectory.group_id,
        "task_id": trajectory.task_id,
        "environment": record.environment or None,
        "prompt": [_message(each) for each in messages[:-1]],
        "completion": messages[-1].content if messages else "",
        "reward": trajectory.reward if trajectory.HasField("reward") else None,
        "metrics": dict(sorted(record.metrics.items())),
        **({"turn_rewards": turn_rewards} if turn_rewards else {}),
        "advantage": trajectory.advantages[0] if len(trajectory.advantages) == 1 else list(trajectory.advantages),
        "prompt_tokens": trajectory.mask_runs[0] if trajectory.mask_runs else 0,
        "tokens": sampled_tokens(trajectory),
        "finish_reason": tokens_pb2.FinishReason.Name(trajectory.finish_reason).removeprefix("FINISH_REASON_").lower(),
        "versions": [[span.start, str(Version.from_proto(span.policy_version))] for span in trajectory.version_spans],
        "staleness": max(ages, default=None),
        "replica": ", ".join(record.replicas) or None,
        "drawn": _seconds(record, "draw_time"),
        "sampled": _seconds(record, "sample_time"),
        "scored": _seconds(record, "score_time"),
        "outcome": "trained" if record.outcome == tokens_pb2.TRAJECTORY_OUTCOME_TRAINED else "dropped",
        "reason": record.reason,
        **(_tokens(trajectory) if with_tokens else {}),
    }


def _seconds(record: orchestrator_pb2.TrajectoryRecord, field: str) -> float | None:
    """Return a time of a trajectory in seconds since 1970; None if it is not known."""
    if not record.HasField(field):  # type: ignore[arg-type]  # the stubs list the names
        return None
    time_of: Timestamp = getattr(record, field)
    return (time_of.seconds * 1_000_000 + time_of.nanos // 1_000) / 1e6 or None


def _tokens(trajectory: tokens_pb2.Trajectory) -> dict[str, Any]:
    return {
        "token_ids": list(trajectory.token_ids),
        "mask_runs": list(trajectory.mask_runs),
        "logprobs": list(trajectory.logprobs),
    }


def _message(message: tokens_pb2.ChatMessage) -> dict[str, Any]:
    """Return role and content, and the other fields that are set."""
    calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    rest = {
        "name": message.name,
        "reasoning": message.reasoning,
        "tool_calls": calls,
        "tool_call_id": message.tool_call_id,
    }
    return {"role": message.role, "content": message.content, **{key: value for key, value in rest.items() if value}}


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """Return metrics by step; for a step that was trained again after a rollback, those of the last time."""
    steps: dict[int, dict[str, float]] = {}
    with path.open(encoding="utf-8") as lines:
        for step, values in _rows(lines):
            if "reward/mean" in values:
                steps[step] = {**_evaluations(steps.get(step, {})), **values}
            else:
                steps.setdefault(step, {}).update(values)
    return steps


def _rows(lines: Iterable[str]) -> Iterator[tuple[int, dict[str, float]]]:
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # the torn last line of a process that was killed
        yield int(row.pop("step")), {name: value for name, value in row.items() if value is not None}


def build_report(steps: Mapping[int, Mapping[str, float]], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report of a run, folded from the metrics of its steps, so that it also covers earlier processes of the run.

    `facts` is what the metrics do not hold: run, seed, state, steps, wall_s, counts of trajectories.
    """
    trained = {step: values for step, values in sorted(steps.items()) if 0 < step <= int(facts["steps"])}
    ages: Counter[int] = Counter()
    for values in trained.values():
        for name, tokens in values.items():
            if name.startswith(_STALENESS_PREFIX):
                ages[int(name.removeprefix(_STALENESS_PREFIX))] += round(tokens)
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
