"""Evaluation: held-out tasks, sampled and greedy, by the same workflows and rewards that train.

`evaluate` attempts tasks on any engine; `Evaluations` does so between the steps of a run, with one replica held at its version.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NoReturn

import grpc
import structlog

from orchestrator_svc.config import AttemptsConfig, EnvironmentConfig, OrchestratorConfig
from orchestrator_svc.journal.store import Journal
from orchestrator_svc.run.metrics import mean_measures
from orchestrator_svc.run.report import RunReporter
from orchestrator_svc.run.workflows import GroupRunner, Sampling
from sluice.clock import CLOCK, Clock
from sluice.config import ConfigError
from sluice.environments.base import Task
from sluice.environments.wire import plain_messages, plain_tools
from sluice.rpc import SluiceError
from sluice.sampling.pool import ReplicaPool
from sluice.sampling.replica import Replica
from sluice.tasks import discard_outcome
from sluice.v1 import journal_pb2, orchestrator_pb2, rollout_pb2, tokens_pb2
from sluice.versions import BASE, Version

log = structlog.get_logger(__name__)

_OWNER = "orchestrator-evaluation"

_LOOK_S = 0.05
"""Seconds between two checks of a replica that loads the version to evaluate."""

_RELEASE_S = 10.0
"""Seconds to release a hold; if that fails, the hold ends by its time to live."""

INTERVAL = 1.959964
"""Standard errors between a mean and the ends of its 95% interval."""

EXACT = 1.0 - 1e-9
"""A reward of 1 (or more) counts as an exact match."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An environment that is evaluated: its settings, who runs its episodes, and the tasks."""

    settings: EnvironmentConfig
    runner: GroupRunner
    tasks: Sequence[Task]


@dataclass
class Standing:
    """Which evaluation is the best so far. Pure.

    Attributes:
        metric: Result by which they are compared.
        environments: Names of the evaluated environments. A version that lacks the result of one of them is not compared.
        min_gain: By how much a result must exceed the best one.
        best: The best result; None before the first.
        version: Version with the best result.
        since: Evaluations after the best one.
    """

    metric: str
    environments: Sequence[str]
    min_gain: float
    best: float | None = None
    version: Version = BASE
    since: int = 0

    def take(self, version: Version, results: Mapping[str, Mapping[str, float]]) -> bool:
        """Compare the results of a version, by environment, with the best; return whether they are better."""
        if any(self.metric not in results.get(name, {}) for name in self.environments):
            return False
        values = [results[name][self.metric] for name in self.environments]
        value = math.fsum(values) / len(values)
        if self.best is not None and value <= self.best + self.min_gain:
            self.since += 1
            return False
        self.best, self.version, self.since = value, version, 0
        return True

    def take_all(self, evaluations: Iterable[orchestrator_pb2.EvaluationFinished]) -> None:
        """Take the results of earlier processes, all results of a version together."""
        for version, results in groupby(evaluations, lambda each: Version.from_proto(each.policy_version)):
            self.take(version, {each.environment: each.metrics for each in results})


