"""`sluice eval`: score a model directory or a running server on an environment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from orchestrator_svc.config import OrchestratorConfig, ReplicasConfig
from orchestrator_svc.envs.base import SingleTurnEnvironment
from orchestrator_svc.envs.loading import check_there, load_environment, locate
from orchestrator_svc.eval_config import EvalConfig
from sluice.cli.command import Command
from sluice.config import ConfigError, load_command
from sluice.models import check_files, check_model
from sluice.telemetry import configure_logging

__all__ = ["COMMAND", "run_evaluation"]

_LABELS = {
    "reward_mean": "reward, sampled",
    "exact_share": "exact, sampled",
    "greedy_reward_mean": "reward, greedy",
    "greedy_exact_share": "exact, greedy",
    "truncated_share": "truncated",
    "missing_rewards": "missing rewards",
    "failed_tasks": "failed tasks",
}

_GENERATE_S = 600.0
"""Seconds for one request."""


def run(argv: list[str]) -> int:
    """Evaluate, print a table, write the result.

    Returns:
        0, or 1 if a task failed or a reward is missing.
    """
    config = load_command(EvalConfig, argv, "eval", check=_check)
    configure_logging("eval", "warning")
    began = time.monotonic()
    metrics, version, rows = asyncio.run(run_evaluation(config))
    result = {
        "model": config.model or config.address,
        "environment": config.environment,
        "split": config.split,
        "prompts": config.prompts,
        "samples": config.samples,
        "temperature": config.temperature,
        "engine": config.engine if config.model else "",
        "policy_version": version,
        "wall_s": round(time.monotonic() - began, 3),
        "metrics": metrics,
    }
    _print(result)
    if config.output is not None:
        _write(config.output, json.dumps(result, indent=2) + "\n")
    if config.samples_output is not None:
        _write(config.samples_output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return int(metrics["failed_tasks"] > 0 or metrics["missing_rewards"] > 0)


def _check(config: EvalConfig) -> None:
    """Find what would fail later, before a replica is started.

    Raises:
        ConfigError: if the model cannot be one, or the environment is not there.
    """
    if config.model:
        check_model(config.model)
        check_files(config.model)
    check_there(locate(config.environment), "environment")


async def run_evaluation(config: EvalConfig) -> tuple[dict[str, float], str, list[dict[str, Any]]]:
    """Evaluate a model or a server.

    Returns:
        Metrics by name; the version that was evaluated; every attempt.

    Raises:
        ConfigError: if the environment or the server cannot be used, or the deadline passes.
    """
    # What follows brings gRPC and process pools: not for `--help`.
    from orchestrator_svc.envs.calls import EnvironmentCalls  # noqa: PLC0415
    from orchestrator_svc.envs.scoring import Scorer  # noqa: PLC0415
    from orchestrator_svc.eval_replica import RUN, started_replica, wait_ready  # noqa: PLC0415
    from orchestrator_svc.evaluation import EvalPlan, evaluate  # noqa: PLC0415
    from orchestrator_svc.replicas import PolicyEngine, ReplicaPool  # noqa: PLC0415
    from orchestrator_svc.workflows import choose_workflow  # noqa: PLC0415

    environment = load_environment(config.environment, config.environment_args)
    settings = OrchestratorConfig(workflow=config.workflow, max_turns=config.max_turns)
    calls = EnvironmentCalls(settings.environment_threads, settings.deadlines.environment_s)
    workflow = choose_workflow(settings, environment, calls)
    tasks = environment.tasks(config.split, config.seed)[: config.prompts]
    if not tasks:
        raise ConfigError(f"split {config.split!r} of environment {config.environment} has no tasks")
    async with contextlib.AsyncExitStack() as stack:
        scorer = None
        if isinstance(environment, SingleTurnEnvironment):
            scorer = await stack.enter_async_context(Scorer(config.environment, config.environment_args, config.reward))
        replica = await stack.enter_async_context(started_replica(config)) if config.model else None
        target = replica.target if replica is not None else config.address
        pool = ReplicaPool([target], config.security, ReplicasConfig(poll_s=0.2), lambda _: None)
        polling = asyncio.create_task(pool.run())
        stack.push_async_callback(_ended, polling)
        await wait_ready(pool, replica, config.connect_s if replica is None else config.start_s)
        engine = PolicyEngine(pool, RUN if replica is not None else "", _GENERATE_S)
        plan = EvalPlan(
            samples=config.samples,
            temperature=config.temperature,
            greedy=config.greedy,
            max_tokens=config.max_tokens,
            stop=tuple(config.stop),
            concurrency=config.concurrency,
            seed=config.seed,
            name="",
        )
        try:
            async with asyncio.timeout(config.deadline_s):
                result = await evaluate(engine, workflow, scorer, tasks, plan)
        except TimeoutError as error:
            raise ConfigError(f"the evaluation took more than {config.deadline_s:g} s (--deadline-s)") from error
        version = str(pool.replicas[0].version)
    return result.metrics(), version, [asdict(sample) for sample in result.samples]


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


def _print(result: Mapping[str, Any]) -> None:
    metrics = result["metrics"]
    lines = [f"{result['model']} on {result['environment']}, {result['prompts']} tasks of split {result['split']}:"]
    for name, label in _LABELS.items():
        if name not in metrics or (name in {"missing_rewards", "failed_tasks"} and not metrics[name]):
            continue
        error = metrics.get(name.replace("_mean", "_stderr")) if name.endswith("_mean") else None
        lines.append(f"  {label:<18} {metrics[name]:.4f}" + ("" if error is None else f" +- {error:.4f}"))
    sys.stdout.write("\n".join(lines) + "\n")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


COMMAND = Command("eval", "score a model directory or a running server on an environment", run)
