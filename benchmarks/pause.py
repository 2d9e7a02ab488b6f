"""One long request that lives through weight updates, and what each update's pause costs.

The pause is compared with a plain in-place copy of the same tensors from the same staged file: on a CPU vLLM also packs
the weights anew for its kernels, which a copy does not.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks.children import MODEL_2M, make_model
from rollout_svc.engines.base import GenerationRequest, Sampling
from rollout_svc.engines.vllm.engine import VllmEngine, VllmOptions
from sluice.versions import Version, VersionSpan
from weightsync.staged import ApplyReport, StagedVersion, TensorSpec

__all__ = ["plain_copy", "run"]

NOISE = 1e-3
"""Standard deviation of what is added to each weight from version to version."""


def run(argv: list[str]) -> Mapping[str, Any]:
    """Measure and print; returns what the JSON line holds."""
    parser = argparse.ArgumentParser(prog="sluice bench pause", description=__doc__)
    parser.add_argument("--updates", type=int, default=12, help="updates while the request runs")
    parser.add_argument("--tokens", type=int, default=480, help="length of the request")
    return asyncio.run(_measure(parser.parse_args(argv)))


async def _measure(options: argparse.Namespace) -> Mapping[str, Any]:
    with tempfile.TemporaryDirectory(prefix="sluice-bench-", dir="/dev/shm") as scratch:
        model = make_model(Path(scratch) / "model", MODEL_2M)
        staged = [_stage(model, Path(scratch), number) for number in range(1, options.updates + 1)]
        engine = VllmEngine(str(model), VllmOptions(engine_args={"max_model_len": 512}))
        await engine.start()
        try:
            spans, reports = await _update_in_flight(engine, staged, options.tokens)
        finally:
            await engine.stop()
        copies = [plain_copy(model, each.path) for each in staged]
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
    """Apply the versions at even distances while one request is under way; its spans, and what each update cost."""
    request = GenerationRequest("long", list(range(10, 42)), Sampling(max_tokens=tokens, ignore_eos=True))
    share = tokens // (len(staged) + 1)
    spans: list[VersionSpan] = []
    reports: list[ApplyReport] = []
    async with asyncio.timeout(120):
        async for chunk in engine.stream(request):
            spans += [span for span in chunk.spans if not spans or span.version != spans[-1].version]
            if len(reports) < len(staged) and chunk.offset + len(chunk.token_ids) >= share * (len(reports) + 1):
                reports.append(await engine.apply(staged[len(reports)]))
    return spans, reports


def _stage(model: Path, directory: Path, number: int) -> StagedVersion:
    generator = torch.Generator().manual_seed(number)
    tensors = load_file(model / "model.safetensors")
    changed = {
        name: tensor + NOISE * torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()
    }
    path = directory / f"v1.{number}.safetensors"
    save_file(changed, path)
    specs = {name: TensorSpec("F32", tuple(tensor.shape)) for name, tensor in changed.items()}
    return StagedVersion(Version(1, number), path, specs, digest="")


def plain_copy(model: Path, staged: Path) -> float:
    """Seconds to copy a staged file's tensors into tensors in memory that was written to before."""
    target = {name: tensor.clone() for name, tensor in load_file(model / "model.safetensors").items()}
    with safe_open(staged, framework="pt") as source:
        begun = time.perf_counter()
        for name, tensor in target.items():
            tensor.copy_(source.get_tensor(name))
        return time.perf_counter() - begun
