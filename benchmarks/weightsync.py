"""The weight path: dense transfers, deltas of real training, pauses, throughput under updates, fan-out.

Each part prints what it measures; `--only` picks some. Ratios are taken within one run, between neighbours in time.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from sluice.telemetry import configure_logging

__all__ = ["run"]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where receivers stage


def run(argv: list[str]) -> Mapping[str, Any]:
    """Measure and print; returns what the JSON line holds."""
    parser = argparse.ArgumentParser(prog="sluice bench weightsync", description=__doc__)
    parser.add_argument(
        "--only", choices=tuple(MEASURES), action="append", help="measure this part alone; may be repeated"
    )
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
        for part in options.only or MEASURES:
            for directory in (Path(scratch, part), Path(shared, part)):
                directory.mkdir()
            # Each part in a process of its own: none inherits threads or memory, and vLLM forks before gRPC runs.
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                arguments = (options, Path(scratch), Path(scratch, part), Path(shared, part))
                measured = process.submit(_in_child, part, *arguments).result()
            ratios |= measured.pop("ratios", {})
            details[part] = measured
    bounds = [each["over_bound"] for name, each in details.items() if name.startswith("throughput")]
    if bounds:
        ratios["tokens_with_updates_over_bound"] = min(bounds)
    return {"ratios": ratios, **details}


def _in_child(part: str, *arguments: Any) -> dict[str, Any]:  # noqa: ANN401 - those of every measure
    configure_logging("bench", "warning")
    return MEASURES[part](*arguments)


def _dense(options: argparse.Namespace, _: Path, directory: Path, shared: Path) -> dict[str, Any]:
    from benchmarks.weights.transfers import measure_dense  # noqa: PLC0415 - torch and gRPC only for what is measured

    return dict(asyncio.run(measure_dense(directory, shared, elements=options.elements, rounds=options.rounds)))


def _delta(options: argparse.Namespace, scratch: Path, *_: Path) -> dict[str, Any]:
    from benchmarks.weights.deltas import measure_deltas  # noqa: PLC0415
    from benchmarks.weights.stack import model_200m  # noqa: PLC0415

    threads = len(os.sched_getaffinity(0))
    found: dict[str, Any] = {}
    ratios: dict[str, float] = {}
    for lr in options.lr:
        name = f"{lr:.0e}".replace("e-0", "e_").replace("e-", "e_")
        sizes = measure_deltas(
            model_200m(scratch / "model"), lr, steps=options.steps, measured=options.measured, threads=threads
        )
        found[name] = {kind: each.summary() for kind, each in sizes.items()}
        for kind, summary in found[name].items():
            print(f"learning rate {lr:g}, {kind}: {summary}", flush=True)
        ratios[f"delta_reduction_lr_{name}"] = found[name]["inner"]["dense_over_sent"]
        ratios[f"delta_over_entropy_bound_lr_{name}"] = found[name]["inner"]["sent_over_bound"]
    worst = max(kinds["all"]["worst_tensor_over_dense"] for kinds in found.values())
    return {"ratios": ratios | {"worst_tensor_over_dense": worst}, "by_learning_rate": found}


def _pause(_: argparse.Namespace, scratch: Path, __: Path, shared: Path) -> dict[str, Any]:
    from benchmarks.weights.stack import model_200m  # noqa: PLC0415
    from benchmarks.weights.updates import measure_pauses  # noqa: PLC0415

    measured = asyncio.run(measure_pauses(model_200m(scratch / "model"), shared, updates=5, concurrency=16))
    print(measured, flush=True)
    return dict(measured)


def _throughput_2m(_: argparse.Namespace, scratch: Path, directory: Path, shared: Path) -> dict[str, Any]:
    from benchmarks.children import MODEL_2M, make_model  # noqa: PLC0415

    return _throughput(make_model(scratch / "model-2m", MODEL_2M), directory, shared, concurrency=64)


def _throughput_200m(_: argparse.Namespace, scratch: Path, directory: Path, shared: Path) -> dict[str, Any]:
    from benchmarks.weights.stack import model_200m  # noqa: PLC0415

    return _throughput(model_200m(scratch / "model"), directory, shared, concurrency=16)


def _throughput(model: Path, directory: Path, shared: Path, concurrency: int) -> dict[str, Any]:
    from benchmarks.weights.updates import measure_throughput  # noqa: PLC0415

    found = asyncio.run(
        measure_throughput(model, directory, shared, concurrency=concurrency, interval_s=2.0, updates=4, rounds=3)
    )
    print(f"{model.name}: {found}", flush=True)
    return dict(found)


def _fanout(options: argparse.Namespace, _: Path, directory: Path, shared: Path) -> dict[str, Any]:
    from benchmarks.weights.transfers import measure_fanout  # noqa: PLC0415

    measure = measure_fanout(directory, shared, elements=options.fanout_elements, counts=(1, 4, 16), rounds=3)
    return dict(asyncio.run(measure))


MEASURES: dict[str, Callable[[argparse.Namespace, Path, Path, Path], dict[str, Any]]] = {
    "dense": _dense,
    "delta": _delta,
    "pause": _pause,
    "throughput_2m": _throughput_2m,
    "throughput_200m": _throughput_200m,
    "fanout": _fanout,
}
