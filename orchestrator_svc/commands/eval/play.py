"""Play one evaluation: start the environment and the processes that play its episodes, and return every attempt.

There are three ways to play an episode:

    workflow -> replica                                   started here on the model directory; or a running one (`address`)
    `EndpointWorkflow` -> OpenAI-compatible endpoint      (`url`)
    agents -> gateway -> desk -> replica                  external agents (`served_agents`)

Agents connect as they do in training. Gateway and agents are processes that end with this process, even if it is killed. The desk offers
them held-out tasks; its journal is temporary. The run that they name is `run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import structlog

from orchestrator_svc.commands.eval.config import EvalConfig
from orchestrator_svc.config import OrchestratorConfig
from orchestrator_svc.journal.store import Journal
from orchestrator_svc.run.evaluation import Attempted, AttemptsFile, EvalResult, evaluate
from orchestrator_svc.run.external import EvaluationGroups, ExternalEvaluation
from orchestrator_svc.run.workflows import EpisodeData, GroupRunner, RolloutWorkflow, Sampling, choose_workflow
from orchestrator_svc.sessions.desk import Desk, Waiting
from orchestrator_svc.sessions.exchange import SESSIONS
from orchestrator_svc.sessions.servicer import EPISODES, EpisodeServicer, SessionServicer
from sluice.chat_endpoint import ChatEndpoint
from sluice.clock import CLOCK, Clock
from sluice.config import ConfigError, SecurityConfig, ServerConfig
from sluice.environments.base import Message, Task
from sluice.environments.processes import EnvironmentProcesses
from sluice.environments.wire import chat_messages, tool_messages
from sluice.errors import BindError
from sluice.progress import Step, doing
from sluice.rpc import RpcServer
from sluice.rpc.channel import token_file, wait_until_serving
from sluice.rpc.server import LOOPBACK
from sluice.sampling.config import ReplicasConfig
from sluice.sampling.policy import PolicyEngine
from sluice.sampling.pool import ReplicaPool
from sluice.supervise.restart_policy import EXIT_BIND
from sluice.supervise.spawn import Spawned
from sluice.supervise.watchdog import Watchdog
from sluice.tasks import settle
from sluice.template_arguments import arguments_text
from sluice.v1 import episode_pb2_grpc, orchestrator_pb2, session_pb2_grpc, tokens_pb2
from sluice.versions import BASE

log = structlog.get_logger(__name__)

T = TypeVar("T")

_GENERATE_S = 600.0
"""Seconds for one request."""


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
"""Settings that the attempts depend on: stored attempts are used only under the same values. The number of tasks may change."""

_KEPT = ("role", "content", "tool_calls", "reasoning", "reasoning_content")

_GATEWAY_PORTS = (7105, 7115)
"""Ports of a run's gateway. Agents that are started by hand try these first."""

_ANY_PORTS = (0, 0)
"""Free ports that the system chooses."""

_FAREWELL_S = 5.0
"""Seconds for agents to learn that no more tasks are offered, and to end."""

_QUICK = 3
"""How many times in a row agents may exit with 0 without having recorded anything in between."""

_STOP_S = 15.0
"""Seconds between SIGTERM and SIGKILL."""

_LOOK_S = 0.1
"""Seconds between two reads of a log."""

_TAIL_LINES = 20
"""Last lines of a process's log that are shown when it dies."""


