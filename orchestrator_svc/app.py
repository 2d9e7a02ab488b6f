"""`sluice orchestrator`: build the run, serve its control, and end with it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import os
import sys
import threading
import tomllib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import grpc
import structlog
from google.protobuf.duration_pb2 import Duration

from orchestrator_svc.announcements import Announcements
from orchestrator_svc.config import EXTERNAL, OrchestratorConfig
from orchestrator_svc.journal.ledger import Group
from orchestrator_svc.journal.segments import JournalError
from orchestrator_svc.journal.snapshot import Snapshots
from orchestrator_svc.journal.store import Journal, JournalLimits
from orchestrator_svc.run.curriculum import Curriculum, release_fact
from orchestrator_svc.run.dispatch import Dispatcher
from orchestrator_svc.run.evaluation import Evaluated, Evaluations
from orchestrator_svc.run.external import External
from orchestrator_svc.run.free_space import DiskWatch, FreeSpace
from orchestrator_svc.run.live_settings import LiveSettings
from orchestrator_svc.run.recorder import DroppedFile, Recorder, TrajectoryFiles
from orchestrator_svc.run.report import RunReporter
from orchestrator_svc.run.run import Run
from orchestrator_svc.run.scheduler import OnStale, Pace, Scheduler, StalenessBound
from orchestrator_svc.run.setting_aside import SetAsideShare
from orchestrator_svc.run.status import EventLog, RunStatus, replica_event
from orchestrator_svc.run.trainer_link import TrainerLink
from orchestrator_svc.run.training import Training
from orchestrator_svc.run.workflows import GroupRunner, RolloutWorkflow, Sampling, choose_filter, choose_workflow
from orchestrator_svc.sessions.desk import Desk, Posed, Waiting, run_secret
from orchestrator_svc.sessions.exchange import SESSIONS
from orchestrator_svc.sessions.servicer import EPISODES, EpisodeServicer, SessionServicer
from sluice import host_files
from sluice.client import TrainerClient
from sluice.clock import CLOCK, Clock
from sluice.config import CommonConfig, ConfigError, FailedForGoodError, Service, UnfinishedError
from sluice.environments.processes import EnvironmentProcesses
from sluice.file_systems import check_file_system, no_locks
from sluice.peers import missing_peers_reported
from sluice.rpc import RpcServer, SluiceError
from sluice.rpc.access import caller, is_local_peer
from sluice.rpc.readiness import Later
from sluice.sampling.lockstep import Lockstep
from sluice.sampling.policy import PolicyEngine
from sluice.sampling.pool import ReplicaPool
from sluice.sampling.replica import Replica
from sluice.telemetry import StateMetrics
from sluice.v1 import episode_pb2_grpc, journal_pb2, orchestrator_pb2_grpc, session_pb2_grpc
from sluice.v1 import orchestrator_pb2 as pb
from sluice.watch.files import watch_of

log = structlog.get_logger(__name__)

SERVICE_NAME = "sluice.v1.OrchestratorService"

_NAME_CHARACTERS = 255

LOCK_FILE = ".orchestrator.lock"
"""File in a run's directory that its orchestrator holds locked."""

_LEAST_END_S = 1.0
"""Least seconds that the run gets to write its last records, even if the calls in progress took all of ``server.drain_s``. `sluice rl`
kills the process two seconds after ``server.drain_s``."""

_COLLECTIONS = (200, 2, 13_000)
"""Thresholds of the garbage collector, by generation. A collection blocks the event loop and frees next to nothing: one object in 3,000. So
young generations are small, 1 to 5 ms of work. A full collection visits all objects in use: 50 ms with 10,000 episodes and 450 ms with
50,000. So there is one per 8 million new objects, which is every ten minutes at 1,000 episodes a second."""

_SWITCH_S = 0.0005
"""Seconds after which a computing thread must release the interpreter lock. The event loop needs the lock after each system call, while the
threads of journal and files may hold it."""

_READING = "the orchestrator reads its journal, which takes longer the older the run is: repeat the call"

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


