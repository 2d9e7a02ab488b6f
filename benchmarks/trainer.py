"""One GRPO update: ours, TRL's GRPOTrainer and a plain padded transformers loop on the same model and batch.

Each side is a process of its own with both cores. The sides take turns, and ratios are medians over rounds of updates that
are neighbours in time. Tokens are the batch's real ones, prompts included and padding not, so the ratio of tokens/s is that
of seconds. Besides: two data-parallel processes of one thread against one, and the fused log-probability against the naive one.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Self

from benchmarks.children import BENCH_PACKAGES, in_child, log_tail, median_ratio
from benchmarks.trainer_workload import BATCH, NO_DEGENERATE, UPDATE, UPDATE_S, Workload, prepare
from sluice.config import ConfigError

SIZES = {"ours": (2048, 4096, 8192), "trl_grpo": (1, 2, 4, 8), "plain": (1, 2, 4, 8)}
"""Sizes of a forward pass that each side tries: ours tokens, the others sequences. Larger ones outgrow a CPU's caches."""

NEARLY = 1.1
"""The smallest size is chosen that takes at most this factor times the seconds of the fastest: larger sizes cost memory for little gain."""

SCALING_BUDGET = 8192
"""Tokens per forward pass of the sides that measure scaling: the trainer's default."""

START_S = 180.0
STOP_S = 20.0

MIB = 1 << 20


def run(argv: list[str]) -> Mapping[str, Any]:
    """Measure and print; return the content of the JSON line.

    Raises:
        ConfigError: if TRL is not installed.
    """
    options = _parser().parse_args(argv)
    parts = options.only or list(PARTS)
    if "update" in parts and not (BENCH_PACKAGES / "trl").is_dir() and importlib.util.find_spec("trl") is None:
        raise ConfigError(
            "TRL is not installed: run `make install-bench`, or leave it out with `--only scaling --only fused`"
        )
    ratios: dict[str, float] = {}
    details: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as scratch:
        workload = Workload(groups=options.groups, degenerate=options.degenerate)
        facts = in_child(prepare, Path(scratch), workload, options.seed)
        print(f"batch: {facts}", flush=True)
        for part in parts:
            measured = PARTS[part](options, Path(scratch))
            ratios |= measured.pop("ratios")
            details[part] = measured
    return {"ratios": ratios, "batch": facts, **details}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sluice bench trainer", description=__doc__)
    parser.add_argument("--only", choices=tuple(PARTS), action="append", help="measure only this part; may be repeated")
    parser.add_argument(
        "--rounds", type=int, default=3, help="counted updates of each side, after one that is not counted"
    )
    parser.add_argument("--groups", type=int, default=8, help="prompts of the batch, 8 samples each")
    parser.add_argument("--degenerate", type=float, default=0.25, help="share of groups whose rewards are all equal")
    parser.add_argument("--threads", type=int, default=2, help="compute threads of each side of the update")
    parser.add_argument(
        "--micro-batch", type=int, help="sequences per forward pass of TRL and the plain loop; default: try some"
    )
    parser.add_argument("--token-budget", type=int, help="tokens per forward pass of ours; default: try some")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batch")
    return parser


def _update(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Let ours in three forms, TRL and the plain loop take turns."""
    given = {"ours": options.token_budget, "trl_grpo": options.micro_batch, "plain": options.micro_batch}
    threads = options.threads
    sizes = {module: size or _chosen_size(module, directory, threads) for module, size in given.items()}
    print(f"per forward pass: {sizes}", flush=True)

    ours = _Side(name="ours", module="ours", threads=threads, size=sizes["ours"])
    sides = (
        ours,
        replace(ours, name="trl", module="trl_grpo", size=sizes["trl_grpo"]),
        replace(ours, name="plain", module="plain", size=sizes["plain"]),
        replace(ours, name="ours_without_skipping", batch=NO_DEGENERATE),
        replace(ours, name="ours_packing_alone", batch=NO_DEGENERATE, extra=("--no-folding",)),
    )
    found = _take_turns(sides, directory, options.rounds)
    return _report(found, sizes)


def _chosen_size(module: str, directory: Path, threads: int) -> int:
    """Return the smallest size with which an update takes hardly longer than with the best. Stop at the first slower size."""
    seconds: dict[int, float] = {}
    for size in SIZES[module]:
        side = _Side(name=f"{module}_{size}", module=module, threads=threads, size=size)
        with _SideProcess(side, directory) as started:
            seconds[size] = (started.update())["seconds"]
        print(f"{module}, {size} per forward pass: {seconds[size]:.2f} s", flush=True)
        if seconds[size] > NEARLY * min(seconds.values()):
            break  # larger sizes mean more padding, and TRL's largest take minutes
    return min(size for size, each in seconds.items() if each <= NEARLY * min(seconds.values()))


def _report(found: Mapping[str, _Measured], sizes: Mapping[str, int]) -> dict[str, Any]:
    ours = found["ours"]
    ratios = {
        "tokens_over_trl": median_ratio(found["trl"].seconds, ours.seconds),
        "tokens_over_plain": median_ratio(found["plain"].seconds, ours.seconds),
        "peak_memory_over_trl": round(ours.peak_bytes / found["trl"].peak_bytes, 3),
        "peak_memory_over_plain": round(ours.peak_bytes / found["plain"].peak_bytes, 3),
        "loss_difference_trl": abs(ours.first_loss - found["trl"].first_loss),
        "loss_difference_plain": abs(ours.first_loss - found["plain"].first_loss),
    }
    for form in ("without_skipping", "packing_alone"):
        for other in ("trl", "plain"):
            ratios[f"tokens_over_{other}_{form}"] = median_ratio(found[other].seconds, found[f"ours_{form}"].seconds)
    return {
        "ratios": ratios,
        "first_loss": {name: each.first_loss for name, each in found.items()},
        "seconds": {name: round(median(each.seconds), 2) for name, each in found.items()},
        "cpu_seconds": {name: round(median(each.cpu_seconds), 2) for name, each in found.items()},
        "forward_tokens": {name: each.forward_tokens for name, each in found.items()},
        "peak_mib": {name: round(each.peak_bytes / MIB) for name, each in found.items()},
        "per_forward_pass": dict(sizes),
    }


def _scaling(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Let one process, two copies of the model and two halves of one model take turns."""
    one = _Side(name="one", module="ours", threads=1, size=SCALING_BUDGET)
    sides = (
        one,
        replace(one, name="two_copies", processes=2, extra=("--replicate", "2")),
        replace(one, name="two_shards", processes=2),
    )
    found = _take_turns(sides, directory, options.rounds)
    return {
        "ratios": {
            "scaling_2": median_ratio(found["one"].seconds, found["two_copies"].seconds),
            "scaling_2_sharded": median_ratio(found["one"].seconds, found["two_shards"].seconds),
        },
        "seconds": {name: round(median(each.seconds), 2) for name, each in found.items()},
        "first_loss": {name: each.first_loss for name, each in found.items()},
    }


def _fused(_: argparse.Namespace, __: Path) -> dict[str, Any]:
    from benchmarks.fused_logprob import measure_fused_logprob  # noqa: PLC0415 - it needs the trainer

    return measure_fused_logprob()


PARTS: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
    "update": _update,
    "scaling": _scaling,
    "fused": _fused,
}


