"""`sluice eval`: score a model directory or a running server on an environment.

For a model directory a rollout replica is started, and stopped when the evaluation has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, model_validator

from orchestrator_svc.config import AttemptsConfig, OrchestratorConfig
from orchestrator_svc.envs.config import EnvironmentProcessesConfig
from orchestrator_svc.envs.loading import check_there, locate
from sluice.config import Command, ConfigError, SecurityConfig, load_command
from sluice.engines import EngineName
from sluice.models import check_files, check_model
from sluice.sampling.config import ReplicasConfig
from sluice.tasks import settle
from sluice.telemetry import LEVEL_VARIABLE, configure_logging
from sluice.versions import BASE

if TYPE_CHECKING:
    from sluice.sampling.pool import ReplicaPool

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

_RUN = "eval"
"""Name of the run that a started replica belongs to."""

_STOP_S = 15.0
"""Seconds between SIGTERM and SIGKILL."""

_TAIL_LINES = 20
"""Lines of its log that are shown when it dies."""


class EvalConfig(AttemptsConfig):
    """What is evaluated, on what, and how."""

    model: str = Field("", description="Model directory or hub id; a replica is started for it and stopped afterwards.")
    address: str = Field(
        "", description="Address of a running rollout server, as host:port, instead of `model`; give one of the two."
    )
    engine: EngineName = Field("vllm", description="What samples from `model`.")
    max_model_len: int | None = Field(
        None, ge=2, description="Most tokens of prompt and continuation together; none takes the model's own."
    )
    rollout: dict[str, Any] = Field(
        default_factory=dict, description="Further settings of the replica started for `model`, as of [rollout]; flat."
    )
    environment: str = Field("", description="Environment: an installed id, `module:Attr`, or `path/to/env.py:Attr`.")
    environment_args: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of the environment's class or function."
    )
    workflow: str = Field("auto", description="How an episode runs; as orchestrator.workflow.")
    max_turns: int = Field(8, ge=1, description="Most assistant turns of a multi-turn episode.")
    prompts: int = Field(200, ge=1, description="Tasks to evaluate, the first ones of the split.")
    samples: int = Field(4, ge=0, description="Samples per task at `temperature`; 0 leaves them out.")
    max_tokens: int = Field(256, ge=1, description="Most tokens sampled per turn.")
    stop: list[str] = Field(default_factory=list, description="Strings that end a turn.")
    concurrency: int = Field(64, ge=1, description="Tasks evaluated at a time.")
    seed: int = Field(0, ge=0, description="Seed of the order of tasks.")
    environment_processes: EnvironmentProcessesConfig = Field(
        default_factory=EnvironmentProcessesConfig, description="Processes that run the environment's code."
    )
    output: Path | None = Field(None, description="JSON file for the result; none prints it only.")
    samples_output: Path | None = Field(
        None, description="JSONL file for every attempt with its text; none writes none."
    )
    start_s: float = Field(
        600.0,
        gt=0,
        description="Seconds to construct the environment, to list the tasks, and again for the replica of `model` to be ready.",
    )
    connect_s: float = Field(30.0, gt=0, description="Seconds for the server at `address` to answer.")
    deadline_s: float = Field(3600.0, gt=0, description="Seconds for the evaluation itself.")
    security: SecurityConfig = Field(
        default_factory=SecurityConfig, description="Tokens and TLS, for a server at `address`."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if bool(self.model) == bool(self.address):
            raise ValueError("give either model (a directory or hub id) or address (of a running server)")
        if not self.samples and not self.greedy:
            raise ValueError("nothing to do: set samples above 0, or greedy")
        return self


def run(argv: list[str]) -> int:
    """Evaluate, print a table, and write the result.

    Returns:
        0, or 1 if a task failed or a reward is missing.
    """
    config = load_command(EvalConfig, argv, "eval", check=_check)
    configure_logging("eval", os.environ.get(LEVEL_VARIABLE) or "warning")
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
    """Refuse settings that would fail later, before a replica is started.

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
    from orchestrator_svc.envs.processes import EnvironmentProcesses  # noqa: PLC0415
    from orchestrator_svc.evaluation import evaluate  # noqa: PLC0415
    from orchestrator_svc.workflows import GroupRunner, Sampling, choose_workflow  # noqa: PLC0415
    from sluice.rpc.channel import token_file  # noqa: PLC0415
    from sluice.sampling.policy import PolicyEngine  # noqa: PLC0415
    from sluice.sampling.pool import ReplicaPool  # noqa: PLC0415

    settings = OrchestratorConfig(workflow=config.workflow, max_turns=config.max_turns)
    async with contextlib.AsyncExitStack() as stack:
        environment = await stack.enter_async_context(
            EnvironmentProcesses(
                config.environment, config.environment_args, config.environment_processes, (config.start_s, "--start-s")
            )
        )
        tasks = (await environment.tasks(config.split, config.seed))[: config.prompts]
        if not tasks:
            raise ConfigError(
                f"split {config.split!r} of environment {config.environment} has no tasks: correct --split or environment_args"
            )
        workflow = choose_workflow(settings, environment)
        replica = await stack.enter_async_context(_started_replica(config)) if config.model else None
        target = replica.target if replica is not None else config.address
        # The operator named this address, so it may get the operator's own token.
        token = config.security.dispatcher_token_file or token_file(config.security, "admin")
        security = config.security.model_copy(update={"dispatcher_token_file": token})
        pool = ReplicaPool([target], security, ReplicasConfig(poll_s=0.2), lambda _: None)
        polling = asyncio.create_task(pool.run())
        stack.push_async_callback(settle, polling)
        stack.callback(polling.cancel)
        await _wait_ready(pool, polling, replica, config.connect_s if replica is None else config.start_s)
        engine = PolicyEngine(pool, _RUN if replica is not None else "", _GENERATE_S)
        runner = GroupRunner(workflow, engine, config.seed, request_prefix="")
        sampling = Sampling(config.temperature, config.max_tokens, config.stop)
        try:
            async with asyncio.timeout(config.deadline_s):
                result = await evaluate(runner, tasks, config, sampling)
        except TimeoutError as error:
            raise ConfigError(f"the evaluation took more than {config.deadline_s:g} s (--deadline-s)") from error
        version = str(pool.replicas[0].version)
    return result.metrics(), version, [asdict(sample) for sample in result.samples]


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


