"""The contest of one update: ours in three forms, TRL and the plain loop, in turns."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.trainer_sides.contest import Side, contestant
from benchmarks.trainer_sides.hyper import NO_DEGENERATE
from benchmarks.trainer_sides.turns import BENCH_PACKAGES, Measured, side_of, take_turns

__all__ = ["has_trl", "measure_update"]

SIZES = {"ours": (2048, 4096, 8192), "trl_grpo": (1, 2, 4, 8), "plain": (1, 2, 4, 8)}
"""What each side is tried with per forward pass: ours tokens, the others sequences. More are slower on a CPU, whose caches
they outgrow."""

NEARLY = 1.1
"""The smallest size takes part that needs at most this times the seconds of the fastest: more would cost memory for little."""

MIB = 1 << 20


def has_trl() -> bool:
    """Whether TRL can be imported by its side."""
    return (BENCH_PACKAGES / "trl").is_dir() or importlib.util.find_spec("trl") is not None


async def measure_update(
    directory: Path, *, rounds: int, threads: int, micro_batch: int | None, token_budget: int | None
) -> dict[str, Any]:
    """Let the sides take turns.

    Args:
        directory: What `prepare` filled.
        rounds: Counted updates of each side.
        threads: Compute threads of each side.
        micro_batch: Sequences per forward pass of TRL and the plain loop; None tries some.
        token_budget: Tokens per forward pass of ours; None tries some.
    """
    given = {"ours": token_budget, "trl_grpo": micro_batch, "plain": micro_batch}
    sizes = {module: size or await _chosen_size(module, directory, threads) for module, size in given.items()}
    print(f"per forward pass: {sizes}", flush=True)

    def side(name: str, module: str, **options: Any) -> Side:  # noqa: ANN401 - those of side_of
        return side_of(name, module, directory, threads, size=sizes[module], **options)

    sides = (
        side("ours", "ours"),
        side("trl", "trl_grpo"),
        side("plain", "plain"),
        side("ours_without_skipping", "ours", batch=NO_DEGENERATE),
        side("ours_packing_alone", "ours", batch=NO_DEGENERATE, extra=("--no-folding",)),
    )
    found = await take_turns(sides, directory, rounds)
    return _report(found, sizes)


async def _chosen_size(module: str, directory: Path, threads: int) -> int:
    """The smallest micro-batch size with which one update takes hardly more than with the best, up to the first that is slower."""
    seconds: dict[int, float] = {}
    for size in SIZES[module]:
        async with contestant(side_of(f"{module}_{size}", module, directory, threads, size=size), directory) as side:
            seconds[size] = (await side.update())["seconds"]
        print(f"{module}, {size} per forward pass: {seconds[size]:.2f} s", flush=True)
        if seconds[size] > NEARLY * min(seconds.values()):
            break  # with more of them there is more padding, and TRL's largest take minutes
    return min(size for size, each in seconds.items() if each <= NEARLY * min(seconds.values()))


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
        "per_forward_pass": dict(sizes),
    }
