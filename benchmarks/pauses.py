"""What weight updates cost a running engine: the pause of one update, and the tokens per second under many.

`sluice bench pause` (`run`) lets one long request live through updates. `measure_pauses` and `measure_throughput` are parts of
`sluice bench weightsync`: the pause against the engine's own reload of the same file, and the speed of a saturated engine that
takes a version every other second against one that takes none. These versions travel the whole way: pulled as deltas, applied to
the staged copy, verified, loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks.children import make_model
from benchmarks.weight_stack import neighbour, receiving, serves, weight_service
from rollout_svc.engines.base import GenerationRequest, InferenceEngine, Sampling
from rollout_svc.engines.slots.engine import SlotOptions, TransformersEngine
from rollout_svc.engines.vllm.engine import VllmEngine, VllmOptions
from rollout_svc.supervision import EngineSupervisor
from sluice.versions import Version, VersionSpan
from weightsync.receiver import PolicyMode, WeightReceiver
from weightsync.staged import ApplyReport, StagedVersion, TensorSpec

PROMPT = list(range(10, 42))
LONGEST = 480
DTYPES = {"float32": "F32", "bfloat16": "BF16"}


def run(argv: list[str]) -> Mapping[str, Any]:
    """Measure and print; return the content of the JSON line.

    The yardstick is a plain in-place copy of the same tensors from the same staged file. On a CPU vLLM also packs the weights
    again for its kernels, which a copy does not.
    """
    parser = argparse.ArgumentParser(prog="sluice bench pause", description=run.__doc__)
    parser.add_argument("--updates", type=int, default=12, help="updates while the request runs")
    parser.add_argument("--tokens", type=int, default=480, help="length of the request")
    return asyncio.run(_measure(parser.parse_args(argv)))


async def _measure(options: argparse.Namespace) -> Mapping[str, Any]:
    with tempfile.TemporaryDirectory(prefix="sluice-bench-", dir="/dev/shm") as scratch:
        model = make_model(Path(scratch) / "model")
        staged = _stage_files(model, Path(scratch), options.updates)
        engine = VllmEngine(str(model), VllmOptions(engine_args={"max_model_len": 512}))
        await engine.start()
        try:
            spans, reports = await _update_in_flight(engine, staged, options.tokens)
        finally:
            await engine.stop()
        copies = [_plain_copy(model, each.path) for each in staged]
    shown = [(span.start, str(span.version)) for span in spans]
    print(f"{options.tokens} tokens of one request, spans (first token, version): {shown}")
    pauses = [report.pause_s for report in reports]
    for report, copy_s in zip(reports, copies, strict=True):
        print(f"version {report.version}: pause {report.pause_s * 1e3:.1f} ms, plain copy {copy_s * 1e3:.1f} ms")
    return {
        "ratios": {"pause_over_copy": round(statistics.median(pauses) / statistics.median(copies), 2)},
        "pause_ms": round(statistics.median(pauses) * 1e3, 2),
        "copy_ms": round(statistics.median(copies) * 1e3, 2),
        "versions_in_one_request": len(spans),
        "spans": shown,
    }


async def _update_in_flight(
    engine: VllmEngine, staged: list[StagedVersion], tokens: int
) -> tuple[list[VersionSpan], list[ApplyReport]]:
    """Apply the versions at even distances while one request is under way; return its spans, and a report of each update."""
    request = GenerationRequest("long", PROMPT, Sampling(max_tokens=tokens, ignore_eos=True))
    share = tokens // (len(staged) + 1)
    spans: list[VersionSpan] = []
    reports: list[ApplyReport] = []
    async with asyncio.timeout(120):
        async for chunk in engine.stream(request):
            spans += [span for span in chunk.spans if not spans or span.version != spans[-1].version]
            if len(reports) < len(staged) and chunk.offset + len(chunk.token_ids) >= share * (len(reports) + 1):
                reports.append(await engine.apply(staged[len(reports)]))
    return spans, reports


def _stage_files(model: Path, directory: Path, count: int) -> list[StagedVersion]:
    """Write versions of a model as a receiver stages them."""
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


def _plain_copy(model: Path, staged: Path) -> float:
    """Return the seconds to copy a staged file's tensors into tensors in memory that was written to before."""
    target = {name: tensor.clone() for name, tensor in load_file(model / "model.safetensors").items()}
    with safe_open(staged, framework="pt") as source:
        begun = time.perf_counter()
        for name, tensor in target.items():
            tensor.copy_(source.get_tensor(name))
        return time.perf_counter() - begun


