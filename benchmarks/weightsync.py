"""The weight path: dense transfers, deltas of real training, throughput under updates, fan-out.

Each part prints what it measures; `--only` picks some. Ratios are taken within one run, between neighbours in time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.children import in_child, make_model, median_ratio
from benchmarks.fleet.fanout_costs import measure as measure_costs
from benchmarks.weight_stack import (
    StagedOnly,
    WeightStack,
    bare_server,
    grpc_hops,
    model_200m,
    random_weights,
    receiving,
    serves,
    tcp_hops,
    weight_service,
)
from sluice.telemetry import configure_logging
from sluice.versions import Version

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where receivers stage


@dataclass(frozen=True, slots=True)
class _Place:
    """Directories of one part."""

    models: Path
    """Directory of models, shared by the parts."""
    disk: Path
    """Directory on disk, for services."""
    shared: Path
    """Directory in shared memory, for staged versions."""


def run(argv: list[str]) -> Mapping[str, Any]:
    """Measure and print; return the content of the JSON line."""
    parser = argparse.ArgumentParser(prog="sluice bench weightsync", description=__doc__)
    parser.add_argument("--only", choices=tuple(PARTS), action="append", help="measure only this part; may be repeated")
    parser.add_argument("--rounds", type=int, default=5, help="transfers of each way")
    parser.add_argument("--steps", type=int, default=50, help="training steps before a difference is taken")
    parser.add_argument("--measured", type=int, default=3, help="steps whose differences are coded")
    parser.add_argument(
        "--lr", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5, 1e-4], help="learning rates of the training"
    )
    parser.add_argument("--elements", type=int, default=202_000_000, help="weights of a dense version")
    parser.add_argument("--fanout-elements", type=int, default=16_000_000, help="weights of a version in the fan-out")
    options = parser.parse_args(argv)
    ratios: dict[str, float] = {}
    details: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="sluice-bench-") as scratch,
        tempfile.TemporaryDirectory(prefix="sluice-bench-", dir=SHARED_MEMORY) as shared,
    ):
        for part in options.only or PARTS:
            place = _Place(Path(scratch), Path(scratch, part), Path(shared, part))
            place.disk.mkdir()
            place.shared.mkdir()
            # A process for each part: none inherits threads or memory, and vLLM forks before gRPC runs.
            details[part] = in_child(_measure, part, options, place)
            ratios |= details[part].pop("ratios", {})
    bounds = [each["over_bound"] for name, each in details.items() if name.startswith("throughput")]
    if bounds:
        ratios["tokens_with_updates_over_bound"] = min(bounds)
    costs = details["fanout"].pop("costs", None) if "fanout" in details else None
    return {"ratios": ratios, **details, "costs": costs}


def _measure(part: str, options: argparse.Namespace, place: _Place) -> dict[str, Any]:
    configure_logging("bench", "warning")
    return asyncio.run(PARTS[part](options, place))


async def _dense(options: argparse.Namespace, place: _Place) -> dict[str, Any]:
    """Measure the path from the trainer's memory to a verified file beside the engine, against bare transfers of the same bytes."""
    data = memoryview(torch.randint(0, 256, (2 * options.elements,), dtype=torch.uint8).numpy())
    seconds: dict[str, list[float]] = {"raw_grpc": [], "raw_tcp": [], "sockets": [], "shared_memory": []}
    async with (
        bare_server(place.disk) as (grpc_port, tcp_port),
        weight_service(place.disk, "--keep=1") as sockets,
        weight_service(place.disk, "--keep=1", local=True, name="local") as local,
        receiving(sockets.target, place.shared / "sockets", StagedOnly()) as over_sockets,
        receiving(local.target, place.shared / "local", StagedOnly(), local=True) as over_memory,
    ):
        for number in range(1, options.rounds + 1):
            weights = random_weights(options.elements, seed=number)
            version, file = Version(number, 0), place.shared / "bare.bin"  # each epoch begins with an anchor
            seconds["raw_grpc"].append(await grpc_hops(grpc_port, data, file))
            seconds["raw_tcp"].append(await asyncio.to_thread(tcp_hops, tcp_port, data, file))
            for name, stack, receiver in (("sockets", sockets, over_sockets), ("shared_memory", local, over_memory)):
                begun = await stack.push(version, weights)
                await serves([receiver], version)
                seconds[name].append(time.perf_counter() - begun)
            print(f"dense, round {number}: " + "  ".join(f"{name} {each[-1]:.2f} s" for name, each in seconds.items()))
    ratios = {
        f"{name}_over_raw_{yardstick}": median_ratio(seconds[f"raw_{yardstick}"], seconds[way])
        for name, way in (("dense", "sockets"), ("shared_memory", "shared_memory"))
        for yardstick in ("grpc", "tcp")
    }
    return {
        "ratios": ratios,
        "dense_s": {name: [round(value, 3) for value in each] for name, each in seconds.items()},
        "dense_bytes": sum(tensor.nbytes for tensor in weights.values()),
    }