class Outcome(NamedTuple):
    """The outcome of an evaluation.

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
        # A replica that this command started has them in its settings.
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
    """Return the attempts that an interrupted evaluation has made, and a function that stores further ones."""
    if config.attempts is None:
        return {}, lambda *_: None

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
    endpoint = ChatEndpoint(
        config.url, config.model, key_variable=config.key_variable, timeout_s=_GENERATE_S, at_a_time=config.concurrency
    )
    async with endpoint:
        workflow = EndpointWorkflow(environment, endpoint, config.max_turns)
        runner = GroupRunner(workflow, None, config.seed, request_prefix="")  # type: ignore[arg-type]  # it uses no engine
        arguments = config.chat_template_kwargs
        sampling = Sampling(config.temperature, config.max_tokens, config.stop, chat_template_kwargs=arguments)
        try:
            async with asyncio.timeout(config.deadline_s):
                with _attempting(tasks, known) as step:
                    result = await evaluate(runner, tasks, config, sampling, known=known, keep=keep, count=step.advance)
        except TimeoutError as error:
            raise ConfigError(f"the evaluation took more than {config.deadline_s:g} s (--deadline-s)") from error
    return Outcome(result, "", len(tasks), workflow.tokens, environment.failures["missing"])


async def _must_live(child: Child) -> None:
    """Raise a ConfigError when a child dies."""
    raise ConfigError(await child.died())


@contextlib.asynccontextmanager
async def _started_replica(config: EvalConfig, children: Children) -> AsyncIterator[tuple[Child, str]]:
    """Start ``sluice rollout`` on the model, without weight sync; yield it and its address.

    Raises:
        ConfigError: if it does not start.
    """
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
        yield replica, await until_serving(replica, listening, config.start_s)


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


class EndpointWorkflow:
    """Plays the episodes of a group with an endpoint.

    Args:
        environment: Poses, answers and scores.
        endpoint: The model.
        max_turns: Most answers of an episode.

    Attributes:
        tokens: Tokens that the endpoint says it sampled.

    Raises:
        ConfigError: if the environment leaves its episodes to agents.
    """

    def __init__(self, environment: EnvironmentProcesses, endpoint: ChatEndpoint, max_turns: int) -> None:
        if not (environment.single_turn or environment.multi_turn):
            raise ConfigError(
                f"environment {environment.name} leaves its episodes to agents: an endpoint cannot play them; give model or address"
            )
        self._environment, self._endpoint, self._max_turns = environment, endpoint, max_turns
        self.tokens = 0

    async def arun_episode(self, engine: PolicyEngine, data: EpisodeData) -> list[orchestrator_pb2.TrajectoryRecord]:
        """Play all episodes; the engine is not used.

        Raises:
            Exception: what the last episode raised, if all fail.
        """
        play = self._turns if self._environment.multi_turn else self._question
        outcomes = await asyncio.gather(*(play(data, index) for index in range(data.episodes)), return_exceptions=True)
        records = []
        failure: Exception | None = None
        for index, outcome in enumerate(outcomes):
            if isinstance(outcome, Exception):
                log.warning("episode failed", task=data.task.task_id, episode=index, error=str(outcome))
                failure = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                records.append(outcome)
        if failure is not None and not records:
            raise failure
        return records

    async def _question(self, data: EpisodeData, index: int) -> orchestrator_pb2.TrajectoryRecord:
        messages = await self._environment.messages(data.task)
        said, finish = await self._ask(messages, (), data)
        (score,) = await self._environment.judge(data.task, [said["content"]])
        record = _record(data, index, [*messages, said], (), finish)
        if score.reward is not None:
            record.trajectory.reward = score.reward
        record.metrics.update(score.metrics)
        return record

    async def _turns(self, data: EpisodeData, index: int) -> orchestrator_pb2.TrajectoryRecord:
        rewards: list[float] = []
        metrics: dict[str, float] = {}
        async with self._environment.episode(data.task, data.seed + index) as episode:
            messages, tools = list(episode.messages), episode.tools
            for _ in range(self._max_turns):
                said, finish = await self._ask(messages, episode.tools, data)
                turn = await episode.step(said if episode.tools else said["content"])
                messages += [said, *turn.messages]
                metrics |= turn.metrics
                if turn.reward is not None:
                    rewards.append(turn.reward)
                if turn.done:
                    finish = "length" if turn.truncated else finish
                    break
            else:
                finish = "length"
        record = _record(data, index, messages, tools, finish)
        if rewards:
            record.trajectory.reward = sum(rewards)
        record.metrics.update(metrics)
        return record

    async def _ask(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], data: EpisodeData
    ) -> tuple[Message, str]:
        sampling = data.sampling
        options: dict[str, Any] = {
            "temperature": sampling.temperature,
            "max_tokens": data.task.max_tokens or sampling.max_tokens,
        }
        if sampling.chat_template_kwargs:
            options["chat_template_kwargs"] = dict(sampling.chat_template_kwargs)
        if sampling.stop:
            options["stop"] = list(sampling.stop)
        choice = await self._endpoint.ask(messages, tools, **options)
        self.tokens += int((choice.get("usage") or {}).get("completion_tokens") or 0)
        said = {name: choice["message"][name] for name in _KEPT if choice["message"].get(name)}
        return {"role": "assistant", "content": "", **said}, str(choice.get("finish_reason"))


def _record(
    data: EpisodeData, index: int, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], finish: str
) -> orchestrator_pb2.TrajectoryRecord:
    name = f"{data.group_id}-{index}"
    record = orchestrator_pb2.TrajectoryRecord()
    record.trajectory.trajectory_id = record.trajectory.episode_id = name
    length = finish == "length"
    record.trajectory.finish_reason = tokens_pb2.FINISH_REASON_LENGTH if length else tokens_pb2.FINISH_REASON_STOP
    record.conversation.messages.extend(chat_messages(messages))
    record.conversation.tools.extend(tool_messages(tools))
    return record


@contextlib.asynccontextmanager
async def served_agents(
    config: EvalConfig, environment: EnvironmentProcesses, pool: ReplicaPool, children: Children
) -> AsyncIterator[tuple[ExternalEvaluation, asyncio.Task[None]]]:
    """Serve agents, and start theirs if the settings have a command for it.

    Yields:
        The workflow that offers them tasks, and a task that raises a ConfigError if gateway or agents die.
    """
    async with contextlib.AsyncExitStack() as stack:
        waiting, groups = Waiting(), EvaluationGroups()
        journal = Journal(children.directory / "sessions", {"run": config.run}, follow=waiting.follow)
        stack.push_async_callback(journal.close)
        desk = Desk(journal, config.external, waiting, secrets.token_bytes(32), posed=groups.posed)
        server = RpcServer("orchestrator", ServerConfig(host=LOOPBACK, port=0), SecurityConfig(), run=config.run)
        server.add(session_pb2_grpc.add_SessionServiceServicer_to_server, SessionServicer(desk, pool), SESSIONS)
        episodes = EpisodeServicer(config.run, desk, offers=True)  # type: ignore[abstract]  # gateways sample: it has no Generate
        server.add(episode_pb2_grpc.add_EpisodeServiceServicer_to_server, episodes, EPISODES)
        await server.start()
        stack.push_async_callback(server.stop, 0.0)
        gateway, addresses = await stack.enter_async_context(_gateway(config, server.target, children))
        duties = [desk.run(), _must_live(gateway)]
        if config.agent_command:
            duties += [_kept_running(config, number, addresses, desk, children) for number in range(config.agents)]
        else:
            sys.stderr.write(
                f"agents may connect: gRPC {addresses['SLUICE_GATEWAY']}, HTTP {addresses['SLUICE_GATEWAY_URL']}, run {config.run}\n"
            )
        running = asyncio.ensure_future(_all(duties))
        stack.push_async_callback(settle, running)
        stack.callback(running.cancel)
        stack.callback(
            desk.end
        )  # first: agents that wait for a task learn that there is none, and have a moment to end
        yield ExternalEvaluation(environment.name, environment, desk, groups), running


@contextlib.asynccontextmanager
async def _gateway(
    config: EvalConfig, orchestrator: str, children: Children
) -> AsyncIterator[tuple[Child, Mapping[str, str]]]:
    """Start a gateway, on any ports if the usual ones are taken; yield it, with the environment variables that tell agents where it is.

    Raises:
        ConfigError: if it does not start.
    """
    for ports in (_ANY_PORTS if config.agent_command else _GATEWAY_PORTS, _ANY_PORTS):
        argv = [sys.executable, "-m", "sluice.cli.main", "gateway"]
        for name, value in _gateway_settings(config, orchestrator, children, *ports).items():
            argv += [f"--{name}", value]
        async with children.started("gateway", argv) as gateway:
            try:
                grpc_port, http_port = await until_serving(
                    gateway, asyncio.create_task(_serving(gateway)), config.start_s
                )
            except BindError:
                if ports == _ANY_PORTS:
                    raise
                continue
            yield (
                gateway,
                {
                    "SLUICE_GATEWAY": f"{LOOPBACK}:{grpc_port}",
                    "SLUICE_GATEWAY_URL": f"http://{LOOPBACK}:{http_port}",
                    "SLUICE_RUN": config.run,
                },
            )
            return


def _gateway_settings(
    config: EvalConfig, orchestrator: str, children: Children, port: int, http_port: int
) -> Mapping[str, str]:
    return {
        "run": config.run,
        "output_dir": str(children.directory),
        "log_level": "info",  # it logs where it listens
        "peers.orchestrator": orchestrator,
        "gateway.server.host": LOOPBACK,
        "gateway.server.port": str(port),
        "gateway.server.http_port": str(http_port),
        **{f"gateway.{name}": str(value) for name, value in config.gateway.items()},
    }


async def _serving(gateway: Child) -> tuple[str, str]:
    """Wait until a gateway serves; return its ports, of gRPC and of HTTP."""
    target, url = [await gateway.logged("listening", field) for field in ("target", "url")]
    await wait_until_serving(target, SecurityConfig())
    return target.rpartition(":")[2], url.rpartition(":")[2]


async def _all(duties: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run background tasks until cancelled; raise what the first one raises."""
    tasks = [asyncio.create_task(each) for each in duties]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for each in done:
            each.result()
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _kept_running(
    config: EvalConfig, number: int, addresses: Mapping[str, str], desk: Desk, children: Children
) -> None:
    """Run the command of the agents. Run it again when it exits with 0: it may play one episode only.

    Raises:
        ConfigError: if it fails, or exits `_QUICK` times in a row without having begun an episode.
    """
    name = "agent" if config.agents == 1 else f"agent {number}"
    fruitless = 0
    while True:
        before = desk.journal.ledger.last_seq
        argv = ["sh", "-c", config.agent_command]
        async with children.started(name, argv, {**os.environ, **addresses}) as agent:
            try:
                code = await agent.ended()
            except asyncio.CancelledError:
                if desk.ended:
                    await agent.stop(_FAREWELL_S)
                raise
            if desk.ended:
                return
            if code:
                raise ConfigError(await agent.died())
            fruitless = 0 if desk.journal.ledger.last_seq > before else fruitless + 1
            if fruitless >= _QUICK:
                raise ConfigError(
                    f"{await agent.died()}\nit ended {fruitless} times in a row, and began no episode: it must lease tasks at"
                    " $SLUICE_GATEWAY (gRPC) or $SLUICE_GATEWAY_URL (HTTP), of the run $SLUICE_RUN"
                )