class _StartedReplica:
    """A running child."""

    def __init__(self, process: asyncio.subprocess.Process, target: str, log_path: Path) -> None:
        self.target = target
        self._process, self._log_path = process, log_path

    async def died(self) -> str:
        """Wait for its end; return why, with the last lines of its log."""
        code = await self._process.wait()
        lines = self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join([f"the replica ended with exit code {code}; its last lines:", *lines])

    async def stop(self) -> None:
        """End it: SIGTERM first, SIGKILL if it does not end in time."""
        if self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(_STOP_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


@contextlib.asynccontextmanager
async def _started_replica(config: EvalConfig) -> AsyncIterator[_StartedReplica]:
    """Start ``sluice rollout`` on the model, without weight sync; end it afterwards, also if this process is killed."""
    from sluice.rpc.server import LOOPBACK, free_ports  # noqa: PLC0415 - brings gRPC
    from sluice.supervise.watchdog import Watchdog  # noqa: PLC0415

    port = free_ports(1)[0]
    argv = [sys.executable, "-m", "sluice.cli.main", "rollout", "--model", config.model, "--run", _RUN]
    settings = {
        "engine": config.engine,
        "follow_weights": "false",
        "server.host": LOOPBACK,
        "server.port": str(port),
        "server.http_port": "none",
        **({} if config.max_model_len is None else {"max_model_len": str(config.max_model_len)}),
        **{name: str(value) for name, value in config.rollout.items()},
    }
    for name, value in settings.items():
        argv += [f"--rollout.{name}", value]
    with tempfile.TemporaryDirectory(prefix="sluice-eval-") as directory:
        log_path = Path(directory) / "rollout.log"
        watchdog = await Watchdog.start()
        try:
            with log_path.open("wb") as log:
                process = await watchdog.start_child(argv, stdout=log, stderr=log)
            replica = _StartedReplica(process, f"{LOOPBACK}:{port}", log_path)
            try:
                yield replica
            finally:
                await replica.stop()
                watchdog.note("-", process.pid)
        finally:
            await watchdog.stop()


async def _wait_ready(
    pool: ReplicaPool, polling: asyncio.Task[None], replica: _StartedReplica | None, deadline_s: float
) -> None:
    """Wait until the pool has a replica that serves.

    Raises:
        ConfigError: if it died, or is not there in time.
    """
    ready = asyncio.create_task(pool.choose(BASE))
    died = asyncio.create_task(replica.died()) if replica is not None else None
    waits = {ready, polling, died} - {None}
    try:
        await asyncio.wait(waits, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)  # type: ignore[type-var]
        if died is not None and died.done():
            raise ConfigError(died.result())
        if polling.done():
            polling.result()
        if not ready.done():
            reasons = (
                "; ".join(f"{each.target} {each.why_not()}" for each in pool.replicas) or "the name does not resolve"
            )
            raise ConfigError(
                f"no rollout server within {deadline_s:g} s: {reasons}; start one (sluice rollout), or correct --address"
            )
    finally:
        for each in (ready, died):
            if each is not None:
                each.cancel()


COMMAND = Command("eval", "score a model directory or a running server on an environment", run)