class Evaluations:
    """Evaluates between the steps of a run, one evaluation at a time, beside training.

    The weights must not change during an evaluation, so one replica is held at its version until the evaluation ends. If there are
    several replicas, the held one still takes training episodes as long as the staleness bound allows. If there is only one, all updates
    wait until the evaluation ends, and dispatch stops at the bound.

    Attributes:
        failed: Evaluations that failed or were left out.
        held_all_replicas: Whether an evaluation held the only replica.
        standing: The best evaluation so far, those of earlier processes included.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        pool: ReplicaPool,
        environments: Sequence[Evaluated],
        journal: Journal,
        reporter: RunReporter,
        *,
        clock: Clock = CLOCK,
    ) -> None:
        self.failed = 0
        self.held_all_replicas = False
        self._config, self._pool, self._environments = config, pool, environments
        self._journal, self._reporter, self._clock = journal, reporter, clock
        names = [each.settings.name for each in environments]
        self.standing = Standing(config.evaluation.metric, names, config.evaluation.min_gain)
        self.standing.take_all(each.evaluation_recorded.evaluation for each in journal.recorded("evaluation_recorded"))

    @property
    def plateau(self) -> bool:
        """Whether the last `evaluation.patience` evaluations were not better than the best."""
        return 0 < self._config.evaluation.patience <= self.standing.since

    async def run(self, wanted: Version, *, exactly: bool) -> None:
        """Evaluate a version, and record and compare the results; a failure is counted.

        Args:
            wanted: The version.
            exactly: Whether it must be this version; else a later one that a replica serves will do.
        """
        try:
            version, results = await self._evaluate(wanted, exactly=exactly)
        except (SluiceError, TimeoutError) as error:
            self.failed += 1
            log.error("evaluation failed", step=wanted.number, error=str(error) or "deadline")  # noqa: TRY400 - typed, says all
            return
        except Exception:  # whatever a workflow raises must not end the run
            self.failed += 1
            log.exception("evaluation failed unexpectedly", step=wanted.number)
            return
        metrics = {name: result.metrics() for name, result in results.items()}
        if not all(self.standing.metric in each for each in metrics.values()):
            log.warning("an evaluation is not compared: not every result has the metric", metric=self.standing.metric)
        for name, values in metrics.items():  # all before the next await: a start finds all or none
            finished = orchestrator_pb2.EvaluationFinished(
                policy_version=version.to_proto(), environment=name, metrics=values
            )
            fact = journal_pb2.EvaluationRecorded(evaluation=finished)
            self._journal.record_fact(journal_pb2.Fact(evaluation_recorded=fact))
        for name, values in metrics.items():
            await self._reporter.show_evaluation(version, name, values)
        self.standing.take(version, metrics)

    async def _evaluate(self, wanted: Version, *, exactly: bool) -> tuple[Version, dict[str, EvalResult]]:
        """Evaluate on one environment after the other.

        Raises:
            SluiceError: if no replica can be held, or one cannot be held any longer.
            TimeoutError: if it takes longer than `evaluation.deadline_s`.
        """
        settings = self._config.evaluation
        async with self._clock.timeout(settings.deadline_s):
            replica = await self._pool.choose(wanted)
            self.held_all_replicas |= len(self._pool.replicas) == 1
            hold = _Hold(replica, self._config.deadlines.hold_s, self._journal, self._clock)
            try:
                version = await hold.begin(wanted if exactly else None)
                return version, await self._attempt_all_under(hold, replica, version)
            finally:
                await hold.end()

    async def _attempt_all_under(self, hold: _Hold, replica: Replica, version: Version) -> dict[str, EvalResult]:
        """Attempt all tasks while the hold is renewed."""
        renewing = asyncio.create_task(hold.renew(version), name="hold")
        working = asyncio.create_task(self._attempt_all(replica, version), name="evaluation")
        try:
            await asyncio.wait({renewing, working}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else await renewing
        finally:
            for each in (renewing, working):
                each.cancel()
            await asyncio.wait({renewing, working})
            discard_outcome(renewing, working)

    async def _attempt_all(self, replica: Replica, version: Version) -> dict[str, EvalResult]:
        settings, results = self._config.evaluation, {}
        for each in self._environments:
            train = each.settings.sampling
            arguments = train.chat_template_kwargs
            sampling = Sampling(settings.temperature, train.max_tokens, train.stop, chat_template_kwargs=arguments)
            # Independent of the run's seed, so that runs with different seeds are evaluated alike.
            runner = replace(each.runner, engine=each.runner.engine.pinned(replica), seed=0)
            results[each.settings.name] = await evaluate(runner, each.tasks, settings, sampling, version)
        return results


@dataclass(frozen=True, slots=True)
class _Hold:
    """A replica that stays at one version, for `ttl_s` seconds at a time; the journal knows which one it is."""

    replica: Replica
    ttl_s: float
    journal: Journal
    clock: Clock = CLOCK

    async def begin(self, version: Version | None) -> Version:
        """Hold the replica at the version that it serves, or at `version` once it serves that. Return the version.

        Raises:
            SluiceError: if the replica refuses.
        """
        _note_policy(self.journal, self.replica.name, _mode(version), version)
        await self.journal.durable()
        while True:  # the caller has a deadline
            served = await self._ask(version)
            if version in (None, served):
                return served
            await self.clock.sleep(_LOOK_S)

    async def _ask(self, version: Version | None) -> Version:
        """Ask for the hold once more, and return the version that the replica serves now."""
        request = rollout_pb2.SetWeightPolicyRequest(mode=_mode(version), owner=_OWNER)
        if version is not None:
            request.version.CopyFrom(version.to_proto())
        request.ttl.FromMilliseconds(int(self.ttl_s * 1000))
        try:
            answer = await self.replica.admin.SetWeightPolicy(request, timeout=self.ttl_s)
        except grpc.aio.AioRpcError as error:
            raise SluiceError.from_rpc(error) from error
        return Version.from_proto(answer.policy_version)

    async def renew(self, version: Version) -> NoReturn:
        """Renew the hold until cancelled.

        Raises:
            SluiceError: if it cannot be renewed before it ends: the weights may change.
        """
        ends = self.clock() + self.ttl_s
        while True:
            await self.clock.sleep(self.ttl_s / 4)
            began = self.clock()
            try:
                async with self.clock.timeout(self.ttl_s / 4):
                    served = await self._ask(version)
                if served != version:
                    ends = 0.0
                    raise SluiceError.aborted("VERSION_CHANGED", f"it serves version {served} now")
            except (SluiceError, TimeoutError) as error:
                if self.clock() + self.ttl_s / 2 > ends:
                    raise SluiceError.aborted(
                        "HOLD_LOST", f"replica {self.replica.name} cannot be held at version {version}: {error}"
                    ) from error
            else:
                ends = began + self.ttl_s

    async def end(self) -> None:
        """Let the replica follow the trainer again. If that fails, the hold expires by itself."""
        follow = rollout_pb2.SetWeightPolicyRequest(mode=rollout_pb2.WEIGHT_POLICY_MODE_FOLLOW, owner=_OWNER)
        try:
            await self.replica.admin.SetWeightPolicy(follow, timeout=_RELEASE_S)
        except grpc.aio.AioRpcError as error:
            reason = str(SluiceError.from_rpc(error))
            log.warning("cannot release a hold; it ends by its time to live", replica=self.replica.name, error=reason)
        else:
            _note_policy(self.journal, self.replica.name, rollout_pb2.WEIGHT_POLICY_MODE_FOLLOW)


async def release_left(journal: Journal, pool: ReplicaPool, ttl_s: float) -> None:
    """Release the replicas that a process held for an evaluation when it died, so that they follow the trainer again.

    Such a hold expires after `ttl_s` seconds, so do not wait longer for a replica to come back.
    """
    policies = journal.ledger.weight_policies
    left, ends = dict(policies), time.monotonic() + ttl_s
    while left and time.monotonic() < ends:
        for replica in pool.replicas:
            noted = left.pop(replica.name, None) if replica.seen else None
            if noted is not None and policies.get(replica.name) is noted:  # no evaluation of this process holds it
                log.info("a replica that was held for an evaluation follows the trainer again", replica=replica.name)
                await _Hold(replica, ttl_s, journal).end()
        if left:
            await asyncio.sleep(pool.config.poll_s)
    for name, noted in left.items():
        if policies.get(name) is noted:
            _note_policy(journal, name, rollout_pb2.WEIGHT_POLICY_MODE_FOLLOW)


def _mode(version: Version | None) -> rollout_pb2.WeightPolicyMode.ValueType:
    """Return how a replica is held: at the version that it serves (None), or at `version`."""
    return rollout_pb2.WEIGHT_POLICY_MODE_HOLD if version is None else rollout_pb2.WEIGHT_POLICY_MODE_TARGET


def _note_policy(
    journal: Journal, replica: str, mode: rollout_pb2.WeightPolicyMode.ValueType, version: Version | None = None
) -> None:
    noted = journal_pb2.WeightPolicyNoted(replica=replica, mode=mode, owner=_OWNER)
    if version is not None:
        noted.policy_version.CopyFrom(version.to_proto())
    journal.record_fact(journal_pb2.Fact(weight_policy_noted=noted))


@dataclass(frozen=True, slots=True)
class EvalSample:
    """One attempt; the reward is None where it is missing."""

    task_id: str
    prompt: str
    completion: str
    reward: float | None
    greedy: bool
    truncated: bool
    metrics: Mapping[str, float] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class Attempted:
    """The attempts at one task, and how many failed."""

    samples: Sequence[EvalSample]
    failed_episodes: int


@dataclass
class EvalResult:
    """The outcome of an evaluation."""

    samples: list[EvalSample] = field(default_factory=list)
    failed_tasks: int = 0
    failed_episodes: int = 0

    def metrics(self) -> dict[str, float]:
        """Return scalars by name, without scalars of samples that were not requested."""
        sampled = [each for each in self.samples if not each.greedy]
        greedy = [each for each in self.samples if each.greedy]
        found: dict[str, float] = {}
        for name, samples in (("", sampled), ("greedy_", greedy)):
            rewards = [each.reward for each in samples if each.reward is not None]
            if rewards:
                found[f"{name}reward_mean"] = math.fsum(rewards) / len(rewards)
                found[f"{name}reward_stderr"] = _standard_error(samples)
                found[f"{name}exact_share"] = sum(each >= EXACT for each in rewards) / len(rewards)
        for k in _powers_of_two(sampled):
            found |= _with_interval(f"pass_at_{k}", pass_at(k, sampled))
        if self.samples:
            found["truncated_share"] = sum(each.truncated for each in self.samples) / len(self.samples)
        found |= mean_measures(each.metrics for each in sampled or greedy)
        found["missing_rewards"] = float(sum(each.reward is None for each in self.samples))
        found["failed_tasks"] = float(self.failed_tasks)
        found["failed_episodes"] = float(self.failed_episodes)
        return found

    @property
    def task_rewards(self) -> dict[str, float]:
        """The mean reward of each task's samples, by task; of its greedy attempt if nothing was sampled."""
        sampled = [each for each in self.samples if not each.greedy] or self.samples
        return {task: math.fsum(rewards) / len(rewards) for task, rewards in _rewards_by_task(sampled).items()}