class Child:
    """A running process.

    Attributes:
        name: What it is, for messages.
    """

    def __init__(self, name: str, process: Spawned, log_path: Path, log_start: int) -> None:
        self.name = name
        self._process, self._log_path, self._log_start = process, log_path, log_start

    async def ended(self) -> int:
        """Wait for its end; return its exit code."""
        return await self._process.wait()

    async def died(self) -> str:
        """Wait for its end; return why, with the last lines of its log."""
        code = await self.ended()
        lines = self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join([f"the {self.name} ended with exit code {code}; its last lines:", *lines])

    async def logged(self, event: str, field: str) -> str:
        """Wait until it has logged an event with a field; return the field."""
        while True:
            with self._log_path.open("rb") as log:
                log.seek(self._log_start)
                lines = log.read().splitlines(keepends=True)
            for line in lines:
                record = json.loads(line) if line.startswith(b"{") and line.endswith(b"\n") else {}
                if record.get("event") == event and field in record:
                    return str(record[field])
            await asyncio.sleep(_LOOK_S)

    async def stop(self, patience_s: float = 0.0) -> None:
        """Wait `patience_s` seconds for its end, then send SIGTERM. After `_STOP_S`, send SIGKILL to it and to what it started."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._process.wait()
        if self._process.returncode is None:
            self._process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await self._process.wait()
        with contextlib.suppress(ProcessLookupError):  # its own session, which is empty after an orderly end
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()


class Children:
    """Starts processes, and keeps their logs in a directory until the evaluation has ended."""

    def __init__(self, watchdog: Watchdog, directory: Path) -> None:
        self.directory = directory
        self._watchdog = watchdog

    @classmethod
    @contextlib.asynccontextmanager
    async def ending_with_this(cls) -> AsyncIterator[Children]:
        """Yield an object whose processes end with the block, even if this process is killed."""
        with tempfile.TemporaryDirectory(prefix="sluice-eval-") as directory:
            watchdog = await Watchdog.start()
            try:
                yield cls(watchdog, Path(directory))
            finally:
                await watchdog.stop()

    @contextlib.asynccontextmanager
    async def started(
        self, name: str, argv: Sequence[str], environment: Mapping[str, str] | None = None, *, patience_s: float = 0.0
    ) -> AsyncIterator[Child]:
        """Start a process; end it with the block, after it had `patience_s` seconds to end by itself."""
        log_path = self.directory / f"{name.replace(' ', '-')}.log"
        with log_path.open("ab") as output:
            log_start = output.tell()
            process = await self._watchdog.start_child(argv, stdout=output, stderr=output, environment=environment)
        child = Child(name, process, log_path, log_start)
        try:
            yield child
        finally:
            await child.stop(patience_s)
            self._watchdog.note("-", process.pid)


async def until_serving(child: Child, waiting: asyncio.Task[T], deadline_s: float) -> T:
    """Wait until a child serves.

    Args:
        child: The process.
        waiting: Is done when the process serves; its result is returned.
        deadline_s: Seconds to wait.

    Raises:
        BindError: if it died because it cannot listen at its address.
        ConfigError: if it died for another reason, or does not serve in time.
    """
    died = asyncio.create_task(child.died())
    try:
        await asyncio.wait({died, waiting}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        if died.done():
            raise (BindError if await child.ended() == EXIT_BIND else ConfigError)(died.result())
        if not waiting.done():
            raise ConfigError(f"the {child.name} does not serve within {deadline_s:g} s (--start-s)")
        return waiting.result()
    finally:
        died.cancel()
        waiting.cancel()