async def serve(common: CommonConfig, config: OrchestratorConfig, clock: Clock = CLOCK) -> None:
    """Run the run; return when it has ended and its watchers know.

    Args:
        common: Settings that all services of the run share.
        config: Settings of the orchestrator.
        clock: Times the run's deadlines, its pace and the calls of its environments. Replicas are polled in real time.

    Raises:
        ConfigError: if settings, environment or an existing run do not fit.
        FailedForGoodError: if the run was given up; it says why.
        UnfinishedError: if a signal ended it early.
        TooMuchSetAsideError: if it paused because too much was set aside, and nobody resumed it.
    """
    try:
        servicers = _Servicers(
            Later(OrchestratorServicer, _READING),
            Later(SessionServicer, _READING),
            Later(EpisodeServicer, _READING),  # type: ignore[type-abstract]  # gateways sample: it has no Generate
        )
        server = _server(common, config, servicers)
        async with asyncio.timeout(None) as ending, _built(common, config, clock, server, servicers) as (run, status):
            gc.collect()
            gc.freeze()  # objects loaded so far stay: later collections skip them
            gc.set_threshold(*_COLLECTIONS)
            sys.setswitchinterval(_SWITCH_S)
            server.readiness.add(status.waits_for_others)
            await server.set_serving(True)
            ended = asyncio.Event()
            running = asyncio.create_task(
                _to_the_end(run, status.events, config.deadlines.watchers_s, ended, stays=config.serve_after_end),
                name="run",
            )

            async def leave(_grace_s: float) -> None:
                """Start nothing more, unless the server stops because the run has ended."""
                if not ended.is_set():
                    run.leave()

            left_s = 0.0
            try:
                with StateMetrics(status.scrape):
                    async with missing_peers_reported(
                        {"trainer": common.peers.trainer}, common, server, gives_up=False
                    ):
                        left_s = await server.serve_until_signal(ended, leave)
            except asyncio.CancelledError:
                await server.stop(0)
                raise
            finally:
                end = asyncio.get_running_loop().time() + max(left_s, _LEAST_END_S)
                running.cancel()
                _, late = await asyncio.wait({running}, timeout=max(left_s, _LEAST_END_S))
                if late:
                    running.cancel()  # again: it waits for the disk to take its report
                    end += _LEAST_END_S / 2
                ending.reschedule(end)
    except TimeoutError:
        if not ending.expired():
            raise
        what = "the run's files could not be closed in time"
        if not running.done() or running.cancelled():
            what = "the last records were not written in time and are given up; the run samples them again when it continues"
        log.error(what, path=str(common.run_dir))  # noqa: TRY400 - the message is complete
    if running.cancelled() or not running.done():
        raise UnfinishedError("a signal came before the last step; start the run again to continue it")
    try:
        running.result()
    except SluiceError as error:
        # The run has already waited for everything that waiting can cure.
        raise FailedForGoodError(str(error)) from error


async def _to_the_end(run: Run, events: EventLog, watchers_s: float, ended: asyncio.Event, *, stays: bool) -> None:
    """Run, and let the watchers read the last event before the server stops. With `stays` it stops after a failure only."""
    stop = True
    try:
        await run.run()
        stop = not stays
        if run.gave_up is not None:
            stop = True
            raise run.gave_up
    finally:
        events.end()
        await events.all_read(watchers_s)
        if stop:
            ended.set()
        else:
            log.info("the run has ended; its state is served until a signal", setting="orchestrator.serve_after_end")


def _server(common: CommonConfig, config: OrchestratorConfig, servicers: _Servicers) -> RpcServer:
    server = RpcServer(
        "orchestrator",
        config.server,
        common.security,
        features=sorted({f"workflow.{each.workflow}" for each in config.mix}),
        run=common.run,
        call_log=common.run_dir / "calls/orchestrator.jsonl",
    )
    add = orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server
    server.add(add, servicers.orchestrator.registered, SERVICE_NAME)
    server.add(session_pb2_grpc.add_SessionServiceServicer_to_server, servicers.sessions.registered, SESSIONS)
    server.add(episode_pb2_grpc.add_EpisodeServiceServicer_to_server, servicers.episodes.registered, EPISODES)
    server.set_serving(False, "its journal, which it reads")
    return server


@contextlib.contextmanager
def only_writer(directory: Path) -> Iterator[None]:
    """Keep other orchestrators out of a run's directory while the block lasts: two would write one journal.

    On a cluster, an orchestrator may still run on a machine that was given up when another one starts elsewhere.

    Raises:
        SluiceError: FAILED_PRECONDITION if there is another one.
        ConfigError: if the file system has no file locks, or the journal cannot work there for another reason.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _check_file_system(directory)
    lock = host_files.open_private(directory / LOCK_FILE, os.O_CREAT | os.O_RDWR)
    try:
        try:
            is_only = host_files.lock_now(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise ConfigError(no_locks(directory, error)) from error
        if not is_only:
            raise SluiceError.failed_precondition(
                "RUN_IN_USE",
                f"another orchestrator writes the run in {directory}: stop it, or wait until its machine has ended it",
            )
        yield
    finally:
        host_files.close(lock)


@contextlib.asynccontextmanager
async def _opened(server: RpcServer, run_dir: Path) -> AsyncIterator[None]:
    """Open the port of the only orchestrator of a run's directory while the block lasts."""
    with only_writer(run_dir):
        await server.start()
        try:
            yield
        finally:
            await server.stop(0)


