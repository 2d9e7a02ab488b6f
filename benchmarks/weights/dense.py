"""A dense version from the trainer's memory to a verified file beside the engine, against the same bytes sent bare."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.weights.models import dense_bytes, random_weights
from benchmarks.weights.raw import grpc_hops, raw_server, tcp_hops
from benchmarks.weights.stack import StagedOnly, receiving, serves, weight_service
from sluice.versions import Version

__all__ = ["measure_dense"]


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
