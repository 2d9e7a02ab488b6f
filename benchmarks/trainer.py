"""One GRPO update: ours, TRL's GRPOTrainer and a plain padded transformers loop on the same model and batch.

Each side is a process of its own with both cores; they take turns, and ratios are medians over rounds of neighbours in
time. Tokens are the batch's real ones, prompts included, padding not: the ratio of tokens/s is that of seconds. Beside
it: two data-parallel processes of one thread against one, and the fused log-probability against the naive one.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from sluice.config import ConfigError

__all__ = ["run"]


def run(argv: list[str]) -> Mapping[str, Any]:
    """Measure and print; returns what the JSON line holds.

    Raises:
        ConfigError: if TRL or, with `--gpu`, a CUDA device is not there.
    """
    options = _parser().parse_args(argv)
    if options.gpu:
        return _gpu(options)
    parts = options.only or list(PARTS)
    if "update" in parts:
        _require_trl()
    ratios: dict[str, float] = {}
    details: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as scratch:
        facts = _in_child(_prepare, options, Path(scratch))
        print(f"batch: {facts}", flush=True)
        for part in parts:
            measured = PARTS[part](options, Path(scratch))
            ratios |= measured.pop("ratios")
            details[part] = measured
    return {"ratios": ratios, "batch": facts, **details}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sluice bench trainer", description=__doc__)
    parser.add_argument(
        "--only", choices=tuple(PARTS), action="append", help="measure this part alone; may be repeated"
    )
    parser.add_argument("--rounds", type=int, default=3, help="updates of each side that count; one before does not")
    parser.add_argument("--groups", type=int, default=8, help="prompts of the batch, 8 samples each")
    parser.add_argument("--degenerate", type=float, default=0.25, help="share of groups whose rewards are all equal")
    parser.add_argument("--threads", type=int, default=2, help="compute threads of each side of the update")
    parser.add_argument(
        "--micro-batch", type=int, help="sequences per forward pass of TRL and the plain loop; likewise"
    )
    parser.add_argument("--token-budget", type=int, help="tokens per forward pass of ours; by default some are tried")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batch")
    parser.add_argument("--gpu", action="store_true", help="a 0.6 B-shaped model on one GPU instead of all else")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[4096, 16384, 65536], help="with --gpu: tokens per sequence"
    )
    parser.add_argument("--compile", action="store_true", help="with --gpu: compile the decoder layers")
    return parser


def _require_trl() -> None:
    from benchmarks.trainer_sides.update import has_trl  # noqa: PLC0415

    if not has_trl():
        raise ConfigError(
            "TRL is not installed: run `make install-bench`, or leave it out with `--only scaling --only fused`"
        )


def _prepare(options: argparse.Namespace, directory: Path) -> dict[str, float]:
    from benchmarks.trainer_sides.prepare import prepare  # noqa: PLC0415 - torch in the child alone
    from benchmarks.trainer_sides.workload import Workload  # noqa: PLC0415

    return prepare(directory, Workload(groups=options.groups, degenerate=options.degenerate), options.seed)


def _update(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    from benchmarks.trainer_sides.update import measure_update  # noqa: PLC0415

    measure = measure_update(
        directory,
        rounds=options.rounds,
        threads=options.threads,
        micro_batch=options.micro_batch,
        token_budget=options.token_budget,
    )
    return asyncio.run(measure)


def _scaling(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    from benchmarks.trainer_sides.scaling import measure_scaling  # noqa: PLC0415

    return asyncio.run(measure_scaling(directory, rounds=options.rounds))


def _fused(_: argparse.Namespace, __: Path) -> dict[str, Any]:
    from benchmarks.fused_logprob import measure_fused_logprob  # noqa: PLC0415

    measured = dict(measure_fused_logprob())
    ratios = {name: measured.pop(name) for name in list(measured) if name.endswith("_over_naive")}
    return {"ratios": ratios, **measured}


def _gpu(options: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.trainer_sides.gpu import measure_gpu  # noqa: PLC0415

    return measure_gpu(options.tokens, rounds=options.rounds, compiled=options.compile)


def _in_child(work: Callable[[argparse.Namespace, Path], dict[str, Any]], *arguments: Any) -> dict[str, Any]:  # noqa: ANN401
    """Run in a process of its own: this one keeps neither threads nor memory."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(work, *arguments).result()


PARTS: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
    "update": _update,
    "scaling": _scaling,
    "fused": _fused,
}
