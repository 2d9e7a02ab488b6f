"""A real run of one machine's replicas, to compare the simulation of `sluice bench scale` with.

Real are the orchestrator, the weight service, a relay, the trainer's publisher and the replicas' receivers, and every
call between them. Replicas generate nothing: they wait as long as a request would take. The trainer waits as long as a step would
take; its weights change by one in a hundred.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.children import free_port, program, service
from benchmarks.fleet.fanout_costs import ROWS, reports_answered
from benchmarks.fleet.fleet import EPOCH, Work
from benchmarks.fleet.node import all_serve, machine, served_at
from benchmarks.simulated_services import (
    Counting,
    Counts,
    Load,
    SimulatedTrainer,
    read_batch,
    read_counts,
    serve_until_signal,
)
from benchmarks.weight_stack import RUN, WeightStack, neighbour, random_weights, weight_service
from sluice.client import OrchestratorClient
from sluice.config import SecurityConfig
from sluice.rpc import connect
from sluice.telemetry import configure_logging
from sluice.v1 import trainer_pb2, trainer_pb2_grpc
from sluice.versions import Version
from weightsync.publisher import Update

_LOOK_S = 0.02
_LONGEST_S = 600.0
_BF16_BYTES = 2

ALONE = 8
"""Versions that are published once the orchestrator has ended."""

_BETWEEN_S = 1.0
"""Seconds from one of these versions to the next."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Measurements of the run, per version.

    Attributes:
        seconds: Seconds from one version to the next.
        fan_out_s: Seconds from the commit of a version until the last replica serves it: the least of `ALONE` versions that were published
            without any other work. In the simulation each process has a core of its own.
        loaded_fan_out_s: The same for the run's own versions, whose fan-out shares the machine's cores with dispatch and batches.
        dispatch: Messages between orchestrator and replicas, and their bytes.
        batches: Bytes between orchestrator and trainer.
        weights: Messages between replicas and weight services, and their bytes.
        reports: Reports that reached the weight service.
        busy: CPU seconds of processes per second.
    """

    seconds: float
    fan_out_s: float
    loaded_fan_out_s: float
    dispatch: tuple[float, float]
    batches: float
    weights: tuple[float, float]
    reports: float
    busy: dict[str, float]


async def observe(directory: Path, shared: Path, work: Work, *, replicas: int, versions: int, warm_up: int) -> Observed:
    """Run until `versions` versions were made after the warm-up."""
    trainer, orchestrator = (f"127.0.0.1:{free_port()}" for _ in range(2))
    targets = [f"127.0.0.1:{free_port()}" for _ in range(replicas)]
    metrics = free_port()
    async with contextlib.AsyncExitStack() as stack:
        root = await stack.enter_async_context(
            weight_service(directory, f"--server.metrics-port={metrics}", "--dense-delay-s=3600")
        )
        relay = await stack.enter_async_context(
            weight_service(directory, f"--upstream={root.target}", "--dense-delay-s=3600", name="relay")
        )
        training = [
            f"--target={trainer}",
            f"--weights={root.target}",
            f"--elements={int(work.weights_bytes / _BF16_BYTES)}",
            f"--train-s={work.train_s}",
        ]
        training_process = await stack.enter_async_context(
            program("benchmarks.fleet.real_run", *training, log=directory / "trainer.log")
        )
        load = Load(work.generation_s, work.spread, work.tokens)
        await stack.enter_async_context(machine(targets, root.target, shared / "staged", directory / "node.log", load))
        batch = work.batch_groups or replicas * work.groups_per_replica // (work.max_staleness + 1)
        settings = [
            f"--run={RUN}",
            f"--output-dir={directory / 'run'}",
            "--model=simulated",
            "--log-level=warning",
            f"--max-staleness={work.max_staleness}",
            f"--peers.trainer={trainer}",
            f"--peers.rollout={','.join(targets)}",
            f"--server.port={orchestrator.rpartition(':')[2]}",
            "--environment=benchmarks.simulated_tasks:Question",
            f"--batch-size={batch}",
            f"--group-size={work.group}",
            f"--max-running={replicas * work.groups_per_replica}",
            f"--max-concurrent={(work.max_staleness + 1) * batch}",
            f"--max-steps={warm_up + versions + work.max_staleness + 2}",
            f"--sampling.max-tokens={work.tokens}",
            "--pacing.enabled=false",
            "--write-trajectories=false",
        ]
        at = []
        async with service("orchestrator", *settings, health=orchestrator, log=directory / "orchestrator.log") as child:
            processes = {"orchestrator": child.pid, "weightsync": root.pid, "busiest relay": relay.pid}
            async with OrchestratorClient(orchestrator) as client:
                for step in (warm_up, warm_up + versions):
                    await _reached(client, step)
                    counts = await read_counts(targets[0]), await read_counts(trainer)
                    reports = await asyncio.to_thread(reports_answered, metrics)
                    cpu_s = {name: _cpu_s(pid) for name, pid in processes.items()}
                    at.append(_Moment(time.monotonic(), *counts, reports, cpu_s))
        training_process.send_signal(signal.SIGUSR1)
        last = await _published_alone(trainer)
        ended = await all_serve(targets[0], last, replicas, _LONGEST_S), await read_counts(trainer)
        return _between(at, ended, range(warm_up + 1, warm_up + versions + 1))


@dataclass(frozen=True, slots=True)
class _Moment:
    time: float
    node: Counts
    trainer: Counts
    reports: float
    cpu_s: dict[str, float]


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


async def _reached(client: OrchestratorClient, step: int) -> None:
    give_up = time.monotonic() + _LONGEST_S
    while (state := await client.run(RUN)).step < step:
        if time.monotonic() > give_up:
            raise RuntimeError(f"the run did not reach step {step} within {_LONGEST_S:g} s: {state.error or state}")
        await asyncio.sleep(_LOOK_S)


async def _published_alone(trainer: str) -> Version:
    """Wait until the trainer has published its last versions; return the very last one."""
    give_up = time.monotonic() + _LONGEST_S
    while len(alone := (await read_counts(trainer)).notes["alone"]) < ALONE:
        if time.monotonic() > give_up:
            raise RuntimeError(f"{len(alone)} of {ALONE} versions were published within {_LONGEST_S:g} s")
        await asyncio.sleep(_BETWEEN_S)
    return Version(EPOCH, alone[-1])


def _between(at: Sequence[_Moment], ended: tuple[Counts, Counts], versions: range) -> Observed:
    """Return the measurements between two moments. `ended` are the counts when all served the very last version."""
    (before, after), (node, trainer), count = at, ended, len(versions)
    dispatch, batches = after.node.since(before.node), after.trainer.since(before.trainer)
    applied = {int(number): at for number, at in trainer.notes["applied"].items()}
    committed = {int(number): at for number, at in trainer.notes["committed"].items()}
    loaded, alone = (
        min(max(served_at(node, Version(EPOCH, number))) - committed[number] for number in numbers)
        for numbers in (versions, trainer.notes["alone"])
    )
    weights = Counts(after.node.notes["messages"], after.node.notes["sizes"], {}).since(
        Counts(before.node.notes["messages"], before.node.notes["sizes"], {})
    )
    elapsed = after.time - before.time
    return Observed(
        seconds=(applied[versions[-1]] - applied[versions[0] - 1]) / count,
        fan_out_s=alone,
        loaded_fan_out_s=loaded,
        dispatch=(sum(dispatch.messages.values()) / count, sum(dispatch.sizes.values()) / count),
        batches=sum(batches.sizes.get(name, 0) for name in ("SubmitBatch", "WatchSteps")) / count,
        weights=(sum(weights.messages.values()) / count, sum(weights.sizes.values()) / count),
        reports=(after.reports - before.reports) / count,
        busy={name: (after.cpu_s[name] - before.cpu_s[name]) / elapsed for name in after.cpu_s},
    )


# The trainer: this module, run as a program.


class PublishingTrainer(SimulatedTrainer):
    """Takes so many seconds for a batch, reports it, and publishes a version of its weights meanwhile."""

    def __init__(self, weights: WeightStack, elements: int, train_s: float) -> None:
        super().__init__()
        self._weights, self._train_s = weights, train_s
        first = random_weights(elements, seed=0, rows=ROWS)
        self._states = (first, neighbour(first, seed=1))
        self._batches: asyncio.Queue[tuple[trainer_pb2.BatchHeader, list[trainer_pb2.TrajectoryResult]]] = (
            asyncio.Queue()
        )
        self.applied: dict[int, float] = {}
        self.committed: dict[int, float] = {}
        self.alone: list[int] = []
        """Versions that were published without a batch."""

    async def BeginEpoch(  # noqa: N802
        self, request: trainer_pb2.BeginEpochRequest, _context: object
    ) -> trainer_pb2.BeginEpochResponse:
        """Begin from the base model, and publish it as the first version of the epoch."""
        response = await super().BeginEpoch(request, _context)
        await self._publish(await self._weights.encode(Version(request.epoch, 0), self._states[0]))
        return response

    async def SubmitBatch(  # noqa: N802
        self, request_iterator: AsyncIterator[trainer_pb2.SubmitBatchRequest], _context: object
    ) -> trainer_pb2.SubmitBatchResponse:
        """Queue a batch."""
        header, results = await read_batch(request_iterator)
        self._batches.put_nowait((header, results))
        return trainer_pb2.SubmitBatchResponse(batch_id=header.batch_id, queued_batches=self._batches.qsize())

    async def train(self) -> None:
        """Train one batch after the other, until cancelled."""
        publishing: asyncio.Task[None] | None = None
        while True:
            header, results = await self._batches.get()
            version = Version(header.target_version.epoch, header.sequence_no)
            await asyncio.sleep(self._train_s)
            if publishing is not None:
                await publishing
            update = await self._weights.encode(version, self._states[version.number % 2])
            self.report(header, results)
            self.applied[version.number] = time.monotonic()
            publishing = asyncio.create_task(self._publish(update))
            publishing.add_done_callback(lambda _: self._batches.task_done())

    async def publish_alone(self, asked: asyncio.Event) -> None:
        """Publish `ALONE` versions once `asked` is set and no batch is left."""
        await asked.wait()
        await self._batches.join()
        first = max(self.committed) + 1
        for number in range(first, first + ALONE):
            await asyncio.sleep(_BETWEEN_S)
            await self._publish(await self._weights.encode(Version(EPOCH, number), self._states[number % 2]))
            self.alone.append(number)

    async def _publish(self, update: Update) -> None:
        await self._weights.publish(update)
        self.committed[update.version.number] = time.monotonic()


async def _run_trainer(options: argparse.Namespace) -> None:
    async with connect(options.weights, SecurityConfig()) as channel:
        trainer = PublishingTrainer(
            WeightStack(options.weights, channel, 0, local=False), options.elements, options.train_s
        )
        counting = Counting()
        counting.notes = lambda: {"applied": trainer.applied, "committed": trainer.committed, "alone": trainer.alone}
        asked = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, asked.set)
        await serve_until_signal(
            [options.target],
            lambda server: trainer_pb2_grpc.add_TrainerServiceServicer_to_server(trainer, server),
            counting,
            trainer.train(),
            trainer.publish_alone(asked),
        )


def main() -> None:
    """Run the trainer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True, help="address to serve at")
    parser.add_argument("--weights", required=True, help="address of the weight service")
    parser.add_argument("--elements", type=int, required=True, help="bf16 weights of the model")
    parser.add_argument("--train-s", type=float, required=True, help="seconds of a step")
    options = parser.parse_args()
    configure_logging("bench", "warning")
    asyncio.run(_run_trainer(options))


if __name__ == "__main__":
    main()
