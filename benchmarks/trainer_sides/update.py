"""The contest of one update: ours in three forms, TRL and the plain loop, in turns."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.trainer_sides.contest import contestant
from benchmarks.trainer_sides.hyper import NO_DEGENERATE
from benchmarks.trainer_sides.turns import BENCH_PACKAGES, Measured, side_of, take_turns

__all__ = ["has_trl", "measure_update"]

MICRO_BATCHES = (1, 2, 4, 8)
"""Sequences per forward pass that TRL and the plain loop are tried with; the fastest takes part. More are slower on a CPU."""

MIB = 1 << 20


def has_trl() -> bool:
    """Whether TRL can be imported by its side."""
    return (BENCH_PACKAGES / "trl").is_dir() or importlib.util.find_spec("trl") is not None


async def measure_update(directory: Path, *, rounds: int, threads: int, micro_batch: int | None) -> dict[str, Any]:
    """Let the sides take turns.

    Args:
        directory: What `prepare` filled.
        rounds: Counted updates of each side.
        threads: Compute threads of each side.
        micro_batch: Sequences per forward pass of TRL and the plain loop; None tries some.
    """
    sizes = {
        name: micro_batch or await _fastest(module, directory, threads)
        for name, module in (("trl", "trl_grpo"), ("plain", "plain"))
    }
    print(f"sequences per forward pass of the others: {sizes}", flush=True)
    sides = (
        side_of("ours", "ours", directory, threads),
        side_of("trl", "trl_grpo", directory, threads, size=sizes["trl"]),
        side_of("plain", "plain", directory, threads, size=sizes["plain"]),
        side_of("ours_without_skipping", "ours", directory, threads, batch=NO_DEGENERATE),
        side_of("ours_packing_alone", "ours", directory, threads, batch=NO_DEGENERATE, extra=("--no-folding",)),
    )
    found = await take_turns(sides, directory, rounds)
    return _report(found, sizes)


async def _fastest(module: str, directory: Path, threads: int) -> int:
    """The micro-batch size with which one update takes least."""
    seconds: dict[int, float] = {}
    for size in MICRO_BATCHES:
        async with contestant(side_of(f"{module}_{size}", module, directory, threads, size=size), directory) as side:
            seconds[size] = (await side.update())["seconds"]
        print(f"{module}, {size} sequences per forward pass: {seconds[size]:.2f} s", flush=True)
    return min(seconds, key=seconds.__getitem__)


def _report(found: Mapping[str, Measured], sizes: Mapping[str, int]) -> dict[str, Any]:
    ours = found["ours"]

    def faster(than: str, side: str = "ours") -> float:
        pairs = zip(found[than].seconds, found[side].seconds, strict=True)
        return round(median(theirs / own for theirs, own in pairs), 2)

    ratios = {
        "tokens_over_trl": faster("trl"),
        "tokens_over_plain": faster("plain"),
        "peak_memory_over_trl": round(ours.peak_bytes / found["trl"].peak_bytes, 3),
        "peak_memory_over_plain": round(ours.peak_bytes / found["plain"].peak_bytes, 3),
        "loss_difference_trl": abs(ours.first_loss - found["trl"].first_loss),
        "loss_difference_plain": abs(ours.first_loss - found["plain"].first_loss),
    }
    for form in ("without_skipping", "packing_alone"):
        for other in ("trl", "plain"):
            ratios[f"tokens_over_{other}_{form}"] = faster(other, f"ours_{form}")
    return {
        "ratios": ratios,
        "first_loss": {name: each.first_loss for name, each in found.items()},
        "seconds": {name: round(median(each.seconds), 2) for name, each in found.items()},
        "cpu_seconds": {name: round(median(each.cpu_seconds), 2) for name, each in found.items()},
        "forward_tokens": {name: each.last["forward_tokens"] for name, each in found.items()},
        "peak_mib": {name: round(each.peak_bytes / MIB) for name, each in found.items()},
        "sequences_per_forward_pass": dict(sizes),
    }