@dataclass(slots=True)
class _Measured:
    """The counted updates of one side. CPU seconds are of all its threads; other work on the machine hardly changes them."""

    first_loss: float
    """Loss of the first update, before which all sides have the same weights."""
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    forward_tokens: int = 0
    peak_bytes: int = 0

    def add(self, answer: dict[str, Any]) -> None:
        """Add one update."""
        self.seconds.append(answer["seconds"])
        self.cpu_seconds.append(answer["cpu_seconds"])
        self.forward_tokens = answer["forward_tokens"]
        self.peak_bytes = max(self.peak_bytes, answer["peak_bytes"])


def _take_turns(sides: Sequence[_Side], directory: Path, rounds: int) -> dict[str, _Measured]:
    """Run one update of each side that does not count, then rounds of one update each.

    All sides are loaded at once, and one computes at a time.
    """
    with ExitStack() as stack:
        started = [stack.enter_context(_SideProcess(side, directory)) for side in sides]
        found = {each.name: _Measured(each.update()["loss"]) for each in started}
        for number in range(rounds):
            for each in started:
                answer = each.update()
                found[each.name].add(answer)
                print(f"round {number}, {each.name}: {answer}", flush=True)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """How to start a side."""

    name: str
    module: str
    """The program: `benchmarks.trainer_<module>`."""
    threads: int
    """Compute threads of each of its processes."""
    size: int
    """Sequences per forward pass; ours: tokens."""
    batch: str = BATCH
    processes: int = 1
    """More than one process is started by torchrun."""
    extra: Sequence[str] = ()

    def command(self, directory: Path) -> list[str]:
        """Return the words after the interpreter."""
        command = ["-m", f"benchmarks.trainer_{self.module}", "--model", str(directory / "model")]
        command += ["--batch", str(directory / self.batch), "--threads", str(self.threads)]
        command += ["--micro-batch", str(self.size), *self.extra]
        if self.processes == 1:
            return command
        return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.processes}", *command]

    @property
    def environment(self) -> dict[str, str]:
        """Return its environment variables, on top of ours."""
        environment = {
            # Threads that spin while they wait would slow down the side that computes.
            "OMP_NUM_THREADS": str(self.threads),
            "OMP_WAIT_POLICY": "passive",
            "GOMP_SPINCOUNT": "0",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "TRL_EXPERIMENTAL_SILENCE": "1",
        }
        if self.module == "trl_grpo":
            paths = (str(BENCH_PACKAGES), os.environ.get("PYTHONPATH", ""))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return environment


class _SideProcess:
    """A side as a process. The block begins when the process has loaded; the end of the block ends the process."""

    def __init__(self, side: _Side, directory: Path) -> None:
        self.name, self._log = side.name, directory / f"{side.name}.log"
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(  # noqa: S603 - our own programs
                [sys.executable, *side.command(directory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=os.environ | side.environment,
                text=True,
            )

    def __enter__(self) -> Self:
        self._answer(START_S)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._process.communicate(timeout=STOP_S)  # closes its input: no more commands
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def update(self) -> dict[str, Any]:
        """Have it make one optimizer step, and return what it measured.

        Raises:
            RuntimeError: with the end of its log, if it ends or takes too long.
        """
        with contextlib.suppress(BrokenPipeError):
            print(UPDATE, file=self._process.stdin, flush=True)
        return self._answer(UPDATE_S)

    def _answer(self, deadline_s: float) -> dict[str, Any]:
        deadline = threading.Timer(deadline_s, self._process.kill)
        deadline.start()
        try:
            for line in self._process.stdout or ():
                if line.startswith("{"):  # other lines are printed by libraries
                    answer: dict[str, Any] = json.loads(line)
                    return answer
        finally:
            deadline.cancel()
        raise RuntimeError(f"{self.name} ended, or did not answer within {deadline_s:.0f} s:\n{log_tail(self._log)}")
