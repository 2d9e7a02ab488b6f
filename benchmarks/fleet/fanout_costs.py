"""Costs of the weight path by size: seconds from a trainer to a receiver, CPU seconds of services, and bytes of messages."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.children import free_port
from benchmarks.fleet.costs import MIB, Line, WeightCosts, line_through
from benchmarks.fleet.node import all_serve, last_arrival, machine, served_at
from benchmarks.simulated_services import Load, read_counts
from benchmarks.weight_stack import DEADLINE_S, RUN, WeightStack, neighbour, random_weights, weight_service
from sluice.config import SecurityConfig
from sluice.rpc import connect
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import Version
from weightsync.format.manifest import run_resource

if TYPE_CHECKING:
    import torch

DELTAS = 10
"""Number of deltas of each size, after a dense version."""

ROWS = 1024
"""Rows of a tensor, so that small versions are small."""

CALLS = 300
MACHINES = (1, 4)
RELAYS = (1, 257)
TENSORS = 256
WATCHERS = 64
_CALL_S = 60.0
_LEAST_CPU_S = 5e-4
"""Smaller differences of CPU seconds say nothing: the kernel counts in hundredths, and these are medians of some versions."""
_BEAT_S = 0.1
_BEATS_S = 3.0
_SETTLE_S = 0.5
"""Seconds after a version in which a service reads the last reports."""

SHARING = 8
"""Receivers that take one staged copy: the replicas of a machine of the fleets."""

_IDLE = Load(latency_s=1.0, spread=0.0, tokens=1)
"""Load of replicas without requests."""


@dataclass(frozen=True, slots=True)
class Taken:
    """One version sent to machines.

    Attributes:
        weights_mib: MiB of the weights.
        sent_mib: MiB that were sent.
        machines: Number of machines that took it.
        pull_s: Seconds from the announcement to the last byte at a machine.
        stage_s: Seconds from there until all replicas of a machine serve.
        wait_s: Seconds from the commit until machines learn of the version.
        cpu_s: CPU seconds of the service.
        reports: Reports that reached the service, by replica.
    """

    dense: bool
    weights_mib: float
    sent_mib: float
    machines: int
    encode_s: float
    push_s: float
    pull_s: float
    stage_s: float
    wait_s: float
    cpu_s: float
    reports: float

    @property
    def told_s(self) -> float:
        """Return the seconds from the announcement until all replicas of a machine serve."""
        return self.pull_s + self.stage_s

    @property
    def whole_s(self) -> float:
        """Return the seconds from the commit until all replicas of a machine serve."""
        return self.wait_s + self.told_s


async def measure(elements: int, disk: Path, shared: Path) -> WeightCosts:
    """Measure with versions of `elements` weights, and of an eighth of that.

    Args:
        elements: bf16 weights of a version.
        disk: Directory for services.
        shared: Directory in shared memory, for staged versions.
    """
    metrics = free_port()
    settings = ("--keep=1", "--dense-delay-s=3600", f"--server.metrics-port={metrics}")
    sizes, direct, sharing, behind = (elements // 8, elements), list[Taken](), list[Taken](), list[Taken]()
    async with weight_service(disk, *settings, name="costs") as root:
        bench = _Bench(root, metrics, disk, shared, iter(range(1, 1000)))
        for size in sizes:
            for machines in MACHINES:
                direct += [each async for each in _take(bench, root.target, size, machines=machines)]
            sharing += [each async for each in _take(bench, root.target, size, replicas=SHARING)]
        manifests = [(float(count), await _manifest_bytes(root, count, next(bench.epochs))) for count in (1, TENSORS)]
        async with weight_service(disk, "--keep=1", f"--upstream={root.target}", name="costs-relay") as relay:
            for size in sizes:
                behind += [each async for each in _take(bench, relay.target, size)]
    return WeightCosts(
        **_of_versions(direct, sharing, behind), **await _calls(disk), manifest_bytes=line_through(manifests)
    )


@dataclass(frozen=True, slots=True)
class _Bench:
    """A weight service, the port of its metrics, where logs are written and receivers stage, and the epochs of the versions to come."""

    root: WeightStack
    metrics: int
    disk: Path
    shared: Path
    epochs: Iterator[int]


def reports_answered(port: int) -> float:
    """Return the reports that a service has answered."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=_CALL_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == "sluice_rpc_total" and sample.labels.get("method") == "ReportVersion"
    )