def _check_file_system(directory: Path) -> None:
    """Refuse a file system on which a journal cannot work. Warn about a network file system, on which a journal may fail."""
    problem = check_file_system(directory)
    if problem is None:
        return
    if problem.fatal:
        raise ConfigError(f"{problem.found}: {problem.remedy}")
    log.warning("the run's directory is on a network file system", problem=problem.found, remedy=problem.remedy)


@contextlib.asynccontextmanager
async def _built(
    common: CommonConfig, config: OrchestratorConfig, clock: Clock, server: RpcServer, servicers: _Servicers
) -> AsyncIterator[tuple[Run, RunStatus]]:
    """Build the run and its parts; those with files or processes are closed in reverse order. The port is open before the journal is read."""
    start_limit = (config.deadlines.start_s, "orchestrator.deadlines.start_s")
    async with contextlib.AsyncExitStack() as stack:
        processes = {
            each.name: await stack.enter_async_context(
                EnvironmentProcesses(
                    each.environment,
                    each.args,
                    each.environment_processes,
                    start_limit,
                    group_size=each.group_size,
                    clock=clock,
                )
            )
            for each in config.mix
        }
        workflows: dict[str, RolloutWorkflow] = {
            each.name: choose_workflow(each, processes[each.name]) for each in config.mix if each.workflow != EXTERNAL
        }
        try:
            tasks = [(each, await processes[each.name].tasks(each.split, common.seed)) for each in config.mix]
            curriculum = Curriculum(tasks, common.seed)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        # Pacing by the clock would start other groups in each run.
        pacing = config.pacing.model_copy(update={"enabled": False}) if common.deterministic else config.pacing
        pace = Pace(pacing, config.batch_size)
        share = SetAsideShare(config.max_set_aside, config.batch_size * max(each.group_size for each in config.mix))

        followers = _Followers(curriculum, pace, share, Waiting(clock), clock)

        await stack.enter_async_context(_opened(server, common.run_dir))
        journal = await _read(partial(_journal, common, config, followers))
        settings = LiveSettings(common, config)
        settings.restore(journal.ledger.settings)
        if config.release_quarantine:
            _release(journal, curriculum)
        recorder = _recorder(common, config)
        await stack.enter_async_context(_files_open(journal, recorder))

        posed = partial(_posed, curriculum)
        desk = Desk(
            journal,
            config.external,
            followers.waiting,
            run_secret(common.run_dir),
            posed=posed,
            environments={each.name for each in config.mix if each.workflow == EXTERNAL},
            most_reward=config.max_reward,
            clock=clock,
        )
        workflows |= {
            each.name: External(processes[each.name], desk, config.external)
            for each in config.mix
            if each.workflow == EXTERNAL
        }
        changed, events = asyncio.Event(), EventLog(journal.ledger.start, recorder.write_event)

        def on_replica(replica: Replica) -> None:
            events.append(replica_event(replica))
            changed.set()

        pool = ReplicaPool(
            common.peers.rollout,
            common.security,
            config.replicas,
            on_replica,
            # A limit that adapts to measured load would differ between two runs.
            concurrency=config.concurrency.model_copy(update={"adapt": False})
            if common.deterministic
            else config.concurrency,
            group=max(each.group_size for each in config.mix),
        )
        announcements = Announcements(pool, config.replicas)
        lockstep = Lockstep(pool, changed.set) if common.deterministic else None
        engine = PolicyEngine(pool, common.run, config.deadlines.generate_s, lockstep=lockstep)
        runners = {
            each.name: GroupRunner(
                workflows[each.name], engine, common.seed, common.run, should_accept=choose_filter(each.filter)
            )
            for each in config.mix
        }
        scheduler = Scheduler(
            journal.ledger,
            StalenessBound(common.max_staleness, config.batch_size, config.max_concurrent),
            window_fraction=config.window_fraction,
            on_stale=OnStale(config.on_stale),
            max_steps=config.max_steps,
            max_running=config.max_running,
        )
        status = RunStatus(
            common.run,
            config,
            scheduler,
            pool,
            events,
            curriculum=curriculum,
            refusals=desk.lending.refusals,
            missing=desk.missing,
            watch=await asyncio.to_thread(watch_of, common),
            clock=clock,
        )
        reporter = RunReporter(common, config, journal.ledger, status, recorder, engine=engine, environments=processes)
        evaluations = None
        if config.evaluation.wanted:
            # An evaluation is not continued, so a later process must not get the answers of this one.
            prefix = f"{common.run}/{journal.ledger.start}"
            evaluated = [
                Evaluated(
                    each,
                    replace(runners[each.name], request_prefix=prefix),
                    (await processes[each.name].tasks(config.evaluation.split, common.seed))[
                        : config.evaluation.prompts
                    ],
                )
                for each in config.mix
            ]
            evaluations = Evaluations(config, pool, evaluated, journal, reporter, clock=clock)
        client = await stack.enter_async_context(TrainerClient(common.peers.trainer, common.security))
        trainer = TrainerLink(client, common.run, config.deadlines, clock)
        disks = stack.enter_context(
            DiskWatch(_directories(common), FreeSpace(config.disk.min_free_mb << 20), changed, clock=clock)
        )
        dispatcher = Dispatcher(
            config,
            scheduler,
            journal,
            status,
            curriculum,
            pace=pace,
            runners=runners,
            space=disks.space,
            desk=desk,
            recorder=recorder,
            changed=changed,
            clock=clock,
        )
        training = Training(
            config,
            scheduler,
            journal,
            status,
            curriculum,
            trainer=trainer,
            pool=pool,
            space=disks.space,
            recorder=recorder,
            changed=changed,
            clock=clock,
        )
        run = Run(
            settings,
            journal,
            status,
            pool,
            announcements=announcements,
            dispatcher=dispatcher,
            training=training,
            evaluations=evaluations,
            reporter=reporter,
            desk=desk,
            share=share,
            disks=disks,
            clock=clock,
        )
        servicers.ready(
            OrchestratorServicer(common.run, run, status, announcements),
            SessionServicer(desk, pool),
            EpisodeServicer(  # type: ignore[abstract]  # gateways sample: it has no Generate
                common.run, desk, offers=any(each.workflow == EXTERNAL for each in config.mix)
            ),
        )
        yield run, status