class _Load:
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
        """Return the tokens per second of the next so many seconds."""
        tokens, begun = self.tokens, time.perf_counter()
        await asyncio.sleep(seconds)
        return (self.tokens - tokens) / (time.perf_counter() - begun)

    async def end(self) -> None:
        """Cancel the requests that run."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


# Parts of `sluice bench weightsync`.


async def measure_pauses(model: Path, shared: Path, *, updates: int, concurrency: int) -> dict[str, Any]:
    """Return the median pause of both engines under load, against vLLM's own reload and against a plain copy.

    Args:
        model: Directory of the model.
        shared: In shared memory, for what is staged.
        updates: Versions that each engine takes.
        concurrency: Requests under way.
    """
    staged = _stage_files(model, shared, updates)
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
    copies = [_plain_copy(model, each.path) for each in staged]
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
    load = _Load(engine, concurrency)
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
    """Return the seconds of vLLM's own reload of a staged file in a paused engine without requests."""
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


@dataclass(frozen=True, slots=True)
class Windows:
    """Alternating windows of time, with updates and without.

    Attributes:
        interval_s: Seconds between two updates.
        updates: Updates in a window.
        rounds: Windows of each kind.
    """

    interval_s: float
    updates: int
    rounds: int


async def measure_throughput(
    model: Path, directory: Path, shared: Path, windows: Windows, *, concurrency: int
) -> dict[str, Any]:
    """Measure the speed of an engine in windows with updates and without.

    Args:
        model: Directory of the model.
        directory: On disk, for the service.
        shared: In shared memory, for staged versions.
        windows: The windows.
        concurrency: Requests under way.

    Returns:
        `rate_ratio`, `bound` (1 - apply time / interval), `over_bound` and what they were computed from.
    """
    engine = VllmEngine(str(model), VllmOptions(engine_args={"max_model_len": 512}))
    await engine.start()
    versions = windows.rounds * windows.updates + 1
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(engine.stop)
        service = await stack.enter_async_context(weight_service(directory, f"--keep={versions + 1}", local=True))
        held = EngineSupervisor(engine, 0, print)
        receiver = await stack.enter_async_context(receiving(service.target, shared, held, local=True))
        receiver.set_policy(PolicyMode.HOLD, owner=OWNER, ttl_s=TTL_S)
        weights = load_file(model / "model.safetensors")
        for number in range(1, versions + 1):
            weights = neighbour(weights, seed=number)
            await service.push(Version(1, number), weights)
        load = _Load(engine, concurrency)
        stack.push_async_callback(load.end)
        await _take(receiver, Version(1, 1))  # the anchor
        await load.rate(windows.interval_s)
        return await _alternate(load, receiver, windows)


async def _take(receiver: WeightReceiver, version: Version) -> None:
    receiver.set_policy(PolicyMode.TARGET, version, owner=OWNER, ttl_s=TTL_S)
    await serves([receiver], version)


async def _alternate(load: _Load, receiver: WeightReceiver, windows: Windows) -> dict[str, Any]:
    without, during, applied = [], [], []
    number = 1
    for _ in range(windows.rounds):
        without.append(await load.rate(windows.interval_s * windows.updates))
        window = asyncio.create_task(load.rate(windows.interval_s * windows.updates))
        for _ in range(windows.updates):
            number, begun = number + 1, time.perf_counter()
            await _take(receiver, Version(1, number))
            update = receiver.status().last_update
            applied.append(0.0 if update is None else update.apply_s)
            await asyncio.sleep(max(0.0, windows.interval_s - (time.perf_counter() - begun)))
        during.append(await window)
    ratio = statistics.median(some / none for some, none in zip(during, without, strict=True))
    bound = 1 - min(1.0, statistics.median(applied) / windows.interval_s)
    return {
        "over_bound": round(ratio / bound, 3),
        "rate_ratio": round(ratio, 3),
        "bound": round(bound, 3),
        "apply_s": round(statistics.median(applied), 3),
        "tokens_per_s": {"without": round(statistics.median(without)), "with": round(statistics.median(during))},
    }