async def _take(
    bench: _Bench, target: str, elements: int, *, machines: int = 1, replicas: int = 1
) -> AsyncIterator[Taken]:
    """Give versions to machines that follow a target, and yield what each version took.

    Their replicas run in processes of their own: work of the process that pushes must not slow them.
    """
    root = bench.root
    async with contextlib.AsyncExitStack() as stack:
        nodes = []
        for number in range(machines):
            targets = [f"127.0.0.1:{free_port()}" for _ in range(replicas)]
            node = machine(targets, target, bench.shared / f"costs-{number}", bench.disk / f"node-{number}.log", _IDLE)
            await stack.enter_async_context(node)
            nodes.append(targets[0])
        service, epoch = psutil.Process(root.pid), next(bench.epochs)
        weights = random_weights(elements, seed=epoch, rows=ROWS)
        await asyncio.sleep(_SETTLE_S)  # the replicas take the version that was newest so far
        for number in range(DELTAS + 1):
            if number:
                weights = neighbour(weights, seed=number)
            version = Version(epoch, number)
            update = await root.encode(version, weights)
            reports = await asyncio.to_thread(reports_answered, bench.metrics)
            cpu, begun = _cpu_s(service), time.monotonic()
            _, report = await root.publish(update)
            pushed_s = report.push_s + report.commit_s
            await asyncio.sleep(_SETTLE_S)
            counts = [await all_serve(each, version, replicas, DEADLINE_S) for each in nodes]
            served = max(at for each in counts for at in served_at(each, version))
            await asyncio.sleep(max(0.0, served + _SETTLE_S - time.monotonic()))
            taken = [last_arrival(await read_counts(each)) for each in nodes]
            yield Taken(
                dense=not number,
                weights_mib=sum(each.nbytes for each in weights.values()) / MIB,
                sent_mib=report.bytes_sent / MIB,
                machines=machines,
                encode_s=report.diff_s,
                push_s=pushed_s,
                pull_s=statistics.median(each.pull_s for each in taken),
                stage_s=statistics.median(each.served_at - each.begun_at - each.pull_s for each in taken),
                wait_s=statistics.median(each.begun_at for each in taken) - begun - pushed_s,
                cpu_s=_cpu_s(service) - cpu,
                reports=(await asyncio.to_thread(reports_answered, bench.metrics) - reports) / (machines * replicas),
            )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _of_versions(direct: list[Taken], sharing: list[Taken], behind: list[Taken]) -> dict[str, Any]:
    """Return the costs that grow with sizes, from versions taken from the service, by receivers of one host, and from a relay."""
    alone, together = _by_size(direct), _by_size(direct, MACHINES[-1])
    of_one, of_all = _deltas(direct), _deltas(sharing)
    deltas = [each for found in of_one.values() for each in found]
    cpu_alone, cpu_together = (
        [(size, statistics.median(each.cpu_s for each in taken)) for size, taken in each.items()]
        for each in (alone, together)
    )
    more = MACHINES[-1] - 1
    given = _cpu_line(
        (size, (cpu - other) / more) for (size, cpu), (_, other) in zip(cpu_together, cpu_alone, strict=True)
    )
    told_s = zip(_shortest(of_all, "told_s"), _shortest(of_one, "told_s"), strict=True)
    return {
        "share_s": max(0.0, statistics.median(every - one for (_, every), (_, one) in told_s)),
        "encode_s": line_through(_shortest(of_one, "encode_s")),
        "push_s": line_through(_shortest(alone, "push_s")),
        "pull_s": line_through(_quickest(alone, "told_s", "pull_s")),
        "stage_s": line_through(_quickest(of_one, "told_s", "stage_s")),
        "hop_s": line_through(_quickest(_by_size(behind), "whole_s", "wait_s")),
        "take_in_cpu_s": _cpu_line((size, cpu - given.of(size)) for size, cpu in cpu_alone),
        "give_out_cpu_s": given,
        "delta_over_dense": statistics.median(each.sent_mib / each.weights_mib for each in deltas),
        "reports": statistics.median(each.reports for each in deltas),
    }


def _cpu_line(points: Iterable[tuple[float, float]]) -> Line:
    """Return the line through the CPU seconds that are large enough to be believed."""
    believed = [(size, cpu_s) for size, cpu_s in points if cpu_s >= _LEAST_CPU_S]
    return line_through(believed) if believed else Line(0.0, 0.0)


def _shortest(taken: Mapping[float, list[Taken]], name: str) -> list[tuple[float, float]]:
    """Return the least time for each size: time that other work on the machine adds is not a cost of a version."""
    return [(size, min(getattr(each, name) for each in found)) for size, found in taken.items()]


def _by_size(taken: list[Taken], machines: int = 1) -> dict[float, list[Taken]]:
    """Return the versions that `machines` machines took, by mean MiB sent for versions of one kind and size."""
    kinds: defaultdict[tuple[float, bool], list[Taken]] = defaultdict(list)
    for each in taken:
        if each.machines == machines:
            kinds[each.weights_mib, each.dense].append(each)
    ordered = sorted(kinds.items())
    return {statistics.mean(each.sent_mib for each in found): found for _, found in ordered}


