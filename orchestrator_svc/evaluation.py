"""Evaluation: held-out tasks, sampled and greedy, by the same workflows and rewards that train."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from orchestrator_svc.envs.base import Task
from orchestrator_svc.envs.scoring import Scorer
from orchestrator_svc.episodes import score_records
from orchestrator_svc.workflows import EpisodeData, EpisodeEngine, RolloutWorkflow, Sampling
from sluice.v1 import orchestrator_pb2, tokens_pb2
from sluice.versions import BASE, Version

__all__ = ["EvalPlan", "EvalResult", "EvalSample", "evaluate"]

EXACT = 1.0 - 1e-9
"""A reward of 1 (or more) counts as an exact match."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """What an evaluation samples.

    Attributes:
        samples: Samples per task at `temperature`; 0 leaves them out.
        temperature: Softmax temperature of the samples.
        greedy: Also decode each task once without randomness.
        max_tokens: Most tokens per turn.
        stop: Strings that end a turn.
        concurrency: Tasks evaluated at a time.
        version: Oldest version that may sample.
        name: Begins the names of its requests; empty leaves them to the server, so that nothing is answered from memory.
        seed: Seed of environments' random numbers.
    """

    samples: int
    temperature: float
    greedy: bool
    max_tokens: int
    stop: tuple[str, ...] = ()
    concurrency: int = 16
    version: Version = BASE
    name: str = "eval"
    seed: int = 0


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
    """What an evaluation came to.

    Attributes:
        samples: All attempts.
        failed_tasks: Tasks whose generation failed.
    """

    samples: list[EvalSample] = field(default_factory=list)
    failed_tasks: int = 0

    def metrics(self) -> dict[str, float]:
        """Scalars by name; those of samples that were not asked for are left out."""
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
    engine: EpisodeEngine, workflow: RolloutWorkflow, scorer: Scorer | None, tasks: Sequence[Task], plan: EvalPlan
) -> EvalResult:
    """Attempt every task; the caller sets the deadline.

    A task whose generation fails, or whose environment raises, is counted and left out.
    """
    result = EvalResult()
    places = asyncio.Semaphore(plan.concurrency)

    async def one(index: int, task: Task) -> None:
        async with places:
            try:
                samples = await _attempts(engine, workflow, scorer, task=task, index=index, plan=plan)
            except Exception as error:  # noqa: BLE001 - an environment or a workflow may raise anything
                log.warning("evaluation of a task failed", task=task.task_id, error=repr(error))
                result.failed_tasks += 1
            else:
                result.samples += samples

    async with asyncio.TaskGroup() as group:
        for index, task in enumerate(tasks):
            group.create_task(one(index, task))
    return result


async def _attempts(
    engine: EpisodeEngine,
    workflow: RolloutWorkflow,
    scorer: Scorer | None,
    *,
    task: Task,
    index: int,
    plan: EvalPlan,
) -> list[EvalSample]:
    wanted = [(False, plan.samples, plan.temperature)] * (plan.samples > 0) + [(True, 1, 0.0)] * plan.greedy
    samples = []
    for greedy, episodes, temperature in wanted:
        kind = "greedy" if greedy else "sampled"
        data = EpisodeData(
            task=task,
            group_id=f"{plan.name}-{kind}-{index}",
            episodes=episodes,
            sampling=Sampling(temperature, plan.max_tokens, plan.stop),
            version=plan.version,
            request_prefix=f"{plan.name}/{kind}/{index}" if plan.name else "",
            seed=plan.seed,
        )
        records = await workflow.arun_episode(engine, data)
        await score_records(scorer, task, records)
        samples += [_sample(task, record, greedy=greedy) for record in records]
    return samples


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
