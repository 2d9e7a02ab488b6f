"""`sluice trainer`: build the trainer, serve until a signal, stop cleanly. Under torchrun rank 0 serves; the others follow it."""

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial

import grpc
import structlog

from sluice.config import CommonConfig, ConfigError, MissingPeerError, Service, UnfinishedError
from sluice.peers import missing_peers_reported
from sluice.rpc import RpcServer, SluiceError, connect
from sluice.rpc.server import serve_probes
from sluice.supervise.restart_policy import EXIT_CONFIG, EXIT_MISSING_PEER, EXIT_UNFINISHED
from sluice.telemetry import StateMetrics
from sluice.v1 import trainer_pb2_grpc
from trainer_svc.config import TrainerConfig
from trainer_svc.engine.finite import IncompleteWeightsError, UnfitWeightsError
from trainer_svc.parallel.mesh import SINGLE, Mesh, join
from trainer_svc.service.compute_thread import ComputeThread
from trainer_svc.service.learner import FollowingRank, Learner
from trainer_svc.service.rank_group import RankGroup, RankLink
from trainer_svc.service.servicer import TrainerServicer
from trainer_svc.service.trainer import Trainer
from weightsync.publisher import AdapterPublisher, PolicyPublisher, WeightPublisher

SERVICE_NAME = "sluice.v1.TrainerService"

PUSH_GRACE_S = 0.5
"""Seconds that a running push gets to end when the trainer stops."""

LEAST_GRACE_S = 0.5
"""Least seconds that the compute thread and a checkpoint get to end, even if calls used up `server.drain_s`."""


log = structlog.get_logger(__name__)


async def serve(common: CommonConfig, config: TrainerConfig) -> None:
    """Serve one run's trainer; on every rank except the first, carry out the commands of rank 0.

    Raises:
        ConfigError: if the settings cannot work, or the number of processes is not the one in `trainer.parallel`.
        SluiceError: if the ranks have to be started again.
    """
    compute = ComputeThread()
    deadlines = config.deadlines
    link, joining = None, int(os.environ.get("WORLD_SIZE", "1")) > 1
    try:
        join_ranks = partial(_join, config)
        mesh, link = await compute.run(join_ranks, deadline_s=deadlines.load_s, what="joining the other ranks")
        joining = False
        exit_code = EXIT_UNFINISHED
        if mesh.rank == 0:
            await _lead(common, config, compute, mesh, link)
        else:
            exit_code = await _follow(common, config, compute, mesh, link)
    except BaseException as error:
        if joining and isinstance(error, asyncio.CancelledError):
            log.info("stopped while starting")
        if joining or link is not None:
            _end(error)
        raise
    if link is not None:
        os._exit(exit_code)
    raise UnfinishedError("a signal came; the run continues from the newest checkpoint when the trainer starts again")


def _join(config: TrainerConfig) -> tuple[Mesh, RankLink | None]:
    """Join the other ranks, if there are any.

    Raises:
        ConfigError: if the number of ranks is not the one in the settings.
    """
    try:
        mesh = join(config.parallel, config.device)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if mesh.dims.world_size == 1:
        return SINGLE, None
    deadlines = config.deadlines
    log.info("joined the other ranks", rank=mesh.rank, mesh=str(mesh.dims))
    return mesh, RankLink(mesh, max(deadlines.load_s, deadlines.step_s, deadlines.save_s, deadlines.push_s))


