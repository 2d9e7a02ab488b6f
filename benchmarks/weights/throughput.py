"""Tokens per second of a saturated engine that takes a version every other second, against one that takes none.

The versions travel the whole way meanwhile: pulled as deltas, applied to the staged copy, verified, loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks.weights.models import neighbour
from benchmarks.weights.pauses import Load
from benchmarks.weights.stack import WeightStack, receiving, serves, weight_service
from rollout_svc.engines.vllm.engine import VllmEngine, VllmOptions
from rollout_svc.supervision import EngineSupervisor
from rollout_svc.weights import SupervisedEngine
from sluice.versions import Version
from weightsync.receiver import PolicyMode, WeightReceiver

__all__ = ["measure_throughput"]

OWNER = "bench"
TTL_S = 600.0


async def measure_throughput(
    model: Path, directory: Path, shared: Path, *, concurrency: int, interval_s: float, updates: int, rounds: int
) -> Mapping[str, Any]:
    """Rates of alternating windows, with updates and without.

    Args:
        model: Directory of the model.
        directory: On disk, for the service.
        shared: In shared memory, for what is staged.
        concurrency: Requests under way.
        interval_s: Seconds between two updates.
        updates: Updates per window.
        rounds: Windows of each kind.

    Returns:
        `rate_ratio`, `bound` (1 - apply time / interval), `over_bound` and what they were computed from.
    """
    engine = VllmEngine(str(model), VllmOptions(engine_args={"max_model_len": 512}))
    await engine.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(engine.stop)
        service = await stack.enter_async_context(
            weight_service(directory, f"--keep={rounds * updates + 2}", local=True)
        )
        held = SupervisedEngine(EngineSupervisor(engine, 0, print), serves_adapters=False)
        receiver = await stack.enter_async_context(receiving(service.target, shared, held, local=True))
        receiver.set_policy(PolicyMode.HOLD, owner=OWNER, ttl_s=TTL_S)
        await _push_all(service, model, rounds * updates + 1)
        load = Load(engine, concurrency)
        stack.push_async_callback(load.end)
        await _take(receiver, Version(1, 1))  # the anchor
        await load.rate(interval_s)
        return await _alternate(load, receiver, interval_s, updates, rounds)


async def _take(receiver: WeightReceiver, version: Version) -> None:
    receiver.set_policy(PolicyMode.TARGET, version, owner=OWNER, ttl_s=TTL_S)
    await serves([receiver], version)


async def _push_all(service: WeightStack, model: Path, count: int) -> None:
    weights = load_file(model / "model.safetensors")
    for number in range(1, count + 1):
        weights = neighbour(weights, seed=number)
        await service.push(Version(1, number), weights)


async def _alternate(
    load: Load, receiver: WeightReceiver, interval_s: float, updates: int, rounds: int
) -> Mapping[str, Any]:
    without, during, applied = [], [], []
    number = 1
    for _ in range(rounds):
        without.append(await load.rate(interval_s * updates))
        window = asyncio.create_task(load.rate(interval_s * updates))
        for _ in range(updates):
            number, begun = number + 1, time.perf_counter()
            await _take(receiver, Version(1, number))
            update = receiver.status().last_update
            applied.append(0.0 if update is None else update.apply_s)
            await asyncio.sleep(max(0.0, interval_s - (time.perf_counter() - begun)))
        during.append(await window)
    ratio = statistics.median(some / none for some, none in zip(during, without, strict=True))
    bound = 1 - min(1.0, statistics.median(applied) / interval_s)
    return {
        "over_bound": round(ratio / bound, 3),
        "rate_ratio": round(ratio, 3),
        "bound": round(bound, 3),
        "apply_s": round(statistics.median(applied), 3),
        "tokens_per_s": {"without": round(statistics.median(without)), "with": round(statistics.median(during))},
    }
