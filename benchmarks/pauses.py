"""What weight updates cost a running engine: the pause of one update, and the tokens per second under many.

`sluice bench pause` (`run`) lets one long request live through updates. `measure_throughput` is a part of `sluice bench weightsync`:
the speed of a saturated engine that takes a version every other second, against the same engine without updates. These versions
travel the whole way: pulled as deltas, applied to the staged copy, verified, loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks.children import make_model, median_ratio
from benchmarks.weight_stack import neighbour, receiving, serves, weight_service
from rollout_svc.engines.base import GenerationRequest, InferenceEngine, PauseMode, Sampling
from rollout_svc.engines.vllm.engine import VllmEngine, VllmOptions
from rollout_svc.replica import EngineSupervisor
from sluice.versions import Version, VersionSpan
from weightsync.receiver import PolicyMode, WeightReceiver
from weightsync.staged import StagedVersion, TensorSpec

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
        staged = stage_files(model, Path(scratch), options.updates)
        target = {name: tensor.clone() for name, tensor in load_file(model / "model.safetensors").items()}
        engine = VllmEngine(str(model), VllmOptions(engine_args={"max_model_len": 512}))
        await engine.start()
        try:
            spans, pauses, copies = await update_in_flight(engine, staged, target, options.tokens)
        finally:
            await engine.stop()
    shown = [(span.start, str(span.version)) for span in spans]
    print(f"{options.tokens} tokens of one request, spans (first token, version): {shown}")
    for version, pause_s, copy_s in zip(staged, pauses, copies, strict=True):
        print(f"version {version.version}: pause {pause_s * 1e3:.1f} ms, plain copy {copy_s * 1e3:.1f} ms")
    return {
        "ratios": {"pause_over_copy": median_ratio(pauses, copies)},
        "pause_ms": round(statistics.median(pauses) * 1e3, 2),
        "copy_ms": round(statistics.median(copies) * 1e3, 2),
        "versions_in_one_request": len(spans),
        "spans": shown,
    }


async def update_in_flight(
    engine: InferenceEngine, staged: Sequence[StagedVersion], target: Mapping[str, torch.Tensor], tokens: int
) -> tuple[list[VersionSpan], list[float], list[float]]:
    """Apply the versions at regular intervals during one request, and make a plain copy of each right after.

    Args:
        engine: Serves the request.
        staged: The versions.
        target: Destination of the copies; its memory has been touched before.
        tokens: Length of the request.

    Returns:
        The request's spans, and the seconds of each pause and of each copy. The engine is paused during a copy too.
    """
    request = GenerationRequest("long", PROMPT, Sampling(max_tokens=tokens, ignore_eos=True))
    share = tokens // (len(staged) + 1)
    spans: list[VersionSpan] = []
    pauses: list[float] = []
    copies: list[float] = []
    async with asyncio.timeout(120):
        async for progress in engine.stream(request):
            if not progress.parts:
                continue
            [chunk] = progress.parts
            spans += [span for span in chunk.spans if not spans or span.version != spans[-1].version]
            while len(pauses) < len(staged) and chunk.offset + len(chunk.token_ids) >= share * (len(pauses) + 1):
                version = staged[len(pauses)]
                pauses.append((await engine.apply(version)).pause_s)
                await engine.pause(PauseMode.KEEP)
                copies.append(_plain_copy(version.path, target))
                await engine.resume()
    return spans, pauses, copies


def stage_files(model: Path, directory: Path, count: int) -> list[StagedVersion]:
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


def _plain_copy(staged: Path, target: Mapping[str, torch.Tensor]) -> float:
    """Return the seconds to copy the tensors of a staged file into tensors in memory."""
    with safe_open(staged, framework="pt") as source:
        begun = time.perf_counter()
        for name, tensor in target.items():
            tensor.copy_(source.get_tensor(name))
        if any(tensor.is_cuda for tensor in target.values()):
            torch.cuda.synchronize()
        return time.perf_counter() - begun


# A part of `sluice bench weightsync`.


OWNER = "bench"
TTL_S = 600.0

INTERVAL_S = 2.0
"""Seconds between two updates."""

UPDATES = 4
"""Updates per window."""

ROUNDS = 3
"""Number of windows with updates, and of windows without."""


class _Load:
    """Runs endless requests, `concurrency` at a time, and counts the tokens that they sampled."""

    def __init__(self, engine: VllmEngine, concurrency: int) -> None:
        self.tokens = 0
        self._engine = engine
        self._tasks = [asyncio.create_task(self._forever(index)) for index in range(concurrency)]

    async def _forever(self, index: int) -> None:
        for number in range(1_000_000):
            sampling = Sampling(max_tokens=LONGEST - 16 * (index % 8), ignore_eos=True)
            async for progress in self._engine.stream(GenerationRequest(f"load-{index}-{number}", PROMPT, sampling)):
                self.tokens += sum(len(part.token_ids) for part in progress.parts)

    async def rate(self, seconds: float) -> float:
        """Return the tokens per second over the next `seconds` seconds."""
        tokens, begun = self.tokens, time.perf_counter()
        await asyncio.sleep(seconds)
        return (self.tokens - tokens) / (time.perf_counter() - begun)

    async def end(self) -> None:
        """Cancel the requests that run."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def measure_throughput(model: Path, directory: Path, shared: Path, *, concurrency: int) -> dict[str, Any]:
    """Measure the speed of an engine in windows with updates and without.

    Args:
        model: Directory of the model.
        directory: Directory on disk, for the service.
        shared: Directory in shared memory, for staged versions.
        concurrency: Requests at a time.

    Returns:
        `rate_ratio`, `bound` (1 - apply time / interval), `over_bound` and what they were computed from.
    """
    engine = VllmEngine(str(model), VllmOptions(engine_args={"max_model_len": 512}))
    await engine.start()
    versions = ROUNDS * UPDATES + 1
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
        await load.rate(INTERVAL_S)
        return await _alternate(load, receiver)


async def _take(receiver: WeightReceiver, version: Version) -> None:
    receiver.set_policy(PolicyMode.TARGET, version, owner=OWNER, ttl_s=TTL_S)
    await serves([receiver], version)


async def _alternate(load: _Load, receiver: WeightReceiver) -> dict[str, Any]:
    without, during, applied = [], [], []
    number = 1
    for _ in range(ROUNDS):
        without.append(await load.rate(INTERVAL_S * UPDATES))
        window = asyncio.create_task(load.rate(INTERVAL_S * UPDATES))
        for _ in range(UPDATES):
            number, begun = number + 1, time.perf_counter()
            await _take(receiver, Version(1, number))
            update = receiver.status().last_update
            applied.append(0.0 if update is None else update.apply_s)
            await asyncio.sleep(max(0.0, INTERVAL_S - (time.perf_counter() - begun)))
        during.append(await window)
    ratio = median_ratio(during, without)
    bound = 1 - min(1.0, statistics.median(applied) / INTERVAL_S)
    return {
        "over_bound": round(ratio / bound, 3),
        "rate_ratio": ratio,
        "bound": round(bound, 3),
        "apply_s": round(statistics.median(applied), 3),
        "tokens_per_s": {"without": round(statistics.median(without)), "with": round(statistics.median(during))},
    }