@dataclass(frozen=True, slots=True)
class Gain:
    """By how much one model is better than another one on the same tasks.

    Attributes:
        mean: Mean over tasks of the difference of their mean rewards.
        low: Lower end of its 95% interval.
        high: Upper end.
        tasks: Number of tasks for which both have a reward.
    """

    mean: float
    low: float
    high: float
    tasks: int


def gain(before: Mapping[str, float], after: Mapping[str, float]) -> Gain:
    """Compare two models by their mean rewards per task. Paired: a task is equally hard for both.

    The interval assumes a normal mean of many values, with the standard error over tasks.

    Raises:
        ValueError: if they have fewer than two tasks in common.
    """
    differences = [after[task] - reward for task, reward in before.items() if task in after]
    if len(differences) < 2:
        raise ValueError(
            f"{len(differences)} tasks have a reward of both models, and a gain needs two: raise --prompts, or see why they failed"
        )
    mean = math.fsum(differences) / len(differences)
    half = INTERVAL * _error_of_mean(differences)
    return Gain(mean, mean - half, mean + half, len(differences))


async def evaluate(
    runner: GroupRunner,
    tasks: Sequence[Task],
    settings: AttemptsConfig,
    sampling: Sampling,
    version: Version = BASE,
    *,
    known: Mapping[str, Attempted] = MappingProxyType({}),
    keep: Callable[[str, Attempted], None] = lambda *_: None,
    count: Callable[[], object] = lambda: None,
) -> EvalResult:
    """Attempt every task, with `version` or a newer one; the caller sets the deadline.

    A task whose generation fails, or whose environment raises, is counted and left out.

    Args:
        runner: Runs the episodes.
        tasks: The tasks.
        settings: How often each is attempted.
        sampling: How.
        version: Oldest version of the weights.
        known: Attempts that were made before, by task; they are not made again.
        keep: Gets the attempts at each other task when they end.
        count: Called when the attempts at a task have ended, successful or not.
    """
    result = EvalResult()
    for each in known.values():
        result.samples += each.samples
        result.failed_episodes += each.failed_episodes
    places = asyncio.Semaphore(settings.concurrency)
    kinds = [(False, settings.samples, sampling)] * (settings.samples > 0)
    kinds += [(True, 1, replace(sampling, temperature=0.0))] * settings.greedy

    async def one(index: int, task: Task) -> None:
        async with places:
            try:
                samples = []
                failed = 0
                for greedy, episodes, how in kinds:
                    group_id = f"eval-{version}-{'greedy' if greedy else 'sampled'}-{index}"
                    records = await runner.run(task, group_id, episodes, how, version)
                    # An episode that forked has several records with the same reward.
                    ended = {record.trajectory.episode_id: record for record in records}
                    samples += [_sample(task, record.whole(), greedy=greedy) for record in ended.values()]
                    failed += episodes - len(ended)
            except Exception as error:  # noqa: BLE001 - an environment or a workflow may raise anything
                told = error.message if isinstance(error, SluiceError) else repr(error)
                log.warning("evaluation of a task failed", task=task.task_id, error=told)
                result.failed_tasks += 1
            else:
                result.samples += samples
                result.failed_episodes += failed
                keep(task.task_id, Attempted(samples, failed))
            count()

    async with asyncio.TaskGroup() as group:
        for index, task in enumerate(tasks):
            if task.task_id not in known:
                group.create_task(one(index, task))
    return result


