"""`sluice eval`: score a model directory or a running server on an environment.

For a model directory a rollout replica is started, and stopped when the evaluation has ended. With `workflow = "external"` agents
play the episodes, through a gateway that is started as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from pydantic import Field, model_validator

from orchestrator_svc.commands.eval.plot import FORMATS
from orchestrator_svc.config import EXTERNAL, AttemptsConfig, ExternalConfig, OrchestratorConfig
from sluice.chat_template import check_chat_template
from sluice.clock import CLOCK, Clock
from sluice.config import (
    CHAT_TEMPLATE,
    CHAT_TEMPLATE_KWARGS,
    RUN_PATTERN,
    Command,
    ConfigError,
    Section,
    SecurityConfig,
    TemplateArguments,
    load_command,
)
from sluice.engines import EngineName
from sluice.environments.config import EnvironmentProcessesConfig
from sluice.environments.loading import PLAYING, locate
from sluice.loading import check_there
from sluice.models import check_files, check_model
from sluice.progress import Step, doing
from sluice.sampling.config import ReplicasConfig
from sluice.tasks import settle
from sluice.telemetry import LEVEL_VARIABLE, configure_logging
from sluice.versions import BASE

if TYPE_CHECKING:
    from orchestrator_svc.commands.eval.children import Child, Children
    from orchestrator_svc.run.evaluation import Attempted, EvalResult, EvalSample
    from sluice.environments.base import Task
    from sluice.environments.processes import EnvironmentProcesses
    from sluice.sampling.pool import ReplicaPool

_LABELS = {
    "reward_mean": "reward, sampled",
    "exact_share": "exact, sampled",
    "greedy_reward_mean": "reward, greedy",
    "greedy_exact_share": "exact, greedy",
    "truncated_share": "truncated",
    "missing_rewards": "missing rewards",
    "failed_tasks": "failed tasks",
    "failed_episodes": "failed episodes",
}

_GENERATE_S = 600.0
"""Seconds for one request."""

_MANY = 20
"""Steps that a message lists."""

_IDENTITY = {
    *(
        "model",
        "address",
        "url",
        "engine",
        "max_model_len",
        "rollout",
        "chat_template",
        "chat_template_kwargs",
        "environment",
        "environment_args",
        "workflow",
        "agent",
    ),
    *("split", "seed", "samples", "temperature", "greedy", "max_tokens", "stop", "max_turns"),
}
"""Settings that decide what an attempt is; how many tasks there are may change."""

_FAULTS = ("missing_rewards", "failed_tasks", "failed_episodes")
"""What should not be there."""


class EvaluatedEnvironment(Section):
    """One of several environments; what is unset is as for all."""

    name: str = Field(min_length=1, description="Its name in the result.")
    environment: str = Field(min_length=1, description="As `environment`.")
    environment_args: dict[str, Any] = Field(default_factory=dict, description="As `environment_args`.")
    split: str | None = Field(None, description="As `split`.")
    prompts: int | None = Field(None, ge=1, description="As `prompts`.")
    samples: int | None = Field(None, ge=0, description="As `samples`.")
    max_tokens: int | None = Field(None, ge=1, description="As `max_tokens`.")
    max_turns: int | None = Field(None, ge=1, description="As `max_turns`.")
    environment_processes: EnvironmentProcessesConfig | None = Field(None, description="As `environment_processes`.")


class EvalConfig(AttemptsConfig):
    """What is evaluated, on what, and how."""

    model: str = Field(
        "",
        description="Model directory or hub id; a replica is started for it and stopped afterwards. With `url`: the model's name there.",
    )
    weights_dir: Path | None = Field(
        None,
        description="Directory of a run's weights, such as `outputs/my-run/weights`, in place of `model`: each version there is evaluated.",
    )
    steps: list[int] = Field(default_factory=list, description="Steps of `weights_dir` to evaluate; none: all.")
    url: str = Field(
        "",
        description="OpenAI-compatible endpoint, such as `https://api.openai.com/v1`, whose model `model` is evaluated.",
    )
    key_variable: str = Field(
        "OPENAI_API_KEY", description="Environment variable with the API key for `url`; without it no key is sent."
    )
    baseline: str = Field(
        "",
        description="Another model directory or hub id, evaluated first on the same tasks: the result has the gain of `model` over it.",
    )
    address: str = Field(
        "", description="Address of a running rollout server, as host:port, instead of `model`; give one of the two."
    )
    engine: EngineName = Field("vllm", description="What samples from `model`.")
    max_model_len: int | None = Field(
        None, ge=2, description="Most tokens of prompt and continuation together; none takes the model's own."
    )
    chat_template: Path | None = Field(None, description=CHAT_TEMPLATE)
    chat_template_kwargs: TemplateArguments = Field(
        default_factory=dict,
        description=f"{CHAT_TEMPLATE_KWARGS} A server at `address` or `url` gets them with each request.",
    )
    rollout: dict[str, Any] = Field(
        default_factory=dict, description="Further settings of the replica started for `model`, as of [rollout]; flat."
    )
    environment: str = Field("", description="Environment: an installed id, `module:Attr`, or `path/to/env.py:Attr`.")
    environment_args: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of the environment's class or function."
    )
    environments: list[EvaluatedEnvironment] = Field(
        default_factory=list,
        description="Several environments in place of `environment`, one evaluated after the other.",
    )
    workflow: str = Field("auto", description="How an episode runs; as orchestrator.workflow.")
    agent: str = Field(
        "",
        description='Command that plays the episodes of external agents, run in a shell that knows $SLUICE_GATEWAY (gRPC), $SLUICE_GATEWAY_URL (HTTP) and $SLUICE_RUN; again whenever it ends in order. It implies `workflow = "external"`. Empty: start agents by hand.',
    )
    agents: int = Field(1, ge=1, le=256, description="How often `agent` runs at a time.")
    gateway: dict[str, Any] = Field(
        default_factory=dict, description="Further settings of the gateway started for agents, as of [gateway]; flat."
    )
    external: ExternalConfig = Field(default_factory=ExternalConfig, description="Episodes that external agents run.")
    run: str = Field("eval", pattern=RUN_PATTERN, description="Name of the run that agents lease tasks of.")
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
    attempts: Path | None = Field(
        None,
        description="JSONL file that the attempts at each task are added to as they end; an evaluation that was interrupted continues with the same file. Of several evaluations each has its own, by its checkpoint and environment.",
    )
    plot: Path | None = Field(
        None,
        description="PNG, SVG or PDF file: rewards and pass@k of each checkpoint of `weights_dir`, with intervals.",
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
        if sum(map(bool, (self.model, self.address, self.weights_dir))) != 1:
            raise ValueError(
                "give one of model (a directory or hub id), address (of a running server) and weights_dir (of a run)"
            )
        if self.url and not self.model:
            raise ValueError("url needs model: the name of the model there")
        if self.url and (self.baseline or self.external_agents):
            raise ValueError("url is for episodes that the environment runs, without a baseline")
        if self.url and self.workflow != "auto":
            raise ValueError(
                f"a model at a url is asked as the environment says, so workflow cannot be {self.workflow}: leave it out"
            )
        if bool(self.environment) == bool(self.environments):
            raise ValueError("give either environment, or a table for each of several environments")
        if self.plot is not None and self.plot.suffix not in FORMATS:
            raise ValueError(f"plot is a file that ends with {', '.join(FORMATS)}, not {self.plot.name!r}")
        if not self.samples and not self.greedy:
            raise ValueError("nothing to do: set samples above 0, or greedy")
        if self.baseline and not self.model:
            raise ValueError("baseline is compared with model: give model, not address")
        if self.agent_command and self.workflow not in {"auto", EXTERNAL}:
            raise ValueError(f"agent plays the episodes, so workflow cannot be {self.workflow}: leave it out")
        return self

    @model_validator(mode="after")
    def _has_its_own_template(self) -> Self:
        if self.chat_template is not None and (self.url or self.address):
            raise ValueError("a server has the chat template that it was started with: leave chat_template out")
        return self

    @property
    def external_agents(self) -> bool:
        """Whether external agents run the episodes."""
        return bool(self.agent_command) or self.workflow == EXTERNAL

    @property
    def agent_command(self) -> str:
        """`agent`, or for an environment that plays its episodes itself what starts it."""
        if self.agent or self.environment not in PLAYING:
            return self.agent
        given = {
            "agent": self.environment,
            "args": json.dumps(self.environment_args),
            "environment_processes": self.environment_processes.model_dump_json(),
            "start_s": str(self.start_s),
            "server.port": "0",
        }
        words = [sys.executable, "-m", "sluice.cli.main", "agents"]
        words += [word for name, value in given.items() for word in (f"--agents.{name}", value)]
        return f'{shlex.join(words)} --peers.gateway "$SLUICE_GATEWAY" --run "$SLUICE_RUN"'


def run(argv: list[str]) -> int:
    """Evaluate, print a table, and write the result.

    Returns:
        0, or 1 if a task failed or a reward is missing.
    """
    config = load_command(EvalConfig, argv, "eval", check=check_evaluation)
    configure_logging("eval", os.environ.get(LEVEL_VARIABLE) or "warning", for_people=True)
    results, samples = [], []
    for result, outcome in evaluations(config):
        results.append(result)
        names = {name: result[name] for name in ("checkpoint", "environment") if name in result}
        samples += [{**names, **asdict(sample)} for sample in outcome.result.samples]
        sys.stderr.write(_missing(outcome.result.samples, outcome.unscored))
        if config.output is not None:
            several = config.weights_dir is not None or config.environments
            whole = {"results": results} if several else result
            _write(config.output, json.dumps(whole, indent=2) + "\n")
    if config.samples_output is not None:
        _write(config.samples_output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in samples))
    if config.plot is not None:
        from orchestrator_svc.commands.eval.plot import draw  # noqa: PLC0415 - as in _compared
        from orchestrator_svc.run.evaluation import INTERVAL  # noqa: PLC0415

        draw([{"checkpoint": "", **each} for each in results], config.plot, INTERVAL)
    return int(any(each["metrics"][name] > 0 for each in results for name in _FAULTS))


def _missing(samples: Sequence[EvalSample], unscored: int) -> str:
    """Return why rewards are missing, and what helps; nothing if none is.

    Args:
        samples: All samples.
        unscored: How many of them the environment was asked to score, and could not.
    """
    missing = [each for each in samples if each.reward is None]
    cut_off = min(sum(each.truncated for each in missing), max(0, len(missing) - unscored))
    lines = []
    if cut_off:
        lines.append(
            f"{cut_off} episodes were cut off by max_tokens or max_turns before the environment gave a reward: raise the limit, or let"
            " `step` take a parameter `last` and score what there is (docs/environments.md)"
        )
    if len(missing) > cut_off:
        lines.append(
            f"{len(missing) - cut_off} rewards are missing because the environment gave none: see `scoring failed` above"
        )
    return "".join(f"{line}\n" for line in lines)


def evaluations(config: EvalConfig) -> Iterator[tuple[dict[str, Any], Outcome]]:
    """Make the evaluations that were asked for, one after the other, and print each; yield the result for people, and what it was made of."""
    found = False
    for each in _each(config):
        try:
            result, outcome = _compared(each.config)
        except ConfigError:
            if not each.is_removed:
                raise
            sys.stderr.write(f"{each.config.model} is left out: its run has removed it meanwhile (weightsync.keep)\n")
            continue
        found = True
        result |= each.names
        _print(result)
        yield result, outcome
    if not found:
        raise ConfigError(f"{config.weights_dir} has none of the versions any more that it had: evaluate it again")


@dataclass(frozen=True)
class _Evaluation:
    """One of the evaluations that were asked for.

    Attributes:
        config: Of one model and one environment.
        names: What tells it from the others: `checkpoint`, `environment`.
    """

    config: EvalConfig
    names: Mapping[str, str]

    @property
    def is_removed(self) -> bool:
        """Whether it is of a version whose directory a live run has removed since it was listed."""
        return "checkpoint" in self.names and not Path(self.config.model).is_dir()


def _each(config: EvalConfig) -> Iterator[_Evaluation]:
    """Yield an evaluation for each checkpoint and environment."""
    checkpoints = versions(config.weights_dir, config.steps) if config.weights_dir is not None else [None]
    environments: Sequence[EvaluatedEnvironment | None] = config.environments or [None]
    for checkpoint in checkpoints:
        for environment in environments:
            updates: dict[str, Any] = {"environments": [], "weights_dir": None}
            names = {}
            if checkpoint is not None:
                updates["model"], names["checkpoint"] = str(checkpoint), checkpoint.name
            if environment is not None:
                names["environment"] = environment.name
                updates |= {name: value for name, value in environment if name != "name" and value is not None}
            if config.attempts is not None and names:
                file = config.attempts
                updates["attempts"] = file.with_name(".".join((file.stem, *names.values())) + file.suffix)
            yield _Evaluation(config.model_copy(update=updates), names)


def versions(weights_dir: Path, steps: Sequence[int]) -> list[Path]:
    """Return the directories of the versions of a run's weights, oldest first.

    Raises:
        ConfigError: if it has none, or not those of these steps.
    """
    found = {}
    for each in weights_dir.glob("v*.*"):
        with contextlib.suppress(ValueError):
            epoch, step = each.name[1:].split(".")
            found[int(epoch), int(step)] = each
    there = sorted({step for _, step in found})
    if not there:
        raise ConfigError(
            f"there are no versions in {weights_dir.resolve()}, such as v1.50: give a run's weights directory"
        )
    if missing := sorted(set(steps) - set(there)):
        shown = ", ".join(map(str, there if len(there) < _MANY else [*there[:_MANY], "..."]))
        raise ConfigError(f"{weights_dir} has no step {', '.join(map(str, missing))}; it has {shown}")
    return [path for (_, step), path in sorted(found.items()) if not steps or step in steps]


def _compared(config: EvalConfig) -> tuple[dict[str, Any], Outcome]:
    """Evaluate a model, and the baseline before it if there is one."""
    result, outcome = _evaluated(config)
    if not config.baseline:
        return result, outcome
    from orchestrator_svc.run.evaluation import gain  # noqa: PLC0415 - as in run_evaluation

    _print(result)
    before, others = result, outcome.result
    result, outcome = _evaluated(config.model_copy(update={"baseline": ""}))
    try:
        result |= {"baseline": before, "gain": asdict(gain(others.task_rewards, outcome.result.task_rewards))}
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return result, outcome


def _evaluated(config: EvalConfig) -> tuple[dict[str, Any], Outcome]:
    """Evaluate the model, or the baseline if there is one; return the result for people, and what it was made of."""
    if config.baseline and config.attempts is not None:
        file = config.attempts
        config = config.model_copy(update={"attempts": file.with_name(f"{file.stem}.baseline{file.suffix}")})
    config = config.model_copy(update={"model": config.baseline or config.model})
    began = time.monotonic()
    outcome = asyncio.run(run_evaluation(config))
    result = {
        "model": config.model or config.address,
        "environment": config.environment,
        "split": config.split,
        "prompts": outcome.tasks,
        "samples": config.samples,
        "temperature": config.temperature,
        "engine": config.engine if config.model and not config.url else "",
        "policy_version": outcome.version,
        "episodes": len(outcome.result.samples),
        "tokens": outcome.tokens,
        "wall_s": round(time.monotonic() - began, 3),
        "metrics": outcome.result.metrics(),
    }
    if config.chat_template is not None:
        result["chat_template"] = str(config.chat_template)
    if config.chat_template_kwargs:
        result["chat_template_kwargs"] = config.chat_template_kwargs
    return result, outcome


def check_evaluation(config: EvalConfig) -> None:
    """Refuse settings that would fail later, before a replica is started.

    Raises:
        ConfigError: if the model cannot be one, or the environment is not there.
    """
    for model in filter(None, (config.baseline, "" if config.url else config.model)):
        check_model(model)
        check_files(model)
        check_chat_template(model, config.chat_template, config.chat_template_kwargs)
    for each in _each(config):
        check_there(locate(each.config.environment), "environment")


class Outcome(NamedTuple):
    """What an evaluation brought.

    Attributes:
        result: Its samples.
        version: The version that was evaluated.
        tasks: Number of tasks.
        tokens: Tokens that were sampled.
        unscored: Completions that the environment could not score.
    """

    result: EvalResult
    version: str
    tasks: int
    tokens: int
    unscored: int


async def run_evaluation(config: EvalConfig, clock: Clock = CLOCK) -> Outcome:
    """Evaluate a model or a server.

    Args:
        config: What to evaluate, and how.
        clock: Times the calls of the environment.

    Raises:
        ConfigError: if the environment, the server or the agents cannot be used, or the deadline passes.
    """
    # What follows brings gRPC and process pools: not for `--help`.
    from orchestrator_svc.commands.eval.agents import served_agents  # noqa: PLC0415
    from orchestrator_svc.commands.eval.children import Children  # noqa: PLC0415
    from orchestrator_svc.run.evaluation import evaluate  # noqa: PLC0415
    from orchestrator_svc.run.workflows import GroupRunner, RolloutWorkflow, Sampling, choose_workflow  # noqa: PLC0415
    from sluice.rpc.channel import token_file  # noqa: PLC0415
    from sluice.sampling.policy import PolicyEngine  # noqa: PLC0415
    from sluice.sampling.pool import ReplicaPool  # noqa: PLC0415

    settings = OrchestratorConfig(workflow=config.workflow, max_turns=config.max_turns)
    async with contextlib.AsyncExitStack() as stack:
        with doing(f"start {config.environment}"):
            environment, tasks = await _started_environment(config, stack, clock)
        known, keep = _attempts(config, stack)
        if config.url:
            return await _by_endpoint(config, environment, tasks, known, keep)
        workflow: RolloutWorkflow
        if not config.external_agents:
            workflow = choose_workflow(settings, environment)
        children = await stack.enter_async_context(Children.ending_with_this())
        replica, target = None, config.address
        if config.model:
            with doing(f"start a replica of {config.model}"):
                replica, target = await stack.enter_async_context(_started_replica(config, children))
        # The operator named this address, so it may get the operator's own token.
        token = config.security.dispatcher_token_file or token_file(config.security, "admin")
        security = config.security.model_copy(update={"dispatcher_token_file": token})
        pool = ReplicaPool([target], security, ReplicasConfig(poll_s=0.2), lambda _: None)
        polling = asyncio.create_task(pool.run())
        stack.push_async_callback(settle, polling)
        stack.callback(polling.cancel)
        await _wait_ready(pool, polling, replica, config.connect_s if replica is None else config.start_s)
        watched = [polling] if replica is None else [polling, asyncio.create_task(_must_live(replica))]
        stack.callback(watched[-1].cancel)
        if config.external_agents:
            workflow, serving = await stack.enter_async_context(served_agents(config, environment, pool, children))
            watched.append(serving)
        engine = PolicyEngine(pool, config.run if replica is not None else "", _GENERATE_S)
        runner = GroupRunner(workflow, engine, config.seed, request_prefix="")
        # A replica of this command has them itself.
        arguments = {} if config.model else config.chat_template_kwargs
        sampling = Sampling(config.temperature, config.max_tokens, config.stop, chat_template_kwargs=arguments)
        step = stack.enter_context(_attempting(tasks, known))
        evaluating = asyncio.create_task(
            evaluate(runner, tasks, config, sampling, known=known, keep=keep, count=step.advance)
        )
        stack.push_async_callback(settle, evaluating)
        stack.callback(evaluating.cancel)
        done, _ = await asyncio.wait(
            {evaluating, *watched}, timeout=config.deadline_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            raise ConfigError(f"the evaluation took more than {config.deadline_s:g} s (--deadline-s)")
        if evaluating not in done:
            done.pop().result()  # raises why
        version, unscored = str(pool.replicas[0].version), environment.failures["missing"]
        return Outcome(evaluating.result(), version, len(tasks), engine.counts["tokens"], unscored)


async def _started_environment(
    config: EvalConfig, stack: contextlib.AsyncExitStack, clock: Clock
) -> tuple[EnvironmentProcesses, Sequence[Task]]:
    """Return the environment, which ends with the stack, and the tasks to evaluate.

    Raises:
        ConfigError: if it cannot be used, or has no tasks.
    """
    from sluice.environments.processes import EnvironmentProcesses  # noqa: PLC0415 - as in run_evaluation

    limit = (config.start_s, "--start-s")
    processes = EnvironmentProcesses(
        config.environment, config.environment_args, config.environment_processes, limit, clock=clock
    )
    environment = await stack.enter_async_context(processes)
    tasks = (await environment.tasks(config.split, config.seed))[: config.prompts]
    if not tasks:
        raise ConfigError(
            f"split {config.split!r} of environment {config.environment} has no tasks: correct --split or environment_args"
        )
    return environment, tasks


@contextlib.contextmanager
def _attempting(tasks: Sequence[Task], known: Mapping[str, Attempted]) -> Iterator[Step]:
    """Show how many tasks were attempted."""
    before = sum(each.task_id in known for each in tasks)
    with doing("evaluate", len(tasks), "tasks", before=before) as step:
        yield step


def _attempts(
    config: EvalConfig, stack: contextlib.AsyncExitStack
) -> tuple[Mapping[str, Attempted], Callable[[str, Attempted], None]]:
    """Return the attempts that an interrupted evaluation has made, and what keeps further ones."""
    if config.attempts is None:
        return {}, lambda *_: None
    from orchestrator_svc.commands.eval.attempts import AttemptsFile  # noqa: PLC0415 - as in run_evaluation

    unset = {name for name in ("chat_template", "chat_template_kwargs") if not getattr(config, name)}
    what = config.model_dump(mode="json", include=_IDENTITY - unset)  # an older file does not have them
    file = AttemptsFile(config.attempts, what)
    stack.callback(file.close)
    if file.known:
        sys.stderr.write(f"{config.attempts}: {len(file.known)} tasks were attempted before\n")
    return file.known, file.add


async def _by_endpoint(
    config: EvalConfig,
    environment: EnvironmentProcesses,
    tasks: Sequence[Task],
    known: Mapping[str, Attempted],
    keep: Callable[[str, Attempted], None],
) -> Outcome:
    """Evaluate a model behind an endpoint."""
    from orchestrator_svc.commands.eval.endpoint import EndpointWorkflow  # noqa: PLC0415 - as in run_evaluation
    from orchestrator_svc.run.evaluation import evaluate  # noqa: PLC0415
    from orchestrator_svc.run.workflows import GroupRunner, Sampling  # noqa: PLC0415
    from sluice.chat_endpoint import ChatEndpoint  # noqa: PLC0415

    endpoint = ChatEndpoint(
        config.url, config.model, key_variable=config.key_variable, timeout_s=_GENERATE_S, at_a_time=config.concurrency
    )
    async with endpoint:
        workflow = EndpointWorkflow(environment, endpoint, config.max_turns)
        runner = GroupRunner(workflow, None, config.seed, request_prefix="")  # type: ignore[arg-type]  # it uses none
        arguments = config.chat_template_kwargs
        sampling = Sampling(config.temperature, config.max_tokens, config.stop, chat_template_kwargs=arguments)
        try:
            async with asyncio.timeout(config.deadline_s):
                with _attempting(tasks, known) as step:
                    result = await evaluate(runner, tasks, config, sampling, known=known, keep=keep, count=step.advance)
        except TimeoutError as error:
            raise ConfigError(f"the evaluation took more than {config.deadline_s:g} s (--deadline-s)") from error
    return Outcome(result, "", len(tasks), workflow.tokens, environment.failures["missing"])


async def _must_live(replica: Child) -> None:
    """Raise a ConfigError when the replica dies."""
    raise ConfigError(await replica.died())


def _print(result: Mapping[str, Any]) -> None:
    from orchestrator_svc.run.evaluation import INTERVAL  # noqa: PLC0415 - brings gRPC

    metrics = result["metrics"]
    lines = [f"{result['model']} on {result['environment']}, {result['prompts']} tasks of split {result['split']}:"]
    for name, label in _LABELS.items():
        if name not in metrics or (name in _FAULTS and not metrics[name]):
            continue
        error = metrics.get(name.replace("_mean", "_stderr")) if name.endswith("_mean") else None
        half = None if error is None else INTERVAL * error
        interval = "" if half is None else f"  95% {metrics[name] - half:.4f} to {metrics[name] + half:.4f}"
        shown = f"{metrics[name]:.0f}" if name in _FAULTS else f"{metrics[name]:.4f}"
        lines.append(f"  {label:<18} {shown}{interval}")
    ks = sorted(int(name[8:]) for name in metrics if name.startswith("pass_at_") and name[8:].isdigit())
    for k in ks[1:]:
        low, high = metrics[f"pass_at_{k}_low"], metrics[f"pass_at_{k}_high"]
        lines.append(f"  {f'pass@{k}':<18} {metrics[f'pass_at_{k}']:.4f}  95% {low:.4f} to {high:.4f}")
    lines += [f"  {name.partition('/')[2]:<18} {value:.4f}" for name, value in metrics.items() if "/" in name]
    lines.append(f"  {'episodes':<18} {result['episodes']}, {result['tokens']} tokens, {result['wall_s']:.0f} s")
    if "gain" in result:
        gain = result["gain"]
        lines.append(
            f"gain in reward over {result['baseline']['model']}: {gain['mean']:+.4f}  95% {gain['low']:+.4f} to {gain['high']:+.4f},"
            f" paired over {gain['tasks']} tasks"
        )
    sys.stdout.write("\n".join(lines) + "\n")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@contextlib.asynccontextmanager
async def _started_replica(config: EvalConfig, children: Children) -> AsyncIterator[tuple[Child, str]]:
    """Start ``sluice rollout`` on the model, without weight sync; yield it and its address.

    Raises:
        ConfigError: if it does not start.
    """
    from orchestrator_svc.commands.eval.children import ready  # noqa: PLC0415 - as in run_evaluation
    from sluice.rpc.server import LOOPBACK  # noqa: PLC0415 - brings gRPC
    from sluice.template_arguments import arguments_text  # noqa: PLC0415 - brings protobuf

    argv = [sys.executable, "-m", "sluice.cli.main", "rollout", "--model", config.model, "--run", config.run]
    argv += ["--log-level", "info"]  # it logs where it listens
    settings = {
        "engine": config.engine,
        "follow_weights": "false",
        "server.host": LOOPBACK,
        "server.port": "0",
        "server.http_port": "none",
        **({} if config.max_model_len is None else {"max_model_len": str(config.max_model_len)}),
        **{name: str(value) for name, value in config.rollout.items()},
    }
    if config.chat_template is not None:
        argv += ["--chat-template", str(config.chat_template)]
    if config.chat_template_kwargs:
        argv += ["--chat-template-kwargs", arguments_text(config.chat_template_kwargs)]
    for name, value in settings.items():
        argv += [f"--rollout.{name}", value]
    async with children.started("replica", argv) as replica:
        listening = asyncio.create_task(replica.logged("listening", "target"))
        yield replica, await ready(replica, listening, config.start_s)


async def _wait_ready(pool: ReplicaPool, polling: asyncio.Task[None], replica: Child | None, deadline_s: float) -> None:
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
