"""Evaluation: held-out tasks, sampled and greedy, by the same workflows and rewards that train.

`evaluate` attempts tasks on any engine; `Evaluations` does so between the steps of a run, with one replica held at its version.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

import grpc
import structlog

from orchestrator_svc.config import AttemptsConfig, EnvironmentConfig, OrchestratorConfig
from orchestrator_svc.envs.base import Task
from orchestrator_svc.replica import Replica
from orchestrator_svc.replicas import ReplicaPool
from orchestrator_svc.report import RunReporter
from orchestrator_svc.workflows import GroupRunner, Sampling
from sluice.rpc import SluiceError
from sluice.v1 import orchestrator_pb2, rollout_pb2, tokens_pb2
from sluice.versions import BASE, Version

log = structlog.get_logger(__name__)

_OWNER = "orchestrator-evaluation"

_RELEASE_S = 10.0
"""Seconds to release a hold; if that fails, the hold ends by its time to live."""

EXACT = 1.0 - 1e-9
"""A reward of 1 (or more) counts as an exact match."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An environment that is evaluated: its settings, who runs its episodes, and the tasks."""

    settings: EnvironmentConfig
    runner: GroupRunner
    tasks: Sequence[Task]


class Evaluations:
    """Evaluates between the steps of a run, one evaluation at a time, beside training.

    The weights must not change under an evaluation, so one replica is held at its version. Of several replicas the held one
    still takes training episodes as long as the staleness bound allows; with a single one all updates wait until the
    evaluation ends, and dispatch stops by the bound.

    Attributes:
        failed: Evaluations that failed or were left out.
        held_all_replicas: Whether one of them held the only replica.
    """

    def __init__(
        self, config: OrchestratorConfig, pool: ReplicaPool, environments: Sequence[Evaluated], reporter: RunReporter
    ) -> None:
        self.failed = 0
        self.held_all_replicas = False
        self._config, self._pool, self._environments, self._reporter = config, pool, environments, reporter
        self._running: asyncio.Task[None] | None = None

    def after_step(self, version: Version, beside: asyncio.TaskGroup) -> None:
        """Begin an evaluation in the task group if one is due, unless the last one is still under way."""
        every = self._config.evaluation.every_steps
        if not every or version.number % every:
            return
        if self._running is not None and not self._running.done():
            self.failed += 1
            log.warning("evaluation is left out: the last one is still under way", step=version.number)
        else:
            self._running = beside.create_task(self._run(version), name="evaluation")

    async def _run(self, wanted: Version) -> None:
        try:
            version, results = await self._evaluate(wanted)
        except (SluiceError, TimeoutError) as error:
            self.failed += 1
            log.error("evaluation failed", step=wanted.number, error=str(error) or "deadline")  # noqa: TRY400 - typed, says all
            return
        except Exception:  # whatever a workflow raises must not end the run
            self.failed += 1
            log.exception("evaluation failed unexpectedly", step=wanted.number)
            return
        for name, result in results.items():
            await self._reporter.evaluation(version, name, result.metrics())

    async def _evaluate(self, wanted: Version) -> tuple[Version, dict[str, EvalResult]]:
        """Evaluate `wanted`, or what a replica serves after it, on one environment after the other.

        Raises:
            SluiceError: if no replica can be held.
            TimeoutError: if it takes longer than `evaluation.deadline_s`.
        """
        settings = self._config.evaluation
        async with asyncio.timeout(settings.deadline_s):
            replica = await self._pool.choose(wanted)
            self.held_all_replicas |= len(self._pool.replicas) == 1
            async with self._held(replica) as version:
                results = {}
                for each in self._environments:
                    train = each.settings.sampling
                    sampling = Sampling(settings.temperature, train.max_tokens, train.stop)
                    # Of any seed of the run, so that runs of different seeds are evaluated alike.
                    runner = replace(each.runner, engine=each.runner.engine.pinned(replica), seed=0)
                    results[each.settings.name] = await evaluate(runner, each.tasks, settings, sampling, version)
                return version, results

    @contextlib.asynccontextmanager
    async def _held(self, replica: Replica) -> AsyncIterator[Version]:
        """Hold a replica at the version that it serves; give the version."""
        request = rollout_pb2.SetWeightPolicyRequest(mode=rollout_pb2.WEIGHT_POLICY_MODE_HOLD, owner=_OWNER)
        request.ttl.FromMilliseconds(int(self._config.deadlines.hold_s * 1000))
        try:
            answer = await replica.admin.SetWeightPolicy(request)
        except grpc.aio.AioRpcError as error:
            raise SluiceError.from_rpc(error) from error
        try:
            yield Version.from_proto(answer.policy_version)
        finally:
            follow = rollout_pb2.SetWeightPolicyRequest(mode=rollout_pb2.WEIGHT_POLICY_MODE_FOLLOW, owner=_OWNER)
            try:
                await replica.admin.SetWeightPolicy(follow, timeout=_RELEASE_S)
            except grpc.aio.AioRpcError as error:
                reason = str(SluiceError.from_rpc(error))
                log.warning("cannot release a hold; it ends by its time to live", replica=replica.name, error=reason)


