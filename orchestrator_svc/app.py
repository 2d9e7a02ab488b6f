"""`sluice orchestrator`: build the run, serve its control, and end with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from orchestrator_svc.config import OrchestratorConfig
from orchestrator_svc.dispatch import Dispatcher, EpisodeRunner, TaskStream
from orchestrator_svc.envs.base import Environment, MultiTurnEnvironment, SingleTurnEnvironment, Task
from orchestrator_svc.envs.calls import EnvironmentCalls
from orchestrator_svc.envs.loading import load_environment
from orchestrator_svc.envs.scoring import Scorer
from orchestrator_svc.evaluation import Evaluations
from orchestrator_svc.journal import Journal, JournalError, LiveTrajectories
from orchestrator_svc.notifier import Notifier
from orchestrator_svc.recorder import Recorder
from orchestrator_svc.replicas import PolicyEngine, Replica, ReplicaPool
from orchestrator_svc.reporter import RunReporter
from orchestrator_svc.run import Checkpoints, Run
from orchestrator_svc.scheduler import OnStale, Scheduler
from orchestrator_svc.servicer import OrchestratorServicer
from orchestrator_svc.staleness import StalenessBound
from orchestrator_svc.status import EventLog, RunStatus, TrajectoryHistory, replica_event
from orchestrator_svc.training import TrainerLink, Training
from orchestrator_svc.workflows import choose_workflow
from sluice.client import TrainerClient
from sluice.config import CommonConfig, ConfigError, FailedForGoodError, Service, UnfinishedError
from sluice.rpc import RpcServer, SluiceError
from sluice.v1 import orchestrator_pb2_grpc

__all__ = ["SERVICE"]

SERVICE_NAME = "sluice.v1.OrchestratorService"
EPISODE_SERVICE_NAME = "sluice.v1.EpisodeService"


async def serve(common: CommonConfig, config: OrchestratorConfig) -> None:
    """Run the run; return when it has ended and its watchers know.

    Raises:
        ConfigError: if settings, environment or an existing run do not fit.
        FailedForGoodError: if the run was given up; it says why.
        UnfinishedError: if a signal ended it early.
    """
    config.check_start(common)
    environment = load_environment(config.environment, config.environment_args)
    async with _built(common, config, environment) as (run, status, servicer):
        server = _server(common, config, servicer)
        await server.start()
        ended = asyncio.Event()
        running = asyncio.create_task(_to_the_end(run, status.events, config.deadlines.watchers_s, ended), name="run")
        try:
            await server.serve_until_signal(ended)
        except asyncio.CancelledError:
            await server.stop(0)
            raise
        finally:
            running.cancel()
            await asyncio.wait({running})
        if running.cancelled():
            raise UnfinishedError("a signal came before the last step; start the run again to continue it")
        try:
            running.result()
        except SluiceError as error:
            # The run has waited for whatever waiting could cure.
            raise FailedForGoodError(str(error)) from error


async def _to_the_end(run: Run, events: EventLog, watchers_s: float, ended: asyncio.Event) -> None:
    """Run, and let the watchers read the last event before the server stops."""
    try:
        await run.run()
    finally:
        events.end()
        await events.all_read(watchers_s)
        ended.set()


def _server(common: CommonConfig, config: OrchestratorConfig, servicer: OrchestratorServicer) -> RpcServer:
    server = RpcServer(
        "orchestrator", config.server, common.security, features=[f"workflow.{config.workflow}"], run=common.run
    )
    add = orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server
    server.add(add, servicer, SERVICE_NAME, role="admin")
    # External agents come later: the contract is there, each of its methods answers UNIMPLEMENTED.
    add_episodes = orchestrator_pb2_grpc.add_EpisodeServiceServicer_to_server
    episodes = orchestrator_pb2_grpc.EpisodeServiceServicer()  # type: ignore[abstract]
    server.add(add_episodes, episodes, EPISODE_SERVICE_NAME, role="agent")
    return server


@contextlib.asynccontextmanager
async def _built(
    common: CommonConfig, config: OrchestratorConfig, environment: SingleTurnEnvironment | MultiTurnEnvironment
) -> AsyncIterator[tuple[Run, RunStatus, OrchestratorServicer]]:
    """Build the run and all that it needs; what has files or processes is closed in reverse order."""
    calls = EnvironmentCalls(config.environment_threads, config.deadlines.environment_s)
    workflow = choose_workflow(config, environment, calls)
    async with contextlib.AsyncExitStack() as stack:
        journal = _journal(common, config)
        stack.push_async_callback(journal.close)
        trajectories = LiveTrajectories(journal)
        request_prefix = f"{common.run}/{journal.start}"

        changed, events = Notifier(), EventLog(journal.start)

        def on_replica(replica: Replica) -> None:
            events.append(replica_event(replica))
            changed.notify()

        pool = ReplicaPool(common.peers.rollout, common.security, config.replicas, on_replica)
        engine = PolicyEngine(pool, common.run, config.deadlines.generate_s)
        scheduler = Scheduler(
            StalenessBound(common.max_staleness, config.batch_size, config.max_concurrent),
            window_fraction=config.window_fraction,
            on_stale=OnStale(config.on_stale),
            max_steps=config.max_steps,
            max_running=config.max_running,
        )
        status = RunStatus(common.run, scheduler, pool, config.max_steps, events)
        recorder = Recorder(common.run_dir, write_text=config.write_trajectories)
        stack.push_async_callback(recorder.close)

        scorer = None
        if isinstance(environment, SingleTurnEnvironment):
            scorer = await stack.enter_async_context(
                Scorer(config.environment, config.environment_args, **config.reward.model_dump())
            )
        try:
            stream = TaskStream(await _tasks(environment, config, config.split, common.seed), common.seed)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        dispatcher = Dispatcher(
            config=config,
            scheduler=scheduler,
            journal=journal,
            trajectories=trajectories,
            status=status,
            pool=pool,
            episodes=EpisodeRunner(workflow, engine, scorer, config, common.seed),
            tasks=stream,
            request_prefix=request_prefix,
            changed=changed,
        )

        client = await stack.enter_async_context(TrainerClient(common.peers.trainer, common.security))
        trainer = TrainerLink(client, common.run, config.deadlines)
        training = Training(
            common=common,
            config=config,
            scheduler=scheduler,
            journal=journal,
            trajectories=trajectories,
            status=status,
            trainer=trainer,
            pool=pool,
            requeue=dispatcher.requeue,
            changed=changed,
        )
        evaluations = None
        if config.evaluation.every_steps:
            evaluations = Evaluations(
                pool=pool,
                engine=engine,
                workflow=workflow,
                scorer=scorer,
                tasks=await _tasks(environment, config, config.evaluation.split, common.seed),
                config=config,
                request_prefix=request_prefix,
                status=status,
                recorder=recorder,
            )
        history = TrajectoryHistory()
        run = Run(
            config=config,
            scheduler=scheduler,
            journal=journal,
            status=status,
            pool=pool,
            dispatcher=dispatcher,
            training=training,
            checkpoints=Checkpoints(trainer, journal, status, config),
            evaluations=evaluations,
            reporter=RunReporter(
                common=common,
                config=config,
                scheduler=scheduler,
                status=status,
                history=history,
                recorder=recorder,
                pool=pool,
                counts=engine.counts,
                calls=calls,
            ),
        )
        yield run, status, OrchestratorServicer(common.run, run, status, history, pool)


async def _tasks(environment: Environment, config: OrchestratorConfig, split: str, seed: int) -> Sequence[Task]:
    """Let the environment list the tasks of a split.

    Raises:
        ConfigError: if it does not end in time.
    """
    limit_s = config.deadlines.start_s
    try:
        return await EnvironmentCalls(1, limit_s).run(environment.tasks, split, seed)
    except TimeoutError as error:
        raise ConfigError(
            f"environment {config.environment} did not list the tasks of split {split} within {limit_s:g} s: prepare its"
            " data before the run, or raise orchestrator.deadlines.start_s"
        ) from error


def _journal(common: CommonConfig, config: OrchestratorConfig) -> Journal:
    """Open the run's journal.

    Raises:
        ConfigError: if there is one and it does not belong to this run, or the run is not to be resumed.
    """
    try:
        journal = Journal(
            common.run_dir,
            {"run": common.run, "seed": str(common.seed), "environment": config.environment, "split": config.split},
            fsync_interval_s=config.journal.fsync_interval_ms / 1000,
            segment_bytes=config.journal.segment_mb << 20,
            queue_records=config.journal.queue_records,
        )
    except JournalError as error:
        raise ConfigError(str(error)) from error
    if journal.resumes and config.existing_run == "refuse":
        raise ConfigError(
            f'run {common.run!r} exists in {common.run_dir} (orchestrator.existing_run = "refuse"):'
            ' choose another name with --run NAME, or set it to "resume"'
        )
    return journal


SERVICE = Service("orchestrator", OrchestratorConfig, serve)
