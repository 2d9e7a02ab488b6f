"""The contest of one update: ours in three forms, TRL and the plain loop, in turns."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.trainer_sides.contest import Side, contestant

__all__ = ["has_trl", "measure_update"]

BENCH_PACKAGES = Path(__file__).parents[2] / ".venv-bench"
"""Where `make install-bench` puts what only benchmarks compare with."""

MICRO_BATCHES = (1, 2, 4, 8)
"""Sequences per forward pass that TRL and the plain loop are tried with; the fastest takes part. More are slower on a CPU."""

MIB = 1 << 20

BATCH = "batch.safetensors"
NO_DEGENERATE = "no_degenerate.safetensors"


@dataclass(slots=True)
class Measured:
    """What one side did in its counted updates.

    Attributes:
        first_loss: Loss of the first update, before which all sides have the same weights.
        seconds: Of each counted update.
        last: All that the last answer said.
    """

    first_loss: float
    seconds: list[float] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)
    peak_bytes: int = 0

    def add(self, answer: dict[str, Any]) -> None:
        """Take in one update."""
        self.seconds.append(answer["seconds"])
        self.peak_bytes = max(self.peak_bytes, answer["peak_bytes"])
        self.last = answer


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
        _side("ours", "ours", directory, threads),
        _side("trl", "trl_grpo", directory, threads, size=sizes["trl"]),
        _side("plain", "plain", directory, threads, size=sizes["plain"]),
        _side("ours_without_skipping", "ours", directory, threads, batch=NO_DEGENERATE),
        _side("ours_packing_alone", "ours", directory, threads, batch=NO_DEGENERATE, extra=("--no-folding",)),
    )
    found = await _contest(sides, directory, rounds)
    return _report(found, sizes)


def _side(
    name: str,
    module: str,
    directory: Path,
    threads: int,
    *,
    size: int = 0,
    batch: str = BATCH,
    extra: Sequence[str] = (),
) -> Side:
    paths = [str(BENCH_PACKAGES), os.environ.get("PYTHONPATH", "")] if module == "trl_grpo" else []
    environment = {
        # Threads that spin while they wait would slow the side whose turn it is.
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    if paths:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = ["-m", f"benchmarks.trainer_sides.{module}", "--model", str(directory / "model")]
    command += ["--batch", str(directory / batch), "--threads", str(threads), "--micro-batch", str(size), *extra]
    return Side(name, command, environment)


async def _fastest(module: str, directory: Path, threads: int) -> int:
    """The micro-batch size with which one update takes least."""
    seconds: dict[int, float] = {}
    for size in MICRO_BATCHES:
        async with contestant(_side(f"{module}_{size}", module, directory, threads, size=size), directory) as side:
            seconds[size] = (await side.update())["seconds"]
        print(f"{module}, {size} sequences per forward pass: {seconds[size]:.2f} s", flush=True)
    return min(seconds, key=seconds.__getitem__)


async def _contest(sides: Sequence[Side], directory: Path, rounds: int) -> dict[str, Measured]:
    async with AsyncExitStack() as stack:
        started = [await stack.enter_async_context(contestant(side, directory)) for side in sides]
        found = {each.side.name: Measured((await each.update())["loss"]) for each in started}
        for number in range(rounds):
            for each in started:
                answer = await each.update()
                found[each.side.name].add(answer)
                print(f"round {number}, {each.side.name}: {answer}", flush=True)
    return found


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
        "forward_tokens": {name: each.last["forward_tokens"] for name, each in found.items()},
        "peak_mib": {name: round(each.peak_bytes / MIB) for name, each in found.items()},
        "sequences_per_forward_pass": dict(sizes),
    }
