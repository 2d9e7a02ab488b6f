"""A real run of one machine's replicas, to compare the simulation of `sluice bench scale` with.

Real are the orchestrator, the weight service, a relay, the trainer's publisher and the replicas' receivers, and every
call between them. Replicas generate nothing: they wait as long as a request would take. The trainer waits as long as a step would
take; its weights change by one in a hundred.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil

from benchmarks.children import free_port, service
from benchmarks.fleet.fanout_costs import ROWS, reports_answered
from benchmarks.fleet.fleet import Work
from benchmarks.simulated_services import (
    Counting,
    Counts,
    Load,
    SimulatedReplica,
    SimulatedTrainer,
    read_batch,
    read_counts,
    serve_until_signal,
    serving,
    until_signal,
)
from benchmarks.weight_stack import RUN, StagedOnly, WeightStack, neighbour, random_weights, weight_service
from sluice.client import OrchestratorClient
from sluice.config import SecurityConfig
from sluice.rpc import connect
from sluice.telemetry import configure_logging
from sluice.v1 import trainer_pb2, trainer_pb2_grpc
from sluice.versions import Version
from weightsync.publisher import Update
from weightsync.receiver import ReceiverOptions, WeightReceiver
from weightsync.staged import ApplyReport, StagedVersion

_LOOK_S = 0.02
_LONGEST_S = 600.0
_BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Observed:
    """What the run showed, per version.

    Attributes:
        seconds: From one version to the next.
        fan_out_s: From the commit of a version until the last replica serves it or a newer one: the least of the versions, since
            the simulation has no other work on the machine.
        dispatch: Messages between orchestrator and replicas, and their bytes.
        batches: Bytes between orchestrator and trainer.
        weights: Messages between replicas and weight services, and their bytes.
        reports: Reports that reached the weight service.
        busy: CPU seconds of processes per second.
    """

    seconds: float
    fan_out_s: float
    dispatch: tuple[float, float]
    batches: float
    weights: tuple[float, float]
    reports: float
    busy: dict[str, float]


async def observe(directory: Path, shared: Path, work: Work, *, replicas: int, versions: int, warm_up: int) -> Observed:
    """Run until so many versions were made after the first ones."""
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
        load = [
            f"--weights={root.target}",
            f"--elements={int(work.weights_bytes / _BF16_BYTES)}",
            f"--train-s={work.train_s}",
            f"--latency-s={work.generation_s}",
            f"--spread={work.spread}",
            f"--tokens={work.tokens}",
            f"--stage-dir={shared / 'staged'}",
        ]
        for name, served in (("trainer", [trainer]), ("node", targets)):
            await stack.enter_async_context(_double(name, served, directory / f"{name}.log", load))
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
        child = await stack.enter_async_context(
            service("orchestrator", *settings, health=orchestrator, log=directory / "orchestrator.log")
        )
        processes = {"orchestrator": child.pid, "weightsync": root.pid, "busiest relay": relay.pid}
        async with OrchestratorClient(orchestrator) as client:
            at = []
            for step in (warm_up, warm_up + versions):
                await _reached(client, step)
                counts = await read_counts(targets[0]), await read_counts(trainer)
                reports = await asyncio.to_thread(reports_answered, metrics)
                at.append(
                    _Moment(time.monotonic(), *counts, reports, {name: _cpu_s(pid) for name, pid in processes.items()})
                )
            await _all_serve(targets[0], warm_up + versions, replicas)
            ended = await read_counts(targets[0]), await read_counts(trainer)
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


async def _all_serve(node: str, version: int, replicas: int) -> None:
    """Wait until all replicas serve a version or a newer one."""
    give_up = time.monotonic() + _LONGEST_S
    while True:
        served = (await read_counts(node)).notes["served"]
        behind = replicas - sum(times[-1][0] >= version for times in served.values())
        if not behind:
            return
        if time.monotonic() > give_up:
            raise RuntimeError(f"{behind} replicas did not take version {version} within {_LONGEST_S:g} s")
        await asyncio.sleep(_LOOK_S)


def _between(at: Sequence[_Moment], ended: tuple[Counts, Counts], versions: range) -> Observed:
    """Return what happened from the first of two moments to the second; `ended` was asked when all served the last version."""
    (before, after), (node, trainer), count = at, ended, len(versions)
    dispatch, batches = after.node.since(before.node), after.trainer.since(before.trainer)
    applied = {int(number): at for number, at in trainer.notes["applied"].items()}
    committed = {int(number): at for number, at in trainer.notes["committed"].items()}
    fan_out = [
        max(next(at for serves, at in times if serves >= number) for times in node.notes["served"].values())
        - committed[number]
        for number in versions
    ]
    weights = Counts(after.node.notes["messages"], after.node.notes["sizes"], {}).since(
        Counts(before.node.notes["messages"], before.node.notes["sizes"], {})
    )
    elapsed = after.time - before.time
    return Observed(
        seconds=(applied[versions[-1]] - applied[versions[0] - 1]) / count,
        fan_out_s=min(fan_out),
        dispatch=(sum(dispatch.messages.values()) / count, sum(dispatch.sizes.values()) / count),
        batches=sum(batches.sizes.get(name, 0) for name in ("SubmitBatch", "WatchSteps")) / count,
        weights=(sum(weights.messages.values()) / count, sum(weights.sizes.values()) / count),
        reports=(after.reports - before.reports) / count,
        busy={name: (after.cpu_s[name] - before.cpu_s[name]) / elapsed for name in after.cpu_s},
    )


@contextlib.asynccontextmanager
async def _double(name: str, targets: Sequence[str], log: Path, load: Sequence[str]) -> AsyncIterator[None]:
    command = (sys.executable, "-m", "benchmarks.fleet.real_run", name, *load, "--targets", *targets)
    with log.open("wb") as output:
        child = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        await child.wait()


# The doubles. This module, run as a program, is one of them.


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
        """Take a batch; its turn comes."""
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

    async def _publish(self, update: Update) -> None:
        await self._weights.publish(update)
        self.committed[update.version.number] = time.monotonic()


class _Node:
    """The replicas of one machine, which share one staged copy."""

    def __init__(self) -> None:
        self.served: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
        self.messages: Counter[str] = Counter()
        self.sizes: Counter[str] = Counter()

    def notes(self) -> dict[str, Any]:
        """Return what the machine told and was told by weight services, and when each replica served a version."""
        return {"served": self.served, "messages": self.messages, "sizes": self.sizes}

    def counted(self, method: str, translate: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
        """Return the same translation, which counts what it translates."""
        name = method.rpartition("/")[2]

        def count(message: Any) -> Any:  # noqa: ANN401 - bytes or a message
            translated = message if translate is None else translate(message)
            self.messages[name] += 1
            self.sizes[name] += len(message if isinstance(message, bytes) else translated)
            return translated

        return count


class _CountedChannel:
    """A channel of whose calls a node counts the messages."""

    def __init__(self, channel: grpc.aio.Channel, node: _Node) -> None:
        self._channel, self._node = channel, node

    def unary_unary(self, method: str, *words: Any, **options: Any) -> Any:  # noqa: ANN401 - a call of gRPC
        """Return a call with one answer."""
        return self._channel.unary_unary(method, *words, **self._counting(method, options))

    def unary_stream(self, method: str, *words: Any, **options: Any) -> Any:  # noqa: ANN401 - a call of gRPC
        """Return a call with a stream of answers."""
        return self._channel.unary_stream(method, *words, **self._counting(method, options))

    def stream_unary(self, method: str, *words: Any, **options: Any) -> Any:  # noqa: ANN401 - a call of gRPC
        """Return a call with a stream of requests."""
        return self._channel.stream_unary(method, *words, **options)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    def _counting(self, method: str, options: dict[str, Any]) -> dict[str, Any]:
        for name in ("request_serializer", "response_deserializer"):
            options[name] = self._node.counted(method, options.get(name))
        return options


class _FollowingEngine(StagedOnly):
    """Serves what is staged, and notes when."""

    def __init__(self, replica: SimulatedReplica, times: list[tuple[int, float]]) -> None:
        super().__init__()
        self._replica, self._times = replica, times

    async def apply(self, staged: StagedVersion) -> ApplyReport:
        """Serve a version."""
        report = await super().apply(staged)
        self._replica.serve(staged.version)
        self._times.append((staged.version.number, time.monotonic()))
        return report


async def _run_trainer(options: argparse.Namespace) -> None:
    async with connect(options.weights, SecurityConfig()) as channel:
        trainer = PublishingTrainer(
            WeightStack(options.weights, channel, 0, local=False), options.elements, options.train_s
        )
        counting = Counting()
        counting.notes = lambda: {"applied": trainer.applied, "committed": trainer.committed}
        await serve_until_signal(
            options.targets,
            lambda server: trainer_pb2_grpc.add_TrainerServiceServicer_to_server(trainer, server),
            counting,
            trainer.train(),
        )


async def _run_node(options: argparse.Namespace) -> None:
    node, counting = _Node(), Counting()
    counting.notes = node.notes
    load = Load(options.latency_s, options.spread, options.tokens)

    def counted(target: str) -> Any:  # noqa: ANN401 - in place of a channel
        return _CountedChannel(connect(target, SecurityConfig()), node)

    async def follow(target: str, replica: SimulatedReplica) -> None:
        name = f"replica-{target}"
        receiver = WeightReceiver(
            counted(options.weights),
            RUN,
            name,
            options.stage_dir,
            _FollowingEngine(replica, node.served[name]),
            options=ReceiverOptions(local_files=False, connect_to=counted),
        )
        await receiver.run_forever()

    replicas = {target: SimulatedReplica(f"replica-{target}", load) for target in options.targets}
    async with contextlib.AsyncExitStack() as stack:
        for target, replica in replicas.items():
            handlers = replica.handlers()
            await stack.enter_async_context(
                serving([target], lambda server, own=handlers: server.add_generic_rpc_handlers(own), counting)  # type: ignore[misc]
            )
        await until_signal(*(follow(target, replica) for target, replica in replicas.items()))


def main() -> None:
    """Be one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("service", choices=("trainer", "node"))
    parser.add_argument("--targets", nargs="+", required=True, help="addresses to serve at")
    parser.add_argument("--weights", required=True, help="address of the weight service")
    parser.add_argument("--elements", type=int, required=True, help="bf16 weights of the model")
    parser.add_argument("--train-s", type=float, required=True, help="seconds of a step")
    parser.add_argument("--latency-s", type=float, required=True, help="mean seconds of a request")
    parser.add_argument("--spread", type=float, required=True, help="share of it by which requests differ")
    parser.add_argument("--tokens", type=int, required=True, help="tokens of a sample")
    parser.add_argument("--stage-dir", type=Path, required=True, help="directory for staged versions")
    options = parser.parse_args()
    configure_logging("bench", "warning")
    asyncio.run(_run_trainer(options) if options.service == "trainer" else _run_node(options))


if __name__ == "__main__":
    main()
