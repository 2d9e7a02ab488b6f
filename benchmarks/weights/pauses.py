"""The visible pause of an update against what the engine takes to load the same file while nothing else runs."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from benchmarks.pause import plain_copy
from benchmarks.weights.models import neighbour
from rollout_svc.engines.base import GenerationRequest, InferenceEngine, Sampling
from rollout_svc.engines.slots.engine import SlotOptions, TransformersEngine
from rollout_svc.engines.vllm.engine import VllmEngine, VllmOptions
from sluice.versions import Version
from weightsync.staged import StagedVersion, TensorSpec

__all__ = ["Load", "measure_pauses", "stage_files"]

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