async def _lead(
    common: CommonConfig, config: TrainerConfig, compute: ComputeThread, mesh: Mesh, link: RankLink | None
) -> None:
    """Serve on rank 0. The port opens before the model is loaded, so that the state can be read. Health says SERVING after loading."""
    channel = connect(common.peers.weightsync, common.security, role="trainer")
    loop, failed = asyncio.get_running_loop(), asyncio.Event()
    ranks = None
    if link is not None:
        ranks = RankGroup(link, on_broken=lambda: loop.call_soon_threadsafe(failed.set))
    publisher = PolicyPublisher(
        _weight_publisher(common, config, channel, link),
        AdapterPublisher(channel, common.run),
        announce=None if ranks is None else ranks.publish,
    )
    server = RpcServer(
        "trainer",
        config.server,
        common.security,
        features=[f"objective.{config.objective.preset}", f"device.{config.device}"],
        run=common.run,
        call_log=common.run_dir / "calls/trainer.jsonl",
    )
    trainer = Trainer(Learner(common, config, mesh, ranks), publisher, compute, server.drain)
    server.count_left(lambda: {**server.calls_left(), **trainer.left})
    server.add(trainer_pb2_grpc.add_TrainerServiceServicer_to_server, TrainerServicer(trainer), SERVICE_NAME)
    server.set_serving(False, "its model, which it loads")
    server.readiness.add(trainer.waits_for)
    await server.start()
    loading = asyncio.create_task(_load(trainer, server, failed))
    left_s = 0.0
    try:
        with StateMetrics(trainer.scrape):
            async with missing_peers_reported({"weightsync": common.peers.weightsync}, common, server):
                left_s = await server.serve_until_signal(failed)
    finally:
        ended = await trainer.stop(max(left_s, LEAST_GRACE_S))
        if ended and ranks is not None:  # else a thread uses the link; the other ranks end with this process
            ranks.stop_others(_exit_code(sys.exception() or _failure_of(loading)))
        await publisher.close(PUSH_GRACE_S)
        await channel.close()
    if ranks is not None and ranks.broken is not None:
        raise ranks.broken
    if not ended:
        log.warning("the compute thread did not end in time, leaving it behind", drain_s=config.server.drain_s)
        failure = _failure_of(loading)
        if failure is not None:
            log.error("loading failed", reason=str(failure))
        # Python aborts if it finalises while a thread is inside a kernel; nothing is left to clean up.
        os._exit(_exit_code(failure))
    if loading.done():
        loading.result()
    else:
        loading.cancel()


async def _follow(
    common: CommonConfig, config: TrainerConfig, compute: ComputeThread, mesh: Mesh, link: RankLink | None
) -> int:
    """Carry out the commands of rank 0 until it sends `Stop`. Return the exit code in that command."""
    if link is None:
        raise RuntimeError("a rank other than the first needs a link to it")
    channel = connect(common.peers.weightsync, common.security, role="trainer")
    publisher = PolicyPublisher(_weight_publisher(common, config, channel, link))
    learner = Learner(common, config, mesh)
    probes = None
    try:
        if os.environ.get("LOCAL_RANK") == "0":  # the first process of another node answers probes for that node
            probes = await serve_probes(config.server)
        return await FollowingRank(learner, link, publisher).run(compute)
    finally:
        if probes is not None:
            await probes.stop(0)
        await publisher.close(0.0)
        await channel.close()


def _weight_publisher(
    common: CommonConfig, config: TrainerConfig, channel: grpc.aio.Channel, link: RankLink | None
) -> WeightPublisher:
    group = None if link is None else link.publishing
    return WeightPublisher(
        channel, common.run, encoding=config.publish.encoding, local=config.publish.local, group=group
    )


def _failure_of(task: asyncio.Task[None]) -> BaseException | None:
    """Return the exception of a task; None if it has not ended, was cancelled or succeeded."""
    return task.exception() if task.done() and not task.cancelled() else None


def _exit_code(error: BaseException | None) -> int:
    """Return the exit code of a trainer that ends with an error, or because of a signal if there is none."""
    if error is None or isinstance(error, asyncio.CancelledError):
        return EXIT_UNFINISHED
    if isinstance(error, ConfigError):
        return EXIT_CONFIG
    return EXIT_MISSING_PEER if isinstance(error, MissingPeerError) else 1


def _end(error: BaseException) -> None:
    """Exit at once: a process group that lost a member, and the threads that wait in it, cannot be shut down.

    Raises:
        BaseException: the error itself, if the caller has to explain it (ConfigError).
    """
    if isinstance(error, ConfigError):
        raise error
    if isinstance(error, MissingPeerError):
        log.error("gave up", reason=str(error))
    elif isinstance(error, SluiceError):
        log.error("rank ends", reason=error.reason, message=error.message)
    elif not isinstance(error, asyncio.CancelledError):
        log.error("rank ends", exc_info=error)
    os._exit(_exit_code(error))


async def _load(trainer: Trainer, server: RpcServer, failed: asyncio.Event) -> None:
    """Load the model, then say that the trainer serves.

    Raises:
        ConfigError: if the files of the model lack weights, or hold some that are not finite.
    """
    try:
        await trainer.load()
        server.set_serving(True)
    except (IncompleteWeightsError, UnfitWeightsError) as error:
        failed.set()
        raise ConfigError(f"model: {error}") from error
    except BaseException:
        failed.set()
        raise


SERVICE = Service("trainer", TrainerConfig, serve)