def _recorder(common: CommonConfig, config: OrchestratorConfig) -> Recorder:
    settings = _settings(common, config)
    if not config.write_trajectories:
        return Recorder(common.run_dir, None, settings=settings)
    directory, disk = common.run_dir / "trajectories", config.disk
    dropped = DroppedFile(directory, disk.dropped_mb << 20) if disk.dropped_mb else None
    texts = TrajectoryFiles(directory, disk.trajectories_mb << 20)
    return Recorder(common.run_dir, texts, dropped, with_tokens=config.write_tokens, settings=settings)


def _settings(common: CommonConfig, config: OrchestratorConfig) -> dict[str, Any]:
    """Return the run's settings. Those of the other services are known only where `sluice rl` wrote them beside the run."""
    try:
        written = tomllib.loads((common.run_dir / "config.toml").read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError):
        written = {}
    return {**written, **common.model_dump(mode="json"), "orchestrator": config.model_dump(mode="json")}


def _release(journal: Journal, curriculum: Curriculum) -> None:
    """Let all tasks in quarantine be drawn again."""
    for environment, task_id in curriculum.quarantined:
        journal.record_fact(release_fact(environment, task_id))
        log.info("a task is drawn again (orchestrator.release_quarantine)", environment=environment, task=task_id)


def _directories(common: CommonConfig) -> list[Path]:
    """Return the directories on this machine that the run writes to. Each may be on another file system."""
    versions = getattr(getattr(common, "weightsync", None), "directory", None)
    weights = common.run_dir / "weights" if versions is None else versions / common.run
    return [common.run_dir, common.run_dir / "checkpoints", weights]