def _sample(task: Task, record: orchestrator_pb2.TrajectoryRecord, *, greedy: bool) -> EvalSample:
    messages = record.conversation.messages
    return EvalSample(
        task_id=task.task_id,
        prompt="\n".join(each.content for each in messages[:-1]),
        completion=messages[-1].content,
        reward=record.trajectory.reward if record.trajectory.HasField("reward") else None,
        greedy=greedy,
        truncated=record.trajectory.finish_reason == tokens_pb2.FINISH_REASON_LENGTH,
        metrics=dict(record.metrics),
        messages=plain_messages(messages),
        tools=plain_tools(record.conversation.tools),
    )


def pass_at(k: int, samples: Iterable[EvalSample]) -> list[float]:
    """Return for each task the chance that at least one of k samples is exact, estimated without bias from its n >= k samples.

    A task with c exact samples of n has 1 - C(n - c, k) / C(n, k) (Chen et al., 2021); a task with fewer than k samples is left out.
    """
    chances = []
    for rewards in _rewards_by_task(samples).values():
        exact = sum(each >= EXACT for each in rewards)
        if len(rewards) >= k:
            chances.append(1 - math.comb(len(rewards) - exact, k) / math.comb(len(rewards), k))
    return chances


def wilson(mean: float, tasks: int) -> tuple[float, float]:
    """Return the 95% interval of a mean of `tasks` values in [0, 1] (Wilson, 1927). Exact for 0 and 1, too wide for others."""
    z2 = INTERVAL**2
    centre = (mean + z2 / (2 * tasks)) / (1 + z2 / tasks)
    half = math.sqrt(z2 * (mean * (1 - mean) / tasks + z2 / (4 * tasks**2))) / (1 + z2 / tasks)
    return max(0.0, centre - half), min(1.0, centre + half)


