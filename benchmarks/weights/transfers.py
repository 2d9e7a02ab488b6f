"""Dense versions on their way: against the same bytes sent bare, and to a growing number of receivers.

`measure_dense` goes from the trainer's memory to a verified file beside the engine. `measure_fanout` measures the seconds until every
receiver has a version, straight from the service and through two relays.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.weights.raw import grpc_hops, raw_server, tcp_hops
from benchmarks.weights.stack import (
    StagedOnly,
    WeightStack,
    dense_bytes,
    random_weights,
    receiving,
    serves,
    weight_service,
)
from sluice.versions import Version

__all__ = ["measure_dense", "measure_fanout"]


async def measure_dense(directory: Path, shared: Path, *, elements: int, rounds: int) -> Mapping[str, Any]:
    """Seconds of push, commit, pull and staging, by way, next to the bare transfers of the same round.

    Args:
        directory: On disk, for the services.
        shared: In shared memory, for what is staged.
        elements: bf16 weights of the version.
        rounds: How often each way is measured.
    """
    data = memoryview(torch.randint(0, 256, (2 * elements,), dtype=torch.uint8).numpy())
    seconds: dict[str, list[float]] = {"raw_grpc": [], "raw_tcp": [], "sockets": [], "shared_memory": []}
    async with (
        raw_server(directory) as raw,
        weight_service(directory, "--keep=1") as sockets,
        weight_service(directory, "--keep=1", local=True, name="local") as local,
        receiving(sockets.target, shared / "sockets", StagedOnly()) as over_sockets,
        receiving(local.target, shared / "local", StagedOnly(), local=True) as over_memory,
    ):
        for number in range(1, rounds + 1):
            weights = random_weights(elements, seed=number)
            version = Version(number, 0)  # each epoch begins with an anchor
            seconds["raw_grpc"].append(await grpc_hops(raw.target, data, shared / "raw.bin"))
            seconds["raw_tcp"].append(await asyncio.to_thread(tcp_hops, raw.tcp_port, data, shared / "raw.bin"))
            for name, stack, receiver in (
                ("sockets", sockets, over_sockets),
                ("shared_memory", local, over_memory),
            ):
                begun = await stack.push(version, weights)
                await serves([receiver], version)
                seconds[name].append(time.perf_counter() - begun)
            print(f"dense, round {number}: " + "  ".join(f"{name} {each[-1]:.2f} s" for name, each in seconds.items()))
    ratios = {
        f"{name}_over_{yardstick}": statistics.median(
            bare / ours for bare, ours in zip(seconds[f"raw_{yardstick}"], seconds[way], strict=True)
        )
        for name, way in (("dense", "sockets"), ("shared_memory", "shared_memory"))
        for yardstick in ("grpc", "tcp")
    }
    return {
        "ratios": {name.replace("_over_", "_over_raw_"): round(ratio, 3) for name, ratio in ratios.items()},
        "dense_s": {name: [round(value, 3) for value in each] for name, each in seconds.items()},
        "dense_bytes": dense_bytes(weights),
    }


RELAYS = 2


@dataclass(frozen=True)
class _Trial:
    """Receivers and what they are sent.

    Attributes:
        root: Takes the versions in.
        targets: Whom the receivers ask, in turn.
        stage_dirs: One per receiver.
        epoch: Of the first version.
        elements: bf16 weights of a version.
        rounds: Versions pushed.
    """

    root: WeightStack
    targets: Sequence[str]
    stage_dirs: Sequence[Path]
    epoch: int
    elements: int
    rounds: int


async def measure_fanout(
    directory: Path, shared: Path, *, elements: int, counts: Sequence[int], rounds: int
) -> Mapping[str, float]:
    """Median seconds from push to the last receiver, by way and number of receivers.

    Every receiver has a staging directory of its own, as on a host of its own, except in "one_host".

    Args:
        directory: On disk, for the services.
        shared: In shared memory, for what is staged.
        elements: bf16 weights of a version.
        counts: Numbers of receivers.
        rounds: Versions pushed for each.
    """
    seconds: dict[str, float] = {}
    async with contextlib.AsyncExitStack() as stack:
        root = await stack.enter_async_context(weight_service(directory, "--keep=1"))
        relays = [
            await stack.enter_async_context(
                weight_service(directory, "--keep=1", f"--upstream={root.target}", name=f"relay-{index}")
            )
            for index in range(RELAYS)
        ]
        ways = {"direct": [root.target], "relays": [relay.target for relay in relays]}
        epoch = 1
        for way, targets in (*ways.items(), ("one_host", ways["direct"])):
            for count in counts:
                hosts = [shared / (f"host-{index}" if way != "one_host" else "host") for index in range(count)]
                trial = _Trial(root, targets, hosts, epoch, elements, rounds)
                epoch += rounds
                seconds[f"{way}_{count}"] = round(await _until_all(trial), 3)
                print(f"{count} receivers, {way}: {seconds[f'{way}_{count}']:.2f} s", flush=True)
    return seconds


async def _until_all(trial: _Trial) -> float:
    taken = []
    async with contextlib.AsyncExitStack() as stack:
        receivers = [
            await stack.enter_async_context(
                receiving(trial.targets[index % len(trial.targets)], host, StagedOnly(), replica=f"replica-{index}")
            )
            for index, host in enumerate(trial.stage_dirs)
        ]
        for number in range(trial.rounds):
            version = Version(trial.epoch + number, 0)  # each epoch begins with an anchor
            begun = await trial.root.push(version, random_weights(trial.elements, seed=number))
            await serves(receivers, version)
            taken.append(time.perf_counter() - begun)
    return statistics.median(taken)
