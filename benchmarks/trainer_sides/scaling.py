"""The same update by two data-parallel processes of one thread against one."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.trainer_sides.turns import Measured, side_of, take_turns

__all__ = ["measure_scaling"]

BUDGET = 8192
"""Tokens per forward pass: the trainer's default."""


async def measure_scaling(directory: Path, *, rounds: int) -> dict[str, Any]:
    """Let one process, two copies of the model and two halves of one take turns.

    Args:
        directory: What `prepare` filled.
        rounds: Counted updates of each.
    """
    sides = (
        side_of("one", "ours", directory, 1, size=BUDGET),
        side_of("two_copies", "ours", directory, 1, size=BUDGET, processes=2, extra=("--replicate", "2")),
        side_of("two_shards", "ours", directory, 1, size=BUDGET, processes=2),
    )
    found = await take_turns(sides, directory, rounds)
    return {
        "ratios": {
            "scaling_2": _scaling(found["one"], found["two_copies"]),
            "scaling_2_sharded": _scaling(found["one"], found["two_shards"]),
        },
        "seconds": {name: round(median(each.seconds), 2) for name, each in found.items()},
        "first_loss": {name: each.first_loss for name, each in found.items()},
    }


def _scaling(one: Measured, two: Measured) -> float:
    return round(median(alone / both for alone, both in zip(one.seconds, two.seconds, strict=True)), 2)