class _Followers(NamedTuple):
    """All objects that follow the facts, except the ledger."""

    curriculum: Curriculum
    pace: Pace
    share: SetAsideShare
    waiting: Waiting
    clock: Clock

    def apply_fact(self, fact: journal_pb2.Fact) -> None:
        """Hand them the next fact."""
        self.curriculum.apply_fact(fact)
        self.pace.apply_fact(fact, self.clock())
        self.share.apply_fact(fact)
        self.waiting.follow(fact)

    def snapshots(self, seed: int, config: OrchestratorConfig) -> Snapshots:
        """Return the object that saves and restores the states which outlast a restart."""
        settings = [str(seed)]
        for each in config.mix:
            settings += [each.model_dump_json(), *self.curriculum.stream(each.name).task_ids]
        return Snapshots((self.curriculum, self.share), settings)


def _posed(curriculum: Curriculum, group: Group) -> Posed | None:
    """Return the task of a group and how it is sampled; None if its environment no longer lists the task."""
    task = curriculum.task(group.environment, group.task_id, group.position)
    sampling = Sampling(**curriculum.environments[group.environment].sampling.model_dump())
    if task is None:
        return None
    return Posed(task, sampling.params(task.max_tokens), chat_template_kwargs=sampling.chat_template_kwargs)


class _Servicers(NamedTuple):
    """The services of the orchestrator. They answer once it has read its journal."""

    orchestrator: Later[OrchestratorServicer]
    sessions: Later[SessionServicer]
    episodes: Later[EpisodeServicer]

    def ready(self, orchestrator: OrchestratorServicer, sessions: SessionServicer, episodes: EpisodeServicer) -> None:
        """Answer the calls from now on."""
        self.orchestrator.servicer, self.sessions.servicer, self.episodes.servicer = orchestrator, sessions, episodes


@contextlib.asynccontextmanager
async def _files_open(journal: Journal, recorder: Recorder) -> AsyncIterator[None]:
    """Show the state of the journal while the block lasts, and close the run's files behind it."""
    try:
        with StateMetrics(journal.scrape):
            yield
    finally:
        await _close_files(journal, recorder)


async def _close_files(journal: Journal, recorder: Recorder) -> None:
    """Close both in parallel, so that both are given up together at the deadline."""
    outcomes = await asyncio.gather(journal.close(), recorder.close(), return_exceptions=True)
    for outcome in outcomes:
        if outcome is not None:
            raise outcome


async def _read(journal: Callable[[threading.Event], Journal]) -> Journal:
    """Open the journal in a thread: for an old run this reads a million facts, and calls and signals must be answered meanwhile.

    A cancellation stops the reading and waits for its end, so that nothing is written after the run's lock is released.
    """
    given_up = threading.Event()
    reading = asyncio.ensure_future(asyncio.to_thread(journal, given_up))
    try:
        return await asyncio.shield(reading)
    except asyncio.CancelledError:
        given_up.set()
        await asyncio.wait({reading}, timeout=_LEAST_END_S)
        if reading.done() and reading.exception() is None:  # it had finished before
            await reading.result().close()
        elif not reading.done():
            log.warning("the disk does not let the reading of the journal end")
        raise


def _journal(
    common: CommonConfig, config: OrchestratorConfig, followers: _Followers, given_up: threading.Event
) -> Journal:
    """Open the run's journal, whose facts the followers get.

    Raises:
        ConfigError: if there is one and it does not belong to this run, or the run is not to be resumed.
    """
    try:
        journal = Journal(
            common.run_dir,
            {
                "run": common.run,
                "seed": str(common.seed),
                "environment": ", ".join(each.environment for each in config.mix),
                "split": ", ".join(each.split for each in config.mix),
            },
            environment=config.mix[0].name,
            software_version=version("sluice"),
            limits=JournalLimits(
                segment_bytes=config.journal.segment_mb << 20, queue_bytes=config.journal.queue_mb << 20
            ),
            follow=followers.apply_fact,
            snapshots=followers.snapshots(common.seed, config),
            given_up=given_up,
        )
    except JournalError as error:
        raise ConfigError(str(error)) from error
    if journal.resumes and config.existing_run == "refuse":
        raise ConfigError(
            f'run {common.run!r} exists in {common.run_dir} (orchestrator.existing_run = "refuse"):'
            ' choose another name with --run NAME, or set it to "resume"'
        )
    return journal