@dataclass(frozen=True, slots=True)
class EvalSample:
    """One attempt; the reward is None where it is missing."""

    task_id: str
    prompt: str
    completion: str
    reward: float | None
    greedy: bool
    truncated: bool


@dataclass
class EvalResult:
    """The outcome of an evaluation."""

    samples: list[EvalSample] = field(default_factory=list)
    failed_tasks: int = 0

    def metrics(self) -> dict[str, float]:
        """Return scalars by name; those of samples that were not asked for are left out."""
        sampled = [each for each in self.samples if not each.greedy]
        greedy = [each for each in self.samples if each.greedy]
        found: dict[str, float] = {}
        for name, samples in (("", sampled), ("greedy_", greedy)):
            rewards = [each.reward for each in samples if each.reward is not None]
            if rewards:
                found[f"{name}reward_mean"] = math.fsum(rewards) / len(rewards)
                found[f"{name}reward_stderr"] = _standard_error(samples)
                found[f"{name}exact_share"] = sum(each >= EXACT for each in rewards) / len(rewards)
        if self.samples:
            found["truncated_share"] = sum(each.truncated for each in self.samples) / len(self.samples)
        found["missing_rewards"] = float(sum(each.reward is None for each in self.samples))
        found["failed_tasks"] = float(self.failed_tasks)
        return found


async def evaluate(
    runner: GroupRunner, tasks: Sequence[Task], settings: AttemptsConfig, sampling: Sampling, version: Version = BASE
) -> EvalResult:
    """Attempt every task, with `version` or a newer one; the caller sets the deadline.

    A task whose generation fails, or whose environment raises, is counted and left out.
    """
    result = EvalResult()
    places = asyncio.Semaphore(settings.concurrency)
    kinds = [(False, settings.samples, sampling)] * (settings.samples > 0)
    kinds += [(True, 1, replace(sampling, temperature=0.0))] * settings.greedy

    async def one(index: int, task: Task) -> None:
        async with places:
            try:
                samples = []
                for greedy, episodes, how in kinds:
                    group_id = f"eval-{version}-{'greedy' if greedy else 'sampled'}-{index}"
                    records = await runner.run(task, group_id, episodes, how, version)
                    samples += [_sample(task, record, greedy=greedy) for record in records]
            except Exception as error:  # noqa: BLE001 - an environment or a workflow may raise anything
                log.warning("evaluation of a task failed", task=task.task_id, error=repr(error))
                result.failed_tasks += 1
            else:
                result.samples += samples

    async with asyncio.TaskGroup() as group:
        for index, task in enumerate(tasks):
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
    )


def _standard_error(samples: Sequence[EvalSample]) -> float:
    """Standard error of the mean reward over tasks: samples of one task are not independent."""
    by_task: dict[str, list[float]] = {}
    for each in samples:
        if each.reward is not None:
            by_task.setdefault(each.task_id, []).append(each.reward)
    means = [math.fsum(rewards) / len(rewards) for rewards in by_task.values()]
    if len(means) < 2:
        return 0.0
    mean = math.fsum(means) / len(means)
    variance = math.fsum((each - mean) ** 2 for each in means) / (len(means) - 1)
    return math.sqrt(variance / len(means))