async def _delta(options: argparse.Namespace, place: _Place) -> dict[str, Any]:
    from benchmarks.weight_deltas import measure_deltas  # noqa: PLC0415 - the trainer only for what is measured

    found: dict[str, Any] = {}
    ratios: dict[str, float] = {}
    for lr in options.lr:
        name = f"{lr:.0e}".replace("e-0", "e_").replace("e-", "e_")
        sizes = measure_deltas(
            model_200m(place.models / "model"),
            lr,
            steps=options.steps,
            measured=options.measured,
            threads=len(os.sched_getaffinity(0)),
        )
        found[name] = {kind: each.summary() for kind, each in sizes.items()}
        for kind, summary in found[name].items():
            print(f"learning rate {lr:g}, {kind}: {summary}", flush=True)
        ratios[f"delta_reduction_lr_{name}"] = found[name]["inner"]["dense_over_sent"]
        ratios[f"delta_over_entropy_bound_lr_{name}"] = found[name]["inner"]["sent_over_bound"]
    worst = max(kinds["all"]["worst_tensor_over_dense"] for kinds in found.values())
    return {"ratios": ratios | {"worst_tensor_over_dense": worst}, "by_learning_rate": found}


async def _throughput_2m(_: argparse.Namespace, place: _Place) -> dict[str, Any]:
    return await _throughput(make_model(place.models / "model-2m"), place, concurrency=64)


async def _throughput_200m(_: argparse.Namespace, place: _Place) -> dict[str, Any]:
    return await _throughput(model_200m(place.models / "model"), place, concurrency=16)


async def _throughput(model: Path, place: _Place, concurrency: int) -> dict[str, Any]:
    from benchmarks.pauses import measure_throughput  # noqa: PLC0415 - the engine only for what is measured

    found = await measure_throughput(model, place.disk, place.shared, concurrency=concurrency)
    print(f"{model.name}: {found}", flush=True)
    return found


RELAYS = 2
RECEIVERS = (1, 4, 16)
FANOUT_ROUNDS = 3


async def _fanout(options: argparse.Namespace, place: _Place) -> dict[str, Any]:
    """Measure median seconds from push to the last receiver, by way and number of receivers; then the costs of single messages.

    Every receiver has a staging directory of its own, as on a host of its own, except in "one_host".
    """
    seconds: dict[str, float] = {}
    async with contextlib.AsyncExitStack() as stack:
        root = await stack.enter_async_context(weight_service(place.disk, "--keep=1"))
        relays = [
            await stack.enter_async_context(
                weight_service(place.disk, "--keep=1", f"--upstream={root.target}", name=f"relay-{index}")
            )
            for index in range(RELAYS)
        ]
        ways = {"direct": [root.target], "relays": [relay.target for relay in relays], "one_host": [root.target]}
        epoch = 1
        for way, targets in ways.items():
            for count in RECEIVERS:
                hosts = [place.shared / (f"host-{index}" if way != "one_host" else "host") for index in range(count)]
                trial = _Trial(root, targets, hosts, epoch, options.fanout_elements)
                epoch += FANOUT_ROUNDS
                seconds[f"{way}_{count}"] = round(await _until_all(trial), 3)
                print(f"{count} receivers, {way}: {seconds[f'{way}_{count}']:.2f} s", flush=True)
    return {**seconds, "costs": asdict(await measure_costs(options.fanout_elements, place.disk, place.shared))}


@dataclass(frozen=True, slots=True)
class _Trial:
    """Receivers, one per staging directory, that pull from the targets in turn, and the versions that are pushed to the root."""

    root: WeightStack
    targets: Sequence[str]
    stage_dirs: Sequence[Path]
    epoch: int
    """Epoch of the first version."""
    elements: int
    """bf16 weights of a version."""


async def _until_all(trial: _Trial) -> float:
    taken = []
    async with contextlib.AsyncExitStack() as stack:
        receivers = [
            await stack.enter_async_context(
                receiving(trial.targets[index % len(trial.targets)], host, StagedOnly(), replica=f"replica-{index}")
            )
            for index, host in enumerate(trial.stage_dirs)
        ]
        for number in range(FANOUT_ROUNDS):
            version = Version(trial.epoch + number, 0)  # each epoch begins with an anchor
            begun = await trial.root.push(version, random_weights(trial.elements, seed=number))
            await serves(receivers, version)
            taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


PARTS: dict[str, Callable[[argparse.Namespace, _Place], Coroutine[Any, Any, dict[str, Any]]]] = {
    "dense": _dense,
    "delta": _delta,
    "throughput_2m": _throughput_2m,
    "throughput_200m": _throughput_200m,
    "fanout": _fanout,
}