class OrchestratorServicer(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Serves OrchestratorService for one run."""

    def __init__(self, name: str, run: Run, status: RunStatus, announcements: Announcements) -> None:
        self._name, self._run, self._status, self._announcements = name, run, status, announcements

    async def GetRun(self, request: pb.GetRunRequest, _context: Context) -> pb.GetRunResponse:  # noqa: N802 - gRPC's name
        """Describe the run."""
        self._check_run(request.run)
        return pb.GetRunResponse(run=self._status.describe())

    async def WatchRun(self, request: pb.WatchRunRequest, _context: Context) -> AsyncIterator[pb.WatchRunResponse]:  # noqa: N802 - gRPC's name
        """Stream the run's events until it has ended."""
        self._check_run(request.run)
        async for event in self._status.events.follow(request.from_sequence_no):
            yield pb.WatchRunResponse(event=event)

    async def PauseRun(self, request: pb.PauseRunRequest, _context: Context) -> pb.PauseRunResponse:  # noqa: N802 - gRPC's name
        """Start no more groups."""
        self._check_run(request.run)
        self._run.pause()
        return pb.PauseRunResponse(run=self._status.describe())

    async def ResumeRun(self, request: pb.ResumeRunRequest, _context: Context) -> pb.ResumeRunResponse:  # noqa: N802 - gRPC's name
        """Start groups again."""
        self._check_run(request.run)
        await self._run.resume(caller().name)
        return pb.ResumeRunResponse(run=self._status.describe())

    async def StopRun(self, request: pb.StopRunRequest, _context: Context) -> pb.StopRunResponse:  # noqa: N802 - gRPC's name
        """End the run in order."""
        self._check_run(request.run)
        self._run.stop(request.reason)
        return pb.StopRunResponse(run=self._status.describe())

    async def SetRun(self, request: pb.SetRunRequest, _context: Context) -> pb.SetRunResponse:  # noqa: N802 - gRPC's name
        """Change settings of the live run."""
        self._check_run(request.run)
        return pb.SetRunResponse(changed=await self._run.change_settings(request.values, caller().name))

    async def RegisterReplica(  # noqa: N802 - gRPC's name
        self, request: pb.RegisterReplicaRequest, context: Context
    ) -> pb.RegisterReplicaResponse:
        """Use a replica that announces itself."""
        self._check_run(request.run)
        for field, value in (("replica", request.replica), ("address", request.address)):
            if not value or len(value) > _NAME_CHARACTERS or not value.isprintable():
                raise SluiceError.invalid_argument(field, f"give 1 to {_NAME_CHARACTERS} printable characters")
        self._check_owner(request.replica)
        lease = Duration()
        try:
            seconds = self._announcements.register(
                request.replica, request.address, caller().name, from_here=is_local_peer(context.peer())
            )
            lease.FromMilliseconds(int(seconds * 1000))
        except ValueError as error:
            raise SluiceError.invalid_argument("address", str(error)) from error
        return pb.RegisterReplicaResponse(lease=lease)

    async def Heartbeat(self, request: pb.HeartbeatRequest, _context: Context) -> pb.HeartbeatResponse:  # noqa: N802 - gRPC's name
        """Renew a replica's lease, unless it leaves."""
        self._check_run(request.run)
        if self._announcements.owner(request.replica) is None:
            raise SluiceError.not_found(
                "UNKNOWN_REPLICA", f"replica {request.replica!r} has no lease: call RegisterReplica"
            )
        self._check_owner(request.replica)
        if request.leaving:
            self._announcements.leave(request.replica)
            return pb.HeartbeatResponse()
        lease = Duration()
        lease.FromMilliseconds(int(self._announcements.heartbeat(request.replica) * 1000))
        return pb.HeartbeatResponse(lease=lease)

    async def ListTrajectories(  # noqa: N802 - gRPC's name
        self, request: pb.ListTrajectoriesRequest, _context: Context
    ) -> pb.ListTrajectoriesResponse:
        """List the last trajectories, newest first."""
        self._check_run(request.run)
        return self._status.history.page(request)

    def _check_owner(self, replica: str) -> None:
        """Refuse a caller that is neither the principal that announced the replica nor an admin."""
        owner, who = self._announcements.owner(replica), caller()
        if owner not in (None, who.name) and who.role != "admin":
            raise SluiceError(
                grpc.StatusCode.PERMISSION_DENIED,
                "OTHER_PRINCIPAL",
                f"replica {replica!r} was announced by principal {owner!r}, not by {who.name!r}: give each replica a name of its"
                " own (rollout.replica), or wait until that lease has ended",
            )

    def _check_run(self, run: str) -> None:
        expected = f"runs/{self._name}"
        if run != expected:
            raise SluiceError.not_found(
                "WRONG_RUN", f"this orchestrator has {expected}, not {run or '(none)'}: check the name or the address"
            )


SERVICE = Service("orchestrator", OrchestratorConfig, serve)