def _with_interval(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    mean = math.fsum(values) / len(values)
    low, high = wilson(mean, len(values))
    return {name: mean, f"{name}_low": low, f"{name}_high": high}


def _powers_of_two(samples: Iterable[EvalSample]) -> list[int]:
    """Return 1, 2, 4, ... up to the number of samples of a task. The first is avg@k, the mean over all samples of each task."""
    most = max(map(len, _rewards_by_task(samples).values()), default=0)
    return [1 << power for power in range(most.bit_length())]


def _rewards_by_task(samples: Iterable[EvalSample]) -> dict[str, list[float]]:
    by_task: dict[str, list[float]] = {}
    for each in samples:
        if each.reward is not None:
            by_task.setdefault(each.task_id, []).append(each.reward)
    return by_task


def _standard_error(samples: Sequence[EvalSample]) -> float:
    """Standard error of the mean reward over tasks: samples of one task are not independent."""
    return _error_of_mean([math.fsum(rewards) / len(rewards) for rewards in _rewards_by_task(samples).values()])


def _error_of_mean(values: Sequence[float]) -> float:
    """Standard error of the mean of independent values; 0 of fewer than two."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    variance = math.fsum((each - mean) ** 2 for each in values) / (len(values) - 1)
    return math.sqrt(variance / len(values))


class AttemptsFile:
    """JSON lines: what is evaluated, then a line for each task.

    Args:
        path: The file; made if it is not there.
        what: Model, environment, sampling and everything else that the attempts depend on.

    Attributes:
        known: Attempts by task.

    Raises:
        ConfigError: if it cannot be read or written, or belongs to another evaluation.
    """

    def __init__(self, path: Path, what: Mapping[str, Any]) -> None:
        self.known: dict[str, Attempted] = {}
        what = json.loads(json.dumps(what, default=str))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            whole = _without_torn_line(path)
            self._file: IO[str] = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot use {path} for attempts: {error}") from error
        if not whole:
            self._add({"evaluation": what})
            return
        try:
            first, *others = map(json.loads, whole)
            begun = first["evaluation"]
            for row in others:
                samples = [EvalSample(**sample) for sample in row["samples"]]
                self.known[row["task"]] = Attempted(samples, row["failed_episodes"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no file of attempts: {error!r}; name another one, or delete it") from error
        changed = sorted(name for name in {*begun, *what} if begun.get(name) != what.get(name))
        if changed:
            shown = "; ".join(f"{name} was {begun.get(name)!r}, is {what.get(name)!r}" for name in changed)
            raise ConfigError(f"{path} belongs to another evaluation: {shown}; name another file, or delete it")

    def add(self, task_id: str, attempted: Attempted) -> None:
        """Keep the attempts at a task; they are on the disk when this returns."""
        rows = [asdict(sample) for sample in attempted.samples]
        self._add({"task": task_id, "samples": rows, "failed_episodes": attempted.failed_episodes})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _add(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _without_torn_line(path: Path) -> list[str]:
    """Return the lines of a file; cut off a last line that was not written whole."""
    if not path.exists():
        return []
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(path, end)
    return content[:end].decode(errors="replace").splitlines()