def _quickest(taken: Mapping[float, list[Taken]], by: str, name: str) -> list[tuple[float, float]]:
    """Return one part of the time of the quickest version of each size.

    All parts come from the same version: the least of each part, from different versions, would add up to less than any version took.
    """
    return [(size, getattr(min(found, key=attrgetter(by)), name)) for size, found in taken.items()]


def _deltas(taken: list[Taken]) -> dict[float, list[Taken]]:
    """Return the deltas that one machine took, by the MiB of the weights."""
    found: defaultdict[float, list[Taken]] = defaultdict(list)
    for each in taken:
        if each.machines == 1 and not each.dense:
            found[each.weights_mib].append(each)
    return dict(sorted(found.items()))


async def _calls(disk: Path) -> dict[str, Any]:
    """Return the CPU seconds and bytes of single calls to a service with a version and no other work."""
    async with (
        weight_service(disk, "--keep=1", f"--heartbeat-s={_BEAT_S}", name="calls") as service,
        connect(service.target, SecurityConfig()) as channel,
    ):
        await service.push(Version(1, 0), random_weights(1 << 16, seed=0))
        process, stub = psutil.Process(service.pid), weightsync_pb2_grpc.WeightDeliveryServiceStub(channel)
        run = run_resource(RUN)

        def report(name: str, address: str = "") -> pb.ReportVersionRequest:
            version = Version(1, 0).to_proto()
            return pb.ReportVersionRequest(
                run=run,
                replica=name,
                version=version,
                serving=version,
                phase=pb.REPLICA_PHASE_SERVING,
                relay_address=address,
                host="0" * 36 if address else "",
            )

        before = _cpu_s(process)
        for number in range(CALLS):
            reported = await stub.ReportVersion(report(f"replica-{number % WATCHERS}"), timeout=_CALL_S)
        report_s = (_cpu_s(process) - before) / CALLS
        lists, sizes = [], []
        for relays in RELAYS:
            for number in range(relays):
                address = f"node-{number:05}.example:7101"
                await stub.ReportVersion(report(f"relay:{address}", address), timeout=_CALL_S)
            before = _cpu_s(process)
            for _ in range(CALLS):
                listed = await stub.ListSources(pb.ListSourcesRequest(run=run), timeout=_CALL_S)
            lists.append((float(relays), (_cpu_s(process) - before) / CALLS))
            sizes.append((float(relays), float(listed.ByteSize())))
        return {
            "report_s": report_s,
            "report_bytes": float(report("replica-0").ByteSize() + reported.ByteSize()),
            "list_s": line_through(lists),
            "list_bytes": line_through(sizes),
            "watch_s": await _watch_s(process, stub, run),
        }


async def _watch_s(
    process: psutil.Process, stub: weightsync_pb2_grpc.WeightDeliveryServiceAsyncStub, run: str
) -> float:
    """Return the CPU seconds of a message to a watcher, measured with heartbeats, which are frequent here."""
    received = 0

    async def watch() -> None:
        nonlocal received
        async for _ in stub.WatchVersions(pb.WatchVersionsRequest(run=run, replica="watcher"), timeout=_CALL_S):
            received += 1

    watching = [asyncio.create_task(watch()) for _ in range(WATCHERS)]
    await asyncio.sleep(_SETTLE_S)
    before, so_far = _cpu_s(process), received
    await asyncio.sleep(_BEATS_S)
    spent, came = _cpu_s(process) - before, received - so_far
    for each in watching:
        each.cancel()
    await asyncio.gather(*watching, return_exceptions=True)
    return spent / max(1, came)


async def _manifest_bytes(root: WeightStack, tensors: int, epoch: int) -> float:
    """Return the bytes of the announcement of a delta, for a model with `tensors` tensors."""
    weights = _many(tensors, seed=epoch)
    await root.push(Version(epoch, 0), weights)
    await root.push(Version(epoch, 1), neighbour(weights, seed=1))
    async with connect(root.target, SecurityConfig()) as channel:
        stub = weightsync_pb2_grpc.WeightSyncServiceStub(channel)
        answer = await stub.GetManifest(pb.GetManifestRequest(run=run_resource(RUN)), timeout=_CALL_S)
    return float(answer.ByteSize())


def _many(tensors: int, seed: int) -> dict[str, torch.Tensor]:
    (drawn,) = random_weights(1, seed=seed).values()
    parts = drawn.flatten()[: tensors << 12].reshape(tensors, 64, 64)
    return {f"model.layers.{number}.mlp.up_proj.weight": part.clone() for number, part in enumerate(parts)}
