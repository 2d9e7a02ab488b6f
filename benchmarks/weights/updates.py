"""What updates cost a running engine: the pause of one, and the tokens per second under many.

`measure_pauses` compares the visible pause with the time that the engine takes to load the same file while nothing else runs.
`measure_throughput` compares a saturated engine that takes a version every other second with one that takes none; the versions travel
the whole way meanwhile: pulled as deltas, applied to the staged copy, verified, loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from benchmarks.pause import plain_copy
from benchmarks.weights.stack import WeightStack, neighbour, receiving, serves, weight_service
from rollout_svc.engines.base import GenerationRequest, InferenceEngine, Sampling
from rollout_svc.engines.slots.engine import SlotOptions, TransformersEngine
from rollout_svc.engines.vllm.engine import VllmEngine, VllmOptions
from rollout_svc.supervision import EngineSupervisor
from sluice.versions import Version
from weightsync.receiver import PolicyMode, WeightReceiver
from weightsync.staged import StagedVersion, TensorSpec

__all__ = ["Load", "measure_pauses", "measure_throughput", "stage_files"]

PROMPT = list(range(10, 42))
LONGEST = 480
DTYPES = {"float32": "F32", "bfloat16": "BF16"}


class Load:
    """Requests that follow each other without end: `concurrency` of them at a time.

    Attributes:
        tokens: Sampled so far.
    """

    def __init__(self, engine: InferenceEngine, concurrency: int) -> None:
        self.tokens = 0
        self._engine = engine
        self._tasks = [asyncio.create_task(self._forever(index)) for index in range(concurrency)]

    async def _forever(self, index: int) -> None:
        for number in range(1_000_000):
            sampling = Sampling(max_tokens=LONGEST - 16 * (index % 8), ignore_eos=True)
            async for chunk in self._engine.stream(GenerationRequest(f"load-{index}-{number}", PROMPT, sampling)):
                self.tokens += len(chunk.token_ids)

    async def rate(self, seconds: float) -> float:
        """Tokens per second over the next so many seconds."""
        tokens, begun = self.tokens, time.perf_counter()
        await asyncio.sleep(seconds)
        return (self.tokens - tokens) / (time.perf_counter() - begun)

    async def end(self) -> None:
        """Cancel what runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def stage_files(model: Path, directory: Path, count: int) -> list[StagedVersion]:
    """Versions of a model as a receiver stages them."""
    staged = []
    tensors = load_file(model / "model.safetensors")
    for number in range(1, count + 1):
        tensors = neighbour(tensors, seed=number)
        path = directory / f"v1.{number}.safetensors"
        save_file(tensors, path)
        specs = {
            name: TensorSpec(DTYPES[str(each.dtype).removeprefix("torch.")], tuple(each.shape))
            for name, each in tensors.items()
        }
        staged.append(StagedVersion(Version(1, number), path, specs, digest=""))
    return staged


async def measure_pauses(model: Path, shared: Path, *, updates: int, concurrency: int) -> Mapping[str, Any]:
    """Median pause of both engines under load, against vLLM's own reload and against a plain copy.

    Args:
        model: Directory of the model.
        shared: In shared memory, for what is staged.
        updates: Versions that each engine takes.
        concurrency: Requests under way.
    """
    staged = stage_files(model, shared, updates)
    vllm = VllmEngine(str(model), VllmOptions(engine_args={"max_model_len": 512}))
    await vllm.start()
    try:
        reloads = [await _reload(vllm, each, shared) for each in staged]
        pauses, totals = await _under_load(vllm, staged, concurrency)
    finally:
        await vllm.stop()
    slots = TransformersEngine(str(model), SlotOptions(max_model_len=512, max_running=concurrency))
    await slots.start()
    try:
        slot_pauses, slot_totals = await _under_load(slots, staged, concurrency)
    finally:
        await slots.stop()
    copies = [plain_copy(model, each.path) for each in staged]
    return {
        "ratios": {
            "pause_over_engine_reload": round(statistics.median(pauses) / statistics.median(reloads), 3),
            "pause_over_copy_transformers": round(statistics.median(slot_pauses) / statistics.median(copies), 3),
        },
        "pause_ms": {
            "vllm": _ms(pauses),
            "vllm_reload": _ms(reloads),
            "transformers": _ms(slot_pauses),
            "plain_copy": _ms(copies),
        },
        "pause_share_of_apply": {
            "vllm": round(sum(pauses) / sum(totals), 4),
            "transformers": round(sum(slot_pauses) / sum(slot_totals), 4),
        },
    }


async def _under_load(
    engine: VllmEngine | TransformersEngine, staged: list[StagedVersion], concurrency: int
) -> tuple[list[float], list[float]]:
    load = Load(engine, concurrency)
    pauses, totals = [], []
    try:
        for each in staged:
            await load.rate(1.0)
            begun = time.perf_counter()
            report = await engine.apply(each)
            totals.append(time.perf_counter() - begun)
            pauses.append(report.pause_s)
    finally:
        await load.end()
    return pauses, totals


async def _reload(engine: VllmEngine, staged: StagedVersion, shared: Path) -> float:
    """Seconds of vLLM's own reload of a staged file in a paused engine without requests."""
    directory = shared / "reload"
    directory.mkdir(exist_ok=True)
    (directory / "model.safetensors").unlink(missing_ok=True)
    (directory / "model.safetensors").hardlink_to(staged.path)
    llm = engine._llm  # noqa: SLF001 - the yardstick is what vLLM offers by itself
    await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
    try:
        begun = time.perf_counter()
        await llm.collective_rpc("reload_weights", kwargs={"weights_path": str(directory)})
        return time.perf_counter() - begun
    finally:
        await llm.resume_generation()


def _ms(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 2)


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
        held = EngineSupervisor(engine, 0, print)
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
