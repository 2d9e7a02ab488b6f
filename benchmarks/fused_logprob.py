"""Forward and backward pass of an output layer: fused, against full logits, log_softmax and autograd.

Both sides get the same states, weight and targets, and compute the gradients of states and weight. Every measurement runs in
a process of its own. It takes the peak of resident memory above what the inputs need, and the time of the second pass. The
sides take turns within each round; a ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from benchmarks.children import PeakMemory, in_child
from trainer_svc.engine.logprob import Entropy, fused_logprobs, logprobs_of_logits

RESULTS = ("log-probability", "entropy", "gradient of hidden", "gradient of weight")


@dataclass(frozen=True, slots=True)
class _Sizes:
    vocabulary: int
    tokens: int
    width: int
    entropy: Entropy
    cells: int
    threads: int


class _Inputs(NamedTuple):
    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    temperatures: torch.Tensor


def run(argv: list[str]) -> Mapping[str, Any]:
    """Measure and print; return the content of the JSON line."""
    parser = argparse.ArgumentParser(prog="sluice bench fused_logprob", description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=151_936, help="token ids; by default Qwen3's")
    parser.add_argument("--tokens", type=int, default=2048, help="loss tokens of a micro-batch")
    parser.add_argument("--width", type=int, default=1024, help="size of a hidden state")
    parser.add_argument(
        "--entropy",
        choices=("none", "measure", "train"),
        default="none",
        help="whether to compute the entropy: not, without, or with a gradient",
    )
    parser.add_argument("--cells", type=int, default=3 << 24, help="logits that may stay alive")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each side")
    parser.add_argument("--accuracy", action="store_true", help="compare with float64 instead, for 64 tokens")
    options = parser.parse_args(argv)
    if options.accuracy:
        return {"ratios": {}, "accuracy": measure_accuracy(options.vocabulary, width=options.width)}
    found = measure_fused_logprob(
        options.vocabulary,
        tokens=options.tokens,
        width=options.width,
        entropy=options.entropy,
        cells=options.cells,
        rounds=options.rounds,
    )
    return {"ratios": {name: found.pop(name) for name in list(found) if name.endswith("_over_naive")}, **found}


def measure_fused_logprob(
    vocabulary: int = 151_936,
    *,
    tokens: int = 2048,
    width: int = 1024,
    entropy: Entropy = "none",
    cells: int = 3 << 24,
    rounds: int = 3,
    threads: int | None = None,
) -> dict[str, Any]:
    """Peak memory and time of the fused layer over those of plain autograd.

    Args:
        vocabulary: Token ids; by default Qwen3's.
        tokens: Loss tokens of the micro-batch.
        width: Size of a hidden state; 1,024 is that of a model of 0.6 B parameters.
        entropy: What is wanted of the entropy; plain autograd computes it from its log-probabilities.
        cells: Logits that the fused layer may keep alive; the trainer's default.
        rounds: Measurements of each side.
        threads: Compute threads of each side; None: as many as cores.
    """
    sizes = _Sizes(vocabulary, tokens, width, entropy, cells, threads or len(os.sched_getaffinity(0)))
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in SIDES}
    for number in range(1, rounds + 1):
        for name, measurements in found.items():
            measurements.append(in_child(_measure, name, sizes))
        line = "  ".join(f"{name} {each[-1][0] / 1e6:.0f} MB {each[-1][1]:.2f} s" for name, each in found.items())
        print(f"fused log-probability, round {number}: {line}", flush=True)
    memory, seconds = (
        statistics.median(
            ours[which] / plain[which] for ours, plain in zip(found["fused"], found["naive"], strict=True)
        )
        for which in (0, 1)
    )
    return {
        "fused_logprob_peak_memory_over_naive": round(memory, 3),
        "fused_logprob_time_over_naive": round(seconds, 3),
        "sizes": asdict(sizes),
        "peak_mb": {name: [round(peak / 1e6) for peak, _ in each] for name, each in found.items()},
        "seconds": {name: [round(time_s, 2) for _, time_s in each] for name, each in found.items()},
    }


def measure_accuracy(vocabulary: int = 151_936, *, tokens: int = 64, width: int = 1024) -> dict[str, dict[str, float]]:
    """Largest differences from float64, by precision of the inputs and way; gradients relative to their largest element."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(tokens, width), torch.randn(vocabulary, width) * 3 * width**-0.5
    targets, temperatures = torch.randint(vocabulary, (tokens,)), torch.rand(tokens) + 0.5
    arriving = torch.randn(2, tokens)
    sizes = _Sizes(vocabulary, tokens, width, "train", 3 << 24, 0)

    def results(side: str, dtype: torch.dtype, through: torch.dtype) -> list[torch.Tensor]:
        learning = [each.to(through).to(dtype).requires_grad_() for each in (hidden, weight)]
        logprobs, spread = SIDES[side](_Inputs(learning[0], learning[1], targets, temperatures), sizes)
        assert spread is not None  # noqa: S101 - it was asked for
        values = torch.stack([logprobs, spread])
        gradients = torch.autograd.grad((values * arriving.to(values)).sum(), learning)
        return [*values.detach().double(), *(each.double() for each in gradients)]

    found: dict[str, dict[str, float]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        exact = results("naive", torch.float64, dtype)
        for side in SIDES:
            gaps = [
                float((ours - each).abs().max()) for ours, each in zip(results(side, dtype, dtype), exact, strict=True)
            ]
            gaps[2:] = (gap / float(each.abs().max()) for gap, each in zip(gaps[2:], exact[2:], strict=True))
            name = f"{str(dtype).removeprefix('torch.')} {side}"
            found[name] = {which: float(f"{gap:.2g}") for which, gap in zip(RESULTS, gaps, strict=True)}
            print(f"{name}: {found[name]}", flush=True)
    return found


def _measure(side: str, sizes: _Sizes) -> tuple[int, float]:
    """Peak bytes above the inputs over two passes, and seconds of the second."""
    torch.set_num_threads(sizes.threads)
    torch.manual_seed(0)
    inputs = _Inputs(
        hidden=torch.randn(sizes.tokens, sizes.width, requires_grad=True),
        weight=torch.empty(sizes.vocabulary, sizes.width).normal_(std=sizes.width**-0.5).requires_grad_(),
        targets=torch.randint(sizes.vocabulary, (sizes.tokens,)),
        temperatures=torch.full((sizes.tokens,), 0.9),
    )
    arriving = torch.randn(sizes.tokens)
    memory = PeakMemory()
    memory.restart()
    for _ in range(2):
        inputs.hidden.grad = inputs.weight.grad = None
        begun = time.perf_counter()
        (SIDES[side](inputs, sizes)[0] * arriving).sum().backward()
        seconds = time.perf_counter() - begun
    return memory.bytes, seconds


def _naive(inputs: _Inputs, sizes: _Sizes) -> tuple[torch.Tensor, torch.Tensor | None]:
    logits = inputs.hidden @ inputs.weight.t()
    return logprobs_of_logits(logits, inputs.targets, inputs.temperatures, entropy=sizes.entropy)


def _fused(inputs: _Inputs, sizes: _Sizes) -> tuple[torch.Tensor, torch.Tensor | None]:
    return fused_logprobs(*inputs, entropy=sizes.entropy, cells=sizes.cells)


SIDES = {"naive": _naive, "fused": _fused}
