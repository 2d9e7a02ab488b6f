"""Sides with the same model that take turns, and what they measured."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.trainer_sides.contest import Side, contestant
from benchmarks.trainer_sides.hyper import BATCH

__all__ = ["BENCH_PACKAGES", "Measured", "side_of", "take_turns"]

BENCH_PACKAGES = Path(__file__).parents[2] / ".venv-bench"
"""Where `make install-bench` puts what only benchmarks compare with."""


@dataclass(slots=True)
class Measured:
    """What one side did in its counted updates.

    Attributes:
        first_loss: Loss of the first update, before which all sides have the same weights.
        seconds: Of each counted update.
        cpu_seconds: Of all its threads, likewise; other work on the machine hardly changes them.
        last: All that the last answer said.
    """

    first_loss: float
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)
    peak_bytes: int = 0

    def add(self, answer: dict[str, Any]) -> None:
        """Take in one update."""
        self.seconds.append(answer["seconds"])
        self.cpu_seconds.append(answer["cpu_seconds"])
        self.peak_bytes = max(self.peak_bytes, answer["peak_bytes"])
        self.last = answer


def side_of(
    name: str,
    module: str,
    directory: Path,
    threads: int,
    *,
    size: int,
    batch: str = BATCH,
    processes: int = 1,
    extra: Sequence[str] = (),
) -> Side:
    """A module of this package as a side.

    Args:
        name: How it is called in the report.
        module: The module.
        directory: What `prepare` filled.
        threads: Compute threads of each of its processes.
        size: Sequences per forward pass; ours: tokens.
        batch: File of the batch in the directory.
        processes: How many torchrun starts; 1 needs none.
        extra: More words of its command line.
    """
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
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    command = [*launch, "-m", f"benchmarks.trainer_sides.{module}", "--model", str(directory / "model")]
    command += ["--batch", str(directory / batch), "--threads", str(threads), "--micro-batch", str(size), *extra]
    return Side(name, command, environment)


async def take_turns(sides: Sequence[Side], directory: Path, rounds: int) -> dict[str, Measured]:
    """One update of each side that does not count, then rounds of one update each.

    Args:
        sides: Who takes part; all are loaded at once, one computes.
        directory: Takes their logs.
        rounds: Counted updates of each side.
    """
    async with AsyncExitStack() as stack:
        started = [await stack.enter_async_context(contestant(side, directory)) for side in sides]
        found = {each.side.name: Measured((await each.update())["loss"]) for each in started}
        for number in range(rounds):
            for each in started:
                answer = await each.update()
                found[each.side.name].add(answer)
                print(f"round {number}, {each.side.name}: {answer}", flush=True)
    return found
